"""Ctrl+C: what each signal does, and a real run under the launcher with a command that resumes."""

import io
import os
import shlex
import signal
import subprocess
import sys
import time

import pytest

from arealite.trainer.interrupt import Interrupt
from arealite.trainer.stats_logger import read_stats
from arealite.utils.process import RESUME_ENV
from arealite.utils.rundir import RunDir

TIMEOUT_S = 240.0


def start(folder, model, data, steps: int, mode: str) -> subprocess.Popen:
    settings = {"actor.path": model, "actor.dtype": "float32", "gconfig.max_new_tokens": 4, "gconfig.n_samples": 2}
    settings |= {"server.max_total_tokens": 8192, "actor.ppo_n_minibatches": 1}
    command = [sys.executable, "-m", "arealite.cli.main", f"cluster.fileroot={folder / 'runs'}", "trainer.type=grpo"]
    command += [f"mode={mode}"]
    command += [f"train_dataset.path={data}", "train_dataset.batch_size=2", f"total_train_steps={steps}"]
    command += ["total_train_epochs=1000", *(f"trainer.grpo.{key}={value}" for key, value in settings.items())]
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_steps(process: subprocess.Popen, run_dir: RunDir, count: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while len(read_stats(run_dir)) < count:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)


@pytest.fixture
def interrupt():
    """Installed for a run with a step, and removed after the test."""
    handler = Interrupt()
    handler.install(has_step=True)
    yield handler
    handler.remove()


class SavedAlready:
    """A recover checkpoint that is there."""

    def __init__(self, path):
        self.saved = path

    def path(self, info):
        return self.saved

    def wait(self):
        pass


def test_ctrl_c_during_the_evaluation_after_the_last_step_ends_at_once(interrupt):
    interrupt.stop_if_due(None, None, is_last=True)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_second_ctrl_c_says_that_nothing_is_saved(interrupt, capsys):
    signal.raise_signal(signal.SIGINT)
    assert "a checkpoint is saved after this step" in capsys.readouterr().out
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert "stopped without a new checkpoint" in capsys.readouterr().out


def test_sigterm_of_slurm_asks_for_a_checkpoint_and_never_for_an_end_at_once(monkeypatch, capsys):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    handler, before = Interrupt(), signal.getsignal(signal.SIGTERM)
    handler.install(has_step=True)
    try:
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
        assert handler.is_requested and capsys.readouterr().out.count("a checkpoint is saved") == 1
    finally:
        handler.remove()
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_run_of_python_says_which_call_resumes(interrupt, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv(RESUME_ENV, "SFTTrainer(…).train(resume_from_checkpoint=True)")
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        interrupt.stop_if_due(SavedAlready(tmp_path), None, is_last=False)
    assert "resume with: SFTTrainer(…).train(resume_from_checkpoint=True)" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["local", pytest.param("torchrun", marks=pytest.mark.soak)])
def test_ctrl_c_saves_a_checkpoint_and_prints_a_command_that_resumes(tmp_path, model_path, gsm8k_path, mode):
    run_dir = RunDir(tmp_path / "runs" / "arealite" / "grpo")
    process = start(tmp_path, model_path, gsm8k_path, steps=100_000, mode=mode)
    try:
        wait_for_steps(process, run_dir, 2)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    assert process.returncode == 130, out
    done = read_stats(run_dir)[-1]["step"] + 1
    assert (run_dir.recover / f"step{done:06d}" / "state.json").exists() and f"saved {run_dir.recover}" in out
    command = next(line for line in out.splitlines() if line.startswith("resume with: ")).removeprefix("resume with: ")
    again = [*shlex.split(command), f"total_train_steps={done + 1}"]
    resumed = subprocess.run(again, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert resumed.returncode == 0 and f"resuming after step {done}" in resumed.stdout, resumed.stdout + resumed.stderr
    assert [row["step"] for row in read_stats(run_dir) if row["step"] >= 0] == list(range(done + 1))


def test_ctrl_c_during_another_print_is_remembered(monkeypatch):
    class Busy(io.StringIO):
        def write(self, text):
            raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stdout>'>")

    interrupt = Interrupt()
    interrupt.install(has_step=True)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", Busy())
            signal.raise_signal(signal.SIGINT)
            assert interrupt.is_requested
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    finally:
        interrupt.remove()
