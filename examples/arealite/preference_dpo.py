"""DPO, IPO, KTO, ORPO or SimPO (`model.loss`) on preference pairs.

The dataset is a .jsonl file with the columns prompt, chosen and rejected; for KTO also prompt, completion and label.

    python -m arealite.launcher.local examples/arealite/preference_dpo.py \
        --config examples/arealite/configs/preference_dpo.yaml model.path=/path/to/model train_dataset.path=pairs.jsonl
"""

from arealite.api.alloc_mode import AllocationMode
from arealite.api.cli_args import DPOConfig
from arealite.api.io_struct import FinetuneSpec
from arealite.controller.factory import make_engine
from arealite.dataset import StatefulDataLoader, load_tokenizer
from arealite.dataset.preference import collate_pairs, get_preferences
from arealite.engine.dpo.dpo_engine import FSDPDPOEngine
from arealite.engine.dpo.pairs import with_mismatched
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.trainer.run import Run
from arealite.utils.config import load_config, run_main


def main(argv: list[str]) -> None:
    config = load_config(argv, DPOConfig)
    tokenizer = load_tokenizer(config.tokenizer_path or config.model.path)
    rows = get_preferences(config.train_dataset, tokenizer, loss=config.model.loss)
    dataloader = StatefulDataLoader(rows, config.train_dataset, seed=config.seed)
    spec = FinetuneSpec(config.total_train_epochs, len(rows), dataloader.batch_size, config.total_train_steps)
    layout = AllocationMode.from_str(config.allocation_mode).train
    engine = make_engine(FSDPDPOEngine, config.model, layout)
    engine.initialize(spec)
    ref = make_engine(FSDPEngine, config.ref, layout) if config.ref else None
    if ref:
        ref.initialize()
    batches = dataloader.cycle()

    with Run(config, spec, engine, dataloader=dataloader, tokenizer=tokenizer) as run:
        for step in run.steps():
            batch = collate_pairs(engine.share(next(batches)), tokenizer)
            if config.model.loss == "kto":
                batch = with_mismatched(batch)
            with run.phase("logp"):
                if ref:
                    batch["ref_logp"] = ref.forward(batch)["logp"]
            with run.phase("update"):
                stats = engine.train_dpo(batch)
                engine.step_lr_scheduler()
            run.commit(step, stats)


if __name__ == "__main__":
    run_main(main)
