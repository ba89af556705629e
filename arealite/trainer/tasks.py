"""Rows and rewards of runs that are described by a configuration alone.

A dataset belongs to a built-in task if `task` or its path names one; otherwise `columns` and `reward` say what it is.
`check_data` finds what is wrong with either before anything starts. Scripts with rows and rewards of their own do not
need this module. To add a task, add one entry to `TASKS`.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from arealite.api.cli_args import BaseExperimentConfig, GenerationHyperparameters, GRPOConfig
from arealite.api.dataset_args import DataSourceConfig
from arealite.api.errors import ConfigError, DatasetError
from arealite.api.named_code import accepted
from arealite.api.reward_api import RewardFn, check_columns
from arealite.api.rollout_api import find_workflow, load_workflow
from arealite.api.workflow_api import RolloutWorkflow
from arealite.dataset.columns import Row, make_row
from arealite.dataset.gsm8k import WORD_PROBLEMS, WORKED_ANSWERS
from arealite.dataset.hub import check_hub
from arealite.dataset.loader import check_training_rows, check_valid_rows
from arealite.dataset.order import Mixture
from arealite.dataset.preference import loss_of, preference_loader, read_preference
from arealite.dataset.prompts import AS_THEY_ARE, PromptFormat, PromptMaker, load_prompts
from arealite.dataset.rows import find_files, load_dataset
from arealite.dataset.sft import get_sft, load_tokenizer, read_sft
from arealite.dataset.streamed import open_streamed
from arealite.reward.model import LocalRewardModel
from arealite.reward.names import REWARDS, named_reward
from arealite.reward.pool import RewardPool
from arealite.trainer import task_formats as formats
from arealite.utils.rundir import RunDir
from arealite.utils.vision import VisionProcessor
from arealite.workflow.by_source import BySource
from arealite.workflow.vision_rlvr import make_rlvr, reads_images

# Rows that are checked of a dataset that is streamed.
_NUM_CHECKED = 1000


@dataclass(frozen=True)
class Task:
    """What the columns of a dataset mean: as prompts with a reward, and for supervised training.

    A path that matches `pattern` belongs to it.
    """

    prompts: PromptFormat = AS_THEY_ARE
    reward: str | None = None
    sft: PromptFormat = AS_THEY_ARE
    pattern: str = ""


TASKS = {
    "gsm8k": Task(WORD_PROBLEMS, "gsm8k", WORKED_ANSWERS),
    "mawps": Task(WORD_PROBLEMS, "gsm8k", WORKED_ANSWERS),
    "math": Task(formats.MATH, "math", formats.MATH_SFT, pattern=r"(?<![a-z])math(?![a-z])"),
    "countdown": Task(formats.COUNTDOWN, "countdown", formats.COUNTDOWN_SFT),
    "reasoning_gym": Task(formats.REASONING_GYM, "reasoning_gym", formats.REASONING_GYM_SFT),
    "tldr": Task(formats.TLDR, None, formats.TLDR_SFT, pattern=r"tldr|tl-dr"),
    "hh_rlhf": Task(formats.HH_RLHF, None, formats.HH_RLHF_SFT, pattern="hh-?_?rlhf"),
    "humaneval": Task(formats.HUMANEVAL, "code", formats.HUMANEVAL_SFT, pattern="human-?_?eval"),
    "mbpp": Task(formats.MBPP, "code", formats.MBPP_SFT),
    "search_qa": Task(
        formats.SEARCH_QA, "qa", formats.SEARCH_QA_SFT,
        pattern=r"squad|hotpot|trivia_?qa|(?<![a-z])nq(?![a-z])|natural_questions",
    ),
    "sciq": Task(formats.SCIQ, "choice", formats.SCIQ_SFT),
    "clevr_count": Task(formats.CLEVR_COUNT, "math", pattern="clevr"),
    "geometry3k": Task(formats.GEOMETRY3K, "math"),
}  # fmt: skip


def find_task(data: DataSourceConfig) -> Task:
    """Return the task of a dataset; an empty one if neither `task` nor the path names one."""
    if data.task is not None:
        if data.task not in TASKS:
            raise ConfigError(f"there is no task {data.task!r}: use one of {', '.join(TASKS)}, or columns and reward")
        return TASKS[data.task]
    if data.columns:
        return Task()
    # The last name in the path is the most specific one.
    found = [(match.start(), name) for name, match in _matches(data.path.lower())]
    return TASKS[max(found)[1]] if found else Task()


def _matches(path: str) -> Iterator[tuple[str, re.Match[str]]]:
    for name, task in TASKS.items():
        yield from ((name, match) for match in re.finditer(task.pattern or name, path))


def find_reward(data: DataSourceConfig, default: str | None = None) -> RewardFn:
    """Return the reward of a dataset: the one that it names, that of the run, or that of its task."""
    name = data.reward or default or find_task(data).reward
    if name is None:
        raise ConfigError(
            f"no reward is known for the dataset {data.path!r}: set reward to a built-in one ({', '.join(REWARDS)}), "
            "to the folder of a reward model, or to a function of yours (package.module:function); or set its `task` "
            f"({', '.join(name for name, task in TASKS.items() if task.reward)})"
        )
    reward = named_reward(name)
    if isinstance(reward, LocalRewardModel):
        # A mistyped folder looks like a name of the hub.
        check_hub(reward.spec.path)
    return reward


def load_rl(
    data: DataSourceConfig, tokenizer: PreTrainedTokenizerBase | None = None, cache: Path | None = None
) -> Sequence[Row]:
    """Load prompts, and what their reward needs."""
    return load_prompts(data, find_task(data).prompts, tokenizer, cache=cache)


def load_sft(data: DataSourceConfig, tokenizer: PreTrainedTokenizerBase, cache: Path | None = None) -> Sequence[Row]:
    """Load prompts and answers as tokens."""
    return get_sft(data, tokenizer, find_task(data).sft, cache)


def load_rows(
    config: BaseExperimentConfig, data: DataSourceConfig, tokenizer: PreTrainedTokenizerBase, cache: Path | None = None
) -> Sequence[Row]:
    """Load prompts; for a workflow of the user's own also rows that are no prompts, as they are."""
    return load_dataset(data) if _are_raw(config, data) else load_rl(data, tokenizer, cache)


def _are_raw(config: BaseExperimentConfig, data: DataSourceConfig) -> bool:
    return config.workflow is not None and not data.columns and find_task(data) == Task()


def load_training_rows(
    config: BaseExperimentConfig,
    tokenizer: PreTrainedTokenizerBase,
    load: Callable[[DataSourceConfig, PreTrainedTokenizerBase, Path], Sequence[Row]],
) -> Sequence[Row]:
    """Load the rows of `train_dataset`, or of all `train_datasets`."""
    folder = RunDir(config).path / "data"
    if not config.train_datasets:
        return load(config.train_dataset, tokenizer, folder)
    sets = {name: load(data, tokenizer, folder) for name, data in config.train_datasets.items()}
    weights = {name: data.weight for name, data in config.train_datasets.items() if data.weight is not None}
    return Mixture(sets, weights or None)


def make_workflow(
    config: GRPOConfig, data: DataSourceConfig, gconfig: GenerationHyperparameters, tokenizer: Any, pool: RewardPool
) -> RolloutWorkflow:
    """Return the workflow that the configuration names, or the one of prompts with a verifiable reward."""
    if config.workflow is None:
        return make_rlvr(config.actor.path, find_reward(data, config.reward), gconfig, tokenizer, reward_pool=pool)
    offered = _offered(config, data, gconfig, tokenizer, pool)
    return load_workflow(config.workflow, config.workflow_args, **offered)


def _offered(
    config: BaseExperimentConfig, data: DataSourceConfig, gconfig: Any = None, tokenizer: Any = None, pool: Any = None
) -> dict[str, Any]:
    """What a workflow of the user's own may ask for; the reward only if one is known."""
    offered = {"gconfig": gconfig, "tokenizer": tokenizer, "reward_pool": pool, "config": config}
    has_reward = data.reward or config.reward or find_task(data).reward
    return offered | ({"reward_fn": find_reward(data, config.reward)} if has_reward else {})


def make_training_workflow(config: GRPOConfig, make: Callable[[DataSourceConfig], RolloutWorkflow]) -> RolloutWorkflow:
    """Return the workflow of the training data; with several sets, one that plays each with its own."""
    if not config.train_datasets:
        return make(config.train_dataset)
    return BySource({name: make(data) for name, data in config.train_datasets.items()})


def check_data(config: BaseExperimentConfig, kind: str | None) -> None:
    """Raise for a row, a reward or a tokenizer that cannot be used, and for too few rows.

    `kind` is that of the trainer: grpo, sft, rw, dpo, or None for evaluation. Nothing is downloaded from the hub.
    """
    tokenizer = _local_tokenizer(config)
    training: Mapping[str, DataSourceConfig] = config.train_datasets or {"": config.train_dataset}
    counts = [
        _check_set(config, key, data, kind, tokenizer)
        for key, data in (_by_key("train_dataset", training) if kind else ())
    ]
    if counts and None not in counts:
        check_training_rows(config, sum(count or 0 for count in counts))
    sets = _by_key("valid_dataset", {} if config.valid_dataset is None else {"": config.valid_dataset})
    sets += _by_key("valid_dataset", config.valid_datasets)
    for (key, data), name in zip(sets, config.validation_sets, strict=True):
        count = _check_set(config, key, data, kind, tokenizer)
        if kind in ("sft", "rw", "dpo") and count is not None:
            check_valid_rows(config, name, count)


def _check_set(
    config: BaseExperimentConfig,
    key: str,
    data: DataSourceConfig,
    kind: str | None,
    tokenizer: PreTrainedTokenizerBase | None,
) -> int | None:
    """Check one dataset. Returns how many rows it gives (fewer if some are too long), if that is known."""
    if not _are_raw(config, data):
        _check_file(data, key)
    if kind in (None, "grpo") and config.workflow is not None:
        found = find_workflow(config.workflow)
        accepted(found, config.workflow, config.workflow_args, _offered(config, data), "workflow")
    elif kind in (None, "grpo"):
        find_reward(data, config.reward)
    if _are_raw(config, data):
        return None
    rows = _some_rows(data)
    _check_rows(rows, config, data, kind)
    if tokenizer is not None:
        _check_first(rows[: data.few_shot + 1], config, data, kind, tokenizer)
    # A conversation may become several rows.
    is_split = bool(rows) and kind == "sft" and "messages" in read_sft(rows[0], data, find_task(data).sft)
    is_part = not rows or (data.streaming and len(rows) == _NUM_CHECKED)
    return None if is_split or is_part else len(rows) - data.few_shot


def _by_key(key: str, sets: Mapping[str, DataSourceConfig]) -> list[tuple[str, DataSourceConfig]]:
    """Return datasets with the key of each path; one without a name is the only one."""
    return [(f"{key}s.{name}.path" if name else f"{key}.path", data) for name, data in sets.items()]


def _check_file(data: DataSourceConfig, key: str) -> None:
    try:
        find_files(data)
    except DatasetError as error:
        raise DatasetError(f"{error} ({key}): give a file, a folder, or a name of the hub") from error


def _local_tokenizer(config: BaseExperimentConfig) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of a local folder; None for one that would be downloaded."""
    model = getattr(config, "actor", None) or getattr(config, "model", None)
    path = config.tokenizer_path or getattr(model, "path", "")
    return load_tokenizer(path) if Path(path).is_dir() else None


def _some_rows(data: DataSourceConfig) -> list[Row]:
    """Return the rows of local data; of streamed data the first thousand."""
    if find_files(data) is None:
        return []
    if not data.streaming:
        return load_dataset(data)
    rows = open_streamed(data)
    return [rows[i] for i in range(min(len(rows), _NUM_CHECKED))]


def _check_first(
    rows: list[Row],
    config: BaseExperimentConfig,
    data: DataSourceConfig,
    kind: str | None,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Make the first row behind worked examples; raises if a template or a column is missing."""
    task = find_task(data)
    if len(rows) <= data.few_shot:
        return
    data = dataclasses.replace(data, max_length=None, streaming=False)
    if kind in ("rw", "dpo"):
        preference_loader(config)(data, tokenizer, raw=rows)
    elif kind == "sft":
        get_sft(data, tokenizer, task.sft, raw=rows)
    else:
        made = load_prompts(data, task.prompts, tokenizer, raw=rows)
        if config.workflow is None:
            check_columns(find_reward(data, config.reward), made[0])
            path = getattr(getattr(config, "actor", None), "path", "")
            if Path(path, "config.json").is_file() and reads_images(path):
                VisionProcessor.load(path).encode_row(made[0])


def _check_rows(rows: list[Row], config: BaseExperimentConfig, data: DataSourceConfig, kind: str | None) -> None:
    task = find_task(data)
    read: Callable[[Row], Row | None]
    if kind in ("rw", "dpo"):
        read = lambda raw: read_preference(raw, data, loss_of(config))  # noqa: E731
    elif kind == "sft":
        read = lambda raw: read_sft(raw, data, task.sft)  # noqa: E731
    else:
        read = PromptMaker(data, task.prompts, None, rows[: data.few_shot])
    for number, raw in enumerate(rows, 1):
        make_row(raw, number, read, data.path)
