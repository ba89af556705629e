"""Tests of reading request bodies of all four APIs: what they become, and which errors name which field."""

from __future__ import annotations

import random
from typing import Any

import pytest

from arealite.protocol import chat, completions, messages, responses
from arealite.protocol.answer import Answer, Head, TokenLogprob, Usage, error_body, event_bytes, to_json, token_text
from arealite.protocol.fields import FieldError
from arealite.protocol.tool_calls import ToolCall

FUNCTION = {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": FUNCTION}
USER = {"role": "user", "content": "hi"}


def test_chat_messages_become_what_templates_read():
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    given = [
        {"role": "developer", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": " good"}]},
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]},
    ]
    request = chat.parse({"messages": given, "tools": [TOOL], "model": "x"})
    assert request.messages[0] == {"role": "system", "content": "be good"}
    assert request.messages[2]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert request.messages[4]["content"][0]["type"] == "image_url" and request.has_images
    assert request.tools == [TOOL] and request.reads_calls
    # What the model wrote and is no JSON stays as it is.
    call["function"]["arguments"] = '{"a": '
    assert chat.parse({"messages": given}).messages[2]["tool_calls"][0]["function"]["arguments"] == '{"a": '


def test_the_item_that_was_cut_off_is_incomplete():
    """Clients tell from an item's status whether they may execute a call."""
    head, usage = Head("1", "m", 0), Usage(1, 1)
    good, cut = ToolCall("a", "add", {"a": 1}), ToolCall("b", "add", {}, "broken", '{"a": ')
    for calls, reason, expected in (
        ([], "stop", ["completed"]),
        ([], "length", ["incomplete"]),
        ([good], "stop", ["completed", "completed"]),
        ([good, cut], "length", ["completed", "completed", "incomplete"]),
        ([good, cut], "stop", ["completed"] * 3),
        ([good], "length", ["incomplete", "completed"]),
    ):
        answer = Answer("text", reason, calls)
        body = responses.result(head, {}, answer, usage)
        stream = responses.ResponseStream(head, {})
        events = [*stream.begin(1), *stream.finish(0, answer), *stream.close(usage)]
        ends = [data["item"] for kind, data in events if kind == "response.output_item.done"]
        for items in (body["output"], events[-1][1]["response"]["output"], ends):
            assert [item["status"] for item in items] == expected


def test_an_aborted_answer_has_a_finish_reason_of_openai():
    head, usage, answer = Head("1", "m", 0), Usage(1, 1), Answer("text", "abort")
    for api in (chat, completions):
        assert api.result(head, [answer], usage)["choices"][0]["finish_reason"] == "length"
    for stream in (
        chat.ChatStream(head, chat.parse({"messages": [{"role": "user", "content": "a"}]})),
        completions.CompletionStream(head, completions.parse({"prompt": "a"})),
    ):
        (*_, last) = [data for _, data in [*stream.begin(1), *stream.finish(0, answer)]]
        assert last["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("sent", ["", "Sure", "Sure."])
def test_a_broken_call_behind_sent_text_is_the_same_text_in_a_stream_of_messages(sent):
    """A client sends the text back, and another text would not be found in the history of a session."""
    head, call = Head("1", "m", 0), ToolCall("b", "add", {}, "broken", '{"a": ')
    whole = messages.result(head, Answer("Sure.", "length", [call]), Usage(1, 1))
    stream = messages.MessageStream(head, 1)
    rest = Answer("Sure.".removeprefix(sent), "length", [call])
    events = [*stream.begin(1), *stream.add(0, sent), *stream.finish(0, rest)]
    pieces = [data["delta"]["text"] for kind, data in events if kind == "content_block_delta"]
    assert "".join(pieces) == whole["content"][0]["text"] == 'Sure.\nadd {"a": '


def test_alternatives_with_one_text_keep_the_log_prob_of_the_likeliest():
    """Parts of characters are all written as the same sign."""
    top = [("\ufffd", 200, -0.5), ("a", 5, -1.5), ("\ufffd", 201, -3.0)]
    answer = Answer("", "length", logprobs=[TokenLogprob("\ufffd", 200, -0.5, top)])
    body = completions.result(Head("1", "m", 0), [answer], Usage(1, 1))
    assert body["choices"][0]["logprobs"]["top_logprobs"] == [{"\ufffd": -0.5, "a": -1.5}]


def test_the_four_apis_read_the_same_conversation():
    schema = FUNCTION["parameters"]
    as_chat = chat.parse(
        {
            "messages": [
                {"role": "system", "content": "S"},
                USER,
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [
                        {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
                    ],
                },
                {"role": "tool", "tool_call_id": "c", "content": "2"},
                {"role": "user", "content": "go"},
            ],
            "tools": [TOOL],
            "tool_choice": "required",
            "max_completion_tokens": 9,
            "stop": "x",
        }
    )
    as_response = responses.parse(
        {
            "instructions": "S",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "reasoning", "summary": []},
                {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a": 1}'},
                {"type": "function_call_output", "call_id": "c", "output": "2"},
                {"type": "message", "role": "user", "content": "go"},
            ],
            "tools": [{"type": "function", **FUNCTION, "strict": True}],
            "tool_choice": "required",
            "max_output_tokens": 9,
            "stop": ["x"],
        }
    )
    as_message = messages.parse(
        {
            "system": [{"type": "text", "text": "S"}],
            "messages": [
                USER,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}}]},
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "2"}]},
                        {"type": "text", "text": "go"},
                    ],
                },
            ],
            "tools": [{"name": "add", "description": "Add.", "input_schema": schema}],
            "tool_choice": {"type": "any"},
            "max_tokens": 9,
            "stop_sequences": ["x"],
        }
    )
    for request in (as_response, as_message):
        assert request.messages == as_chat.messages
        assert (request.tools, request.tool_choice, request.sampling) == (
            as_chat.tools, as_chat.tool_choice, as_chat.sampling
        )  # fmt: skip
    assert as_chat.sampling == {"max_new_tokens": 9, "stop": ["x"]}


def test_allowed_tools_leave_only_those():
    others = [{"type": "function", "function": {**FUNCTION, "name": name}} for name in ("sub", "mul")]
    flat = [{"type": "function", "name": "sub"}, {"type": "function", "name": "add"}]
    nested = [{"type": "function", "function": {"name": one["name"]}} for one in flat]
    for mode in ("auto", "required"):
        inner = {"mode": mode, "tools": nested}
        body = {"messages": [USER], "tools": [TOOL, *others]}
        request = chat.parse({**body, "tool_choice": {"type": "allowed_tools", "allowed_tools": inner}})
        assert (request.tools, request.tool_choice) == ([TOOL, others[0]], mode)
        tools = [{"type": "function", **one["function"]} for one in (TOOL, *others)]
        choice = {"type": "allowed_tools", "mode": mode, "tools": flat}
        request = responses.parse({"input": "hi", "tools": tools, "tool_choice": choice})
        assert (request.tools, request.tool_choice) == ([TOOL, others[0]], mode)


def test_an_empty_suffix_is_none():
    body = {"prompt": "a", "max_tokens": 2}
    assert completions.parse({**body, "suffix": ""}) == completions.parse(body)


def _allowed(**inner: Any) -> dict[str, Any]:
    choice = {"type": "allowed_tools", "allowed_tools": inner}
    return {"messages": [USER], "tools": [TOOL], "tool_choice": choice}


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (chat, {}, "messages"),
    (chat, {"messages": "hi"}, "messages"),
    (chat, {"messages": [{"content": "hi"}]}, "messages"),
    (chat, {"messages": [{"role": "user", "content": 7}]}, "messages"),
    (chat, {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages"),
    (chat, {"messages": [USER], "best_off": 1}, "best_off"),
    (chat, {"messages": [USER], "temperature": "hot"}, "temperature"),
    (chat, {"messages": [USER], "max_tokens": True}, "max_tokens"),
    (chat, {"messages": [USER], "top_logprobs": 2}, "top_logprobs"),
    (chat, {"messages": [USER], "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (chat, {"messages": [USER], "stop": [1]}, "stop"),
    (chat, {"messages": [USER], "tools": [{"type": "web_search"}]}, "tools"),
    (chat, {"messages": [USER], "tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
    (chat, {"messages": [USER], "tools": [TOOL, TOOL]}, "tools"),
    (chat, {"messages": [USER], "tool_choice": "required"}, "tool_choice"),
    (chat, {"messages": [USER], "tools": [TOOL], "tool_choice": "maybe"}, "tool_choice"),
    (
        chat,
        {"messages": [USER], "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "b"}}},
        "tool_choice",
    ),
    (chat, _allowed(mode="none", tools=[TOOL]), "tool_choice"),
    (chat, _allowed(mode="auto", tools=[]), "tool_choice"),
    (chat, _allowed(mode="auto", tools=[{"type": "function", "function": {"name": "b"}}]), "tool_choice"),
    (chat, _allowed(mode="auto", tools=[{"type": "custom", "custom": {"name": "add"}}]), "tool_choice"),
    (chat, {"messages": [USER], "response_format": {"type": "xml"}}, "response_format"),
    (chat, {"messages": [USER], "response_format": {"type": "json_schema"}}, "response_format"),
    (completions, {"prompt": "a", "logprobs": 21}, "logprobs"),
    (completions, {"prompt": "a", "echo": True, "logprobs": 1}, "echo"),
    (completions, {"prompt": "a", "suffix": "b"}, "suffix"),
    (responses, {}, "messages"),
    (responses, {"input": "a", "previous_response_id": "r"}, "previous_response_id"),
    (responses, {"input": "a", "n": 2}, "n"),
    (responses, {"input": [{"type": "web_search_call"}]}, "input"),
    (responses, {"input": "a", "background": True}, "background"),
    (messages, {"messages": [USER]}, "max_tokens"),
    (messages, {"messages": [USER], "max_tokens": 1, "thinking": {"type": "enabled"}}, "thinking"),
    (messages, {"messages": [{"role": "system", "content": "x"}], "max_tokens": 1}, "messages"),
    (messages, {"messages": [{"role": "assistant", "content": "x"}], "max_tokens": 1}, "messages"),
    (messages, {"messages": [USER], "max_tokens": 1, "tool_choice": {"type": "some"}}, "tool_choice"),
]


@pytest.mark.parametrize(("api", "body", "param"), WRONG)
def test_errors_name_the_field(api, body, param):
    with pytest.raises(FieldError) as caught:
        api.parse(body)
    assert caught.value.param == param and str(caught.value)


VALUES: list[Any] = [
    None, True, 0, -1, 10**30, 1.5, float("nan"), "", "a", "\ud800", [], {}, [[]], [None], [{}], {"type": None},
    [{"type": "text"}], [{"role": "user", "content": [{}]}], [{"role": "assistant", "tool_calls": [{}]}], {"type": []},
    [{"type": "function_call"}], [{"type": "image", "source": 1}], {"type": "function", "function": 3}, [USER, 7],
    [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": 4}]}], {"format": {"type": 1}},
    {"type": "json_schema", "json_schema": 5}, [{"role": "user", "content": {"type": "text"}}], [TOOL], "required",
    {"type": "allowed_tools", "allowed_tools": 1}, {"type": "allowed_tools", "mode": "auto", "tools": [{"name": []}]},
]  # fmt: skip


@pytest.mark.parametrize("given", [{"type": "function", **FUNCTION}, {"type": "function", "function": "add"}])
def test_a_tool_in_the_form_of_another_api_is_told_the_right_one(given):
    with pytest.raises(FieldError, match=r'must have the form {"type": "function", "function": {"name": …') as caught:
        chat.parse({"messages": [USER], "tools": [given]})
    assert caught.value.param == "tools"


@pytest.mark.parametrize("api", [chat, completions, responses, messages])
def test_random_bodies_raise_field_errors_only(api):
    rng = random.Random(17)
    names = [
        "messages", "input", "prompt", "system", "instructions", "tools", "tool_choice", "max_tokens", "n", "stop",
        "stop_sequences", "response_format", "text", "include", "stream_options", "logprobs", "top_logprobs",
        "thinking", "chat_template_kwargs", "logit_bias", "temperature", "metadata", "echo", "seed",
    ]  # fmt: skip
    base = {chat: {"messages": [USER]}, messages: {"messages": [USER], "max_tokens": 3}}.get(
        api, {"input": "a"} if api is responses else {}
    )
    accepted = 0
    for _ in range(3000):
        body = {**base, **{name: rng.choice(VALUES) for name in rng.sample(names, rng.randrange(4))}}
        try:
            api.parse(body)
            accepted += 1
        except FieldError as error:
            str(error).encode(errors="backslashreplace")
    assert accepted > 10


def test_errors_and_numbers_that_json_encoders_refuse():
    assert error_body(400, "m", "n")["error"] == {
        "message": "m", "type": "invalid_request_error", "param": "n", "code": 400
    }  # fmt: skip
    assert to_json({"a": 2**70}) == b'{"a": 1180591620717411303424}'
    assert event_bytes(("x", {"a": 1})) == b'event: x\ndata: {"a":1}\n\n'


def test_tokens_without_a_tokenizer_are_numbers():
    assert token_text(None, 7) == "token_id:7"


@pytest.mark.parametrize(
    ("parse", "body", "name"),
    [
        (completions.parse, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        (completions.parse, {"prompt": "a", "min_tokens": 20}, "min_tokens"),
        (completions.parse, {"prompt": "a", "min_tokens": -1}, "min_tokens"),
        (chat.parse, {"messages": [USER], "max_completion_tokens": -5}, "max_completion_tokens"),
        (chat.parse, {"messages": [USER], "max_tokens": 10**10}, "max_tokens"),
        (chat.parse, {"messages": [USER], "max_tokens": 4, "min_tokens": 5}, "min_tokens"),
        (chat.parse, {"messages": [USER], "seed": 2**64}, "seed"),
        (responses.parse, {"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        (messages.parse, {"messages": [USER], "max_tokens": 0}, "max_tokens"),
    ],
)
def test_numbers_out_of_range_are_named_as_the_request_names_them(parse, body, name):
    with pytest.raises(FieldError, match=f"^{name} must be between ") as found:
        parse(body)
    assert found.value.param == name
