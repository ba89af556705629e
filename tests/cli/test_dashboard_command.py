import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from tests.dashboard.make_run import make_run


@pytest.fixture
def start(tmp_path):
    processes = []

    def start(*arguments, **env):
        command = [sys.executable, "-m", "arealite.cli.entry", "dashboard", *map(str, arguments)]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tmp_path,
            env={**os.environ, **env},
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate(timeout=30)


def address_of(process):
    line = process.stdout.readline()
    assert line.startswith("dashboard: http://127.0.0.1:"), line + process.stdout.read()
    return line.split()[1]


def ask(url, opener=None, **headers):
    opener = opener or urllib.request.build_opener()
    with opener.open(urllib.request.Request(url, headers=headers), timeout=30) as response:
        return response.read()


def test_the_command_serves_until_a_signal(start, tmp_path):
    make_run(tmp_path / "runs" / "exp" / "a", steps=3, rollouts=24)
    process = start("--port", 0)
    address, _, query = address_of(process).partition("?")
    # Other users of the machine do not know the token, which is another one at every start.
    for url in (address, f"{address}api/runs"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask(url)
        assert refused.value.code == 401
    assert query.startswith("token=") and len(query) > 30
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    assert b"main.js" in ask(f"{address}?{query}", browser)
    (run,) = json.loads(ask(f"{address}api/runs", browser))["runs"]
    assert run["name"] == "exp/a" and run["steps"] == 3
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 0 and process.stdout.read() == ""


def test_the_token_comes_from_the_environment_and_is_not_printed(start, tmp_path):
    make_run(tmp_path / "runs" / "exp" / "a", steps=3, rollouts=24)
    process = start("runs", "--port", 0, "--host", "127.0.0.1", AREALITE_DASHBOARD_TOKEN="very secret")
    url = address_of(process)
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(f"{url}api/runs")
    assert refused.value.code == 401 and b"secret" not in refused.value.read()
    assert ask(f"{url}api/runs", Authorization="Bearer very secret")
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 0 and "secret" not in process.stdout.read()


def test_a_dashboard_without_a_token(start, tmp_path):
    make_run(tmp_path / "runs" / "exp" / "a", steps=1, rollouts=8)
    url = address_of(start("--port", 0, "--no-token"))
    assert url.endswith("/") and json.loads(ask(f"{url}api/runs"))["runs"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere",), "there is no folder nowhere"),
        ((".", "--host", "0.0.0.0", "--no-token"), "set a token"),
        ((".", "--token", "a", "--no-token"), "exclude each other"),
        ((".", "--port", "99999"), "--port is 99999"),
    ],
)
def test_wrong_arguments_are_one_line(start, arguments, message):
    process = start(*arguments)
    output = process.stdout.read()
    assert process.wait(timeout=30) == 2 and message in output and output.count("\n") == 1
