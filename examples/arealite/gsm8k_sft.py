"""Supervised fine-tuning on GSM8K.

    python -m arealite.launcher.local examples/arealite/gsm8k_sft.py \
        --config examples/arealite/configs/gsm8k_sft.yaml model.path=/path/to/model
"""

from arealite.api.alloc_mode import AllocationMode
from arealite.api.cli_args import SFTConfig
from arealite.api.io_struct import FinetuneSpec
from arealite.controller.factory import make_engine
from arealite.dataset import StatefulDataLoader, collate_sft, get_gsm8k_sft, load_tokenizer
from arealite.engine.sft.lm_engine import FSDPLMEngine
from arealite.trainer.run import Run
from arealite.utils.config import load_config, run_main


def main(argv: list[str]) -> None:
    config = load_config(argv, SFTConfig)
    tokenizer = load_tokenizer(config.tokenizer_path or config.model.path)
    rows = get_gsm8k_sft(config.train_dataset, tokenizer)
    dataloader = StatefulDataLoader(rows, config.train_dataset, seed=config.seed)
    spec = FinetuneSpec(config.total_train_epochs, len(rows), dataloader.batch_size, config.total_train_steps)
    engine = make_engine(FSDPLMEngine, config.model, AllocationMode.from_str(config.allocation_mode).train)
    engine.initialize(spec)
    batches = dataloader.cycle()

    with Run(config, spec, engine, dataloader=dataloader, tokenizer=tokenizer) as run:
        for step in run.steps():
            batch = collate_sft(engine.share(next(batches)), tokenizer)
            with run.phase("update"):
                stats = engine.train_lm(batch)
                engine.step_lr_scheduler()
            run.commit(step, stats)


if __name__ == "__main__":
    run_main(main)
