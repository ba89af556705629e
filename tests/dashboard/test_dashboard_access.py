import asyncio
import threading
from pathlib import Path

import pytest
from aiohttp.test_utils import make_mocked_request

from arealite.api.errors import ConfigError
from arealite.dashboard.app import _MAX_READERS, _SLOTS, STATIC, answer, make_app
from tests.dashboard.client import Dashboard
from tests.dashboard.make_run import make_run


@pytest.fixture
def runs(tmp_path):
    make_run(tmp_path / "runs" / "exp" / "a", steps=2, rollouts=8)
    return tmp_path / "runs"


def test_the_page_and_its_headers(runs):
    with Dashboard(runs) as page:
        for path in ("/", "/static/index.html", "/api/runs", "/api/none", "/nowhere"):
            answer = page.get(path)
            policy = answer.headers["Content-Security-Policy"]
            assert "script-src 'self'" in policy and "unsafe" not in policy and "default-src 'none'" in policy
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert page.get("/").body == (STATIC / "index.html").read_bytes()
        assert page.get("/api/runs").headers["Cache-Control"] == "no-store"
        assert page.get("/nowhere").json == {"error": "Not Found"}


def test_nothing_but_static_files_is_served(runs):
    with Dashboard(runs) as page:
        for path in ("../app.py", "%2e%2e/app.py", "..%2fapp.py", "/etc/passwd", "%2fetc%2fpasswd", ""):
            assert page.get(f"/static/{path}").status in (403, 404), path


def test_only_reading(runs):
    with Dashboard(runs) as page:
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert page.get("/api/runs", method=method).status == 405


def test_other_names_are_refused(runs):
    with Dashboard(runs) as page:
        for host in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "evil.example:8470"):
            answer = page.get("/api/runs", headers={"Host": host})
            assert answer.status == 403 and "error" in answer.json
        for host in ("localhost:1", "127.0.0.1", "[::1]:8470"):
            assert page.get("/api/runs", headers={"Host": host}).status == 200


def test_other_addresses_need_a_token(runs):
    with pytest.raises(ConfigError, match="token"):
        make_app([runs], "0.0.0.0", None)
    make_app([runs], "0.0.0.0", "t")


def test_the_token_is_required(runs):
    with Dashboard(runs, token="sécret&=") as page:
        for path in (
            "/",
            "/api/runs",
            "/static/index.html",
            "/?token=wrong",
            "/?token=",
            "/api/runs?token=s%C3%A9cret%26%3D",
        ):
            answer = page.get(path)
            assert answer.status == 401 and "token" in answer.json["error"] and "écret" not in answer.json["error"], (
                path
            )
        for header in ("Bearer wrong", "Bearer ", "Basic sécret&=", "sécret&="):
            assert page.get("/api/runs", headers={"Authorization": header}).status == 401
        assert page.get("/api/runs", headers={"Authorization": "Bearer sécret&="}).status == 200


def test_a_browser_without_the_token_is_asked_for_it(runs):
    with Dashboard(runs, token="secret") as page:
        answer = page.get("/", headers={"Accept": "text/html,*/*"})
        assert answer.status == 401 and b'name="token"' in answer.body and answer.headers["X-Content-Type-Options"]


def test_a_visit_with_the_token_sets_a_cookie(runs):
    with Dashboard(runs, token="secret") as page:
        answer = page.get("/?token=secret")
        cookie = answer.headers["Set-Cookie"]
        assert answer.status == 303 and answer.headers["Location"] == "./"
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie and "secret" not in cookie
        # The client keeps cookies, as a browser does.
        assert page.get("/api/runs").status == 200 and page.get("/").status == 200
    with Dashboard(runs, token="secret") as page:
        name = page.get("/?token=secret").headers["Set-Cookie"].partition("=")[0]
        page.forget_cookies()
        assert page.get("/api/runs").status == page.get("/api/runs", headers={"Cookie": f"{name}=0000"}).status == 401


def test_ids_are_no_paths(runs):
    with Dashboard(runs) as page:
        for run_id in ("..", "%2e%2e", "exp%2Fa", str(runs / "exp" / "a").replace("/", "%2F"), "0" * 12, "%00"):
            answer = page.get(f"/api/runs/{run_id}/config")
            assert answer.status == 404, run_id


def test_links_to_runs_are_not_followed(runs, tmp_path):
    make_run(tmp_path / "other" / "exp" / "secret", steps=2, rollouts=8)
    (runs / "link").symlink_to(tmp_path / "other")
    (runs / "loop").symlink_to(runs)
    with Dashboard(runs) as page:
        assert [run["name"] for run in page.json("/api/runs")["runs"]] == ["exp/a"]


def test_bad_parameters_are_errors_of_the_client(runs):
    with Dashboard(runs) as page:
        run_id = page.run_id("exp/a")
        for query in ("stats?since=x", "stats?since=1e5", "stats?since=" + "9" * 30, "logs/rank0.log?size=a"):
            answer = page.get(f"/api/runs/{run_id}/{query}")
            assert answer.status == 400 and "whole number" in answer.json["error"], query
        assert page.json(f"/api/runs/{run_id}/stats?since=-5")["columns"]["step"]


def test_static_files_are_part_of_the_package():
    text = Path(__file__).parents[2].joinpath("pyproject.toml").read_text()
    assert "dashboard/static/**" in text


def test_readers_whose_clients_have_gone_still_count(tmp_path):
    begun, release = threading.Semaphore(0), threading.Event()

    def read():
        begun.release()
        assert release.wait(30)

    async def check():
        request = make_mocked_request("GET", "/", app=make_app([tmp_path]))
        readers = [asyncio.create_task(answer(request, read)) for _ in range(_MAX_READERS)]
        for _ in readers:
            assert await asyncio.to_thread(begun.acquire, timeout=30)
        for reader in readers:
            reader.cancel()
        await asyncio.wait(readers)
        assert request.app[_SLOTS].locked()
        release.set()
        assert (await asyncio.wait_for(answer(request, read), 30)).status == 200

    asyncio.run(check())
