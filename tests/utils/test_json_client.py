"""The HTTP client: connections for generation are bounded, control requests never wait for them."""

import asyncio

from aiohttp import web

from arealite.api.backends import API_KEY_ENV
from arealite.api.cli_args import InferenceEngineConfig
from arealite.engine.sglang_remote import SGLangClient
from arealite.utils import json_client
from arealite.utils.json_client import JsonClient


def test_generations_share_the_connections_and_control_requests_do_not_wait(monkeypatch, capsys):
    monkeypatch.setattr(json_client, "spare_descriptors", lambda: 0)

    async def main():
        release, running, most = asyncio.Event(), 0, 0

        async def generate(request):
            nonlocal running, most
            running += 1
            most = max(most, running)
            await release.wait()
            running -= 1
            return web.json_response({})

        async def health(request):
            return web.json_response({"status": "ok"})

        app = web.Application()
        app.add_routes([web.post("/generate", generate), web.get("/health", health), web.post("/pause", health)])
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = site.name
        client = JsonClient()
        try:
            tasks = [asyncio.create_task(client.generate(f"{url}/generate", {}, 60.0)) for _ in range(50)]
            while running < client.max_connections:
                await asyncio.sleep(0)
            assert await client.get(f"{url}/health", 60.0) == await client.post(f"{url}/pause", {}, 60.0)
            release.set()
            await asyncio.gather(*tasks)
        finally:
            await client.close()
            await runner.cleanup()
        return most, client.max_connections

    most, limit = asyncio.run(asyncio.wait_for(main(), 60))
    assert most == limit == json_client.MIN_CONNECTIONS
    assert capsys.readouterr().out.count("requests at once, the others wait for a connection") == 1


def test_the_key_goes_only_where_it_is_given(monkeypatch):
    monkeypatch.setenv(API_KEY_ENV, "key-of-the-run")

    async def main():
        seen = []

        async def answer(request):
            seen.append(request.headers.get("Authorization"))
            return web.json_response({})

        app = web.Application()
        app.router.add_get("/", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        servers = SGLangClient(InferenceEngineConfig())
        servers.connect()
        clients = [JsonClient(), JsonClient("other"), servers.http]
        try:
            for client in clients:
                await client.get(site.name, 60.0)
        finally:
            for client in clients:
                await client.close()
            await runner.cleanup()
        return seen

    assert asyncio.run(asyncio.wait_for(main(), 60)) == [None, "Bearer other", "Bearer key-of-the-run"]


def test_all_clients_of_a_process_together_stay_below_the_limit(monkeypatch):
    monkeypatch.setattr(json_client, "spare_descriptors", lambda: 1000)

    async def main():
        clients = [JsonClient() for _ in range(4)]
        shares = [client.max_connections for client in clients]
        for client in clients:
            await client.close()
        again, half = JsonClient(), JsonClient(num_processes=2)
        await again.close()
        await half.close()
        return shares, again.max_connections, half.max_connections

    shares, again, half = asyncio.run(main())
    assert shares == sorted(shares, reverse=True) and sum(shares) < 1000
    assert again == shares[0] == 750 and half == 93
