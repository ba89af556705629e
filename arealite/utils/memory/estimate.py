"""Formulas for the memory of training and of serving a model, per device, without torch.

Training engines choose the sizes of micro-batches with `choose_sizes`; launchers print the estimates before a run.
What a layer keeps for its backward pass is derived from its operations. `benchmark/memory.py` compares the estimates
with measured peaks.

N parameters, T tokens of a micro-batch, V vocabulary.
"""

from dataclasses import dataclass, field, replace

from arealite.api.alloc_mode import ParallelStrategy
from arealite.api.cli_args import ServerConfig, TrainEngineConfig
from arealite.api.generation_args import FEW_RUNNING, MOST_RUNNING
from arealite.utils.memory.model_size import ModelSize

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Larger micro-batches gain little and need more memory.
MOST_TOKENS = 32768
# Activations are recomputed if micro-batches without that would be smaller than this; on CPU it is the default size.
FEW_TOKENS = 16384
CPU_CHUNK = 1024
# Share of the free memory that is planned; the rest is for fragmentation and temporaries.
_PLANNED_SHARE = 0.8
# Bytes of both optimizer states per parameter; others have the type of the parameter.
_STATE_BYTES = {"adamw_bf16": 4.0, "adamw_8bit": 2.1}
# Bytes per number of the largest tensor that an optimizer with small states needs at once, all of it in 32 bits.
_UPDATE_BYTES = 28
# CUDA's context with its kernels, and the libraries' workspaces.
CUDA_CONTEXT = 0.8e9
# NCCL, which FSDP uses, also with one rank.
_NCCL = 0.55e9
# Python with torch and transformers.
PROCESS = 0.7e9
# Bytes per frozen weight in low bits, with the scales of NF4's blocks of 64; those of FP8's rows are few.
_LOW_BIT_BYTES = {"auto": 0.0, "fp8": 1.0, "nf4": 0.5 + 2 / 64}
# Bytes of a scale of numbers in FP8.
_SCALE = 4
# Share of what passes allocate and free that the allocator cannot use again, with segments that grow: 0.03 to 0.17.
_FRAGMENTS = 0.1
# Numbers per token and hidden size while the head runs: input of the last norm in 32 bits, its normalized form and its
# output, the rows that the head takes, and their gradient.
_HEAD_STATES = 6
# Most of the KV cache on CPU, where a trainer usually shares the memory.
CPU_CACHE_BYTES = 2 << 30


@dataclass(frozen=True)
class MemoryPlan:
    """Sizes of a training engine's passes."""

    max_tokens_per_mb: int
    gradient_checkpointing: bool
    logprob_chunk_size: int


@dataclass(frozen=True)
class Needs:
    """Bytes by part: what stays, and what one pass or update has on top of it at its peak."""

    lasting: dict[str, float]
    passing: dict[str, float] = field(default_factory=dict)
    # On the host, if the rest is on a GPU.
    host: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    # On the host of rank 0 while the model is loaded, if that is not what all ranks hold of it.
    loaded: float = 0.0

    @property
    def total(self) -> float:
        return sum(self.lasting.values()) + sum(self.passing.values())


def layer_numbers(size: ModelSize, compiled: bool, tensor: int = 1) -> float:
    """Return how many numbers a layer keeps per token for its backward pass.

    Eager norms keep their input in 32 bits, its normalized form and the output; the compiled graph recomputes them, but
    keeps queries and keys before and after rotation. Experts have copies of their tokens, and their results.
    """
    copies, heads = 2 * size.chosen_experts * size.hidden, size.query_width + size.key_width
    if compiled:
        return copies + 2 * size.hidden + 3 * (heads + size.inner) / tensor
    return copies + 8 * size.hidden + ((5 if size.has_head_norms else 2) * heads + 4 * size.inner) / tensor


def logit_bytes(compiled: bool) -> int:
    """Return the bytes per logit of a chunk: fp32 and a gradient in 16 bits; eager has temporaries too."""
    return 6 if compiled else 12


def activation_bytes(size: ModelSize, config: TrainEngineConfig, recomputes: bool, tensor: int = 1) -> float:
    """Return the bytes per token that layers keep for the backward pass; without one, those of a layer."""
    item = ITEM_BYTES[config.dtype]
    layer = item * layer_numbers(size, config.compile, tensor)
    if config.optimizer is None:
        return layer
    # If they are recomputed: the input of each layer.
    return size.layers * (item * size.hidden if recomputes else layer)


def backward_bytes(size: ModelSize, config: TrainEngineConfig, recomputes: bool, tensor: int = 1) -> float:
    """Return the bytes per token that the backward pass of one layer has besides what layers keep.

    The layer itself, if it is recomputed, and gradients: of its output, and of both factors of the gated product. That
    of the product comes first, when the product is no longer needed; with experts, that of their results.
    """
    gradients = size.hidden + max(2 * size.inner / tensor, 3 * size.chosen_experts * size.hidden)
    layer = layer_numbers(size, config.compile, tensor) if recomputes else 0.0
    return ITEM_BYTES[config.dtype] * (layer + gradients)


def low_bit_parameters(size: ModelSize, config: TrainEngineConfig) -> int:
    """Return how many weights are in low bits: those of all linear layers of the decoder, or none."""
    if config.frozen_weight_dtype == "auto":
        return 0
    return min(size.adapted_parameters(), size.parameters - size.ends)


def without_low_bit(size: ModelSize, config: TrainEngineConfig) -> ModelSize:
    """Return the sizes with the parameters that have the type of `param_dtype` only."""
    return replace(size, parameters=size.parameters - low_bit_parameters(size, config))


def weight_bytes(size: ModelSize, config: TrainEngineConfig, layout: ParallelStrategy) -> float:
    """Return the bytes of a rank's weights; every rank has all that are in low bits."""
    own = stage_parameters(without_low_bit(size, config), layout.pipeline) / (layout.world_size // layout.pipeline)
    low = _LOW_BIT_BYTES[config.frozen_weight_dtype] * low_bit_parameters(size, config)
    return ITEM_BYTES[config.param_dtype] * own + low


def _dequantized_bytes(size: ModelSize, config: TrainEngineConfig) -> float:
    """Return the bytes of the largest layer in the compute type, with the indices of its levels."""
    if config.frozen_weight_dtype == "auto":
        return 0.0
    item = ITEM_BYTES[config.dtype] + (2 if config.frozen_weight_dtype == "nf4" else 0)
    return float(item * size.hidden * max(size.inner, size.query_width))


def choose_sizes(size: ModelSize, config: TrainEngineConfig, free_bytes: float) -> MemoryPlan:
    """Return the sizes that fit into `free_bytes` beside weights, gradients and optimizer."""
    budget = max(0.0, _PLANNED_SHARE * (free_bytes - _dequantized_bytes(size, config)))
    per_logit = logit_bytes(config.compile) * size.vocab
    chunk = config.logprob_chunk_size or _power_of_two(budget / 10 / per_logit, 256, 4096)
    recomputes = config.gradient_checkpointing
    if recomputes is None:
        few = config.max_tokens_per_mb or FEW_TOKENS
        recomputes = config.optimizer is not None and _fitting(size, config, False, budget, per_logit * chunk) < few
    fits = int(_fitting(size, config, recomputes, budget, per_logit * chunk)) // 1024 * 1024
    return MemoryPlan(config.max_tokens_per_mb or min(max(fits, 1024), MOST_TOKENS), recomputes, chunk)


def _fitting(size: ModelSize, config: TrainEngineConfig, recomputes: bool, budget: float, logits: float) -> float:
    """Return how many tokens fit, both while the head has its logits and in the backward pass of a layer."""
    kept = activation_bytes(size, config, recomputes)
    head = ITEM_BYTES[config.dtype] * _HEAD_STATES * size.hidden
    fits = (budget - logits) / (kept + head)
    return min(fits, budget / (kept + backward_bytes(size, config, recomputes))) if config.optimizer else fits


def cpu_sizes(config: TrainEngineConfig) -> MemoryPlan:
    """Return the sizes on CPU, which do not depend on its memory."""
    return MemoryPlan(
        config.max_tokens_per_mb or FEW_TOKENS,
        bool(config.gradient_checkpointing),
        config.logprob_chunk_size or CPU_CHUNK,
    )


def reserved_bytes(config: TrainEngineConfig, own_trained: float, gathered: float, stage_trained: float = 0.0) -> float:
    """Return what gradients, optimizer states and gathered weights will need besides the weights.

    `own_trained` parameters of this rank have gradients; `gathered` are there in the compute type during a pass. The
    gradients of `stage_trained` parameters are summed in 32 bits (`sums_gradients`) before they are divided.
    """
    copy = ITEM_BYTES[config.dtype] * gathered
    if config.optimizer is None:
        return copy
    copy += 4 * stage_trained
    if config.cpu_offload:
        return copy
    item = ITEM_BYTES[config.param_dtype]
    return copy + (item + _STATE_BYTES.get(config.optimizer.type, 2 * item)) * own_trained


def sums_gradients(config: TrainEngineConfig, layout: ParallelStrategy) -> bool:
    """Return whether gradients of micro-batches are summed apart from those that the optimizer gets.

    FSDP allocates what it reduces in a stream of its own, whose memory the passes do not use. Before that, a pipeline
    stage sums the gradients of all its parameters, and so does a rank whose weights FSDP converts but does not divide.
    """
    return not _is_plain(config, layout) and (layout.pipeline > 1 or layout.data * layout.context == 1)


def _is_plain(config: TrainEngineConfig, layout: ParallelStrategy) -> bool:
    """Return whether a model trains without FSDP."""
    return layout.world_size == 1 and config.param_dtype == config.dtype and not config.cpu_offload


def training_needs(
    size: ModelSize,
    config: TrainEngineConfig,
    plan: MemoryPlan,
    on_gpu: bool,
    parallel: ParallelStrategy | None = None,
    step_tokens: int | None = None,
    scalar_head: bool = False,
) -> Needs:
    """Return what one rank needs to train a model, or to evaluate it if it has no optimizer.

    `step_tokens` are the most tokens of one optimizer step; None: more than one micro-batch. With LoRA the weights are
    frozen, and gradients and optimizer states are those of the adapters. `scalar_head`: a critic.
    """
    layout = parallel or ParallelStrategy()
    tensor, shards, stages = layout.tensor, layout.data * layout.context, layout.pipeline
    size = size.with_scalar_head() if scalar_head else size
    weights, dequantized = weight_bytes(size, config, layout), _dequantized_bytes(size, config)
    loaded = ITEM_BYTES[config.param_dtype] * size.parameters if dequantized else 0.0
    size = without_low_bit(size, config)
    adapters = size.adapter_parameters(config.lora_rank, config.lora_targets) / stages / tensor / shards
    trained = (adapters or stage_parameters(size, stages) / tensor / shards) if config.optimizer is not None else 0.0
    item, is_plain = ITEM_BYTES[config.param_dtype], _is_plain(config, layout)
    state = _STATE_BYTES.get(config.optimizer.type, 2.0 * item) if config.optimizer else 0.0
    stays = {"weights": weights, "adapters": item * adapters, "optimizer": state * trained}
    if on_gpu and not is_plain:
        stays["communication"] = _NCCL
    tokens = plan.max_tokens_per_mb / layout.context
    several = step_tokens is None or step_tokens > plan.max_tokens_per_mb
    # A compiled engine tries the largest micro-batch before the first step.
    if step_tokens is not None and not (config.compile and on_gpu):
        tokens = min(tokens, step_tokens / layout.context)
    passing = {} if is_plain else _exchange_needs(size, config, layout, tokens, step_tokens)
    if trained:
        head = 0.0 if scalar_head else size.embedding / tensor
        gradients = _gradient_bytes(config, layout, trained, several)
        passing |= _backward_needs(size, config, plan, tokens, several, gradients, not is_plain, head, tensor)
        # On CPU they take the place of the summed ones.
        if not (is_plain or config.cpu_offload) and (on_gpu or not gradients):
            passing["reduced gradients"] = 4 * trained
    else:
        passing["activations"] = activation_bytes(size, config, False, tensor) * tokens
        passing["logits"] = 0.0 if scalar_head else 8.0 * plan.logprob_chunk_size * size.vocab / tensor
    passing["dequantized layer"] = dequantized
    if on_gpu:
        passing["fragmentation"] = _FRAGMENTS * sum(passing.values())
    moved = {name: stays.pop(name) for name in list(stays) if config.cpu_offload and name != "communication"}
    host = _nonzero(moved | {"gradients": item * trained}) if moved else {}
    notes = {"activations": f"{tokens:,.0f} tokens" + (", recomputed" if plan.gradient_checkpointing else "")}
    return Needs(_nonzero(stays), _nonzero(passing), host, notes, loaded)


def stage_parameters(size: ModelSize, stages: int) -> float:
    """Return the parameters of the largest pipeline stage: its layers, and embedding or head."""
    return size.parameters if stages == 1 else (size.parameters - size.ends) / stages + size.embedding


def _gradient_bytes(config: TrainEngineConfig, layout: ParallelStrategy, trained: float, several: bool) -> float:
    """Return the bytes of gradients that micro-batches add to, without those that FSDP reduces."""
    if _is_plain(config, layout):
        return ITEM_BYTES[config.param_dtype] * trained
    if layout.pipeline > 1:
        return 4 * trained * layout.data * layout.context
    return 4 * trained if several and sums_gradients(config, layout) else 0.0


def _exchange_needs(
    size: ModelSize, config: TrainEngineConfig, layout: ParallelStrategy, tokens: float, step_tokens: int | None
) -> dict[str, float]:
    """Return gathered weights, tokens sent to experts, and states received from other stages."""
    item, needs = ITEM_BYTES[config.dtype], dict[str, float]()
    gathered = size.gathered_parameters(layout.expert)
    if layout.expert > 1:
        # Of one layer: sent, received, and the results on both ways.
        needs["tokens of experts"] = 4 * item * size.hidden * size.copies(layout.expert) * tokens
    if layout.pipeline == 1 and layout.data * layout.context > 1:
        layers = size.ends + 2 * (gathered - size.ends) / size.layers
        return needs | {"gathered weights": item * layers / layout.tensor}
    stage = stage_parameters(replace(size, parameters=round(gathered)), layout.pipeline)
    needs["gathered weights"] = item * stage / layout.tensor
    if layout.pipeline > 1:
        total = step_tokens / layout.context if step_tokens is not None else 4 * layout.pipeline * tokens
        # Hidden states, and their gradients.
        needs["states between stages"] = (2 if config.optimizer is not None else 1) * item * size.hidden * total
    return needs


def _backward_needs(
    size: ModelSize,
    config: TrainEngineConfig,
    plan: MemoryPlan,
    tokens: float,
    several: bool,
    gradients: float,
    are_reduced: bool,
    head: float,
    tensor: int,
) -> dict[str, float]:
    """Return gradients, activations and logits at the peak of a backward pass or of an update.

    The head comes first: all activations are there, but no gradients unless of an earlier micro-batch. Its logits are
    freed before the layers follow, last to first; what a layer had is freed before the next one. If gradients
    `are_reduced`, the update has others than these.
    """
    assert config.optimizer is not None
    earlier = gradients if several else 0.0
    kept = activation_bytes(size, config, plan.gradient_checkpointing, tensor) * tokens
    layer = backward_bytes(size, config, plan.gradient_checkpointing, tensor) * tokens
    states = ITEM_BYTES[config.dtype] * _HEAD_STATES * size.hidden * tokens
    trains_head = head > 0 and not config.lora_rank
    chunk = min(plan.logprob_chunk_size, tokens)
    logits = logit_bytes(config.compile) * chunk * size.vocab / tensor if head else 0.0
    logits += 4 * head if trains_head else 0.0
    first = {"gradients": earlier, "activations": kept + states, "logits": logits}
    # The last layer's backward pass has all activations, the first one's has all gradients.
    begin = {"gradients": earlier, "activations": kept + layer}
    end = {"gradients": gradients, "activations": kept / size.layers + layer}
    # Those of the embedding are summed in 32 bits.
    embedding = {"gradients": gradients + (4 * head if trains_head else 0.0)}
    update = {"gradients": 0.0 if are_reduced else gradients}
    largest = size.embedding / tensor if not config.lora_rank else config.lora_rank * size.inner
    if config.optimizer.type != "adamw":
        update["optimizer update"] = _UPDATE_BYTES * largest
    return max(first, begin, end, embedding, update, key=lambda parts: sum(parts.values()))


def server_needs(
    size: ModelSize,
    config: ServerConfig,
    total_bytes: float | None,
    on_gpu: bool,
    is_updated: bool = True,
    adapted: float = 0.0,
) -> Needs:
    """Return what one rank of the embedded server needs; `total_bytes` of the device may be unknown.

    `is_updated`: a trainer sends weights, which are staged beside the old ones. `adapted`: it sends LoRA adapters of
    layers with so many parameters. These are merged beside the old ones, from base weights that stay on the host.
    """
    tensor = config.tensor_parallel
    dtype = config.dtype if config.dtype != "auto" else "bfloat16" if on_gpu else "float32"
    item = ITEM_BYTES[dtype]
    weights = _served_weights(size, config, item)
    running = config.max_running_requests or (MOST_RUNNING if on_gpu else FEW_RUNNING)
    sampling = 4.0 * running * size.vocab / tensor
    # In FP8 each head of a token has a scale.
    cached = 1 + _SCALE / size.head_dim if config.kv_cache_dtype == "fp8" else item
    kv_token = size.cached_numbers(tensor) * cached
    context = min(config.context_length or size.context, size.context)
    tokens = float(config.max_total_tokens or running * context)
    if config.max_total_tokens is None:
        tokens = min(tokens, _cache_limit(config, total_bytes, weights + sampling, on_gpu) / kv_token)
    lasting = {"weights": weights, "KV cache": kv_token * tokens, "sampling": sampling}
    staged = item * adapted / tensor if adapted else weights
    passing = {"weight update": staged if is_updated and (on_gpu or adapted) else 0.0}
    base = {"base weights": staged} if is_updated and adapted else {}
    if not on_gpu:
        lasting |= base
    if on_gpu:
        # Temporaries of the largest prefill: while kernels are compiled, and in the memory of the graphs.
        wide = 8 * size.hidden + item * (2 * size.query_width + 2 * size.key_width + 3 * size.inner) / tensor
        lasting["graphs"] = 2 * config.max_prefill_tokens * wide + 0.25e9
    else:
        # Sequences that are decoded have their keys and values in one piece too.
        passing["decoding"] = 2 * kv_token * min(tokens, running * context)
    if config.weight_dtype == "fp8":
        # They are loaded as they are, and quantized before anything else is there.
        loaded = item * size.parameters / tensor - sum(lasting.values()) - sum(passing.values())
        passing["loading"] = max(0.0, loaded)
    host = _nonzero(base) if on_gpu else {}
    return Needs(_nonzero(lasting), _nonzero(passing), host, notes={"KV cache": f"{tokens:,.0f} tokens"})


def _served_weights(size: ModelSize, config: ServerConfig, item: int) -> float:
    """Return the bytes of a rank's weights.

    With FP8, embedding and head stay as they are, and each row of the others has a scale.
    """
    if config.weight_dtype != "fp8":
        return item * size.parameters / config.tensor_parallel
    inner = size.experts * size.expert_inner if size.experts else size.inner
    rows = size.query_width + 2 * size.key_width + 2 * inner + size.hidden * (1 + max(1, size.experts))
    small = size.parameters - size.ends + _SCALE * size.layers * rows
    return (small + item * size.ends) / config.tensor_parallel


def _cache_limit(config: ServerConfig, total_bytes: float | None, own: float, on_gpu: bool) -> float:
    if total_bytes is None:
        return float("inf")
    if on_gpu:
        return config.mem_fraction * max(0.0, total_bytes - own)
    return min(config.mem_fraction * total_bytes / 3, CPU_CACHE_BYTES)


def _nonzero(parts: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in parts.items() if value}


def _power_of_two(limit: float, least: int, most: int) -> int:
    """Return the largest power of two up to `limit`, within bounds."""
    return max(least, min(most, 1 << max(int(limit).bit_length() - 1, 0)))
