"""Load a model's tokenizer, with one clear error if that fails.

Scripts and trainers call `load_tokenizer(config.tokenizer_path or config.actor.path)`.
"""

from __future__ import annotations

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from arealite.api.errors import ConfigError


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a local folder or a hub name. Raises `ConfigError`."""
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"cannot load a tokenizer from {path}: give a folder that holds one (tokenizer.json and "
            "tokenizer_config.json) or a hub name as tokenizer_path=…, or as the model's path. transformers says: "
            f"{reason}"
        ) from error
