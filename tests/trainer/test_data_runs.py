"""Runs on data that a configuration alone describes: a column map, a reward of the user, a mixture, a curriculum."""

import json

import pytest

from arealite.trainer.stats_logger import read_stats
from arealite.utils.rundir import RunDir
from tests import warm_python
from tests.test_statistics_docs import is_documented


@pytest.fixture
def mine(tmp_path):
    rows = [{"q": f"{i}?", "n": i} for i in range(16)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # Its answers are random: the parity of their length is a reward that varies.
    (tmp_path / "judges.py").write_text(
        "def parity(prompt, completion, prompt_ids, completion_ids, number, **data):\n"
        "    assert type(number) is int and prompt_ids\n"
        "    return float(sum(completion_ids) % 2)\n"
    )
    return tmp_path / "mine.jsonl"


def run(folder, model, *argv):
    command = ["-m", "arealite.cli.main", f"cluster.fileroot={folder / 'runs'}", "stats_logger.console=false", *argv]
    settings = {"actor.path": model, "actor.dtype": "float32", "gconfig.max_new_tokens": 4, "gconfig.n_samples": 2}
    settings |= {"server.max_total_tokens": 8192, "actor.ppo_n_minibatches": 1}
    command += [f"trainer.grpo.{key}={value}" for key, value in settings.items()]
    done = warm_python.run(command, timeout=200, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_mixture_with_rewards_of_its_own_and_a_curriculum_trains(tmp_path, model_path, gsm8k_path, mine):
    run(
        *(tmp_path, model_path, "trainer.type=grpo", "total_train_epochs=9", "total_train_steps=6"),
        *("train_dataset.batch_size=4", "train_dataset.curriculum={low: 0.2, high: 0.8}"),
        *(f"train_datasets.words.path={gsm8k_path}", f"train_datasets.mine.path={mine}"),
        *("train_datasets.mine.columns={prompt: 'say {q}', number: n}", "train_datasets.mine.reward=judges:parity"),
        *("train_datasets.words.weight=1", "train_datasets.mine.weight=3"),
    )
    stats = read_stats(RunDir(tmp_path / "runs" / "arealite" / "grpo"))
    assert len(stats) == 6
    assert [name for name in stats[0] if not is_documented(name)] == []
    assert 0 < sum(step["rollout/reward/mine"] for step in stats) / 6 < 1
    assert {step["rollout/reward/words"] for step in stats if "rollout/reward/words" in step} == {0.0}
    assert 0 < stats[-1]["curriculum/known"] <= 1


@pytest.mark.slow
def test_any_data_is_evaluated(tmp_path, model_path, mine):
    run(
        *(tmp_path, model_path, "trainer.type=null", f"valid_dataset.path={mine}", "reward=judges:parity"),
        *("valid_dataset.columns={prompt: q, number: n}", "valid_dataset.prompt_template=Q: {prompt} A:"),
    )
    (stats,) = read_stats(RunDir(tmp_path / "runs" / "arealite" / "eval"))
    assert stats["eval/valid/num_questions"] == 16 and 0 <= stats["eval/valid/reward"] <= 1
