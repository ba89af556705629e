"""The ready loop of supervised fine-tuning: what examples/arealite/gsm8k_sft.py writes out."""

from __future__ import annotations

from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from arealite.api.alloc_mode import AllocationMode
from arealite.api.cli_args import SFTConfig
from arealite.api.io_struct import FinetuneSpec
from arealite.dataset import StatefulDataLoader, collate_sft
from arealite.engine.sft.lm_engine import FSDPLMEngine
from arealite.trainer.run import Run
from arealite.trainer.tasks import find_task
from arealite.utils.config import load_config, run_main


class SFTTrainer:
    """Model and data loader of one supervised run; rows have `input_ids` and `loss_mask`."""

    def __init__(
        self, config: SFTConfig, rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase
    ):
        self.config = config
        self.tokenizer = tokenizer
        self.dataloader = StatefulDataLoader(rows, config.train_dataset, seed=config.seed)
        self.spec = FinetuneSpec(
            config.total_train_epochs,
            len(rows),
            self.dataloader.batch_size,
            config.total_train_steps,
        )
        self.engine = FSDPLMEngine(
            config.model, AllocationMode.from_str(config.allocation_mode).train
        )
        self.engine.initialize(self.spec)

    def train(self) -> None:
        batches = self.dataloader.cycle()
        with Run(
            self.config,
            self.spec,
            self.engine,
            dataloader=self.dataloader,
            tokenizer=self.tokenizer,
        ) as run:
            for step in run.steps():
                batch = collate_sft(self.engine.share(next(batches)), self.tokenizer)
                with run.phase("update"):
                    stats = self.engine.train_lm(batch)
                    self.engine.step_lr_scheduler()
                run.commit(step, stats)


def main(argv: list[str]) -> None:
    """What `arealite.cli.main` starts on every rank."""
    config = load_config(argv, SFTConfig)
    tokenizer = AutoTokenizer.from_pretrained(config.tokenizer_path or config.model.path)
    rows = find_task(config.train_dataset).sft_rows(config.train_dataset, tokenizer)
    SFTTrainer(config, rows, tokenizer).train()


if __name__ == "__main__":
    run_main(main)
