"""The GRPO/PPO family: the ready-made loop of examples/arealite/gsm8k_grpo.py.

Scripts call `PPOTrainer(config, rows, tokenizer).train(workflow)`. A test checks that both loops are equal bit for bit:
change both or none.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Self

from transformers import PreTrainedTokenizerBase

from arealite.api.alloc_mode import AllocationMode, ParallelStrategy
from arealite.api.cli_args import FrozenEngineConfig, GRPOConfig
from arealite.api.io_struct import Batch, FinetuneSpec
from arealite.api.rollout_api import check_workflows
from arealite.api.trainer_api import Trainer
from arealite.api.workflow_api import RolloutWorkflow
from arealite.controller.factory import make_engine
from arealite.dataset import StatefulDataLoader, load_tokenizer
from arealite.engine.backends import remote_engine_class
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.engine.ppo.critic import FSDPPPOCritic
from arealite.reward.pool import RewardPool
from arealite.trainer.evaluator import Evaluator, validation_sets
from arealite.trainer.run import Run
from arealite.trainer.tasks import load_rows, load_training_rows, make_training_workflow, make_workflow
from arealite.utils.config import load_config, run_main
from arealite.utils.rundir import RunDir
from arealite.utils.startup import startup_phase
from arealite.weights.sync import make_weight_meta, sync_weights
from arealite.workflow.dynamic_sampling import DynamicSampling
from arealite.workflow.evaluation import with_gconfig


class PPOTrainer(Trainer):
    """Makes the engines and the data loader of one run, and trains."""

    config_class = GRPOConfig
    # What `train` plays unless it is given others; `from_config` sets them.
    workflow: RolloutWorkflow | None = None
    eval_workflow: RolloutWorkflow | Mapping[str, RolloutWorkflow] | None = None

    def __init__(
        self,
        config: GRPOConfig,
        rows: Sequence[dict[str, Any]],
        tokenizer: PreTrainedTokenizerBase,
        valid_rows: Mapping[str, Sequence[dict[str, Any]]] | Sequence[dict[str, Any]] | None = None,
    ):
        self.config, self.tokenizer, self.valid_sets = config, tokenizer, validation_sets(valid_rows)
        parallel = AllocationMode.from_str(config.allocation_mode).train
        self.dataloader = StatefulDataLoader(rows, config.train_dataset, seed=config.seed)
        size = self.dataloader.batch_size
        self.spec = FinetuneSpec(config.total_train_epochs, len(rows), size, config.total_train_steps)
        self.actor = make_engine(FSDPPPOActor, config.actor, parallel)
        self.actor.initialize(self.spec)
        self.critic = make_engine(FSDPPPOCritic, config.critic, parallel) if config.critic else None
        if self.critic:
            self.critic.initialize(self.spec)
        self.ref = _frozen(config.ref, parallel, config.actor.temperature)
        self.teacher = _frozen(config.teacher, parallel, config.actor.temperature)
        client = remote_engine_class(config.allocation_mode)
        self.rollout = make_engine(client, config.rollout, config.seed, RunDir(config).db_path)
        self.rollout.initialize(train_batch_size=size)

    @classmethod
    def from_config(cls, config: GRPOConfig) -> Self:
        """Make the rows and workflows that the configuration describes, and the trainer."""
        with startup_phase("data", "reading the data"):
            parts = cls._read(config)
        rows, tokenizer, valid_rows, workflow, judges = parts
        trainer = cls(config, rows, tokenizer, valid_rows)
        trainer.workflow, trainer.eval_workflow = workflow, judges
        return trainer

    @staticmethod
    def _read(config: GRPOConfig) -> tuple[Any, ...]:
        """Return rows, tokenizer, validation sets, and the workflows of training and evaluation."""
        tokenizer = load_tokenizer(config.tokenizer_path or config.actor.path)
        pool, load = RewardPool(timeout_s=config.reward_timeout_s), functools.partial(load_rows, config)
        # Made before the engines: reward processes start while the model is loaded.
        workflow = make_training_workflow(
            config, lambda data: make_workflow(config, data, config.gconfig, tokenizer, pool)
        )
        rows = load_training_rows(config, tokenizer, load)
        sets = config.validation_sets
        judges = {
            name: make_workflow(config, data, config.evaluation_gconfig, tokenizer, pool) for name, data in sets.items()
        }
        return rows, tokenizer, {name: load(data, tokenizer) for name, data in sets.items()}, workflow, judges

    def train(
        self,
        workflow: RolloutWorkflow | None = None,
        eval_workflow: RolloutWorkflow | Mapping[str, RolloutWorkflow] | None = None,
        *,
        resume_from_checkpoint: str | bool | None = None,
    ) -> None:
        """Train. Evaluations use `eval_workflow`, one for all validation sets or one for each.

        Without it they use `workflow` with the sampling of `eval_gconfig`.
        """
        config, actor, critic, rollout = self.config, self.actor, self.critic, self.rollout
        eval_workflow = eval_workflow or self.eval_workflow
        workflow = check_workflows(workflow or self.workflow, eval_workflow)
        self._check_rows(workflow, eval_workflow)
        evaluator = None
        if self.valid_sets:
            eval_workflow = eval_workflow or with_gconfig(workflow, config.evaluation_gconfig)
            evaluator = Evaluator(config, rollout, self.valid_sets, eval_workflow)
        if config.dynamic_sampling:
            workflow = DynamicSampling(workflow)
        engines = {"actor": actor, "critic": critic} if critic else {"actor": actor}
        parts = (config, self.spec, engines, rollout, self.dataloader, self.tokenizer)
        with Run(*parts, evaluator, resume_from_checkpoint) as run:
            weights = make_weight_meta(config, run.dir, rollout)
            for step in run.steps():
                with run.phase("rollout"):
                    batch = rollout.prepare_batch(self.dataloader, workflow)
                with run.phase("logp"):
                    self._add_predictions(batch)
                with run.phase("update"):
                    actor.compute_advantages(batch)
                    stats = actor.ppo_update(batch)
                    actor.step_lr_scheduler()
                    if critic:
                        own = critic.ppo_update(batch)
                        stats += [{f"critic/{k}": v for k, v in row.items()} for row in own]
                        critic.step_lr_scheduler()
                with run.phase("weights"):
                    sync_weights(actor, rollout, weights.with_version(step + 1))
                run.commit(step, stats)

    def _check_rows(
        self, workflow: RolloutWorkflow, eval_workflow: RolloutWorkflow | Mapping[str, RolloutWorkflow] | None
    ) -> None:
        """Raise if the first row of a dataset cannot be played, before a model generates anything."""
        workflow.check_row(dict(self.dataloader.rows[0]))
        for name, rows in self.valid_sets.items():
            own = eval_workflow[name] if isinstance(eval_workflow, Mapping) else eval_workflow or workflow
            own.check_row(dict(rows[0]))

    def _add_predictions(self, batch: Batch) -> None:
        """Add log-probs and values of the models that the configuration names."""
        if self.config.actor.prox_logp == "recompute":
            batch["prox_logp"] = self.actor.compute_logp(batch)
        if self.ref:
            batch["ref_logp"] = self.ref.forward(batch)["logp"]
        if self.teacher:
            batch["teacher_logp"] = self.teacher.forward(batch)["logp"]
        if self.critic:
            batch["values"] = self.critic.compute_values(batch)


def _frozen(
    config: FrozenEngineConfig | None, parallel: ParallelStrategy | None, temperature: float
) -> FSDPEngine | None:
    """Make a model that only computes log-probs, at the sampling temperature."""
    if config is None:
        return None
    engine = make_engine(FSDPEngine, config, parallel)
    engine.temperature = temperature
    engine.initialize()
    return engine


def main(argv: list[str]) -> None:
    """Train on every rank; `arealite.cli.main` starts it."""
    PPOTrainer.from_config(load_config(argv, GRPOConfig)).train()


if __name__ == "__main__":
    run_main(main)
