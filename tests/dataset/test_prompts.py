"""Rows for RL: chats and plain text, system prompts, worked examples, lengths."""

import json

import pytest

from arealite.api.cli_args import DatasetConfig
from arealite.api.dataset_args import DataSourceConfig
from arealite.api.errors import DatasetError
from arealite.dataset.chat import render
from arealite.dataset.prompts import AS_THEY_ARE, QUESTION, PromptFormat, PromptMaker, load_prompts

ASKED = {"prompt": "q", "answer": "a"}
CHAT = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def load(tmp_path, tokenizer):
    path = tmp_path / "rows.jsonl"

    def load(rows=None, how=AS_THEY_ARE, chat=True, **options):
        rows = rows or [{"q": f"{i}+1?", "a": i + 1} for i in range(4)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return load_prompts(DatasetConfig(path=str(path), **options), how, tokenizer if chat else Plain(tokenizer))

    return load


class Plain:
    """A tokenizer without a chat template."""

    chat_template = None

    def __init__(self, tokenizer):
        self.encode = tokenizer.encode


def test_a_prompt_is_a_chat_or_plain_text(load):
    (row, *_) = load(columns=ASKED)
    assert row == {"messages": [{"role": "user", "content": "0+1?"}], "answer": 1}
    (row, *_) = load(columns=ASKED, chat=False)
    assert row == {"prompt": "0+1?", "answer": 1}
    (row, *_) = load(columns=ASKED, prompt_template="Q: {prompt} A:", system_prompt="Be {brief}.")
    assert row == {"prompt": "Be {brief}.\n\nQ: 0+1? A:", "answer": 1}
    (row, *_) = load(columns=ASKED, system_prompt="Be brief.")
    assert [message["role"] for message in row["messages"]] == ["system", "user"]


def test_rows_with_the_expected_names_need_no_map(load):
    chats = [{"messages": [{"role": "user", "content": "Hi"}], "rubric": "polite"}]
    assert load(chats) == chats
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    assert load([{"messages": [{"role": "user", "content": parts}], "rubric": "polite"}]) == chats
    image = [{"role": "user", "content": [{"type": "image"}, *parts]}]
    assert load([{"messages": image}]) == [{"messages": image}]
    assert load([{"prompt": "Hi", "x": 1}])[0]["messages"][0]["content"] == "Hi"
    assert load([{"input_ids": [1, 2], "x": 1}]) == [{"input_ids": [1, 2], "x": 1}]


def test_a_table_of_chats_and_texts_has_empty_columns(load):
    chat, text = {"messages": [{"role": "user", "content": "a"}]}, {"prompt": "b"}
    assert load([{**chat, "prompt": None}, {**text, "messages": None}]) == load([chat, text])


def test_a_seed_is_a_whole_number_or_absent(load):
    seeds = [row.get("seed", "none") for row in load([{"prompt": "Hi", "seed": seed} for seed in (3, None)])]
    assert seeds == [3, "none"]
    for seed in ("a topic", 3.0, True):
        with pytest.raises(DatasetError, match="row 1: its column `seed` is taken as the seed with which"):
            load([{"prompt": "Hi", "seed": seed}])
    columns = {"prompt": "prompt", "topic": "seed"}
    assert load([{"prompt": "Hi", "seed": "a topic"}], columns=columns)[0]["topic"] == "a topic"


def test_worked_examples_come_from_the_first_rows_and_replace_the_instruction(load):
    how = PromptFormat(ASKED, instruction="\nThink.", plain=QUESTION)
    assert load(how=how)[0]["messages"][0]["content"] == "0+1?\nThink."
    rows = load(how=how, few_shot=2, chat=False)
    assert len(rows) == 2 and rows[0]["answer"] == 3
    shown = "Question: 0+1?\nAnswer: 1\n\nQuestion: 1+1?\nAnswer: 2\n\nQuestion: 2+1?\nAnswer:"
    assert rows[0]["prompt"] == shown
    (row, *_) = load(how=how, few_shot=1)
    assert [(m["role"], m["content"]) for m in row["messages"]] == [
        ("user", "0+1?"), ("assistant", "1"), ("user", "1+1?"),
    ]  # fmt: skip
    assert load(columns=ASKED, few_shot=1, chat=False)[0]["prompt"].startswith("Question: 0+1?\nAnswer: 1\n\n")
    with pytest.raises(DatasetError, match="few_shot=4 takes all 4 rows"):
        load(how=how, few_shot=4)
    with pytest.raises(DatasetError, match=r"few_shot=1 shows rows .* `answer`, which must be text or a number"):
        load(columns={"prompt": "q"}, few_shot=1)


@pytest.mark.parametrize("images", [{"images": ["a.png"]}, {"image": "a.png"}])
def test_worked_examples_are_refused_for_rows_with_images(load, images):
    """The image of a row would stand before the first example."""
    rows = [{"prompt": "how many?", "answer": "1"}, {"prompt": "how many?", "answer": "2"} | images]
    assert len(load(rows)) == 2
    for given in (rows, rows[::-1]):
        with pytest.raises(DatasetError, match=r"row \d: it has images, and few_shot=1 shows rows without theirs"):
            load(given, few_shot=1)


def test_a_system_message_of_a_row_wins_over_the_configured_one(load, tokenizer):
    own, user = {"role": "system", "content": "own"}, {"role": "user", "content": "Hi"}
    rows = [{"messages": [own, user], "answer": "1"}, {"messages": [user], "answer": "2"}]
    roles = [[m["content"] for m in row["messages"]] for row in load(rows, system_prompt="S")]
    assert roles == [["own", "Hi"], ["S", "Hi"]]
    # Worked examples stand behind it, and bring none of their own.
    (row,) = load([rows[0], rows[0]], system_prompt="S", few_shot=1)
    assert [m["content"] for m in row["messages"]] == ["own", "Hi", "1", "Hi"]
    # Each row is as long as it is, also behind a row with a shorter system message.
    long = {"messages": [{"role": "system", "content": "x" * 100}, user]}
    size = len(tokenizer.encode(render(load([long])[0]["messages"], tokenizer, True)))
    assert len(load([rows[1], long, rows[0]], system_prompt="S", max_length=size - 1)) == 2
    assert len(load([rows[1], long, rows[0]], system_prompt="S", max_length=size)) == 3


@pytest.mark.parametrize("chat", [True, False])
def test_the_length_limit_is_exact(load, tokenizer, chat):
    rows = [{"q": "x" * length, "a": 1} for length in range(1, 80)]
    made = load(rows, columns=ASKED, system_prompt="S", chat=chat)
    lengths = [len(tokenizer.encode(render(r["messages"], tokenizer, True) if chat else r["prompt"])) for r in made]
    for limit in (lengths[0], lengths[30], lengths[-1]):
        kept = load(rows, columns=ASKED, system_prompt="S", chat=chat, max_length=limit)
        assert kept == [row for row, length in zip(made, lengths, strict=True) if length <= limit]
    with pytest.raises(DatasetError, match=r"all 79 rows .* longer than max_length=3"):
        load(rows, columns=ASKED, system_prompt="S", chat=chat, max_length=3)


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"q": 1}, {}, r"row 1: it has no `prompt` and no `messages`; its columns are q. Set columns.prompt"),
        ({"id": 3, "conversations": [{"role": "user", "content": "x"}]}, {}, r"\. Set columns\.messages=conversations"),
        ({"conversations": [{"from": "human", "value": "x"}]}, {}, "ShareGPT: write `from` as `role` .*human as user"),
        ({"completion": [{"role": "assistant", "content": "x"}]}, {}, r"\. Set columns\.prompt"),
        ({"messages": [{"from": "human", "value": "x"}]}, {}, "row 1: `messages` has .*: write `from` as `role`"),
        ({"q": 1}, {"columns": {"prompt": "q"}}, "row 1: `prompt` must be text, not int: set columns.prompt"),
        ({"q": ""}, {"columns": {"prompt": "q"}}, "row 1: `prompt` must be text, not empty"),
        ({"q": " \n"}, {"columns": {"prompt": "q"}}, "row 1: `prompt` must be text, not empty"),
        ({"prompt": CHAT}, {}, "`prompt` must be text, not list: Set columns.messages=prompt, or rename"),
        ({"q": CHAT}, {"columns": {"prompt": "q"}}, "`prompt` must be text, not list: Set columns.messages=q"),
        ({"messages": "Hi"}, {}, "row 1: `messages` must be a list of messages, not 'Hi'"),
        ({"messages": [{"role": "user"}]}, {}, "row 1: `messages` has a message that is not"),
        ({"messages": [{"role": "user", "content": "x"}]}, {"chat": False}, "the tokenizer has no chat template"),
        ({"messages": [{"role": "user", "content": "x"}]}, {"prompt_template": "{prompt}"}, "prompt_template is set"),
    ],
)
def test_rows_without_a_prompt_are_refused(load, row, options, message):
    with pytest.raises(DatasetError, match=message):
        load([row], **options)


def test_a_template_of_the_users_is_the_whole_prompt():
    how = PromptFormat({"prompt": "q"}, instruction=" Box it.")
    made = PromptMaker(DataSourceConfig(path="x", prompt_template="Q: {prompt} A:"), how, None, [])({"q": "1 + 1?"})
    assert made == {"prompt": "Q: 1 + 1? A:"}
    assert PromptMaker(DataSourceConfig(path="x"), how, None, [])({"q": "2"})["messages"][0]["content"] == "2 Box it."
