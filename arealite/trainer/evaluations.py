"""`Evaluations`: when a run evaluates, and what becomes of an evaluation at the end of later steps.

Used by `Run`. At most one evaluation runs at a time. One that is due while another still runs is skipped with a
message, except after the last step. Results are returned with the step at which the evaluation began.
"""

import shutil

from arealite.api.cli_args import EvaluatorConfig
from arealite.api.io_struct import Stats, StepInfo
from arealite.trainer.evaluator import BlockingEvaluator, Evaluator
from arealite.trainer.output.eval_report import describe_step
from arealite.trainer.saver import Frequency
from arealite.trainer.stats_logger import read_stats
from arealite.utils.console import show_message
from arealite.utils.distributed import broadcast_json, rank
from arealite.utils.rundir import RunDir


class Evaluations:
    """Starts evaluations when they are due. All ranks call the same methods."""

    def __init__(self, config: EvaluatorConfig, evaluator: Evaluator | BlockingEvaluator | None, run_dir: RunDir):
        self.config, self.evaluator, self.dir = config, evaluator, run_dir
        self.frequency = Frequency(config)
        # The last step, if another evaluation still ran then. The weights stay as they are after it.
        self._postponed: int | None = None

    def before_steps(self, last: StepInfo | None, is_done: bool = False) -> dict[int, Stats]:
        """Evaluate before the first step, or after a resume if the evaluation of the `last` step was lost.

        `is_done`: no step follows.
        """
        first = 0 if last is None else last.global_step + 1
        if rank() == 0:
            self._remove_undone(first)
        if self.evaluator is None:
            return {}
        due = self.config.at_start_and_end
        if last is not None:
            due = self.frequency.is_due(last) or (is_done and due)
            due = due and broadcast_json(not self._has_result(last.global_step))
            if due and is_done and rank() == 0:
                show_message(f"the evaluation {describe_step(last.global_step)} has no result yet: it runs now")
        return self._start(first - 1) if due else {}

    def after_step(self, info: StepInfo, is_last: bool) -> dict[int, Stats]:
        """Start an evaluation if it is due. Returns the results that are complete, by step."""
        if self.evaluator is None:
            return {}
        due = self.frequency.is_due(info) or (is_last and self.config.at_start_and_end)
        results = self._take(wait=False)
        running = self.evaluator.step
        if due and running is None:
            results |= self._start(info.global_step)
        elif due and is_last:
            self._postponed = info.global_step
        elif due and running is not None:
            self._warn_skipped(info.global_step, running)
        return results

    def finish(self) -> dict[int, Stats]:
        """Wait for the evaluation that still runs, and for that of the last step. Returns their results."""
        results = self._take(wait=True)
        if self._postponed is not None:
            results |= self._start(self._postponed) | self._take(wait=True)
            self._postponed = None
        return results

    @property
    def is_running(self) -> bool:
        return self.evaluator is not None and self.evaluator.step is not None

    def close(self) -> None:
        if isinstance(self.evaluator, Evaluator):
            self.evaluator.close()

    def _start(self, step: int) -> dict[int, Stats]:
        assert self.evaluator is not None
        self.evaluator.start(step)
        return self._take(wait=False) if isinstance(self.evaluator, BlockingEvaluator) else {}

    def _take(self, wait: bool) -> dict[int, Stats]:
        if self.evaluator is None or self.evaluator.step is None:
            return {}
        step = self.evaluator.step
        stats = self.evaluator.take(wait)
        return {} if stats is None else {step: stats}

    def _has_result(self, step: int) -> bool:
        lines = [line for line in read_stats(self.dir) if line["step"] == step]
        return any(key.startswith("eval/") for line in lines for key in line)

    def _remove_undone(self, first: int) -> None:
        """Remove answers of steps that run again; of all steps in a new run."""
        for folder in self.dir.evaluations.glob("step*"):
            number = folder.name.removeprefix("step")
            if number.isdecimal() and (first == 0 or int(number) > first):
                shutil.rmtree(folder, ignore_errors=True)

    def _warn_skipped(self, step: int, running: int) -> None:
        if rank() == 0:
            show_message(
                f"warning: no evaluation {describe_step(step)}: the one {describe_step(running)} still runs. Evaluate "
                "less often (evaluator), fewer questions, or shorter or fewer answers (eval_gconfig)"
            )
