"""Supervised fine-tuning of a vision-language model: count the items in images.

    python examples/arealite/clevr_count.py /tmp/tiny
    python -m arealite.launcher.local examples/arealite/clevr_count_sft.py \
        --config examples/arealite/configs/clevr_count_sft.yaml model.path=/tmp/tiny

`train_dataset.path=generated` draws images on the fly. Any other path is a dataset with the columns `images`, `problem`
and `answer`, such as CLEVR-count or Geometry3K.
"""

from clevr_count import load_rows

from arealite.api.alloc_mode import AllocationMode
from arealite.api.cli_args import SFTConfig
from arealite.api.io_struct import FinetuneSpec
from arealite.controller.factory import make_engine
from arealite.dataset import StatefulDataLoader
from arealite.dataset.vision import collate_vision_sft
from arealite.engine.sft.lm_engine import FSDPLMEngine
from arealite.trainer.run import Run
from arealite.utils.config import load_config, run_main
from arealite.utils.vision import VisionProcessor


def main(argv: list[str]) -> None:
    config = load_config(argv, SFTConfig)
    processor = VisionProcessor.load(config.model.path)
    rows = load_rows(config.train_dataset, seed=config.seed)
    dataloader = StatefulDataLoader(rows, config.train_dataset, seed=config.seed)
    spec = FinetuneSpec(config.total_train_epochs, len(rows), dataloader.batch_size, config.total_train_steps)
    engine = make_engine(FSDPLMEngine, config.model, AllocationMode.from_str(config.allocation_mode).train)
    engine.initialize(spec)
    batches = dataloader.cycle()

    with Run(config, spec, engine, dataloader=dataloader, tokenizer=processor.tokenizer) as run:
        for step in run.steps():
            batch = collate_vision_sft(engine.share(next(batches)), processor)
            with run.phase("update"):
                stats = engine.train_lm(batch)
                engine.step_lr_scheduler()
            run.commit(step, stats)


if __name__ == "__main__":
    run_main(main)
