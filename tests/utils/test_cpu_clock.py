import threading
import time

from arealite.utils.process import SHARED_GPU_ENV
from arealite.utils.trace.cpu_clock import CpuClock


def burn(seconds):
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        pass


def test_seconds_of_the_thread_that_runs_episodes_are_counted_apart():
    clock, stop = CpuClock(), threading.Event()
    burnt = threading.Event()

    def episodes():
        burn(0.1)
        burnt.set()
        stop.wait(30)

    threads = [threading.Thread(target=episodes, name="rollout"), threading.Thread(target=burn, args=(0.05,))]
    for thread in threads:
        thread.start()
    try:
        assert burnt.wait(30)
        threads[1].join()
        burn(0.05)
        found = clock.take()
        assert found["cpu/rollout"] >= 0.1 and found["cpu/trainer"] >= 0.1 and found["cpu/cores"] >= 1
        assert clock.take()["cpu/rollout"] < 0.1, "since the last call"
    finally:
        stop.set()
        threads[0].join()


def test_a_launcher_says_that_a_server_has_the_same_gpu(monkeypatch):
    assert "gpu/shared" not in CpuClock().take()
    monkeypatch.setenv(SHARED_GPU_ENV, "1")
    assert CpuClock().take()["gpu/shared"] == 1
