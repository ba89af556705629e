"""The ledger: every episode once, written off the hot path, rewound to a checkpoint."""

import sqlite3

import pytest
import torch

from arealite.api.errors import AReaLiteError
from arealite.core.ledger import EpisodeRow, Ledger, read_counts
from tests.core.conftest import Echo, make_batch


def test_rows_are_replaced_not_repeated(tmp_path):
    ledger = Ledger(tmp_path / "run" / "run.sqlite")
    for state in ("running", "buffered", "trained"):
        ledger.note(EpisodeRow(1, state))
        ledger.commit()
    ledger.note(EpisodeRow(2, "failed", "ValueError: x"))
    ledger.event("start", "hello")
    ledger.close()
    assert read_counts(ledger.path) == {"trained": 1, "failed": 1}
    db = sqlite3.connect(ledger.path)
    assert db.execute("SELECT kind, text FROM events").fetchall() == [("start", "hello")]
    db.close()


def test_rewind_gives_back_what_came_after_the_checkpoint(tmp_path):
    ledger = Ledger(tmp_path / "run.sqlite")
    for i in range(6):
        ledger.note(EpisodeRow(i, "trained", step=i // 2))
    ledger.note(EpisodeRow(10, "rejected", "x"))
    ledger.save_buffer(3, [(7, make_batch(7))])
    for i in range(6, 10):  # after the checkpoint
        ledger.note(EpisodeRow(i, "trained", step=i // 2))
    ledger.note(EpisodeRow(11, "running"))
    ledger.flush()
    [(buffered_id, batch)] = ledger.rewind(step=3, unfinished_from=6, finished=[10])
    assert buffered_id == 7 and torch.equal(batch["input_ids"], make_batch(7)["input_ids"])
    assert ledger.counts() == {
        "trained": 7,
        "rejected": 1,
    }  # 7 is noted as buffered by the executor
    ledger.close()


def test_a_path_that_cannot_be_written_is_told_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(AReaLiteError, match=r"cannot be written.*resume"):
        Ledger(tmp_path / "file" / "run.sqlite")


def test_the_executor_books_every_episode(tmp_path, executors):
    ledger = Ledger(tmp_path / "run.sqlite")
    executor = executors(batch_size=4, ledger=ledger, max_head_offpolicyness=1)
    rows = [
        {
            "x": i,
            **({"reject": True} if i % 5 == 1 else {}),
            **({"raises": KeyError("k")} if i % 5 == 2 else {}),
        }
        for i in range(40)
    ]
    data = [rows[i : i + 4] for i in range(0, 40, 4)]
    for version in range(5):
        executor.engine.version = version
        executor.prepare_batch(data, Echo())
        executor.engine.version = version + 1
        executor.set_version(version + 1)
    executor.stop()
    counts, booked = executor.staleness.counts, read_counts(tmp_path / "run.sqlite")
    assert booked["trained"] == counts.trained == 20
    for state in ("rejected", "failed", "buffered", "running"):
        assert booked.get(state, 0) == getattr(counts, state), state
    assert sum(booked.values()) == counts.admitted
    db = sqlite3.connect(tmp_path / "run.sqlite")
    assert (
        db.execute("SELECT COUNT(*) FROM rollouts").fetchone()[0] == 40
    )  # 4 episodes of 2 samples in 5 steps
    reason = db.execute("SELECT reason FROM episodes WHERE state = 'failed'").fetchone()[0]
    assert reason == "KeyError: 'k'"
    db.close()
