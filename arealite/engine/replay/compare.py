"""Finds the first difference between a recorded step and its replay, and its likely cause."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from arealite.api.io_struct import Batch

# Statistics that measure time.
_TIMED = re.compile(r"(_per_s|_s|tflops|mfu|bubble_share)$|(^|/)time/")
# Columns in the order in which an episode makes them; others follow.
_ORDER = ("input_ids", "attention_mask", "loss_mask", "versions", "logprobs", "truncated", "rewards")
_OF_EPISODES = r"episode|prompt|rewards"
_CAUSES = (
    # Names of weights may contain the words below.
    ("^weights before", "the model or the checkpoint at the start is another one, or was changed"),
    ("^weights restored", "the checkpoint that the rollback restores is another one, or was changed"),
    ("^weights", "the optimizer step, or something that changed weights besides it"),
    (r"^gconfig\.", "the workflow asked for other sampling: its code, or gconfig"),
    ("prompt", "the workflow asked for something else: its code, a tool, an environment, the chat template or the row"),
    ("tokens|input_ids|logprobs|versions", "sampling: other weights, another engine, or one that is not deterministic"),
    ("rewards|stats/", "the reward, or what it reads, gives another value for the same answers"),
    ("episode", "the workflow, or what it calls"),
    ("prox_logp|ref_logp|teacher_logp|values|train_logp", "a forward pass: its weights, kernels or number of threads"),
    ("advantages|returns|shaped_rewards", "how rewards become advantages: code or configuration"),
    (r"^lr\b", "the learning rate or its schedule"),
    ("", "the loss, its gradient or the split into micro-batches"),
)


@dataclass(frozen=True)
class Difference:
    """The first thing that differs in a step (counted from 0), with both values as text."""

    step: int
    tensor: str
    recorded: str
    replayed: str

    def describe(self, changes: list[str]) -> str:
        """Return the difference and its likely cause; `changes` are known differences of the environment."""
        lines = [f"step {self.step + 1}: {self.tensor} differs: recorded {self.recorded}, replayed {self.replayed}"]
        guess = next(text for pattern, text in _CAUSES if re.search(pattern, self.tensor))
        lines.append(f"where to look: {guess}")
        if changes:
            lines += ["changed since the run:", *(f"  {change}" for change in changes)]
        else:
            # Episodes depend on the world outside of the record, training on kernels only.
            outside = "a random number without a seed, the time, a file or a service that has changed"
            kernel = "a kernel that does not repeat its results, such as atomic additions on a GPU"
            cause = outside if re.search(_OF_EPISODES, self.tensor) else kernel
            lines.append(f"configuration, code, versions and hardware are those of the run: perhaps {cause}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def compare_batches(step: int, recorded: Batch, replayed: Batch, owners: list[str]) -> Difference | None:
    """Compare columns bit for bit. `owners` names each row, such as `episode 7, sample 1`."""
    if recorded.keys() != replayed.keys():
        return Difference(step, "columns of the batch", str(sorted(recorded)), str(sorted(replayed)))
    names = [name for name in _ORDER if name in recorded] + [name for name in recorded if name not in _ORDER]
    for name in names:
        old, new = recorded[name], replayed[name].cpu()
        if old.shape != new.shape or old.dtype != new.dtype:
            return Difference(step, name, f"{old.dtype} {list(old.shape)}", f"{new.dtype} {list(new.shape)}")
        wrong = ~(old == new) if not old.is_floating_point() else ~((old == new) | (old.isnan() & new.isnan()))
        if bool(wrong.any()):
            where: list[int] = wrong.nonzero()[0].tolist()
            place = f" token {where[1]}" if len(where) > 1 else ""
            owner = f" of {owners[where[0]]}" if where[0] < len(owners) else f"[{where[0]}]"
            values = (_text(column[tuple(where)].item()) for column in (old, new))
            return Difference(step, f"{name}{place}{owner}", *values)
    return None


def compare_sums(step: int, what: str, recorded: Mapping[str, Any], replayed: Mapping[str, Any]) -> Difference | None:
    """Compare checksums by name, in the recorded order."""
    for name in recorded:
        if name not in replayed:
            return Difference(step, f"{what}{name}", "recorded", "missing")
        (old, mean), (new, new_mean) = recorded[name], replayed[name]
        if old != new:
            texts = (f"mean {_text(value)} (checksum {crc:08x})" for crc, value in ((old, mean), (new, new_mean)))
            return Difference(step, f"{what}{name}", *texts)
    return None


def compare_weights(step: int, what: str, recorded: Mapping[str, Any], now: Mapping[str, Any]) -> Difference | None:
    """Compare the checksums of each engine's weights."""
    for name in recorded:
        found = compare_sums(step, f"{what}{name}: ", recorded[name], now.get(name, {}))
        if found is not None:
            return found
    return None


def compare_stats(step: int, recorded: list[dict[str, Any]], replayed: list[dict[str, Any]]) -> Difference | None:
    """Compare statistics of minibatches exactly, without those that measure time."""
    if len(recorded) != len(replayed):
        return Difference(step, "number of minibatches", str(len(recorded)), str(len(replayed)))
    for number, (old, new) in enumerate(zip(recorded, replayed, strict=True)):
        where = f" of minibatch {number + 1}" if len(recorded) > 1 else ""
        for name in _by_importance({*old, *new}):
            if not _is_same(old.get(name), new.get(name)):
                return Difference(step, f"{name}{where}", _text(old.get(name)), _text(new.get(name)))
    return None


def _by_importance(names: Iterable[str]) -> list[str]:
    first = ("lr", "num_micro_batches", "loss", "grad_norm")
    others = sorted(name for name in names if name not in first and not _TIMED.search(name))
    return [*(name for name in first if name in names), *others]


def _is_same(old: Any, new: Any) -> bool:
    both_nan = isinstance(old, float) and isinstance(new, float) and math.isnan(old) and math.isnan(new)
    return old == new or both_nan


def _text(value: Any) -> str:
    """Return a number with all its digits."""
    return repr(value) if value is not None else "nothing"
