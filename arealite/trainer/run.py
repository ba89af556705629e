"""`Run`: run directory, statistics, live table, trace, checkpoints and recovery of a training loop.

Scripts write `with Run(…) as run: for step in run.steps(): … run.commit(step, stats)`. It contains no part of any
algorithm: a loop without it trains the same.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import ParamSpec, TypeVar, cast

from transformers import PreTrainedTokenizerBase

from arealite.api.cli_args import BaseExperimentConfig, GRPOConfig
from arealite.api.engine_api import TrainEngine
from arealite.api.errors import CheckpointError, CollapseError, ConfigError
from arealite.api.io_struct import FinetuneSpec, Stats, StepInfo
from arealite.controller.factory import current_driver
from arealite.core.ledger.store import Ledger
from arealite.dataset import StatefulDataLoader
from arealite.engine.remote.collecting import CollectingEngine
from arealite.engine.replay.replaying import ReplayEnd, checkpoint_parts, current_replay
from arealite.trainer.best import BestModel
from arealite.trainer.evaluations import Evaluations
from arealite.trainer.evaluator import BlockingEvaluator, Evaluator
from arealite.trainer.guard import Guard
from arealite.trainer.interrupt import Interrupt
from arealite.trainer.output.eval_report import evaluation_lines
from arealite.trainer.recording import RunRecord, as_rows
from arealite.trainer.recover import Recover
from arealite.trainer.saver import Saver
from arealite.trainer.server_counters import ServerCounters
from arealite.trainer.startup import take_startup_stats
from arealite.trainer.stats_logger import (
    SUPERVISED_COLUMNS,
    StatsLogger,
    add_executor_stats,
    average_minibatches,
    read_stats,
)
from arealite.trainer.trace import Trace
from arealite.utils.activity import activity
from arealite.utils.console import COLUMNS, ProgressTable, show_message
from arealite.utils.distributed import broadcast_json, rank, world_size
from arealite.utils.process import ATTEMPT_ENV
from arealite.utils.rundir import RunDir
from arealite.utils.script_check import end_check
from arealite.utils.status.writer import status
from arealite.utils.trace import tracing
from arealite.weights.sync import make_weight_meta, needs_first_sync, sync_weights

logger = logging.getLogger("arealite.run")
P = ParamSpec("P")
T = TypeVar("T")
# Steps in a row without any signal before a warning.
NO_SIGNAL_STEPS = 3
# What the phases of the trainers do, for people who watch.
_PHASES = {
    "rollout": "waiting for rollouts",
    "logp": "computing log-probs",
    "update": "updating the model",
    "weights": "sending weights to the servers",
    "evaluate": "evaluating",
    "save": "saving checkpoints",
}


class Run:
    """Writes and shows the results of a training loop. Leaving the `with` block destroys the engines."""

    def __init__(
        self,
        config: BaseExperimentConfig,
        spec: FinetuneSpec,
        engines: TrainEngine | Mapping[str, TrainEngine],
        rollout: CollectingEngine | None = None,
        dataloader: StatefulDataLoader | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        evaluator: Evaluator | BlockingEvaluator | None = None,
        resume_from_checkpoint: str | bool | None = None,
    ):
        if evaluator is None and (config.evaluator.is_set or config.validation_sets):
            raise ConfigError(
                "a validation set is configured, but this script gives its Run no `evaluator`: remove valid_dataset "
                "and evaluator from the configuration, or use `python -m arealite.cli.main`, whose loops evaluate"
            )
        end_check()
        self.config, self.spec, self.rollout, self.dataloader = config, spec, rollout, dataloader
        self.engines = engines if isinstance(engines, Mapping) else {"actor": engines}
        # The first engine is the policy: it is exported, and servers generate with its weights.
        self.policy = next(iter(self.engines.values()))
        self.dir = RunDir(config)
        self._lock = ExitStack()
        if rank() == 0:
            if ATTEMPT_ENV not in os.environ:  # no launcher holds the lock
                self._lock.enter_context(self.dir.lock())
            self.dir.create(config)
        self._lock.callback(status.end)
        status.begin_rank(self.dir.path)
        parts = checkpoint_parts(dataloader, rollout)
        self.recover = Recover(config.recover, self.dir, self.engines, parts)
        self.record = RunRecord(config, self.dir, self.engines, rollout)
        self.replay = current_replay()
        self._resume_from = resume_from_checkpoint if self.replay is None else self.replay.plan.checkpoint
        self.saver = Saver(config.saver, self.dir, self.policy, tokenizer)
        self.best = BestModel(config.saver, self.saver)
        max_staleness = config.rollout.max_head_offpolicyness if isinstance(config, GRPOConfig) else 0
        self.guard = Guard(config.on_collapse, self.recover, max_staleness)
        self._ledger = self._record_events()
        self.evaluations = Evaluations(config.evaluator, evaluator, self.dir)
        self.stats = StatsLogger(config, self.dir)
        self.trace = Trace(self.dir.trace_path if rank() == 0 else None)
        self.table: ProgressTable | None = None
        self._server_counters = ServerCounters(rollout)
        # The last step that was committed, and whether its model was saved.
        self._last_info: StepInfo | None = None
        self._is_saved, self._steps_without_signal, self._next_warning = False, 0, NO_SIGNAL_STEPS
        self._interrupt = Interrupt()

    def _record_events(self) -> Ledger | None:
        """Have events recorded by the rollout, or in a ledger of this run's own, which is returned."""
        ledger = Ledger(self.dir.db_path) if self.rollout is None and rank() == 0 else None
        record = getattr(self.rollout, "record_event", None) if ledger is None else ledger.event
        self.guard.on_event = record or self.guard.on_event
        return ledger

    def __enter__(self) -> Run:
        return self

    def __exit__(self, error: type[BaseException] | None, value: BaseException | None = None, *_: object) -> bool:
        status.note_error(value if error is not ReplayEnd else None)
        with ExitStack() as stack:
            stack.callback(self._close)  # also if waiting is interrupted
            # After an error other ranks may be gone.
            if error is None or world_size() == 1:
                stack.callback(self._try, self.recover.wait)
            if error is None:
                self._finish_evaluation()
        return error is ReplayEnd

    def _close(self) -> None:
        self._interrupt.remove()
        if self.table is not None:
            self.table.__exit__()
        self.evaluations.close()
        self._take_engine_stats()
        self.trace.close()
        self.stats.close()
        self.record.close()
        if self._ledger is not None:
            self._ledger.close()
        if self.rollout is not None:
            self.rollout.destroy()
        for engine in self.engines.values():
            engine.destroy()
        self._lock.close()

    def steps(self) -> Iterator[int]:
        """Yield global steps, starting at 0 or after the last recover checkpoint."""
        first = self._recover()
        if self.replay is not None:
            return (yield from self.replay.steps(self.config, self.engines, self.rollout))
        self.record.begin(first, self.spec)
        self.record.roll_back(self.guard.restored_before(first))
        self.table = ProgressTable(
            self.spec.total_train_steps,
            COLUMNS if self.rollout is not None else SUPERVISED_COLUMNS,
            log_path=self.dir.logs / "trainer.log",
            enabled=self.config.stats_logger.console,
            first_step=first,
        )
        self.table.__enter__()
        max_steps = self.spec.max_steps or 0
        if rank() == 0 and max_steps > self.spec.total_train_steps:
            show_message(
                f"total_train_steps={max_steps}, but total_train_epochs={self.spec.total_train_epochs} of "
                f"{self.spec.dataset_size} rows are {self.spec.total_train_steps} steps: to train longer, raise "
                "total_train_epochs"
            )
        is_done = first >= self.spec.total_train_steps
        if is_done:
            self._end_at_once(first)
        results = self.evaluations.before_steps(self._info(first - 1) if first else None, is_done)
        self._write_evaluations(results)
        self._offer(results)
        if self.rollout is not None and current_driver() is None:
            self.rollout.on_first_wait = self._warm_up
        self._server_counters.take()
        self.trace.take()
        if not is_done:
            self._interrupt.install(has_step=first > 0)
        yield from status.count_steps(range(first, self.spec.total_train_steps))

    def _warm_up(self) -> None:
        """Compile while the first answers are generated."""
        for engine in self.engines.values():
            engine.warm_up()
        if rank() == 0:
            show_message(f"waiting for the first batch of {self.spec.train_batch_size} episodes")

    def _end_at_once(self, first: int) -> None:
        """Say that all steps were done before, and save the model if that failed then."""
        if rank() == 0:
            show_message(
                f"nothing to do: all {self.spec.total_train_steps} steps were done before. To train longer, raise "
                "total_train_epochs or total_train_steps; to start a new run, set another trial_name"
            )
        last = self._info(first - 1)
        if broadcast_json(not self.saver.path(last).exists()):
            failure = self._save_last(last)
            if failure is not None:
                raise failure
        # For an evaluation that a crash has ended.
        self._last_info, self._is_saved = last, True

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a part of the step, as `time/<name>` in the statistics and as a span in trace.json."""
        with activity.doing(_PHASES.get(name, name)), self.trace.phase(name):
            yield

    def commit(self, step: int, stats: dict[str, float] | list[dict[str, float]]) -> None:
        """End a step: evaluate if due, write its statistics, then save checkpoints if due.

        Statistics of several minibatches are averaged. In this order every step of a checkpoint has its line in
        stats.jsonl, even if the process is killed in between. The time of saving counts towards the next step.
        """
        if self.replay is not None:
            return self.replay.check(step, as_rows(stats), self.engines)
        info = self._last_info = self._info(step)
        values = dict(stats) if isinstance(stats, Mapping) else average_minibatches(list(stats))
        is_last = step + 1 == self.spec.total_train_steps
        results: dict[int, Stats] = {}
        if self.evaluations.evaluator is not None:
            with self.phase("evaluate"):
                results = self.evaluations.after_step(info, is_last)
        if self.rollout is not None:
            values = add_executor_stats(values, self.rollout.stats())
        values |= self._take_engine_stats()
        if isinstance(self.dataloader, StatefulDataLoader):
            values |= self.dataloader.stats()
        times = self.trace.take()
        values |= times | take_startup_stats(self.trace, times)
        # The executor knows how long the trainer waited, also in a loop that times no phases.
        waited_s = max(times.get("time/rollout", 0.0), values.get("wait_s", 0.0))
        values["idle/trainer"] = min(1.0, waited_s / times["time/step"])
        values |= self._server_counters.take()
        num_tokens = values.get("num_tokens", values.get("batch_tokens"))
        if "num_seqs" in values:
            num_tokens = values["num_seqs"] * values["seq_len"]
        if num_tokens is not None:
            values["tokens_per_s"] = num_tokens / times["time/step"]
        self._warn_without_signal(values)
        values |= self.guard.check(values, step)
        # The model comes first at the end: a disk that is full for it is full for statistics too.
        failure = self._save_last(info) if is_last else None
        self.stats.commit(step, values)
        self.record.commit(step, as_rows(stats), self.guard.lr_scale)
        if self.table is not None:
            self.table.update(step, values)
        self._write_evaluations(results)
        with self.phase("save"):
            self._save(info, results, is_last)
        if failure is not None:
            raise failure
        reason = self.guard.take_collapse()
        if reason:
            self._on_collapse(info, reason)
        self._interrupt.stop_if_due(self.recover, info, is_last)

    def _on_collapse(self, info: StepInfo, reason: str) -> None:
        """Go back to a good checkpoint, or save the model and stop."""
        if self.guard.rolls_back:
            self.guard.roll_back(info, reason)
            return self.record.roll_back(self.guard.restored_before(info.global_step + 1))
        path = self.saver.path(info)
        if not broadcast_json(path.exists()):
            self._try(self.saver.save, info)
        best = self.best.summary()
        raise CollapseError(
            f"stopped after step {info.global_step + 1} (on_collapse=stop): {reason}. The model is in {path}"
            + (f", the {best}" if best else "")
        )

    def _write_evaluations(self, results: dict[int, Stats]) -> None:
        """Write the results of evaluations under the step at which each began, and show them."""
        for step, stats in results.items():
            self.stats.commit(step, stats | self.guard.check_validation(stats, step))
            if rank() == 0 and self.config.stats_logger.console:
                for line in evaluation_lines(step, stats):
                    show_message(line)

    def _finish_evaluation(self) -> None:
        """Wait for evaluations that still run. They get all servers: training needs them no more."""
        if self.evaluations.is_running:
            if self.rollout is not None:
                self.rollout.pause()
            with self.phase("evaluate"):
                results = self.evaluations.finish()
            self._write_evaluations(results)
            self._offer(results)
        if rank() == 0 and self.best.best is not None:
            show_message(self.best.summary())

    def _offer(self, results: dict[int, Stats]) -> bool:
        """Keep the last model if an evaluation that began after a step is the best; returns whether it is."""
        info, trained = self._last_info, [stats for step, stats in results.items() if step >= 0]
        return any([self._try(self.best.offer, info, stats, self._is_saved) for stats in trained if info])

    def _take_engine_stats(self) -> dict[str, float]:
        """Return the times of engines in other processes, and add them to the trace (controller mode)."""
        driver = current_driver()
        if driver is None:
            return {}
        for span in driver.runtime.take_spans():
            self.trace.span(*span)
        if self.rollout is not None:
            tracing.add(self.rollout.take_trace())
        return driver.runtime.take_stats()

    def _warn_without_signal(self, values: dict[str, float]) -> None:
        """Warn after several steps in a row without signal; again after twice as many."""
        self._steps_without_signal = self._steps_without_signal + 1 if values.get("groups_with_signal") == 0 else 0
        if self._steps_without_signal < self._next_warning:
            return
        self._next_warning = 2 * self._steps_without_signal
        if rank() == 0:
            show_message(
                f"warning: no signal: in the last {self._steps_without_signal} steps all answers to each prompt had "
                f"the same reward (mean {values.get('reward', 0.0):g}), so rewards taught nothing. The task is too "
                "hard or too easy for this model, the reward never matches or is clipped (actor.reward_clip), or the "
                "answers no longer differ (entropy near 0: lower actor.optimizer.lr, or set actor.entropy_coef): see "
                f"arealite report {self.dir.path}"
            )

    def _save(self, info: StepInfo, results: dict[int, Stats], is_last: bool) -> None:
        """Save checkpoints that are due, and the best model by the evaluations that have ended.

        One that cannot be written (a full disk) is skipped with a warning.
        """
        if is_last:
            # It has been saved before the statistics, unless the disk is full.
            self._is_saved = broadcast_json(self.saver.path(info).exists())
        else:
            self._is_saved = self._try(self.saver.maybe_save, info) is not None
        is_best = self._offer(results)
        has_checkpoint = bool(self._try(self.recover.maybe_save, info))
        self._try(self.guard.after_save, info, has_checkpoint, is_best)

    def _try(self, save: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Return what `save` returns; None if the checkpoint could not be written."""
        try:
            return save(*args, **kwargs)
        except CheckpointError as error:
            logger.error("%s", error)
            if rank() == 0:
                show_message(f"warning: {error}")
            return None

    def _save_last(self, info: StepInfo) -> CheckpointError | None:
        """Save the trained model; returns the error if it is not in the run directory afterwards."""
        try:
            path = self.saver.save_last(info, self.recover.make_room)
        except CheckpointError as error:
            return error
        if rank() == 0:
            show_message(f"trained model: {path}")
            self.guard.on_event("checkpoint", f"trained model: {path}", info.global_step, "info")
        return None

    def _recover(self) -> int:
        last = self.recover.load(self._resume_from)
        first = 0 if last is None else last.global_step + 1
        if first and rank() == 0:
            show_message(f"resuming after step {first}")
        config = cast(GRPOConfig, self.config)
        if self.rollout is not None and (first or needs_first_sync(config, self.rollout)):
            weights = make_weight_meta(config, self.dir, self.rollout)
            sync_weights(self.policy, self.rollout, weights.with_version(first))
        if self._ledger is not None and last is None:
            self._ledger.clear(("stream", "submitted", "direct"))
        elif self._ledger is not None:
            self._ledger.rewind(first, has_ended=lambda _: True)
        self.best.resume(is_new_run=last is None, num_steps=first)
        # Without a checkpoint this is a new run: drop the statistics of an earlier one of the same name.
        self.stats.resume(first or -1)
        history = read_stats(self.dir) if rank() == 0 else []
        self.guard.resume(history, self._info(first - 1))
        if last is not None and self.guard.rolls_back and (reason := self.guard.take_collapse()):
            # The run was killed before its rollback was complete.
            self._on_collapse(last, reason)
        return first

    def _info(self, step: int) -> StepInfo:
        per_epoch = self.spec.steps_per_epoch
        return StepInfo(step // per_epoch, step % per_epoch, step, per_epoch)
