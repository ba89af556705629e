"""Judges and served reward models, against a real HTTP server that behaves badly."""

import asyncio
import pickle
import sqlite3
import time
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.errors import ConfigError, RewardError
from arealite.api.workflow_api import RolloutWorkflow
from arealite.core.workflow_executor import WorkflowExecutor
from arealite.reward import endpoint
from arealite.reward.judge import JudgeReward
from arealite.reward.model import ServedRewardModel
from arealite.reward.pool import RewardPool
from tests.core.conftest import StubEngine, make_batch

KEY = "sk-very-secret-key"


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(endpoint, "_FIRST_WAIT_S", 0.01)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("AREALITE_API_KEY", "key-of-the-run")


@asynccontextmanager
async def serving(*replies):
    """Serve the replies one after the other, the last one for ever; yields the address and the requests."""
    requests = []

    async def answer(request):
        requests.append((request.path, dict(request.headers), await request.json()))
        reply = replies[min(len(requests), len(replies)) - 1]
        if reply == "hang":
            await asyncio.sleep(3600)
        if reply == "slow":
            await asyncio.sleep(0.1)
            reply = "Score: 5"
        if isinstance(reply, web.Response):
            return web.Response(body=reply.body, status=reply.status, headers=reply.headers)
        if isinstance(reply, tuple):
            return await send_pieces(request, reply)
        if isinstance(reply, str):
            reply = {"choices": [{"message": {"content": reply}}]}
        return web.json_response(reply)

    app = web.Application()
    app.router.add_post("/{tail:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1", requests
    finally:
        await runner.cleanup()


async def send_pieces(request, pieces):
    """Send a body piece by piece, as a service does that answers while it thinks, or through a slow network."""
    response = web.StreamResponse()
    await response.prepare(request)
    for piece in pieces:
        await response.write(piece)
        await asyncio.sleep(0.01)
    return response


def ask(*replies, completion="4", count=1, **options):
    """Return the score of a judge who answers with the replies, and the requests that it got."""

    async def main():
        async with serving(*replies) as (url, requests):
            judge = JudgeReward(url, "judge-1", **options)
            scores = [await judge("2+2?", completion, [], [], answer="4") for _ in range(count)]
            return scores[-1], requests

    return asyncio.run(main())


def test_a_judge_scores_an_answer():
    score, requests = ask("It is right.\nScore: 7", template="{prompt} {completion} {answer} {{x}}")
    assert score == 0.7
    ((path, headers, body),) = requests
    assert path == "/v1/chat/completions" and headers["Authorization"] == f"Bearer {KEY}"
    assert (
        body["model"] == "judge-1" and body["messages"][0]["content"] == "2+2? 4 4 {x}" and body["temperature"] == 0.0
    )


@pytest.mark.parametrize(
    "reply, score",
    [
        ("Score: 3. No, Score: **8**", 0.8),
        ("Rating = 10", 1.0),
        ("score:0", 0.0),
        ("**Score**: 2.5", 0.25),
        ("Score: .5", 0.05),
        ("Score (0-10): 8", 0.8),
        ("Score (8/10)", 0.8),
    ],
)
def test_forms_of_scores(reply, score):
    assert ask(reply)[0] == score


@pytest.mark.parametrize(
    "reply",
    [
        "good",
        "Score: 11",
        "Score: -1",
        "Score: 1" + "0" * 400,
        "",
        "Score: NaN",
        {"choices": [{"message": {"content": None}}]},
    ],
)
def test_a_reply_without_a_score_is_asked_for_again_once(reply):
    with pytest.raises(RewardError, match="gave no score"):
        ask(reply)
    score, requests = ask(reply, default=0.25)
    assert (score, len(requests)) == (0.25, 2)
    assert ask(reply, "Score: 5")[0] == 0.5


@pytest.mark.parametrize(
    "answer", [[], {}, {"choices": []}, {"choices": [{"message": None}]}, 5, "a" and {"choices": "no"}]
)
def test_answers_that_are_no_chat_completion(answer):
    with pytest.raises(RewardError, match="not a chat completion"):
        ask(answer)


def test_busy_services_are_asked_again():
    busy = web.Response(status=429, headers={"Retry-After": "0.01"})
    score, requests = ask(busy, web.Response(status=503), web.Response(body=b"<html>", status=200), "Score: 9")
    assert (score, len(requests)) == (0.9, 4)


def test_replies_that_arrive_in_pieces_are_read_to_their_end():
    # Some services send blanks while they wait for the model, so that the connection stays open.
    pieces = (b" ", b" ", b'{"choices": [{"message": ', b'{"content": "Score: 7"}}]}')
    score, requests = ask(pieces, deadline_s=20.0)
    assert (score, len(requests)) == (0.7, 1)
    score, requests = ask("It is right. " * 50_000 + "Score: 6", deadline_s=20.0)
    assert (score, len(requests)) == (0.6, 1)


def test_errors_name_the_reason_but_not_the_key():
    with pytest.raises(RewardError, match=r"401.*wrong key \*\*\*") as info:
        ask(web.Response(status=401, body=f"wrong key {KEY}\x1b[31m".encode()))
    assert KEY not in str(info.value) and "\x1b" not in str(info.value)
    with pytest.raises(RewardError, match=r"no answer within 0\.2 s"):
        ask("hang", deadline_s=0.2)
    with pytest.raises(RewardError, match=r"no answer within 0\.2 s"):
        asyncio.run(JudgeReward("http://127.0.0.1:9/v1", "m", deadline_s=0.2)(completion="x"))
    with pytest.raises(RewardError, match="template of the judge needs 'rubric'"):
        ask("Score: 1", template="{rubric}")
    with pytest.raises(ConfigError, match="lowest, highest"):
        JudgeReward("http://x", "m", scale=(1, 1))
    with pytest.raises(ConfigError, match=r"must begin with http:// or https://, got 'localhost:8000/v1/chat"):
        JudgeReward("localhost:8000/v1", "m")


@pytest.mark.parametrize(
    "reply, words",
    [
        ("hang", r"no answer within 0\.05 s \(timeout_s\)"),
        (web.Response(status=429, body=f"slow down, {KEY}".encode()), r"status 429: slow down, \*\*\*$"),
        (web.Response(status=200, body=b"<html>log in"), "an answer that is not JSON: <html>log in"),
    ],
)
def test_a_deadline_names_the_reason_of_the_last_try(reply, words):
    with pytest.raises(RewardError, match=rf"no answer within 0\.2 s in \d+ tries; the last one: {words}"):
        ask(reply, deadline_s=0.2, timeout_s=0.05)
    with pytest.raises(
        RewardError, match=r"the last one: ClientConnectorError: Cannot connect to host 127\.0\.0\.1:9 "
    ):
        asyncio.run(JudgeReward("http://127.0.0.1:9/v1", "m", deadline_s=0.2)(completion="x"))


def test_the_key_is_not_in_the_object_and_other_keys_are_not_sent():
    judge = JudgeReward("http://x/v1", "m")
    assert KEY.encode() not in pickle.dumps(judge) and KEY not in repr(vars(judge)) + repr(vars(judge.endpoint))
    _, requests = ask("Score: 1", api_key_env="")
    assert "Authorization" not in requests[0][1]


def test_equal_questions_are_asked_once(tmp_path):
    assert len(ask("Score: 1", count=3)[1]) == 1
    path = str(tmp_path / "folder" / "cache.sqlite")

    async def main():
        async with serving("Score: 6") as (url, requests):
            scores = []
            for _ in range(2):
                judge = JudgeReward(url, "m", cache_path=path)
                scores.append(await judge("q", "a"))
            return scores, len(requests)

    assert asyncio.run(main()) == ([0.6, 0.6], 1)
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT score FROM scores").fetchall() == [(0.6,)]
    (tmp_path / "damaged").write_text("no database" * 1000)
    with pytest.raises(RewardError, match=r"the cache of the judge.*damaged.*cannot be used"):
        ask("Score: 1", cache_path=str(tmp_path / "damaged"))


def test_equal_questions_at_the_same_time_are_asked_once():
    async def main():
        async with serving("no score", "slow") as (url, requests):
            judge = JudgeReward(url, "judge")
            assert await asyncio.gather(*(judge(completion=text) for text in ("a", "b", "a", "a"))) == [0.5] * 4
            # Two for the question whose first reply had no score.
            assert len(requests) == 3
            # One that is cancelled does not cost the others their score.
            first, second = (asyncio.create_task(judge(completion="c")) for _ in range(2))
            while len(requests) < 4:
                await asyncio.sleep(0)
            first.cancel()
            assert await second == 0.5 and len(judge.cache._turns) == 0

    asyncio.run(asyncio.wait_for(main(), 60))


def test_connections_end_with_the_event_loop():
    judges = []

    class Judged(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            async with serving("Score: 5") as (url, _):
                judges.append(JudgeReward(url, "m"))
                return make_batch(1, reward=await judges[-1]("q", "a"))

    async def main():
        return await Judged().arun_episode(None, {})

    executor = WorkflowExecutor(InferenceEngineConfig(batch_timeout_s=60.0), StubEngine(), 1)
    executor.start()
    try:
        executor.rollout_batch([{}], Judged())
    finally:
        executor.stop()
    asyncio.run(main())
    assert [judge.endpoint._session.closed for judge in judges] == [True, True]


def test_long_and_odd_answers_are_cut_and_sent():
    _, requests = ask("Score: 1", completion="a" * (10 << 20) + "\ud800{x}\0")
    content = requests[0][2]["messages"][0]["content"]
    assert len(content) < 25_000 and "[…]" in content and content.rstrip().endswith("?{x}\0")


def test_many_questions_keep_to_the_limits(monkeypatch):
    async def main():
        async with serving("Score: 5") as (url, requests):
            judge = JudgeReward(url, "m", max_concurrent=2, max_per_minute=60 * 1000)
            pool = RewardPool(timeout_s=60.0)
            rows = [dict(prompt="q", completion=str(i), prompt_ids=[], completion_ids=[]) for i in range(20)]
            scores = await pool.run(judge, rows)
            return scores, len(requests)

    assert asyncio.run(main()) == ([0.5] * 20, 20)
    waits = []

    async def sleep(seconds):
        waits.append(seconds)

    limited = endpoint.Endpoint("http://x", max_per_minute=60)
    monkeypatch.setattr(endpoint.time, "monotonic", lambda: 100.0)
    monkeypatch.setattr(endpoint.asyncio, "sleep", sleep)
    for _ in range(3):
        asyncio.run(limited._wait_for_turn())
    assert waits == [0.0, 1.0, 2.0]


def ask_together(reply, count, **limits):
    """Return the scores or errors of `count` questions that are asked at once, and how many requests there were."""

    async def main():
        async with serving(reply) as (url, requests):
            judge = JudgeReward(url, "m", **limits)
            asked = [judge("q", str(i)) for i in range(count)]
            return await asyncio.gather(*asked, return_exceptions=True), len(requests)

    return asyncio.run(main())


@pytest.mark.parametrize("limit", [{"max_concurrent": 1}, {"max_per_minute": 600}])
def test_questions_in_the_queue_have_no_deadline_while_others_are_answered(limit):
    assert ask_together("slow", 12, deadline_s=0.8, **limit) == ([0.5] * 12, 12)


def test_the_queue_for_a_dead_service_fails_with_the_requests():
    began = time.monotonic()
    errors, num_requests = ask_together("hang", 20, deadline_s=0.5, max_concurrent=2)
    assert time.monotonic() - began < 5 and num_requests <= 4
    assert all(isinstance(error, RewardError) for error in errors)
    assert any(
        "was not asked: none of the 2 requests in flight (max_concurrent) was answered within 0.5 s" in str(error)
        for error in errors
    )


def test_questions_that_are_cancelled_in_the_queue_take_no_turn():
    async def main():
        limited = endpoint.Endpoint("http://x", max_per_minute=60)
        await limited._wait_for_turn()
        given_up = [asyncio.ensure_future(limited._wait_for_turn()) for _ in range(100)]
        await asyncio.wait(given_up, timeout=0)
        for turn in given_up:
            turn.cancel()
        began = time.monotonic()
        await limited._wait_for_turn()
        return time.monotonic() - began

    assert asyncio.run(main()) < 20


@pytest.mark.parametrize(
    "backend, answer, path, field",
    [
        ("sglang", [{"embedding": [1.25]}], "/v1/classify", "text"),
        ("sglang", {"embedding": [1.25]}, "/v1/classify", "text"),
        ("vllm", {"data": [{"data": [1.25]}]}, "/v1/pooling", "input"),
        ("vllm", {"data": [{"data": [[0.5], [1.25]]}]}, "/v1/pooling", "input"),
    ],
)
def test_served_reward_models(backend, answer, path, field):
    async def main(reply):
        async with serving(reply) as (url, requests):
            model = ServedRewardModel(url, "rm", end_token="</s>", backend=backend)
            return await model("q", "a\ud800"), requests

    score, ((asked, _, body),) = asyncio.run(main(answer))
    assert (score, asked, body[field]) == (1.25, path, "qa?</s>")
    for bad in ({}, [], [{"embedding": []}], {"data": [{"data": "x"}]}):
        with pytest.raises(RewardError, match="without a score"):
            asyncio.run(main(bad))
    with pytest.raises(ConfigError, match="sglang or vllm"):
        ServedRewardModel("http://x", "m", end_token="", backend="other")  # type: ignore[arg-type]
