"""Official clients of OpenAI and Anthropic against a server process: chat, tools, streams, log-probs, errors."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.inference.test_server import start, stop
from tests.inference.tool_model import ARGUMENTS, CALL, FIRST, SECOND, TOOL, USER, history, prompt_of, write_model

openai = pytest.importorskip("openai")
FUNCTION = TOOL["function"]
GREEDY: dict[str, Any] = {"model": "m", "temperature": 0}
RESPONSES_TOOL = {"type": "function", **FUNCTION, "strict": False}
ANTHROPIC_TOOL = {"name": "add", "input_schema": FUNCTION["parameters"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tool-model")
    write_model(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def url(folder) -> Iterator[str]:
    process = start(f"model_path={folder}", "max_total_tokens=4096", "block_size=4", "api_key=secret")
    line = process.stdout.readline()
    assert "http://" in line, process.stderr.read()
    yield line.split()[-1]
    assert stop(process) == 0


@pytest.fixture(scope="module")
def client(url) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="secret", timeout=30, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(url) -> Iterator[Any]:
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=url, api_key="secret", timeout=30, max_retries=0) as client:
        yield client


def num_tokens(tokenizer: Any, text: str) -> int:
    return len(tokenizer.encode(text)) + 1  # and the end


def check_call(call: Any) -> None:
    assert call.type == "function" and call.id.startswith("call_")
    assert call.function.name == "add" and json.loads(call.function.arguments) == ARGUMENTS


def test_chat_with_a_tool(client):
    create = client.chat.completions.create
    answer = create(**GREEDY, messages=[USER], tools=[TOOL])
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Sure."
    (call,) = choice.message.tool_calls
    check_call(call)
    result = {"role": "tool", "tool_call_id": call.id, "content": "4"}
    answer = create(**GREEDY, messages=[USER, choice.message, result], tools=[TOOL])
    assert answer.choices[0].message.content == SECOND and answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.tool_calls is None
    again = create(**GREEDY, messages=[USER, choice.message, result], tools=[TOOL])
    assert again.usage.prompt_tokens_details.cached_tokens > again.usage.prompt_tokens - 8
    # Nobody wants calls: they are text.
    assert create(**GREEDY, messages=[USER], tools=[TOOL], tool_choice="none").choices[0].message.content == FIRST


def test_chat_stream_with_a_tool(client, tokenizer):
    options = {"stream": True, "stream_options": {"include_usage": True}, "n": 2}
    chunks = list(client.chat.completions.create(**GREEDY, **options, messages=[USER], tools=[TOOL]))
    assert chunks[-1].usage.completion_tokens == 2 * num_tokens(tokenizer, FIRST)
    for index in range(2):
        choices = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        assert choices[0].delta.role == "assistant"
        assert "".join(c.delta.content or "" for c in choices) == "Sure."
        first, *rest = [call for c in choices for call in c.delta.tool_calls or ()]
        assert first.index == 0 and first.id and first.type == "function"
        assert (first.function.name, first.function.arguments) == ("add", "")
        assert len(rest) > 3 and all(
            call.index == 0 and call.id is None and call.function.name is None for call in rest
        )
        first.function.arguments = "".join(call.function.arguments for call in rest)
        check_call(first)
        assert [c.finish_reason for c in choices if c.finish_reason] == ["tool_calls"]
    with client.chat.completions.stream(**GREEDY, messages=[USER], tools=[TOOL]) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.content == "Sure."
    check_call(message.tool_calls[0])


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_demanded_call_starts_the_answer(client, tokenizer, choice, stream):
    body = {**GREEDY, "messages": [USER], "tools": [TOOL], "tool_choice": choice}
    if stream:
        with client.chat.completions.stream(**body) as events:
            answer = events.get_final_completion()
    else:
        answer = client.chat.completions.create(**body, extra_body={"return_token_ids": True})
        ids = answer.choices[0].token_ids
        prompt = tokenizer.decode(answer.choices[0].prompt_token_ids)
        # The beginning of the call belongs to the prompt: the model has not sampled it.
        assert prompt.startswith(prompt_of(tokenizer, [USER]) + '<tool_call>\n{"name":')
        assert prompt + tokenizer.decode(ids[:-1]) == prompt_of(tokenizer, [USER]) + CALL
    check_call(answer.choices[0].message.tool_calls[0])
    assert not answer.choices[0].message.content and answer.choices[0].finish_reason == "tool_calls"


def test_top_logprobs(client, tokenizer):
    body = {"model": "m", "messages": [USER], "logprobs": True, "top_logprobs": 5, "seed": 3, "max_tokens": 8}
    body |= {"temperature": 2.0}
    entries = client.chat.completions.create(**body).choices[0].logprobs.content
    assert len(entries) == 8
    for entry in entries:
        values = [top.logprob for top in entry.top_logprobs]
        assert len(values) == 5 and values == sorted(values, reverse=True) and sum(map(math.exp, values)) <= 1.0001
        # The texts of parts of characters are equal.
        is_whole = entry.bytes is not None
        same = [top.logprob for top in entry.top_logprobs if is_whole and top.token == entry.token]
        assert not same or same == [pytest.approx(entry.logprob, abs=1e-5)]
        assert entry.logprob <= values[0] + 1e-5
    chunks = list(client.chat.completions.create(**body, stream=True))
    streamed = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert streamed == entries
    answer = client.completions.create(model="m", prompt="ab", max_tokens=3, temperature=0, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert [len(top) for top in logprobs.top_logprobs] == [2, 2, 2]
    assert [max(top.values()) for top in logprobs.top_logprobs] == pytest.approx(logprobs.token_logprobs, abs=1e-5)
    assert logprobs.text_offset[0] == 0


def test_completions_echo_and_stream(client):
    body = {**GREEDY, "prompt": ["2+", "<user>"], "max_tokens": 4, "n": 2}
    plain, echoed = client.completions.create(**body), client.completions.create(**body, echo=True)
    texts = [choice.text for choice in plain.choices]
    assert [choice.text for choice in echoed.choices] == [
        f"2+{texts[0]}", f"2+{texts[1]}", f"<user>{texts[2]}", f"<user>{texts[3]}"
    ]  # fmt: skip
    chunks = list(client.completions.create(**{**body, "prompt": "2+", "n": 1}, echo=True, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == f"2+{texts[0]}"


def test_responses(client):
    answer = client.responses.create(**GREEDY, input="2+2?", tools=[RESPONSES_TOOL])
    text, call = answer.output
    assert answer.status == "completed" and answer.output_text == "Sure." and text.content[0].text == "Sure."
    assert call.type == "function_call" and json.loads(call.arguments) == ARGUMENTS
    items = [{"role": "user", "content": "2+2?"}, *answer.output]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "4"})
    answer = client.responses.create(**GREEDY, input=items, tools=[RESPONSES_TOOL])
    assert answer.output_text == SECOND and answer.usage.input_tokens_details.cached_tokens > 0
    assert answer.usage.input_tokens_details.cache_write_tokens == 0
    short = client.responses.create(**GREEDY, input="2+2?", tools=[RESPONSES_TOOL], max_output_tokens=3)
    assert short.status == "incomplete" and short.incomplete_details.reason == "max_output_tokens"
    include = ["message.output_text.logprobs"]
    answer = client.responses.create(**GREEDY, input=items, tools=[RESPONSES_TOOL], include=include, top_logprobs=2)
    assert len(answer.output[0].content[0].logprobs[0].top_logprobs) == 2


def test_responses_stream(client, tokenizer):
    with client.responses.stream(**GREEDY, input="2+2?", tools=[RESPONSES_TOOL]) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert {"response.output_text.delta", "response.function_call_arguments.done"} <= set(kinds)
    assert kinds.count("response.function_call_arguments.delta") > 3
    assert final.output_text == "Sure." and json.loads(final.output[1].arguments) == ARGUMENTS
    assert final.usage.output_tokens == num_tokens(tokenizer, FIRST)


def test_messages(claude, tokenizer):
    body: dict[str, Any] = {
        "model": "m",
        "extra_body": {"temperature": 0},
        "max_tokens": 200,
        "tools": [ANTHROPIC_TOOL],
    }
    answer = claude.messages.create(**body, messages=[USER])
    text, call = answer.content
    assert answer.stop_reason == "tool_use" and text.text == "Sure."
    assert call.type == "tool_use" and call.name == "add" and call.input == ARGUMENTS
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "4"}]}
    turns = [USER, {"role": "assistant", "content": answer.content}, result]
    answer = claude.messages.create(**body, messages=turns)
    assert answer.content[0].text == SECOND and answer.stop_reason == "end_turn"
    assert answer.usage.output_tokens == num_tokens(tokenizer, SECOND)
    cut = claude.messages.create(**{**body, "max_tokens": 2}, messages=[USER])
    assert cut.stop_reason == "max_tokens"
    stopped = claude.messages.create(**body, messages=turns, stop_sequences=[" is"])
    assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == ("stop_sequence", " is", "It")
    forced = claude.messages.create(**body, messages=[USER], tool_choice={"type": "any"})
    assert [block.type for block in forced.content] == ["tool_use"] and forced.content[0].input == ARGUMENTS


def test_messages_stream(claude, tokenizer):
    body: dict[str, Any] = {
        "model": "m",
        "extra_body": {"temperature": 0},
        "max_tokens": 200,
        "tools": [ANTHROPIC_TOOL],
        "messages": [USER],
    }
    with claude.messages.stream(**body) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == "Sure." and message.stop_reason == "tool_use" and message.content[1].input == ARGUMENTS
    assert message.usage.output_tokens == num_tokens(tokenizer, FIRST)


def test_errors_have_the_shape_that_clients_read(client, claude, url):
    import anthropic

    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="m", messages=[USER], temperature=-1)
    assert "temperature must be between" in caught.value.message
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="m", messages=[USER], tool_choice="required")
    assert caught.value.param == "tool_choice" and caught.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(model="m", input="a", previous_response_id="resp_1")
    with pytest.raises(anthropic.BadRequestError, match="max_tokens must be"):
        claude.messages.create(model="m", max_tokens=0, messages=[USER])
    with pytest.raises(anthropic.AuthenticationError), anthropic.Anthropic(base_url=url, api_key="no") as other:
        other.messages.create(model="m", max_tokens=1, messages=[USER])


def test_history_of_the_training_is_what_the_clients_send(tokenizer):
    assert "<tool>4" in prompt_of(tokenizer, history())
