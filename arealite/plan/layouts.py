"""Costs and memory of a layout (`allocation_mode`) of a model on a kind of GPU.

Costs are a roofline times the efficiencies of `hardware`; memory is the estimate of `--dry-run`
(`utils.memory.estimate`).
"""

from dataclasses import dataclass

from arealite.api.alloc_mode import AllocationMode, ParallelStrategy
from arealite.api.backends import BACKENDS
from arealite.api.cli_args import OptimizerConfig, ServerConfig, TrainEngineConfig
from arealite.api.errors import AllocationError, ConfigError
from arealite.api.generation_args import MOST_RUNNING
from arealite.plan import hardware
from arealite.plan.costs import ServerCost, TrainCost, UpdateCost
from arealite.plan.hardware import Gpu
from arealite.plan.workload import Workload
from arealite.utils.memory.estimate import (
    CUDA_CONTEXT,
    MemoryPlan,
    choose_sizes,
    reserved_bytes,
    server_needs,
    stage_parameters,
    sums_gradients,
    training_needs,
)
from arealite.utils.memory.model_size import ModelSize
from arealite.utils.model_config import check_experts

_ITEM = 2
# What SGLang and vLLM take of a GPU by default.
_SHARES = {"sglang": 0.88, "vllm": 0.9}


@dataclass(frozen=True)
class Memory:
    """GiB of a device of each side, and the sizes that follow from them."""

    server_gib: float
    trainer_gib: float
    device_gib: float
    cache_tokens: float
    sizes: MemoryPlan

    @property
    def problem(self) -> str:
        """What does not fit; empty if all does."""
        if self.cache_tokens < 1:
            return f"a server needs {self.server_gib:.0f} GiB for the weights alone and has {self.device_gib:.0f}"
        if self.trainer_gib > self.device_gib:
            return f"a trainer rank needs {self.trainer_gib:.0f} GiB and has {self.device_gib:.0f}"
        return ""


@dataclass(frozen=True)
class Layout:
    """A model on GPUs of one kind."""

    mode: AllocationMode
    model: ModelSize
    gpu: Gpu
    max_running: int = MOST_RUNNING
    # `actor.prox_logp`, with one minibatch: only `recompute` takes a pass of its own for log-probs.
    prox_logp: str = "first_pass"

    @classmethod
    def parse(
        cls, text: str, model: ModelSize, gpu: Gpu, max_running: int = MOST_RUNNING, prox_logp: str = "first_pass"
    ) -> "Layout":
        mode = AllocationMode.from_str(text)
        if mode.gen is None or mode.train is None:
            raise ConfigError(f"--layout {text} must name servers and trainers, for example sglang.d6+d2")
        BACKENDS[mode.gen_backend or "embedded"].check_layout(text, mode.gen)
        check_experts("of this model", model.experts, mode.train)
        if problem := model.untrainable(mode.train.tensor):
            raise AllocationError(f"--layout {text}: {problem}")
        layout = cls(mode, model, gpu, max_running, prox_logp)
        if layout.indivisible:
            raise AllocationError(f"--layout {text}: {layout.indivisible}; use a smaller one that does, and more of d")
        return layout

    @property
    def gen(self) -> ParallelStrategy:
        assert self.mode.gen is not None
        return self.mode.gen

    @property
    def train(self) -> ParallelStrategy:
        assert self.mode.train is not None
        return self.mode.train

    @property
    def name(self) -> str:
        """The layout in its short form, as in `sglang.d12t2+d8`."""
        return f"{self.mode.gen_backend}.{_short(self.gen)}+{_short(self.train)}"

    @property
    def indivisible(self) -> str:
        """What of the model its tensor ranks or pipeline stages cannot divide; empty if all can be divided."""
        is_copied = self.mode.gen_backend != "embedded"
        for side, tensor, copies in (("servers", self.gen.tensor, is_copied), ("trainers", self.train.tensor, False)):
            if part := self.model.undivided(tensor, copies):
                return f"t{tensor} of the {side} does not divide the model's {part}"
        if self.train.pipeline > self.model.layers:
            return f"p{self.train.pipeline} needs as many layers, but the model has {self.model.layers}"
        return ""

    def batch_problem(self, prompts: int) -> str:
        """Say which batch sizes the trainer's replicas can share, if not this one."""
        replicas = self.train.data
        if prompts % replicas == 0:
            return ""
        below = prompts // replicas * replicas
        usable = " or ".join(str(size) for size in (below, below + replicas) if size)
        return f"{replicas} replicas cannot share {prompts} prompts: train_dataset.batch_size={usable}"

    def length_problem(self, workload: Workload) -> str:
        """Say that sequences are longer than the model's context, if they are."""
        longest, context = round(workload.longest_sequence), self.model.context
        if longest <= context:
            return ""
        return (
            f"the longest sequence of this workload has {longest:,} tokens, but the model's context ends at "
            f"{context:,}: servers refuse or cut what is longer. Give shorter --prompt-lengths or --lengths, or fewer "
            "--turns"
        )

    def memory(self, workload: Workload) -> Memory:
        """Estimate the memory of a server's and of a trainer's device."""
        total, size = self.gpu.memory_bytes, self.model
        config = ServerConfig(
            dtype="bfloat16", tensor_parallel=self.gen.tensor, max_running_requests=self.max_running,
            context_length=round(workload.longest_sequence),
        )  # fmt: skip
        kv_token = kv_bytes(size, self.gen, self.mode.gen_backend == "embedded")
        if self.mode.gen_backend in _SHARES:
            weights = _ITEM * stage_parameters(size, self.gen.pipeline) / self.gen.tensor
            cache = _SHARES[self.mode.gen_backend or ""] * total - weights
            server = weights + max(cache, 0.0)
        else:
            needs = server_needs(size, config, total, on_gpu=True)
            cache, server = needs.lasting.get("KV cache", 0.0), needs.total + CUDA_CONTEXT
        sizes, trainer = self._trainer_memory(workload, total)
        gib = 2.0**30
        return Memory(server / gib, trainer / gib, total / gib, max(cache, 0.0) / kv_token, sizes)

    def _trainer_memory(self, workload: Workload, total: float) -> tuple[MemoryPlan, float]:
        config, train, size = TrainEngineConfig(optimizer=OptimizerConfig()), self.train, self.model
        whole = stage_parameters(size, train.pipeline)
        own = whole * train.pipeline / train.world_size
        weights = 4 * whole * train.pipeline / train.world_size
        free = total - CUDA_CONTEXT - weights
        stage_trained = whole if train.pipeline > 1 else own
        summed = stage_trained if sums_gradients(config, train) else 0.0
        room = free - reserved_bytes(config, own, size.gathered_at_once(train, whole), summed)
        sizes = choose_sizes(size, config, room)
        rows = -(-workload.prompts * workload.samples // train.data)
        tokens = round(rows * min(workload.longest_sequence, size.context))
        needs = training_needs(size, config, sizes, True, train, tokens)
        return sizes, needs.total + CUDA_CONTEXT

    def server_cost(self, memory: Memory) -> ServerCost:
        """Return the costs of one server: a roofline with the efficiencies of its backend."""
        size, gpu, shards, tensor = self.model, self.gpu, self.gen.instance_size, self.gen.tensor
        backend = hardware.BACKENDS[self.mode.gen_backend or "embedded"]
        flops, active = gpu.flops * shards, active_parameters(size)
        # Two all-reduces a layer.
        reduces = 2 * size.layers * (tensor > 1)
        moved = reduces * 2 * _ITEM * size.hidden * (tensor - 1) / tensor / (gpu.link * hardware.LINK_EFFICIENCY)
        return ServerCost(
            step_s=backend.step_s + reduces * hardware.REDUCE_S,
            # Stages work at the same time, each on its part of the sequences, for which it reads its weights anew.
            weights_s=_ITEM * active / tensor / (gpu.bandwidth * backend.weights),
            compute_s=2 * active / (flops * backend.compute),
            sequence_s=backend.sequence_s + moved,
            context_s=kv_bytes(size, self.gen, self.mode.gen_backend == "embedded") / (gpu.bandwidth * backend.cache),
            prompt_s=2 * active / (flops * backend.prefill) + moved,
            request_s=backend.step_s,
            max_running=self.max_running,
            cache_tokens=memory.cache_tokens,
        )

    def train_cost(self, memory: Memory) -> TrainCost:
        """Return the costs of a training step: forward and backward, log-probs, recomputation."""
        size, gpu, layout = self.model, self.gpu, self.train
        shards, active = layout.instance_size, active_parameters(size)
        passes = 6 + 2 * (self.prox_logp == "recompute") + 2 * memory.sizes.gradient_checkpointing
        flops = gpu.flops * hardware.TRAIN_EFFICIENCY * shards
        compute_s = passes * active / flops
        # A forward and a backward pass of attention over the causal half.
        pair_s = passes * size.layers * size.query_width / flops
        within_node = layout.world_size <= hardware.GPUS_PER_NODE
        link = (gpu.link if within_node else gpu.network) * hardware.LINK_EFFICIENCY
        # Each micro-batch gathers the weights twice and reduces gradients in 32 bits, beside the arithmetic.
        gathered = size.gathered_parameters(layout.expert)
        exchange_s = 8 * gathered / layout.tensor / link / memory.sizes.max_tokens_per_mb
        exchange_s *= layout.data > 1
        compute_s += self.expert_exchange_bytes(memory) / self._expert_link
        # Four all-reduces of the states in each layer: two forwards, two backwards.
        tensor = layout.tensor
        reduced = 4 * size.layers * 2 * _ITEM * size.hidden * (tensor - 1) / tensor
        compute_s += reduced / (gpu.link * hardware.LINK_EFFICIENCY)
        # A pipeline idles while it fills.
        bubble = 1 + (layout.pipeline - 1) / (4 * layout.pipeline) if layout.pipeline > 1 else 1.0
        return TrainCost(
            max(compute_s, exchange_s) * bubble, pair_s * bubble, hardware.TRAIN_STEP_S, num_replicas=layout.data
        )

    def expert_exchange_bytes(self, memory: Memory) -> float:
        """Return the bytes that a rank sends for one token in a step: to its experts and back."""
        size, expert = self.model, self.train.expert
        if expert == 1:
            return 0.0
        # Forward, backward, and forward again if layers are recomputed: each there and back.
        passes = 2 + memory.sizes.gradient_checkpointing + (self.prox_logp == "recompute")
        away = size.copies(expert) * (expert - 1) / expert
        return 2 * passes * size.layers * _ITEM * size.hidden * away / self.train.context

    @property
    def _expert_link(self) -> float:
        """Bytes per second between ranks of an expert group, which are neighbours by d, p, c, t."""
        train = self.train
        span = -(-train.expert // train.context) * train.pipeline * train.context * train.tensor
        return (self.gpu.link if span <= hardware.GPUS_PER_NODE else self.gpu.network) * hardware.LINK_EFFICIENCY

    def expert_reason(self, memory: Memory) -> str:
        """Say what expert parallelism saves and costs; empty without it."""
        size, train = self.model, self.train
        if train.expert == 1:
            return ""
        whole, gathered = (_ITEM * size.gathered_parameters(e) / train.tensor / 2**30 for e in (1, train.expert))
        sent = self.expert_exchange_bytes(memory) * memory.sizes.max_tokens_per_mb / 2**30
        return (
            f"e{train.expert}: a pass gathers {gathered:.1f} GiB of weights instead of {whole:.1f}, and a micro-batch "
            f"sends {sent:.1f} GiB of tokens"
        )

    def update_cost(self) -> UpdateCost:
        """Return the costs of a weight update over the network, or inside of a node."""
        within_node = self.mode.world_size <= hardware.GPUS_PER_NODE
        link = (self.gpu.link if within_node else self.gpu.network) * hardware.LINK_EFFICIENCY
        size_bytes = _ITEM * self.model.parameters
        copy_s = size_bytes / link
        is_swap = self.mode.gen_backend == "embedded"
        return UpdateCost(publish_s=copy_s + 0.05, load_s=copy_s + 0.1, pause_s=0.01, is_swap=is_swap)


def kv_bytes(size: ModelSize, layout: ParallelStrategy, is_embedded: bool) -> float:
    """Return the bytes of keys and values of a token on one device of a server."""
    return _ITEM * size.cached_numbers(layout.tensor, keeps_latent=not is_embedded) / layout.pipeline


def active_parameters(size: ModelSize) -> float:
    """Return the parameters that a token uses in matrix products: of mixtures, those of its experts."""
    return size.layers * (size.attention + 3 * size.hidden * size.inner) + size.embedding


def _short(side: ParallelStrategy) -> str:
    letters = {"p": side.pipeline, "t": side.tensor, "c": side.context, "e": side.expert}
    return f"d{side.data}" + "".join(f"{letter}{degree}" for letter, degree in letters.items() if degree > 1)
