"""The model with the best validation result is kept beside the last."""

import math

import pytest

from arealite.api.cli_args import SaverConfig
from arealite.trainer.best import BestModel, find_metric
from arealite.trainer.saver import Saver
from arealite.utils.rundir import RunDir
from tests.trainer.test_saver import Engine, info

METRIC = "eval/valid/pass@1"


def make(folder, **options) -> BestModel:
    config = SaverConfig(**options)
    return BestModel(config, Saver(config, RunDir(folder), Engine()))


def offer(best: BestModel, step: int, value: float, metric: str = METRIC) -> bool:
    """Offer the model of a step; its one weight is the step."""
    best.saver.engine.value = step
    is_saved = best.saver.maybe_save(info(step)) is not None
    return best.offer(info(step), {metric: value, "reward": 0.5}, is_saved)


def folders(best: BestModel) -> list[str]:
    return sorted(path.name for path in best.saver.folder.glob("step*"))


def test_the_link_follows_the_best_result_and_one_extra_folder_is_kept(tmp_path):
    best = make(tmp_path)
    best.resume(is_new_run=True)
    assert best.summary() == ""
    assert [offer(best, step, value) for step, value in enumerate([0.2, 0.4, 0.3, 0.4, 0.5])] == [1, 1, 0, 0, 1]
    assert folders(best) == ["step000005"]
    assert (tmp_path / "checkpoints/best/weights").read_text() == "4"
    assert best.summary() == f"best model ({METRIC} 0.5 after step 5): {tmp_path}/checkpoints/best"


def test_folders_that_were_due_anyway_stay(tmp_path):
    best = make(tmp_path, freq_steps=2)
    best.resume(is_new_run=True)
    for step, value in enumerate([0.1, 0.2, 0.3, 0.1]):
        offer(best, step, value)
    assert folders(best) == ["step000002", "step000003", "step000004"]
    offer(best, 4, 0.9)
    assert folders(best) == ["step000002", "step000004", "step000005"]


@pytest.mark.parametrize("metric", ["eval/loss", "eval/valid/loss", "eval/valid/nll"])
def test_a_loss_is_best_when_lowest_and_what_is_not_a_number_is_never_best(tmp_path, metric):
    best = make(tmp_path, best_metric=metric)
    results = [offer(best, step, value, metric) for step, value in enumerate([math.nan, 3.0, 2.0, 2.5])]
    assert results == [False, True, True, False] and folders(best) == ["step000003"]


def test_a_metric_that_is_not_measured_is_named_once(tmp_path, capsys):
    best = make(tmp_path, best_metric="eval/valid/acuracy")
    assert not best.offer(info(0), {"reward": 0.5, "eval/other/loss": 1.0}, False)
    assert not best.offer(info(0), {"eval/valid/num_questions": 0.0, "eval/valid/failed": 4.0}, False)
    assert capsys.readouterr().out == ""
    for step in range(2):
        assert not best.offer(info(step), {"eval/valid/loss": 1.0, "eval/valid/accuracy": 0.5}, False)
    shown = capsys.readouterr().out
    assert shown.count("best_metric=eval/valid/acuracy is not measured") == 1 and "has accuracy, loss" in shown


def test_the_reward_decides_between_equal_results(tmp_path):
    best = make(tmp_path)
    rewards = [0.1, 0.3, 0.2, None, 0.3, 0.4]
    results = [{METRIC: 0.0, **({} if r is None else {"eval/valid/reward": r})} for r in rewards]
    assert [best.offer(info(step), stats, False) for step, stats in enumerate(results)] == [1, 1, 0, 0, 0, 1]
    again = make(tmp_path)
    again.resume(is_new_run=False)
    assert not again.offer(info(6), {METRIC: 0.0, "eval/valid/reward": 0.4}, False)
    assert again.offer(info(7), {METRIC: 0.1, "eval/valid/reward": 0.1}, False)


def test_a_run_that_resumes_goes_on_comparing_and_a_new_one_does_not(tmp_path):
    offer(make(tmp_path), 3, 0.5)
    again = make(tmp_path)
    again.resume(is_new_run=False)
    assert not offer(again, 4, 0.4) and offer(again, 5, 0.6)
    assert folders(again) == ["step000006"]
    new = make(tmp_path)
    new.resume(is_new_run=True)
    assert new.best is None and not (tmp_path / "checkpoints/best").exists()


@pytest.mark.parametrize("freq_steps", [None, 2])
def test_the_best_model_of_a_step_that_runs_again_is_not_overwritten(tmp_path, freq_steps):
    offer(make(tmp_path, freq_steps=freq_steps), 3, 0.5)
    for _ in range(2):
        again = make(tmp_path, freq_steps=2)
        again.resume(is_new_run=False, num_steps=2)
        # The repeated step has another model and another result, and is due.
        again.saver.engine.value = "repeated"
        again.saver.maybe_save(info(3))
        assert not again.offer(info(3), {METRIC: 0.4}, True)
        assert (tmp_path / "checkpoints/best/weights").read_text() == "3"
        assert (tmp_path / "checkpoints/step000004/weights").read_text() == "repeated"
    assert offer(again, 5, 0.6)
    assert [path.name for path in again.saver.folder.glob("*best*")] == ["best", "best.json"]
    last = make(tmp_path)
    last.resume(is_new_run=False, num_steps=6)
    assert last.best is not None and last.best.folder == "step000006"


def test_a_crash_while_the_link_is_changed_leaves_the_best_result_so_far(tmp_path):
    best = make(tmp_path)
    offer(best, 3, 0.5)
    # Killed after the link to a better model was made, and before its result was written.
    offer(make(tmp_path / "other"), 4, 0.6)
    (tmp_path / "other/checkpoints/step000005").rename(tmp_path / "checkpoints/step000005")
    (tmp_path / "checkpoints/best").unlink()
    (tmp_path / "checkpoints/best").symlink_to("step000005")
    best.resume(is_new_run=False, num_steps=4)
    assert (tmp_path / "checkpoints/best/weights").read_text() == "3"
    # Killed after the folder was renamed, and before its new name was written.
    (tmp_path / "checkpoints/step000004").rename(tmp_path / "checkpoints/best-step000004")
    best.resume(is_new_run=False, num_steps=2)
    assert best.best is not None and best.best.value == 0.5
    assert (tmp_path / "checkpoints/best/weights").read_text() == "3"


def test_a_run_that_resumes_with_another_metric_does_not_compare_its_results_with_those_of_the_last(tmp_path):
    offer(make(tmp_path), 3, 0.5)
    again = make(tmp_path, best_metric="eval/valid/reward")
    again.resume(is_new_run=False)
    results = [offer(again, step, value, "eval/valid/reward") for step, value in ((4, -2.0), (5, -3.0), (6, -1.0))]
    assert results == [True, False, True] and folders(again) == ["step000007"]


def test_a_set_whose_questions_have_all_failed_is_not_replaced_by_another(tmp_path):
    best = make(tmp_path)
    results = [
        {"eval/a/num_questions": 2.0, "eval/a/pass@1": 0.5, "eval/b/pass@1": 0.1},
        {"eval/a/num_questions": 0.0, "eval/b/pass@1": 0.9},
        {"eval/a/num_questions": 2.0, "eval/a/pass@1": 0.6, "eval/b/pass@1": 0.1},
    ]
    assert [best.offer(info(step), stats, False) for step, stats in enumerate(results)] == [True, False, True]
    assert best.best is not None and best.best.metric == "eval/a/pass@1"
    # A set that there is no more does not count for ever.
    assert best.offer(info(3), {"eval/b/pass@1": 0.1}, False)


def test_a_result_whose_folder_is_gone_or_whose_file_is_damaged_does_not_count(tmp_path):
    best = make(tmp_path)
    offer(best, 3, 0.5)
    (tmp_path / "checkpoints/best.json").write_text('{"metric": ')
    best.resume(is_new_run=False)
    assert best.best is None


def test_it_can_be_turned_off(tmp_path):
    assert not offer(make(tmp_path, keep_best=False), 0, 0.5) and not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(
    ("keys", "name", "expected"),
    [
        (["reward", "loss"], None, None),
        (["eval/a/reward", "eval/a/pass@1", "eval/b/pass@1"], None, "eval/a/pass@1"),
        (["eval/loss", "eval/accuracy"], None, "eval/loss"),
        (["eval/reward", "eval/answer_len"], None, "eval/reward"),
        (["eval/a/pass@1", "eval/b/maj@8"], "eval/b/maj@8", "eval/b/maj@8"),
        (["eval/a/pass@1"], "eval/b/maj@8", None),
    ],
)
def test_the_metric_is_the_configured_one_or_the_first_of_the_usual(keys, name, expected):
    assert find_metric(dict.fromkeys(keys, 0.5), name) == expected
