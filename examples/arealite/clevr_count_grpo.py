"""GRPO of a vision-language model, fully asynchronous: count the items in images.

    python -m arealite.launcher.local examples/arealite/clevr_count_grpo.py \
        --config examples/arealite/configs/clevr_count_grpo.yaml actor.path=/path/to/model

`train_dataset.path=generated` draws images on the fly. Any other path is a dataset with the columns `images`, `problem`
and `answer`, such as CLEVR-count or Geometry3K. docs/vision.md says which server (allocation_mode=embedded.…,
sglang.… or vllm.…) runs which family.
"""

from clevr_count import count_reward, load_rows

from arealite.api.alloc_mode import AllocationMode
from arealite.api.cli_args import GRPOConfig
from arealite.api.io_struct import FinetuneSpec
from arealite.controller.factory import make_engine
from arealite.dataset import StatefulDataLoader
from arealite.engine.backends import remote_engine_class
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.trainer.run import Run
from arealite.utils.config import load_config, run_main
from arealite.utils.rundir import RunDir
from arealite.weights.sync import make_weight_meta, sync_weights
from arealite.workflow.vision_rlvr import VisionRLVRWorkflow


def main(argv: list[str]) -> None:
    config = load_config(argv, GRPOConfig)
    rows = load_rows(config.train_dataset, seed=config.seed + 1)
    dataloader = StatefulDataLoader(rows, config.train_dataset, seed=config.seed)
    spec = FinetuneSpec(config.total_train_epochs, len(rows), dataloader.batch_size, config.total_train_steps)
    workflow = VisionRLVRWorkflow(count_reward, config.gconfig, config.actor.path, reward_inline=True)

    actor = make_engine(FSDPPPOActor, config.actor, AllocationMode.from_str(config.allocation_mode).train)
    actor.initialize(spec)
    client = remote_engine_class(config.allocation_mode)
    rollout = make_engine(client, config.rollout, config.seed, RunDir(config).db_path)
    rollout.initialize(train_batch_size=dataloader.batch_size)

    with Run(config, spec, actor, rollout, dataloader, tokenizer=workflow.tokenizer) as run:
        weights = make_weight_meta(config, run.dir, rollout)
        for step in run.steps():
            with run.phase("rollout"):
                batch = rollout.prepare_batch(dataloader, workflow)
            with run.phase("logp"):
                if config.actor.prox_logp == "recompute":
                    batch["prox_logp"] = actor.compute_logp(batch)
            with run.phase("update"):
                actor.compute_advantages(batch)
                stats = actor.ppo_update(batch)
                actor.step_lr_scheduler()
            with run.phase("weights"):
                sync_weights(actor, rollout, weights.with_version(step + 1))
            run.commit(step, stats)


if __name__ == "__main__":
    run_main(main)
