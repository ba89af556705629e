"""`FSDPEngine`: a Hugging Face model trained with PyTorch FSDP2, on one rank or many, CPU or CUDA.

Owns the model, its optimizer and how both are spread over ranks; knows no algorithm. Losses come in as functions
(`train_batch`), sums over packed micro-batches cut by tokens; the engine divides by their weight over all micro-batches
and ranks. Actors, critics and supervised engines subclass it and add methods on top.

B sequences, T padded length, N packed tokens.
"""

from __future__ import annotations

import logging
import math
import os
import time
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from arealite.algo.logprobs import target_positions
from arealite.api.alloc_mode import ParallelStrategy
from arealite.api.cli_args import TrainEngineConfig
from arealite.api.engine_api import LossFn, LossWeightFn, TrainEngine
from arealite.api.errors import ConfigError, TrainingError
from arealite.api.io_struct import Batch, FinetuneSpec, SaveLoadMeta, Stat, Stats, WeightUpdateMeta
from arealite.engine.fsdp import checkpoint
from arealite.engine.fsdp import model as hf_model
from arealite.engine.fsdp.flops import FlopCounter, peak_flops
from arealite.engine.fsdp.optimizer import grad_norm, learning_rate, make_optimizer, scale_grads
from arealite.engine.fsdp.parallel import Layout, check_layout, fold_pipeline
from arealite.engine.fsdp.shared_prefix import PrefixPlan, plan_prefixes
from arealite.engine.fsdp.tensor_parallel import apply_tensor_parallel
from arealite.engine.fsdp.vision import check_vision_layout, has_vision, take_vision
from arealite.utils import distributed
from arealite.utils.controller_mode import check_not_driver
from arealite.utils.data import is_per_token, pack, select_rows, seq_lengths, split_micro_batches, unpack
from arealite.weights import device_memory as device_weights
from arealite.weights.device_memory import DeviceWeights
from arealite.weights.host_memory import SharedWeights
from arealite.weights.process_group import put_outbox

logger = logging.getLogger("arealite.engine")


class MicroBatch(NamedTuple):
    rows: list[int]  # of the padded batch; empty for a filler that keeps ranks in step
    data: Batch
    lengths: list[int]
    prefixes: PrefixPlan | None  # prompts that rows of a group share, computed once


class FSDPEngine(TrainEngine):
    """See `TrainEngine` for the contract of each method."""

    # Critics and reward models have one value per token instead of log-probs.
    scalar_head = False
    # Supervised engines train with the dropout of the model's config. Others compare log-probs between passes, so theirs is off.
    uses_dropout = False

    def __init__(self, config: TrainEngineConfig, parallel: ParallelStrategy | None = None):
        """`parallel` is the training side of `allocation_mode`; without it, all ranks are data parallel."""
        check_not_driver(self)
        config.check()
        self.config = config
        self.temperature = 1.0
        self.with_entropy = False
        self.folder = hf_model.resolve_path(config.path)
        self.hf_config = hf_model.load_config(self.folder, self.scalar_head)
        self.parallel = fold_pipeline(parallel or ParallelStrategy(data=distributed.world_size()))
        check_layout(self.parallel, self.hf_config, distributed.world_size())
        check_vision_layout(self.hf_config, self.parallel)
        config.check_tensor_parallel(self.parallel.tensor)
        self.device = config.device
        if self.device == "auto":
            self.device = "cuda" if torch.cuda.is_available() else "cpu"
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("device=cuda, but torch sees no CUDA device: set device=cpu or auto")
        if self.device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        self.module: hf_model.PackedModel | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.layout: Layout | None = None
        self._partial: list[torch.nn.Parameter] = []  # gradients to be summed over the tensor group
        self.total_steps = 0
        self.lr_step = 0
        self.bad_steps = 0
        self._bad_in_a_row = 0
        self._version = 0
        self._shared: SharedWeights | DeviceWeights | None = None

    # ------------------------------------------------------------------------------------------ life cycle

    def initialize(self, ft_spec: FinetuneSpec | None = None) -> None:
        config = self.config
        distributed.init_process_group(self.device, config.collective_timeout_s)
        full = self._load(config) if distributed.rank() == 0 else None
        one_type = config.dtype == config.param_dtype
        if distributed.world_size() == 1 and one_type and not config.cpu_offload:
            # One rank has nothing to shard, and without a second type nothing to cast: FSDP would only copy.
            assert full is not None
            self._prepare_layers(full)
            self.module = hf_model.PackedModel(full, config).to(self.device)
        else:
            self._initialize_sharded(full)
        if self.parallel.tensor == self.parallel.context == 1 and not self.scalar_head:
            hf_model.try_out(self.module, self.device)
        self._flops = FlopCounter(self.model)
        self._peak_flops = peak_flops(self.device)
        if config.optimizer is not None:
            self.optimizer = make_optimizer(self.model, config.optimizer)
            self.total_steps = ft_spec.total_train_steps if ft_spec else 0
            self._set_lr()

    def _load(self, config: TrainEngineConfig) -> PreTrainedModel:
        devices = [torch.cuda.current_device()] if self.device == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(config.seed)  # of what is drawn: a new head, adapters
            model = hf_model.load_model(self.folder, self.hf_config, config, self.scalar_head)
        if not self.uses_dropout:
            hf_model.disable_dropout(model)
        return model

    def _prepare_layers(self, model: PreTrainedModel) -> None:
        if self.config.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if self.config.compile:
            for layer in hf_model.decoder_layers(model):
                layer.compile(dynamic=True)

    def _initialize_sharded(self, full: PreTrainedModel | None) -> None:
        if not dist.is_initialized():
            # Mixed precision is FSDP's doing, which wants a group even for one rank.
            store = dist.HashStore()
            dist.init_process_group("cpu:gloo,cuda:nccl" if self.device == "cuda" else "gloo", store=store, rank=0, world_size=1)  # fmt: skip
        self.layout = Layout(self.parallel, self.device)
        distributed.set_replica_size(self.parallel.instance_size)
        with torch.device("meta"):
            empty = self._load(replace(self.config, init_from_scratch=True))
        partial = apply_tensor_parallel(empty, self.layout) if self.parallel.tensor > 1 else []
        self.module = hf_model.PackedModel(empty, self.config, self.layout)
        self._prepare_layers(empty)
        hf_model.shard(self.module, full, self.layout.fsdp, self.config)
        self._partial = [self.model.get_parameter(name) for name in partial]

    def destroy(self) -> None:
        self.module = self.optimizer = None
        if self._shared is not None:
            self._shared.unlink()
            self._shared = None

    @property
    def model(self):
        """The Hugging Face model (its parameters are DTensors when sharded)."""
        assert self.module is not None, "call initialize() first"
        return self.module.model

    @property
    def dp_size(self) -> int:
        return self.parallel.data

    @property
    def dp_group(self) -> dist.ProcessGroup | None:
        """Ranks with different data (and the same place in the model)."""
        return self.layout.dp_group if self.layout is not None else None

    def share(self, rows: list[Any]) -> list[Any]:
        """This rank's part of a list that all ranks have, such as the rows of a supervised batch."""
        first = self.layout.dp_rank if self.layout is not None else 0
        return rows[first :: self.dp_size]

    def gather_rows(self, value: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Rows of all data-parallel ranks, and where this one's begin."""
        return distributed.all_gather_rows(value, self.dp_group) if self.dp_size > 1 else (value, 0)

    def reduce_stats(self, stats: dict[str, Stat]) -> Stats:
        """Statistics over all data-parallel ranks."""
        return distributed.all_reduce_stats(stats, self.dp_group if self.dp_size > 1 else None)

    def sum_over_ranks(self, *totals: torch.Tensor) -> list[float]:
        """Each number summed over all data-parallel ranks."""
        share = 1.0 / self.dp_size  # a statistic is a mean over ranks
        sums = self.reduce_stats({str(i): Stat(total, share) for i, total in enumerate(totals)})
        return [sums[str(i)] for i in range(len(totals))]

    # -------------------------------------------------------------------------------------------- training

    def train_batch(self, batch: Batch, loss_fn: LossFn, loss_weight_fn: LossWeightFn) -> Stats:
        assert self.optimizer is not None, "this engine has no optimizer: it can only evaluate"
        start = time.perf_counter()
        self.module.train()
        micro_batches = self._micro_batches(batch)
        stats = self._compute_loss(micro_batches, loss_fn, loss_weight_fn, backward=True)
        norm = self._clip_gradients()
        result = self.reduce_stats(stats | self._work(micro_batches))
        # Last, for nothing here waits for it: on a GPU it goes on while weights already travel to the servers.
        self._step(norm)
        seconds = time.perf_counter() - start
        flops = result.pop("flops")
        result |= {
            "grad_norm": norm,
            "lr": self.optimizer.param_groups[0]["lr"],
            "bad_steps": float(self.bad_steps),
            "num_micro_batches": float(len(micro_batches)),
            "train_tokens_per_s": result["num_tokens"] / seconds,
            "train_tflops": flops / seconds / 1e12,
        }
        if self._peak_flops is not None:
            result["mfu"] = flops / seconds / (self._peak_flops * self.parallel.world_size)
        return result

    def _work(self, micro_batches: list[MicroBatch]) -> dict[str, Stat]:
        """Tokens and operations of the step, summed over ranks (fillers are not counted)."""
        tokens, flops = 0, 0.0
        for mb in micro_batches:
            if mb.rows:
                tokens += sum(mb.lengths)
                predicted = len(mb.data["target_positions"])
                computed = mb.lengths if mb.prefixes is None else mb.prefixes.lengths
                flops += self._flops.train(computed, predicted)
        share = 1.0 / self.dp_size
        return {
            "num_tokens": Stat(torch.tensor(float(tokens)), share),
            "flops": Stat(torch.tensor(flops, dtype=torch.float64), share),
        }

    @torch.no_grad()
    def eval_batch(self, batch: Batch, loss_fn: LossFn, loss_weight_fn: LossWeightFn) -> Stats:
        self.module.eval()
        micro_batches = self._micro_batches(batch)
        stats = self._compute_loss(micro_batches, loss_fn, loss_weight_fn, backward=False)
        return self.reduce_stats(stats)

    def _compute_loss(self, micro_batches, loss_fn, loss_weight_fn, backward) -> dict[str, Stat]:
        weight = self._total_weight(micro_batches, loss_weight_fn)
        # float16 would flush to zero what is a small share of a large batch: divided later, in the optimizer's type
        divides_later = self.config.dtype == "float16"
        share = 1.0 if divides_later else 1.0 / weight
        stats: dict[str, Stat] = {}
        for mb in micro_batches:
            loss, mb_stats = loss_fn(self._forward(mb), mb.data)
            if backward:
                # FSDP averages gradients over its ranks; the loss is a sum over them.
                (loss * (self.dp_size * self.parallel.context * share)).backward()
            _merge(stats, {"loss": Stat(loss.detach(), 0.0), **mb_stats})
        if backward and divides_later:
            scale_grads([p for p in self.model.parameters() if p.requires_grad], 1.0 / weight)
        return stats | {"loss": Stat(stats["loss"].total, weight / self.dp_size)}

    @torch.no_grad()
    def forward(self, batch: Batch) -> Batch:
        """As the contract says; where `batch` has a `loss_mask`, tokens outside it have log-prob 0 as well."""
        self.module.eval()
        result: Batch = {}
        for mb in self._micro_batches(batch):
            outputs = self._forward(mb)
            mask = batch["attention_mask"][mb.rows]
            for key, value in outputs.items():
                if key not in result:
                    result[key] = torch.zeros(batch["attention_mask"].shape, dtype=value.dtype)
                if mb.rows:
                    result[key][mb.rows] = unpack(value.cpu(), mask)
        return result

    def _row_groups(self, batch: Batch) -> list[list[int]]:
        """Rows of each micro-batch: as many on every rank as on the one that needs most. Pairs stay together."""
        units = _units(batch, self.config.max_tokens_per_mb)
        tokens = seq_lengths(batch).tolist()
        lengths = [sum(tokens[row] for row in unit) for unit in units]
        groups = split_micro_batches(lengths, self.config.max_tokens_per_mb)
        count = len(groups)
        if self.dp_size > 1:
            most = torch.tensor([count])
            dist.all_reduce(most, dist.ReduceOp.MAX, self.dp_group)
            count = int(most)
        if count > len(groups):
            groups = split_micro_batches(lengths, self.config.max_tokens_per_mb, min_count=count)
        return [sorted(row for unit in group for row in units[unit]) for group in groups]

    def _micro_batches(self, batch: Batch) -> list[MicroBatch]:
        """Packed micro-batches on the device.

        A rank with fewer rows than micro-batches runs the rest on one token without loss: sharded layers need every
        rank in every pass.
        """
        _check_rows(batch, self.hf_config.get_text_config().vocab_size)
        packed = []
        for group in self._row_groups(batch):
            part = select_rows(batch, group) if group else _blank_row(batch)
            data = pack(part)
            del data["max_seqlen"]
            lengths = data["cu_seqlens"].diff().tolist()
            # On the host, where finding them makes no accelerator wait.
            data["target_positions"] = target_positions(data["cu_seqlens"], data.get("loss_mask"))
            prefixes = self._shared_prefixes(part, data["input_ids"], lengths)
            data = take_vision(self.model, part, data) if has_vision(self.hf_config) else data
            data = {k: v.to(self.device, non_blocking=True) for k, v in data.items()}
            packed.append(MicroBatch(group, data, lengths, prefixes))
        return packed

    def _shared_prefixes(self, part: Batch, ids, lengths: list[int]) -> PrefixPlan | None:
        wanted = self.config.share_prefix and "group_ids" in part and "loss_mask" in part
        if not wanted or self.module.ring or has_vision(self.hf_config):
            return None
        trained = part["loss_mask"].bool()
        first = torch.where(trained.any(1), trained.int().argmax(1), trained.shape[1])
        plan = plan_prefixes(ids, lengths, part["group_ids"].tolist(), first.tolist())
        return None if plan is None else plan.to(self.device)

    def _total_weight(self, micro_batches, loss_weight_fn: LossWeightFn) -> float:
        weight = sum(float(loss_weight_fn(mb.data)) for mb in micro_batches)
        if self.dp_size > 1:
            total = torch.tensor([weight], dtype=torch.float64)
            dist.all_reduce(total, group=self.dp_group)
            weight = float(total)
        if not weight > 0:
            raise TrainingError(
                f"the batch has no trained token (weight {weight} over {self.dp_size} ranks): its loss_mask is 0 everywhere. "
                "Check that answers are not cut off by max_length, and that the workflow sets loss_mask"
            )
        return weight

    def _forward(self, mb: MicroBatch) -> Batch:
        return self.module(mb.data, mb.lengths, self.temperature, self.with_entropy, mb.prefixes)

    def _clip_gradients(self) -> float:
        """Their norm before clipping."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        for parameter in self._partial:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad.to_local(), group=self.layout.tp_group)
        norm = grad_norm(parameters)
        limit = self.config.optimizer.gradient_clipping
        if limit and limit < norm < math.inf:
            scale_grads(parameters, limit / (norm + 1e-6))
        return norm

    def _step(self, norm: float) -> None:
        """Step and clear gradients. A non-finite norm skips the step on all ranks alike."""
        if math.isfinite(norm):
            self.optimizer.step()
            self._bad_in_a_row = 0
        else:
            self._count_bad_step(norm)
        self.optimizer.zero_grad(set_to_none=True)

    def _count_bad_step(self, norm: float) -> None:
        self.bad_steps += 1
        self._bad_in_a_row += 1
        logger.warning(
            "gradient norm is %s: step skipped (%d so far, %d in a row)",
            norm, self.bad_steps, self._bad_in_a_row,
        )  # fmt: skip
        if self._bad_in_a_row >= self.config.max_bad_steps:
            self.optimizer.zero_grad(set_to_none=True)
            raise TrainingError(
                f"the gradient was not finite {self._bad_in_a_row} times in a row (max_bad_steps="
                f"{self.config.max_bad_steps}): lower optimizer.lr, check rewards and log-probs for NaN, or use dtype=float32"
            )

    def step_lr_scheduler(self) -> None:
        self.lr_step += 1
        self._set_lr()

    def _set_lr(self) -> None:
        lr = learning_rate(self.config.optimizer, self.lr_step, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    # -------------------------------------------------------------------------- weights: save, load, publish

    def save(self, meta: SaveLoadMeta) -> None:
        if meta.weight_format == "hf":
            checkpoint.save_hf(self, meta.path)
        else:
            checkpoint.save_dcp(self, meta.path, meta.with_optim)

    def load(self, meta: SaveLoadMeta) -> None:
        if meta.weight_format == "hf":
            checkpoint.load_hf(self, meta.path)
        else:
            checkpoint.load_dcp(self, meta.path, meta.with_optim)

    def update_weights(self, meta: WeightUpdateMeta) -> None:
        if meta.type == "disk":
            checkpoint.save_hf(self, meta.path, durable=False, merge=not meta.is_adapter)
        elif meta.type == "shm":
            self._write_shared(meta.path)
        else:
            parameters = checkpoint.gathered_parameters(self, borrow=True)
            put_outbox(meta.path, parameters, keep=distributed.rank() == 0)

    def _write_shared(self, path: str) -> None:
        if distributed.rank() == 0 and (self._shared is None or str(self._shared.path) != path):
            if self._shared is not None:
                self._shared.unlink()
            specs = checkpoint.tensor_specs(self)
            like = {n: torch.empty(s, dtype=d, device="meta") for n, s, d in specs}
            on_gpu = path.endswith(device_weights.SUFFIX)
            self._shared = (DeviceWeights if on_gpu else SharedWeights).create(path, like)
        for name, tensor in checkpoint.gathered_parameters(self, borrow=True):
            if self._shared is not None:
                self._shared.tensors[name].copy_(tensor)
        if self._shared is not None:
            self._shared.publish()
        distributed.barrier()

    def extra_state(self) -> dict[str, torch.Tensor]:
        """What a subclass wants in the sharded checkpoint besides weights and optimizer."""
        return {}

    def load_extra_state(self, state: dict[str, torch.Tensor]) -> None:
        """Take back what `extra_state` gave."""

    def get_version(self) -> int:
        return self._version

    def set_version(self, version: int) -> None:
        self._version = version


def _units(batch: Batch, max_tokens: int) -> list[list[int]]:
    """Rows that stay together: those of a pair always, those of a group (they share a prompt) while they fit."""
    key = "pair_ids" if "pair_ids" in batch else "group_ids"
    if key not in batch:
        return [[row] for row in range(len(batch["attention_mask"]))]
    members: dict[int, list[int]] = {}
    for row, owner in enumerate(batch[key].tolist()):
        is_alone = key == "pair_ids" and owner <= 0  # a filler, or an answer to another prompt
        members.setdefault(-1 - row if is_alone else owner, []).append(row)
    if key == "pair_ids":
        return list(members.values())
    tokens, units = seq_lengths(batch).tolist(), []
    for rows in members.values():
        filled = max_tokens + 1
        for row in rows:
            if filled + tokens[row] > max_tokens:
                units.append([])
                filled = 0
            units[-1].append(row)
            filled += tokens[row]
    return units


def _check_rows(batch: Batch, vocabulary: int) -> None:
    mask, ids = batch["attention_mask"], batch["input_ids"]
    if mask.shape[1] > 1 and bool((mask[:, 1:] > mask[:, :-1]).any()):
        raise ValueError("attention_mask is not right-padded: a token follows padding")
    unknown = ids[(ids < 0) | (ids >= vocabulary)]
    if len(unknown):
        raise TrainingError(
            f"a batch has token {int(unknown[0])}, and the model's vocabulary {vocabulary}: is the tokenizer that of another model, or does "
            "the workflow make up ids?"
        )


def _blank_row(batch: Batch) -> Batch:
    """One row of one token that takes part in nothing: every key is zero, so is its loss mask."""
    blank = {}
    for key, value in batch.items():
        shape = (1, 1, *value.shape[2:]) if is_per_token(batch, key) else (1, *value.shape[1:])
        blank[key] = value.new_zeros(shape)
    blank["attention_mask"][:] = 1
    return blank


def _merge(stats: dict[str, Stat], new: dict[str, Stat]) -> None:
    """Add a micro-batch's statistics to those of the batch."""
    for key, (total, weight) in new.items():
        if key not in stats:
            stats[key] = Stat(torch.as_tensor(total).detach(), weight)
        elif key.endswith("/max"):
            stats[key] = Stat(torch.maximum(stats[key].total, total), weight)
        elif key.endswith("/min"):
            stats[key] = Stat(torch.minimum(stats[key].total, total), weight)
        else:
            stats[key] = Stat(stats[key].total + total, stats[key].weight + weight)
