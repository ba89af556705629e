"""Data that is passed between rooms: plain dataclasses and tensors.

A training batch is a `dict[str, torch.Tensor]` and nothing else:
  padded form  `[B, T]`, right-padded, with `attention_mask`;
  packed form  `[N]` with `cu_seqlens [B + 1]` and `max_seqlen`.
Keys: `input_ids`, `attention_mask`, `loss_mask` (1 on trained tokens), `logprobs` (of the policy that sampled),
`versions` (weight version per token, -1 on tokens that were not generated), `rewards [B]`, `group_ids [B]`, `truncated
[B]`; later `prox_logp`, `ref_logp`, `values`, `final_values [B]`, `advantages`, `returns`, `train_logp`. Index `t`
always refers to token `t`: its log-prob is that of token `t` given the tokens before it. Columns `stats/NAME [B]` are
numbers that workflows report, NaN where a row has none.
`routed_experts [B, T, L · K]`: the K experts that a token took in each of L layers on the server, `NO_EXPERT` on tokens
without a record.
Optional keys, for samples of several rows (the branches of an agent's session) and rewards of turns: `sample_ids [B]`,
the sample of its group that a row belongs to (without it every row is a sample), and `token_rewards [B, T]`, the return
of the turn that sampled each token. All rows of a sample have its reward in `rewards`.
"""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from arealite.api.cli_args import GenerationHyperparameters

Batch = dict[str, torch.Tensor]
ROUTED_EXPERTS = "routed_experts"
# The image set of each row, -1 for none.
IMAGE_INDEX = "image_index"
# Hashes of the encoded images of each set `[I, K]`, 0 for an image that is not kept, and the bytes of those that are.
IMAGE_NAMES, IMAGE_FILES = "image_names", "image_files"
# The index of an expert that marks a token without a record: all bits are 1. No expert has it.
NO_EXPERT = {"uint8": 255, "int16": -1}
# The columns of a batch with the statistics of workflows begin with it.
STATS_PREFIX = "stats/"
# Statistics of a step by name, reduced over all ranks.
Stats = dict[str, float]
StopReason = Literal["stop", "length", "abort"]


class Stat(NamedTuple):
    """One statistic as a loss reports it: reduced over micro-batches and ranks as Σtotal / Σweight.

    A key that ends in `/max` or `/min` is reduced by maximum or minimum of `total` instead.
    """

    total: torch.Tensor
    weight: torch.Tensor | float = 1.0


# Called with the sample, the position of the first token in its answer, tokens and their log-probs. An interruption may
# take tokens back: then the position is that of a token that was reported before.
OnTokens = Callable[[int, int, list[int], list[float]], None]


_PROCESS, _NUMBERS = uuid.uuid4().hex[:16], itertools.count()


def _new_rid() -> str:
    """Return an id that no other request has; a forked process has the same prefix and another pid."""
    return f"{_PROCESS}-{os.getpid()}-{next(_NUMBERS)}"


@dataclass
class ModelRequest:
    """A request to continue `input_ids`. `seed` makes its sampling reproducible.

    `images` are encoded (PNG, JPEG, …). Tokens `start .. end` of `input_ids` stand for an image, as many as the model's
    processor makes of it; `image_spans` has these two numbers of each image (see `utils.vision.VisionProcessor`).
    Requests with the same `metadata["session"]` go to the same server, which has the tokens they share, while that
    server is healthy and not much busier than others. `on_tokens` is called on the event loop while tokens are
    generated, by engines and servers that can tell; the response has all tokens in any case.
    """

    input_ids: list[int]
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    rid: str = field(default_factory=_new_rid)
    seed: int | None = None
    images: list[bytes] = field(default_factory=list[bytes])
    image_spans: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    on_tokens: OnTokens | None = None


@dataclass
class ModelResponse:
    """Generated tokens: each `output_*` list has one entry per token.

    `routed_experts [tokens, L · K]`, with `rollout.routing_replay`: the experts of input and output tokens from the
    first one on. The last token has none, because nothing was computed from it.
    """

    input_tokens: list[int]
    output_tokens: list[int]
    output_logprobs: list[float]
    output_versions: list[int]
    stop_reason: StopReason
    num_interruptions: int = 0
    routed_experts: np.ndarray | None = None

    @property
    def truncated(self) -> bool:
        return self.stop_reason != "stop"


def count_possible_stop(stop: list[str]) -> int:
    """Return how many last tokens of an answer may begin a stop string, without all of it.

    Counted in bytes: many vocabularies have several tokens for one character.
    """
    return max((len(word.encode(errors="surrogatepass")) for word in stop), default=1) - 1


def extend_record(known: np.ndarray | None, new: np.ndarray | None) -> np.ndarray | None:
    """Append the rows of `new` that `known` does not have; both are experts from the first token on.

    A token that is computed again, for a later turn or on another server, keeps the experts it took first.
    """
    if known is None or new is None:
        return new if known is None else known
    return np.concatenate([known, new[len(known) :]])


@dataclass(frozen=True)
class WeightUpdateMeta:
    """How one version of the weights goes from the trainer to the servers.

    `disk`: a Hugging Face folder at `path`. `shm`: a segment in shared memory named `path` (same machine).
    `broadcast`: tensors over a process group. `stream`: shards of all ranks, pulled by servers in a tree; `delta`: the
    same, but only elements that changed, where servers hold the version before. `is_adapter`: `path` is a PEFT folder
    that holds only the LoRA adapter (`disk`); servers apply it to the base model with which they started.
    """

    type: Literal["disk", "shm", "broadcast", "stream", "delta"]
    path: str = ""
    version: int = 0
    is_adapter: bool = False

    def with_version(self, version: int) -> WeightUpdateMeta:
        return replace(self, version=version)


@dataclass(frozen=True)
class SaveLoadMeta:
    """Where and what to save: `hf` is a folder for `from_pretrained`, `dcp` a sharded checkpoint.

    `keeps_schedule`: a load with the optimizer leaves the position in the learning-rate schedule as it is.
    """

    path: str
    weight_format: Literal["hf", "dcp"] = "hf"
    with_optim: bool = False
    keeps_schedule: bool = False


@dataclass(frozen=True)
class FinetuneSpec:
    """The length of a run, for schedulers and progress bars.

    `max_steps` ends it earlier. Without `total_train_epochs` there are as many epochs as `max_steps` needs, or one.
    """

    total_train_epochs: int | None
    dataset_size: int
    train_batch_size: int
    max_steps: int | None = None

    @property
    def steps_per_epoch(self) -> int:
        return self.dataset_size // self.train_batch_size

    @property
    def total_train_steps(self) -> int:
        if self.total_train_epochs is None:
            return self.steps_per_epoch if self.max_steps is None else self.max_steps
        steps = self.total_train_epochs * self.steps_per_epoch
        return steps if self.max_steps is None else min(steps, self.max_steps)


@dataclass(frozen=True)
class StepInfo:
    """The position of a step in the run. `global_step` counts from 0."""

    epoch: int
    epoch_step: int
    global_step: int
    steps_per_epoch: int

    @property
    def is_last_in_epoch(self) -> bool:
        return self.epoch_step == self.steps_per_epoch - 1
