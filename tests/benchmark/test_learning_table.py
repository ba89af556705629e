"""The table of `benchmark/learning.py` says which weights gave the answers."""

import json
from pathlib import Path

import pytest

from arealite.trainer.answers import Answer, write_answers
from arealite.utils.rundir import RunDir


@pytest.fixture
def learning(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmark"))
    import learning

    return learning


def test_answers_of_an_evaluation_beside_training_are_not_called_before(learning, tmp_path):
    run = RunDir(tmp_path / "run")
    for begun_at, versions in ((0, (0, 3)), (56, (56, 56))):
        answers = [Answer(i, 0, "\\boxed{1}", 1.0, 5, False, v, v, 0) for i, v in enumerate(versions)]
        write_answers(run.answers_path(begun_at, "gsm8k"), answers)
    learning.write_table(run.path, {"gsm8k": Path("unused")}, [], tmp_path)
    row = next(line for line in (tmp_path / "results.md").read_text().splitlines() if line.startswith("| gsm8k"))
    assert [cell.strip() for cell in row.split("|")][5:7] == ["0 to 3", "56"]


def test_statistics_of_sampled_answers_are_kept(learning, tmp_path):
    stats = {f"eval/valid/{name}{end}": 0.5 for name in ("pass@1", "pass@8", "maj@8") for end in ("", "/low", "/high")}
    learning.write_samples({"before": stats, "after": stats}, 8, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [row["model"] for row in rows] == ["before", "after"] and rows[0]["eval/valid/pass@8"] == 0.5
