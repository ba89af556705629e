"""The ledger: every episode once, written by its own thread, rewound to a checkpoint."""

import shutil
import sqlite3
import subprocess
import sys
import threading
import weakref

import pytest
import torch

from arealite.api.errors import AReaLiteError, CheckpointError
from arealite.core.episode import EpisodeId
from arealite.core.ledger import database, store
from arealite.core.ledger.rollouts import RolloutRow
from arealite.core.ledger.store import EpisodeRow, Ledger
from tests.core.conftest import Echo, make_batch, read_counts


def test_rows_are_replaced_not_repeated(tmp_path):
    ledger = Ledger(tmp_path / "run" / "run.sqlite")
    for state in ("running", "buffered", "trained"):
        ledger.record(EpisodeRow(1, state))
        ledger.commit()
    ledger.record(EpisodeRow(2, "failed", "ValueError: x"))
    ledger.event("start", "hello")
    ledger.close()
    assert read_counts(ledger.path) == {"trained": 1, "failed": 1}
    db = sqlite3.connect(ledger.path)
    assert db.execute("SELECT kind, text FROM events").fetchall() == [("start", "hello")]
    db.close()


def test_rewind_undoes_what_came_after_the_checkpoint(tmp_path):
    ledger = Ledger(tmp_path / "run.sqlite")
    for i in range(6):
        ledger.record(EpisodeRow(i, "trained", step=i // 2))
    ledger.record(EpisodeRow(10, "rejected", "x"))
    ledger.save_buffer(3, [(EpisodeId("stream", 7), make_batch(7))])
    # After the checkpoint.
    for i in range(6, 10):
        ledger.record(EpisodeRow(i, "trained", step=i // 2))
    ledger.record(EpisodeRow(11, "running"))
    ledger.flush()
    [(buffered_id, batch)] = ledger.rewind(step=3, has_ended=lambda i: i.number < 6 or i.number == 10)
    assert buffered_id == ("stream", 7) and torch.equal(batch["input_ids"], make_batch(7)["input_ids"])
    # 7 is noted as buffered by the executor.
    assert ledger.counts() == {"trained": 7, "rejected": 1}
    ledger.close()


def test_trajectories_whose_tensors_share_memory_are_buffered(tmp_path):
    ledger, batch = Ledger(tmp_path / "run.sqlite"), make_batch(7)
    batch["scores"] = batch["rewards"]
    batch["last_logprobs"] = batch["logprobs"].T[-1]
    ledger.save_buffer(3, [(EpisodeId("stream", 7), batch)])
    [(_, loaded)] = ledger.rewind(step=3, has_ended=lambda i: True)
    assert all(torch.equal(loaded[key], value) for key, value in batch.items())
    ledger.close()


def test_an_episode_that_is_too_large_for_sqlite_is_left_out_of_a_checkpoint(tmp_path, caplog):
    ledger = Ledger(tmp_path / "run.sqlite")
    # Instead of a gigabyte.
    ledger._run_now(lambda db: db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 20_000))
    large = EpisodeId("stream", 8)
    ledger.save_buffer(3, [(EpisodeId("stream", 7), make_batch(7)), (large, make_batch(8, length=1000))])
    assert "1 episodes are larger than SQLite can store" in caplog.text
    assert [episode_id.number for episode_id, _ in ledger.rewind(step=3, has_ended=lambda i: True)] == [7]
    ledger.close()


def test_a_path_that_cannot_be_written_is_an_error_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(AReaLiteError, match=r"cannot be written.*resume"):
        Ledger(tmp_path / "file" / "run.sqlite")


def test_an_error_of_the_writer_thread_reaches_this_call_and_all_later_ones(tmp_path):
    ledger = Ledger(tmp_path / "run.sqlite")
    ledger.save_buffer(3, [(EpisodeId("stream", 7), make_batch(7))])
    db = sqlite3.connect(ledger.path)
    with db:
        db.execute("UPDATE buffer SET tensors = x'00'")
    db.close()
    with pytest.raises(AReaLiteError, match=r"SafetensorError.*Resume the run"):
        ledger.rewind(step=3, has_ended=lambda i: False)
    for later in (ledger.commit, ledger.flush, ledger.counts, lambda: ledger.save_buffer(4, [])):
        with pytest.raises(AReaLiteError, match="SafetensorError"):
            later()
    ledger.close()


def test_a_transaction_that_fails_at_commit_is_an_error(tmp_path):
    ledger = Ledger(tmp_path / "run.sqlite")

    def violate(db):
        db.execute("PRAGMA foreign_keys=ON")
        db.execute("CREATE TABLE a(i INTEGER PRIMARY KEY)")
        db.execute("CREATE TABLE b(i REFERENCES a(i) DEFERRABLE INITIALLY DEFERRED)")
        # Noticed by COMMIT only.
        db.execute("INSERT INTO b VALUES (1)")

    with pytest.raises(AReaLiteError, match="IntegrityError"):
        ledger._run_now(violate)
    ledger.close()


def test_an_error_between_two_commits_reaches_the_next_one(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "_FLUSH_INTERVAL_S", 0.01)
    ledger = Ledger(tmp_path / "run.sqlite")
    ledger.record(EpisodeRow(1, "trained", step=object()))  # type: ignore[arg-type]
    ledger._thread.join(30)
    with pytest.raises(AReaLiteError, match="cannot be written"):
        ledger.flush()
    ledger.close()


def test_close_logs_an_error_that_was_not_raised_before(tmp_path, caplog):
    ledger = Ledger(tmp_path / "run.sqlite")
    ledger.record(EpisodeRow(1, "trained", step=object()))  # type: ignore[arg-type]
    ledger.close()
    assert "cannot be written" in caplog.text
    with pytest.raises(AReaLiteError, match="cannot be written"):
        ledger.flush()


def test_an_incomplete_checkpoint_does_not_replace_the_buffer_of_the_last_good_one(tmp_path):
    ledger = Ledger(tmp_path / "run.sqlite")
    ledger.save_buffer(2, [(EpisodeId("stream", 8), make_batch(8))])
    # Killed twice before the checkpoint at 4 was whole.
    for _ in range(2):
        ledger.save_buffer(4, [(EpisodeId("submitted", 20), make_batch(20))])
        assert [i.number for i, _ in ledger.rewind(2, has_ended=lambda i: i.number < 8)] == [8]
    ledger.close()


@pytest.mark.parametrize("content", [b"no database " * 500, None])
def test_a_damaged_file_is_named_as_such(tmp_path, content):
    path = tmp_path / "run.sqlite"
    ledger = Ledger(path)
    for i in range(1000):
        ledger.record(EpisodeRow(i, "trained", reason="x" * 100))
    ledger.flush()
    ledger.close()
    whole = path.read_bytes()
    path.write_bytes(content or whole[:4096] + bytes(len(whole) // 2))
    with pytest.raises(CheckpointError, match=r"damaged or foreign: move it .*goes on from its checkpoint"):
        Ledger(path).counts()


def _remove(path):
    path.unlink()


def _remove_companions(path):
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink()


def _remove_all(path):
    _remove(path)
    _remove_companions(path)


def _replace(path):
    path.rename(path.with_name("moved.sqlite"))
    path.write_bytes(b"another file")


@pytest.mark.parametrize("remove", [_remove, _remove_companions, _remove_all, _replace])
@pytest.mark.parametrize("is_last", [False, True])
def test_a_ledger_that_is_removed_is_written_again(tmp_path, capsys, remove, is_last):
    ledger = Ledger(tmp_path / "run.sqlite")
    for i in range(3):
        ledger.record(EpisodeRow(i, "trained", step=i))
        ledger.flush()
    remove(ledger.path)
    for i in () if is_last else (3, 4):
        ledger.record(EpisodeRow(i, "trained", step=i))
        ledger.flush()
    ledger.close()
    assert read_counts(ledger.path) == {"trained": 3 if is_last else 5}
    output = capsys.readouterr().out
    assert output.count("was removed while the run writes it: it is written again, with all episodes so far") == 1
    assert not [p.name for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_a_ledger_that_cannot_be_restored_begins_again_and_says_so(tmp_path, capsys):
    ledger = Ledger(tmp_path / "run.sqlite")
    # More than SQLite keeps in memory.
    for i in range(60):
        ledger.record(EpisodeRow(i, "failed", reason="x" * 100_000))
    ledger.flush()
    ledger._run_now(lambda db: db.execute("PRAGMA wal_checkpoint(TRUNCATE)").close())
    ledger.path.write_bytes(b"no database " * 5000)
    ledger.path.unlink()
    ledger.record(EpisodeRow(1000, "trained"))
    ledger.close()
    assert read_counts(ledger.path) == {"trained": 1}
    assert capsys.readouterr().out.count("was removed while the run writes it: a new one begins here (") == 1


def test_a_removed_run_directory_is_an_error(tmp_path):
    ledger = Ledger(tmp_path / "run" / "run.sqlite")
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(AReaLiteError, match="fix the folder's permissions"):
        ledger.flush()
    ledger.close()


@pytest.fixture
def lock_holder():
    """Return a function that locks a database in a process of its own; the process ends with the test."""
    script = (
        "import sqlite3, sys; db = sqlite3.connect(sys.argv[1], isolation_level=None); db.execute('BEGIN IMMEDIATE')"
    )
    started = []

    def lock(path):
        command = [sys.executable, "-c", f"{script}; print('locked', flush=True); sys.stdin.read()", str(path)]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout.readline() == "locked\n"
        return started[-1]

    yield lock
    for process in started:
        process.stdin.close()
        process.wait(timeout=20)
        process.stdout.close()


def test_a_locked_ledger_is_waited_for(tmp_path, capsys, monkeypatch, lock_holder):
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.01)
    ledger = Ledger(tmp_path / "run.sqlite")
    holder = lock_holder(ledger.path)
    monkeypatch.setattr(database, "show_message", lambda text: (print(text), holder.stdin.close()))
    ledger.record(EpisodeRow(1, "trained"))
    ledger.flush()
    ledger.close()
    assert read_counts(ledger.path) == {"trained": 1}
    assert f"is locked by process {holder.pid} (python" in capsys.readouterr().out


def test_a_ledger_that_stays_locked_names_the_process_that_holds_it(tmp_path, capsys, monkeypatch, lock_holder):
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.01)
    monkeypatch.setattr(database, "LOCK_TIMEOUT_S", 0.1)
    ledger = Ledger(tmp_path / "run.sqlite")
    holder = lock_holder(ledger.path)
    ledger.record(EpisodeRow(1, "trained"))
    with pytest.raises(AReaLiteError, match=rf"locked for 0 s by process {holder.pid} \(.*: end it") as caught:
        ledger.flush()
    assert "Free space" not in str(caught.value)
    ledger.close()


def test_a_disk_that_hangs_is_an_error_at_the_deadline(tmp_path, monkeypatch):
    ledger, release = Ledger(tmp_path / "run.sqlite"), threading.Event()
    monkeypatch.setattr(store, "_WRITE_TIMEOUT_S", 0.1)
    with pytest.raises(AReaLiteError, match="its disk hangs"):
        ledger._run_now(lambda db: release.wait(60) and None)
    release.set()
    ledger.close()


def test_a_closed_ledger_raises(tmp_path):
    ledger = Ledger(tmp_path / "run.sqlite")
    ledger.close()
    ledger.close()
    with pytest.raises(AReaLiteError, match="is closed"):
        ledger.flush()


class Panics:
    def decode(self, tokens):
        raise BaseException("a panic in Rust is no Exception")


class HalfCharacters:
    def decode(self, tokens):
        return chr(0xD800) * len(tokens)


@pytest.mark.parametrize("tokenizer, texts", [(object(), 0), (Panics(), 0), (HalfCharacters(), 16)])
def test_a_tokenizer_that_cannot_decode_loses_only_the_text(tmp_path, executors, caplog, tokenizer, texts):
    ledger = Ledger(tmp_path / "run.sqlite")
    executor, workflow = executors(batch_size=4, ledger=ledger), Echo()
    workflow.tokenizer = tokenizer
    data = [[{"x": i, "raises": KeyError("\ud800")} if i == 2 else {"x": i} for i in range(8)]]
    for version in range(2):
        executor.engine.version = version
        executor.set_version(version)
        executor.prepare_batch(data, workflow)
    executor.stop()
    assert read_counts(ledger.path)["trained"] == 8 and read_counts(ledger.path)["failed"] >= 1
    db = sqlite3.connect(ledger.path)
    assert db.execute("SELECT COUNT(*) FROM rollouts").fetchone()[0] == texts
    db.close()
    assert caplog.text.count("are not kept as text") == (0 if texts else 1)


def test_the_executor_records_every_episode(tmp_path, executors):
    ledger = Ledger(tmp_path / "run.sqlite")
    executor = executors(batch_size=4, ledger=ledger, max_head_offpolicyness=1)
    rows = [
        {"x": i, **({"reject": True} if i % 5 == 1 else {}), **({"raises": KeyError("k")} if i % 5 == 2 else {})}
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
    # 4 episodes of 2 samples in 5 steps.
    assert db.execute("SELECT COUNT(*) FROM rollouts").fetchone()[0] == 40
    reason = db.execute("SELECT reason FROM episodes WHERE state = 'failed'").fetchone()[0]
    assert reason == "KeyError: 'k'"
    db.close()


def test_direct_episodes_are_kept_with_their_text_beside_those_of_training(tmp_path, executors):
    ledger = Ledger(tmp_path / "run.sqlite")
    executor = executors(batch_size=4, ledger=ledger)
    rows = [{"x": i} for i in range(12)]
    rows[1]["reject"] = True
    rows[2]["raises"] = KeyError("k")
    executor.rollout_batch(rows, Echo())
    executor.prepare_batch([[{"x": i} for i in range(4)]], Echo())
    executor.stop()
    assert read_counts(ledger.path)["trained"] == executor.staleness.counts.trained == 4
    with sqlite3.connect(ledger.path) as db:
        states = dict(db.execute("SELECT state, COUNT(*) FROM episodes WHERE source = 'direct' GROUP BY state"))
        (num_texts,) = db.execute("SELECT COUNT(*) FROM rollouts WHERE source = 'direct'").fetchone()
    assert states == {"evaluated": 10, "rejected": 1, "failed": 1} and num_texts == 20


def test_a_second_evaluation_replaces_the_first_and_leaves_the_history_of_training(tmp_path, executors):
    for num_rows in (8, 4):
        executor = executors(batch_size=4, ledger=Ledger(tmp_path / "run.sqlite"))
        if num_rows == 8:
            executor.prepare_batch([[{"x": i} for i in range(4)]], Echo())
        executor.rollout_batch([{"x": i} for i in range(num_rows)], Echo())
        executor.stop()
    with sqlite3.connect(tmp_path / "run.sqlite") as db:
        counts = dict(db.execute("SELECT source, COUNT(*) FROM episodes GROUP BY source"))
    assert counts["direct"] == 4 and counts["stream"] >= 4


def test_an_older_state_is_not_written_after_a_newer_one(tmp_path, monkeypatch):
    ledger = Ledger(tmp_path / "run.sqlite")
    submit = ledger._submit

    def submit_late(work):
        monkeypatch.setattr(ledger, "_submit", submit)
        ledger.record(EpisodeRow(1, "failed"))
        # As the writer thread does when no job has come for a while.
        ledger._run_now(lambda db: ledger._take_pending().write(db))
        return submit(work)

    monkeypatch.setattr(ledger, "_submit", submit_late)
    ledger.record(EpisodeRow(1, "running"))
    ledger.commit()
    ledger.close()
    assert read_counts(ledger.path) == {"failed": 1}


def test_the_last_batch_is_not_kept_alive(tmp_path):
    ledger, batch = Ledger(tmp_path / "run.sqlite"), make_batch(1)
    is_freed = threading.Event()
    weakref.finalize(batch["input_ids"], is_freed.set)

    def rows(batch=batch):
        return [] if len(batch) else None

    ledger.commit(rows)
    del batch, rows
    assert is_freed.wait(30)
    ledger.close()


def test_rewind_removes_the_texts_of_later_steps(tmp_path):
    ledger = Ledger(tmp_path / "run.sqlite")
    for step in range(4):
        # Buffered at the checkpoint, or ended before it.
        ledger.record(EpisodeRow(step, "trained", step=step))
        for source in ("stream", "direct"):
            ledger.commit(lambda s=step, o=source: [RolloutRow(s, 0, s, 0.0, 0, 0, 4, "p", "c", source=o)])
    ledger.save_buffer(2, [(EpisodeId("stream", i), make_batch(i)) for i in (2, 3)])
    ledger.rewind(2, has_ended=lambda i: True)
    kept = ledger._run_now(lambda db: db.execute("SELECT source, step FROM rollouts ORDER BY 1, 2").fetchall())
    ledger.close()
    assert kept == [*(("direct", step) for step in range(4)), ("stream", 0), ("stream", 1)]
