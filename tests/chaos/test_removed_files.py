"""Files that disappear or cannot be written while a real job runs."""

import os
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from arealite.trainer.recover import find_damage
from arealite.utils.rundir import RunDir, list_complete
from tests.chaos.test_faults import job  # noqa: F401
from tests.chaos.within import PROGRAM, why_no_disk


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_removed_ledger_and_removed_shared_memory_lose_nothing(job):  # noqa: F811
    run = job(**{"total_train_steps": 8})
    run.wait_for_step(2)
    for name in ("run.sqlite", "run.sqlite-wal", "run.sqlite-shm"):
        (run.run_dir / name).unlink()
    segment = RunDir(run.run_dir).shared_weights
    segment.unlink()
    run.wait_for_step(5)
    segment.unlink()
    (run.run_dir / "run.sqlite").unlink()
    assert run.finish() == 0, run.tail()
    run.check()
    assert run.tail().count("run.sqlite was removed while the run writes it: it is written again") >= 2
    assert not segment.exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_newest_checkpoint_without_checksums_is_not_used(job):  # noqa: F811
    run = job(**{"total_train_steps": 7})
    run.until(lambda: len(list_complete(run.run_dir / "recover")) == 2, "two checkpoints")
    run.wait_for_step(5)
    newest, *_ = list_complete(run.run_dir / "recover")
    for file in newest.glob("sums-*"):
        file.unlink()
    stray = run.run_dir / "recover" / "step000099"
    stray.mkdir()
    (stray / "state.json").write_text("{}")
    run.send_signal("trainer")
    assert run.finish() == 0, run.tail()
    run.check()
    assert "step000099 is damaged (state.json has no checksum)" in run.tail()
    assert not find_damage(list_complete(run.run_dir / "recover")[0])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_with_more_episodes_in_flight_than_open_files(job):  # noqa: F811
    # Three batches are in flight.
    options = {"total_train_steps": 2, "train_dataset.batch_size": 120, "rollout.episode_timeout_s": 300}
    run = job(wrap=[*PROGRAM, "files=256"], **options)
    assert run.finish() == 0, run.tail()
    run.check()
    assert "Too many open files" not in run.tail()
    assert "the limit on open files is 256. Raise the hard limit" in run.tail()


# Enough for the ledger and the statistics of a step, not for a model.
LEFT_BYTES = 64 * 1024


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_checkpoints", [1, 2])
def test_a_disk_that_is_full_at_the_last_step(tmp_path, job, monkeypatch, num_checkpoints):  # noqa: F811
    """Room is made if there is an older recover checkpoint. Otherwise the error says where the model is."""
    (tmp_path / "runs").mkdir()
    if why_no_disk():
        pytest.skip(why_no_disk())
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    # Failures would fill the disk with their logs.
    monkeypatch.setenv("CHAOS_MISBEHAVE", "0")
    # The steps after the last recover checkpoint take seconds, in which the trainer is stopped.
    monkeypatch.setenv("CHAOS_DURATION_S", "1")
    num_steps, freq_steps = 8, 6 // num_checkpoints
    settings = {"total_train_steps": num_steps, "recover.freq_steps": freq_steps, "rollout.dump_rollouts": False}
    run = job(wrap=[*PROGRAM, f"disk={tmp_path / 'runs'}:8m"], **settings)
    run.until(lambda: os.path.ismount(f"/proc/{run.launcher.pid}/root{tmp_path}/runs"), "the small disk")
    # The disk as the job sees it, also after the job has ended.
    disk = os.open(f"/proc/{run.launcher.pid}/root{tmp_path}/runs", os.O_PATH)
    run.run_dir = Path(f"/proc/self/fd/{disk}/chaos/job")
    try:
        run.until(lambda: len(list_complete(run.run_dir / "recover")) == num_checkpoints, "checkpoints")
        pid = run.send_signal("trainer", signal.SIGSTOP)
        assert run.step() < num_steps
        usage = os.statvfs(f"/proc/self/fd/{disk}")
        Path(f"/proc/self/fd/{disk}/filler").write_bytes(bytes(usage.f_bavail * usage.f_bsize - LEFT_BYTES))
        os.kill(pid, signal.SIGCONT)
        code = run.finish()
        output = (tmp_path / "launcher.log").read_text()
        if num_checkpoints == 2:
            assert code == 0, run.tail()
            model = run.run_dir / "checkpoints" / f"step{num_steps:06d}"
        else:
            assert code == 2 and "Traceback" not in output, run.tail()
            (model,) = tmp_path.glob(f"arealite-model-*/step{num_steps:06d}")
            assert f"The trained model is in {model}: move it" in output, output
        assert load_file(model / "model.safetensors") and (model / "tokenizer.json").exists()
        assert not find_damage(list_complete(run.run_dir / "recover")[0])
    finally:
        os.close(disk)
