"""`GRPOTrainer`: asynchronous reinforcement learning from a script or a notebook, without a launcher."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from arealite.api.cli_args import GRPOConfig
from arealite.api.dataset_args import DataSourceConfig
from arealite.api.errors import ConfigError
from arealite.dataset.prompts import AS_THEY_ARE, load_prompts
from arealite.dataset.streamed import LazyRows
from arealite.easy.base import EasyTrainer
from arealite.easy.data import Row, as_prompts
from arealite.easy.options import read_given
from arealite.easy.rewards import ASKED, RewardPart, Rewards, check_columns, check_sendable, read_rewards
from arealite.trainer.ppo import PPOTrainer
from arealite.trainer.tasks import find_reward, find_task, load_rows
from arealite.utils.console import show_message
from arealite.workflow.vision_rlvr import make_rlvr

_REFUSED = {
    "reward_processing_classes": "score with a function that has its own tokenizer",
    "callbacks": "read result.history, or stats.jsonl of the run directory while it trains",
    "quantization_config": "set actor.frozen_weight_dtype to nf4 or fp8 in args, with peft_config",
    "tools": "use a workflow with tools (docs/workflows.md)",
    "rollout_func": "use a workflow of your own (docs/workflows.md)",
    "environment_factory": "use AgenticWorkflow (docs/workflows.md)",
}


class GRPOTrainer(EasyTrainer):
    """Trains a language model to earn rewards, asynchronously.

    `GRPOTrainer(model=…, train_dataset=…, reward_fn=…).train()` returns a `TrainResult`.

    Args:
        model: path of a Hugging Face folder, hub name, or `PreTrainedModel`.
        reward_funcs: the name of `reward_fn` in TRL. With it, text prompts are used as they are, as TRL does.
        args: TRL's `GRPOConfig`, or a dict of its fields or of configuration keys.
        train_dataset: list of dicts, `datasets.Dataset`, path or name. Rows have `prompt` (text or messages) or
            `messages`; the other columns go to the reward.
        eval_dataset: the same, or a dict of several.
        processing_class: the tokenizer; by default the model's.
        peft_config: PEFT's `LoraConfig`.
        reward_fn: `def reward(completion, **columns) -> float`, `def reward(completions, **columns) -> list[float]`,
            a name that ships (`"math"`), the folder of a reward model, or a list of them. By default that of a dataset
            with a built-in task.
        reward_weights: weights of several rewards.
        config: a nested dict of configuration keys, a YAML file, or a `GRPOConfig` of arealite.
        options: configuration keys (`total_train_steps=100`, `**{"actor.optimizer.lr": 1e-5}`) or fields of TRL's
            arguments (`learning_rate=1e-5`).
    """

    config_class = GRPOConfig
    section = "actor"
    config: GRPOConfig

    def __init__(
        self,
        model: str | Path | PreTrainedModel | None = None,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Any = None,
        optimizers: Any = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        *,
        reward_fn: Any = None,
        reward_weights: Sequence[float] | None = None,
        config: Any = None,
        **options: Any,
    ):
        passed = dict(
            reward_processing_classes=reward_processing_classes,
            callbacks=callbacks,
            quantization_config=quantization_config,
            **{name: options.pop(name, None) for name in ("tools", "rollout_func", "environment_factory")},
        )
        _refuse(passed, optimizers)
        own = options.pop("workflow", None)
        if reward_fn is not None and reward_funcs is not None:
            raise ConfigError("reward_fn and reward_funcs are two names of one argument: pass one of them")
        given = read_given(GRPOConfig, args, config, options, peft_config)
        _refuse_workflow(own or given.get("workflow"))
        self._is_trl = reward_funcs is not None
        self._functions = reward_fn if reward_funcs is None else reward_funcs
        self._weights = given.fields.get("reward_weights") if reward_weights is None else reward_weights
        self._thinks = _thinks(given.fields.get("chat_template_kwargs"))
        self.parts: list[RewardPart] = []
        super().__init__(model, train_dataset, eval_dataset, processing_class, given)

    def load(self, data: list[Row] | str, config: Any) -> Any:
        if not self.parts:
            self.parts = read_rewards(self._resolve(config), self._weights)
            check_sendable(self.parts, self.config.rollout.num_workers)
        if isinstance(data, str):
            rows = load_rows(self.config, config, self.tokenizer)
            if any(part.takes_group for part in self.parts):
                rows = _with_asked(rows, config)
        else:
            keeps_prompt = any(part.takes_group for part in self.parts)
            raw = as_prompts(data, config.path, config.columns, keeps_prompt)
            is_plain = self._is_trl and all(isinstance(row.get("prompt"), str) for row in raw)
            template = config.prompt_template or ("{prompt}" if is_plain else None)
            how = dataclasses.replace(config, columns={}, prompt_template=template)
            rows = load_prompts(how, AS_THEY_ARE, self.tokenizer, raw)
        check_columns(self.parts, [name for name in rows[0] if name not in ("prompt", "messages", ASKED)], config.path)
        return rows

    def _resolve(self, data: Any) -> Any:
        """Return the reward functions: those that were given, named ones, or that of the dataset's task."""
        if self._functions is None:
            if (data.reward or self.config.reward or find_task(data).reward) is None:
                raise ConfigError(
                    "there is no reward: pass reward_fn, a function such as `def reward(completion, **columns)` that "
                    'returns a number, or the name of a built-in one such as "math"'
                )
            return find_reward(data, self.config.reward)
        several = self._functions if isinstance(self._functions, list | tuple) else [self._functions]
        return [find_reward(data, fn) if isinstance(fn, str) else fn for fn in several]

    def run(self, config: GRPOConfig, resume_from_checkpoint: str | bool | None) -> int:
        rewards = Rewards(self.parts, config.reward_timeout_s)
        if rewards.in_threads:
            show_message(
                f"note: the reward {', '.join(rewards.in_threads)} runs on threads of this process. If it takes "
                "long, put it into a module of its own, with the parameter `completion`: other processes run it then"
            )
        trainer: PPOTrainer | None = None
        settings: dict[str, Any] = {"reward_pool": rewards}
        settings |= {} if self._thinks is None else {"enable_thinking": self._thinks}
        try:
            workflow = make_rlvr(config.actor.path, rewards, config.gconfig, self.tokenizer, **settings)
            trainer = PPOTrainer(config, self.rows, self.tokenizer, self.valid_rows)
            trainer.train(workflow, resume_from_checkpoint=resume_from_checkpoint)
            return trainer.spec.total_train_steps
        finally:
            if trainer is not None:
                trainer.rollout.destroy()
            rewards.close()


def _with_asked(rows: Sequence[Row], config: DataSourceConfig) -> Sequence[Row]:
    """Return rows with the prompt that functions of TRL's kind take; streamed rows stay on disk."""

    def add(row: Row) -> Row:
        return {**row, ASKED: row.get("messages", row.get("prompt"))}

    return LazyRows(rows, add, config.path, range(len(rows))) if config.streaming else [add(row) for row in rows]


def _refuse(passed: dict[str, Any], optimizers: Any) -> None:
    """Raise for arguments of TRL's trainer that have no counterpart."""
    for name, value in passed.items():
        if value:
            raise ConfigError(f"{name} has no counterpart: {_REFUSED[name]}")
    if any(part is not None for part in optimizers):
        raise ConfigError("optimizers has no counterpart: set learning_rate, lr_scheduler_type and optim")


def _refuse_workflow(given: Any) -> None:
    """Raise for a workflow of the caller's own, which would not be played."""
    if given is not None:
        name = given if isinstance(given, str) else getattr(given, "__name__", type(given).__name__)
        raise ConfigError(
            f"GRPOTrainer plays answers to prompts and no other workflow; given: {name}. Run it with `arealite "
            "train workflow=package.module:Class …`, or pass it to PPOTrainer in a script (docs/workflows.md)"
        )


def _thinks(kwargs: Any) -> bool | None:
    """Return `enable_thinking` of TRL's chat_template_kwargs; None if it is not set."""
    others = [name for name in kwargs or {} if name != "enable_thinking"]
    if others:
        raise ConfigError(f"chat_template_kwargs has {others[0]!r}, which has no counterpart: only enable_thinking has")
    return (kwargs or {}).get("enable_thinking")
