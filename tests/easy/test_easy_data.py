"""Datasets of a Python caller: what cannot be read says what to pass instead."""

import json

import pytest

from arealite import GRPOTrainer
from arealite.api.errors import DatasetError
from arealite.dataset.streamed import LazyRows
from arealite.easy.data import as_prompts, read_data
from arealite.easy.rewards import ASKED
from arealite.easy.supervised import _read_row

ROWS = [{"prompt": "1+1?", "answer": "2"}]


def test_rows_and_splits_are_read():
    assert read_data(tuple(ROWS), "train_dataset") == ROWS
    assert read_data({"test": [], "train": ROWS}, "train_dataset") == ROWS
    assert read_data("rows.jsonl", "train_dataset") == "rows.jsonl"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((row for row in ROWS), r"train_dataset is generator; .*: pass list\(…\) of it"),
        ({"prompt": ["1+1?"], "answer": ["2"]}, r"train_dataset is a dict of columns \(prompt, answer\): give a list"),
        ({"prompt": [[{"role": "user", "content": "1+1?"}]]}, "is a dict of columns"),
        ({"easy": ROWS, "hard": ROWS}, "train_dataset has the splits easy, hard: pass the one to use"),
        (["1+1?"], "a row of train_dataset is str, not a dict of columns"),
        ([], "train_dataset has no rows"),
        # Half of a surrogate pair, as a text that was cut in JavaScript has it: no tokenizer takes it.
        ([*ROWS, {"prompt": "\ud83d"}], "train_dataset: row 2 holds text that is not valid UTF-8"),
    ],
)
def test_other_data_is_refused_with_what_to_pass(data, message):
    with pytest.raises(DatasetError, match=message):
        read_data(data, "train_dataset")


def test_a_prompt_counts_and_not_the_conversation_beside_it():
    talk = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    (row,) = as_prompts([{"prompt": "1+1?", "messages": talk, "id": 3}], "train_dataset", {}, keeps_prompt=False)
    assert row == {"prompt": "1+1?", "id": 3}
    (row,) = as_prompts([{"prompt": talk[:1], "messages": talk}], "train_dataset", {}, keeps_prompt=False)
    assert row == {"messages": talk[:1]}


def test_columns_that_are_none_beside_another_layout_do_not_count():
    chat = [{"role": "user", "content": "1+1?"}]
    mixed = [{"prompt": None, "messages": chat}, {"prompt": "1+1?", "messages": None}]
    assert as_prompts(mixed, "train_dataset", {}, keeps_prompt=False) == [{"messages": chat}, {"prompt": "1+1?"}]
    answered = [*chat, {"role": "assistant", "content": "2"}]
    rows = [_read_row({"messages": answered, "prompt": None, "completion": None})]
    rows += [_read_row({"messages": None, "prompt": "1+1?", "completion": "2"})]
    assert rows[0]["messages"] == answered and "prompt" not in rows[0]
    assert "messages" not in rows[1] and rows[1]["completion"] == "2"
    with pytest.raises(DatasetError, match="its `prompt` is None"):
        as_prompts([{"prompt": None, "messages": None}], "train_dataset", {}, keeps_prompt=False)


@pytest.mark.parametrize(("name", "key"), [("train_dataset", "train_dataset"), ("eval_dataset", "valid_dataset")])
def test_rows_without_a_prompt_name_the_key_of_their_own_dataset(name, key):
    with pytest.raises(DatasetError, match=f"{name}, row 1: it has no `prompt` .* config={{'{key}': "):
        as_prompts([{"question": "1+1?"}], name, {}, keeps_prompt=False)
    with pytest.raises(DatasetError, match=rf"{name}, row 1: .*Set columns\.messages=talk, or rename that column"):
        as_prompts([{"talk": [{"role": "user", "content": "1+1?"}]}], name, {}, keeps_prompt=False)


@pytest.mark.parametrize("streaming", [True, False])
def test_streamed_rows_stay_on_disk_with_rewards_of_trl(model_path, tmp_path, streaming):
    def reward(completions, answer, **columns):
        return [1.0 for _ in completions]

    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{i}+1?", "answer": str(i + 1)}) + "\n" for i in range(16)))
    config = {"train_dataset": {"streaming": streaming}}
    rows = GRPOTrainer(model_path, reward, train_dataset=file, config=config).rows
    assert isinstance(rows, LazyRows) == streaming
    assert len(rows) == 16 and rows[3]["answer"] == "4"
    assert rows[3][ASKED] == rows[3].get("messages", rows[3].get("prompt"))
