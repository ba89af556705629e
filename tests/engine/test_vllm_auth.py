"""Every request to a vLLM server of a run needs its key."""

import asyncio

import pytest

from arealite.engine.remote.vllm_auth import RequireKey


def ask(kind, *headers):
    """Return what the middleware sends, or "passed" if the request reaches vLLM."""
    sent = []

    async def app(scope, receive, send):
        sent.append("passed")

    async def send(message):
        sent.append(message)

    asyncio.run(RequireKey(app)({"type": kind, "path": "/collective_rpc", "headers": list(headers)}, None, send))
    return sent


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")


def test_the_key_opens_every_path():
    assert ask("http", (b"host", b"x"), (b"authorization", b"Bearer secret")) == ["passed"]
    assert ask("lifespan") == ["passed"]


@pytest.mark.parametrize("given", [None, b"", b"secret", b"Bearer wrong", "Bearer sécret".encode(), b"\xff"])
def test_other_requests_are_refused(given):
    headers = [] if given is None else [(b"authorization", given)]
    assert [message.get("status") for message in ask("http", *headers)] == [401, None]
    assert ask("websocket", *headers) == [{"type": "websocket.close", "code": 1008}]
