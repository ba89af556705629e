"""Evaluation without training: generates answers to a dataset once and reports rewards.

`python -m arealite.cli.main trainer.type=null valid_dataset.path=…` starts it. Training loops call `evaluate` for their
validation set. All answers go to the ledger of the run directory (`rollout.dump_rollouts`); `python -m
arealite.cli.report` shows them.
"""

from typing import Any

import torch

from arealite.api.cli_args import EvalConfig
from arealite.api.engine_api import InferenceEngine
from arealite.api.io_struct import Stat
from arealite.api.workflow_api import RolloutWorkflow
from arealite.controller.factory import make_engine
from arealite.dataset import load_tokenizer
from arealite.engine.backends import remote_engine_class
from arealite.trainer.stats_logger import StatsLogger
from arealite.trainer.tasks import find_task
from arealite.utils.config import load_config, run_main
from arealite.utils.distributed import all_reduce_stats, data_size, destroy_process_group, init_process_group, rank
from arealite.utils.rundir import RunDir
from arealite.workflow.rlvr import RLVRWorkflow


def evaluate(rollout: InferenceEngine, rows: list[dict[str, Any]], workflow: RolloutWorkflow) -> dict[str, float]:
    """Return mean reward, mean of the best reward per prompt, and mean answer length over `rows`."""
    batch = rollout.rollout_batch(rows, workflow)
    rewards = batch["rewards"].float()
    _, group = torch.unique(batch["group_ids"], return_inverse=True)
    best = torch.zeros(int(group.max()) + 1)
    best.scatter_reduce_(0, group, rewards, "amax", include_self=False)
    return all_reduce_stats(
        {
            "eval/reward": Stat(rewards.sum(), float(len(rewards))),
            "eval/best_of_group": Stat(best.sum(), float(len(best))),
            "eval/answer_len": Stat(batch["loss_mask"].sum(), float(len(rewards))),
            "eval/num_prompts": Stat(torch.tensor(float(len(best))), 1 / data_size()),
        }
    )


def main(argv: list[str]) -> None:
    """Evaluate on every rank; `arealite.cli.main` starts it when `trainer.type=null`."""
    config = load_config(argv, EvalConfig)
    assert config.valid_dataset is not None
    # On CPU: the ranks hold no model, they only share the samples.
    init_process_group("cpu")
    tokenizer = load_tokenizer(config.tokenizer_path or config.actor.path)
    task = find_task(config.valid_dataset)
    rows = task.rl_rows(config.valid_dataset, tokenizer)
    client, run_dir = remote_engine_class(config.allocation_mode), RunDir(config)
    rollout = make_engine(client, config.rollout, config.seed, run_dir.db_path)
    rollout.initialize(train_batch_size=len(rows))
    try:
        stats = evaluate(rollout, rows, RLVRWorkflow(task.reward, config.gconfig, tokenizer))
    finally:
        rollout.destroy()
        destroy_process_group()
    StatsLogger(config, run_dir).commit(0, stats)
    if rank() == 0:
        for name, value in stats.items():
            print(f"{name:24} {value:.4f}")


if __name__ == "__main__":
    run_main(main)
