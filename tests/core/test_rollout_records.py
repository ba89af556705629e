"""Rollouts in the ledger: tokens with what the trainer made of them, within a bound, and how they are read."""

import os
import sqlite3
import subprocess
import sys
import weakref
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from arealite.core.ledger.reading import (
    RolloutFilter,
    find_rollouts,
    open_ledger,
    read_ages,
    read_events,
    read_flow,
    read_group,
    read_rollout,
    read_same_prompt,
    read_servers,
)
from arealite.core.ledger.rollout_index import RolloutIndex
from arealite.core.ledger.rollouts import RolloutRecorder, RolloutRow
from arealite.core.ledger.store import Ledger, ServerSample
from arealite.core.ledger.token_record import TokenRecord, join_token_texts, token_bytes
from arealite.utils.data import concat_padded, select_rows
from tests.core.conftest import Echo, make_batch


class Letters:
    """A tokenizer whose tokens are characters."""

    def decode(self, tokens, skip_special_tokens=False):
        return "".join(map(chr, tokens))


def test_a_record_keeps_small_gaps_between_server_and_trainer():
    rng = np.random.default_rng(0)
    logprobs = -rng.exponential(5, 1000).astype(np.float32)
    train_logp = logprobs + rng.normal(0, 1e-3, 1000).astype(np.float32)
    train_logp[:10] = np.nan
    ids, mask, versions = np.arange(1000) * 150, np.arange(1000) % 2, np.full(1000, 7)
    record = TokenRecord(ids, mask, versions, logprobs, train_logp, np.full(1000, -0.5))
    read = TokenRecord.from_bytes(record.to_bytes())
    assert (read.ids == ids).all() and (read.loss_mask == mask).all() and (read.versions == 7).all()
    np.testing.assert_allclose(read.logprobs, logprobs, rtol=1e-3)
    assert read.train_logp is not None and read.advantages is not None and np.isnan(read.train_logp[:10]).all()
    np.testing.assert_allclose((read.train_logp - read.logprobs)[10:], (train_logp - logprobs)[10:], atol=3e-6)
    assert (read.advantages == -0.5).all()
    bare = TokenRecord.from_bytes(TokenRecord(ids, mask, versions, logprobs).to_bytes())
    assert bare.train_logp is None and bare.advantages is None


def test_characters_that_several_tokens_make_up_are_read_whole():
    class Bytes:
        def decode(self, tokens):
            return {0: "\ufffd", 1: "\ufffd", 2: " hi", 3: "\n", 4: "yes"}[tokens[0]]

        def convert_ids_to_tokens(self, token):
            return ("åħ", "¬", "Ġhi", "<0x0A>", "▁yes")[token]

    tokens = [token_bytes(Bytes(), token) for token in range(5)]
    assert join_token_texts(tokens) == ["", "公", " hi", "\n", " yes"]
    assert join_token_texts([token_bytes(None, 17), b"\x1b[31m"]) == ["17 ", "\\x1b[31m"]


def train(executor, workflow, rows, version, **columns):
    executor.engine.version = version
    batch = executor.prepare_batch([rows], workflow)
    for name, value in columns.items():
        batch[name] = torch.full(batch["input_ids"].shape, value)
    executor.accounts.record_trained()
    executor.engine.version = version + 1
    executor.set_version(version + 1)
    return batch


def test_what_the_trainer_adds_to_a_batch_is_in_the_records(tmp_path, executors):
    ledger, workflow = Ledger(tmp_path / "run.sqlite"), Echo()
    workflow.tokenizer = Letters()
    executor = executors(batch_size=2, ledger=ledger)
    rows = [{"x": ord("a")}, {"x": ord("b")}]
    for version in range(3):
        train(executor, workflow, rows, version, train_logp=-0.75, advantages=1.5)
    executor.stop()
    db = open_ledger(ledger.path)
    total, found = find_rollouts(db, sort="step", desc=False)
    assert total == 12 and [row["step"] for row in found] == [0] * 4 + [1] * 4 + [2] * 4
    assert found[0]["prompt"] == "a" and found[0]["completion"] == "aaa" and found[0]["tokens"] == 4
    detail = read_rollout(db, "stream", 2, 1)
    assert detail is not None and detail["step"] == 1 and detail["answer_tokens"] == 3 and detail["turns"] == 1
    columns = detail["token_columns"]
    assert columns["text"] == ["a"] * 4 and columns["trained"] == [0, 1, 1, 1] and columns["version"] == [-1, 1, 1, 1]
    assert columns["logp"] == [-0.5] * 4 and columns["prox_logp"] == [-0.75] * 4 and columns["advantage"] == [1.5] * 4
    assert detail["messages"] == [{"role": "prompt", "text": "a"}, {"role": "assistant", "text": "aaa"}]
    assert detail["same_prompt"] == 6 and len(read_group(db, "stream", 2)) == 2
    assert [row["step"] for row in read_same_prompt(db, "stream", 2, 1)] == [0, 0, 1, 1, 2, 2]
    assert read_rollout(db, "stream", 99, 0) is None
    db.close()


def test_of_several_ranks_the_share_of_this_one_is_kept(tmp_path, executors):
    ledger = Ledger(tmp_path / "run.sqlite")
    executor = executors(batch_size=4, ledger=ledger)
    batch = executor.prepare_batch([[{"x": i} for i in range(4)]], Echo())
    share = select_rows(batch, [2, 3, 6, 7])
    executor.accounts.rollouts.replace(share)
    share["advantages"] = torch.full(share["input_ids"].shape, 2.0)
    executor.stop()
    db = open_ledger(ledger.path)
    total, rows = find_rollouts(db, sort="episode", desc=False)
    assert total == 4 and [(row["episode"], row["sample"]) for row in rows] == [(1, 0), (1, 1), (3, 0), (3, 1)]
    detail = read_rollout(db, "stream", 3, 1)
    assert detail is not None and detail["token_columns"]["advantage"] == [2.0] * 4
    assert detail["token_columns"]["id"] == [3] * 4
    db.close()


def test_a_batch_that_is_never_trained_is_kept_too(tmp_path, executors):
    ledger = Ledger(tmp_path / "run.sqlite")
    executor = executors(batch_size=2, ledger=ledger)
    executor.prepare_batch([[{"x": 1}, {"x": 2}]], Echo())
    executor.stop()
    db = open_ledger(ledger.path)
    detail = read_rollout(db, "stream", 0, 0)
    assert detail is not None and detail["token_columns"]["prox_logp"] is None
    assert detail["token_columns"]["text"] == ["1 "] * 4
    db.close()


@pytest.mark.parametrize("limit, expected", [(0, 0), (3, 1), (8, 2), (31, 6), (32, 8)])
def test_tokens_are_bounded_by_whole_groups(tmp_path, executors, limit, expected):
    """Four groups of two samples of four tokens; of a group that does not fit at all, one sample is kept."""
    ledger = Ledger(tmp_path / "run.sqlite")
    executor = executors(batch_size=4, ledger=ledger, max_dump_tokens=limit)
    train(executor, Echo(), [{"x": i} for i in range(4)], 0)
    executor.stop()
    db = open_ledger(ledger.path)
    assert find_rollouts(db)[0] == expected
    db.close()


def test_ages_count_samples_and_tokens(tmp_path, executors):
    ledger = Ledger(tmp_path / "run.sqlite")
    executor = executors(batch_size=2, ledger=ledger, max_head_offpolicyness=2)
    executor.set_version(2)
    mixed = make_batch(1)
    mixed["versions"][:, 2:] = 2
    executor.prepare_batch([[{"x": 0, "returns": mixed}, {"x": 1, "version": 1}]], Echo())
    executor.stop()
    db = open_ledger(ledger.path)
    assert read_ages(db) == {"steps": [2], "ages": [0, 1, 2], "counts": [[0, 2, 2]]}
    rows = db.execute("SELECT age, tokens FROM ages ORDER BY age").fetchall()
    assert rows == [(0, 4), (1, 6), (2, 2)]
    flow = read_flow(db)
    assert flow["trained"][-1] == 2 and flow["admitted"][-1] >= 2 and flow["now"]["trained"] == 2
    db.close()


def test_rollouts_are_found_by_words_and_numbers(tmp_path):
    ledger = Ledger(tmp_path / "run.sqlite")
    texts = ['the quick "fox"', "a slow dog 100%", "das ist 公平的 Spiel"]

    def rows():
        for i, text in enumerate(texts):
            yield RolloutRow(i, 0, i, i / 2, 0, i, 10 * i, "What about animals?" if i < 2 else "other", text)

    ledger.commit(rows)
    # The same samples again, as after a recovery.
    ledger.commit(rows)
    ledger.close()
    db = open_ledger(ledger.path)

    def found(**where):
        total, rows = find_rollouts(db, RolloutFilter(**where), sort="episode", desc=False)
        assert total == len(rows)
        return [row["episode"] for row in rows]

    assert found() == [0, 1, 2] and find_rollouts(db, limit=1, offset=1)[0] == 3
    assert found(text="quick") == [0] and found(text="qui") == [0] and found(text='quick "fox') == [0]
    assert (
        found(text="animals") == [0, 1]
        and found(text="公平") == [2]
        and found(text="平公") == []
        and found(text="%") == [1]
    )
    assert found(text="nothing") == [] and found(text='" OR 1') == [] and found(min_reward=0.5) == [1, 2]
    assert found(max_tokens=10, step_from=1) == [1] and found(source="direct") == [] and found(state="trained") == []
    with pytest.raises(ValueError, match="cannot be sorted by 'x; DROP'"):
        find_rollouts(db, sort="x; DROP")
    (num_data,) = db.execute("SELECT COUNT(*) FROM rollout_data").fetchone()
    assert num_data == 3
    db.close()


def test_both_ways_to_find_words_agree(tmp_path):
    texts = ["apple pie", "an application", "苹果树", 'a "quoted" text', "100%"]
    ledger = Ledger(tmp_path / "run.sqlite")
    ledger.commit(lambda: [RolloutRow(i, 0, 0, 0.0, 0, 0, 2, f"p{i}", text) for i, text in enumerate(texts)])
    ledger.close()
    with closing(open_ledger(ledger.path)) as db:
        for text, expected in {"ap": 2, "a": 3, "苹": 1, "苹果": 1, "果树": 1, "ppl": 0, 'a "qu': 1, "%": 1}.items():
            where = RolloutFilter(text=text)
            index = RolloutIndex()
            first = index.find_first(db, where, "step", True, 100, budget_s=30.0)
            assert find_rollouts(db, where)[0] == index.find(db, where)[0] == expected, text
            assert first == (None, index.find(db, where)[1]), text
            assert index.find_first(db, where, "step", True, 100, 30.0)[0] == expected, "known after a whole search"


def test_the_first_rollouts_with_a_text_are_found_within_a_time(tmp_path):
    ledger = Ledger(tmp_path / "run.sqlite")
    ledger.commit(lambda: [RolloutRow(i, 0, i, -i, 0, 0, 2, "p", f"word {i}") for i in range(1000)])
    ledger.close()
    index = RolloutIndex()
    with closing(open_ledger(ledger.path)) as db:
        where = RolloutFilter(text="word", step_to=500)
        _, rows = index.find_first(db, where, "reward", False, 3, budget_s=30.0)
        assert [row["step"] for row in rows] == [500, 499, 498]
        assert index.find_first(db, where, "reward", False, 3, budget_s=-1.0) == (None, [])


def test_an_index_reads_more_rows_than_a_query_has_variables(tmp_path):
    ledger = Ledger(tmp_path / "run.sqlite")
    ledger.commit(lambda: [RolloutRow(i, 0, 0, 0.0, 0, 0, 2, "p", f"text {i}") for i in range(30)])
    ledger.close()
    with closing(open_ledger(ledger.path)) as db:
        db.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, 20)
        _, rows = RolloutIndex().find(db, RolloutFilter(), desc=False, limit=30)
    assert [row["completion"] for row in rows] == [f"text {i}" for i in range(30)]


@pytest.mark.parametrize("folder", [b"plain", b"not \xff UTF-8"])
def test_an_index_does_not_mix_two_runs_of_one_name(tmp_path, folder):
    path = tmp_path / os.fsdecode(folder) / "run.sqlite"
    index = RolloutIndex()
    for count, text in ((3, "first"), (5, "second")):
        ledger = Ledger(path)
        ledger.commit(lambda n=count, t=text: [RolloutRow(i, 0, 0, n, 0, 0, 2, "p", t) for i in range(n)])
        ledger.close()
        with closing(open_ledger(path)) as db:
            total, rows = index.find(db, RolloutFilter(text=text))
        assert total == count and {(row["completion"], row["reward"]) for row in rows} == {(text, count)}
        path.rename(path.with_name(text))


def test_a_ledger_without_a_log_is_read_while_it_is_written(tmp_path):
    path = tmp_path / "run.sqlite"
    with closing(sqlite3.connect(path)) as writer:
        writer.execute("PRAGMA journal_mode = DELETE")
        writer.execute("CREATE TABLE events (time, kind, text, step, level)")
        with closing(open_ledger(path)) as db:
            for time in (1, 2):
                with writer:
                    writer.execute("INSERT INTO events VALUES (?, 'a', 'b', 0, 'info')", (time,))
                assert len(read_events(db)) == time


def test_a_large_group_is_read_with_the_tokens_of_its_first_samples(tmp_path):
    ids = np.arange(10)
    record = TokenRecord(ids, ids > 4, np.where(ids > 4, 0, -1), np.zeros(10)).to_bytes()
    ledger = Ledger(tmp_path / "run.sqlite")
    ledger.commit(lambda: [RolloutRow(1, i, 0, 0.0, 0, 0, 10, "p", "c", record=record) for i in range(4)])
    ledger.close()
    with closing(open_ledger(ledger.path)) as db:
        for limit, expected in ((None, 4), (40, 4), (39, 3), (10, 1), (9, 0)):
            group = read_group(db, "stream", 1, limit)
            assert [row["token_columns"] is not None for row in group] == [True] * expected + [False] * (4 - expected)
            assert all(row["completion"] == "c" and row["tokens"] == 10 for row in group)


class Fails(Letters):
    """Cannot decode `!` within a text."""

    def decode(self, tokens, skip_special_tokens=False):
        if len(tokens) > 1 and ord("!") in tokens:
            raise ValueError("cannot decode")
        return super().decode(tokens)


@pytest.mark.parametrize("first", [None, "!"])
def test_texts_of_tokens_follow_once_they_can_be_decoded(tmp_path, first):
    """The first batch has no tokenizer, as one from a checkpoint, or its last row cannot be decoded."""
    ledger, recorder = Ledger(tmp_path / "run.sqlite"), RolloutRecorder(1000)
    for step, (letters, tokenizer) in enumerate([("a" + (first or "b"), first and Fails()), ("ab", Fails())]):
        batch = concat_padded([make_batch(ord(letter), n=1) for letter in letters])
        batch["group_ids"] = torch.tensor([2 * step, 2 * step + 1])
        recorder.give(batch, step, [SimpleNamespace(workflow=SimpleNamespace(tokenizer=tokenizer), result=None)])
        ledger.commit(recorder.take())
    ledger.close()
    with closing(open_ledger(ledger.path)) as db:
        detail = read_rollout(db, "stream", 2, 0)
    assert detail is not None and detail["token_columns"]["text"] == ["a"] * 4


def test_texts_of_tokens_follow_an_evaluation_that_could_not_be_decoded(tmp_path, executors):
    ledger, workflow = Ledger(tmp_path / "run.sqlite"), Echo()
    workflow.tokenizer = Fails()
    executor = executors(batch_size=2, ledger=ledger)
    for letters in ("a!", "ab"):
        executor.rollout_batch([{"x": ord(letter)} for letter in letters], workflow)
    executor.stop()
    with closing(open_ledger(ledger.path)) as db:
        detail = read_rollout(db, "direct", 2, 0)
    assert detail is not None and detail["token_columns"]["text"] == ["a"] * 4


def test_a_recorder_of_no_tokens_keeps_no_batch():
    recorder, batch = RolloutRecorder(0), make_batch(1)
    tensor = weakref.ref(batch["input_ids"])
    recorder.give(batch, 0)
    assert recorder.take() is None
    del batch
    assert tensor() is None


def test_messages_follow_the_chat_template(tmp_path):
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>tool\n4<|im_end|>\n"
    text += "<|im_start|>assistant\n"
    spans = [(text[:45], -1), ("Hello<|im_end|>", 3), ("\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n", -1)]
    spans[0] = (text[: text.index("Hello")], -1)
    spans.append(("four", 4))
    ids = np.array([ord(char) for part, _ in spans for char in part])
    versions = np.array([version for part, version in spans for _ in part])
    record = TokenRecord(ids, (versions >= 0).astype(int), versions, np.zeros(len(ids)))
    vocabulary = tuple((token, chr(token).encode()) for token in set(ids.tolist()))
    ledger = Ledger(tmp_path / "run.sqlite")
    row = RolloutRow(0, 0, 4, 1.0, 3, 4, len(ids), "p", "c", record=record.to_bytes(), vocabulary=vocabulary)
    ledger.commit(lambda: [row])
    ledger.close()
    db = open_ledger(ledger.path)
    detail = read_rollout(db, "stream", 0, 0)
    db.close()
    assert detail is not None and [(m["role"], m["text"]) for m in detail["messages"]] == [
        ("user", "Hi"), ("assistant", "Hello"), ("tool", "4"), ("assistant", "four"),
    ]  # fmt: skip


def test_servers_and_events_are_written_without_a_commit(tmp_path, monkeypatch):
    monkeypatch.setattr("arealite.core.ledger.store._FLUSH_INTERVAL_S", 0.01)
    ledger = Ledger(tmp_path / "run.sqlite")
    for i in range(3):
        ledger.sample([ServerSample(100.0 + i, "a:1", i, True, 5, 0, 0.5, 100 * i, 50 * i, 1000 * i, 0.25 * i)])
    ledger.sample([ServerSample(100.0, "b:1", 0, False)])
    ledger.event("alarm", "reward fell", 7, "alarm")
    ledger.close()
    db = open_ledger(ledger.path)
    first, second = read_servers(db)
    assert first["version"] == 2 and first["columns"]["tokens_per_s"] == [None, 1000.0, 1000.0]
    assert first["columns"]["prefix_hits"] == [None, 0.5, 0.5] and first["columns"]["busy"] == [None, 0.25, 0.25]
    assert second["columns"]["tokens_per_s"] == [None] and second["columns"]["running"] == [None]
    assert [s["columns"]["time"] for s in read_servers(db, start=101.5)] == [[102.0]]
    (event,) = read_events(db)
    assert event["kind"] == "alarm" and event["step"] == 7 and event["level"] == "alarm"
    assert read_events(db, since=event["time"]) == []
    db.close()


def test_reading_needs_no_torch():
    code = "import sys, arealite.core.ledger.reading; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
