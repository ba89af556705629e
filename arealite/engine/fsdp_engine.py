"""`FSDPEngine`: trains a Hugging Face model with PyTorch FSDP2, on one rank or many, CPU or CUDA.

Owns the model, its optimizer and their distribution over ranks; knows no algorithm. `train_batch` takes the loss as a
function that returns a sum over one packed micro-batch; the engine divides by the weight summed over all micro-batches
and ranks. Actors, critics and supervised engines are subclasses. What the engine is built from is in `engine/fsdp/`.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from arealite.api.alloc_mode import ParallelStrategy
from arealite.api.cli_args import TrainEngineConfig
from arealite.api.engine_api import LossFn, LossWeightFn, TrainEngine
from arealite.api.errors import TrainingError
from arealite.api.io_struct import Batch, FinetuneSpec, SaveLoadMeta, Stat, Stats, WeightUpdateMeta
from arealite.engine.fsdp import checkpoint, sharded_checkpoint
from arealite.engine.fsdp import model as hf_model
from arealite.engine.fsdp.device import choose_device
from arealite.engine.fsdp.expert_parallel import apply_expert_parallel
from arealite.engine.fsdp.flops import FlopCounter, peak_flops
from arealite.engine.fsdp.memory import MemoryPlan, apply_plan, early_tokens, explains_out_of_memory, plan_memory
from arealite.engine.fsdp.micro_batches import MicroBatch, can_share_prefix, make_micro_batches
from arealite.engine.fsdp.model import PackedModel
from arealite.engine.fsdp.optimizer import clip_gradients, lr_share, make_optimizer, scale_grads
from arealite.engine.fsdp.parallel import Layout, check_layout
from arealite.engine.fsdp.passes import PassSettings, WholePasses, join_rows, merge_stats, total_weight
from arealite.engine.fsdp.sharding import all_tensors, check_logprobs, compile_layers, fill, shard
from arealite.engine.fsdp.tensor_parallel import apply_tensor_parallel
from arealite.engine.fsdp.trial import can_run_first_layers, first_layers, trial_batch, trial_loss
from arealite.engine.pipeline.model import PipelinedModel
from arealite.engine.pipeline.passes import PipelinePasses
from arealite.utils import distributed
from arealite.utils.imports.compiler_imports import import_compiler
from arealite.utils.process import before_engine
from arealite.utils.startup import do_while_servers_start, startup_phase
from arealite.weights import checksums
from arealite.weights.sync import make_transport
from arealite.weights.transport import Shard, Transport

logger = logging.getLogger("arealite.engine")


class FSDPEngine(TrainEngine):
    """See `TrainEngine` for the contract of each method."""

    # Critics and reward models have one value per token instead of log-probs.
    scalar_head = False
    # Supervised engines train with the dropout of the model's config. All others need equal log-probs in all passes.
    uses_dropout = False

    def __init__(self, config: TrainEngineConfig, parallel: ParallelStrategy | None = None):
        """`parallel` is the training side of `allocation_mode`; if None, all ranks are data parallel."""
        before_engine(self)
        config.check()
        self.config = config
        self.temperature = 1.0
        self.with_entropy = False
        self.folder = hf_model.resolve_path(config.path)
        self.hf_config = hf_model.load_config(self.folder, self.scalar_head)
        self.parallel = parallel or ParallelStrategy(data=distributed.world_size())
        check_layout(self.parallel, self.hf_config, distributed.world_size(), config.pipeline_stages_per_rank)
        config.check_parallel(self.parallel)
        self.device = choose_device(config)
        self.module: PackedModel | PipelinedModel | None = None
        # The model if it is divided into pipeline stages.
        self.pipeline: PipelinedModel | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.layout: Layout | None = None
        # Parameters whose gradients must be summed over the tensor group.
        self._partial: list[torch.nn.Parameter] = []
        self.total_steps = self.lr_step = self.bad_steps = self._bad_in_a_row = 0
        self._lr_scale = 1.0
        self._version = 0
        self._transport: Transport | None = None

    @startup_phase("load", "loading the model")
    def initialize(self, ft_spec: FinetuneSpec | None = None) -> None:
        config = self.config
        if config.compile:
            import_compiler()
        distributed.init_process_group(self.device, config.collective_timeout_s)
        full = self._load(config) if distributed.rank() == 0 else None
        one_type = config.dtype == config.param_dtype
        if distributed.world_size() == 1 and one_type and not config.cpu_offload:
            # One rank has nothing to shard, and one dtype needs no casts: FSDP would only copy.
            assert full is not None
            self._flops = FlopCounter(full)
            self.module = PackedModel(full, config).to(self.device)
        else:
            self._initialize_sharded(full)
        module = self._module
        self._passes = PipelinePasses(module) if isinstance(module, PipelinedModel) else WholePasses(module)
        if isinstance(module, PackedModel) and self.parallel.instance_size == 1 and not self.scalar_head:
            check_logprobs(module, self.device)
        if self.pipeline is None:
            compile_layers(self.model, config, self.device)
        self.shares_prefix = config.share_prefix and can_share_prefix(self.model, module.ring)
        self._peak_flops = peak_flops(self.device)
        if config.optimizer is not None:
            self.optimizer = make_optimizer(self.model, config.optimizer, config.peak_lr)
            if self.pipeline is not None:
                self.optimizer.register_step_post_hook(self.pipeline.after_step)
            self.total_steps = ft_spec.total_train_steps if ft_spec else 0
            self.set_lr_step(0)
        if self._compiles and can_run_first_layers(self.model, self.parallel):
            do_while_servers_start(self.compile_first_layers)

    def _load(self, config: TrainEngineConfig) -> PreTrainedModel:
        with torch.random.fork_rng([torch.cuda.current_device()] if self.device == "cuda" else []):
            # For weights that are not loaded: a new head, adapters.
            torch.manual_seed(config.seed)
            model = hf_model.load_model(self.folder, self.hf_config, config, self.scalar_head)
        if not self.uses_dropout:
            hf_model.disable_dropout(model)
        return model

    @cached_property
    def memory(self) -> MemoryPlan:
        """The sizes that fit, chosen at the first use: servers on this device have their memory then."""
        return apply_plan(self._module, plan_memory(self.model, self.config, self.device, self.parallel))

    @property
    def _compiles(self) -> bool:
        # On CPU a graph fits one batch only.
        return self.config.compile and self.device == "cuda" and self.optimizer is not None

    def warm_up(self) -> None:
        if self._compiles:
            with startup_phase("trial", "trying a micro-batch while the first answers are generated"):
                self.run_trial(self.memory.max_tokens_per_mb)

    @startup_phase("compile", "compiling while the servers start")
    def compile_first_layers(self) -> None:
        """Run a trial pass through the first layers, to save memory: all layers share the compiled code."""
        if self.module is None:
            return  # destroyed before
        with first_layers(self.model) as count:
            self.run_trial(early_tokens(self.model, self.config, self.device, count))

    def run_trial(self, max_tokens: int) -> None:
        """Run one training pass over made-up tokens, without a step."""
        with torch.random.fork_rng([torch.cuda.current_device()] if self.device == "cuda" else []):
            micro_batches = self._micro_batches(trial_batch(max_tokens, self.model.config), max_tokens)
            self._module.train()
            self._compute_loss(micro_batches, trial_loss, lambda mb: torch.tensor(1.0), backward=True)
        self._optimizer.zero_grad(set_to_none=True)

    def _initialize_sharded(self, full: PreTrainedModel | None) -> None:
        # FSDP does the mixed precision, and needs a group even for one rank.
        distributed.init_single_group(self.device)
        self.layout = Layout(self.parallel, self.device)
        distributed.set_replica_size(self.parallel.instance_size)
        with torch.device("meta"):
            empty = self._load(replace(self.config, init_from_scratch=True))
        partial = apply_tensor_parallel(empty, self.layout) if self.parallel.tensor > 1 else []
        if self.layout.experts is not None:
            apply_expert_parallel(empty, self.layout)
        self._flops = FlopCounter(empty)
        if self.parallel.pipeline > 1:
            compile_layers(empty, self.config, self.device)
            self.module = self.pipeline = PipelinedModel(empty, self.config, self.layout)
            self.pipeline.fill(full)
        else:
            self.module = PackedModel(empty, self.config, self.layout)
            shard(self.module, self.layout, self.config)
            empty.tie_weights()
            fill(empty, full, self.device, all_tensors(empty))
        self._partial = [p for name, p in self.model.named_parameters() if name in partial]

    def destroy(self) -> None:
        self.module = self.pipeline = self.optimizer = None
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    @property
    def model(self) -> PreTrainedModel:
        """The Hugging Face model; its parameters are DTensors if sharded."""
        return self._module.model

    @property
    def _module(self) -> PackedModel | PipelinedModel:
        assert self.module is not None, "call initialize() first"
        return self.module

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        assert self.optimizer is not None, "this engine has no optimizer: it can only evaluate"
        return self.optimizer

    @property
    def dp_size(self) -> int:
        return self.parallel.data

    @property
    def dp_group(self) -> dist.ProcessGroup | None:
        """Ranks that hold the same part of the model and get different data."""
        return self.layout.dp_group if self.layout is not None else None

    def share(self, rows: list[Any]) -> list[Any]:
        """Return this rank's part of a list that all ranks have, such as the rows of a supervised batch."""
        return rows[self.layout.dp_rank if self.layout is not None else 0 :: self.dp_size]

    def gather_rows(self, value: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return the rows of all data-parallel ranks, and the index at which this rank's begin."""
        return distributed.all_gather_rows(value, self.dp_group)

    def reduce_stats(self, stats: dict[str, Stat]) -> Stats:
        """Reduce statistics over all data-parallel ranks."""
        return distributed.all_reduce_stats(stats, self.dp_group)

    def sum_over_ranks(self, *totals: torch.Tensor) -> list[float]:
        """Sum each number over all data-parallel ranks."""
        # Statistics are Σ total / Σ weight: these weights add up to 1.
        sums = self.reduce_stats({str(i): Stat(total, 1.0 / self.dp_size) for i, total in enumerate(totals)})
        return [sums[str(i)] for i in range(len(totals))]

    def train_batch(
        self,
        batch: Batch,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        may_step: Callable[[Stats], bool] | None = None,
    ) -> Stats:
        """Implement `TrainEngine.train_batch`; make no step if `may_step` of the statistics is False."""
        assert self.config.optimizer is not None, "this engine has no optimizer: it can only evaluate"
        start = time.perf_counter()
        self._module.train()
        micro_batches = self._micro_batches(batch)
        stats = self._compute_loss(micro_batches, loss_fn, loss_weight_fn, backward=True)
        norm = clip_gradients(self.model, self.config.optimizer.gradient_clipping, self._partial, self.layout)
        result = self.reduce_stats(stats | self._flops.work(micro_batches, self.dp_size))
        makes_step = may_step is None or may_step(result)
        result |= self._module.routing.end_step(self.layout, moves_biases=makes_step and math.isfinite(norm))
        # The step comes last, as nothing here waits for it: a GPU still runs it while the weights are published.
        if makes_step:
            self._step(norm)
        else:
            self._optimizer.zero_grad(set_to_none=True)
        seconds, flops = time.perf_counter() - start, result.pop("flops")
        result |= {
            "grad_norm": norm,
            "lr": self._optimizer.param_groups[0]["lr"],
            "bad_steps": float(self.bad_steps),
            "num_micro_batches": float(len(micro_batches)),
            "train_tokens_per_s": result["num_tokens"] / seconds,
            "train_tflops": flops / seconds / 1e12,
        }
        if self._peak_flops is not None:
            result["mfu"] = flops / seconds / (self._peak_flops * self.parallel.world_size)
        return result

    @torch.no_grad()
    def eval_batch(self, batch: Batch, loss_fn: LossFn, loss_weight_fn: LossWeightFn) -> Stats:
        self._module.eval()
        micro_batches = self._micro_batches(batch)
        return self.reduce_stats(self._compute_loss(micro_batches, loss_fn, loss_weight_fn, backward=False))

    @explains_out_of_memory
    def _compute_loss(
        self, micro_batches: list[MicroBatch], loss_fn: LossFn, loss_weight_fn: LossWeightFn, backward: bool
    ) -> dict[str, Stat]:
        weight = total_weight(micro_batches, loss_weight_fn, self.dp_group if self.dp_size > 1 else None)
        # float16 flushes gradients of a small share of a large batch to zero: divide them later.
        divides_later = self.config.dtype == "float16"
        share = 1.0 if divides_later else 1.0 / weight
        stats: dict[str, Stat] = {}

        def loss_of(outputs: Batch, mb: MicroBatch) -> torch.Tensor:
            loss, mb_stats = loss_fn(outputs, mb.data)
            merge_stats(stats, {"loss": Stat(loss.detach(), 0.0), **mb_stats})
            # FSDP averages gradients over its ranks, but the loss is a sum over them.
            return loss * (self.dp_size * self.parallel.context * share)

        if backward:
            self._module.routing.begin_step(len(micro_batches), weight * share)
            stats |= self._passes.backward(micro_batches, self._settings, loss_of)
        else:
            for mb, outputs in zip(micro_batches, self._passes.outputs(micro_batches, self._settings), strict=True):
                loss_of(outputs, mb)
        if backward and divides_later:
            scale_grads([p for p in self.model.parameters() if p.requires_grad], 1.0 / weight)
        return stats | {"loss": Stat(stats["loss"].total, weight / self.dp_size)}

    def forward(self, batch: Batch) -> Batch:
        """Implement `TrainEngine.forward`; tokens outside `loss_mask` have log-prob 0 too."""
        return self.start_forward(batch)()

    @explains_out_of_memory
    def start_forward(self, batch: Batch) -> Callable[[], Batch]:
        """Launch the passes of `forward`. What is returned waits for the device and returns the results."""
        # Compiled layers need a graph for training and another for evaluation; without dropout the first serves both.
        as_training = self.config.compile and self.optimizer is not None and not self.uses_dropout
        self._module.train(as_training)
        micro_batches = self._micro_batches(batch)
        with torch.set_grad_enabled(as_training):
            outputs = list(self._passes.outputs(micro_batches, self._settings))
        return partial(join_rows, outputs, micro_batches, batch["attention_mask"])

    def _micro_batches(self, batch: Batch, max_tokens: int | None = None) -> list[MicroBatch]:
        group = self.dp_group if self.dp_size > 1 else None
        size = max_tokens or self.memory.max_tokens_per_mb
        return make_micro_batches(batch, self.model, size, self.device, group, self.shares_prefix, self._passes.count)

    @property
    def _settings(self) -> PassSettings:
        return PassSettings(self.temperature, self.with_entropy)

    def _step(self, norm: float) -> None:
        """Run the optimizer and clear gradients. All ranks skip the step if the norm is not finite."""
        if math.isfinite(norm):
            self._optimizer.step()
            self._bad_in_a_row = 0
        else:
            self.bad_steps += 1
            self._bad_in_a_row += 1
            counts = self.bad_steps, self._bad_in_a_row
            logger.warning("gradient norm is %s: step skipped (%d so far, %d in a row)", norm, *counts)
        self._optimizer.zero_grad(set_to_none=True)
        if self._bad_in_a_row >= self.config.max_bad_steps:
            raise TrainingError(
                f"the gradient was not finite {self._bad_in_a_row} times in a row (max_bad_steps): lower optimizer.lr, "
                "check rewards and log-probs for NaN, or use dtype=float32"
            )

    def step_lr_scheduler(self) -> None:
        self.set_lr_step(self.lr_step + 1)

    def set_lr_scale(self, scale: float) -> None:
        self._lr_scale = scale
        self.set_lr_step(self.lr_step)

    def set_lr_step(self, step: int) -> None:
        """Move to step `step` of the learning-rate schedule."""
        assert self.config.optimizer is not None
        self.lr_step = step
        lr = self._lr_scale * self.config.peak_lr * lr_share(self.config.optimizer, self.lr_step, self.total_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = lr

    # -------------------------------------------------------------------------- weights: save, load, publish

    def save(self, meta: SaveLoadMeta) -> None:
        if meta.weight_format == "hf":
            checkpoint.save_hf(self, meta.path)
        else:
            sharded_checkpoint.save_dcp(self, meta.path, meta.with_optim)

    def load(self, meta: SaveLoadMeta) -> None:
        if meta.weight_format == "hf":
            checkpoint.load_hf(self, meta.path)
        else:
            sharded_checkpoint.load_dcp(self, meta.path, meta.with_optim, meta.keeps_schedule)
        if self.pipeline is not None:
            self.pipeline.copy_tied()

    def update_weights(self, meta: WeightUpdateMeta) -> None:
        self._transport = make_transport(meta, self._transport)
        self._transport.publish(self, meta)

    def empty_weights(self) -> dict[str, torch.Tensor]:
        """Return the tensors that `gather_weights` yields, on the `meta` device."""
        return checkpoint.empty_parameters(self)

    def gather_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each full parameter; all ranks must iterate. A tensor is valid until the next one."""
        return checkpoint.gathered_parameters(self)

    def local_weights(self) -> Iterator[Shard]:
        """Yield this rank's shard of each parameter, in the compute dtype."""
        return checkpoint.local_parameters(self)

    def save_weights(self, path: str, *, adapter_only: bool) -> None:
        """Write a folder for servers to read at once, not synced to disk; merges adapters by default."""
        checkpoint.save_hf(self, path, durable=False, merge=not adapter_only)

    def weight_sums(self) -> dict[str, tuple[int, float]]:
        return checksums.take(self.model)

    def extra_state(self) -> dict[str, torch.Tensor]:
        """Return further tensors for the sharded checkpoint. Subclasses override it."""
        return {}

    def load_extra_state(self, state: dict[str, torch.Tensor]) -> None:
        """Restore the tensors of `extra_state`."""

    def get_version(self) -> int:
        return self._version

    def set_version(self, version: int) -> None:
        self._version = version
