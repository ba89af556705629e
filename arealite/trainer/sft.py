"""Supervised fine-tuning: the ready-made loop of examples/arealite/gsm8k_sft.py.

Reward models (`rw.py`) and preference learning (`dpo.py`) use the same loop with another engine, collation and update.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

from transformers import PreTrainedTokenizerBase

from arealite.api.alloc_mode import AllocationMode
from arealite.api.cli_args import BaseExperimentConfig, DPOConfig, RWConfig, SFTConfig
from arealite.api.io_struct import Batch, FinetuneSpec
from arealite.api.trainer_api import Trainer
from arealite.controller.factory import make_engine
from arealite.dataset import StatefulDataLoader, collate_sft, load_tokenizer
from arealite.dataset.loader import RowLoader, check_valid_rows
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.engine.sft.lm_engine import FSDPLMEngine
from arealite.trainer.evaluator import BlockingEvaluator, validation_sets
from arealite.trainer.run import Run
from arealite.trainer.tasks import load_sft, load_training_rows
from arealite.utils.config import load_config, run_main
from arealite.utils.startup import startup_phase

Row = dict[str, Any]


class SFTTrainer(Trainer):
    """Model and data loader of one run; rows have `input_ids` and `loss_mask`."""

    config_class: ClassVar[type[BaseExperimentConfig]] = SFTConfig
    engine_class: type[FSDPEngine] = FSDPLMEngine
    make_loader: ClassVar[Callable[[BaseExperimentConfig], RowLoader]] = staticmethod(lambda config: load_sft)

    def __init__(
        self,
        config: SFTConfig | RWConfig | DPOConfig,
        rows: Sequence[Row],
        tokenizer: PreTrainedTokenizerBase,
        valid_rows: Mapping[str, Sequence[Row]] | Sequence[Row] | None = None,
    ):
        self.config, self.tokenizer, self.valid_sets = config, tokenizer, validation_sets(valid_rows)
        for name, own in self.valid_sets.items():
            check_valid_rows(config, name, len(own))
        self.parallel = AllocationMode.from_str(config.allocation_mode).train
        self.dataloader = StatefulDataLoader(rows, config.train_dataset, seed=config.seed)
        size = self.dataloader.batch_size
        self.spec = FinetuneSpec(config.total_train_epochs, len(rows), size, config.total_train_steps)
        self.engine: Any = make_engine(self.engine_class, config.model, self.parallel)
        self.engine.initialize(self.spec)

    def collate(self, rows: list[Row]) -> Batch:
        return collate_sft(rows, self.tokenizer)

    def update(self, batch: Batch) -> dict[str, float]:
        return self.engine.train_lm(batch)

    def measure(self, batch: Batch) -> dict[str, float]:
        """Return the statistics of `update` without updating."""
        return self.engine.evaluate_lm(batch)

    def evaluate(self) -> dict[str, float]:
        """Return `eval/NAME/loss` and the other statistics of the loss over all rows of each validation set."""
        stats: dict[str, float] = {}
        for name, rows in self.valid_sets.items():
            own = self.measure(self.collate(self.engine.share(rows)))
            stats |= {f"eval/{name}/{key}": value for key, value in own.items()}
        return stats

    @classmethod
    def from_config(cls, config: SFTConfig | RWConfig | DPOConfig) -> Self:
        """Make the rows that the configuration describes, and the trainer."""
        with startup_phase("data", "reading the data"):
            tokenizer, load = load_tokenizer(config.tokenizer_path or config.model.path), cls.make_loader(config)
            rows = load_training_rows(config, tokenizer, load)
            sets = {name: load(data, tokenizer, None) for name, data in config.validation_sets.items()}
        return cls(config, rows, tokenizer, sets)

    def train(self, *, resume_from_checkpoint: str | bool | None = None) -> None:
        batches = self.dataloader.cycle()
        parts: dict[str, Any] = {"dataloader": self.dataloader, "tokenizer": self.tokenizer}
        parts["resume_from_checkpoint"] = resume_from_checkpoint
        parts["evaluator"] = BlockingEvaluator(self.evaluate) if self.valid_sets else None
        with Run(self.config, self.spec, self.engine, **parts) as run:
            for step in run.steps():
                batch = self.collate(self.engine.share(next(batches)))
                with run.phase("update"):
                    stats = self.update(batch)
                    self.engine.step_lr_scheduler()
                run.commit(step, stats)


def main(argv: list[str]) -> None:
    # The launcher looks for the call of load_config, to check the configuration without starting the script.
    SFTTrainer.from_config(load_config(argv, SFTConfig)).train()


if __name__ == "__main__":
    run_main(main)
