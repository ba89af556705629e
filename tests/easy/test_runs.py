"""Real runs from scripts without a launcher: what they return, and that they leave nothing behind."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests import warm_python
from tests.easy.preamble import HEAD

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "arealite"
TIMEOUT_S = 300.0


def start(body: str, folder: Path) -> warm_python.WarmProcess:
    script = folder / "script.py"
    script.write_text(HEAD.format(examples=str(EXAMPLES), folder=str(folder)) + body)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "MARK_OF_TEST": str(folder)}
    return warm_python.start([script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env, cwd=folder)


def run(body: str, folder: Path) -> str:
    process = start(body, folder)
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    assert_nothing_left(folder)
    return output or ""


def processes_of(folder: Path) -> list[psutil.Process]:
    """Return the processes that have inherited the environment of a script."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("MARK_OF_TEST") == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def assert_nothing_left(folder: Path) -> None:
    _, alive = psutil.wait_procs(processes_of(folder), timeout=60)
    assert not alive


@pytest.mark.slow
def test_a_closure_of_a_script_is_learned_twice_and_the_model_is_returned(tmp_path):
    output = run(
        """
trainer = GRPOTrainer(train_dataset=rows, reward_fn=many_a, max_steps=8, **settings)
import json, os, logging, torch
threads, variables = torch.get_num_threads(), dict(os.environ)
result = trainer.train()
assert threads == torch.get_num_threads() and not logging.getLogger("arealite").handlers
changed = {name for name in os.environ.keys() | variables if os.environ.get(name) != variables.get(name)}
assert changed <= {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}, changed
assert count >= 8 * 64, count
ids = result.tokenizer("abcde>", return_tensors="pt").input_ids
text = result.tokenizer.decode(result.model.generate(ids, max_new_tokens=4, do_sample=False)[0, 6:])
print("FIRST", json.dumps([step["reward"] for step in result.history]), text)
# TRL's shape, with a model that is in memory.
def trl_style(completions, answer, **kwargs):
    assert kwargs["prompts"][0].endswith(">") and len(answer) == len(completions)
    return [text.count("a") / 4 for text in completions]
args = dict(max_steps=2, per_device_train_batch_size=32, gradient_accumulation_steps=2, beta=0.01)
settings.pop("model")
again = GRPOTrainer(result.model, [trl_style, many_a], args, rows, eval_dataset=rows[:4], reward_weights=[1, 0],
                    processing_class=result.tokenizer, **settings).train()
print("SECOND", json.dumps(again.history), again.path)
""",
        tmp_path,
    )
    lines = {line.split(" ", 1)[0]: line.split(" ", 1)[1] for line in output.splitlines() if " " in line}
    assert "FIRST" in lines and "SECOND" in lines, output
    rewards, text = lines["FIRST"].rsplit(" ", 1)
    rewards = json.loads(rewards)
    assert len(rewards) == 8 and rewards[-1] > rewards[0] + 0.3 and text == "aaaa", rewards
    history, path = lines["SECOND"].rsplit(" ", 1)
    steps = json.loads(history)
    assert [step["step"] for step in steps] == [-1, 0, 1] and steps[1]["reward"] > 0.5
    assert steps[1]["rollout/trl_style"] == steps[1]["reward"] and "eval/valid/reward" in steps[0]
    assert Path(path) == tmp_path / "grpo" / "run2" / "checkpoints" / "step000002"
    # The script was not imported again by another process.
    assert output.count("run directory:") == 2


@pytest.mark.slow
def test_adapters_on_a_base_in_four_bits_learn(tmp_path):
    pytest.importorskip("peft")
    output = run(
        """
import json
from peft import LoraConfig
settings["config"]["actor"]["frozen_weight_dtype"] = "nf4"
adapters = LoraConfig(r=8, target_modules="all-linear")
result = GRPOTrainer(train_dataset=rows, reward_fn=many_a, max_steps=8, args=dict(beta=0.01), peft_config=adapters,
                     **settings).train()
print("STEPS", json.dumps([[step["reward"], step["ref_kl"]] for step in result.history]))
""",
        tmp_path,
    )
    line = next((line for line in output.splitlines() if line.startswith("STEPS ")), None)
    assert line is not None, output
    rewards, kls = zip(*json.loads(line.removeprefix("STEPS ")), strict=True)
    # The reference is in low bits too: it is the policy before the first step.
    assert len(rewards) == 8 and rewards[-1] > rewards[0] + 0.2 and kls[0] < 1e-6 < kls[-1], output


@pytest.mark.slow
def test_an_error_of_the_reward_ends_the_run_with_its_message(tmp_path):
    output = run(
        """
def broken(completion, **data):
    raise KeyError("no such thing")
try:
    GRPOTrainer(train_dataset=rows, reward_fn=broken, max_steps=2, **settings).train()
except Exception as error:
    import psutil
    print("CAUGHT", type(error).__name__, error, psutil.Process().children(recursive=True))
""",
        tmp_path,
    )
    caught = output[output.index("CAUGHT") :]
    assert "no such thing" in caught and "reward broken raised" in caught and caught.rstrip().endswith("[]"), output


@pytest.mark.slow
def test_a_server_that_keeps_dying_ends_the_run_with_its_message(tmp_path):
    output = run(
        """
import psutil, signal
def kill(completion, **data):
    for child in psutil.Process().children(recursive=True):
        if "arealite.launcher.beside" in child.environ()["AREALITE_TESTS_COMMAND"]:
            child.send_signal(signal.SIGKILL)
    return 0.0
try:
    GRPOTrainer(train_dataset=rows, reward_fn=kill, max_steps=50, **settings).train()
except Exception as error:
    print("CAUGHT", type(error).__name__, error)
""",
        tmp_path,
    )
    assert "CAUGHT ServerError the inference servers ended" in output, output


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_leaves_no_process(tmp_path, number):
    body = """
def reward(completion, **data):
    if not started.exists():
        started.touch()
    return completion.count("a") / 4
started = Path(settings["output_dir"]) / "started"
GRPOTrainer(train_dataset=rows, reward_fn=reward, max_steps=5000, **settings).train()
"""
    process = start(body, tmp_path)
    deadline = time.monotonic() + TIMEOUT_S
    try:
        while not (tmp_path / "started").exists():
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
            time.sleep(0.1)
        assert len(processes_of(tmp_path)) >= 3
        process.send_signal(number)
        process.communicate(timeout=60)
        assert process.returncode != 0
    finally:
        process.kill()
    assert_nothing_left(tmp_path)
