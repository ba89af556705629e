"""`Trajectory`: builds one row of a training batch turn by turn.

Workflows use it: they observe a prompt, add what the model sampled, observe what came back, and set a reward. Sampled
tokens are trained on with the log-probs and versions that the engine reported; observed ones are not. Images may come
with any observation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from arealite.api.chat import Message, encode_behind, encode_chat, encode_next
from arealite.api.cli_args import GenerationHyperparameters
from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import RequestError, RewardError
from arealite.api.io_struct import (
    NO_EXPERT,
    ROUTED_EXPERTS,
    STATS_PREFIX,
    Batch,
    ModelRequest,
    ModelResponse,
    extend_record,
)
from arealite.api.reward_api import MAX_REWARD, Score
from arealite.api.vision_api import (
    ImageReader,
    PlacedImage,
    check_sampled,
    has_image_parts,
    image_columns,
    stop_at_placeholders,
)


class Trajectory:
    """The tokens of one sample. A tokenizer is needed to observe text or messages.

    `tools` and `template_kwargs` (such as `enable_thinking`) go to the tokenizer's chat template. `processor`, a
    `utils.vision.VisionProcessor`, is needed to observe messages with images; it brings its tokenizer.
    """

    def __init__(
        self,
        tokenizer: Any = None,
        tools: list[Any] | None = None,
        processor: ImageReader | None = None,
        **template_kwargs: Any,
    ):
        self.tokenizer = tokenizer if processor is None else processor.tokenizer
        self.tools, self.processor, self.template_kwargs = tools, processor, template_kwargs
        self.ids: list[int] = []
        # The images among `ids`, in their order.
        self.images: list[PlacedImage] = []
        # Whether the last response was cut off; a workflow may set it, for an episode that reached its last turn.
        self.truncated = False
        self.stats: dict[str, float] = {}
        self._reward: float | None = None
        # Of each response: where it begins, its log-probs and versions.
        self._sampled: list[tuple[int, np.ndarray, np.ndarray]] = []
        # Experts of the first tokens, [tokens, L · K].
        self._routed: np.ndarray | None = None
        # Where the last response ends; 0 before the first one.
        self._end = 0
        # How many tokens were observed before the last response, and whether the last messages have no reply yet.
        self._reply_start = 0
        self._awaits_reply = False

    def observe(
        self, what: str | Message | Sequence[int] | Sequence[Message], images: Sequence[PlacedImage] = ()
    ) -> Trajectory:
        """Append tokens, text, a message or messages, which are not trained on; returns itself.

        Messages are rendered by the chat template. The first ones begin the conversation, later ones follow a reply.
        Their content may have parts `{"type": "image", "image": …}` (bytes, a data: URL, a PIL image) in any turn.

        Args:
            images: those for which placeholders among observed tokens stand (`VisionPrompt.placed`).
        """
        start = len(self.ids)
        if isinstance(what, str):
            # Only a prompt begins with the tokenizer's special tokens.
            tokenizer = self._require_tokenizer()
            ids = encode_behind(tokenizer, what) if self.ids else tokenizer.encode(what)
        elif isinstance(what, Mapping):
            ids = self._encode([what])
        elif len(what) and isinstance(what[0], Mapping):
            ids = self._encode(what)  # type: ignore[arg-type] - messages, by the first one
        else:
            # Also of an array, to which `+=` would add.
            ids = [int(token) for token in what]  # type: ignore[arg-type] - tokens
        self.ids += ids
        self.images += [image.shifted(start) for image in images]
        self._reply_start = len(self.ids)
        return self

    def request(self, gconfig: GenerationHyperparameters, seed: int | None = None) -> ModelRequest:
        """Return a request to continue the tokens so far."""
        if not self.ids:
            raise RequestError("the prompt is empty: observe something before the first request")
        request = ModelRequest(list(self.ids), gconfig, seed=seed)
        if self.processor is not None:
            sampled = [t for at, logprobs, _ in self._sampled for t in self.ids[at : at + len(logprobs)]]
            check_sampled(self.processor, sampled)
            request.gconfig = stop_at_placeholders(self.processor, gconfig)
        request.images = [image.data for image in self.images]
        request.image_spans = [(image.start, image.end) for image in self.images]
        return request

    def add(self, response: ModelResponse) -> Trajectory:
        """Append what the model sampled in answer to `request`; returns itself."""
        if response.input_tokens != self.ids:
            raise RequestError(
                f"a response to {len(response.input_tokens)} tokens cannot be added to a trajectory of "
                f"{len(self.ids)} tokens: it must be the answer to exactly these tokens"
            )
        ids, logprobs, versions = response.output_tokens, response.output_logprobs, response.output_versions
        if not len(ids) == len(logprobs) == len(versions):
            raise RequestError(
                f"a response has {len(ids)} tokens, {len(logprobs)} log-probs and {len(versions)} versions; expected "
                "one of each for every token"
            )
        self._sampled.append((len(self.ids), np.array(logprobs, np.float32), np.array(versions, np.int64)))
        self.ids += ids
        self._routed = extend_record(self._routed, response.routed_experts)
        self._awaits_reply = False
        self._end = len(self.ids)
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
        """Return a group of trajectories as one padded batch, as a workflow returns it.

        What was observed after the last answer is left out: nothing is sampled from it, so it would only cost compute.
        """
        if not trajectories:
            raise ValueError("Trajectory.join needs at least one trajectory")
        rewards = [t._reward for t in trajectories]
        for index, value in enumerate(rewards):
            if value is None:
                raise ValueError(f"trajectory {index} of {len(rewards)} has no reward: call reward(value)")
            if not abs(value) <= MAX_REWARD:
                text = f"trajectory {index} of {len(rewards)} has the reward {value!r}"
                raise RewardError(f"{text}; it must be finite, also in float32")
        lengths = [t._end or len(t.ids) for t in trajectories]
        shape = len(trajectories), max(lengths)
        # NumPy takes lists several times as fast as torch.
        ids, attention_mask, loss_mask = (np.zeros(shape, np.int64) for _ in range(3))
        logprobs, versions = np.zeros(shape, np.float32), np.full(shape, -1, np.int64)
        for i, (t, length) in enumerate(zip(trajectories, lengths, strict=True)):
            ids[i, :length] = t.ids[:length]
            attention_mask[i, :length] = 1
            for at, own_logprobs, own_versions in t._sampled:
                part = slice(at, at + len(own_logprobs))
                loss_mask[i, part], logprobs[i, part], versions[i, part] = 1, own_logprobs, own_versions
        batch = {
            "input_ids": torch.from_numpy(ids),
            "attention_mask": torch.from_numpy(attention_mask),
            "loss_mask": torch.from_numpy(loss_mask),
            "logprobs": torch.from_numpy(logprobs),
            "versions": torch.from_numpy(versions),
            "rewards": torch.tensor(rewards, dtype=torch.float32),
            "truncated": torch.tensor([t.truncated for t in trajectories]),
        }
        if any(t._routed is not None for t in trajectories):
            batch[ROUTED_EXPERTS] = torch.from_numpy(join_records([t._routed for t in trajectories], shape[1]))
        for name in dict.fromkeys(name for t in trajectories for name in t.stats):
            values = [t.stats.get(name, math.nan) for t in trajectories]
            batch[STATS_PREFIX + name] = torch.tensor(values, dtype=torch.float32)
        kept = zip(trajectories, lengths, strict=True)
        return batch | image_columns([[image for image in t.images if image.end <= end] for t, end in kept])

    def _encode(self, messages: Sequence[Any]) -> list[int]:
        tokenizer = self._require_tokenizer()
        if self._awaits_reply:
            raise RequestError("messages were observed twice without a reply in between: observe all of them at once")
        images: list[bytes] = []
        if has_image_parts(messages):
            if self.processor is None:
                raise RequestError(
                    "messages with images need a processor: Trajectory(processor=VisionProcessor.load(path))"
                )
            messages, images = self.processor.take_images(messages)
        if not self.ids:
            ids = encode_chat(tokenizer, messages, self.tools, **self.template_kwargs)
        else:
            sampled = self.ids[self._reply_start :]
            ids = encode_next(tokenizer, messages, self.tools, sampled=sampled, **self.template_kwargs)
        if self.processor is not None:
            ids, placed = self.processor.place(ids, images)
            self.images += [image.shifted(len(self.ids)) for image in placed]
        self._awaits_reply = True
        return ids

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
