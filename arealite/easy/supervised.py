"""`SFTTrainer`, `DPOTrainer` and `RewardTrainer`: training on fixed data from a script or a notebook."""

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedModel

from arealite.api.cli_args import DPOConfig, RWConfig, SFTConfig
from arealite.api.errors import ConfigError
from arealite.dataset.columns import apply_columns, map_rows, without_empty
from arealite.dataset.loader import check_valid_rows
from arealite.dataset.preference import preference_loader
from arealite.dataset.sft import get_sft
from arealite.easy.base import EasyTrainer
from arealite.easy.data import Row
from arealite.easy.options import read_given
from arealite.trainer import dpo, rw, sft
from arealite.trainer.tasks import load_sft

_REFUSED = {
    "callbacks": "read result.history, or stats.jsonl of the run directory while it trains",
    "compute_metrics": "leave it out",
    "data_collator": "give rows with `messages`, or `prompt` and `response`",
    "formatting_func": "map the dataset before: dataset.map(…)",
    "ref_model": "set ref={'path': …}",
    "compute_loss_func": "leave it out",
    "preprocess_logits_for_metrics": "leave it out",
    "optimizers": "set learning_rate, lr_scheduler_type and optim",
    "optimizer_cls_and_kwargs": "set learning_rate, lr_scheduler_type and optim",
    "quantization_config": "set model.frozen_weight_dtype to nf4 or fp8 in args, with peft_config",
}
# Values with which arguments of TRL ask for nothing.
_NOTHING = (None, [], (None, None))


class _Supervised(EasyTrainer):
    """A trainer on fixed data; its arguments are those of TRL's trainer of the same name."""

    trainer_class: ClassVar[type[sft.SFTTrainer]]

    def __init__(
        self,
        model: str | Path | PreTrainedModel | None = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        peft_config: Any = None,
        *,
        config: Any = None,
        **options: Any,
    ):
        for name, advice in _REFUSED.items():
            if options.pop(name, None) not in _NOTHING:
                raise ConfigError(f"{name} has no counterpart: {advice}")
        given = read_given(self.config_class, args, config, options, peft_config)
        super().__init__(model, train_dataset, eval_dataset, processing_class, given)
        for name, rows in self.valid_rows.items():
            check_valid_rows(self.config, name, len(rows))

    def run(self, config: Any, resume_from_checkpoint: str | bool | None) -> int:
        trainer = self.trainer_class(config, self.rows, self.tokenizer, self.valid_rows)
        trainer.train(resume_from_checkpoint=resume_from_checkpoint)
        return trainer.spec.total_train_steps


class SFTTrainer(_Supervised):
    """Supervised fine-tuning on rows with `messages`, or `prompt` and `response` (TRL: `completion`)."""

    config_class = SFTConfig
    trainer_class = sft.SFTTrainer
    config: SFTConfig

    def load(self, data: list[Row] | str, config: Any) -> Any:
        if isinstance(data, str):
            return load_sft(config, self.tokenizer)
        raw = map_rows(data, lambda row: _read_row(apply_columns(row, config.columns)), config.path)
        return get_sft(dataclasses.replace(config, columns={}), self.tokenizer, raw=raw)


def _read_row(row: Row) -> Row:
    """Return a row without empty columns; one with only `text` raises `ValueError`."""
    row = without_empty(row, "messages", "prompt")
    if "text" in row and not {"messages", "prompt"} & row.keys():
        raise ValueError("it has only `text`: give `messages`, or `prompt` and `response`, which says what to train on")
    return row


class _OnPairs(_Supervised):
    """Rows have `chosen` and `rejected`: texts with a `prompt`, dialogues, or messages.

    With model.loss=kto they may have a `prompt`, a `completion` and a `label` instead; texts for a reward model need no
    `prompt`.
    """

    def load(self, data: list[Row] | str, config: Any) -> Any:
        return preference_loader(self.config)(config, self.tokenizer, raw=None if isinstance(data, str) else data)


class DPOTrainer(_OnPairs):
    """Preference learning (DPO, and the other losses of `model.loss`) from chosen and rejected answers."""

    config_class = DPOConfig
    trainer_class = dpo.DPOTrainer
    config: DPOConfig


class RewardTrainer(_OnPairs):
    """Trains a reward model from chosen and rejected answers."""

    config_class = RWConfig
    trainer_class = rw.RWTrainer
    has_scalar_head = True
    config: RWConfig
