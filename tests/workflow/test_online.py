"""Online mode: sessions from outside fill the groups of episodes."""

import asyncio
import json
import pickle
import threading
import urllib.request

import aiohttp
import openai
import pytest

from arealite.api.cli_args import GenerationHyperparameters, InferenceEngineConfig, PPOActorConfig, ServerConfig
from arealite.api.errors import ConfigError
from arealite.api.io_struct import WeightUpdateMeta
from arealite.engine.embedded import EmbeddedEngine
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.weights.sync import sync_weights
from arealite.workflow.online import OnlineWorkflow
from tests.agents.stub_engine import StubEngine
from tests.chat_templates import make_chat_tokenizer
from tests.engine.engine_testing import SPEC, engine_config

TOKENIZER = make_chat_tokenizer("qwen25")
ADMIN = "admin-token"


def make(n=2, **options):
    gconfig = GenerationHyperparameters(n_samples=n, max_new_tokens=32)
    return OnlineWorkflow(gconfig, TOKENIZER, ADMIN, **options)


async def post(http, url, token, **body):
    async with http.post(url, json=body, headers={"Authorization": f"Bearer {token}"}) as answer:
        return answer.status, await answer.json()


def play(workflow, num_episodes, client):
    """Run episodes beside a client that gets the gateway's address."""

    async def scenario():
        engine = StubEngine(lambda _: TOKENIZER.encode("yes<|im_end|>", add_special_tokens=False))
        tasks = [asyncio.create_task(workflow.arun_episode(engine, {})) for _ in range(num_episodes)]
        gateway = await workflow.host.get(engine)
        await asyncio.sleep(0)
        try:
            async with aiohttp.ClientSession() as http:
                await client(http, f"http://127.0.0.1:{gateway.port}")
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await workflow.host.close()

    return asyncio.run(asyncio.wait_for(scenario(), 60))


async def chat(started, count=1):
    async with openai.AsyncOpenAI(base_url=started["base_url"], api_key=started["api_key"]) as api:
        for i in range(count):
            await api.chat.completions.create(model="m", messages=[{"role": "user", "content": f"q{i}"}])


def test_sessions_of_a_task_become_a_group(capsys):
    async def client(http, url):
        # Without it, the console says only that it waits for the first batch.
        assert capsys.readouterr().out == f"agents start sessions at {url}/rl/sessions\n"
        started = []
        for group in ("a", "b", "a", "b"):
            status, session = await post(http, f"{url}/rl/sessions", ADMIN, group=group)
            assert status == 200
            started.append(session)
        assert (await post(http, f"{url}/rl/sessions", ADMIN, group="c"))[0] == 503
        for i, session in enumerate(started):
            await chat(session)
            name = session["session"]
            if i < 2:
                # The agent itself, with the token of its session.
                base = session["base_url"]
                assert (await post(http, f"{base}/rl/end", session["api_key"]))[0] == 400  # no reward yet
                assert (await post(http, f"{base}/rl/end", session["api_key"], reward=float(i)))[0] == 200
            else:
                # Somebody else, with the admin token.
                assert (await post(http, f"{url}/rl/reward", ADMIN, session=name, reward=float(i)))[0] == 200
                assert (await post(http, f"{url}/rl/end", ADMIN, session=name))[0] == 200
            assert (await post(http, f"{url}/rl/end", ADMIN, session=name))[0] == 400

    first, second = play(make(), 2, client)
    assert first["rewards"].tolist() == [0.0, 2.0] and first["sample_ids"].tolist() == [0, 1]
    assert second["rewards"].tolist() == [1.0, 3.0]


def test_only_the_admin_starts_sessions_and_names_the_task():
    async def client(http, url):
        for path in ("sessions", "reward", "end"):
            assert (await post(http, f"{url}/rl/{path}", "wrong", group="a"))[0] == 401
        for group in (None, "", 3, "x" * 300):
            assert (await post(http, f"{url}/rl/sessions", ADMIN, group=group))[0] == 400
        for session in (None, 3, "none"):
            assert (await post(http, f"{url}/rl/end", ADMIN, session=session, reward=1))[0] == 400
        for reward in (0.0, 1.0):
            _, session = await post(http, f"{url}/rl/sessions", ADMIN, group="a")
            # A session's token is no admin's.
            assert (await post(http, f"{url}/rl/sessions", session["api_key"], group="a"))[0] == 401
            await chat(session)
            assert (await post(http, f"{url}/rl/end", ADMIN, session=session["session"], reward=reward))[0] == 200

    assert play(make(), 1, client)[0] is not None
    with pytest.raises(ConfigError, match="admin token"):
        OnlineWorkflow(GenerationHyperparameters(), TOKENIZER, "")


def test_the_place_of_a_session_that_was_given_up_is_free_again():
    async def client(http, url):
        async def start(group):
            status, session = await post(http, f"{url}/rl/sessions", ADMIN, group=group)
            assert status == 200, session
            await chat(session)
            return session

        async def end(session, **body):
            status, _ = await post(http, f"{session['base_url']}/rl/end", session["api_key"], **body)
            assert status == 200

        # The only session of its task: the next one may be at another.
        await end(await start("a"), give_up=True)
        first = await start("b")
        await end(first, reward=1.0)
        lost = await start("b")
        assert (await post(http, f"{url}/rl/sessions", ADMIN, group="b"))[0] == 503
        assert (await post(http, f"{lost['base_url']}/rl/end", lost["api_key"], give_up="yes"))[0] == 400
        assert (await post(http, f"{url}/rl/end", ADMIN, session=lost["session"], give_up=True))[0] == 200
        assert (await post(http, f"{lost['base_url']}/rl/end", lost["api_key"], reward=0.5))[0] == 401
        await end(await start("b"), reward=0.0)

    (batch,) = play(make(), 1, client)
    assert batch["rewards"].tolist() == [1.0, 0.0] and batch["sample_ids"].tolist() == [0, 1]


def test_sessions_that_are_left_alone_expire_and_the_others_count():
    async def client(http, url):
        for reward in (0.0, 1.0, None):
            _, session = await post(http, f"{url}/rl/sessions", ADMIN, group="a")
            await chat(session)
            if reward is not None:
                await post(http, f"{url}/rl/end", ADMIN, session=session["session"], reward=reward)

    (batch,) = play(make(n=3, session_timeout_s=2.0), 1, client)
    assert batch["rewards"].tolist() == [0.0, 1.0]


def test_the_log_says_why_sessions_are_not_trained_on(caplog):
    """The client was told that all went well, and the episode was only counted as rejected."""

    async def client(http, url):
        for calls in (0, 1):
            _, session = await post(http, f"{url}/rl/sessions", ADMIN, group="a")
            await chat(session, calls)
            assert (await post(http, f"{session['base_url']}/rl/end", session["api_key"], reward=1.0))[0] == 200

    assert play(make(), 1, client) == [None]
    expected = (
        "sessions of the group 'a' are not trained on: 2 started, 2 ended with a reward, 1 of these had an answer"
    )
    assert expected in caplog.text


def test_a_session_is_told_when_its_group_ends():
    """Not its own timeout: it was closed earlier than the client had been told."""

    async def client(http, url):
        _, first = await post(http, f"{url}/rl/sessions", ADMIN, group="a")
        # Longer than the unit to which times are rounded.
        await asyncio.sleep(0.01)
        _, second = await post(http, f"{url}/rl/sessions", ADMIN, group="a")
        assert second["timeout_s"] < first["timeout_s"] <= 60.0
        for session in (first, second):
            await chat(session)
            assert (await post(http, f"{session['base_url']}/rl/end", session["api_key"], reward=1))[0] == 200

    assert play(make(session_timeout_s=60.0), 1, client)[0]["rewards"].tolist() == [1.0, 1.0]


def test_clients_get_the_address_that_they_used():
    """A gateway that listens on all addresses does not know by which one a client reaches it."""

    async def client(http, url):
        _, session = await post(http, f"{url.replace('127.0.0.1', '127.0.0.2')}/rl/sessions", ADMIN)
        assert session["base_url"].startswith(url.replace("127.0.0.1", "127.0.0.2"))
        await chat(session)
        assert (await post(http, f"{session['base_url']}/rl/end", session["api_key"], reward=1))[0] == 200

    assert play(make(n=1, host="0.0.0.0"), 1, client)[0]["rewards"].tolist() == [1.0]


def test_rollout_workers_are_refused():
    with pytest.raises(ConfigError, match=r"set rollout.num_workers=0"):
        pickle.dumps(make())


@pytest.mark.slow
def test_training_goes_on_from_what_arrives(model_path, tokenizer, tmp_path):
    """Agents on a thread of their own chat while an actor trains; nothing is older than the limit."""
    config = InferenceEngineConfig(max_head_offpolicyness=1, batch_timeout_s=60.0)
    engine = EmbeddedEngine(config, ServerConfig(model_path=str(model_path), max_total_tokens=8192))
    engine.initialize(train_batch_size=2)
    actor = FSDPPPOActor(engine_config(model_path, PPOActorConfig, lr=1e-3))
    actor.initialize(SPEC)
    workflow = OnlineWorkflow(GenerationHyperparameters(n_samples=2, max_new_tokens=8), tokenizer, ADMIN)
    stop = threading.Event()

    def call(url, token, **body):
        head = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), head), timeout=20) as answer:
            return json.load(answer)

    def agents():
        number = 0
        while not stop.wait(0.01):
            if workflow._gateway is None:
                continue
            url = f"http://127.0.0.1:{workflow._gateway.port}"
            try:
                for reward in (0.0, 1.0):
                    session = call(f"{url}/rl/sessions", ADMIN, group=f"task {number}")
                    for turn in range(2):
                        messages = [{"role": "user", "content": f"hi {turn}"}]
                        call(f"{session['base_url']}/chat/completions", session["api_key"], messages=messages)
                    call(f"{url}/rl/end", ADMIN, session=session["session"], reward=reward)
                number += 1
            except OSError:
                # The trainer has enough, or has ended.
                continue

    thread = threading.Thread(target=agents)
    thread.start()
    try:
        for step in range(3):
            batch = engine.prepare_batch([[{"slot": 0}, {"slot": 1}]] * 4, workflow)
            assert batch["versions"].max() <= step and batch["versions"][batch["loss_mask"].bool()].min() >= step - 1
            assert batch["rewards"].mean() == 0.5
            batch["prox_logp"] = actor.compute_logp(batch)
            actor.compute_advantages(batch)
            actor.ppo_update(batch)
            meta = WeightUpdateMeta("disk", str(tmp_path), step + 1)
            sync_weights(actor, engine, meta)
    finally:
        stop.set()
        thread.join(30)
        engine.destroy()
        actor.destroy()
