"""Recover checkpoints that are written while training goes on."""

import threading

import pytest
import torch

from arealite.api.cli_args import RecoverConfig
from arealite.api.errors import CheckpointError
from arealite.api.io_struct import StepInfo
from arealite.engine.sft.lm_engine import FSDPLMEngine
from arealite.trainer import background
from arealite.trainer import recover as recover_module
from arealite.trainer.recover import Recover
from arealite.utils.rundir import RunDir, list_complete
from tests.engine.engine_testing import SPEC, Ranks, engine_config, random_batch

BATCH = random_batch([5, 12, 7, 9])


def info(step: int) -> StepInfo:
    return StepInfo(0, step, step, 100)


class Counter:
    def __init__(self):
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Gate:
    """Holds up the writer until it is opened; `failure` is raised instead of writing."""

    def __init__(self, monkeypatch):
        self.opened, self.reached, self.failure = threading.Event(), threading.Event(), None
        self.threads, real = [], recover_module.write_dcp

        def write(*args):
            self.threads.append(threading.current_thread())
            self.reached.set()
            assert self.opened.wait(60)
            if self.failure:
                raise self.failure
            real(*args)

        monkeypatch.setattr(recover_module, "write_dcp", write)


@pytest.fixture
def gate(monkeypatch):
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()


def make_engine(path):
    engine = FSDPLMEngine(engine_config(str(path)))
    engine.initialize(SPEC)
    return engine


def make(path, folder):
    parts = {"loader": Counter()}
    return Recover(RecoverConfig(mode="auto", freq_steps=1), RunDir(folder), {"actor": make_engine(path)}, parts)


def train(recover):
    recover.engines["actor"].train_lm(BATCH)
    recover.parts["loader"].at += 1


def weights(recover):
    return [p.detach().clone() for p in recover.engines["actor"].model.parameters()]


def test_a_checkpoint_holds_the_step_at_which_it_was_saved(model_path, tmp_path, gate):
    """Twice, because the second copy uses the memory of the first one."""
    recover = make(model_path, tmp_path)
    for step in range(2):
        gate.opened.clear()
        gate.reached.clear()
        train(recover)
        before = weights(recover)
        assert recover.maybe_save(info(step))
        assert gate.reached.wait(60)
        train(recover)
        assert not list_complete(tmp_path / "recover")[step:], "nothing is complete yet"
        gate.opened.set()
        recover.wait()
        assert threading.main_thread() not in gate.threads
        resumed = make(model_path, tmp_path)
        assert resumed.load() == info(step)
        assert resumed.parts["loader"].at == 2 * step + 1
        assert all(torch.equal(a, b) for a, b in zip(weights(resumed), before, strict=True))
        # The next step is that of a run without an interruption.
        if step == 0:
            train(resumed)
            assert all(torch.equal(a, b) for a, b in zip(weights(resumed), weights(recover), strict=True))


def test_one_checkpoint_is_written_at_a_time(model_path, tmp_path, gate):
    recover = make(model_path, tmp_path)
    recover.save(info(0))
    assert gate.reached.wait(60)
    second = threading.Thread(target=recover.save, args=(info(1),))
    second.start()
    assert len(gate.threads) == 1
    gate.opened.set()
    second.join(60)
    recover.wait()
    assert [path.name for path in list_complete(tmp_path / "recover")] == ["step000002", "step000001"]
    assert not gate.threads[0].is_alive() and len(gate.threads) == 2


def test_an_error_of_the_writer_is_raised_after_a_later_step_and_the_next_save_works(model_path, tmp_path, gate):
    recover = make(model_path, tmp_path)
    gate.opened.set()
    recover.save(info(0))
    recover.wait()
    gate.failure = OSError(28, "No space left on device")
    assert recover.maybe_save(info(1))
    while not recover._writer.is_done:
        gate.threads[-1].join(60)
    gate.failure = None
    with pytest.raises(CheckpointError, match=r"No space left.*earlier ones are untouched"):
        recover.maybe_save(info(2))
    recover.wait()
    assert [path.name for path in list_complete(tmp_path / "recover")] == ["step000003", "step000001"]


def test_a_write_that_hangs_is_the_only_one_until_it_ends(model_path, tmp_path, gate, monkeypatch):
    """A second one would replace the copies that the first is writing."""
    monkeypatch.setattr(background, "_WRITE_TIMEOUT_S", 0.01)
    recover = make(model_path, tmp_path)
    train(recover)
    recover.maybe_save(info(0))
    saved = weights(recover)
    assert gate.reached.wait(60)
    train(recover)
    with pytest.raises(CheckpointError, match="the disk hangs"):
        recover.maybe_save(info(1))
    assert len(gate.threads) == 1
    monkeypatch.setattr(background, "_WRITE_TIMEOUT_S", 60.0)
    gate.opened.set()
    recover.wait()
    other = make(model_path, tmp_path)
    assert other.load().global_step == 0
    assert all(torch.equal(a, b) for a, b in zip(weights(other), saved, strict=True))
    assert recover.maybe_save(info(2))
    recover.wait()


def test_without_memory_for_a_copy_training_waits(model_path, tmp_path, gate, monkeypatch, capfd):
    monkeypatch.setattr(background, "available_bytes", lambda: 1 << 20)
    recover = make(model_path, tmp_path)
    for step in range(2):
        recover.save(info(step))
        assert (tmp_path / "recover" / f"step00000{step + 1}").exists()
    assert not gate.threads
    assert capfd.readouterr().out.count("training waits while recover checkpoints are written") == 1


def test_a_rollback_waits_for_the_checkpoint_in_flight(model_path, tmp_path, gate):
    recover = make(model_path, tmp_path)
    before = weights(recover)
    recover.save(info(0))
    train(recover)
    threading.Timer(0.0, gate.opened.set).start()
    recover.restore_engines("step000001")
    assert all(torch.equal(a, b) for a, b in zip(weights(recover), before, strict=True))


def _save_and_train(rank, path, folder):
    recover = make(path, folder)
    train(recover)
    before = [p.full_tensor().clone() for p in recover.engines["actor"].model.parameters()]
    recover.save(info(0))
    # Collectives of training and of the writer at the same time.
    train(recover)
    recover.wait()
    assert recover.load() == info(0)
    after = [p.full_tensor() for p in recover.engines["actor"].model.parameters()]
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.slow
def test_ranks_train_while_they_write(model_path, tmp_path):
    ranks = Ranks(2)
    try:
        assert ranks.run(_save_and_train, str(model_path), str(tmp_path)) == [True, True]
    finally:
        ranks.close()
