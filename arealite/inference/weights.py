"""The weights of a served model: reads, checks and shards new weights, then copies them in place.

Used by the engine; with tensor parallelism on every rank. Weights that do not fit (missing, unknown or misshapen
tensors, numbers that are not finite) are rejected before the first byte is copied, so the old weights stay complete.
Names are those of `named_parameters()`; a tied head may be left out. An adapter is merged as `W + scale·B·A` in
float32, always from the weights without any adapter, which are kept on the host: swapping back and forth gives the
same bits, and the storage that CUDA graphs read stays the same. Weights in FP8 take no adapter: they are not kept as
they came, and a small change would be rounded away.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from arealite.api.errors import WeightUpdateError
from arealite.api.io_struct import WeightUpdateMeta
from arealite.inference.adapters import Adapter, read_adapter
from arealite.inference.experts.fp8_experts import MATRICES, convert_experts, expert_layers
from arealite.inference.fp8 import WIDE, Fp8Linear, Fp8Matrices, fp8_layers, linear_layers, loaded_dtype, verified
from arealite.inference.sharding import Shards, whole_config
from arealite.weights.files import unreadable
from arealite.weights.fingerprint import Fingerprints, fingerprints, stride
from arealite.weights.stream.receive import Receiver, StreamOrder, Wanted
from arealite.weights.sync import make_transport
from arealite.weights.transport import Weights

Pairs = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class WeightSource:
    """New weights for a served model. Make it with `published`, `adapter`, `received` or `base`.

    `meta`: where a trainer has published them, and their version; None: the base weights, without an adapter.
    `tensors`: weights that this process has received already. `order`: where to pull weights from. `adapter_name`: of a
    LoRA adapter.
    """

    meta: WeightUpdateMeta | None = None
    tensors: Weights | None = None
    adapter_name: str = ""
    order: StreamOrder | None = None

    @classmethod
    def published(cls, meta: WeightUpdateMeta) -> WeightSource:
        """Weights that a trainer has published."""
        return cls.adapter(meta.path, meta.version) if meta.is_adapter else cls(meta)

    @classmethod
    def adapter(cls, path: str, version: int, name: str = "") -> WeightSource:
        """A LoRA adapter in a PEFT folder. It replaces the adapter in use."""
        return cls(WeightUpdateMeta("disk", path, version, is_adapter=True), adapter_name=name or f"v{version}")

    @classmethod
    def received(cls, tensors: Weights, version: int) -> WeightSource:
        """Weights that are in memory already."""
        return cls(WeightUpdateMeta("broadcast", "the broadcast", version), tensors)

    @classmethod
    def streamed(cls, order: StreamOrder, version: int) -> WeightSource:
        """Weights that each rank pulls for itself."""
        return cls(WeightUpdateMeta("stream", "the stream", version), order=order)

    @classmethod
    def base(cls) -> WeightSource:
        """The weights, and their version, from before an adapter was loaded."""
        return cls()

    @property
    def version(self) -> int | None:
        """The version of these weights; None for the base weights, whose version the engine knows."""
        return None if self.meta is None else self.meta.version

    def to_json(self) -> dict[str, Any]:
        """For another process, which reads the weights itself."""
        assert self.tensors is None, "tensors do not travel as JSON"
        if self.order is not None:
            return {"order": asdict(self.order), "version": self.version}
        return {} if self.meta is None else asdict(self.meta)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> WeightSource:
        if "order" in fields:
            return cls.streamed(StreamOrder.from_json(fields["order"]), fields["version"])
        return cls.published(WeightUpdateMeta(**fields)) if fields else cls.base()


@dataclass
class Staged:
    """New values of parameters, ready to be copied. `is_base`: they replace the base weights too.

    `stream`: the key and version of a stream that they are from. `samples`: of weights that are kept in FP8.
    """

    pairs: Pairs
    adapter: Adapter | None = None
    is_base: bool = True
    stream: tuple[str, int] | None = None
    samples: Weights = field(default_factory=dict)


class ServedWeights:
    """The weights of the model. Call `stage` on any thread, one at a time, and `accept` after the copy."""

    def __init__(self, model: PreTrainedModel, shards: Shards | None = None):
        self.model = model
        self.shards = shards or Shards()
        self.adapter: Adapter | None = None
        # Layers with an adapter, as they were without it.
        self._base: Weights = {}
        # The weights in use are these of a stream, bit for bit.
        self._stream: tuple[str, int] | None = None
        self._receiver: Receiver | None = None
        # Layers in FP8, and the sampled elements of their weights as they were before that, for fingerprints.
        self._layers: dict[str, Fp8Linear | Fp8Matrices] = {}
        self._samples: Weights = {}

    def use_fp8(self) -> None:
        """Keep the weights of linear layers and experts in FP8 from now on."""
        linear = linear_layers(self.model)
        experts = {name: self.model.get_submodule(name) for name in expert_layers(self.model)}
        weights = [f"{name}.weight" for name in linear] + [f"{name}.{key}" for name in experts for key in MATRICES]
        self._samples = {name: self.sample(name, self.model.get_parameter(name)).cpu() for name in weights}
        for name in linear:
            layer: Any = self.model.get_submodule(name)
            self.model.set_submodule(name, Fp8Linear.of(layer))
        for layer in experts.values():
            convert_experts(layer)
        self._layers = fp8_layers(self.model)

    def _places(self, name: str, part: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Indices of the sampled elements that this rank has, in every dimension of its part."""
        return self.shards.places(name, part.shape, stride(self.shards.whole_shape(name, part.shape).numel()))

    def sample(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """The sampled elements that this rank has; of weights in FP8 as they came, if that is what it holds."""
        at = tuple(place.to(part.device) for place in self._places(name, part))
        if name in self._layers:
            return verified(self._layers[name], self._samples[name].to(part.device), at)
        return part.detach()[at]

    def stage(self, source: WeightSource) -> Staged:
        """Read and check new weights; nothing is copied into the model yet."""
        meta = source.meta
        if meta is None:
            targets = dict(self.model.named_parameters())
            return Staged([(targets[n], v) for n, v in self._base.items()], is_base=False)
        if source.order is not None:
            return self._pull(source.order)
        if source.tensors is not None:
            return self._match(source.tensors, meta.path)
        if meta.is_adapter:
            return self._stage_adapter(read_adapter(meta.path), meta.path)
        weights = make_transport(meta).open(meta)
        if Path(meta.path).is_dir() and not {n for n, _ in self.model.named_parameters()} <= set(weights):
            weights = self._convert(meta.path, weights) or weights
        return self._match(weights, meta.path)

    def _pull(self, order: StreamOrder) -> Staged:
        """Pull this rank's parts of the weights; with changes alone if it holds the version before."""
        parameters, targets = {name for name, _ in self.model.named_parameters()}, self.own_tensors()
        wanted = {
            name: Wanted(
                tuple(self.shards.whole_shape(name, t.shape)), self.shards.box(name, t.shape), t, name not in parameters
            )
            for name, t in targets.items()
        }
        base = self._stream[1] if self._stream is not None and self._stream[0] == order.key else None
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = Receiver(order, wanted, base, self.shards.rank, self.shards.size)
        parts = self._receiver.run()
        _check_ranges([(n, value, loaded_dtype(targets[n])) for n, value in parts.items()], "the stream")
        return self._staged(targets, parts, (order.key, order.version))

    def _staged(self, targets: Weights, parts: Weights, stream: tuple[str, int] | None = None) -> Staged:
        """This rank's parts of all weights, with their targets."""
        pairs = [(targets[name], value) for name, value in parts.items()]
        places = {name: self._places(name, layer.weight) for name, layer in self._layers.items()}
        samples = {name: parts[name].detach()[at].to("cpu", WIDE) for name, at in places.items()}
        return Staged(pairs, stream=stream, samples=samples)

    def _convert(self, path: str, saved: Weights) -> Weights | None:
        """Convert weights that transformers saves under other names (each expert alone); else None."""
        if not get_model_conversion_mapping(self.model, add_legacy=False):
            return None
        for name in saved.keys() - self.model.state_dict().keys():
            _check_type(name, saved[name], path)
        config = whole_config(self.model.config, self.shards.size)
        settings: dict[str, Any] = {"ignore_mismatched_sizes": True, "output_loading_info": True}
        settings |= {"use_safetensors": True, "local_files_only": True}
        try:
            # In float32: loading in another dtype makes it the default of all threads meanwhile.
            loading: Any = type(self.model).from_pretrained(path, config=config, dtype=torch.float32, **settings)
            loaded, info = loading
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise unreadable(path, error) from error
        for kind, names in info.items():
            if names:
                raise _rejection(path, f"it does not fit this model: {kind} {sorted(map(str, names))[:3]}")
        return dict(loaded.named_parameters()) | saved_buffers(loaded)

    def _match(self, weights: Weights, source: str) -> Staged:
        """Pair each parameter with its new value; raises `WeightUpdateError` if they do not fit exactly."""
        targets: Weights = dict(self.model.named_parameters())
        # Tied heads and persistent buffers.
        aliases = set(self.model.state_dict()) - set(targets)
        missing = sorted(set(targets) - set(weights))
        extra = sorted(set(weights) - set(targets) - aliases)
        if missing or extra:
            kind, names = ("lacks", missing) if missing else ("has unknown", extra)
            problem = f"{kind} {len(names)} tensor(s), first {names[0]!r:.200}: it is not a checkpoint of this model"
            raise _rejection(source, problem)
        # Buffers such as a router's correction bias: not every sender has them.
        targets |= {n: b for n, b in saved_buffers(self.model).items() if n in weights}
        for name, target in targets.items():
            self._check_shape(name, target, list(weights[name].shape), source)
            _check_type(name, weights[name], source)
        _check_ranges([(n, weights[n], loaded_dtype(t)) for n, t in targets.items()], source)
        self._check_tied(weights, targets, source)
        return self._staged(targets, {name: self.shards.cut(name, weights[name]) for name in targets})

    def _check_tied(self, weights: Weights, targets: Weights, source: str) -> None:
        """A head that is tied here may be sent too, but only with the same numbers."""
        owners = {target.data_ptr(): name for name, target in targets.items()}
        for alias, tensor in self.model.state_dict().items():
            owner = owners.get(tensor.data_ptr())
            if alias in targets or alias not in weights or owner is None:
                continue
            if not torch.equal(weights[alias].to(weights[owner]), weights[owner]):
                raise _rejection(source, f"{alias} differs from {owner}, to which it is tied in this model")

    def accept(self, staged: Staged) -> None:
        """Record that the staged pairs were copied."""
        self.adapter, self._stream, self._samples = staged.adapter, staged.stream, staged.samples
        if staged.is_base or staged.adapter is None:
            self._base = {}

    def fingerprint(self) -> str:
        """Return a hash of all weights, equal on servers that hold the same numbers in the same dtype."""
        digest = hashlib.sha256()
        for name, part in sorted(self.own_tensors().items()):
            digest.update(name.encode())
            whole = self.whole(name, part).detach().contiguous().cpu()
            digest.update(whole.view(torch.uint8).reshape(-1).numpy().data)
            if name in self._layers:
                digest.update(self._layers[name].scale.cpu().numpy().data)
        return digest.hexdigest()

    def fingerprints(self) -> Fingerprints:
        """Return a cheap fingerprint of each tensor, to be compared after every update."""
        tensors = self.named_tensors()
        samples = {name: (self.sample(name, tensors[name]), tensors[name].shape) for name in self._layers}
        return fingerprints(tensors.items(), samples)

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """Return the full tensor of which this rank has `part`."""
        return part

    def named_tensors(self) -> Weights:
        """Return all tensors with a fingerprint: the model's as they are used, and the adapter's own tensors."""
        return {**self.own_tensors(), **(self.adapter.tensors if self.adapter else {})}

    def own_tensors(self) -> Weights:
        """Return the parameters of the model, and the buffers that an update may replace."""
        return dict(self.model.named_parameters()) | saved_buffers(self.model)

    def _stage_adapter(self, adapter: Adapter, source: str) -> Staged:
        if self._layers:
            problem = "an adapter cannot be merged into weights in FP8: push merged weights, or use weight_dtype=auto"
            raise _rejection(source, problem)
        targets: Weights = dict(self.model.named_parameters())
        for name, (down, up, _) in adapter.layers.items():
            if name not in targets or targets[name].dim() != 2:
                problem = f"{name!r} is not a separate linear layer of this model: the adapter belongs to another model"
                raise _rejection(source, problem)
            self._check_shape(name, targets[name], [up.shape[0], down.shape[1]], source)
            for factor in (down, up):
                _check_type(name, factor, source)
            _check_ranges([(name, factor, torch.float32) for factor in (down, up)], source)
        for name in adapter.layers:
            if name not in self._base:
                self._base[name] = targets[name].detach().to("cpu", copy=True)
        pairs = []
        for name, base in self._base.items():
            value = base.to(targets[name].device)
            if name in adapter.layers:
                value = self._merge(name, value, *adapter.layers[name])
            pairs.append((targets[name], value))
        if pairs and pairs[0][0].is_cuda:
            torch.cuda.current_stream().synchronize()
        return Staged(pairs, adapter, is_base=False)

    def _merge(self, name: str, base: torch.Tensor, down: torch.Tensor, up: torch.Tensor, scale: float) -> torch.Tensor:
        down, up = self.shards.cut_factors(name, down, up)
        down, up = (t.to(base.device, torch.float32) for t in (down, up))
        return torch.addmm(base.float(), up, down, alpha=scale).to(base.dtype)

    def _check_shape(self, name: str, target: torch.Tensor, given: list[int], source: str) -> None:
        expected = list(self.shards.whole_shape(name, target.shape))
        if given != expected:
            raise _rejection(source, f"{name} has shape {given}, the model's is {expected}")


def saved_buffers(model: PreTrainedModel) -> Weights:
    """Return the floating-point buffers of a checkpoint, such as correction biases of routers."""
    saved = model.state_dict().keys()
    return {name: b for name, b in model.named_buffers() if name in saved and b.is_floating_point()}


def _rejection(source: str, problem: str) -> WeightUpdateError:
    return WeightUpdateError(f"{source}: {problem}. The old weights are still served")


def _check_type(name: str, value: torch.Tensor, source: str) -> None:
    if not value.is_floating_point():
        raise _rejection(source, f"{name} holds {value.dtype}, weights are floating-point numbers")


def _check_ranges(weights: list[tuple[str, torch.Tensor, torch.dtype]], source: str) -> None:
    """Reject non-finite weights. On the host it samples: a full scan costs as much as the copy."""
    for (name, _, dtype), peak in zip(weights, _peaks([value.detach() for _, value, _ in weights]), strict=True):
        # NaN fails this comparison too.
        if not peak <= torch.finfo(dtype).max:
            problem = f"{name} holds NaN, infinity or more than {dtype} can hold: the training has diverged"
            raise _rejection(source, problem)


def _peaks(values: list[torch.Tensor]) -> list[float]:
    """Return the largest absolute value of each tensor; on a GPU by one kernel for all."""
    if not all(value.is_cuda for value in values):
        flat = (value.flatten() for value in values)
        values = [value[:: 1 + (value.numel() >> 14)] for value in flat]
    some = [value if value.numel() else value.new_zeros(1) for value in values]
    return torch.stack(torch._foreach_norm(some, torch.inf)).tolist()
