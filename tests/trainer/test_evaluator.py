"""Evaluations beside training: statistics, schedule, kept answers and their comparison."""

import json
import math
from datetime import date

import pytest

from arealite.api.cli_args import EvalGenerationConfig, EvaluatorConfig, GRPOConfig, InferenceEngineConfig
from arealite.api.errors import ConfigError, DatasetError, TrainingError
from arealite.api.io_struct import ModelResponse, StepInfo
from arealite.api.trajectory import Trajectory
from arealite.api.workflow_api import RolloutWorkflow
from arealite.engine.remote.collecting import CollectingEngine
from arealite.reward.combined import AsyncCombinedReward, CombinedReward
from arealite.reward.gsm8k import gsm8k_reward
from arealite.reward.model import ServedRewardModel
from arealite.trainer.answers import Answer, compare_answers, read_answers, write_answers
from arealite.trainer.evaluations import Evaluations
from arealite.trainer.evaluator import Evaluator, set_statistics
from arealite.trainer.output.eval_report import evaluation_lines, evaluation_table
from arealite.utils.rundir import RunDir


def answer(question, reward, sample=0, vote=0, **other) -> Answer:
    fields = {"answer": "a", "length": 10, "is_truncated": False, "version": 3, "last_version": 3, **other}
    return Answer(question=question, sample=sample, reward=reward, vote=vote, **fields)


def test_the_statistics_of_a_set_by_hand():
    questions = [
        [answer(0, 1.0), answer(0, 1.0, 1), answer(0, 0.0, 2, vote=2, length=30), answer(0, 0.0, 3, vote=3)],
        [answer(1, 0.5), answer(1, 0.0, 1), answer(1, 0.0, 2), answer(1, 1.0, 3, vote=3, is_truncated=True)],
        [],
        [answer(3, 0.0, i, version=2, last_version=5) for i in range(4)],
    ]
    stats = set_statistics(questions)
    assert (stats["num_questions"], stats["failed"]) == (3, 1)
    # Two, one and no answer of four are solved: 0.5 of partial credit is not.
    assert stats["pass@1"] == pytest.approx((0.5 + 0.25 + 0) / 3)
    assert stats["pass@2"] == pytest.approx((5 / 6 + 1 / 2 + 0) / 3) and stats["pass@4"] == pytest.approx(2 / 3)
    assert stats["maj@4"] == pytest.approx((1 + 0 + 0) / 3) and "maj@1" not in stats
    assert stats["pass@1/low"] < stats["pass@1"] < stats["pass@1/high"]
    assert stats["reward"] == pytest.approx(3.5 / 12) and stats["answer_len"] == pytest.approx(140 / 12)
    assert stats["truncated"] == pytest.approx(1 / 12)
    assert (stats["version/min"], stats["version/max"]) == (2, 5)
    assert set_statistics([[], []]) == {"num_questions": 0, "failed": 2}
    # An answer without tokens has no version.
    empty = answer(0, 0.0, length=0, version=-1, last_version=-1)
    assert set_statistics([[empty], [answer(1, 1.0)]])["version/min"] == 3
    assert "version/min" not in set_statistics([[empty]])


def test_scores_have_a_mean_with_an_interval_and_no_passes():
    """No score of a reward model means that an answer is solved."""
    stats = set_statistics([[answer(i, reward)] for i, reward in enumerate([-3.0, 1.5, 4.5])], has_score=True)
    assert not [key for key in stats if "@" in key]
    # Student's quantile for two degrees of freedom times the standard error.
    half = 4.3027 * math.sqrt(14.25 / 3)
    shown = [stats[f"reward{end}"] for end in ("", "/low", "/high")]
    assert shown == pytest.approx([1.0, 1 - half, 1 + half])
    [line] = evaluation_lines(4, {f"eval/valid/{key}": value for key, value in stats.items()})
    assert "reward 1 (-8.378–10.38)" in line
    assert "reward/low" not in set_statistics([[answer(0, -3.0)]], has_score=True)


def test_answers_are_kept_and_compared(tmp_path):
    before, after = tmp_path / "before.jsonl", tmp_path / "new" / "after.jsonl"
    write_answers(before, [answer(i, float(i < 4), answer="é\n\ud800") for i in range(20)])
    write_answers(after, [answer(i, float(i >= 3)) for i in range(20)])
    assert read_answers(before)[0].answer == "é\n?" and len(read_answers(after)) == 20
    found = compare_answers(before, after)
    assert (found.before, found.after, found.num_questions) == (0.2, 0.85, 20)
    assert found.changed == {i: (1.0, 0.0) if i < 3 else (0.0, 1.0) for i in range(20) if i != 3}
    # McNemar: 16 gained, 3 lost.
    assert found.p_value == pytest.approx(2 * (1 + 19 + 171 + 969) / 2**19)
    assert "20.0% -> 85.0%" in str(found) and "worse (3): [0, 1, 2]" in str(found)
    # Characters that end a line elsewhere.
    write_answers(before, [answer(i, 1.0, answer="1\u2028\x85\u2029\f\r2") for i in range(2)])
    assert [each.answer for each in read_answers(before)] == ["1\u2028\x85\u2029\f\r2"] * 2
    # One answer before, two after: shares are compared.
    write_answers(after, [answer(i, float(i % 2), sample) for i in range(2) for sample in range(2)])
    assert compare_answers(before, after).changed == {0: (1.0, 0.0)}
    write_answers(after, [answer("other", 1.0)])
    with pytest.raises(DatasetError, match="no question in common"):
        compare_answers(before, after)
    with pytest.raises(DatasetError, match="cannot read the answers"):
        read_answers(tmp_path / "none")


class Speak(RolloutWorkflow):
    """Answers with the row's number, under the engine's version, once the test has opened the gate."""

    def __init__(self, tokenizer, num_samples=1):
        self.tokenizer, self.num_samples = tokenizer, num_samples
        self.seeds: list[int] = []

    async def arun_episode(self, engine, data):
        self.seeds.append(data["seed"])
        if data["x"] == "fails":
            raise ValueError("this row fails")
        ids = self.tokenizer.encode(f"?{data['x']}")
        count = len(ids) - 1
        answer = ModelResponse(ids[:1], ids[1:], [0.0] * count, [engine.get_version()] * count, "stop")
        row = Trajectory().observe(ids[:1]).add(answer).reward(float(data["x"] % 2))
        return Trajectory.join([row] * self.num_samples)


class Engine(CollectingEngine):
    """A real executor without servers. `allow(count)` lets so many more episodes end."""

    def ask(self, progress, count): ...
    def initialize(self, addrs=None, train_batch_size=None): ...
    def update_weights(self, meta): ...


@pytest.fixture
def engine():
    made = Engine(InferenceEngineConfig(batch_timeout_s=20))
    made.start_executor(4)
    yield made
    made.destroy()


@pytest.fixture
def make(engine, tokenizer, tmp_path):
    config = GRPOConfig(experiment_name="e", trial_name="t", eval_gconfig=EvalGenerationConfig(n_samples=1))
    config.cluster.fileroot, config.train_dataset.batch_size = str(tmp_path), 8

    def build(rows, workflow=None, **options):
        return Evaluator(config, engine, rows, workflow or Speak(tokenizer), **options)

    return build


def numbers(*xs):
    return [{"x": x} for x in xs]


def test_an_evaluation_names_its_sets_versions_and_questions(make, engine, tokenizer):
    workflow = Speak(tokenizer, num_samples=2)
    evaluator = make({"odd": numbers(1, 3, 5), "all": [{"x": 1, "id": "one"}, *numbers(2)]}, workflow, version=7)
    assert evaluator.take() is None
    evaluator.start(6)
    stats = evaluator.take(wait=True)
    assert evaluator.step is None
    assert (stats["eval/odd/pass@1"], stats["eval/all/pass@1"], stats["eval/all/maj@2"]) == (1, 0.5, 0.5)
    assert stats["eval/odd/version/min"] == stats["eval/odd/version/max"] == 7
    answers = read_answers(evaluator.run_dir.answers_path(7, "all"))
    assert [(a.question, a.sample, a.answer, a.vote) for a in answers] == [
        ("one", 0, "1", 0), ("one", 1, "1", 0), (1, 0, "2", 0), (1, 1, "2", 0),
    ]  # fmt: skip
    # The same seeds again, other ones for other questions.
    first = workflow.seeds.copy()
    engine.set_version(3)
    evaluator.start(9)
    assert evaluator.take(wait=True)["eval/all/version/max"] == 10
    assert sorted(workflow.seeds[5:]) == sorted(first) and len(set(first)) == 3
    evaluator.close()


def test_a_set_that_a_reward_model_scores_has_no_passes(make, tokenizer):
    workflow = Speak(tokenizer)
    assert not CombinedReward({"right": (1.0, gsm8k_reward)}).is_score
    model = ServedRewardModel("http://127.0.0.1:1", "m", end_token="")
    workflow.reward_fn = AsyncCombinedReward({"right": (1.0, gsm8k_reward), "liked": (0.5, model)})
    evaluator = make({"scored": numbers(1, 2), "solved": numbers(1)}, {"scored": workflow, "solved": Speak(tokenizer)})
    evaluator.start(-1)
    stats = evaluator.take(wait=True)
    assert "eval/scored/pass@1" not in stats and stats["eval/scored/reward/low"] < 0.5 and stats["eval/solved/pass@1"]
    evaluator.config.saver.best_metric = "eval/solved/pass@1"
    make(evaluator.sets, evaluator.workflow.workflows).close()
    evaluator.config.saver.best_metric = "eval/scored/pass@1"
    with pytest.raises(ConfigError, match=r"scored/pass@1 is not measured: .* Use eval/scored/reward"):
        make(evaluator.sets, evaluator.workflow.workflows)
    evaluator.close()


def test_a_question_may_have_any_id(make):
    ids = [date(2024, 5, 1), b"a", None, 2.5, "text", 7]
    evaluator = make([{"x": 1, "id": each} for each in ids])
    evaluator.start(-1)
    evaluator.take(wait=True)
    path = evaluator.run_dir.answers_path(0, "valid")
    found = [each.question for each in read_answers(path)]
    assert found == ["2024-05-01", "b'a'", 2, 2.5, "text", 7]
    assert compare_answers(path, path).num_questions == len(ids)
    evaluator.close()


@pytest.mark.parametrize(
    ("ids", "names"), [([[1, "a"], {"b": 2}], ["[1, 'a']", "{'b': 2}"]), ([7, 7], [0, 1]), (["1", 1], [0, 1])]
)
def test_every_question_has_a_name_of_its_own(make, ids, names):
    evaluator = make([{"x": 1, "id": each} for each in ids])
    evaluator.start(-1)
    evaluator.take(wait=True)
    path = evaluator.run_dir.answers_path(0, "valid")
    assert [each.question for each in read_answers(path)] == names
    assert compare_answers(path, path).num_questions == 2
    evaluator.close()


def test_questions_that_fail_are_counted_and_left_out(make, capsys):
    evaluator = make(numbers(1, "fails", 2))
    evaluator.start(0)
    stats = evaluator.take(wait=True)
    assert (stats["eval/valid/num_questions"], stats["eval/valid/failed"], stats["eval/valid/pass@1"]) == (2, 1, 0.5)
    shown = capsys.readouterr().out
    assert "warning: 1 of 3 questions of an evaluation failed" in shown and "this row fails" in shown
    evaluator.close()


def test_training_goes_on_if_all_questions_of_an_evaluation_fail(make, capsys):
    evaluator = make({"a": numbers("fails"), "b": numbers("fails", "fails")})
    evaluator.start(1)
    stats = evaluator.take(wait=True)
    assert (stats["eval/a/failed"], stats["eval/b/failed"], stats["eval/b/num_questions"]) == (1, 2, 0)
    assert "eval/a/pass@1" not in stats and read_answers(evaluator.run_dir.answers_path(2, "b")) == []
    shown = capsys.readouterr().out
    assert "warning: the evaluation after step 2 has no result, and training goes on" in shown
    assert "this row fails" in shown
    # The next one has a result again.
    evaluator.sets = {"a": numbers(1)}
    evaluator.start(2)
    assert evaluator.take(wait=True)["eval/a/pass@1"] == 1
    evaluator.close()


def test_an_evaluation_without_training_ends_if_all_questions_fail(make):
    evaluator = make(numbers("fails"))
    evaluator.start(1, beside_training=False)
    with pytest.raises(TrainingError, match=r"none of 1 episodes gave a result.*this row fails"):
        evaluator.take(wait=True)
    evaluator.close()


def test_beside_training_a_quarter_of_its_answers_is_in_flight(make):
    evaluator = make(numbers(1))
    evaluator.config.gconfig.n_samples, evaluator.config.eval_gconfig.n_samples = 16, 4
    evaluator.config.rollout.max_head_offpolicyness = 1
    # Training may have 2 × 8 episodes of 16 answers in flight.
    assert evaluator._max_running() == 2 * 8 * 16 // 4 // 4
    evaluator.config.rollout.max_concurrent_rollouts = 1
    assert evaluator._max_running() == 1
    evaluator.close()


class Steps:
    """`Evaluations` over an evaluator that ends when the test says so."""

    def __init__(self, run_dir, **config):
        self.step, self.is_done, self.log = None, False, []
        self.schedule = Evaluations(EvaluatorConfig(**config), self, run_dir)  # pyright: ignore

    def start(self, step):
        assert self.step is None
        self.step = step
        self.log.append(f"start {step}")

    def take(self, wait=False):
        if not (wait or self.is_done):
            return None
        self.log.append(f"{'wait for' if wait else 'take'} {self.step}")
        self.step, self.is_done = None, False
        return {"eval/valid/pass@1": 1.0}

    def commit(self, step, is_last=False):
        return list(self.schedule.after_step(StepInfo(0, step, step, 100), is_last))


def test_results_belong_to_the_step_at_which_the_evaluation_began(tmp_path, capsys):
    steps = Steps(RunDir(tmp_path), freq_steps=3)
    assert steps.schedule.before_steps(None) == {} and steps.commit(0) == []
    steps.is_done = True
    assert steps.commit(1) == [-1]
    assert steps.commit(2) == [] and steps.step == 2
    steps.commit(3), steps.commit(4)
    # Step 6 is due while the one of step 3 still runs.
    assert (
        steps.commit(5) == []
        and "no evaluation after step 6: the one after step 3 still runs" in capsys.readouterr().out
    )
    # The last step is evaluated in any case, when the one before has ended: its model is saved first.
    assert steps.commit(6, is_last=True) == [] and steps.step == 2
    assert list(steps.schedule.finish()) == [2, 6] and steps.schedule.finish() == {}
    assert steps.log == ["start -1", "take -1", "start 2", "wait for 2", "start 6", "wait for 6"]


def test_after_a_resume_only_an_evaluation_that_was_lost_runs_again(tmp_path):
    run_dir = RunDir(tmp_path).create()
    for step in (0, 2, 4):
        write_answers(run_dir.answers_path(step, "valid"), [])
    run_dir.stats_path.write_text('{"step": -1, "eval/valid/pass@1": 0}\n{"step": 0}\n{"step": 1}\n')
    lost = Steps(run_dir, freq_steps=2)
    assert lost.schedule.before_steps(StepInfo(0, 1, 1, 100)) == {} and lost.step == 1
    # What was undone is removed.
    assert sorted(path.name for path in run_dir.evaluations.iterdir()) == ["step000000", "step000002"]
    with run_dir.stats_path.open("a") as file:
        file.write(json.dumps({"step": 1, "eval/valid/pass@1": 0}) + "\n")
    for step in (0, 1):
        kept = Steps(run_dir, freq_steps=2)
        assert kept.schedule.before_steps(StepInfo(0, step, step, 100)) == {} and kept.step is None
    # All steps are done: the evaluation after the last one runs again, too.
    for options, expected in (({}, 2), ({"at_start_and_end": False}, None)):
        done = Steps(run_dir, **options)
        assert done.schedule.before_steps(StepInfo(0, 2, 2, 100), is_done=True) == {} and done.step == expected
    new = Steps(run_dir, at_start_and_end=False)
    assert new.schedule.before_steps(None) == {} and new.step is None and not list(run_dir.evaluations.iterdir())


def test_lines_and_table():
    stats = {"eval/a/pass@1": 0.268, "eval/a/pass@1/low": 0.245, "eval/a/pass@1/high": 0.293, "eval/a/truncated": 0.03}
    stats |= {"eval/a/version/min": 10.0, "eval/a/version/max": 12.0, "eval/b/loss": 1.23456, "eval/b/x": None}
    assert evaluation_lines(9, stats) == [
        "evaluation after step 10, a:  pass@1 26.8% (24.5–29.3)  truncated 3.0%  version 10–12",
        "evaluation after step 10, b:  loss 1.235  x –",
    ]
    assert evaluation_lines(-1, stats)[0].startswith("evaluation before the first step, a:")
    table = evaluation_table([(-1, {"eval/a/pass@1": 0.5}), (9, stats)])
    assert [column.header for column in table.columns] == ["step", "set", "pass@1", "truncated", "version", "loss", "x"]
    assert [list(column.cells) for column in table.columns][:3] == [
        ["0", "10", "10"], ["a", "a", "b"], ["50.0%", "26.8% (24.5–29.3)", "–"],
    ]  # fmt: skip
