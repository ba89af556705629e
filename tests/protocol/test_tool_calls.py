"""Tests of the tool-call formats: well-formed, malformed, truncated, nested and huge texts."""

from __future__ import annotations

import json
import random

import pytest
from tokenizers import AddedToken

from arealite.protocol.call_stream import CallSplitter
from arealite.protocol.tool_calls import MAX_CALLS, STYLES, decode_answer, forced_prefix, parse_tool_calls, style_of
from tests.tiny_model import make_tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "note": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
A, B = {"a": 1}, {"a": [1, {"b": "}</x>"}], "note": 'say "hi" \n ü'}


def written(style: str, *calls: tuple[str, dict]) -> str:
    """Write calls as a model of this style does."""
    if style == "hermes":
        texts = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
        return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)
    if style == "llama":
        return "; ".join(json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls)
    if style == "mistral":
        return "[TOOL_CALLS] " + json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls])
    if style == "mistral_args":
        return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls)
    assert style == "qwen_coder"
    blocks = []
    for name, arguments in calls:
        parts = [
            f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
            for key, value in arguments.items()
        ]
        blocks.append(f"<tool_call>\n<function={name}>\n{''.join(parts)}</function>\n</tool_call>")
    return "\n".join(blocks)


FORMS = [("hermes", "hermes"), ("llama", "llama"), ("mistral", "mistral")]
FORMS += [("mistral_args", "mistral"), ("qwen_coder", "qwen_coder")]


@pytest.mark.parametrize(("form", "style"), FORMS)
@pytest.mark.parametrize("detect", [False, True])
def test_several_calls(form, style, detect):
    text = written(form, ("add", A), ("add", B), ("now", {}))
    content, calls = parse_tool_calls(text, None if detect else style, TOOLS)
    assert content == ""
    assert [(call.name, call.arguments, call.error) for call in calls] == [
        ("add", A, None), ("add", B, None), ("now", {}, None)
    ]  # fmt: skip
    assert len({call.id for call in calls}) == 3
    assert all(len(call.id) == (9 if style == "mistral" else 29) for call in calls)
    assert json.loads(calls[1].arguments_text) == B


@pytest.mark.parametrize(("form", "style"), FORMS)
def test_content_around_calls(form, style):
    call = written(form, ("now", {}))
    tag = "<|python_tag|>" if form == "llama" else ""
    content, calls = parse_tool_calls(f"Let me see.\n{tag}{call}\nDone.", style, TOOLS)
    assert content == "Let me see.\n\nDone." or content == "Let me see.\nDone."
    assert [call.name for call in calls] == ["now"]
    assert parse_tool_calls("no call  ", style) == ("no call  ", [])


@pytest.mark.parametrize("style", STYLES)
def test_names_and_arguments_are_checked(style):
    _, (call,) = parse_tool_calls(written(style, ("rm", A)), style, TOOLS)
    assert call.name == "rm" and "no tool 'rm'" in call.error and "add, now" in call.error
    _, (call,) = parse_tool_calls(written(style, ("rm", {"x": "y"})), style)
    assert call.error is None
    if style != "qwen_coder":
        for wrong in ([1], "{}", 5, True):
            _, (call,) = parse_tool_calls(written(style, ("add", wrong)), style, TOOLS)  # type: ignore[arg-type]
            assert call.name == "add" and call.arguments == {} and "must be a JSON object" in call.error
            assert call.arguments_text == (wrong if isinstance(wrong, str) else json.dumps(wrong))


@pytest.mark.parametrize("style", STYLES)
def test_every_truncation_is_data(style):
    text = "Look: " * (style != "llama") + written(style, ("add", A), ("add", B))
    for end in range(len(text)):
        content, calls = parse_tool_calls(text[:end], style, TOOLS)
        whole = [call for call in calls if call.error is None]
        assert all(call.arguments in (A, {"a": 1}) for call in whole[:1])
        assert calls or content == text[:end]
        for call in calls:
            assert call.error is None or call.arguments == {}
            assert call.name or content, "a call without a name stays in the content"


def test_a_truncated_call_keeps_its_name_and_text():
    _, (call,) = parse_tool_calls('<tool_call>\n{"name": "add", "arguments": {"a": 1', "hermes", TOOLS)
    assert call.name == "add" and call.arguments_text == '{"a": 1' and "not valid JSON" in call.error
    _, (call,) = parse_tool_calls('{"name": "add", "parameters": {"a": 1', "llama", TOOLS)
    assert call.name == "add" and call.error
    _, (good, bad) = parse_tool_calls('[TOOL_CALLS] [{"name": "now"}, {"name": "add", "arguments": {', "mistral")
    assert good.error is None and bad.name == "add" and bad.error


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "add"'),
        ("hermes", '<tool_call>\n{"name": "add", "argum'),
        ("hermes", '<tool_call>\n{"name": "add", "arguments":'),
        ("hermes", '<tool_call>\n{"name": "add", "args": {"a": 1'),
        ("hermes", '<tool_call>\n{"name": "now"}}</tool_call>'),
        ("llama", '<|python_tag|>{"name": "add", "para'),
        ("llama", '{"name": "add", "parameters":'),
        ("mistral", '[TOOL_CALLS] [{"name": "now"}'),
        ("qwen_coder", "<tool_call>\n<function=add>\n"),
        ("qwen_coder", "<tool_call>\n<function=add>\n<parameter=a>\n1"),
    ],
)
def test_a_broken_call_never_reads_as_one_without_arguments(style, text):
    """A client would execute it: the API's form has no error, only the text of the arguments."""
    _, (call,) = parse_tool_calls(text, style, TOOLS)
    assert call.error and call.raw.strip() and call.raw in text
    with pytest.raises(ValueError):
        json.loads(call.arguments_text)


MALFORMED = [
    "<tool_call></tool_call>", "<tool_call>", "</tool_call>", "<tool_call>null</tool_call>",
    "<tool_call>{}</tool_call>",
    '<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>', "<tool_call>{'name': 'add'}</tool_call>",
    '<tool_call>{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>", "[TOOL_CALLS]", "[TOOL_CALLS] [",
    '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>', "<tool_call><function=></tool_call>",
    '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', "<|python_tag|>print(1)", "<|python_tag|>",
    '<tool_call>{"name": "now"}}</tool_call>', "[TOOL_CALLS]now[ARGS]{", "<tool_call><function=add><parameter=a>1",
    '<tool_call>{"name": "add", "arguments": ' + '{"a":' * 70 + "1" + "}" * 70 + "}</tool_call>",
]  # fmt: skip


@pytest.mark.parametrize("text", MALFORMED)
def test_malformed_calls_are_data(text):
    for style in (None, *STYLES):
        content, calls = parse_tool_calls(text, style, TOOLS)
        for call in calls:
            (call.name + call.arguments_text + (call.error or "")).encode()
        assert all(call.error or call.name == "\\ud800" for call in calls)
        content.encode()


def test_a_good_call_behind_a_bad_one_is_read():
    text = '<tool_call>{"name": "add", oops}</tool_call> then <tool_call>{"name": "now"}</tool_call>'
    content, (bad, good) = parse_tool_calls(text, "hermes", TOOLS)
    assert bad.name == "add" and bad.error and good.name == "now" and good.error is None
    assert content == " then"
    text = '<tool_call>{"name": "now"}<tool_call>{"name": "now"} and text'
    content, calls = parse_tool_calls(text, "hermes", TOOLS)
    assert [call.error for call in calls] == [None, None] and content == " and text"


def test_markers_inside_arguments_are_text():
    arguments = {"note": "</tool_call><tool_call>{"}
    for style in ("hermes", "llama", "mistral"):
        _, (call,) = parse_tool_calls(written(style, ("add", arguments)), style, TOOLS)
        assert call.arguments == arguments and call.error is None


def test_calls_in_thoughts_are_not_read():
    call = written("hermes", ("now", {}))
    assert parse_tool_calls(f"<think>{call}", "hermes") == (f"<think>{call}", [])
    content, calls = parse_tool_calls(f"I could {call}</think>\n\n{call}", "hermes")
    assert len(calls) == 1 and content == f"I could {call}</think>"


def test_llama_json_that_is_no_call_is_an_answer():
    for text in ('{"answer": 42}', '{"name": "Ada"}', '{"answer": ', "42", '[{"name": "add", "parameters": {}}]'):
        assert parse_tool_calls(text, "llama", TOOLS) == (text, [])


def test_too_many_calls():
    for style in STYLES:
        _, calls = parse_tool_calls(written(style, *[("now", {})] * (MAX_CALLS + 50)), style, TOOLS)
        assert len(calls) == MAX_CALLS + 1 and f"more than {MAX_CALLS}" in calls[-1].error


SIZE = 10_000_000
HUGE = {
    "opens": "<tool_call>", "open objects": '<tool_call>{"name": "add", "arguments": {', "strings": '<tool_call>{"',
    "nested lists": "[", "nested objects": '{"a":', "tagged lists": "<tool_call>[", "marks": "[TOOL_CALLS]",
    "names": "[TOOL_CALLS] a", "python": "<|python_tag|>{", "spaces": " ", "keys": '"<tool_call>{":1,', "text": "ab c ",
    "parameters": "<tool_call><function=f><parameter=x>", "calls": '<tool_call>{"name": "now"}</tool_call>',
    "quotes": '"', "backslashes": "\\", "thoughts": "<think>", "llama": '{"name": "now", "parameters": {}};',
}  # fmt: skip


@pytest.mark.timeout(120)
@pytest.mark.parametrize("style", [None, *STYLES])
@pytest.mark.parametrize("part", HUGE)
def test_huge_texts(part, style):
    for head in ("", '<tool_call>{"name": "add", "arguments": ', "[TOOL_CALLS] [", "[TOOL_CALLS] a", "<|python_tag|>"):
        _, calls = parse_tool_calls(head + HUGE[part] * (SIZE // 5 // len(HUGE[part])), style, TOOLS)
        assert len(calls) <= MAX_CALLS + 1


def test_ten_megabytes_in_one_call():
    for style in STYLES:
        _, (call,) = parse_tool_calls(written(style, ("add", {"note": "x" * SIZE})), style, TOOLS)
        assert len(call.arguments["note"]) == SIZE and call.error is None


@pytest.mark.parametrize("style", [None, *STYLES])
def test_pieces_equal_the_whole(style):
    rng = random.Random(3)
    parts = [*MALFORMED, "text ", " \n", "<think>", "</think>", "<tool", "[TOOL", "{", "ü<|python"]
    parts += [written(form, ("add", A), ("now", {})) for form, _ in FORMS]
    for _ in range(400):
        text = "".join(rng.choices(parts, k=rng.randrange(1, 5)))
        splitter, at, sent = CallSplitter(style, TOOLS), 0, ""
        while at < len(text):
            size = rng.randrange(1, 9)
            sent += splitter.add(text[at : at + size])
            at += size
        rest, calls = splitter.finish()
        content, expected = parse_tool_calls(text, style, TOOLS)
        assert sent + rest == content
        assert [(c.name, c.arguments, c.error) for c in calls] == [(c.name, c.arguments, c.error) for c in expected]


def split_in_pieces(text: str, style: str, rng: random.Random, longest: int, **settings):
    """Content, and name and arguments of each call, as they were sent before the end; the rest; the splitter."""
    splitter, at, content, calls = CallSplitter(style, TOOLS, **settings), 0, "", list[list[str]]()
    while at < len(text):
        size = rng.randint(1, longest)
        content += splitter.add(text[at : at + size])
        at += size
        for piece in splitter.take_calls():
            if piece.call == len(calls):
                calls.append([piece.id, piece.name, ""])
            calls[piece.call][2] += piece.text
    return content, calls, splitter


SPACED = '{ "name" : "add" ,\n"arguments": {"a" :  1.50, "note": "<tool_call> \\u00fc </tool_call>[TOOL_CALLS]" } }'
HARD = [
    f"<tool_call>{SPACED}</tool_call>",
    f"[TOOL_CALLS] [{SPACED} , {SPACED}]",
    f"{SPACED} ; <|python_tag|> {SPACED}",
    '<tool_call>{"name": "add", "arguments": {"a": tru, "note": "</tool_call>"}}',
    '<tool_call>{"name": "add", "arguments": {"note": "x\ny"}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"note": "x\ny"}} z</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": 1}, "name": "now", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "a</tool_call>b", "arguments": {"a": 1',
    '<tool_call>{"name": "add", "arguments": {"note": "cut   ',
    '<tool_call>{"name": "add", "arguments": {"a": 1}}',
    '<tool_call>{"name": "add", "parameters": ' + '{"a":' * 70 + "1" + "}" * 70 + "}</tool_call>",
    '[TOOL_CALLS]add[ARGS]{"a": [1, {"b": 2}]} more [TOOL_CALLS]now{}',
    '{"name": "add", "parameters": {"a": 1}} text <|python_tag|>{"name": "now", "parameters": {}}',
]


@pytest.mark.parametrize("style", STYLES)
def test_pieces_of_calls_are_their_beginnings(style):
    rng = random.Random(4)
    parts = [
        *MALFORMED,
        *HARD,
        "text ",
        " \n",
        "<think>",
        "</think>",
        "<tool",
        "[TOOL",
        "{",
        "ü<|python",
        "</tool_call>",
    ]
    parts += [written(form, ("add", B), ("now", {})) for form, _ in FORMS]
    for _ in range(250):
        text = "".join(rng.choices(parts, k=rng.randint(1, 4)))
        thinks = rng.random() < 0.5
        content, sent, splitter = split_in_pieces(
            text, style, rng, rng.choice([1, 9, 300]), thinks=thinks, max_calls=99
        )
        rest, calls = splitter.finish()
        whole, expected = parse_tool_calls(text, style, TOOLS, thinks)
        assert content + rest == whole, text
        assert [(c.name, c.arguments_text) for c in calls] == [(c.name, c.arguments_text) for c in expected]
        assert len(sent) <= len(calls) and splitter.agrees_with(expected), text
        for (call_id, name, pieces), call in zip(sent, calls, strict=False):
            assert (call_id, name) == (call.id, call.name) and call.arguments_text.startswith(pieces), text


@pytest.mark.parametrize(("form", "style"), FORMS[:4])
def test_arguments_are_sent_before_the_call_is_complete(form, style):
    text, rng = written(form, ("add", B), ("now", {}), ("add", A)), random.Random(0)
    _, sent, _ = split_in_pieces(text[: text.index("say") + 3], style, rng, 4, thinks=False, max_calls=99)
    assert [(name, arguments) for _, name, arguments in sent] == [
        ("add", json.dumps(B)[: json.dumps(B).index("say") + 3])
    ]
    content, sent, _ = split_in_pieces(f"{text}\nThat is all.", style, rng, 4, thinks=False, max_calls=99)
    assert [(name, json.loads(text)) for _, name, text in sent] == [("add", B), ("now", {}), ("add", A)]
    assert style == "llama" or content.strip() == "That is all."
    _, sent, _ = split_in_pieces(text, style, rng, 4, thinks=False, max_calls=1)
    assert len(sent) == 1
    # In thoughts a call is only mentioned.
    content, sent, _ = split_in_pieces(f"Maybe {text} ?</think>", style, rng, 4, thinks=True, max_calls=99)
    assert not sent and content == f"Maybe {text} ?</think>"


def test_a_call_without_tags_is_one_if_nothing_else_is_said_and_its_tool_is_known():
    text = '{"name": "add", "arguments": {"a": 1}}'
    content, (call,) = parse_tool_calls(text, "hermes", TOOLS)
    assert (content, call.name, call.arguments, call.error) == ("", "add", {"a": 1}, None)
    for other in (text.replace("add", "rm"), f"so {text}", '{"name": "add"}', text[:-2]):
        assert parse_tool_calls(other, "hermes", TOOLS) == (other, [])
    assert parse_tool_calls(text, "hermes") == (text, [])
    splitter = CallSplitter("hermes", TOOLS)
    assert [splitter.add(text[:9]), splitter.add(text[9:])] == ["", ""] and splitter.finish()[1][0].name == "add"


def test_text_without_calls_is_streamed_at_once():
    splitter = CallSplitter("hermes")
    assert [splitter.add(piece) for piece in ("Hi", " there", " <tool", "box>")] == ["Hi", " there", "", " <toolbox>"]


@pytest.mark.parametrize("style", STYLES)
def test_forced_prefix_begins_a_call(style):
    for name in ("add", None):
        whole = written(style, ("add", {"a": 1}))
        prefix = forced_prefix(style, name)
        assert whole.replace(" ", "").startswith(prefix.replace(" ", ""))


def test_style_and_decoding_follow_the_tokenizer():
    signs = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama": "<|python_tag|>"}
    for style, sign in signs.items():
        tokenizer = make_tokenizer()
        tokenizer.add_tokens([AddedToken(sign, special=True), AddedToken("<|eom|>", special=True)], special_tokens=True)
        assert style_of(tokenizer) == style
        ids = [*tokenizer.encode(f"a{sign}b", add_special_tokens=False), tokenizer.eos_token_id]
        ids += tokenizer.encode("<|eom|>", add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=True) == "ab"
        assert decode_answer(tokenizer, ids) == f"a{sign}b"
    tokenizer = make_tokenizer()
    assert style_of(tokenizer) == "hermes"
    tokenizer = make_tokenizer()
    tokenizer.chat_template = {"default": "x", "tool_use": "<tool_call><function=a>"}
    assert style_of(tokenizer) == "qwen_coder"
