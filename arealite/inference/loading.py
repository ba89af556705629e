"""Loads a Hugging Face decoder for inference: config, weights, tokenizer, sizes for the KV cache.

Called once per engine and rank. User errors (no such folder, a model without the attention interface, an unknown
dtype) are a `ConfigError` before the KV cache is allocated.
"""

import contextlib
import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from arealite.api.cli_args import ServerConfig
from arealite.api.errors import ConfigError
from arealite.inference.attention import SHAPES_NAME, use_attention
from arealite.inference.fp8 import check_device
from arealite.inference.sharding import GROUP, Shards, TensorGroup, check_parallel, shard_model
from arealite.inference.vision import check_served, is_served
from arealite.utils.decoders import (
    check_decoder,
    check_interface,
    load_decoder,
    model_errors,
    original_length,
    read_model_config,
)
from arealite.utils.vision import VisionProcessor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class ModelShape:
    """The sizes that the KV cache and the checks of requests need."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    eos_ids: tuple[int, ...]

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values of one token in all layers."""
        scale_bytes = 4 if dtype.itemsize == 1 else 0  # every head has a scale in FP8
        return 2 * self.num_layers * self.num_kv_heads * (self.head_dim * dtype.itemsize + scale_bytes)


def choose_device(config: ServerConfig, rank: int = 0) -> torch.device:
    """The device of a rank."""
    count, name = torch.cuda.device_count(), config.device
    if name == "auto":
        name = "cuda" if count else "cpu"
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"device is {name!r}; use auto, cpu or cuda")
    if name == "cuda" and count < config.tensor_parallel:
        seen = f"{count} GPUs" if count else "no GPU"
        raise ConfigError(
            f"device=cuda with tensor_parallel={config.tensor_parallel}, but torch sees {seen} here: use fewer ranks, "
            "or device=cpu"
        )
    return torch.device(name, rank) if name == "cuda" else torch.device(name)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The type of weights and KV cache; `auto` is bfloat16 on CUDA, float32 on the CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise ConfigError(f"dtype is {name!r}; use auto or one of {', '.join(DTYPES)}")
    return DTYPES[name]


def choose_cache_dtype(config: ServerConfig, dtype: torch.dtype) -> torch.dtype:
    """The type of the KV cache on CUDA, for weights of type `dtype`."""
    return torch.float8_e4m3fn if config.kv_cache_dtype == "fp8" else dtype


def choose_block_size(config: ServerConfig) -> int:
    """Tokens per block of the KV cache. In FP8 larger ones are read faster."""
    return config.block_size or (64 if config.kv_cache_dtype == "fp8" else 16)


def read_config(config: ServerConfig) -> PreTrainedConfig:
    """Read the model's config and check that it can be served as configured."""
    if not config.model_path:
        raise ConfigError("model_path is empty: give a Hugging Face folder or hub name")
    choose_dtype(config.dtype, choose_device(config))
    check_device(config, choose_device(config))
    model_config = read_model_config(config.model_path)
    if type(model_config) not in AutoModelForCausalLM._model_mapping or is_served(model_config):
        check_served(model_config, config, choose_device(config))
    if config.tensor_parallel > 1:
        check_parallel(model_config, config.tensor_parallel)
    return model_config


def load_model(config: ServerConfig, group: TensorGroup | None = None) -> tuple[PreTrainedModel, Shards]:
    """Load this rank's part of the model onto its device, with attention through the paged KV cache."""
    model_config = read_config(config)
    device = choose_device(config, group.rank if group else 0)
    dtype = choose_dtype(config.dtype, device)
    if group is not None:
        return load_shards(config.model_path, model_config, dtype, device, group)
    auto_class = AutoModelForImageTextToText if is_served(model_config) else AutoModelForCausalLM
    model = load_decoder(auto_class, config.model_path, config=model_config, dtype=dtype)
    return prepare_model(_move(model, device)), Shards()


def load_shards(
    path: str, model_config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, group: TensorGroup
) -> tuple[PreTrainedModel, Shards]:
    """Load one rank of a tensor-parallel model; reads only its part of each tensor if possible."""
    with model_errors(path), _parameters_without_memory():
        model = AutoModelForCausalLM.from_config(copy.deepcopy(model_config), dtype=dtype)
    model.tie_weights()
    shards = shard_model(model, group)
    with model_errors(path):
        is_read = _read_shards(model, shards, path, device)
    if is_read:
        model.tie_weights()
        with contextlib.suppress(OSError):
            model.generation_config = GenerationConfig.from_pretrained(path)
    else:  # other names than the model's, or no safetensors: transformers converts them
        model = load_decoder(AutoModelForCausalLM, path, config=model_config, dtype=dtype)
        shards = shard_model(model, group)
    return prepare_model(_move(model, device)), shards


@contextlib.contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Put new parameters on the meta device. Buffers are computed as usual: no file holds them."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, None if parameter is None else nn.Parameter(parameter.to("meta"), False))

    nn.Module.register_parameter = register_on_meta  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def _read_shards(model: PreTrainedModel, shards: Shards, path: str, device: torch.device) -> bool:
    """Read this rank's part of every parameter. False: the files do not hold exactly these parameters."""
    files = _weight_files(path)
    targets = dict(model.named_parameters())
    is_quantized = getattr(model.config, "quantization_config", None) is not None
    if is_quantized or not targets.keys() <= files.keys():
        return False
    with contextlib.ExitStack() as stack:
        opened = {file: stack.enter_context(safe_open(file, "pt")) for file in set(files.values())}
        for name, target in targets.items():
            stored = opened[files[name]].get_slice(name)
            if stored.get_shape() != list(shards.whole_shape(name, target.shape)):
                return False
            # A copy: what is read may be a view of the whole file in memory.
            value = torch.empty(target.shape, dtype=target.dtype, device=device).copy_(shards.read(name, stored))
            module, _, key = name.rpartition(".")
            setattr(model.get_submodule(module), key, nn.Parameter(value, False))
    return True


def _weight_files(path: str) -> dict[str, str]:
    """The safetensors file of each tensor; empty if the model has none."""
    try:
        single = str(cached_file(path, SAFE_WEIGHTS_NAME))
        with safe_open(single, "pt") as file:
            return dict.fromkeys(file.keys(), single)
    except OSError:
        pass
    try:
        index = Path(str(cached_file(path, SAFE_WEIGHTS_INDEX_NAME)))
        found = json.loads(index.read_text())["weight_map"]
        return {name: str(cached_file(path, file)) for name, file in found.items()}
    except OSError:
        return {}


def _move(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    return model.to(device)  # pyright: ignore[reportArgumentType]


def prepare_model(model: PreTrainedModel) -> PreTrainedModel:
    """Route a model's attention through the paged KV cache."""
    check_decoder(model.config)
    check_interface(type(model))
    use_attention(model)
    return model.eval().requires_grad_(False)


def shape_of(model: PreTrainedModel, context_length: int | None) -> ModelShape:
    """Sizes of a loaded model; `context_length` may lower the model's own."""
    own = int(model.config.get_text_config().max_position_embeddings)
    own = min(own, original_length(model.config) or own)
    if own < 2:
        raise ConfigError(f"max_position_embeddings is {own}: a prompt and its continuation need 2")
    if context_length is not None and not 2 <= context_length <= own:
        raise ConfigError(f"context_length={context_length} must be between 2 and the model's {own}")
    num_layers, num_kv_heads, head_dim = _cache_shape(model)
    head: Any = model.get_output_embeddings()
    vocab_size = head.weight.shape[0]
    return ModelShape(
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        context_length=context_length or own,
        eos_ids=_eos_ids(model, vocab_size),
    )


def _cache_shape(model: PreTrainedModel) -> tuple[int, int, int]:
    """Number of layers, KV heads and head size, from a forward pass: families name them in many ways."""
    group: TensorGroup | None = getattr(model, GROUP, None)
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    use_attention(model, SHAPES_NAME)
    with torch.inference_mode(), contextlib.nullcontext() if group is None else group.alone():
        model.base_model(input_ids=token, position_ids=token, use_cache=False)
    use_attention(model)
    modules: Any = [module for module in model.modules() if hasattr(module, "kv_shape")]
    seen = {module.layer_idx: module.kv_shape for module in modules}
    heads = {heads for heads, _ in seen.values()}
    if len(heads) != 1 or sorted(seen) != list(range(len(seen))):
        raise ConfigError(
            f"{type(model).__name__} attends in layers {sorted(seen)} with {sorted(heads)} KV heads; the embedded "
            "engine needs the same number in every layer: serve it with sglang or vllm"
        )
    return len(seen), heads.pop(), max(dim for _, dim in seen.values())


def _eos_ids(model: PreTrainedModel, vocab_size: int) -> tuple[int, ...]:
    """The end-of-text tokens, without those that are outside the vocabulary."""
    generation = getattr(model, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    if eos is None:
        eos = getattr(model.config.get_text_config(), "eos_token_id", None)
    ids = eos if isinstance(eos, list | tuple) else (eos,)
    return tuple(token for token in ids if isinstance(token, int) and 0 <= token < vocab_size)


def load_processor(path: str, model_config: PreTrainedConfig) -> VisionProcessor | None:
    """Load the image processor of a vision-language model; None if there is none."""
    files = ("preprocessor_config.json", "processor_config.json")
    is_complete = not Path(path).is_dir() or any(Path(path, name).exists() for name in files)
    return VisionProcessor.load(path) if is_served(model_config) and is_complete else None


def load_tokenizer(path: str) -> Any | None:
    """Load the model's tokenizer; None if the folder has none, so that requests must use token ids."""
    folder = Path(path)
    if folder.is_dir() and not any((folder / name).exists() for name in _TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ConfigError(
            f"cannot load the tokenizer in {path}: {error!r}. Copy or download it again, or remove its files to serve "
            "token ids only"
        ) from error
