"""The tree of a session: exact tokens over many turns, branches, drift, returns, rows."""

import json
import random

import pytest

from arealite.agents.export import call_returns, to_batch
from arealite.agents.session import Session
from arealite.api.errors import RequestError
from arealite.api.io_struct import ModelResponse
from arealite.protocol import chat
from arealite.protocol.tool_calls import decode_answer, parse_tool_calls, style_of
from tests.chat_templates import end_of_turn, make_chat_tokenizer
from tests.tiny_model import make_spaced_tokenizer

TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}]
NUMBERS = iter(range(10**9))


def respond(prompt, tokens, reason="stop"):
    logprobs = [-1.0 / (i + 1) for i in range(len(tokens))]
    return ModelResponse(prompt.ids, tokens, logprobs, [7] * len(tokens), reason)


def say(session, messages, text, tools=None, echo=None, end="<|im_end|>"):
    """Make a call and answer it; returns the reply and the message that the client gets."""
    prompt = session.open_chat(messages, tools)
    tokens = session.tokenizer.encode(text + end, add_special_tokens=False)
    echo = echo or {"role": "assistant", "content": text}
    return session.add(prompt, respond(prompt, tokens), f"c{next(NUMBERS)}", [echo]), echo


def user(text):
    return {"role": "user", "content": text}


@pytest.fixture(scope="module")
def qwen():
    return make_chat_tokenizer("qwen25")


def random_text(rng, specials):
    words = [*"abxyz 019.,:{}<>\"'\n|[]/é", *specials, "<tool_call>", "</tool_call>", "<think>", "</think>"]
    return "a" + "".join(rng.choice(words) for _ in range(rng.randint(0, 25))) + "b"


def random_answer(rng, name, specials):
    """Return sampled text: words with special tokens in them, or tool calls, some of them malformed."""
    if name in ("phi3", "llama3") or rng.random() < 0.5:
        return random_text(rng, specials)
    calls = [{"name": rng.choice(["add", "unknown"]), "arguments": {"x": rng.randint(0, 9)}} for _ in range(2)]
    written = [json.dumps(call)[: rng.choice([None, -1])] for call in calls]
    if name == "mistral":
        return f"[TOOL_CALLS] [{', '.join(written)}]"
    return "".join(f"<tool_call>\n{one}\n</tool_call>" for one in written)


def test_a_completion_that_goes_on_has_the_text_of_its_client():
    session = Session(make_spaced_tokenizer())
    prompt = session.open_text("one")
    reply = session.add(prompt, respond(prompt, session.tokenizer.encode("two")), "c", text=" two")
    later = session.open_text("one two\nsees: x")
    assert later.parent is reply and session.tokenizer.decode(later.ids) == " one two\nsees: x"


@pytest.mark.parametrize("name", ["qwen25", "qwen3", "hermes", "llama3", "mistral", "phi3"])
def test_random_histories_keep_every_sampled_token(name):
    """Whatever was sampled is in the next prompt as it was sampled, and nothing drifts."""
    tokenizer, rng = make_chat_tokenizer(name), random.Random(name)
    specials = [token.content for token in tokenizer.added_tokens_decoder.values()]
    end = tokenizer.convert_tokens_to_ids(end_of_turn(name))
    for _ in range(200 if name == "qwen25" else 40):
        session, history, sequence = Session(tokenizer), [user(random_text(rng, specials))], []
        tools = TOOLS if name not in ("phi3", "mistral") else None
        for turn in range(rng.randint(2, 6)):
            # Clients send JSON.
            request = chat.parse(json.loads(json.dumps({"messages": history, "tools": tools})))
            prompt = session.open_chat(request.messages, request.tools)
            assert prompt.ids[: len(sequence)] == sequence and prompt.turn == turn + 1
            tokens = tokenizer.encode(random_answer(rng, name, specials), add_special_tokens=False)
            tokens += [end] * (rng.random() < 0.8)
            text = decode_answer(tokenizer, tokens)
            content, calls = parse_tool_calls(text, style_of(tokenizer), TOOLS) if tools else (text, [])
            answer = chat.Answer(content, "stop", calls)
            message = chat.result(chat.Head("x", "m", 0), [answer], chat.Usage(1, 1))["choices"][0]["message"]
            reply = session.add(prompt, respond(prompt, tokens), f"{turn}", [chat.read_message(message)])
            sequence = prompt.ids + tokens
            assert reply.ids() == sequence
            history.append(message)
            named = message.get("tool_calls", [])
            if named and name != "mistral":
                history += [
                    {"role": "tool", "tool_call_id": call["id"], "content": random_text(rng, specials)}
                    for call in named[: 1 if name == "llama3" else None]
                ]
            else:
                history.append(user(random_text(rng, specials)))
        stats = session.stats()
        assert (stats["drift_calls"], stats["branches"]) == (0, 1)
        assert to_batch({0: session})["input_ids"].tolist() == [sequence]


def test_an_edited_history_begins_a_branch_at_the_last_common_token(qwen):
    session = Session(qwen)
    first, said = say(session, [user("hi")], "one")
    second, again = say(session, [user("hi"), said, user("and")], "two")
    edited = {"role": "assistant", "content": "TWO"}
    prompt = session.open_chat([user("hi"), said, user("and"), edited, user("so")])
    assert prompt.parent is first
    assert prompt.ids[: len(first.ids())] == first.ids()
    whole = qwen.apply_chat_template(
        [user("hi"), said, user("and"), edited, user("so")], add_generation_prompt=True, tokenize=False
    )
    assert qwen.decode(prompt.ids) == whole
    assert session.counts["drift_calls"] == 1
    # All but the edited answer and what follows is shared with the second call's sequence.
    shared = len(second.ids()) - len(second.tokens)
    assert session.counts["drift_tokens"] == len(prompt.ids) - shared
    # A client that sends a shorter history is no drift, but a branch.
    other = session.open_chat([user("hi"), said, user("else")])
    assert other.parent is first and session.counts["drift_calls"] == 1
    assert again["content"] == "two"


def test_examples_of_the_agent_are_no_drift(qwen):
    """Drift is an answer of this session in another form; what the agent itself lets the assistant say is none."""
    session = Session(qwen)
    shots = [user("2 + 2"), {"role": "assistant", "content": "4"}]
    _, said = say(session, [*shots, user("1 + 1")], "2")
    history = [*shots, user("1 + 1"), said]
    say(session, [*history, user("and")], "4")
    # A sub-agent with examples of its own, one of them with the words of an answer; and a canned answer.
    say(session, [user("is it?"), {"role": "assistant", "content": "2"}, user("so")], "yes")
    say(session, [*history, user("else"), {"role": "assistant", "content": "canned"}, user("go on")], "no")
    # Other examples in front of another question: no answer is sent back.
    say(session, [user("3 + 3"), {"role": "assistant", "content": "6"}, user("1 + 1")], "2")
    assert session.counts["drift_calls"] == 0


@pytest.mark.parametrize("change", ["edited", "split", "window", "system", "tools"])
def test_answers_that_come_back_changed_or_behind_other_messages_are_drift(qwen, change):
    session = Session(qwen)
    _, one = say(session, [user("hi")], "one")
    _, two = say(session, [user("hi"), one, user("and")], "two")
    whole = [user("hi"), one, user("and"), two, user("so")]
    split = [{"role": "assistant", "content": "t"}, {"role": "assistant", "content": "wo"}]
    histories = {
        "edited": [*whole[:3], {"role": "assistant", "content": "TWO"}, whole[4]],
        "split": [*whole[:3], *split, whole[4]],
        "window": whole[2:],
        "system": [{"role": "system", "content": "be brief"}, *whole],
        "tools": whole,
    }
    session.open_chat(histories[change], TOOLS if change == "tools" else None)
    assert session.counts["drift_calls"] == 1 and session.counts["drift_tokens"] > 0


def test_text_encoded_again_to_the_same_tokens_is_no_drift(qwen):
    """Whatever the client did to a message, equal tokens are the same history."""
    session = Session(qwen)
    first, said = say(session, [user("hi")], "one")
    prompt = session.open_chat([user("hi"), {**said, "name": "bot"}, user("and")])
    assert prompt.parent is first and session.counts["drift_calls"] == 0


def test_other_tools_or_system_prompts_begin_at_the_root(qwen):
    session = Session(qwen)
    say(session, [user("hi")], "one", TOOLS)
    assert session.open_chat([user("hi")]).parent is None
    changed = session.open_chat([{"role": "system", "content": "x"}, user("hi")], TOOLS)
    assert changed.parent is None and session.counts["drift_calls"] == 0


def test_messages_are_compared_as_data(qwen):
    """Frameworks rewrite JSON, drop null fields and give calls other ids."""
    session = Session(qwen)
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a":1,"b":[2]}'}}
    sent = chat.read_message({"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]})
    first, _ = say(session, [user("hi")], '<tool_call>{"name": "add", ', TOOLS, sent)
    other = {"id": "z", "type": "function", "function": {"name": "add", "arguments": '{"b": [2], "a": 1}'}}
    back = {"role": "assistant", "content": [{"type": "text", "text": ""}], "tool_calls": [other]}
    result = {"role": "tool", "tool_call_id": "z", "content": "3"}
    messages = [chat.read_message(message) for message in (user("hi"), back, result)]
    assert session.open_chat(messages, TOOLS).parent is first
    wrong = {**other, "function": {"name": "add", "arguments": '{"a": 2}'}}
    messages[1] = chat.read_message({**back, "tool_calls": [wrong]})
    assert session.open_chat(messages, TOOLS).parent is None


def test_text_completions_continue_their_own_tokens(qwen):
    session = Session(qwen)
    prompt = session.open_text("abc")
    # These tokens would be encoded in another way if they were text.
    tokens = [*qwen.encode("de", add_special_tokens=False), qwen.unk_token_id]
    first = session.add(prompt, respond(prompt, tokens, "length"), "c0", text="de")
    later = session.open_text("abcde fg")
    assert later.parent is first and later.ids == prompt.ids + tokens + qwen.encode(" fg", add_special_tokens=False)
    by_ids = session.open_text([*first.ids(), 5])
    assert by_ids.parent is first and by_ids.observed == [5]


def test_tokens_of_inner_calls_are_trained_once(qwen):
    """A tree: one call, two answers to it (n = 2), each continued; and a sub-agent with a history of its own."""
    session = Session(qwen)
    root, said = say(session, [user("hi")], "one")
    prompt = session.open_chat([user("hi"), said, user("and")])
    for text in ("two", "three"):
        tokens = qwen.encode(text, add_special_tokens=False)
        echo = {"role": "assistant", "content": text}
        session.add(prompt, respond(prompt, tokens, "length"), text, [echo])
    for text in ("two", "three"):
        say(session, [user("hi"), said, user("and"), {"role": "assistant", "content": text}, user("so")], "end")
    say(session, [user("sub")], "task")
    session.reward(1.0)
    batch = to_batch({4: session})
    assert batch["sample_ids"].tolist() == [4, 4, 4] and "token_rewards" not in batch
    texts = [qwen.decode(ids[mask.bool()]) for ids, mask in zip(batch["input_ids"], batch["loss_mask"], strict=True)]
    assert texts == ["one<|im_end|>twoend<|im_end|>", "threeend<|im_end|>", "task<|im_end|>"]
    assert int(batch["loss_mask"].sum()) == session.counts["sampled_tokens"]
    # The first answer is in the second row too, as it was sampled, but masked.
    start = len(root.observed)
    inner = slice(start, start + len(root.tokens))
    assert batch["input_ids"][1, inner].tolist() == root.tokens and not batch["loss_mask"][1, inner].any()
    assert batch["versions"][1, inner].eq(7).all() and batch["versions"][0, : len(root.observed)].eq(-1).all()
    trained = batch["loss_mask"].bool()
    expected = [value for reply in session.replies.values() for value in reply.logprobs]
    assert sorted(batch["logprobs"][trained].tolist()) == pytest.approx(sorted(expected))
    assert batch["truncated"].tolist() == [False] * 3
    assert batch["stats/branches"].tolist() == [3.0] * 3


def test_returns_discount_later_turns_by_hand(qwen):
    session = Session(qwen, turn_discount=0.5)
    history, ids = [user("hi")], []
    for text in ("one", "two", "three"):
        reply, said = say(session, history, text)
        ids.append(reply.id)
        history += [said, user("and")]
    session.reward(8.0)
    session.reward(2.0, ids[1])
    returns, total = call_returns(session)
    # Turn 3: 8. Turn 2: 2 + 8 / 2. Turn 1: 2 / 2 + 8 / 4.
    assert returns == {ids[0]: 3.0, ids[1]: 6.0, ids[2]: 8.0} and total == 3.0
    batch = to_batch({0: session})
    assert batch["rewards"].tolist() == [3.0]
    per_token = [returns[i] for i, reply in session.replies.items() for _ in reply.tokens]
    assert batch["token_rewards"][batch["loss_mask"].bool()].tolist() == per_token
    # Without a discount and with one reward at the end, all calls have the same return.
    session.turn_discount = 1.0
    session.reward(0.0, ids[1])
    assert call_returns(session) == ({i: 8.0 for i in ids}, 8.0)
    assert "token_rewards" not in to_batch({0: session})


def test_parallel_calls_are_of_the_same_turn(qwen):
    session = Session(qwen, turn_discount=0.5)
    prompts = [session.open_chat([user(name)]) for name in ("a", "b")]
    for i, prompt in enumerate(prompts):
        session.add(prompt, respond(prompt, [40]), f"p{i}", [{"role": "assistant", "content": "x"}])
    say(session, [user("join")], "done")
    session.reward(4.0)
    session.reward(1.0, "p0")
    assert [reply.turn for reply in session.replies.values()] == [1, 1, 2]
    returns, total = call_returns(session)
    assert list(returns.values()) == [3.0, 2.0, 4.0] and total == 3.0


def test_bad_rewards_and_responses_are_refused(qwen):
    session = Session(qwen)
    prompt = session.open_chat([user("hi")])
    with pytest.raises(RequestError, match="finite"):
        session.reward(float("nan"))
    with pytest.raises(RequestError, match=r"finite number, also in float32; got 1e\+39"):
        session.reward(1e39)
    with pytest.raises(RequestError, match="no call"):
        session.reward(1.0, "x")
    with pytest.raises(RequestError, match="token for token"):
        session.add(prompt, ModelResponse([1], [2], [0.0], [0], "stop"), "c")
    assert not session.has_reward
