"""Sizes of models by name (`7B`), by hub name or by folder: `find_model`.

Named sizes are those of the Qwen2.5 and Qwen3 families, so that a plan needs no download.
"""

from pathlib import Path

from arealite.api.errors import ConfigError
from arealite.utils.memory.model_size import ModelSize, read_model_size
from arealite.utils.model_config import check_sizes

_VOCAB = 151_936


def _shape(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, is_tied: bool, head_dim: int = 128
) -> ModelSize:
    config = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": _VOCAB,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": is_tied,
    }
    return ModelSize.of(config)


MODELS = {
    "0.5B": _shape(896, 4864, 24, 14, 2, True, 64),
    "1.5B": _shape(1536, 8960, 28, 12, 2, True),
    "3B": _shape(2048, 11008, 36, 16, 2, True),
    "4B": _shape(2560, 9728, 36, 32, 8, True),
    "7B": _shape(3584, 18944, 28, 28, 4, False),
    "8B": _shape(4096, 12288, 36, 32, 8, False),
    "14B": _shape(5120, 13824, 48, 40, 8, False),
    "32B": _shape(5120, 27648, 64, 40, 8, False),
    "72B": _shape(8192, 29568, 80, 64, 8, False),
}


def find_model(name: str) -> ModelSize:
    """Return the sizes of a model: a named size, a folder with config.json, or a hub name in the cache."""
    named = MODELS.get(name.upper())
    if named is not None:
        return named
    folder = Path(name).expanduser()
    if (folder / "config.json").is_file():
        check_sizes(folder)
    size = read_model_size(name)
    if size is None:
        where = "its config.json leaves sizes out" if folder.is_dir() else "there is no such folder or cached model"
        raise ConfigError(f"the sizes of {name!r} are not known: {where}. Named sizes: {', '.join(MODELS)}")
    return size
