"""Reward models: the ready-made loop of examples/arealite/preference_rw.py."""

from arealite.api.cli_args import RWConfig
from arealite.api.io_struct import Batch
from arealite.dataset.preference import collate_pairs, preference_loader
from arealite.engine.rw.rw_engine import FSDPRWEngine
from arealite.trainer.sft import Row, SFTTrainer
from arealite.utils.config import load_config, run_main


class RWTrainer(SFTTrainer):
    """Trains a model with a scalar head; rows have `chosen` and `rejected` tokens."""

    config_class = RWConfig
    engine_class = FSDPRWEngine
    make_loader = preference_loader

    def collate(self, rows: list[Row]) -> Batch:
        return collate_pairs(rows, self.tokenizer)

    def update(self, batch: Batch) -> dict[str, float]:
        return self.engine.train_rw(batch)

    def measure(self, batch: Batch) -> dict[str, float]:
        return self.engine.evaluate_rw(batch)


def main(argv: list[str]) -> None:
    RWTrainer.from_config(load_config(argv, RWConfig)).train()


if __name__ == "__main__":
    run_main(main)
