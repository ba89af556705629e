"""Requests to the engine, their sampling parameters, sequences and outputs.

A request asks for `n` continuations of one prompt; each is a sequence that is scheduled on its own. Once submitted,
only the engine's thread changes requests and sequences.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from arealite.api.errors import RequestError
from arealite.inference.grammar import Constraint, Grammar
from arealite.inference.vision import PromptImages
from arealite.protocol.detokenizer import token_before

MIN_TEMPERATURE = 1e-5  # logits divided by less would overflow
MAX_SAMPLES = 4096
MAX_STOP_IDS = 64
MAX_BIAS = 1024  # entries of a logit_bias
MAX_STOPS, MAX_STOP_LENGTH = 256, 1024  # the engine's thread searches for stop strings
_PREFIX, _COUNTER = secrets.token_hex(6), itertools.count()  # for requests without an id

_NO_LOGPROBS = np.zeros(0, np.float32)


@dataclass(slots=True)
class SamplingParams:
    """Parameters with SGLang's names. `temperature=0` is greedy; `top_k` 0 or -1 keeps all tokens."""

    n: int = 1
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    sampling_seed: int | None = None
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> SamplingParams:
        """Make parameters from JSON; an unknown name or a wrong type is a `RequestError`."""
        if not isinstance(values, dict):
            raise RequestError(f"sampling_params must be an object, got {type(values).__name__}")
        if not values.keys() <= _KNOWN:
            unknown = min(values.keys() - _KNOWN)
            raise RequestError(f"unknown sampling parameter {unknown!r}; known: {', '.join(sorted(_KNOWN))}")
        present = {name: value for name, value in values.items() if value is not None}
        if isinstance(present.get("stop"), str):
            present["stop"] = [present["stop"]]
        if isinstance(present.get("logit_bias"), dict):
            present["logit_bias"] = _int_keys(present["logit_bias"])
        return cls(**{name: _typed(name, value) for name, value in present.items()})

    def check(self, vocab_size: int, eos_ids: tuple[int, ...] = ()) -> None:
        """Raise `RequestError` for values out of range, or if no token is left to sample."""
        limits = (
            ("n", 1, MAX_SAMPLES),
            ("max_new_tokens", 1, 2**31 - 1),
            ("min_new_tokens", 0, self.max_new_tokens),
            ("temperature", 0.0, 1e4),
            ("top_p", 1e-9, 1.0),
            ("top_k", -1, 2**31 - 1),
            ("min_p", 0.0, 1.0),
            ("frequency_penalty", -1e3, 1e3),
            ("presence_penalty", -1e3, 1e3),
            ("repetition_penalty", 1e-3, 1e3),
        )
        for name, low, high in limits:
            value = getattr(self, name)
            if not low <= value <= high:  # also rejects NaN
                raise RequestError(f"{name} must be between {low} and {high}, got {value}")
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise RequestError(f"temperature must be 0 (greedy) or at least {MIN_TEMPERATURE}, got {self.temperature}")
        if self.sampling_seed is not None and not -(2**63) <= self.sampling_seed < 2**64:
            raise RequestError(f"sampling_seed must fit in 64 bits, got {self.sampling_seed}")
        if len(self.stop_token_ids) > MAX_STOP_IDS:
            raise RequestError(f"at most {MAX_STOP_IDS} stop_token_ids, got {len(self.stop_token_ids)}")
        if len(self.logit_bias) > MAX_BIAS:
            raise RequestError(f"at most {MAX_BIAS} entries of logit_bias, got {len(self.logit_bias)}")
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias)):
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise RequestError(f"{name} holds token {token}, outside the vocabulary of {vocab_size}")
        for token, bias in self.logit_bias.items():
            if not (abs(bias) <= 1e6 or bias == -math.inf):
                raise RequestError(f"logit_bias of token {token} is {bias}; use -1e6 to 1e6, or -inf to forbid it")
        forbidden = {token for token, bias in self.logit_bias.items() if bias == -math.inf}
        if self.min_new_tokens:
            forbidden |= {*eos_ids, *self.stop_token_ids}
        if len(forbidden) >= vocab_size:
            raise RequestError("logit_bias and the smallest number of tokens forbid every token: allow at least one")
        if len(self.stop) > MAX_STOPS:
            raise RequestError(f"at most {MAX_STOPS} stop strings, got {len(self.stop)}")
        if any(not 1 <= len(text) <= MAX_STOP_LENGTH for text in self.stop):
            raise RequestError(f"stop strings must have 1 to {MAX_STOP_LENGTH} characters")

    @property
    def truncates(self) -> bool:
        """Whether top-p, top-k or min-p exclude tokens."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def penalizes(self) -> bool:
        """Whether earlier tokens change the logits."""
        return bool(self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1)


_KNOWN = {f.name for f in fields(SamplingParams)}
_TYPES = {
    int: ("n", "max_new_tokens", "min_new_tokens", "top_k", "sampling_seed"),
    float: ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
    bool: ("ignore_eos", "skip_special_tokens"),
}
_TYPE_OF = {name: kind for kind, names in _TYPES.items() for name in names}
_ITEM_OF = {"stop": str, "stop_token_ids": int}


def _typed(name: str, value: Any) -> Any:
    kind, item = _TYPE_OF.get(name), _ITEM_OF.get(name)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError as error:
            raise RequestError(f"{name} is too large a number") from error
    if kind is not None and type(value) is not kind:
        raise RequestError(f"{name} must be {kind.__name__}, got {value!r}")
    if item is not None and not (isinstance(value, list) and all(type(entry) is item for entry in value)):
        raise RequestError(f"{name} must be a list of {item.__name__}, got {value!r}")
    if name == "logit_bias" and not isinstance(value, dict):
        raise RequestError(f"logit_bias must map token ids to numbers, got {value!r}")
    return value


def _int_keys(bias: dict[Any, Any]) -> dict[int, float]:
    try:
        for token, value in bias.items():
            if not (str(token).isdecimal() and type(value) in (int, float)):
                raise ValueError(f"got {token!r:.60}: {value!r:.60}")
        return {int(token): float(value) for token, value in bias.items()}
    except (ValueError, OverflowError) as error:
        raise RequestError(f"logit_bias must map token ids to numbers: {error}") from error


@dataclass(slots=True)
class SampleOutput:
    """One finished continuation. `version_spans` are `(version, start, end)` over the sampled tokens."""

    token_ids: list[int]
    logprobs: list[float]
    raw_logprobs: list[float] | None
    version_spans: list[tuple[int, int, int]]
    finish_reason: Any  # a dict; None in the partial outputs of a stream
    cached_tokens: int
    text: str | None = None
    # The likeliest tokens in place of each token, with their log-probs; on request only.
    top_logprobs: list[list[tuple[int, float]]] | None = None
    # Experts of each token but the last, [prompt + sampled - 1, layers * experts of a token]; on request only.
    routed_experts: np.ndarray | None = None


def resolve(future: Future, value: Any) -> None:
    """Set the result or exception of a future that may have been cancelled."""
    with contextlib.suppress(InvalidStateError):
        if isinstance(value, BaseException):
            future.set_exception(value)
        else:
            future.set_result(value)


class Request:
    """One prompt and its `n` sequences. `future` gets the list of outputs when the last one finishes."""

    def __init__(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        rid: str | None = None,
        *,
        want_text: bool = False,
        want_raw_logprobs: bool = False,
        want_routing: bool = False,
        num_top_logprobs: int = 0,
        on_progress: Callable[[int, int, float, str, list[tuple[int, float]]], None] | None = None,
        images: PromptImages | None = None,
        grammar: Grammar | None = None,
    ):
        self.rid = rid or f"{_PREFIX}-{next(_COUNTER)}"
        self.prompt = np.asarray(prompt_ids, dtype=np.int32)
        self.params = params
        self.want_text = want_text or bool(params.stop)
        self.want_raw_logprobs = want_raw_logprobs
        self.want_routing = want_routing
        self.num_top_logprobs = num_top_logprobs
        # Special tokens that are left out of the text; None: all or none, as the parameters say.
        self.hidden_tokens: frozenset[int] | None = None
        # What stands before the text when it is decoded; see `continue_prompt`.
        self.token_before: int | None = None
        self.on_progress = on_progress
        self.images = images
        self.grammar = grammar
        self.salt = None if images is None else images.salt
        self.future: Future[list[SampleOutput]] = Future()
        self.arrived_s = time.monotonic()
        if not 1 <= params.n <= MAX_SAMPLES:  # before the sequences are made
            raise RequestError(f"n must be between 1 and {MAX_SAMPLES}, got {params.n}")
        self.sequences = [Sequence(self, index) for index in range(params.n)]
        self.num_unfinished = params.n
        self.num_unstarted = params.n  # sequences[-num_unstarted:] have never run

    def continue_prompt(self, tokenizer: Any | None) -> None:
        """Decode the output as text behind the prompt, not as one that begins (`detokenizer.token_before`)."""
        self.token_before = token_before(tokenizer, self.prompt[-1:].tolist())

    def to_json(self) -> dict[str, Any]:
        """What another rank needs to schedule and sample this request."""
        return {
            "prompt_ids": self.prompt.tolist(),
            "params": asdict(self.params),
            "rid": self.rid,
            "want_raw_logprobs": self.want_raw_logprobs,
            "want_routing": self.want_routing,
            "num_top_logprobs": self.num_top_logprobs,
        }

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Request:
        """The inverse of `to_json`."""
        return cls(**{**fields, "params": SamplingParams.from_json(fields["params"])})

    @property
    def watched(self) -> bool:
        """Whether the host handles every single token (streaming, stop strings)."""
        return self.on_progress is not None or bool(self.params.stop)


@dataclass(slots=True, eq=False)
class Sequence:
    """One continuation. `slot` is its row in the slot table while it runs, -1 otherwise."""

    request: Request
    index: int
    seed: int = 0
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0  # leading tokens whose KV is in `blocks`
    cached_tokens: int = 0
    num_registered: int = 0  # leading blocks in the prefix cache
    cache_parent: int = 0
    pool_epoch: int = -1
    saved_tokens: np.ndarray | None = None  # of a preempted sequence
    uses_prefix_cache: bool = True  # False: computes all of its keys and values, under the current weights
    saved_logprobs: np.ndarray = field(default_factory=lambda: _NO_LOGPROBS)
    saved_raw: np.ndarray = field(default_factory=lambda: _NO_LOGPROBS)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    version_starts: list[tuple[int, int]] = field(default_factory=list)  # (first sampled token, version)
    finish_reason: dict[str, Any] = field(default_factory=dict)
    output: SampleOutput | None = None
    detokenizer: Any = None
    constraint: Constraint | None = None  # of the request's grammar

    def mark_version(self, version: int, num_sampled: int) -> None:
        """Tokens from `num_sampled` on are sampled under `version`."""
        if self.version_starts and self.version_starts[-1][0] == num_sampled:
            self.version_starts.pop()
        if not self.version_starts or self.version_starts[-1][1] != version:
            self.version_starts.append((num_sampled, version))

    def version_spans(self, num_sampled: int) -> list[tuple[int, int, int]]:
        """`(version, start, end)` over the sampled tokens."""
        if len(self.version_starts) == 1:
            start, version = self.version_starts[0]
            return [(version, start, num_sampled)] if num_sampled > start else []
        ends = [start for start, _ in self.version_starts[1:]] + [num_sampled]
        spans = zip(self.version_starts, ends, strict=True)
        return [(version, start, end) for (start, version), end in spans if end > start]
