"""A model's tokenizer, or one error that says why there is none.

Scripts and ready loops call `load_tokenizer(config.tokenizer_path or config.actor.path)`.
"""

from __future__ import annotations

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from arealite.api.errors import ConfigError


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """From a local folder or a hub name."""
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"cannot load a tokenizer from {path}: give a folder that holds one (tokenizer.json and tokenizer_config.json) or a "
            f"hub name as tokenizer_path=…, or as the model's path. transformers says: {reason}"
        ) from error
