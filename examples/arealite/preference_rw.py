"""Train a reward model on preference pairs (a .jsonl file with the columns prompt, chosen and rejected).

    python -m arealite.launcher.local examples/arealite/preference_rw.py \
        --config examples/arealite/configs/preference_rw.yaml model.path=/path/to/model train_dataset.path=pairs.jsonl
"""

from arealite.api.alloc_mode import AllocationMode
from arealite.api.cli_args import RWConfig
from arealite.api.io_struct import FinetuneSpec
from arealite.controller.factory import make_engine
from arealite.dataset import StatefulDataLoader, load_tokenizer
from arealite.dataset.preference import collate_pairs, get_preferences
from arealite.engine.rw.rw_engine import FSDPRWEngine
from arealite.trainer.run import Run
from arealite.utils.config import load_config, run_main


def main(argv: list[str]) -> None:
    config = load_config(argv, RWConfig)
    tokenizer = load_tokenizer(config.tokenizer_path or config.model.path)
    rows = get_preferences(config.train_dataset, tokenizer, loss="rw")
    dataloader = StatefulDataLoader(rows, config.train_dataset, seed=config.seed)
    spec = FinetuneSpec(config.total_train_epochs, len(rows), dataloader.batch_size, config.total_train_steps)
    engine = make_engine(FSDPRWEngine, config.model, AllocationMode.from_str(config.allocation_mode).train)
    engine.initialize(spec)
    batches = dataloader.cycle()

    with Run(config, spec, engine, dataloader=dataloader, tokenizer=tokenizer) as run:
        for step in run.steps():
            batch = collate_pairs(engine.share(next(batches)), tokenizer)
            with run.phase("update"):
                stats = engine.train_rw(batch)
                engine.step_lr_scheduler()
            run.commit(step, stats)


if __name__ == "__main__":
    run_main(main)
