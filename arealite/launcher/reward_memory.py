"""Estimates the memory of reward models, which are in processes of their own (`reward=FOLDER`)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from arealite.launcher.placement import Placement
from arealite.utils.memory.estimate import Needs
from arealite.utils.memory.model_size import read_model_dtype, read_model_size

# Most tokens that are scored at once, as in `reward.model_process`.
_BATCH_TOKENS = {True: 16_384, False: 4_096}


def reward_needs(values: Mapping[str, Any], placement: Placement, place: tuple[int, int | None]) -> dict[str, Needs]:
    """Return what each reward model of the configuration needs on the device `place`, by its path.

    They are on the device of the first trainer rank. One whose sizes are not known is left out.
    """
    found, on_gpu = {}, place[1] is not None
    _, _, first = placement.trainers[0] if placement.trainers else (None, None, None)
    is_here = first is not None and (first.node, first.device if placement.on_gpu else None) == place
    for path in _paths(values) if is_here else ():
        size = read_model_size(path)
        if size is not None:
            item = 2.0 if on_gpu and read_model_dtype(path) in ("bfloat16", "float16") else 4.0
            # Of one layer: its input and output, queries, keys and values, both inner parts of the MLP.
            passing = _BATCH_TOKENS[on_gpu] * item * (6 * size.hidden + 2 * size.inner)
            weights = item * size.with_scalar_head().parameters
            found[path] = Needs({"weights": weights}, {"scoring": passing}, loaded=weights)
    return found


def _paths(values: Mapping[str, Any]) -> list[str]:
    sections = [values, values.get("train_dataset"), values.get("valid_dataset")]
    sections += [*(values.get("train_datasets") or {}).values(), *(values.get("valid_datasets") or {}).values()]
    names = [section["reward"] for section in sections if isinstance(section, Mapping) and section.get("reward")]
    # As `reward.names.named_reward` reads them.
    return [n for n in dict.fromkeys(map(str, names)) if ":" not in n and ("/" in n or Path(n).is_dir())]
