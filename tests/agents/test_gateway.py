"""The gateway over HTTP, with the official client: all APIs, exact tokens, tokens of sessions, limits, bad input."""

import asyncio
import gc
import json
import logging
import socket
import threading
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import aiohttp
import openai
import pytest
from aiohttp import web

from arealite.agents.export import to_batch
from arealite.agents.gateway import Gateway, SessionLimits
from arealite.api.cli_args import GenerationHyperparameters
from arealite.api.errors import ConfigError, ServerError
from tests.agents.stub_engine import StubEngine
from tests.chat_templates import make_chat_tokenizer

TOKENIZER = make_chat_tokenizer("qwen25")
GCONFIG = GenerationHyperparameters(max_new_tokens=64, temperature=1.0)
TOOL = {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def encode(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def run(scenario):
    asyncio.run(asyncio.wait_for(scenario, 60))


@asynccontextmanager
async def serving(texts, **settings):
    """A gateway whose engine gives the texts one after another, and a session."""
    texts = iter(texts)
    engine = StubEngine(lambda request: encode(next(texts) + "<|im_end|>"))
    gateway = Gateway(engine, TOKENIZER, **settings)
    await gateway.start()
    try:
        yield gateway, engine, gateway.open_session(GCONFIG, seed=1)
    finally:
        await gateway.close()


def client(found, **options):
    return openai.AsyncOpenAI(base_url=found.base_url, api_key=found.token, max_retries=0, timeout=20, **options)


async def post(url, body, token="", **headers):
    """Return status and JSON of a request with any body."""
    data = body if isinstance(body, bytes) else json.dumps(body)
    head = {"Content-Type": "application/json", "Authorization": f"Bearer {token}", **headers}
    async with aiohttp.ClientSession() as http, http.post(url, data=data, headers=head) as answer:
        return answer.status, await answer.json()


def test_turns_with_tools_through_the_official_client():
    async def scenario():
        async with serving([CALL, "it is 3"]) as (_, engine, found), client(found) as api:
            messages = [{"role": "user", "content": "1 + 2?"}]
            tools = [{"type": "function", "function": TOOL}]
            first = await api.chat.completions.create(model="any", messages=messages, tools=tools)
            choice = first.choices[0]
            assert choice.finish_reason == "tool_calls" and choice.message.content is None
            (call,) = choice.message.tool_calls
            assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
            assert first.usage.completion_tokens == len(encode(CALL)) + 1
            messages += [choice.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "3"}]
            second = await api.chat.completions.create(
                model="any", messages=messages, tools=tools, logprobs=True, temperature=0.2, max_tokens=9
            )
            assert second.choices[0].message.content == "it is 3" and second.choices[0].finish_reason == "stop"
            assert len(second.choices[0].logprobs.content) == 8
            one, two = engine.requests
            assert two.input_ids[: len(one.input_ids)] == one.input_ids
            assert two.input_ids[len(one.input_ids) :][: len(encode(CALL))] == encode(CALL)
            assert (two.gconfig.temperature, two.gconfig.max_new_tokens) == (1.0, 9)
            assert one.metadata["session"] == found.id and one.seed != two.seed
            stats = found.session.stats()
            assert (stats["calls"], stats["drift_calls"], stats["branches"], stats["ignored_sampling"]) == (2, 0, 1, 1)

    run(scenario())


def test_streams_choices_and_parallel_calls():
    async def scenario():
        async with serving(["one", "two", "three", CALL]) as (_, _, found), client(found) as api:
            messages = [{"role": "user", "content": "hi"}]
            both = await api.chat.completions.create(model="m", messages=messages, n=2)
            assert [choice.message.content for choice in both.choices] == ["one", "two"]
            stream = await api.chat.completions.create(
                model="m", messages=messages, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            assert said == "three" and chunks[-1].usage.completion_tokens == 6
            tools = [{"type": "function", "function": TOOL}]
            stream = await api.chat.completions.create(model="m", messages=messages, stream=True, tools=tools)
            calls = [c for chunk in [x async for x in stream] for c in chunk.choices[0].delta.tool_calls or []]
            assert (calls[0].function.name, calls[0].function.arguments) == ("add", "") and calls[0].id
            assert json.loads("".join(call.function.arguments for call in calls[1:])) == {"a": 1}
            assert all(call.id is None and call.function.name is None for call in calls[1:])
            assert found.session.stats()["branches"] == 4

    run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_parallel_calls_have_seeds_of_their_own(stream):
    async def scenario():
        async with serving(["an answer"] * 8) as (_, engine, found):
            body = {"messages": [{"role": "user", "content": "hi"}], "stream": stream}

            async def ask(http):
                head = {"Authorization": f"Bearer {found.token}"}
                async with http.post(found.base_url + "/chat/completions", json=body, headers=head) as answer:
                    assert answer.status == 200 and await answer.read()

            async with aiohttp.ClientSession() as http:
                await asyncio.gather(*(ask(http) for _ in range(8)))
            # Equal seeds would sample the same answer to the same prompt.
            assert len({request.seed for request in engine.requests}) == 8

    run(scenario())


BODIES = {
    "chat/completions": {"messages": [{"role": "user", "content": "hi"}], "logprobs": True},
    "completions": {"prompt": "hi", "logprobs": 0},
    "responses": {"input": "hi"},
    "messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 60},
}


async def read_events(answer):
    """Yield the data of server-sent events."""
    async for line in answer.content:
        if line.startswith(b"data: ") and b"[DONE]" not in line:
            yield json.loads(line[6:])


def text_of(event):
    """The text that an event of any of the four APIs adds."""
    for choice in event.get("choices", []):
        return choice.get("text") or choice.get("delta", {}).get("content") or ""
    delta = event.get("delta")
    return delta if isinstance(delta, str) else (delta or {}).get("text", "")


@asynccontextmanager
async def streaming(found, path, **body):
    head = {"Authorization": f"Bearer {found.token}", "Content-Type": "application/json"}
    data = json.dumps({"stream": True, **BODIES[path], **body})
    url = f"{found.base_url}/{path}"
    async with aiohttp.ClientSession() as http, http.post(url, data=data, headers=head) as answer:
        assert answer.status == 200
        yield read_events(answer)


@pytest.mark.parametrize("path", BODIES)
def test_text_is_streamed_while_it_is_generated(path):
    async def scenario():
        async with serving(["caf\u00e9 au lait"]) as (_, engine, found):
            engine.gate, said = asyncio.Event(), ""
            async with streaming(found, path) as events:
                async for event in events:
                    said += text_of(event)
                    if said == "caf\u00e9 au lait":
                        # All of the text has come, and the engine has not returned.
                        assert not found.session.replies or engine.gate.is_set()
                        engine.gate.set()
            assert said == "caf\u00e9 au lait" and len(found.session.replies) == 1

    run(scenario())


def piece_of(event):
    """The piece of arguments that an event adds."""
    for choice in event.get("choices", []):
        return "".join(call["function"]["arguments"] for call in choice["delta"].get("tool_calls", []))
    return event["delta"] if event["type"] == "response.function_call_arguments.delta" else ""


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
def test_arguments_are_streamed_while_they_are_generated(path):
    arguments = '{"a": [1,  2.50], "b": "</tool_call> \\u00e9"}'
    text = f'so <tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call> done'

    async def scenario():
        async with serving([text, text]) as (gateway, engine, _):
            found = gateway.open_session(replace(GCONFIG, max_new_tokens=256))
            engine.gate, pieces, said = asyncio.Event(), list[str](), ""
            tool = {"type": "function", **TOOL} if path == "responses" else {"type": "function", "function": TOOL}
            async with streaming(found, path, tools=[tool]) as events:
                async for event in events:
                    pieces += [piece] if (piece := piece_of(event)) else []
                    said += "" if piece else text_of(event)
                    if "".join(pieces) == arguments:
                        assert not found.session.replies or engine.gate.is_set()
                        engine.gate.set()
            assert "".join(pieces) == arguments and len(pieces) > 8 and said == "so  done"
            (reply,) = found.session.replies.values()
            # The client sends back what it was streamed: the session goes on with the sampled tokens.
            async with client(found) as api:
                if path == "responses":
                    items = event["response"]["output"]
                    items = [{"role": "user", "content": "hi"}, *items]
                    items.append({"type": "function_call_output", "call_id": items[-1]["call_id"], "output": "3"})
                    await api.responses.create(model="m", input=items, tools=[tool])
                    assert found.session.stats()["drift_calls"] == 0 and found.session.stats()["branches"] == 1
            assert reply.tokens

    run(scenario())


def test_a_stream_holds_back_calls_and_stop_strings_and_has_every_logprob_once():
    async def scenario():
        async with serving(["so " + CALL, "yes or no"]) as (gateway, _, _):
            found = gateway.open_session(replace(GCONFIG, max_new_tokens=128))
            async with streaming(found, "chat/completions", tools=[{"type": "function", "function": TOOL}]) as events:
                chunks = [event["choices"][0] async for event in events]
            assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == "so"
            call, *_ = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", [])]
            assert call["function"]["name"] == "add" and chunks[-1]["finish_reason"] == "tool_calls"
            logprobs = [e["logprob"] for chunk in chunks for e in (chunk["logprobs"] or {}).get("content", [])]
            assert logprobs == [-float(i + 1) for i in range(len(encode("so " + CALL)) + 1)]
            async with streaming(found, "chat/completions", stop=["or n"]) as events:
                assert "".join([text_of(event) async for event in events]) == "yes "

    run(scenario())


def test_a_stream_holds_back_all_tokens_that_an_interruption_may_replace():
    """As many as a stop string has bytes, less one: a dash may be three tokens."""

    async def scenario():
        async with serving([]) as (_, engine, found):
            engine.answer = lambda request: request.on_tokens(0, 0, encode("good"), [-1.0] * 4) or encode("gone by")
            async with streaming(found, "chat/completions", stop=["\u2014"]) as events:
                assert "".join([text_of(event) async for event in events]) == "gone by"

    run(scenario())


def test_a_stream_that_cannot_go_on_ends_with_an_error():
    async def scenario():
        async with serving(["hello there", "hello"]) as (gateway, engine, found):
            # The session ends meanwhile.
            engine.gate = asyncio.Event()
            async with streaming(found, "chat/completions") as events:
                async for event in events:
                    if text_of(event):
                        gateway.close_session(found.id)
            assert event["error"]["message"] == "the session has ended" and event["error"]["code"] == 410
            # The server has died: another one says something else.
            found, engine.gate = gateway.open_session(GCONFIG), None
            engine.answer = lambda request: request.on_tokens(0, 0, encode("good"), [-1.0] * 4) or encode("bad")
            async with streaming(found, "chat/completions") as events:
                *_, event = [event async for event in events]
            assert "generated anew" in event["error"]["message"] and not found.session.replies

    run(scenario())


def test_responses_and_messages_and_completions_continue_their_tokens():
    async def scenario():
        async with serving(["one", CALL, "two"] * 2 + ["x", "y"]) as (_, engine, found), client(found) as api:
            tools = [{"type": "function", **TOOL}]
            items = [{"role": "user", "content": "hi"}]
            for text in ("and", None):
                answer = await api.responses.create(model="m", input=items, instructions="be kind", tools=tools)
                items += [item.model_dump(exclude_none=True) for item in answer.output]
                items += [{"role": "user", "content": text}] if text else []
            call = answer.output[-1]
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": "3"})
            answer = await api.responses.create(model="m", input=items, instructions="be kind", tools=tools)
            assert answer.output_text == "two"

            url, messages = f"{found.base_url}/messages", [{"role": "user", "content": "hello"}]
            tools = [{"name": "add", "input_schema": {"type": "object"}}]
            for reply in ("and", "so", "end"):
                body = {"model": "m", "max_tokens": 50, "messages": messages, "tools": tools}
                status, answer = await post(url, body, **{"Authorization": "", "x-api-key": found.token})
                assert status == 200, answer
                messages.append({"role": "assistant", "content": answer["content"]})
                use = [block["id"] for block in answer["content"] if block["type"] == "tool_use"]
                content = [{"type": "tool_result", "tool_use_id": use[0], "content": "3"}] if use else reply
                messages.append({"role": "user", "content": content})
            for _ in range(2):
                text = await api.completions.create(model="m", prompt="once", max_tokens=5)
            assert text.choices[0].text == "y"
            for first in (0, 3):
                earlier, later = engine.requests[first], engine.requests[first + 2]
                assert later.input_ids[: len(earlier.input_ids)] == earlier.input_ids
            stats = found.session.stats()
            assert (stats["calls"], stats["drift_calls"], stats["branches"]) == (8, 0, 4)

    run(scenario())


def test_a_call_with_a_number_of_more_than_64_bits_keeps_its_tokens():
    async def scenario():
        large = CALL.replace("1", "12345678901234567890123")
        async with serving([large, "it is large"]) as (gateway, engine, _):
            found = gateway.open_session(replace(GCONFIG, max_new_tokens=200))
            url, messages = f"{found.base_url}/messages", [{"role": "user", "content": "hello"}]
            body = {"max_tokens": 500, "tools": [{"name": "add", "input_schema": {"type": "object"}}]}
            _, answer = await post(url, {**body, "messages": messages}, found.token)
            (use,) = answer["content"]
            assert use["input"] == {"a": 12345678901234567890123}
            result = {"type": "tool_result", "tool_use_id": use["id"], "content": "3"}
            messages += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
            status, answer = await post(url, {**body, "messages": messages}, found.token)
            assert status == 200, answer
            assert engine.requests[1].input_ids[len(engine.requests[0].input_ids) :][: len(encode(large))] == encode(
                large
            )
            assert found.session.stats()["drift_calls"] == 0

    run(scenario())


def test_a_required_call_begins_with_tokens_that_are_not_trained():
    async def scenario():
        rest = ' "add", "arguments": {}}\n</tool_call>'
        async with serving([rest]) as (_, _, found), client(found) as api:
            tools = [{"type": "function", "function": TOOL}]
            answer = await api.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "hi"}], tools=tools, tool_choice="required"
            )
            assert answer.choices[0].message.tool_calls[0].function.name == "add"
            found.session.reward(1.0)
            batch = to_batch({0: found.session})
            assert TOKENIZER.decode(batch["input_ids"][batch["loss_mask"].bool()]) == rest + "<|im_end|>"

    run(scenario())


def test_a_stop_string_in_the_beginning_of_a_required_call_does_not_cut_it():
    async def scenario():
        rest = ' "add", "arguments": {}}\n</tool_call>'
        async with serving([rest, rest]) as (_, _, found), client(found) as api:
            ask = partial(
                api.chat.completions.create, model="m", messages=[{"role": "user", "content": "hi"}],
                tools=[{"type": "function", "function": TOOL}], tool_choice="required", stop=["\n{", '"name"'],
            )  # fmt: skip
            assert (await ask()).choices[0].message.tool_calls[0].function.name == "add"
            names = []
            async for chunk in await ask(stream=True):
                names += [call.function.name for call in chunk.choices[0].delta.tool_calls or []]
            assert [name for name in names if name] == ["add"]

    run(scenario())


def test_stop_strings_end_the_text_and_stay_in_the_tokens():
    async def scenario():
        async with serving(["one STOP", "two"]) as (_, engine, found), client(found) as api:
            messages = [{"role": "user", "content": "hi"}]
            answer = await api.chat.completions.create(model="m", messages=messages, stop=["STOP"])
            assert answer.choices[0].message.content == "one " and engine.requests[0].gconfig.stop == ["STOP"]
            messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "go"}]
            await api.chat.completions.create(model="m", messages=messages)
            assert encode("one STOP") == engine.requests[1].input_ids[len(engine.requests[0].input_ids) :][:8]
            assert found.session.stats()["drift_calls"] == 0

    run(scenario())


def test_completions_go_on_behind_a_stop_string_and_repeat_a_prompt_without_an_answer():
    async def scenario():
        async with serving(["", "think See:", "x"]) as (_, engine, found), client(found) as api:
            ask = partial(api.completions.create, model="m", stop=["See:"])
            assert (await ask(prompt="Q")).choices[0].text == ""
            # The same prompt is no continuation of the empty answer.
            assert (await ask(prompt="Q")).choices[0].text == "think "
            await ask(prompt="Qthink See: 42")
            sampled = encode("think See:<|im_end|>")
            assert [r.input_ids for r in engine.requests] == [encode("Q")] * 2 + [encode("Q") + sampled + encode(" 42")]

    run(scenario())


def test_an_answer_waits_while_a_long_prompt_reads_the_session():
    """Prompts of large bodies are encoded on a thread, which reads the replies that another call adds to."""

    async def scenario():
        async with serving(["a", "b", "c"]) as (_, engine, found):
            url, session = f"{found.base_url}/chat/completions", found.session
            ask = lambda text: post(url, {"messages": [{"role": "user", "content": text}]}, found.token)  # noqa: E731
            assert (await ask("first"))[0] == 200
            engine.gate = asyncio.Event()
            other = asyncio.create_task(ask("second"))
            while len(engine.requests) < 2:
                await asyncio.sleep(0.005)
            open_chat, is_reading, may_go_on = session.open_chat, threading.Event(), threading.Event()

            def open_slowly(*args):
                replies = iter(session.replies.values())
                next(replies)
                is_reading.set()
                assert may_go_on.wait(20)
                assert list(replies) == []
                return open_chat(*args)

            session.open_chat = open_slowly
            long = asyncio.create_task(ask("x" * (1 << 16)))
            assert await asyncio.to_thread(is_reading.wait, 20)
            engine.gate.set()
            for _ in range(20):
                await asyncio.sleep(0)
            may_go_on.set()
            assert [(await call)[0] for call in (long, other)] == [200, 200]
            assert len(session.replies) == 3

    run(scenario())


def test_rewards_for_calls_and_the_session():
    async def scenario():
        async with serving(["one"]) as (_, _, found), client(found) as api:
            answer = await api.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
            url = f"{found.base_url}/rl/reward"
            assert (await post(url, {"reward": 0.5}, found.token))[0] == 200
            assert (await post(url, {"reward": 2, "id": answer.id}, found.token))[0] == 200
            assert found.session.final_reward == 0.5 and found.session.replies[answer.id].reward == 2.0
            bad = [{}, {"reward": "1"}, {"reward": True}, {"reward": float("nan")}, {"reward": 10**400}]
            for body in [*bad, {"reward": 1, "id": "none"}, {"reward": 1, "id": 5}]:
                assert (await post(url, body, found.token))[0] == 400, body

    run(scenario())


def test_every_choice_has_a_reward_of_its_own():
    async def scenario():
        async with serving(["one"] * 12) as (_, _, found), client(found) as api:
            answer = await api.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], n=12)
            for choice in answer.choices:
                body = {"reward": choice.index + 1, "id": f"{answer.id}-{choice.index}"}
                assert (await post(f"{found.base_url}/rl/reward", body, found.token))[0] == 200, body
            assert [reply.reward for reply in found.session.replies.values()] == [*range(1, 13)]

    run(scenario())


def test_sessions_are_isolated_and_end():
    async def scenario():
        async with serving(["one"] * 4) as (gateway, engine, first):
            second = gateway.open_session(GCONFIG)
            body = {"messages": [{"role": "user", "content": "hi"}]}
            url = f"{first.base_url}/chat/completions"
            for token in ("", "x", second.token, first.token[:-1]):
                status, answer = await post(url, body, token)
                assert status == 401 and answer["error"]["type"] == "authentication_error"
            assert (await post(f"http://127.0.0.1:{gateway.port}/s/none/v1/chat/completions", body, "x"))[0] == 401
            assert (await post(f"http://127.0.0.1:{gateway.port}/nothing", body))[0] == 401
            assert (await post(url, body, first.token, Host="evil.example"))[0] == 403
            assert (await post(url, body, first.token, Origin="http://evil.example"))[0] == 403
            assert (await post(url, body, first.token))[0] == 200
            assert len(first.session.replies) == 1 and not second.session.replies
            # A call in flight ends with its session.
            engine.gate = asyncio.Event()
            call = asyncio.create_task(post(url, body, first.token))
            while len(engine.requests) < 2:
                await asyncio.sleep(0.01)
            assert gateway.close_session(first.id) is first.session
            assert (await call)[0] == 410
            assert (await post(url, body, first.token))[0] == 401
            assert len(first.session.replies) == 1

    run(scenario())


def test_limits_of_sessions():
    async def scenario():
        limits = SessionLimits(max_calls=2, max_tokens=1000, max_choices=2, max_sessions=2)
        async with serving(["one"] * 4, limits=limits) as (gateway, _, found):
            url, body = f"{found.base_url}/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}
            assert (await post(url, {**body, "n": 3}, found.token))[0] == 400
            assert (await post(url, body, found.token))[0] == 200
            status, answer = await post(url, body, found.token)
            assert status == 400 and "allowed are 2 and 1000" in answer["error"]["message"]
            other = gateway.open_session(GCONFIG)
            long = {"messages": [{"role": "user", "content": "hi" * 1000}]}
            assert (await post(f"{other.base_url}/chat/completions", long, other.token))[0] == 200
            assert (await post(f"{other.base_url}/chat/completions", body, other.token))[0] == 400
            with pytest.raises(ServerError, match="2 sessions are open"):
                gateway.open_session(GCONFIG)
        with pytest.raises(ConfigError, match="admin token"):
            Gateway(StubEngine(lambda _: []), TOKENIZER, host="0.0.0.0")

    run(scenario())


BAD = [
    b"{", b"[]", b"\xff\xfe", b'{"messages": 3}', b'{"messages": []}', b'{"messages": [{"role": 3}]}', b"[" * 5000,
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"messages": [{"role": "user", "content": {"a": 1}}]}',
    b'{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}]}',
    b'{"messages": [{"role": "user", "content": "hi"}], "response_format": {"type": "json_object"}}',
    b'{"messages": [{"role": "user", "content": "hi"}], "n": 0}',
    b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 0}',
    b'{"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"tokenize": true}}',
    b'{"messages": [{"role": "user", "content": "hi"}], "unknown": 1}',
    b'{"prompt": [1099511627776]}', b'{"prompt": [-3000000000]}',
    b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///x"}}]}]}',
]  # fmt: skip


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages", "completions", "rl/reward"])
def test_bad_bodies_are_refused_with_a_message(path):
    async def scenario():
        async with serving(["one"] * 100) as (gateway, _, found):
            for body in BAD:
                status, answer = await post(f"{found.base_url}/{path}", body, found.token)
                assert 400 <= status < 500 or (status == 200 and b"ud800" in body), (body, status, answer)
                assert status == 200 or answer["error"]["message"], body
            async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{gateway.port}/health") as answer:
                assert (await answer.json())["status"] == "ok"

    run(scenario())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"response_format": {"type": "json_object"}}, "log-probs without the constraint"),
        ({"logprobs": True, "top_logprobs": 2}, "log-probs of the sampled tokens only"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_the_reason(fields, words):
    async def scenario():
        async with serving([]) as (_, _, found), client(found) as api:
            with pytest.raises(openai.BadRequestError, match=words):
                await api.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], **fields)
            text = {**fields, "logprobs": 2} if "logprobs" in fields else fields
            text.pop("top_logprobs", None)
            with pytest.raises(openai.BadRequestError, match=words):
                await api.completions.create(model="m", prompt="hi", extra_body=text)

    run(scenario())


@pytest.mark.parametrize("name", ["add_generation_prompt", "tools", "messages", "sampled"])
def test_arguments_of_the_renderer_are_no_variables_of_the_template(name):
    """A prompt without the beginning of the answer was trained; `tools` was said to be a broken text."""

    async def scenario():
        async with serving([]) as (_, _, found), client(found) as api:
            body = {"chat_template_kwargs": {name: False, "enable_thinking": False}}
            with pytest.raises(openai.BadRequestError, match=f"variables of the chat template; {name} cannot"):
                messages = [{"role": "user", "content": "hi"}]
                await api.chat.completions.create(model="m", messages=messages, extra_body=body)

    run(scenario())


def test_errors_of_the_engine_reach_the_client_in_its_own_classes():
    async def scenario():
        def fail(request):
            raise [ServerError("all servers are gone"), ValueError("a bug")][len(request.input_ids) > 40]

        gateway = Gateway(StubEngine(fail), TOKENIZER)
        await gateway.start()
        found = gateway.open_session(GCONFIG)
        async with client(found) as api:
            with pytest.raises(openai.InternalServerError, match="all servers are gone"):
                await api.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}])
            with pytest.raises(openai.InternalServerError, match="bug in the gateway"):
                await api.chat.completions.create(model="m", messages=[{"role": "user", "content": "a" * 99}])
            with pytest.raises(openai.BadRequestError, match="non-empty"):
                await api.chat.completions.create(model="m", messages=[])
        await gateway.close()

    run(scenario())


def test_long_and_nested_text_of_the_model_and_a_long_prompt():
    async def scenario():
        answer = "<tool_call>" * 5000 + "[" * 1000 + "x" * 50_000
        async with serving([answer, "ok"]) as (gateway, _, _), aiohttp.ClientSession() as http:
            long = GenerationHyperparameters(max_new_tokens=4_000_000)
            found = gateway.open_session(long)
            gateway.limits = SessionLimits(max_tokens=100_000_000)
            head = {"Authorization": f"Bearer {found.token}"}
            tools = [{"type": "function", "function": TOOL}]
            history = [{"role": "user", "content": "hi"}]
            for text in ("y" * 100_000, ""):
                body = {"messages": history, "tools": tools}
                async with http.post(f"{found.base_url}/chat/completions", json=body, headers=head) as got:
                    assert got.status == 200
                    history += [(await got.json())["choices"][0]["message"], {"role": "user", "content": text}]
            assert found.session.stats()["drift_calls"] == 0

    run(scenario())


CALL_START = '<tool_call>\n{"name": "add", "arguments": {"a": "'


@pytest.mark.parametrize(
    ("start", "piece", "end"),
    [
        ("", "<tool_call>", ""),
        ("", CALL + "\n", ""),
        ("<tool_call>\n", '{"a": [' * 100, ""),
        (CALL_START, "x" * 1000, '"}}\n</tool_call>'),
    ],
    ids=["markers", "calls", "nested", "argument"],
)
def test_ten_megabytes_of_text_of_the_model(start, piece, end):
    """The answer becomes text or calls, and comes back as a history that is recognised."""
    tokenizer = make_chat_tokenizer("qwen25")
    tokenizer.add_tokens([piece])
    long = tokenizer.convert_tokens_to_ids(piece)
    tokens = [*encode(start), *[long] * (10_000_000 // len(piece)), *encode(end + "<|im_end|>")]
    answers = iter([tokens, encode("ok<|im_end|>")])

    async def scenario():
        limits = SessionLimits(max_tokens=100_000_000)
        gateway = Gateway(StubEngine(lambda _: next(answers)), tokenizer, limits=limits)
        await gateway.start()
        found = gateway.open_session(GenerationHyperparameters(max_new_tokens=4_000_000))
        history = [{"role": "user", "content": "hi"}]
        try:
            for _ in range(2):
                body = {"messages": history, "tools": [{"type": "function", "function": TOOL}]}
                status, got = await post(f"{found.base_url}/chat/completions", body, found.token)
                assert status == 200, str(got)[:1000]
                history += [got["choices"][0]["message"], {"role": "user", "content": "and"}]
        finally:
            await gateway.close()
        assert history[3]["content"] == "ok"
        if end:
            (call,) = history[1]["tool_calls"]
            assert len(json.loads(call["function"]["arguments"])["a"]) == 10_000_000
        stats = found.session.stats()
        assert (stats["branches"], stats["drift_calls"], stats["turns"]) == (1, 0, 2)
        assert next(iter(found.session.replies.values())).tokens == tokens

    run(scenario())


def errors_in(caplog):
    return [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]


@pytest.mark.parametrize("error", [None, ServerError("all servers are gone")])
def test_a_client_that_goes_away_while_an_event_is_written_leaves_no_traceback(caplog, monkeypatch, error):
    async def scenario():
        unheard, write = [], web.StreamResponse.write
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: unheard.append(context))
        async with serving(["the answer"]) as (gateway, engine, found):
            engine.gate, engine.error = asyncio.Event(), error

            async def write_to_nobody(response, data):
                # The event loop does not know yet that the connection is lost. The engine ends at the same time.
                for transport in gateway.connections._open:
                    transport.abort()
                engine.gate.set()
                await write(response, data)

            monkeypatch.setattr(web.StreamResponse, "write", write_to_nobody)
            with pytest.raises((aiohttp.ClientError, ConnectionError)):
                async with streaming(found, "chat/completions") as events:
                    _ = [event async for event in events]
            async with asyncio.timeout(10):
                while found.running:
                    await asyncio.sleep(0.01)
        gc.collect()
        await asyncio.sleep(0)
        assert not unheard

    run(scenario())
    assert not errors_in(caplog)


def test_a_session_that_ends_while_a_slow_client_reads_the_last_events_of_an_answer(caplog):
    async def scenario():
        text = "word " * 30_000
        async with serving([text], limits=SessionLimits()) as (gateway, engine, _):
            engine.tells = False
            found = gateway.open_session(replace(GCONFIG, max_new_tokens=100_000))
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", gateway.port))
            reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 12)
            body = json.dumps({"stream": True, **BODIES["chat/completions"]})
            path = found.base_url.partition(f":{gateway.port}")[2]
            head = f"POST {path}/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {found.token}"
            head += f"\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(f"{head}{body}".encode())
            async with asyncio.timeout(30):
                assert b"200 OK" in await reader.readline()
                (task,) = found.running
                gateway.close_session(found.id)
                received = await reader.read()
            assert task.done() and received.endswith(b"\r\n0\r\n\r\n") and b"HTTP/1.1" not in received
            events = [line for line in received.split(b"\n") if line.startswith(b"data: ")]
            assert b"[DONE]" in events[-1] and received.count(b"[DONE]") == 1 and b'"error"' not in received
            writer.close()

    run(scenario())
    assert not errors_in(caplog)
