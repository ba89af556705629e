"""`Evaluator`: runs validation sets beside training, through the same servers.

`Run` starts an evaluation and goes on; it takes the result at the end of a later step. Meanwhile at most a quarter as
many answers are in flight as training may have, so that training gets its batches. Weight updates go on too: the
statistics name the versions of the weights that generated the answers. All ranks call the same methods; rank 0 works.
docs/evaluation.md lists the statistics (`eval/NAME/pass@1`, its interval `eval/NAME/pass@1/low` and `/high`, …).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from statistics import fmean
from typing import Any

from arealite.algo.eval_metrics import score_statistics, solved_statistics
from arealite.api.cli_args import GRPOConfig
from arealite.api.errors import ConfigError, NoResultError
from arealite.api.io_struct import Stats
from arealite.api.reward_api import is_score
from arealite.api.workflow_api import RolloutWorkflow
from arealite.core.samples import Sample
from arealite.engine.remote.collecting import CollectingEngine
from arealite.trainer.answers import Answer, write_answers
from arealite.trainer.output.eval_report import describe_step
from arealite.utils.console import show_message
from arealite.utils.distributed import broadcast_json, rank, wait_for_first, world_size
from arealite.utils.rundir import RunDir
from arealite.utils.seeds import derive_seed
from arealite.workflow.evaluation import SET_COLUMN, EvaluationWorkflow

logger = logging.getLogger("arealite.evaluation")
Row = dict[str, Any]
# Share of the answers in flight that an evaluation may have beside training.
_SHARE = 0.25
# Other ranks wait longer than rank 0, whose error says more.
_GRACE_S = 60.0


def validation_sets(rows: Mapping[str, Sequence[Row]] | Sequence[Row] | None) -> dict[str, Sequence[Row]]:
    """Return validation sets by name. A single list is the set `valid`."""
    if rows is None:
        return {}
    return dict(rows) if isinstance(rows, Mapping) else {"valid": rows}


class BlockingEvaluator:
    """Evaluates at once, with the trained model itself: for loops over fixed data."""

    def __init__(self, evaluate: Callable[[], Stats]):
        self.evaluate = evaluate
        self.step: int | None = None
        self._stats: Stats = {}

    def start(self, step: int) -> None:
        self.step, self._stats = step, self.evaluate()

    def take(self, wait: bool = False) -> Stats | None:
        self.step = None
        return self._stats


class Evaluator:
    """Evaluates `sets` of rows, by name, with one workflow for all or one for each.

    `version` is that of the weights with which the servers started. Answers are kept in `run_dir`.
    """

    def __init__(
        self,
        config: GRPOConfig,
        rollout: CollectingEngine,
        sets: Mapping[str, Sequence[Row]] | Sequence[Row],
        workflows: RolloutWorkflow | Mapping[str, RolloutWorkflow],
        run_dir: RunDir | None = None,
        version: int = 0,
    ):
        self.config, self.rollout, self.version = config, rollout, version
        self.run_dir = run_dir or RunDir(config)
        self.sets = validation_sets(sets)
        if not isinstance(workflows, Mapping):
            workflows = dict.fromkeys(self.sets, workflows)
        self.workflow = EvaluationWorkflow(workflows)
        self._with_score = [name for name, own in workflows.items() if is_score(getattr(own, "reward_fn", None))]
        metric = config.saver.best_metric or ""
        if metric.startswith(tuple(f"eval/{name}/" for name in self._with_score)) and "@" in metric:
            raise ConfigError(
                f"saver.best_metric={metric} is not measured: a reward model gives scores, and no score counts as "
                f"solved. Use {metric.rpartition('/')[0]}/reward"
            )
        # After how many steps, less one, the running evaluation has begun; None if none runs.
        self.step: int | None = None
        self._is_beside_training = True
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="evaluation")
        self._summary: Future[Stats] | None = None

    def start(self, step: int, beside_training: bool = True) -> None:
        """Begin an evaluation of the weights after `step`; -1 is before the first step."""
        assert self.step is None, "take the result of the last evaluation first"
        self.step, seed = step, self.config.seed
        self._is_beside_training = beside_training
        rows: list[Row] = []
        for name, own in self.sets.items():
            # The same seeds in each evaluation, so that checkpoints are compared on equal terms.
            rows += [{"seed": derive_seed(seed, i), **row, SET_COLUMN: name} for i, row in enumerate(own)]
        self.rollout.start_evaluation(rows, self.workflow, self._max_running() if beside_training else None)

    def take(self, wait: bool = False) -> Stats | None:
        """Return the statistics of the evaluation that has ended, or None. All ranks get the same."""
        if self.step is None:
            return None
        stats = self._take_first(wait) if rank() == 0 else None
        if wait and world_size() > 1:
            wait_for_first(self.config.rollout.batch_timeout_s + _GRACE_S)
        stats = broadcast_json(stats)
        if stats is not None:
            self.step = None
        return stats

    def close(self) -> None:
        """End the thread; a running evaluation is abandoned."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _take_first(self, wait: bool) -> Stats | None:
        if self._summary is None:
            results = self._take_results(wait)
            if results is None:
                return None
            assert self.step is not None
            # Decoding and counting take a while: not in the trainer's thread.
            self._summary = self._thread.submit(self._summarize, results, self.step + 1)
        if not (wait or self._summary.done()):
            return None
        summary, self._summary = self._summary, None
        return summary.result()

    def _take_results(self, wait: bool) -> list[list[Sample] | None] | None:
        """Return the samples of each question. If all have failed beside training, warn: training goes on."""
        try:
            return self.rollout.take_evaluation(wait)
        except NoResultError as error:
            if not self._is_beside_training:
                raise
            assert self.step is not None
            show_message(
                f"warning: the evaluation {describe_step(self.step)} has no result, and training goes on: {error}. "
                "Check the rows and the reward of the validation sets"
            )
            return [None for own in self.sets.values() for _ in own]

    def _max_running(self) -> int:
        """Return how many questions are asked at once beside training."""
        rollout, batch_size = self.config.rollout, self.config.train_dataset.batch_size
        episodes = rollout.max_concurrent_rollouts or (rollout.max_head_offpolicyness + 1) * batch_size
        answers = episodes * self.config.gconfig.n_samples * _SHARE
        return max(1, round(answers / self.config.eval_gconfig.n_samples))

    def _summarize(self, results: list[list[Sample] | None], begun_at: int) -> Stats:
        """Write the answers, and return the statistics of all sets."""
        stats, sampling = {}, self.config.eval_gconfig.statistics(self.config.gconfig)
        for name, rows in self.sets.items():
            own, results = results[: len(rows)], results[len(rows) :]
            questions = [self._answers(each, own[i] or [], name) for i, each in enumerate(_question_names(rows))]
            path = self.run_dir.answers_path(begun_at, name)
            try:
                write_answers(path, (answer for answers in questions for answer in answers))
            except OSError as error:
                logger.error("the answers of an evaluation are not kept: cannot write %s: %s", path, error.strerror)
            own = set_statistics(questions, name in self._with_score) | sampling
            stats |= {f"eval/{name}/{key}": value for key, value in own.items()}
        return stats

    def _answers(self, question: Any, samples: list[Sample], set_name: str) -> list[Answer]:
        tokenizer = getattr(self.workflow.workflows[set_name], "tokenizer", None)
        return [
            Answer(
                question=question,
                sample=i,
                answer=_to_text(tokenizer, sample.tokens),
                reward=sample.reward,
                length=len(sample.tokens),
                is_truncated=sample.is_truncated,
                version=self._absolute(sample.oldest_version),
                last_version=self._absolute(sample.newest_version),
                vote=sample.vote,
            )
            for i, sample in enumerate(samples)
        ]

    def _absolute(self, version: int) -> int:
        """Return a version of the servers as one of the run; -1 (an answer without tokens) stays -1."""
        return version if version < 0 else version + self.version


def _question_names(rows: Sequence[Row]) -> list[Any]:
    """Return the column `id` of each row, or its number; only numbers if rows share an `id`."""
    names = [i if row.get("id") is None else row["id"] for i, row in enumerate(rows)]
    names = [str(name) if isinstance(name, list | dict) else name for name in names]
    return names if len(set(map(str, names))) == len(names) else list(range(len(names)))


def _to_text(tokenizer: Any, tokens: list[int]) -> str:
    if tokenizer is None:
        return " ".join(map(str, tokens))
    return tokenizer.decode(tokens, skip_special_tokens=True)


def set_statistics(questions: list[list[Answer]], has_score: bool = False) -> Stats:
    """Return the statistics of one validation set, from the answers to each question.

    Questions without an answer have failed; the other statistics leave them out. `has_score`: see `is_score`.
    """
    answered = [answers for answers in questions if answers]
    every = [answer for answers in answered for answer in answers]
    stats = {"num_questions": float(len(answered)), "failed": float(len(questions) - len(answered))}
    if not every:
        return stats
    if has_score:
        stats |= score_statistics([fmean(answer.reward for answer in answers) for answers in answered])
    else:
        solved = [[answer.is_solved for answer in answers] for answers in answered]
        stats |= solved_statistics(solved, [[answer.vote for answer in answers] for answers in answered])
        stats["reward"] = fmean(answer.reward for answer in every)
    versions = [version for answer in every for version in (answer.version, answer.last_version) if version >= 0]
    if versions:
        stats |= {"version/min": float(min(versions)), "version/max": float(max(versions))}
    return stats | {
        "answer_len": fmean(answer.length for answer in every),
        "truncated": fmean(answer.is_truncated for answer in every),
    }
