"""`Trajectory`: builds one row of a training batch turn by turn.

Workflows use it: they observe a prompt, add what the model sampled, observe what came back, and set a reward. Sampled
tokens are trained on with the log-probs and versions that the engine reported; observed ones are not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from arealite.api.chat import Message, encode_chat, encode_next
from arealite.api.cli_args import GenerationHyperparameters
from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import RequestError
from arealite.api.io_struct import (
    NO_EXPERT,
    ROUTED_EXPERTS,
    STATS_PREFIX,
    Batch,
    ModelRequest,
    ModelResponse,
    extend_record,
)
from arealite.api.reward_api import Score


class Trajectory:
    """The tokens of one sample. A tokenizer is needed to observe text or messages.

    `tools` and `template_kwargs` (such as `enable_thinking`) go to the tokenizer's chat template.
    """

    def __init__(self, tokenizer: Any = None, tools: list[Any] | None = None, **template_kwargs: Any):
        self.tokenizer, self.tools, self.template_kwargs = tokenizer, tools, template_kwargs
        self.ids: list[int] = []
        # Whether the last response was cut off; a workflow may set it, for an episode that reached its last turn.
        self.truncated = False
        self.stats: dict[str, float] = {}
        self._reward: float | None = None
        self._loss_mask: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        # Experts of the first tokens, [tokens, L · K].
        self._routed: np.ndarray | None = None
        # How many tokens were observed before the last response, and whether the last messages have no reply yet.
        self._reply_start = 0
        self._awaits_reply = False

    def observe(self, what: str | Message | Sequence[int] | Sequence[Message]) -> Trajectory:
        """Append tokens, text, a message or messages, which are not trained on; returns itself.

        Messages are rendered by the chat template. The first ones begin the conversation, later ones follow a reply.
        """
        if isinstance(what, str):
            # Only a prompt begins with the tokenizer's special tokens.
            ids = self._require_tokenizer().encode(what, add_special_tokens=not self.ids)
        elif isinstance(what, Mapping):
            ids = self._encode([what])
        elif len(what) and isinstance(what[0], Mapping):
            ids = self._encode(what)  # type: ignore[arg-type] - messages, by the first one
        else:
            ids = list(what)
        self._append(ids, 0, [0.0] * len(ids), [-1] * len(ids))  # type: ignore[arg-type] - tokens
        self._reply_start = len(self.ids)
        return self

    def request(self, gconfig: GenerationHyperparameters, seed: int | None = None) -> ModelRequest:
        """Return a request to continue the tokens so far."""
        if not self.ids:
            raise RequestError("the prompt is empty: observe something before the first request")
        return ModelRequest(list(self.ids), gconfig, seed=seed)

    def add(self, response: ModelResponse) -> Trajectory:
        """Append what the model sampled in answer to `request`; returns itself."""
        if response.input_tokens != self.ids:
            raise RequestError(
                f"a response to {len(response.input_tokens)} tokens cannot be added to a trajectory of "
                f"{len(self.ids)} tokens: it must be the answer to exactly these tokens"
            )
        self._append(response.output_tokens, 1, response.output_logprobs, response.output_versions)
        self._routed = extend_record(self._routed, response.routed_experts)
        self._awaits_reply = False
        self.truncated = response.truncated
        return self

    async def generate(
        self, engine: InferenceEngine, gconfig: GenerationHyperparameters, seed: int | None = None
    ) -> str:
        """Sample one turn, add it, and return its text without special tokens."""
        tokenizer = self._require_tokenizer()
        response = await engine.agenerate(self.request(gconfig, seed))
        self.add(response)
        return tokenizer.decode(response.output_tokens, skip_special_tokens=True)

    def reward(self, value: float) -> Trajectory:
        """Set the reward of the whole trajectory; its parts, if it has any, become `stats`. Returns itself."""
        self._reward = value
        if isinstance(value, Score):
            self.stats |= value.parts
        return self

    def stat(self, name: str, value: float) -> Trajectory:
        """Report a number of your own, shown as `rollout/<name>`, the mean over a batch; returns itself."""
        self.stats[name] = value
        return self

    def to_batch(self) -> Batch:
        """Return a batch of this one row."""
        return Trajectory.join([self])

    @staticmethod
    def join(trajectories: Sequence[Trajectory]) -> Batch:
        """Return a group of trajectories as one padded batch, as a workflow returns it."""
        if not trajectories:
            raise ValueError("Trajectory.join needs at least one trajectory")
        rewards = [t._reward for t in trajectories]
        if None in rewards:
            raise ValueError(f"trajectory {rewards.index(None)} of {len(rewards)} has no reward: call reward(value)")
        shape = len(trajectories), max(len(t.ids) for t in trajectories)

        def pad(rows: list[list[Any]], value: float, dtype: type) -> torch.Tensor:
            # NumPy takes lists several times as fast as torch.
            padded = np.full(shape, value, dtype)
            for i, row in enumerate(rows):
                padded[i, : len(row)] = row
            return torch.from_numpy(padded)

        batch = {
            "input_ids": pad([t.ids for t in trajectories], 0, np.int64),
            "attention_mask": pad([[1] * len(t.ids) for t in trajectories], 0, np.int64),
            "loss_mask": pad([t._loss_mask for t in trajectories], 0, np.int64),
            "logprobs": pad([t._logprobs for t in trajectories], 0.0, np.float32),
            "versions": pad([t._versions for t in trajectories], -1, np.int64),
            "rewards": torch.tensor(rewards, dtype=torch.float32),
            "truncated": torch.tensor([t.truncated for t in trajectories]),
        }
        if any(t._routed is not None for t in trajectories):
            batch[ROUTED_EXPERTS] = torch.from_numpy(join_records([t._routed for t in trajectories], shape[1]))
        for name in dict.fromkeys(name for t in trajectories for name in t.stats):
            values = [t.stats.get(name, math.nan) for t in trajectories]
            batch[STATS_PREFIX + name] = torch.tensor(values, dtype=torch.float32)
        return batch

    def _append(self, ids: list[int], mask: int, logprobs: list[float], versions: list[int]) -> None:
        if not len(ids) == len(logprobs) == len(versions):
            raise RequestError(
                f"a response has {len(ids)} tokens, {len(logprobs)} log-probs and {len(versions)} versions; expected "
                "one of each for every token"
            )
        self.ids += ids
        self._loss_mask += [mask] * len(ids)
        self._logprobs += logprobs
        self._versions += versions

    def _encode(self, messages: Sequence[Any]) -> list[int]:
        tokenizer = self._require_tokenizer()
        if self._awaits_reply:
            raise RequestError("messages were observed twice without a reply in between: observe all of them at once")
        self._awaits_reply = True
        if not self.ids:
            return encode_chat(tokenizer, messages, self.tools, **self.template_kwargs)
        sampled = self.ids[self._reply_start :]
        return encode_next(tokenizer, messages, self.tools, sampled=sampled, **self.template_kwargs)

    def _require_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise RequestError("text and messages need a tokenizer: Trajectory(tokenizer)")
        return self.tokenizer


def join_records(records: Sequence[np.ndarray | None], num_tokens: int) -> np.ndarray:
    """Return the experts of several rows as one padded column `[B, num_tokens, L · K]`."""
    known = next(record for record in records if record is not None)
    joined = np.full((len(records), num_tokens, known.shape[1]), NO_EXPERT[known.dtype.name], known.dtype)
    for row, record in zip(joined, records, strict=True):
        if record is not None:
            row[: len(record)] = record
    return joined
