"""Evaluation without training: answers all questions of the validation sets and reports statistics.

`python -m arealite.cli.main trainer.type=null valid_dataset.path=…` starts it, and `arealite evaluate` for each
checkpoint of a run. Statistics, answers and intervals are those of evaluations beside training (`trainer.evaluator`).
"""

from rich.console import Console

from arealite.api.cli_args import EvalConfig
from arealite.api.io_struct import WeightUpdateMeta
from arealite.controller.factory import make_engine
from arealite.dataset import load_tokenizer
from arealite.engine.backends import remote_engine_class
from arealite.reward.pool import RewardPool
from arealite.trainer.evaluator import Evaluator
from arealite.trainer.output.eval_report import evaluation_table
from arealite.trainer.stats_logger import StatsLogger
from arealite.trainer.tasks import load_rows, make_workflow
from arealite.utils.config import load_config, run_main
from arealite.utils.distributed import destroy_process_group, init_process_group, rank
from arealite.utils.rundir import RunDir


def main(argv: list[str]) -> None:
    """Evaluate on every rank; `arealite.cli.main` starts it when `trainer.type=null`."""
    config = load_config(argv, EvalConfig)
    # On CPU: the ranks hold no model, they only wait for the result.
    init_process_group("cpu")
    tokenizer = load_tokenizer(config.tokenizer_path or config.actor.path)
    sources, gconfig, pool = (
        config.validation_sets,
        config.evaluation_gconfig,
        RewardPool(timeout_s=config.reward_timeout_s),
    )
    workflows = {name: make_workflow(config, data, gconfig, tokenizer, pool) for name, data in sources.items()}
    sets = {name: load_rows(config, data, tokenizer) for name, data in sources.items()}
    client, run_dir = remote_engine_class(config.allocation_mode), RunDir(config)
    rollout = make_engine(client, config.rollout, config.seed, run_dir.db_path)
    rollout.initialize(train_batch_size=sum(map(len, sets.values())))
    results = RunDir(config.results_dir) if config.results_dir else run_dir
    # Servers count the weights with which they start as version 0.
    evaluator = Evaluator(config, rollout, sets, workflows, results, 0 if config.adapter else config.version)
    step = config.version - 1
    try:
        if config.adapter:
            rollout.update_weights(WeightUpdateMeta("disk", config.adapter, config.version, is_adapter=True))
        evaluator.start(step, beside_training=False)
        stats = evaluator.take(wait=True)
    finally:
        evaluator.close()
        rollout.destroy()
        destroy_process_group()
    assert stats is not None
    logger = StatsLogger(config, results, results.tensorboard / "evaluate" if config.results_dir else None)
    if not config.results_dir:
        logger.resume(-1)
    logger.commit(step, stats)
    logger.close()
    if rank() == 0:
        Console(width=None if Console().is_terminal else 200).print(evaluation_table([(step, stats)]))


if __name__ == "__main__":
    run_main(main)
