"""Checks the JSON files of a Hugging Face model folder before anything is loaded.

`check_model(path)` needs neither torch nor transformers, so launchers can call it before they start a process. The
trainer and the embedded server call it too (through `utils.decoders.read_model_config`), so both reject the same
folders.
"""

import ast
import importlib.util
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

from arealite.api.alloc_mode import ParallelStrategy
from arealite.api.errors import AllocationError, ConfigError

_AGAIN = "copy or download the model again"
# Sizes, under the names of most families and those of GPT-2. A few families have one number per layer.
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "n_embd", "n_head", "n_layer", "n_positions",
)  # fmt: skip
_NUMBERS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "rope_theta", "initializer_range")
_LENGTHS = ("max_position_embeddings", "n_positions")
_DTYPES = ("auto", "float64", "float32", "float16", "bfloat16", "float", "double", "half")
# Families that carry a state along the sequence instead of attending. Engines ask the model class; this needs no
# import.
_RECURRENT = ("mamba", "mamba2", "falcon_mamba", "rwkv", "recurrent_gemma", "xlstm")
_TABLES = ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES")

# Families whose models are an embedding, layers, a norm and a head, and nothing else.
STAGED_FAMILIES = (
    "cohere", "cohere2", "deepseek_v3", "exaone4", "gemma", "gemma3_text", "glm4", "gpt_oss", "granite", "llama",
    "mistral", "mixtral", "olmo2", "olmo3", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3", "starcoder2",
)  # fmt: skip

# Families that cap attention logits unless their config.json says otherwise.
_CAPPED = ("gemma2", "vaultgemma")
# Keys of the number of routed experts of a layer.
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def check_model(path: str | Path) -> None:
    """Raise `ConfigError` if the model in `path` is damaged or cannot be trained or served.

    Reads JSON only. A hub name that is not a local folder passes: what it holds is not known yet.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        if folder.exists() or str(path).startswith(("/", "./", "../", "~")) or str(path).count("/") > 1:
            raise ConfigError(f"model path {str(path)!r} does not exist or is a file: give a folder or a hub name")
        return
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} is not a model folder: it has no config.json")
    config = _read_object(folder / "config.json")
    _check_family(config, folder)
    _check_parts(config, folder)
    if (folder / "generation_config.json").exists():
        _read_object(folder / "generation_config.json")
    if (folder / "model.safetensors.index.json").exists():
        _check_index(folder)


def check_sizes(folder: Path) -> None:
    """Raise `ConfigError` if a folder's config.json is damaged. Its family may be any."""
    _check_parts(_read_object(folder / "config.json"), folder)


def check_stages(family: str, num_layers: int | None, num_stages: int) -> None:
    """Raise `AllocationError` if a model cannot be divided into so many pipeline stages."""
    if num_stages == 1:
        return
    if family not in STAGED_FAMILIES:
        raise AllocationError(
            f"model type {family!r} cannot be divided into {num_stages} pipeline stages; these can: "
            f"{', '.join(STAGED_FAMILIES)}. Use p1 and give those ranks to d, t or c"
        )
    if num_layers is not None and num_layers < num_stages:
        raise AllocationError(
            f"{num_stages} pipeline stages need as many layers, but the model has {num_layers}: use a smaller p, or "
            "pipeline_stages_per_rank=1"
        )


def check_experts(family: str, num_experts: int, layout: ParallelStrategy) -> None:
    """Raise `AllocationError` if the layout's expert groups cannot divide a model's experts."""
    expert, tensor = layout.expert, layout.tensor
    if expert == 1:
        return
    if num_experts == 0:
        raise AllocationError(f"{layout} divides experts over ranks, but model type {family!r} has none: leave out e")
    ranks = layout.data * layout.context
    if ranks % expert or (expert % layout.context and layout.context % expert):
        raise AllocationError(
            f"{layout}: the ranks of an expert group are ranks of c and d, so e must divide d·c ({ranks}), and be a "
            f"multiple or a divisor of c ({layout.context}): change e{expert}, or give those ranks to d"
        )
    if num_experts % (expert * tensor):
        raise AllocationError(
            f"{layout} divides the experts of a layer over e·t = {expert * tensor} ranks, but the model has "
            f"{num_experts}: e·t must be a divisor of it"
        )


def check_layout_of(path: str, layout: ParallelStrategy, stages_per_rank: int, in_low_bits: bool = False) -> None:
    """Check that ranks can train the model in a local folder; what a hub name holds is not known yet."""
    file = Path(path).expanduser() / "config.json"
    if file.is_file():
        config = _read_object(file)
        family = str(config.get("model_type"))
        if layout.pipeline > 1:
            check_stages(family, config.get("num_hidden_layers"), layout.pipeline * stages_per_rank)
        text = config.get("text_config", config)
        kind = str(text.get("model_type", family))
        reject_capped_attention(kind, text.get("attn_logit_softcapping", kind in _CAPPED))
        experts = next((text[key] for key in EXPERT_COUNTS if text.get(key)), 0)
        check_experts(family, experts, layout)
        reject_low_bit_experts(family, experts if in_low_bits else 0)


def reject_capped_attention(family: str, cap: float | None) -> None:
    if cap:
        raise ConfigError(
            f"model type {family!r} caps attention logits, but packed attention does not: train another model"
        )


def reject_low_bit_experts(family: str, num_experts: int) -> None:
    if num_experts:
        raise ConfigError(
            f"frozen_weight_dtype is for dense models, but model type {family!r} has {num_experts} experts in a layer: "
            "leave it out"
        )


def _read_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read ({error}): {_AGAIN}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file} holds {_kind(value)}, expected an object: {_AGAIN}")
    return value


def _kind(value: Any) -> str:
    names = {"NoneType": "null", "str": f"the text {value!r}", "list": "a list", "dict": "an object"}
    return names.get(type(value).__name__, repr(value))


def _check_family(config: dict[str, Any], folder: Path) -> None:
    family = config.get("model_type")
    if not isinstance(family, str):
        raise ConfigError(
            f"{folder}/config.json: model_type is {_kind(family)}, expected a name such as qwen2: {_AGAIN}"
        )
    known = _known_families()
    if config.get("is_encoder_decoder") or (known and family not in known):
        raise ConfigError(
            f"model type {family!r} in {folder} is not a causal language model of the installed transformers: use a "
            "decoder such as qwen2 or llama, or upgrade transformers if the model is new"
        )
    if family in _RECURRENT:
        raise ConfigError(
            f"model type {family!r} in {folder} carries a state along the sequence instead of attending: use another "
            "model, or serve it with sglang or vllm"
        )


@cache
def _known_families() -> frozenset[str]:
    """Model types that transformers has a decoder for; empty if they cannot be found.

    Read from its source, because importing the table imports torch and takes seconds.
    """
    spec = importlib.util.find_spec("transformers")
    file = Path(spec.origin or "").parent / "models/auto/modeling_auto.py" if spec else None
    if file is None or not file.is_file():
        return frozenset()
    names: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in _TABLES:
            pairs = [pair for pair in ast.walk(node.value) if isinstance(pair, ast.Tuple)]
            names |= {str(pair.elts[0].value) for pair in pairs if isinstance(pair.elts[0], ast.Constant)}
    return frozenset(names)


def _check_parts(config: dict[str, Any], folder: Path) -> None:
    text = config.get("text_config", config)
    for part in (config, text if isinstance(text, dict) else {}):
        _check_values(part, folder)


def _check_values(config: dict[str, Any], folder: Path) -> None:
    for key in _SIZES:
        value = config.get(key)
        for number in value if isinstance(value, list) else [value]:
            if number is not None and (type(number) is not int or number < 1):
                raise ConfigError(
                    f"{folder}/config.json: {key} is {_kind(number)}, expected a positive integer: {_AGAIN}"
                )
    for key in _NUMBERS:
        value = config.get(key)
        if value is not None and (type(value) not in (int, float) or not math.isfinite(value)):
            raise ConfigError(f"{folder}/config.json: {key} is {_kind(value)}, expected a number: {_AGAIN}")
    for key in _LENGTHS:
        if config.get(key) == 1:
            raise ConfigError(f"{folder}/config.json: {key} is 1, but a prompt and its continuation need 2 tokens")
    for key in ("dtype", "torch_dtype"):
        value = config.get(key)
        if isinstance(value, str) and value.removeprefix("torch.") not in _DTYPES:
            raise ConfigError(f"{folder}/config.json: {key} is {value!r}, expected one of {', '.join(_DTYPES[1:5])}")


def _check_index(folder: Path) -> None:
    file = folder / "model.safetensors.index.json"
    files = _read_object(file).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise ConfigError(f"{file} has no weight_map from tensor to file names: {_AGAIN}")
    missing = sorted(name for name in set(files.values()) if not (folder / name).is_file())
    # A folder without any weights is fine for init_from_scratch; one with some of them is an incomplete copy.
    if 0 < len(missing) < len(set(files.values())):
        raise ConfigError(f"{file} names {len(missing)} file(s) that are not there, first {missing[0]!r}: {_AGAIN}")
