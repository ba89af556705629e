"""Tensor parallelism of the embedded engine: cutting parameters over ranks, and the sum over ranks.

Used when a model is loaded and by `weights.ServedWeights`, on every rank. Linear layers are cut by the model's own
plan in transformers: columns (queries, keys, values, gate, up), so that a rank has whole heads; rows (output, down),
so that one sum over the ranks ends each block. Experts are distributed: a rank has some of them whole. Attention that
the plan leaves out (gpt-oss, DeepSeek) is whole on every rank, as are embeddings and head, so every rank samples the
same tokens on its own. A cut head would gather logits `[B, V]` in every step, which takes as long as reading the other
half of the head.
"""

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]
from transformers import PreTrainedConfig, PreTrainedModel

from arealite.api.errors import ConfigError
from arealite.utils.decoders import tensor_plan
from arealite.utils.routing import expert_blocks, num_experts
from arealite.weights.stream.pieces import Box

_DIMS = {"colwise": 0, "rowwise": 1}
# Norms of single heads; experts, which have a rule of their own.
_KNOWN = (*_DIMS, "replicated_with_grad_allreduce", "packed_colwise", "moe_tp_experts")
_ATTENTION = "layers.*.self_attn.q_proj"
# The attribute of a sharded model that holds its group.
GROUP = "tensor_group"
_TIMEOUT = timedelta(minutes=10)  # for a rank that hangs; one that dies closes its connections


@dataclass(frozen=True)
class Shards:
    """The dimension along which each parameter is cut; one that is not in `dims` is whole on every rank."""

    rank: int = 0
    size: int = 1
    dims: dict[str, int] = field(default_factory=dict)

    def cut(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole tensor."""
        dim = self.dims.get(name)
        return value if dim is None else value.chunk(self.size, dim)[self.rank]

    def read(self, name: str, stored: Any) -> torch.Tensor:
        """This rank's part of a tensor in a safetensors file, given as `safe_open(...).get_slice(name)`."""
        dim = self.dims.get(name)
        if dim is None:
            return stored[:]
        size = stored.get_shape()[dim] // self.size
        part = slice(self.rank * size, (self.rank + 1) * size)
        return stored[part] if dim == 0 else stored[:, part]

    def cut_factors(self, name: str, down: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The factors of this rank's part of `up @ down`."""
        dim = self.dims.get(name)
        if dim == 0:
            up = up.chunk(self.size)[self.rank]
        elif dim == 1:
            down = down.chunk(self.size, 1)[self.rank]
        return down, up

    def whole_shape(self, name: str, part: torch.Size) -> torch.Size:
        """Shape of the whole tensor, from that of a part."""
        dim, shape = self.dims.get(name), list(part)
        if dim is not None:
            shape[dim] *= self.size
        return torch.Size(shape)

    def box(self, name: str, part: torch.Size) -> Box:
        """Where this rank's part lies in the whole tensor."""
        dim, offset = self.dims.get(name), [0] * len(part)
        if dim is not None:
            offset[dim] = self.rank * part[dim]
        return Box(tuple(offset), tuple(part))

    def owners(self, name: str, part: torch.Size, stride: int) -> torch.Tensor:
        """The rank that holds each `stride`-th element of the whole tensor."""
        dim, whole = self.dims[name], self.whole_shape(name, part)
        index = torch.arange(0, whole.numel(), stride)
        return torch.unravel_index(index, whole)[dim] // part[dim]

    def places(self, name: str, part: torch.Size, stride: int) -> tuple[torch.Tensor, ...]:
        """Indices in this rank's part of what is a `stride`-th element of the whole tensor, in order."""
        dim, whole = self.dims.get(name), self.whole_shape(name, part)
        index = torch.arange(0, whole.numel(), stride)
        if dim is None:
            return torch.unravel_index(index, whole)
        places = torch.unravel_index(index[self.owners(name, part, stride) == self.rank], whole)
        return tuple(place % part[dim] if i == dim else place for i, place in enumerate(places))


class TensorGroup:
    """The process group of one server: gloo on the CPU; NCCL on CUDA, captured in the CUDA graphs."""

    def __init__(self, rank: int, size: int, store: Store, device: torch.device):
        self.rank, self.size = rank, size
        self._is_alone = False
        self._group: Any
        if device.type == "cuda":
            torch.cuda.set_device(device)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = _TIMEOUT
            self._group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            # torch declares no types for the options.
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._timeout = _TIMEOUT
            # All ranks are on this machine.
            options._devices = [gloo.create_device(hostname="127.0.0.1")]
            self._group = gloo(store, rank, size, options)

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place. All ranks get the same bits."""
        if not self._is_alone:
            self._group.allreduce([value]).wait()
        return value

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Run passes on this rank only, for the shapes of their results."""
        self._is_alone = True
        yield
        self._is_alone = False


class RowLinear(nn.Module):
    """A linear layer whose input is cut over the ranks: sums the ranks' products, then adds the bias."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, group: TensorGroup):
        super().__init__()
        self.weight, self.bias, self._sum = weight, bias, group.sum

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self._sum(F.linear(x, self.weight))
        return out if self.bias is None else out + self.bias


def check_parallel(config: PreTrainedConfig, size: int) -> None:
    """Raise `ConfigError` if the model cannot be cut into `size` parts. Needs no weights."""
    text, plan, experts = config.get_text_config(), tensor_plan(config), num_experts(config)
    if getattr(text, "is_heterogeneous", False):
        raise ConfigError(
            f"model type {text.model_type!r} has layers of different widths, which cannot be cut: use "
            "tensor_parallel=1, or serve it with sglang or vllm"
        )
    counts = {"experts": experts} if experts else {}
    if _ATTENTION in plan:
        heads = text.num_attention_heads
        counts |= {"attention heads": heads, "key-value heads": getattr(text, "num_key_value_heads", None) or heads}
    if any(module.endswith("down_proj") for module in plan):
        counts["intermediate size"] = text.intermediate_size
    for what, count in counts.items():
        if count % size:
            possible = [n for n in range(1, 65) if not any(c % n for c in counts.values())]
            raise ConfigError(
                f"tensor_parallel={size} does not divide the model's {what}: {count} / {size} = {count / size:.2f}. "
                f"Possible: {', '.join(map(str, possible))}"
            )
    unknown = sorted({style for style in plan.values() if style not in _KNOWN})
    if unknown or not (plan or experts):
        raise ConfigError(
            f"model type {text.model_type!r} has parts that cannot be cut ({', '.join(unknown) or 'no plan at all'}): "
            "use tensor_parallel=1, or serve it with sglang or vllm"
        )


def shard_model(model: PreTrainedModel, group: TensorGroup) -> Shards:
    """Cut each linear layer to this rank's part. The model's config then has this rank's number of heads."""
    shards, plan = Shards(group.rank, group.size, {}), tensor_plan(model.config)
    prefix = next(n for n, m in model.named_modules() if m is model.base_model)
    for name, module in list(model.base_model.named_modules()):
        dim = _DIMS.get(plan.get(re.sub(r"\.\d+\.", ".*.", name), ""))
        if dim is None or not isinstance(module, nn.Linear):
            continue
        name = f"{prefix}.{name}" if prefix else name
        shards.dims[f"{name}.weight"] = dim
        if module.bias is not None and dim == 0:
            shards.dims[f"{name}.bias"] = 0
        for key, parameter in module.named_parameters():
            parameter.data = shards.cut(f"{name}.{key}", parameter.data).clone()
        module.out_features, module.in_features = module.weight.shape
        if dim == 1:
            model.set_submodule(name, RowLinear(module.weight, module.bias, group))
    for block in expert_blocks(model):
        _distribute_experts(
            next(n for n, m in model.named_modules() if m is block.experts), block.experts, shards, group
        )
    text: Any = model.config.get_text_config()
    if _ATTENTION in plan:
        heads = text.num_attention_heads
        text.head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        text.num_key_value_heads = (getattr(text, "num_key_value_heads", None) or heads) // group.size
        text.num_attention_heads = heads // group.size
    setattr(model, GROUP, group)
    return shards


def whole_config(config: PreTrainedConfig, size: int) -> PreTrainedConfig:
    """Return a copy of a sharded model's config that describes the whole model."""
    config = copy.deepcopy(config)
    text: Any = config.get_text_config()
    if size > 1 and _ATTENTION in tensor_plan(config):
        text.num_attention_heads *= size
        text.num_key_value_heads *= size
    return config


def _distribute_experts(name: str, experts: Any, shards: Shards, group: TensorGroup) -> None:
    """Give each rank a range of the experts; it skips the tokens of other ranks, and outputs are summed."""
    for key, parameter in experts.named_parameters():
        shards.dims[f"{name}.{key}"] = 0
        parameter.data = shards.cut(f"{name}.{key}", parameter.data).clone()
    original = experts.forward
    count = experts.num_experts = experts.num_experts // group.size
    first = count * group.rank
    # With this flag transformers' grouped kernels skip the tokens of other ranks, whose index is `count`.
    experts._is_expert_parallel = True

    def forward(hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        here = (index >= first) & (index < first + count)
        return group.sum(original(hidden_states, torch.where(here, index - first, count), weights * here))

    experts.forward = forward
