"""The examples of black-box agents: the Agents SDK on answers from a script, and training on sessions from outside."""

import asyncio
import contextlib
import importlib
import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from arealite.api.cli_args import GenerationHyperparameters
from arealite.api.errors import ConfigError, DatasetError
from arealite.workflow.openai import AgentWorkflow
from tests import warm_python
from tests.agents.stub_engine import StubEngine
from tests.chat_templates import make_chat_tokenizer

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "arealite"
ONLINE_CONFIG = EXAMPLES / "configs" / "online_agents.yaml"
ADMIN = "admin-token"
CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'


@pytest.fixture
def agents_sdk(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("agents_sdk")


def needs_sdk():
    # Not `agents` itself: the folder tests/agents can be imported by that name.
    pytest.importorskip("agents.run")


def play(agents_sdk, *texts):
    """Return the batch of one attempt whose calls are answered with the texts."""
    tokenizer, answers = make_chat_tokenizer("qwen25"), iter(texts)
    engine = StubEngine(lambda _: tokenizer.encode(next(answers) + "<|im_end|>", add_special_tokens=False))
    workflow = AgentWorkflow(agents_sdk.solve, GenerationHyperparameters(max_new_tokens=200), tokenizer)
    row = {"messages": [{"role": "user", "content": "What is (3 + 4) * 12?"}], "answer": "#### 84"}

    async def episode():
        try:
            return await workflow.arun_episode(engine, row)
        finally:
            await workflow.host.close()

    batch = asyncio.run(asyncio.wait_for(episode(), 60))
    assert batch["stats/drift_calls"].tolist() == [0.0] and batch["stats/branches"].tolist() == [1.0]
    return batch, tokenizer.decode(batch["input_ids"][0])


def test_the_sdk_runs_its_tool_and_its_calls_are_trained(agents_sdk):
    needs_sdk()
    batch, text = play(agents_sdk, CALL % ("calculate", '{"expression": "(3 + 4) * 12"}'), "It is \\boxed{84}.")
    assert batch["rewards"].tolist() == [1.0] and batch["stats/turns"].tolist() == [2.0]
    assert "<tool_response>\n84\n</tool_response>" in text


@pytest.mark.parametrize(
    "call", [CALL % ("unknown", "{}"), CALL % ("calculate", '{"x": 1}'), CALL % ("calculate", "{")]
)
def test_wrong_calls_cost_no_attempt(agents_sdk, call):
    needs_sdk()
    assert play(agents_sdk, call, "\\boxed{84}")[0]["rewards"].tolist() == [1.0]
    assert play(agents_sdk, *[call] * 9)[0]["rewards"].tolist() == [0.0]


def test_calculator(agents_sdk):
    assert agents_sdk.calculate("-(3 + 4) * 12 / 8") == "-10.5"
    assert agents_sdk.calculate("100000.5 + 1") == "100001.5"
    assert agents_sdk.calculate("1234567 * 2") == "2469134"
    assert agents_sdk.calculate("0.1 + 0.2") == "0.3"
    for text in ("1 / 0", "2 ** 9", "__import__('os')", "'a' * 9", "((", "\0", "(" * 10**6):
        assert agents_sdk.calculate(text).startswith("error: ")


def test_without_the_sdk_the_message_says_what_to_install(agents_sdk, monkeypatch):
    monkeypatch.setattr(agents_sdk, "MISSING", ImportError("No module named 'agents'"))
    with pytest.raises(ConfigError, match=r"pip install 'arealite\[agents\]'"):
        agents_sdk.main([])


def test_without_the_client_the_message_says_what_to_install(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    openai_agent = importlib.import_module("openai_agent")
    monkeypatch.setattr(openai_agent, "MISSING", ImportError("No module named 'openai'"))
    with pytest.raises(ConfigError, match=r"No module named 'openai'.*pip install openai"):
        openai_agent.main([])


def test_without_gymnasium_the_run_ends_before_its_first_episode(monkeypatch, model_path):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    config = EXAMPLES / "configs" / "gymnasium_agent.yaml"
    with pytest.raises(ConfigError, match=r"FrozenLake-v1 needs gymnasium.*pip install 'arealite\[gym\]'"):
        importlib.import_module("gymnasium_agent").main(["--config", str(config), f"actor.path={model_path}"])


def test_questions_without_context_are_refused(monkeypatch, model_path, gsm8k_path):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    arguments = ["--config", str(EXAMPLES / "configs" / "search_agent.yaml"), f"actor.path={model_path}"]
    with pytest.raises(DatasetError, match=r"row 1: it needs the columns question, context, answer; it lacks context"):
        importlib.import_module("search_agent").main([*arguments, f"train_dataset.path={gsm8k_path}"])


@pytest.mark.parametrize(
    ("override", "token", "words"),
    [("rollout.num_workers=2", ADMIN, "set rollout.num_workers=0"), ("seed=1", "", "set AREALITE_ADMIN_TOKEN")],
)
def test_online_settings_are_checked_before_anything_is_loaded(monkeypatch, override, token, words):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("AREALITE_ADMIN_TOKEN", token)
    with pytest.raises(ConfigError, match=words):
        importlib.import_module("online_agents").main(["--config", str(ONLINE_CONFIG), override])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_client_of_the_documentation_feeds_online_training(model_path, tmp_path, monkeypatch):
    (client,) = re.findall(r"```python\n(# client.py.*?)```", (ROOT / "docs" / "agents.md").read_text(), re.S)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    monkeypatch.setenv("GATEWAY_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AREALITE_ADMIN_TOKEN", ADMIN)
    keys = {
        "actor.path": model_path,
        "actor.dtype": "float32",
        "actor.ppo_n_minibatches": 1,
        "gconfig.max_new_tokens": 4,
        "server.max_total_tokens": 8192,
        "train_dataset.batch_size": 2,
        "total_train_steps": 2,
        "cluster.fileroot": tmp_path,
        "workflow_args.port": port,
    }
    command = ["-m", "arealite.launcher.local", str(EXAMPLES / "online_agents.py")]
    command += ["--config", str(ONLINE_CONFIG), *(f"{key}={value}" for key, value in keys.items())]
    log, num_sessions = tmp_path / "log", 0
    with log.open("w") as out:
        output = out.fileno()
        run = warm_python.start(command, stdout=output, stderr=output)
    try:
        while run.poll() is None:
            try:
                exec(compile(client, "client.py", "exec"), {})
                num_sessions += 1
            except (OSError, openai.APIError):
                # The gateway does not listen yet, has enough sessions, or has ended.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    run.wait(0.2)
    finally:
        run.terminate()
        run.wait(60)
    assert run.returncode == 0 and num_sessions >= 4, log.read_text()
    lines = (tmp_path / "online-agents" / "trial0" / "stats.jsonl").read_text().splitlines()
    assert [json.loads(line)["rollout/calls"] for line in lines] == [1.0, 1.0]
