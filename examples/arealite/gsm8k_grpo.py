"""GRPO on GSM8K, fully asynchronous: the whole algorithm in one file.

    python -m arealite.launcher.local examples/arealite/gsm8k_grpo.py \
        --config examples/arealite/configs/gsm8k_grpo.yaml actor.path=/path/to/model

Every rank runs this file. The launcher has already started the inference servers. They generate while this script
trains, and no sample is more than `rollout.max_head_offpolicyness` weight versions old.
"""

from arealite.api.alloc_mode import AllocationMode
from arealite.api.cli_args import GRPOConfig
from arealite.api.errors import ConfigError
from arealite.api.io_struct import FinetuneSpec
from arealite.controller.factory import make_engine
from arealite.dataset import StatefulDataLoader, get_gsm8k_rl, load_tokenizer
from arealite.engine.backends import remote_engine_class
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.reward.gsm8k import gsm8k_reward
from arealite.trainer.evaluator import Evaluator
from arealite.trainer.run import Run
from arealite.utils.config import load_config, run_main
from arealite.utils.rundir import RunDir
from arealite.weights.sync import make_weight_meta, sync_weights
from arealite.workflow.dynamic_sampling import DynamicSampling
from arealite.workflow.evaluation import with_gconfig
from arealite.workflow.rlvr import RLVRWorkflow


def main(argv: list[str]) -> None:
    config = load_config(argv, GRPOConfig)
    if config.critic or config.teacher:
        raise ConfigError(
            "this script has no critic and no teacher: leave `critic` and `teacher` out, or give the launcher "
            "arealite/trainer/ppo.py, whose loop has both"
        )
    tokenizer = load_tokenizer(config.tokenizer_path or config.actor.path)
    rows = get_gsm8k_rl(config.train_dataset, tokenizer)
    dataloader = StatefulDataLoader(rows, config.train_dataset, seed=config.seed)
    spec = FinetuneSpec(config.total_train_epochs, len(rows), dataloader.batch_size, config.total_train_steps)
    # Made before the engines: its reward processes start while the model is loaded.
    workflow = RLVRWorkflow(gsm8k_reward, config.gconfig, tokenizer)

    parallel = AllocationMode.from_str(config.allocation_mode).train
    actor = make_engine(FSDPPPOActor, config.actor, parallel)
    actor.initialize(spec)
    ref = make_engine(FSDPEngine, config.ref, parallel) if config.ref else None
    if ref:
        ref.temperature = config.actor.temperature
        ref.initialize()
    client = remote_engine_class(config.allocation_mode)
    rollout = make_engine(client, config.rollout, config.seed, RunDir(config).db_path)
    rollout.initialize(train_batch_size=dataloader.batch_size)
    evaluator = None
    if config.validation_sets:
        sets = {name: get_gsm8k_rl(data, tokenizer) for name, data in config.validation_sets.items()}
        evaluator = Evaluator(config, rollout, sets, with_gconfig(workflow, config.evaluation_gconfig))

    if config.dynamic_sampling:
        workflow = DynamicSampling(workflow)

    with Run(config, spec, actor, rollout, dataloader, tokenizer, evaluator) as run:
        weights = make_weight_meta(config, run.dir, rollout)
        for step in run.steps():
            with run.phase("rollout"):
                batch = rollout.prepare_batch(dataloader, workflow)
            with run.phase("logp"):
                if config.actor.prox_logp == "recompute":
                    batch["prox_logp"] = actor.compute_logp(batch)
                if ref:
                    batch["ref_logp"] = ref.forward(batch)["logp"]
            with run.phase("update"):
                actor.compute_advantages(batch)
                stats = actor.ppo_update(batch)
                actor.step_lr_scheduler()
            with run.phase("weights"):
                sync_weights(actor, rollout, weights.with_version(step + 1))
            run.commit(step, stats)


if __name__ == "__main__":
    run_main(main)
