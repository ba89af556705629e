"""Faults injected into a real job; `python -m tests.chaos.run` does so for hours."""

import os
import random
import signal
import time

import pytest
import torch
from safetensors.torch import load_file

from tests.chaos.job import ChaosJob
from tests.chaos.within import PROGRAM, why_no_disk

# Parts that are stopped in soak tests only; shorter tests stop them in other ways.
STOPPED = ("server", "worker", "launcher")


@pytest.fixture
def job(tmp_path, model_path):
    jobs = []

    def start(**overrides):
        jobs.append(ChaosJob(tmp_path, model_path, **overrides))
        return jobs[-1]

    yield start
    for each in jobs:
        each.end()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_server_and_killed_trainer_lose_no_episode(job):
    run = job(total_train_steps=8)
    run.wait_for_step(2)
    run.send_signal("server")
    run.wait_for_step(4)
    run.send_signal("trainer")
    assert run.finish() == 0, run.tail()
    run.check()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_launcher_leaves_no_process_and_a_new_one_continues(job):
    run = job(total_train_steps=7)
    run.wait_for_step(3)
    run.send_signal("launcher")
    run.launcher.wait()
    run.until_gone()
    run.start()
    assert run.finish() == 0, run.tail()
    run.check()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_server_that_hangs_is_replaced_by_the_other(job):
    run = job(allocation_mode="embedded.d2+d1", total_train_steps=8)
    run.wait_for_step(2)
    pid = run.send_signal("server", signal.SIGSTOP)
    # More steps than the episodes before the fault are enough for.
    run.wait_for_step(6)
    os.kill(pid, signal.SIGCONT)
    assert run.finish() == 0, run.tail()
    run.check()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", ["trainer", *(pytest.param(p, marks=pytest.mark.soak) for p in STOPPED)])
def test_a_process_that_is_stopped_for_a_while(job, part):
    run = job(total_train_steps=8, **{"rollout.num_workers": int(part == "worker")})
    run.wait_for_step(2)
    pid = run.send_signal(part, signal.SIGSTOP)
    # Longer than the health check allows.
    time.sleep(6)
    os.kill(pid, signal.SIGCONT)
    assert run.finish() == 0, run.tail()
    run.check()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_stopped_watchdog_does_not_keep_a_run_from_ending(job):
    run = job(total_train_steps=4)
    run.wait_for_step(1)
    run.send_signal("watchdog", signal.SIGSTOP)
    assert run.finish() == 0, run.tail()
    run.check()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", ["trainer", *(pytest.param(p, marks=pytest.mark.soak) for p in STOPPED[:2])])
def test_a_launcher_ends_although_a_process_is_stopped(job, part):
    limits = {"launcher.stop_timeout_s": 2, "launcher.save_timeout_s": 10}
    run = job(**{"rollout.num_workers": int(part == "worker"), **limits})
    run.wait_for_step(1)
    run.send_signal(part, signal.SIGSTOP)
    run.send_signal("launcher", signal.SIGTERM)
    assert run.finish(60) == 128 + signal.SIGTERM, run.tail()
    run.until_gone()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_rank_of_two(job):
    run = job(allocation_mode="embedded.d1+d2", total_train_steps=6)
    run.wait_for_step(3)
    run.send_signal("trainer")
    assert run.finish() == 0, run.tail()
    run.check()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_servers_killed_at_once(job):
    run = job(allocation_mode="embedded.d2+d1", total_train_steps=6)
    run.wait_for_step(2)
    # Among them may be a process that a server has just forked, and that ends with it.
    for pid in run.pids("server"):
        run.signal_if_alive(pid, signal.SIGKILL)
    assert run.finish() == 0, run.tail()
    run.check()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_without_staleness_a_killed_run_ends_with_the_weights_of_one_never_killed(tmp_path, model_path, monkeypatch):
    monkeypatch.setenv("CHAOS_MISBEHAVE", "0")
    weights = []
    for name in ("calm", "killed"):
        (tmp_path / name).mkdir()
        options = {"rollout.max_head_offpolicyness": 0, "server.deterministic": "true"}
        options |= {"total_train_steps": 6, "saver.freq_steps": 6}
        run = ChaosJob(tmp_path / name, model_path, **options)
        try:
            if name == "killed":
                # One step after the last recover checkpoint.
                run.wait_for_step(3)
                run.send_signal("trainer")
            assert run.finish() == 0, run.tail()
            run.check()
        finally:
            run.end()
        (path,) = (run.run_dir / "checkpoints").glob("**/model.safetensors")
        weights.append(load_file(path))
    calm, killed = weights
    assert all(torch.equal(calm[key], killed[key]) for key in calm)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_full_disk_ends_the_run_with_one_message(tmp_path, job):
    (tmp_path / "runs").mkdir()
    if why_no_disk():
        pytest.skip(why_no_disk())
    wrap = [*PROGRAM, f"disk={tmp_path / 'runs'}:1500k"]
    run = job(wrap=wrap, **{"total_train_steps": 200, "recover.retries": 1})
    assert run.finish() in (1, 2)
    output = (tmp_path / "launcher.log").read_text()
    # by whichever of ledger, statistics and checkpoint fills it
    assert "No space left" in output or "disk is full" in output, output
    assert "Free space" in output and "Traceback" not in output, output
    run.until_gone()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_random_faults(job, seed):
    rng = random.Random(seed)
    run = job(total_train_steps=9)
    for _ in range(3):
        run.wait_for_step(min(7, run.step() + rng.randint(0, 2)))
        if run.launcher.poll() is None:
            run.send_signal(rng.choice(["server", "trainer"]))
    assert run.finish() == 0, run.tail()
    run.check()
