"""Keeps the model with the best validation result: `checkpoints/best` is a link to its folder.

`Run` offers the statistics of each step after the models that are due have been saved. A better result saves the model,
points the link to it, and only then deletes the folder before it, unless that one was due anyway. `best.json` beside
the link says which result it was, so that a run that resumes goes on comparing with it.

A run that was killed may repeat the step of its best result. The folder of that result is then renamed to
`best-step000100`, because the repeated step writes other weights to `step000100`.

An evaluation beside training ends a few steps after it began, and its answers are from all versions in between. The
model that is kept is the one at its end.
"""

import json
import math
import os
import shutil
from dataclasses import asdict, dataclass, replace

from arealite.api.cli_args import SaverConfig
from arealite.api.io_struct import Stats, StepInfo
from arealite.trainer.saver import Saver, on_all_ranks
from arealite.utils.console import show_message
from arealite.utils.distributed import broadcast_json, rank
from arealite.utils.rundir import write_file

# Which statistic of a validation counts if the configuration names none, by its ending.
_ENDINGS = ("/pass@1", "/reward", "/loss")


@dataclass(frozen=True)
class Best:
    """The best result so far. `is_extra`: its folder was written for being the best only.

    `reward`: the mean reward of the same validation set, which decides between equal results.
    """

    metric: str
    value: float
    num_steps: int
    folder: str
    is_extra: bool
    reward: float | None = None

    def is_beaten_by(self, metric: str, value: float, reward: float | None = None) -> bool:
        """Whether a result is better; one of another statistic, after a change of `best_metric`, always is."""
        if metric == self.metric and value == self.value:
            return reward is not None and self.reward is not None and reward > self.reward
        is_lower_better = metric.endswith(("loss", "/nll"))
        return metric != self.metric or (value < self.value if is_lower_better else value > self.value)


class BestModel:
    """Compares validation results and keeps the best model. All ranks call the same methods."""

    def __init__(self, config: SaverConfig, saver: Saver):
        self.config, self.saver = config, saver
        self.best: Best | None = None
        self._has_warned = False
        self._link, self._file = saver.folder / "best", saver.folder / "best.json"

    def resume(self, is_new_run: bool, num_steps: int | None = None) -> None:
        """Read the best result so far; a new run forgets that of an earlier one with the same name.

        `num_steps`: how many steps there are before the next one. Later ones run again.
        """
        found: Best | None = None
        with on_all_ranks(f"{self._link}"):
            if is_new_run and rank() == 0:
                self._link.unlink(missing_ok=True)
                self._file.unlink(missing_ok=True)
            elif rank() == 0 and (found := self._read()) is not None:
                if num_steps is not None and found.num_steps > num_steps:
                    found = self._set_aside(found)
                # A crash may have left a link to another model.
                self._point_to(found)
        values = broadcast_json(None if found is None else asdict(found))
        self.best = None if values is None else Best(**values)

    def offer(self, info: StepInfo, stats: Stats, is_saved: bool) -> bool:
        """Keep the model of this step if its validation result is the best so far; returns whether it is.

        `is_saved`: its folder has been written already.
        """
        before = self.best
        last = None if before is None else before.metric
        metric = find_metric(stats, self.config.best_metric, last) if self.config.keep_best else None
        if metric is None:
            self._warn_if_not_measured(stats)
            return False
        value, reward = stats[metric], stats.get(f"{metric.rpartition('/')[0]}/reward")
        if not broadcast_json(math.isfinite(value) and (before is None or before.is_beaten_by(metric, value, reward))):
            return False
        path = self.saver.path(info) if is_saved else self.saver.save(info)
        best = Best(metric, value, info.global_step + 1, path.name, not is_saved, reward)
        with on_all_ranks(f"{self._link}"):
            if rank() == 0:
                self._point_to(best)
        self.best = best
        if rank() == 0 and before is not None and before.is_extra and before.folder != best.folder:
            shutil.rmtree(self.saver.folder / before.folder, ignore_errors=True)
        return True

    def _warn_if_not_measured(self, stats: Stats) -> None:
        """Say once that `best_metric` is not among the statistics of its set, so that no model is kept."""
        name = self.config.best_metric or ""
        place = f"{name.rpartition('/')[0]}/"
        measured = sorted(key.removeprefix(place) for key in stats if key.startswith(place))
        # A set whose questions have all failed has their number only.
        is_measured = {"reward", "loss"} & set(measured)
        if self.config.keep_best and is_measured and not self._has_warned and rank() == 0:
            self._has_warned = True
            show_message(
                f"warning: saver.best_metric={name} is not measured, so no best model is kept: {place} has "
                f"{', '.join(measured)}"
            )

    def summary(self) -> str:
        """Return a line about the best model; empty if there is none."""
        best = self.best
        if best is None:
            return ""
        return f"best model ({best.metric} {best.value:.4g} after step {best.num_steps}): {self._link}"

    def _point_to(self, best: Best) -> None:
        aside = self._link.with_name("best.new")
        aside.unlink(missing_ok=True)
        os.symlink(best.folder, aside)
        aside.replace(self._link)
        write_file(self._file, json.dumps(asdict(best)), private=False)

    def _set_aside(self, best: Best) -> Best:
        """Rename the folder of a step that runs again; returns the result with the new name."""
        kept = _with_own_folder(best)
        if kept.folder != best.folder:
            shutil.rmtree(self.saver.folder / kept.folder, ignore_errors=True)
            (self.saver.folder / best.folder).rename(self.saver.folder / kept.folder)
        return kept

    def _read(self) -> Best | None:
        """Return the stored result if its model still exists."""
        try:
            found = Best(**json.loads(self._file.read_text()))
            # A crash may have come after the folder was renamed.
            names = [best for best in (found, _with_own_folder(found)) if (self.saver.folder / best.folder).is_dir()]
        except (OSError, ValueError, TypeError):
            return None
        return names[0] if names else None


def _with_own_folder(best: Best) -> Best:
    """Return a result whose folder is written by no step."""
    return replace(best, folder=f"best-{best.folder.removeprefix('best-')}", is_extra=True)


def find_metric(stats: Stats, name: str | None, last: str | None = None) -> str | None:
    """Return the statistic by which models are compared; None if this step has no result.

    Without a configured `name` it is the one of the `last` comparison, if its validation set was evaluated.
    """
    if name is not None:
        return name if name in stats else None
    evaluated = [key for key in stats if key.startswith("eval/")]
    if last is not None and any(key.rpartition("/")[0] == last.rpartition("/")[0] for key in evaluated):
        return last if last in stats else None
    return next((key for ending in _ENDINGS for key in evaluated if key.endswith(ending)), None)
