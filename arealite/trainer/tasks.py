"""Rows and reward of the built-in datasets, for runs that are described by a configuration alone.

Scripts with a dataset and reward of their own do not need it. To add a task, add one line to `TASKS`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from arealite.api.cli_args import DatasetConfig
from arealite.api.errors import ConfigError
from arealite.api.reward_api import RewardFn
from arealite.dataset import get_gsm8k_rl, get_gsm8k_sft
from arealite.reward.gsm8k import gsm8k_reward

Loader = Callable[[DatasetConfig, PreTrainedTokenizerBase], list[dict[str, Any]]]


class Task(NamedTuple):
    rl_rows: Loader
    sft_rows: Loader
    reward: RewardFn


_WORD_PROBLEMS = Task(get_gsm8k_rl, get_gsm8k_sft, gsm8k_reward)
TASKS = {"gsm8k": _WORD_PROBLEMS, "mawps": _WORD_PROBLEMS}


def find_task(dataset: DatasetConfig) -> Task:
    """Return the task whose name is part of the dataset's path."""
    for name, task in TASKS.items():
        if name in dataset.path.lower():
            return task
    raise ConfigError(
        f"no built-in task for dataset {dataset.path!r}: its path must contain the name of one ({', '.join(TASKS)}). "
        "For other data write a short script with your own rows and reward (see examples/arealite/gsm8k_grpo.py)"
    )
