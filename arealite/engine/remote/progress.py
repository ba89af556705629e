"""`Progress`: one sample that is being generated, over any number of interruptions."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from arealite.api.errors import RequestError
from arealite.api.io_struct import ModelRequest, ModelResponse, StopReason, count_possible_stop, extend_record
from arealite.utils import clock

_SAMPLING = ("temperature", "top_p", "min_p", "ignore_eos", "stop", "stop_token_ids")
_SAMPLING += ("frequency_penalty", "presence_penalty", "repetition_penalty")


@dataclass(slots=True)
class Piece:
    """Generated tokens, as one answer of a server brings them."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    stop_reason: StopReason
    # Experts of prompt and tokens, with `rollout.routing_replay`.
    routed_experts: np.ndarray | None = None


@dataclass(slots=True)
class Progress:
    """One sample that is being generated."""

    request: ModelRequest
    seed: int | None
    sample: int = 0
    num_sends: int = 0
    # Tokens that the last request asked for.
    num_asked: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stop_reason: StopReason = "abort"
    num_interruptions: int = 0
    routed_experts: np.ndarray | None = None
    began: float = field(default_factory=clock.monotonic)

    @property
    def num_left(self) -> int:
        """Tokens that the answer may still get."""
        return self.request.gconfig.max_new_tokens - len(self.tokens)

    def add(self, piece: Piece) -> None:
        """Append a piece and decide whether the answer is complete."""
        num_before = len(self.tokens)
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs
        self.versions += piece.versions
        self.stop_reason = piece.stop_reason
        if piece.stop_reason == "abort":
            self.num_interruptions += 1
            self._drop_possible_stop(num_before)
        self.routed_experts = extend_record(self.routed_experts, piece.routed_experts)
        if self.routed_experts is not None:
            # Of tokens that were dropped, others may be sampled.
            self.routed_experts = self.routed_experts[: len(self.request.input_ids) + len(self.tokens)]
        if self.num_left <= 0 and piece.stop_reason != "stop":
            self.stop_reason = "length"
        elif piece.stop_reason == "length" and len(piece.tokens) >= self.num_asked:
            # A segment is complete, the answer is not. (With fewer tokens the server's context is full.)
            self.stop_reason = "abort"

    def report(self, index: int, at: int, tokens: list[int], logprobs: list[float]) -> None:
        """Pass on tokens of the piece that is being generated, of the answer that is `index` further."""
        if self.request.on_tokens is not None and tokens:
            self.request.on_tokens(self.sample + index, len(self.tokens) + at, tokens, logprobs)

    def _drop_possible_stop(self, num_before: int) -> None:
        """Drop the last new tokens, which may begin a stop string: servers search only their own tokens.

        With a seed and the same weights the same tokens come again, so the stop string is certainly found.
        """
        kept = max(num_before, len(self.tokens) - count_possible_stop(self.request.gconfig.stop))
        del self.tokens[kept:], self.logprobs[kept:], self.versions[kept:]

    def next_rid(self) -> str:
        """Return a new request id for each attempt: a server may still hold the last one."""
        self.num_sends += 1
        return f"{self.request.rid}-{self.sample}-{self.num_sends}"

    def next_segment(self, segment_tokens: int) -> int:
        """Return how many tokens to ask for now."""
        g = self.request.gconfig
        # Stop strings and penalties look back at generated tokens: they need the answer in one piece.
        looks_back = g.stop or g.frequency_penalty or g.presence_penalty or g.repetition_penalty != 1
        self.num_asked = self.num_left if looks_back else min(self.num_left, segment_tokens)
        return self.num_asked

    def collapsed_ids(self) -> list[int]:
        """Return prompt and tokens with one placeholder for each image, for servers that expand it."""
        request = self.request
        if len(request.image_spans) != len(request.images):
            raise RequestError(
                f"a request has {len(request.images)} images and {len(request.image_spans)} image_spans: give the "
                "tokens of each image (VisionPrompt.spans)"
            )
        ids, at = [], 0
        for start, end in request.image_spans:
            ids += request.input_ids[at : start + 1]
            at = end
        return ids + request.input_ids[at:] + self.tokens

    def check_prompt(self, address: str, lengths: list[int]) -> None:
        """Raise `RequestError` if a server has read another number of prompt tokens than the trainer will."""
        expected = len(self.request.input_ids) + len(self.tokens)
        for length in lengths:
            if length != expected:
                raise RequestError(
                    f"{address} reads the prompt with its images as {length} tokens, but the model's processor makes "
                    f"{expected} of it here: use the same versions of transformers and the same processor files"
                )

    def sampling_params(self, num_samples: int) -> dict[str, Any]:
        """Return the sampling parameters that all kinds of servers know by the same names."""
        g = self.request.gconfig
        params = {"n": num_samples, "skip_special_tokens": False}
        # Empty lists are left out.
        return params | {name: value for name in _SAMPLING if (value := getattr(g, name)) != []}

    def min_new_tokens(self, max_new_tokens: int) -> int:
        """Return before how many tokens of the next piece no stop token may be sampled."""
        return min(max_new_tokens, max(0, self.request.gconfig.min_new_tokens - len(self.tokens)))

    def response(self) -> ModelResponse:
        prompt, reason = self.request.input_ids, self.stop_reason
        return ModelResponse(
            prompt, self.tokens, self.logprobs, self.versions, reason, self.num_interruptions, self.routed_experts
        )
