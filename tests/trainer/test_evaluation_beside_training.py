"""A real run with validation sets: evaluations overlap training steps and change nothing about them."""

import json
import sqlite3
from pathlib import Path

import pytest

from arealite.cli.report import main as report
from arealite.trainer.answers import read_answers
from arealite.trainer.evaluator import set_statistics
from arealite.trainer.stats_logger import read_stats
from arealite.utils.rundir import RunDir
from tests.examples.test_scripts import EXAMPLES, grpo_overrides, run

NUM_STEPS, NUM_QUESTIONS, MAX_TOKENS = 6, 10, 32


def train(folder: Path, model: Path, data: Path, *more: str, layout: str = "embedded.d1+d1") -> RunDir:
    run(
        *("-m", "arealite.launcher.local", str(EXAMPLES / "gsm8k_grpo.py")),
        *("--config", str(EXAMPLES / "configs" / "gsm8k_grpo.yaml"), *grpo_overrides(model)),
        *(f"cluster.fileroot={folder}", f"train_dataset.path={data}", "train_dataset.batch_size=4"),
        *(f"total_train_steps={NUM_STEPS}", f"allocation_mode={layout}", *more),
    )
    return RunDir(folder / "gsm8k-grpo" / "trial0")


def evaluation_keys(folder: Path, num_questions: int = NUM_QUESTIONS) -> list[str]:
    """Two sets. One question at a time is asked, whose answers are many times as long as those of a training step."""
    rows = [{"question": f"What is {i} and {i}?", "answer": f"#### {2 * i}"} for i in range(num_questions)]
    for name in ("first", "second"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = [f"valid_datasets.{name}.path={folder / name}.jsonl" for name in ("first", "second")]
    keys += ["eval_gconfig.n_samples=4", "eval_gconfig.temperature=1"]
    return [*keys, f"eval_gconfig.max_new_tokens={MAX_TOKENS}"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_evaluations_overlap_training_and_change_nothing_about_it(model_path, gsm8k_path, tmp_path, capsys):
    keys = evaluation_keys(tmp_path)
    alone = train(tmp_path / "alone", model_path, gsm8k_path)
    run_dir = train(tmp_path / "beside", model_path, gsm8k_path, *keys)

    lines = [json.loads(line) for line in run_dir.stats_path.read_text().splitlines()]
    assert [line["step"] for line in lines if "reward" in line] == list(range(NUM_STEPS))
    evaluations = {line["step"]: line for line in lines if "eval/first/pass@1" in line}
    assert list(evaluations) == [-1, NUM_STEPS - 1]
    # The evaluation that began before the first step ended after later ones had.
    assert lines.index(evaluations[-1]) >= 2
    # With η = 0 and a deterministic server, training is the same to the last bit.
    before, beside = read_stats(alone), [step for step in read_stats(run_dir) if step["step"] >= 0]
    for a, b in zip(before, beside, strict=True):
        for key in ("reward", "loss", "grad_norm", "answer_len", "behav_kl/k1", "staleness/max", "trained"):
            assert a[key] == b[key], key

    for step, stats in evaluations.items():
        for name in ("first", "second"):
            answers = read_answers(run_dir.answers_path(step + 1, name))
            assert len(answers) == 4 * NUM_QUESTIONS and all(answer.length <= MAX_TOKENS for answer in answers)
            by_question = [[a for a in answers if a.question == i] for i in range(NUM_QUESTIONS)]
            expected = {f"eval/{name}/{key}": value for key, value in set_statistics(by_question).items()}
            assert {key: stats[key] for key in expected} == expected
        assert {"eval/second/pass@4/low", "eval/second/maj@4/high", "eval/second/truncated"} <= stats.keys()
    first, last = (evaluations[step] for step in (-1, NUM_STEPS - 1))
    assert first["eval/first/version/min"] == 0 < first["eval/second/version/max"]
    # After the last step the weights do not change any more.
    assert {last[f"eval/{name}/version/{end}"] for name in ("first", "second") for end in ("min", "max")} == {NUM_STEPS}

    with sqlite3.connect(run_dir.db_path) as database:
        counts = dict(database.execute("SELECT state, COUNT(*) FROM episodes GROUP BY state"))
    assert counts["trained"] == 4 * NUM_STEPS and counts["evaluated"] == 2 * 2 * NUM_QUESTIONS
    report([str(run_dir.path), "--rollouts", "0"])
    assert "evaluations (with 95% intervals)" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_all_ranks_get_the_results(model_path, gsm8k_path, tmp_path):
    keys = evaluation_keys(tmp_path, 3)
    run_dir = train(tmp_path / "run", model_path, gsm8k_path, *keys, "evaluator.freq_steps=5", layout="embedded.d1+d2")
    steps = {step["step"]: step for step in read_stats(run_dir)}
    assert steps[NUM_STEPS - 1]["eval/first/num_questions"] == 3 and "eval/first/pass@1" in steps[-1]
