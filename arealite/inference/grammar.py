"""Constrained decoding: which tokens may come next so that the answer matches a JSON schema.

Uses llguidance (extra `structured`). The HTTP server makes a `Grammar` for a request; each of its sequences follows it
with a `Constraint` of its own, on the engine's thread. The runners mask the logits before they sample, so that the
reported log-probs are those of the masked distribution.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from arealite.api.errors import RequestError


class Grammar:
    """A JSON schema for one tokenizer. Raises `RequestError` for a schema that cannot be followed."""

    def __init__(self, tokenizer: Any, schema: dict[str, Any], vocab_size: int, eos_ids: tuple[int, ...]):
        try:
            from llguidance import LLMatcher
        except ModuleNotFoundError as error:
            raise RequestError("response_format needs llguidance: pip install 'arealite[structured]'") from error
        self.vocab_size, self.eos_ids = vocab_size, eos_ids
        if not eos_ids:
            raise RequestError("response_format needs a model with a stop token")
        try:
            tokens = _read_tokenizer(tokenizer, vocab_size, eos_ids)
            # Else a model may write white space forever.
            options: Any = {"whitespace_pattern": r"[ \n]?"}
            source = LLMatcher.grammar_from_json_schema(schema, overrides=options)
        except ValueError as error:
            raise RequestError(f"response_format cannot be used with this tokenizer or schema: {error}") from error
        self._start = LLMatcher(tokens, source, log_level=0)
        if self._start.is_error():
            raise RequestError(f"the JSON schema cannot be followed: {self._start.get_error()[:500]}")

    def begin(self) -> "Constraint":
        """Return the constraint of a new sequence."""
        return Constraint(self._start.deep_copy(), self)


class Constraint:
    """The position of one sequence in its grammar."""

    def __init__(self, matcher: Any, grammar: Grammar):
        self._matcher, self._grammar = matcher, grammar

    def allowed(self, draft: Sequence[int] = ()) -> np.ndarray:
        """Return which tokens may come next: a bit for each, the lowest first, uint32 [ceil(V / 32)].

        At the end of the grammar only stop tokens may. With a `draft`, the tokens after it; if the draft itself is
        forbidden, the result has no meaning.
        """
        matcher, eos_ids = self._matcher, self._grammar.eos_ids
        if draft:
            matcher = matcher.deep_copy()
            matcher.try_consume_tokens([token for token in draft if token not in eos_ids])
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint32)
        if not bits.any():
            # The grammar has ended or a limit is exceeded: the answer ends.
            bits = np.zeros_like(bits)
            for token in eos_ids:
                bits[token // 32] |= np.uint32(1 << token % 32)
        return bits

    def forbidden(self, draft: Sequence[int] = ()) -> np.ndarray:
        """Return which tokens may not come next, bool [V]; see `allowed`."""
        count = self._grammar.vocab_size
        return np.unpackbits(self.allowed(draft).view(np.uint8), count=count, bitorder="little") == 0

    def accept(self, token: int) -> None:
        """Move past a sampled token. Stop tokens end the grammar."""
        if token not in self._grammar.eos_ids:
            self._matcher.consume_token(token)


@lru_cache(4)
def _read_tokenizer(tokenizer: Any, vocab_size: int, eos_ids: tuple[int, ...]) -> Any:
    """Return llguidance's form of a tokenizer, which takes a second to make for a large vocabulary."""
    from llguidance.hf import from_tokenizer

    return from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(eos_ids))
