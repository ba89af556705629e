"""Black-box agents as workflows: rewards, failures, deadlines, commands, branches, and a real engine."""

import asyncio
import contextlib
import functools
import multiprocessing
import os
import signal
import ssl
import threading
from pathlib import Path

import numpy as np
import openai
import pytest
import torch

from arealite.agents.gateway import SessionLimits
from arealite.api.cli_args import GenerationHyperparameters, InferenceEngineConfig, ServerConfig
from arealite.api.errors import RewardError
from arealite.engine.embedded import EmbeddedEngine
from arealite.workflow.openai import AgentWorkflow
from tests.agents.stub_engine import StubEngine
from tests.chat_templates import make_chat_tokenizer
from tests.workflow import blocking_agents

TOKENIZER = make_chat_tokenizer("qwen25")
# A client would make one of its own, which takes 0.1 s and more on busy cores: deadlines here are short.
TLS = ssl.create_default_context()


def encode(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def make(agent, n=3, **options):
    gconfig = GenerationHyperparameters(n_samples=n, max_new_tokens=32)
    return AgentWorkflow(agent, gconfig, TOKENIZER, **options)


def play(workflow, engine=None, **row):
    """Run one episode on an event loop of its own."""

    async def episode():
        try:
            return await workflow.arun_episode(engine or StubEngine(lambda _: encode("yes<|im_end|>")), row)
        finally:
            await workflow.host.close()
            workflow.pool.close()

    return asyncio.run(asyncio.wait_for(episode(), 60))


def client(base_url, api_key):
    http = openai.DefaultAsyncHttpxClient(verify=TLS)
    return openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=30, http_client=http)


async def two_turns(row, base_url, api_key):
    """The agent of a user: the official client, a history of its own, a reward."""
    async with client(base_url, api_key) as api:
        messages = [{"role": "user", "content": row["question"]}]
        for _ in range(2):
            answer = await api.chat.completions.create(model="policy", messages=messages)
            messages += [answer.choices[0].message, {"role": "user", "content": "sure?"}]
        return float(answer.choices[0].message.content == "yes")


def test_attempts_run_at_once_and_become_samples_of_one_group():
    engine = StubEngine(lambda _: encode("yes<|im_end|>"))
    batch = play(make(two_turns), engine, question="1 + 1 = 2?", seed=5)
    assert batch["sample_ids"].tolist() == [0, 1, 2] and batch["rewards"].tolist() == [1.0] * 3
    assert batch["loss_mask"].sum(1).tolist() == [8] * 3
    trained = batch["input_ids"][0][batch["loss_mask"][0].bool()]
    assert TOKENIZER.decode(trained) == "yes<|im_end|>yes<|im_end|>"
    assert len({request.seed for request in engine.requests}) == 6
    assert batch["stats/turns"].tolist() == [2.0] * 3 and batch["stats/drift_calls"].tolist() == [0.0] * 3


@pytest.mark.parametrize("reward", [np.float32(0.5), torch.tensor(0.5)])
def test_an_agent_may_return_a_number_of_a_library(reward):
    async def agent(row, base_url, api_key):
        async with client(base_url, api_key) as api:
            await api.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        return reward

    assert play(make(agent, n=1))["rewards"].tolist() == [0.5]


def test_attempts_with_many_calls_share_no_seed():
    async def agent(row, base_url, api_key):
        async with client(base_url, api_key) as api:
            for _ in range(70):
                await api.completions.create(model="policy", prompt="more")
        return 1.0

    engine = StubEngine(lambda _: encode("yes<|im_end|>"))
    play(make(agent, n=2), engine, seed=5)
    assert len({request.seed for request in engine.requests}) == 140


def test_agents_that_raise_or_hang_cost_their_own_attempt():
    count = iter(range(10))

    async def agent(row, base_url, api_key):
        number = next(count)
        reward = await two_turns(row, base_url, api_key)
        if number == 0:
            raise KeyError("lost")
        if number == 1:
            await asyncio.Event().wait()
        if number == 2:
            raise asyncio.CancelledError
        return reward

    batch = play(make(agent, n=5, timeout_s=1.0), question="x")
    assert len(set(batch["sample_ids"].tolist())) == 2 and batch["stats/failed_attempts"].tolist() == [3.0] * 2


def test_an_agent_that_exits_costs_its_own_attempt_and_not_the_event_loop():
    async def agent(row, base_url, token):
        raise SystemExit(1)

    with pytest.raises(RewardError, match=r"all 2 attempts of the agent failed.*the agent raised SystemExit\(1\)"):
        play(make(agent, n=2), question="x")


def test_a_timeout_of_the_agents_own_is_not_its_deadline():
    async def agent(row, base_url, token):
        raise TimeoutError("no answer of the database")

    with pytest.raises(RewardError, match="TimeoutError: no answer of the database"):
        play(make(agent, n=1), question="x")


def test_an_agent_that_ignores_its_cancellation_does_not_hold_the_other_attempts(monkeypatch):
    monkeypatch.setattr("arealite.workflow.openai._ENDING_S", 0.1)
    count, leave = iter(range(10)), asyncio.Event()

    async def agent(row, base_url, api_key):
        if next(count) > 0:
            return await two_turns(row, base_url, api_key)
        while not leave.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await leave.wait()
        return 1.0

    workflow = make(agent, n=3, timeout_s=1.0)
    run = workflow.arun_episode

    async def then_leave(engine, row):
        batch = await run(engine, row)
        leave.set()
        return batch

    workflow.arun_episode = then_leave
    batch = play(workflow, question="x")
    assert len(set(batch["sample_ids"].tolist())) == 2 and batch["stats/failed_attempts"].tolist() == [1.0] * 2


def test_an_attempt_without_room_for_its_session_is_one_that_failed():
    limits = SessionLimits(max_sessions=2)
    batch = play(make(two_turns, n=3, limits=limits), question="x")
    assert batch["stats/failed_attempts"].tolist() == [1.0] * 2
    with pytest.raises(RewardError, match="sessions are open"):
        play(make(two_turns, n=1, limits=SessionLimits(max_sessions=0)), question="x")


def test_an_episode_that_is_cancelled_ends_its_agents():
    started, ended = asyncio.Semaphore(0), []

    async def agent(row, base_url, api_key):
        started.release()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(row)

    async def cancel():
        workflow = make(agent)
        episode = asyncio.create_task(workflow.arun_episode(StubEngine(lambda _: encode("yes")), {}))
        for _ in range(3):
            await started.acquire()
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode
        await workflow.host.close()

    asyncio.run(cancel())
    assert len(ended) == 3


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (None, "posted no reward"),
        (float("nan"), "finite number"),
        (-1e39, r"returned -1e\+39; expected a finite number, also in float32"),
        ("1", "finite number"),
        (1.0, "not called the model"),
    ],
)
def test_attempts_without_a_reward_or_a_call_are_errors(result, words):
    async def agent(row, base_url, api_key):
        if result != 1.0:
            await two_turns(row, base_url, api_key)
        return result

    with pytest.raises(RewardError, match=words):
        play(make(agent), question="x")


def test_blocking_agents_that_hang_are_killed_and_the_others_go_on(tmp_path):
    """As many attempts hang as there are processes, and more; the rest still runs, and nothing is left behind."""
    workflow = make(blocking_agents.some_hang, n=8, timeout_s=2.5, max_processes=2)
    batch = play(workflow, folder=str(tmp_path), pid=os.getpid())
    assert batch["rewards"].tolist() == [1.0] * 5 and batch["stats/failed_attempts"].tolist() == [3.0] * 5
    workflow = make(blocking_agents.all_hang, n=8, timeout_s=0.1, max_processes=2)
    with pytest.raises(RewardError, match=r"all 8 attempts .* within 0.1 s"):
        play(workflow)
    for child in multiprocessing.active_children():
        if child.name == "arealite-call":
            child.join(30)
            assert child.exitcode is not None
    assert not [t for t in threading.enumerate() if t.name == "beside the event loop"]


def test_a_blocking_agent_that_no_process_can_load_is_refused():
    with pytest.raises(RewardError, match="define it at the top level of a module"):
        play(make(lambda row, base_url, api_key: 1.0, n=1))


class AsyncAgent:
    async def __call__(self, row, base_url, api_key):
        return await two_turns(row, base_url, api_key)


def test_objects_and_partials_are_agents_too():
    for agent in (AsyncAgent(), functools.partial(two_turns)):
        assert play(make(agent, n=1), question="x")["rewards"].tolist() == [1.0]


CURL = """
answer=$(curl -s "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \
  -H "Content-Type: application/json" -d '{"messages": [{"role": "user", "content": "hi"}]}')
echo "$AREALITE_ROW" | grep -q '"question": "why"' && echo "$answer" | grep -q '"yes"' && echo 0.75
"""


def test_a_shell_script_with_curl_is_an_agent():
    batch = play(make(["bash", "-c", CURL], n=2), question="why")
    assert batch["rewards"].tolist() == [0.75, 0.75]


def test_commands_that_fail_hang_or_write_without_end_are_contained(tmp_path):
    with pytest.raises(RewardError, match="code 3; the end of its output: oops"):
        play(make(["bash", "-c", "echo oops; exit 3"], n=1))
    pids = tmp_path / "pids"
    script = f"echo $$ >> {pids}; sleep 600 & echo $! >> {pids}; yes; sleep 600"
    with pytest.raises(RewardError, match="within 1 s"):
        play(make(["bash", "-c", script], n=1, timeout_s=1.0))
    for pid in map(int, pids.read_text().split()):
        stat = Path(f"/proc/{pid}/stat")
        assert not stat.exists() or " Z " in stat.read_text()


def test_a_command_without_a_number_at_the_end_is_shown_with_its_output():
    with pytest.raises(
        RewardError, match=r"is not a number.*\$OPENAI_BASE_URL/rl/reward; the end of its output: 'reward: 1\\n'"
    ):
        play(make(["bash", "-c", "echo reward: 1"], n=1))
    post = CURL.replace("chat/completions", "rl/reward").partition(" -d ")[0] + """ -d '{"reward": 0.5}')\necho done"""
    batch = play(make(["bash", "-c", CURL + post], n=1), question="why")
    assert batch["rewards"].tolist() == [0.5]


def test_a_row_that_no_variable_can_hold_is_refused_with_the_reason():
    fits = 131_058 - len('{"question": "why", "text": "", "seed": 1}')
    row = {"question": "why", "seed": 1}
    assert play(make(["bash", "-c", CURL], n=1), **row, text="x" * fits)["rewards"].tolist() == [0.75]
    with pytest.raises(RewardError, match="the row has 131059 characters as JSON"):
        play(make(["bash", "-c", CURL], n=1), **row, text="x" * (fits + 1))


def test_a_process_that_a_command_leaves_behind_does_not_hold_its_attempt(tmp_path):
    left = tmp_path / "pid"
    batch = play(make(["bash", "-c", f"sleep 600 & echo $! > {left}; {CURL}"], n=1), question="why")
    assert batch["rewards"].tolist() == [0.75]
    stat = Path(f"/proc/{int(left.read_text())}/stat")
    assert not stat.exists() or " Z " in stat.read_text()


def test_a_session_that_a_command_leaves_behind_does_not_hold_its_attempt(tmp_path):
    left = tmp_path / "pid"
    script = f"setsid bash -c 'echo $$ > {left}; exec sleep 600' & while [ ! -s {left} ]; do :; done; {CURL}"
    try:
        batch = play(make(["bash", "-c", script], n=1, timeout_s=50.0), question="why")
        assert batch["rewards"].tolist() == [0.75]
    finally:
        os.kill(int(left.read_text()), signal.SIGKILL)


def test_rewards_of_calls_become_returns_of_tokens():
    async def agent(row, base_url, api_key):
        async with client(base_url, api_key) as api:
            for reward in (1.0, 0.0):
                answer = await api.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": str(reward)}]
                )
                body = {"reward": reward, "id": answer.id}
                await api.post("/rl/reward", body=body, cast_to=object)

    batch = play(make(agent, n=1, turn_discount=0.5))
    assert batch["rewards"].tolist() == [1.0, 1.0] and batch["sample_ids"].tolist() == [0, 0]
    assert batch["token_rewards"][batch["loss_mask"].bool()].unique().tolist() == [0.0, 1.0]


def test_a_real_engine_and_executor(model_path, tokenizer):
    """Token for token: the log-probs of what the sessions sampled are those of the engine."""
    config = InferenceEngineConfig(max_head_offpolicyness=1)
    engine = EmbeddedEngine(config, ServerConfig(model_path=str(model_path), max_total_tokens=4096))
    engine.initialize(train_batch_size=2)
    gconfig = GenerationHyperparameters(n_samples=2, max_new_tokens=6)
    try:
        rows = [{"question": word} for word in ("one", "two")]
        batch = engine.rollout_batch(rows, AgentWorkflow(two_turns, gconfig, tokenizer))
    finally:
        engine.destroy()
    assert batch["group_ids"].tolist() == [0, 0, 1, 1] and batch["sample_ids"].tolist() == [0, 1, 0, 1]
    assert batch["stats/drift_calls"].sum() == 0 and torch.isfinite(batch["logprobs"]).all()
    assert (batch["versions"][batch["loss_mask"].bool()] == 0).all()
    assert not [t for t in threading.enumerate() if t.name.startswith("agent")]
