"""`arealite replay` with real processes: a server and two ranks, and what it says about changes."""

import os
import subprocess
from pathlib import Path

import pytest

from arealite.api.errors import ConfigError, RecordError
from arealite.cli.replay import main
from arealite.core.record.step_file import StepRecord, write_step
from arealite.trainer.replay import make_plan, read_run, replay_config
from arealite.utils.config import run_main
from arealite.utils.rundir import RunDir
from tests import warm_python

SCRIPT = """
from arealite.api.cli_args import GRPOConfig
from arealite.dataset import load_tokenizer
from arealite.trainer.ppo import PPOTrainer
from arealite.utils.config import load_config, run_main
from arealite.workflow.rlvr import RLVRWorkflow


def reward(completion, prompt, **data):
    return float(sum(letter in "aeiou" for letter in completion))


def main(argv):
    config = load_config(argv, GRPOConfig)
    tokenizer = load_tokenizer(config.actor.path)
    workflow = RLVRWorkflow(reward, config.gconfig, tokenizer, reward_inline=True)
    PPOTrainer(config, [{"prompt": f"{i}: "} for i in range(64)], tokenizer).train(workflow)


if __name__ == "__main__":
    run_main(main)
"""
SETTINGS = """
experiment_name: e
trial_name: t
allocation_mode: embedded.d1+d2
total_train_steps: 4
train_dataset: {path: made, batch_size: 4}
gconfig: {n_samples: 4, max_new_tokens: 12}
rollout: {max_head_offpolicyness: 1}
server: {dtype: float32, device: cpu, max_total_tokens: 8192, deterministic: true}
actor: {dtype: float32, device: cpu, ppo_n_minibatches: 2, optimizer: {lr: 0.01}}
recover: {mode: auto, freq_steps: 2}
launcher: {threads_per_process: 1}
"""


def run(*argv: str, cwd: Path) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    process = warm_python.start(argv, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    output, _ = process.communicate(timeout=300)
    return subprocess.CompletedProcess(argv, process.wait(), output)


def replay(folder: Path, *argv: str) -> tuple[int, str]:
    done = run("-m", "arealite.cli.entry", "replay", str(folder / "runs" / "e" / "t"), *argv, cwd=folder.parent)
    return done.returncode, done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_asynchronous_run_on_two_ranks_is_replayed_bit_for_bit_and_changes_are_named(model_path, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    (tmp_path / "config.yaml").write_text(SETTINGS)
    arguments = ["--config", "config.yaml", f"actor.path={model_path}"]
    done = run("-m", "arealite.launcher.local", "script.py", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    code, text = replay(tmp_path)
    assert code == 0 and "answers are generated again by servers" in text, text
    assert text.endswith("equal bit for bit: 4 steps (16 episodes, losses, statistics and weights)\n"), text

    code, text = replay(tmp_path, "--trainer-only", "--from", "4", "actor.optimizer.lr=0.02")
    assert code == 1 and "training starts from" in text and "recover/step000002" in text, text
    assert "step 3: lr of minibatch 1 differs: recorded 0.01, replayed 0.02" in text, text
    assert "the learning rate or its schedule\nchanged since the run:\n  actor.optimizer.lr: 0.01, now 0.02\n" in text

    script.write_text(SCRIPT.replace('in "aeiou"', 'in "aeiouy"'))
    code, text = replay(tmp_path, "--rollout-only", "--steps", "2")
    assert code == 1 and "rewards of episode" in text and "code of script" in text, text

    # A run whose script is not known has its training left.
    (tmp_path / "runs" / "e" / "t" / "job.json").unlink()
    code, text = replay(tmp_path, "--trainer-only", "--to", "2")
    assert code == 0 and "equal bit for bit: 2 steps (losses, statistics and weights)" in text, text
    code, text = replay(tmp_path)
    assert code == 2 and "the script of the run" in text and "--trainer-only" in text, text


def test_wrong_arguments_and_runs_without_a_record_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="is not a run directory"):
        main([str(tmp_path)])
    with pytest.raises(ConfigError, match="--to and --steps both"):
        main([str(tmp_path), "--to", "3", "--steps", "2"])
    with pytest.raises(ConfigError, match="count from 1"):
        main([str(tmp_path), "--from", "0"])
    with pytest.raises(ConfigError, match="not allowed with"):
        main([str(tmp_path), "--trainer-only", "--rollout-only"])
    (tmp_path / "config.yaml").write_text("{record: 0, allocation_mode: d1, model: {}}")
    with pytest.raises(RecordError, match=r"was not recorded \(record=0\)"):
        main([str(tmp_path)])
    (tmp_path / "config.yaml").write_text("{record: 1, allocation_mode: d1, model: {}}")
    with pytest.raises(RecordError, match="there is no record") as error:
        main([str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        run_main(lambda _: (_ for _ in ()).throw(error.value), [])
    assert ended.value.code == 2, "1 means that a replay differs"


@pytest.mark.parametrize("text", ["", "x: [", "- 1", "record: 256", "{allocation_mode: d1, model: 3}", "\udcca\udcfe"])
def test_a_damaged_configuration_is_refused(tmp_path, text):
    (tmp_path / "config.yaml").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        main([str(tmp_path)])


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "config.yaml").write_text("{allocation_mode: d1, model: {}}")
    (tmp_path / "record").mkdir()
    write_step(tmp_path / "record", 0, StepRecord({}, []))
    (tmp_path / "replays").write_text("no folder")
    with pytest.raises(ConfigError, match=r"cannot write to .*replays: .*or replay a copy of the run directory"):
        main([str(tmp_path), "--trainer-only"])


def test_a_run_of_several_machines_is_replayed_on_one(tmp_path):
    cluster = "{fileroot: /shared, n_nodes: 2, min_nodes: 2, n_gpus_per_node: 8}"
    (tmp_path / "config.yaml").write_text(f"{{allocation_mode: d2, model: {{}}, cluster: {cluster}}}")
    (tmp_path / "record").mkdir()
    write_step(tmp_path / "record", 0, StepRecord({"attempt": "attempt000000-x", "sizes": {}}, []))
    (tmp_path / "record" / "attempt000000-x.json").write_text('{"hardware": {"threads": 1}}')
    run = read_run(RunDir(tmp_path))
    config = replay_config(run, make_plan(run, "trainer-only", None, None, None), tmp_path / "replays" / "1")
    assert config["cluster"] == {"fileroot": str(tmp_path), "n_nodes": None, "min_nodes": None, "n_gpus_per_node": 8}


def test_a_damaged_job_is_refused(tmp_path):
    (tmp_path / "config.yaml").write_text("{allocation_mode: d1, model: {}}")
    for text in ("[]", "{", "3"):
        (tmp_path / "job.json").write_text(text)
        with pytest.raises(ConfigError, match=r"job\.json cannot be read .*remove it"):
            main([str(tmp_path)])
