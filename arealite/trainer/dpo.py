"""DPO and its variants: the ready-made loop of examples/arealite/preference_dpo.py."""

from collections.abc import Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from arealite.api.cli_args import DPOConfig
from arealite.api.io_struct import Batch
from arealite.controller.factory import make_engine
from arealite.dataset.preference import collate_pairs, preference_loader
from arealite.engine.dpo.dpo_engine import FSDPDPOEngine
from arealite.engine.dpo.pairs import with_mismatched
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.trainer.sft import Row, SFTTrainer
from arealite.utils.config import load_config, run_main


class DPOTrainer(SFTTrainer):
    """Trains on rows with `chosen` and `rejected` tokens, or for KTO one of them."""

    config_class = DPOConfig
    engine_class = FSDPDPOEngine
    make_loader = preference_loader

    def __init__(
        self,
        config: DPOConfig,
        rows: Sequence[Row],
        tokenizer: PreTrainedTokenizerBase,
        valid_rows: Mapping[str, Sequence[Row]] | Sequence[Row] | None = None,
    ):
        super().__init__(config, rows, tokenizer, valid_rows)
        self.ref = None
        if config.ref is not None:
            self.ref = make_engine(FSDPEngine, config.ref, self.parallel)
            self.ref.initialize()

    def collate(self, rows: list[Row]) -> Batch:
        return collate_pairs(rows, self.tokenizer)

    def update(self, batch: Batch) -> dict[str, float]:
        return self.engine.train_dpo(self._with_reference(batch))

    def measure(self, batch: Batch) -> dict[str, float]:
        return self.engine.evaluate_dpo(self._with_reference(batch))

    def _with_reference(self, batch: Batch) -> Batch:
        if self.engine.config.loss == "kto":
            batch = with_mismatched(batch, self.config.train_dataset.max_length)
        if self.ref is not None:
            batch["ref_logp"] = self.ref.forward(batch)["logp"]
        return batch


def main(argv: list[str]) -> None:
    DPOTrainer.from_config(load_config(argv, DPOConfig)).train()


if __name__ == "__main__":
    run_main(main)
