"""Preference pairs in all layouts: texts, whole dialogues, messages."""

import json
import re

import pytest

from arealite.api.cli_args import DatasetConfig
from arealite.api.errors import DatasetError
from arealite.dataset.preference import collate_pairs, get_preferences

USER = {"role": "user", "content": "hi"}
GOOD = {"role": "assistant", "content": "hello"}
BAD = {"role": "assistant", "content": "go"}


@pytest.fixture
def load(tmp_path, tokenizer):
    def load(*rows, loss="dpo", **kwargs):
        path = tmp_path / "pairs.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return get_preferences(DatasetConfig(path=str(path), **kwargs), tokenizer, loss=loss)

    return load


def texts(side, tokenizer):
    """The prompt and the trained part of one side."""
    start = side["loss_mask"].index(1)
    assert side["loss_mask"] == [0] * start + [1] * (len(side["input_ids"]) - start)
    return tokenizer.decode(side["input_ids"][:start]), tokenizer.decode(side["input_ids"][start:])


def test_texts_with_a_prompt(load, tokenizer):
    (pair,) = load({"prompt": "ab", "chosen": "c", "rejected": "de"})
    assert texts(pair["chosen"], tokenizer) == ("ab", "c<eos>")
    assert texts(pair["rejected"], tokenizer) == ("ab", "de<eos>")


def test_whole_dialogues_are_split_at_their_last_shared_turn(load, tokenizer):
    prompt = "\n\nHuman: hi\n\nAssistant: yes?\n\nHuman: more\n\nAssistant:"
    one, two = load(
        {"chosen": f"{prompt} good", "rejected": f"{prompt} go away\n\nHuman: no\n\nAssistant: so"},
        {"chosen": f"{prompt} a", "rejected": "\n\nHuman: hi\n\nAssistant: what?\n\nHuman: b\n\nAssistant: c"},
    )
    assert texts(one["chosen"], tokenizer) == (prompt, " good<eos>")
    assert texts(one["rejected"], tokenizer) == (prompt, " go away\n\nHuman: no\n\nAssistant: so<eos>")
    assert texts(two["chosen"], tokenizer)[0] == "\n\nHuman: hi\n\nAssistant:"


def test_whole_texts_are_pairs_for_reward_models_only(load, tokenizer):
    row = {"chosen": "ab c", "rejected": "ab d"}
    (pair,) = load(row, loss="rw")
    assert [texts(pair[side], tokenizer) for side in ("chosen", "rejected")] == [("", "ab c<eos>"), ("", "ab d<eos>")]
    assert load({**row, "prompt": None}, loss="rw") == [pair]
    for loss in ("dpo", "kto"):
        with pytest.raises(DatasetError, match=r"row 1: there is no `prompt`, and .*: add the column `prompt`"):
            load(row, loss=loss)
    # Dialogues are split as for DPO.
    dialogue = {"chosen": "\n\nHuman: hi\n\nAssistant: a", "rejected": "\n\nHuman: hi\n\nAssistant: b"}
    assert load(dialogue, loss="rw") == load(dialogue)


def test_messages_without_a_prompt_are_split_where_they_differ(load, tokenizer):
    before = [USER, GOOD, {"role": "user", "content": "more"}]
    for loss in ("dpo", "kto", "rw"):
        (pair,) = load({"chosen": [*before, GOOD], "rejected": [*before, BAD]}, loss=loss)
        prompt = "<user>hi\n<assistant>hello\n<user>more\n<assistant>"
        assert texts(pair["chosen"], tokenizer) == (prompt, "hello\n<eos>")
        assert texts(pair["rejected"], tokenizer) == (prompt, "go\n<eos>")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": "hi", "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": [USER], "chosen": "hello", "rejected": "go"},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "hi", "chosen": [USER, GOOD], "rejected": [USER, BAD], "score": 1},
    ],
)
def test_messages_go_through_the_chat_template(load, tokenizer, row):
    (pair,) = load(row)
    assert texts(pair["chosen"], tokenizer) == ("<user>hi\n<assistant>", "hello\n<eos>")
    assert texts(pair["rejected"], tokenizer) == ("<user>hi\n<assistant>", "go\n<eos>")
    assert collate_pairs([pair], tokenizer)["is_chosen"].tolist() == [1, 0]


def test_the_end_token_of_a_template_is_not_doubled(load, tokenizer, monkeypatch):
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>\n{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", template + "{% if add_generation_prompt %}<assistant>{% endif %}")
    (pair,) = load({"chosen": [USER, GOOD], "rejected": [USER, BAD]})
    assert texts(pair["chosen"], tokenizer) == ("<user>hi<eos>\n<assistant>", "hello<eos>")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": "a"}, "row 2: .* it lacks rejected and has"),
        ({"chosen": "a", "rejected": "b"}, "row 2: there is no `prompt`.*add the column `prompt`"),
        (
            {"prompt": "a", "chosen": "b", "rejected": 3},
            "row 2: `rejected` must be text or a list of messages, not int",
        ),
        ({"prompt": 1, "chosen": "b", "rejected": "c"}, "row 2: `prompt` must be text"),
        ({"chosen": [USER, GOOD], "rejected": None}, "row 2: `rejected` must be text or a list of messages"),
        ({"chosen": [USER, GOOD], "rejected": []}, "row 2: `rejected` must be text or a list of messages"),
        (
            {"chosen": [USER, {"role": "assistant"}], "rejected": [USER, BAD]},
            "row 2: `chosen` has a message that is not",
        ),
        ({"chosen": [USER, "x"], "rejected": [USER, BAD]}, "row 2: `chosen` has a message that is not"),
        ({"chosen": [USER, GOOD], "rejected": [BAD, USER]}, "row 2: .* must be the same messages up to an answer"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "row 2: .* there is no `prompt`"),
    ],
)
def test_malformed_rows_are_one_line(load, row, message):
    with pytest.raises(DatasetError, match=message) as info:
        load({"prompt": "a", "chosen": "b", "rejected": "c"}, row)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "ab", "completion": "c"}, ("ab", "c<eos>")),
        ({"prompt": [USER], "completion": [GOOD]}, ("<user>hi\n<assistant>", "hello\n<eos>")),
        ({"prompt": "hi", "completion": [GOOD]}, ("<user>hi\n<assistant>", "hello\n<eos>")),
        ({"prompt": [USER], "completion": "hello"}, ("<user>hi\n<assistant>", "hello\n<eos>")),
    ],
)
def test_single_answers_with_a_label_are_one_side_of_a_pair(load, tokenizer, row, expected):
    labels = [True, False, 1, 0, "true", "False"]
    rows = load(*({**row, "label": label} for label in labels), loss="kto")
    assert [list(made) for made in rows] == [["chosen"], ["rejected"]] * 3
    assert {texts(side, tokenizer) for made in rows for side in made.values()} == {expected}
    batch = collate_pairs(rows, tokenizer)
    assert batch["pair_ids"].tolist() == [1, 2, 3, 4, 5, 6]
    assert batch["is_chosen"].tolist() == [1, 0, 1, 0, 1, 0]


def test_single_answers_and_pairs_may_be_in_one_batch(load, tokenizer):
    rows = load(
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": "a", "completion": "b", "label": False},
        {"prompt": "a", "completion": "b" * 20, "label": True},
        loss="kto", max_length=10,
    )  # fmt: skip
    batch = collate_pairs(rows, tokenizer)
    assert (batch["pair_ids"].tolist(), batch["is_chosen"].tolist()) == ([1, 1, 2], [1, 0, 0])


def test_a_table_of_pairs_and_single_answers_has_empty_columns(load):
    answer, pair = {"prompt": "a", "completion": "b", "label": False}, {"prompt": "a", "chosen": "b", "rejected": "c"}
    in_table = [dict.fromkeys([*answer, *pair]) | row for row in (answer, pair)]
    assert load(*in_table, loss="kto") == load(answer, pair, loss="kto")
    with pytest.raises(DatasetError, match=r"row 1: it has one answer with a `label`"):
        load(*in_table)


def test_columns_templates_and_system_prompts_apply_to_single_answers(load, tokenizer):
    columns = {"prompt": "q", "completion": "a", "label": "good"}
    (row,) = load({"q": "x", "a": "y", "good": True}, columns=columns, prompt_template="<{prompt}>", loss="kto")
    assert texts(row["chosen"], tokenizer) == ("<x>", "y<eos>")
    (row,) = load({"prompt": [USER], "completion": [BAD], "label": False}, system_prompt="S", loss="kto")
    assert texts(row["rejected"], tokenizer)[0] == "<system>S\n<user>hi\n<assistant>"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "completion": "b", "label": "good"}, r"`label` must be true .* not 'good'"),
        ({"prompt": "a", "completion": "b", "label": None}, r"`label` must be true .* not 'None'"),
        ({"prompt": "a", "completion": "b"}, "it lacks label and has prompt, completion"),
        ({"prompt": "a", "label": True}, "it lacks completion and has prompt, label"),
        ({"prompt": None, "completion": "b", "label": True}, "`prompt` must be text or a list of messages"),
        ({"prompt": "a", "completion": 3, "label": True}, "`completion` must be text or a list of messages, not int"),
        ({"prompt": [USER], "completion": [USER, GOOD], "label": True}, "`completion` begins with a message of 'user'"),
        ({"prompt": "a"}, "a pair needs the columns chosen and rejected"),
    ],
)
def test_malformed_single_answers_are_one_line(load, row, message):
    with pytest.raises(DatasetError, match=message) as info:
        load(row, loss="kto")
    assert "\n" not in str(info.value) and "row 1: " in str(info.value)


@pytest.mark.parametrize(("loss", "name"), [("dpo", "model.loss=dpo"), ("rw", "a reward model")])
def test_single_answers_are_refused_by_losses_of_pairs(load, loss, name):
    with pytest.raises(DatasetError, match=rf"one answer with a `label`, and {name} compares two: .*model\.loss=kto"):
        load({"prompt": "a", "completion": "b", "label": True}, loss=loss)
    # A label beside a pair is another column.
    assert len(load({"prompt": "a", "chosen": "b", "rejected": "c", "label": 3}, loss=loss)) == 1


def test_messages_need_a_chat_template(load, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(DatasetError, match=r"row 1: .* the tokenizer has no chat template"):
        load({"chosen": [USER, GOOD], "rejected": [USER, BAD]})


def test_a_template_that_rejects_messages_is_one_line(load, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DatasetError, match=r"row 1: the tokenizer's chat template rejects .* roles must alternate"):
        load({"chosen": [USER, GOOD], "rejected": [USER, BAD]})


def test_a_system_prompt_stands_before_texts_and_a_template_is_for_texts(load, tokenizer):
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    (pair,) = load(row, system_prompt="S", prompt_template="<{prompt}>")
    assert [texts(pair[side], tokenizer)[0] for side in ("chosen", "rejected")] == ["S\n\n<a>"] * 2
    (pair,) = load({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, system_prompt="S")
    assert texts(pair["chosen"], tokenizer)[0] == "<system>S\n<user>hi\n<assistant>"
    own = {"role": "system", "content": "own"}
    (pair,) = load({"chosen": [own, USER, GOOD], "rejected": [own, USER, BAD]}, system_prompt="S")
    assert texts(pair["chosen"], tokenizer)[0] == "<system>own\n<user>hi\n<assistant>"
    with pytest.raises(DatasetError, match=r"row 1: it is made of messages, and prompt_template is set"):
        load({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, prompt_template="<{prompt}>")


def test_long_pairs_are_left_out(load, capsys):
    short, long = {"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "a", "chosen": "b", "rejected": "c" * 20}
    assert len(load(short, long)) == 2 and not capsys.readouterr().out
    assert len(load(short, long, max_length=10)) == 1
    assert re.fullmatch(
        r"note: 1 of 2 rows of \S+ is longer than max_length=10 tokens and is left out\n", capsys.readouterr().out
    )
