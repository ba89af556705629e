"""Generated rows: countdown and reasoning-gym."""

import pytest

from arealite.api.cli_args import DatasetConfig, ValidationDatasetConfig
from arealite.api.errors import ConfigError, DatasetError
from arealite.dataset import load_dataset
from arealite.reward.countdown import solves


def load(path, kind=DatasetConfig, **options):
    return load_dataset(kind(path=path, options=options))


def test_countdown_tasks_are_solvable_and_depend_on_the_seed_only():
    rows = load("generate:countdown", size=200, max_numbers=5, max_target=50)
    assert len(rows) == 200 and all(solves(r["solution"], r["nums"], r["target"]) for r in rows)
    assert all(3 <= len(r["nums"]) <= 5 and 1 <= r["target"] <= 50 for r in rows)
    assert rows == load("generate:countdown", size=200, seed=1, max_numbers=5, max_target=50)
    assert load("generate:countdown", size=3) != load("generate:countdown", ValidationDatasetConfig, size=3)


def test_reasoning_gym_tasks_come_with_what_their_verifier_needs():
    pytest.importorskip("reasoning_gym")
    rows = load("reasoning_gym:letter_counting", size=3, seed=7, min_words=1, max_words=1)
    assert [set(row) for row in rows] == [{"question", "answer", "entry", "threshold"}] * 3
    assert rows[0]["entry"]["metadata"]["source_dataset"] == "letter_counting" and rows[0]["threshold"] == 0.999
    assert load("reasoning_gym:gcd", size=1, threshold=None)[0]["threshold"] is None


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("generate:sums", {}, "no generator 'sums' .* use countdown"),
        ("generate:countdown", {"size": "x"}, r"options\.size .* must be a whole number"),
        ("generate:countdown", {"colour": 1}, "options of generate:countdown: .*colour"),
        ("generate:countdown", {"max_numbers": 99}, "options of generate:countdown: 2 ≤ min_numbers"),
        ("reasoning_gym:gcdd", {}, "no task 'gcdd' .* there are: gcd"),
        ("reasoning_gym:gcd", {"colour": 1}, "options of reasoning_gym:gcd: .*colour"),
        ("reasoning_gym:gcd", {"min_value": 9, "max_value": 2}, "options of reasoning_gym:gcd: max_value must be"),
        ("reasoning_gym:gcd", {"threshold": "high"}, r"options\.threshold .* must be a number or null"),
    ],
)
def test_wrong_options_are_one_line(path, options, message):
    if path.startswith("reasoning_gym"):
        pytest.importorskip("reasoning_gym")
    with pytest.raises(DatasetError, match=message):
        load(path, **options)


def test_options_belong_to_generated_rows_only():
    with pytest.raises(ConfigError, match="options are of generated rows only"):
        DatasetConfig(path="d.jsonl", options={"size": 3}).check()
    with pytest.raises(ConfigError, match="streaming reads files"):
        DatasetConfig(path="generate:countdown", streaming=True).check()
