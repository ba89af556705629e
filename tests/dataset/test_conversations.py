"""Conversations for supervised training: the mask is exact with every chat template."""

import json

import pytest

from arealite.api.cli_args import DatasetConfig
from arealite.api.errors import DatasetError
from arealite.dataset.chat import tokenize_chat
from arealite.dataset.preference import get_preferences
from arealite.dataset.sft import get_sft
from tests.tiny_model import make_tokenizer

CHAT = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "one"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "two"},
]
# Ends turns with the end token and a line break, as ChatML does.
CHATML = (
    "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
# Writes reasoning before the last answer only, as Qwen3 does.
REASONING = (
    "{% for m in messages %}{{ m['role'] }}:{% if m['role'] == 'assistant' and loop.last %}(hm){% endif %}"
    "{{ m['content'] }}<eos>\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
# Ends only the assistant's turns, and begins with nothing for it.
BARE = (
    "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}<eos>{% else %}|{% endif %}{% endfor %}"
)


def trained(row, tokenizer):
    """The trained pieces of a row as text, and all of its text."""
    pieces, last = [], 0
    for token, mask in zip(row["input_ids"], row["loss_mask"], strict=True):
        if mask:
            pieces = [*pieces, ""] if not last else pieces
            pieces[-1] += tokenizer.decode([token])
        last = mask
    return pieces, tokenizer.decode(row["input_ids"])


@pytest.mark.parametrize(
    ("template", "pieces"),
    [
        # The tiny tokenizer's own: turns end with a line break only.
        (None, [["one\n", "two\n<eos>"]]),
        (CHATML, [["one<eos>", "two<eos>"]]),
        (BARE, [["one<eos>", "two<eos>"]]),
        (REASONING, [["(hm)one<eos>"], ["(hm)two<eos>"]]),
    ],
)
def test_only_turns_of_the_assistant_are_trained(template, pieces):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    rows = tokenize_chat(CHAT, tokenizer)
    assert [trained(row, tokenizer)[0] for row in rows] == pieces
    # What is trained follows exactly the prompt that a server would get.
    for row, number in zip(rows, (2, 4), strict=False) if len(rows) > 1 else [(rows[0], 2)]:
        prompt = tokenizer.apply_chat_template(CHAT[:number], add_generation_prompt=True, return_dict=False)
        assert row["input_ids"][: row["loss_mask"].index(1)] == prompt
    assert trained(rows[-1], tokenizer)[1].endswith("two<eos>" if template else "two\n<eos>")
    # Earlier turns can be left out, and what follows the last one is.
    (row,) = tokenize_chat([*CHAT, CHAT[1]], tokenizer, start=3)
    assert trained(row, tokenizer)[0] == pieces[-1][-1:]


@pytest.mark.parametrize(
    ("row", "advice"),
    [
        ({"conversations": CHAT}, r"\. Set columns\.messages=conversations, or rename that column to `messages`"),
        ({"conversations": [{"from": "human", "value": "a"}]}, "write `from` as `role` .* as the column `messages`"),
        ({"prompt": [CHAT[1]], "reply": [CHAT[2]]}, r"\. Set columns\.response"),
        ({"question": "a", "response": "b"}, r"\. Set columns\.prompt"),
    ],
)
def test_the_column_of_a_conversation_is_named(tokenizer, row, advice):
    with pytest.raises(DatasetError, match=advice):
        get_sft(DatasetConfig(path="x"), tokenizer, raw=[row])


@pytest.mark.parametrize(("template", "piece"), [(None, "two\n<eos>"), (CHATML, "two<eos>"), (BARE, "two<eos>")])
def test_a_greeting_of_the_assistant_is_context(template, piece):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    (row,) = tokenize_chat(CHAT[2:], tokenizer)
    pieces, text = trained(row, tokenizer)
    assert pieces == [piece] and "one" in text
    with pytest.raises(ValueError, match="no turn of the assistant behind another message"):
        tokenize_chat(CHAT[2:3], tokenizer)


def test_an_empty_answer_is_an_end_token_behind_its_prompt():
    tokenizer = make_tokenizer()
    # Writes nothing behind an answer.
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    (row,) = tokenize_chat([CHAT[1], {"role": "assistant", "content": ""}], tokenizer)
    assert trained(row, tokenizer) == (["<eos>"], "user:hiassistant:<eos>")


def test_conversations_and_prompts_with_a_response_load(tmp_path, tokenizer):
    path = tmp_path / "chats.jsonl"
    rows = [{"talk": CHAT, "in": "hi", "out": "yes"}] * 3
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def load(**options):
        return get_sft(DatasetConfig(path=str(path), **options), tokenizer)

    assert load(columns={"messages": "talk"})[0] == tokenize_chat(CHAT, tokenizer)[0]
    as_chat = load(columns={"prompt": "in", "response": "out"}, system_prompt="be kind")
    assert trained(as_chat[0], tokenizer) == (["yes\n<eos>"], "<system>be kind\n<user>hi\n<assistant>yes\n<eos>")
    # It has a system message of its own.
    assert load(columns={"messages": "talk"}, system_prompt="S") == load(columns={"messages": "talk"})
    as_text = load(columns={"prompt": "in", "response": "out"}, prompt_template="{prompt}! ")
    assert trained(as_text[0], tokenizer) == (["yes<eos>"], "hi! yes<eos>")
    # The template that adds nothing too.
    bare = load(columns={"prompt": "in", "response": "out"}, prompt_template="{prompt}")
    assert trained(bare[0], tokenizer) == (["yes<eos>"], "hiyes<eos>")
    # As prompts of RL do it.
    begun = load(columns={"prompt": "in", "response": "out"}, prompt_template="{prompt}! ", system_prompt="be kind")
    assert trained(begun[0], tokenizer) == (["yes<eos>"], "be kind\n\nhi! yes<eos>")
    both = load(columns={"messages": "talk", "prompt": "in", "response": "out"}, prompt_template="{prompt}! ")
    assert both == as_text
    with pytest.raises(DatasetError, match=r"row 1: it is made of messages, and prompt_template is set"):
        load(columns={"messages": "talk"}, prompt_template="{prompt}! ")
    streamed = load(columns={"messages": "talk"}, streaming=True)
    assert list(streamed) == load(columns={"messages": "talk"})
    with pytest.raises(DatasetError, match=r"row 1: supervised training needs `messages`, or .* columns are talk, in"):
        load()
    # Its first message may stand beside a conversation.
    path.write_text(json.dumps({"messages": CHAT, "prompt": "hi", "prompt_id": "x"}) + "\n")
    assert load() == tokenize_chat(CHAT, tokenizer)
    # A prompt of messages is not trained, whatever turns it has.
    rows = [{"prompt": CHAT[:4], "completion": CHAT[4:]}, {"prompt": CHAT[1:4], "response": CHAT[4:]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for system_prompt, begins in ((None, "<user>hi"), ("S", "<system>S\n<user>hi")):
        pieces = [trained(row, tokenizer) for row in load(system_prompt=system_prompt)]
        assert [answers for answers, _ in pieces] == [["two\n<eos>"]] * 2
        assert all(
            text.startswith(begin) for (_, text), begin in zip(pieces, ("<system>be kind\n", begins), strict=True)
        )
    path.write_text(json.dumps({"in": "hi", "talk": CHAT}) + "\n")
    with pytest.raises(DatasetError, match="row 1: `response` must be text, not list"):
        load(columns={"prompt": "in", "response": "talk"})


def test_a_table_of_rows_in_several_layouts_has_empty_columns(tmp_path, tokenizer):
    rows = [{"messages": CHAT}, {"prompt": "a", "response": "b"}, {"prompt": "a", "completion": "c"}]
    names = ["messages", "prompt", "response", "completion"]
    made = []
    for number, own in enumerate((rows, [dict.fromkeys(names) | row for row in rows])):
        file = tmp_path / f"{number}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in own))
        made.append(get_sft(DatasetConfig(path=str(file)), tokenizer))
    assert made[1] == made[0]


def test_tools_of_a_row_are_declared_to_the_model(tmp_path):
    tokenizer = make_tokenizer()
    declared = "{% if tools %}tools:{{ tools[0]['function']['name'] }}|{% endif %}"
    tokenizer.chat_template = declared + CHATML
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    path = tmp_path / "chats.jsonl"

    def load(value, read=get_sft, **row):
        path.write_text(json.dumps({"messages": CHAT, "tools": value, **row}) + "\n")
        return read(DatasetConfig(path=str(path)), tokenizer)

    assert trained(load(tools)[0], tokenizer)[1].startswith("tools:add|system:be kind")
    assert load(tools) == load(json.dumps(tools)) == tokenize_chat(CHAT, tokenizer, tools=tools)
    assert load(None) == load([]) == load("") == tokenize_chat(CHAT, tokenizer)
    (pair,) = load(tools, get_preferences, chosen=CHAT, rejected=[*CHAT[:-1], {"role": "assistant", "content": "no"}])
    assert trained(pair["rejected"], tokenizer) == (["no<eos>"], trained(pair["rejected"], tokenizer)[1])
    assert trained(pair["chosen"], tokenizer)[1].startswith("tools:add|")
    with pytest.raises(DatasetError, match="row 1: `tools` must be a list of schemas of functions, not"):
        load({"name": "add"})
    with pytest.raises(
        DatasetError, match="row 1: `tools` must be a list of schemas of functions, or JSON of one: Exp"
    ):
        load("add, sub")


def test_turns_that_become_rows_of_their_own_cannot_be_streamed(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = REASONING
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": CHAT}) + "\n")
    assert len(get_sft(DatasetConfig(path=str(path)), tokenizer)) == 2
    with pytest.raises(DatasetError, match="leave out `streaming`"):
        get_sft(DatasetConfig(path=str(path), streaming=True), tokenizer)


def test_a_conversation_needs_a_turn_to_learn(tokenizer):
    with pytest.raises(ValueError, match="no turn of the assistant"):
        tokenize_chat(CHAT[:2], tokenizer)


def test_parts_that_are_text_are_joined_and_others_refused(tokenizer):
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    asked, answer = {"role": "user", "content": parts}, {"role": "assistant", "content": "yes"}
    plain = {"role": "user", "content": "hi"}
    assert tokenize_chat([asked, answer], tokenizer) == tokenize_chat([plain, answer], tokenizer)
    with pytest.raises(ValueError, match="parts that are not text"):
        tokenize_chat([{"role": "user", "content": [*parts, {"type": "image"}]}, answer], tokenizer)


def test_a_template_that_adds_texts_rejects_other_content_in_one_line():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] + m['content'] }}{% endfor %}"
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    with pytest.raises(ValueError, match=r"the tokenizer's chat template rejects its messages: can only concatenate"):
        tokenize_chat([CHAT[1], call], tokenizer)


def test_rows_with_images_are_refused(tmp_path, tokenizer):
    """The images would be left out without a word."""
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    for load, row in (
        (get_sft, {"messages": CHAT}),
        (get_sft, {"prompt": "<image>a", "response": "b"}),
        (get_preferences, pair),
    ):
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps(row | {"images": []}) + "\n" + json.dumps(row | {"images": ["a.png"]}) + "\n")
        with pytest.raises(DatasetError, match="row 2: it has `images`, and this trainer reads texts only"):
            load(DatasetConfig(path=str(path)), tokenizer)
        path.write_text(json.dumps(row | {"image": None}) + "\n" + json.dumps(row | {"image": "a.png"}) + "\n")
        with pytest.raises(DatasetError, match="row 2: it has `image`, and this trainer reads texts only"):
            load(DatasetConfig(path=str(path)), tokenizer)
    chosen = DatasetConfig(path=str(path), columns={name: name for name in pair})
    assert len(get_preferences(chosen, tokenizer)) == 2
