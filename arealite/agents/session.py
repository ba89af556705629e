"""`Session`: the calls of one agent as a tree of exact tokens.

The gateway adds every answer with the tokens, log-probs and versions that were sampled. The prompt of the next call is
built on these tokens, never by encoding their text again: its messages are compared, as data, with those that earlier
calls saw and were answered with. The longest match keeps its tokens, and only the rest is encoded. A changed history
(edited, summarized, other tools) begins a new branch. `agents.export` makes training rows of the tree.
"""

import inspect
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import takewhile
from typing import Any

import numpy as np
import orjson

from arealite.api.chat import encode_behind, encode_chat, encode_next
from arealite.api.errors import RequestError
from arealite.api.io_struct import ModelResponse
from arealite.api.reward_api import MAX_REWARD
from arealite.api.vision_api import ImageReader, PlacedImage, check_sampled, has_image_parts
from arealite.protocol.tool_calls import decode_answer

Message = dict[str, Any]


@dataclass(eq=False, slots=True)
class Reply:
    """One sampled answer. Its sequence is that of its parent, then `observed`, then `tokens`."""

    id: str
    parent: "Reply | None"
    observed: list[int]
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    truncated: bool
    # 1 for calls that began before the first answer; one more than the latest answer before the call.
    turn: int
    reward: float = 0.0
    # Experts of the tokens that the replies before this one have no record of, with `rollout.routing_replay`.
    routed: np.ndarray | None = None
    # Images among `observed`, by their tokens in the whole sequence.
    images: list[PlacedImage] = field(default_factory=list[PlacedImage])

    def path(self) -> "list[Reply]":
        """Return the replies from the root to this one."""
        found, reply = [], self
        while reply is not None:
            found.append(reply)
            reply = reply.parent
        return found[::-1]

    def ids(self) -> list[int]:
        """Return all tokens from the root to the end of this reply."""
        return [token for reply in self.path() for part in (reply.observed, reply.tokens) for token in part]

    def all_images(self) -> list[PlacedImage]:
        """Return the images from the root to the end of this reply."""
        return [image for reply in self.path() for image in reply.images]


@dataclass(eq=False, slots=True)
class Prompt:
    """A call that waits for its answer: `ids` are the tokens of `parent` and then `observed`."""

    ids: list[int]
    parent: Reply | None
    observed: list[int]
    turn: int
    # Of this call in its session, from 1. Other calls may begin before it is generated.
    number: int
    # For a chat: the digest of all messages, and that of the last one alone.
    digest: bytes = b""
    last_digest: bytes = b""
    # For a completion: the text of the prompt.
    text: str | None = None
    # Images among `ids`.
    images: list[PlacedImage] = field(default_factory=list[PlacedImage])


@dataclass(eq=False)
class Session:
    """The calls of one agent. Not thread-safe: the gateway has a lock for each.

    `turn_discount` weighs a reward by the turns between a call and the reward.
    """

    tokenizer: Any
    template_kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    turn_discount: float = 1.0
    # Reads the images of messages; None if the model reads none.
    processor: ImageReader | None = None
    replies: dict[str, Reply] = field(default_factory=dict[str, Reply])
    # The reward of the whole session; None until one is given.
    final_reward: float | None = None
    # Calls, tokens and drift: see `stats`.
    counts: Counter[str] = field(default_factory=Counter[str])
    # The reply with which messages of this digest end, and the one with which this text of a completion ends.
    _by_digest: dict[bytes, Reply] = field(default_factory=dict[bytes, Reply])
    _by_text: dict[str, Reply] = field(default_factory=dict[str, Reply])
    # Digests of the messages that were answered, and of each answer together with the one message before it.
    _answered: set[bytes] = field(default_factory=set[bytes])
    _answers: set[bytes] = field(default_factory=set[bytes])

    def open_chat(
        self,
        messages: Sequence[Message],
        tools: list[Any] | None = None,
        template_kwargs: dict[str, Any] | None = None,
        prefix: str = "",
    ) -> Prompt:
        """Return the prompt of a call: the tokens of the longest matching history, and the rest encoded.

        `prefix` is text with which the answer has to begin; it belongs to the prompt.
        """
        if template_kwargs and (reserved := template_kwargs.keys() & _reserved(self.tokenizer)):
            names = ", ".join(sorted(reserved))
            raise RequestError(f"chat_template_kwargs are variables of the chat template; {names} cannot be one")
        kwargs = {**self.template_kwargs, **(template_kwargs or {})}
        digests = self._digests(messages, [tools or None, kwargs])
        num_known = next((i for i in range(len(messages), 0, -1) if digests[i] in self._by_digest), 0)
        parent, rest = self._by_digest.get(digests[num_known]), list(messages[num_known:])
        images: list[bytes] = []
        if self.processor is not None:
            check_sampled(self.processor, [t for reply in (parent.path() if parent else ()) for t in reply.tokens])
            rest, images = self.processor.take_images(rest)
        elif has_image_parts(rest):
            raise RequestError("images are not supported in this session: its workflow has no processor")
        with _refusing_bad_text():
            if parent is None:
                observed = encode_chat(self.tokenizer, rest, tools or None, **kwargs)
            else:
                observed = encode_next(self.tokenizer, rest, tools or None, sampled=parent.tokens, **kwargs)
        placed: list[PlacedImage] = []
        if self.processor is not None:
            observed, placed = self.processor.place(observed, images)
        if prefix:
            observed += encode_behind(self.tokenizer, prefix)
        prompt = self._prompt(parent, observed, placed)
        prompt.digest, prompt.last_digest = digests[-1], self._digests(messages[-1:], b"")[-1]
        unknown = [i for i in range(num_known, len(messages)) if messages[i].get("role") == "assistant"]
        if not unknown or not self.replies or self._adopt(prompt):
            return prompt
        if any(self._is_answer(messages[max(0, i - 1) : i + 1], digests[i]) for i in unknown):
            self._count_drift(prompt)
        return prompt

    def open_text(self, prompt: str | list[int]) -> Prompt:
        """Return the prompt of a text completion, built on the longest answer that it begins with."""
        if isinstance(prompt, str):
            known = max((text for text in self._by_text if prompt.startswith(text)), key=len, default="")
            parent = self._by_text.get(known)
            rest = prompt[len(known) :]
            with _refusing_bad_text():
                observed = self.tokenizer.encode(rest) if parent is None else encode_behind(self.tokenizer, rest)
            made = self._prompt(parent, observed)
            made.text = prompt
            return made
        made = self._prompt(None, list(prompt))
        self._adopt(made)
        return made

    def add(
        self, prompt: Prompt, response: ModelResponse, reply_id: str, echo: Sequence[Message] = (), text: str = ""
    ) -> Reply:
        """Add an answer. `echo` is how the client will send it back; `text` that of a completion."""
        tokens, lengths = response.output_tokens, {len(response.output_logprobs), len(response.output_versions)}
        if lengths != {len(tokens)} or response.input_tokens != prompt.ids:
            raise RequestError(f"a response of {len(tokens)} tokens does not answer this prompt token for token")
        reply = Reply(
            reply_id, prompt.parent, prompt.observed, tokens, response.output_logprobs, response.output_versions,
            response.truncated, prompt.turn, routed=_new_records(prompt.parent, response.routed_experts),
            images=prompt.images[len(prompt.parent.all_images()) if prompt.parent else 0 :],
        )  # fmt: skip
        self.replies[reply_id] = reply
        self.counts["sampled_tokens"] += len(tokens)
        if echo:
            self._by_digest[self._digests(echo, prompt.digest)[-1]] = reply
            self._answered.add(prompt.digest)
            self._answers.add(self._digests(echo[:1], prompt.last_digest)[-1])
        if prompt.text is not None:
            # Clients may repeat the stop string, which the text lacks, or not. Without any text it is the prompt again.
            shown = {text, decode_answer(self.tokenizer, tokens)} - {""}
            self._by_text |= {prompt.text + part: reply for part in shown}
        return reply

    def reward(self, value: float, reply_id: str | None = None) -> None:
        """Set the reward of one reply, or of the whole session. The last one given counts."""
        if not abs(value) <= MAX_REWARD:
            raise RequestError(f"a reward must be a finite number, also in float32; got {value}")
        if reply_id is None:
            self.final_reward = value
        elif reply_id in self.replies:
            self.replies[reply_id].reward = value
            self.counts["call_rewards"] += 1
        else:
            raise RequestError(f"there is no call with the id {reply_id!r:.100} in this session")

    @property
    def has_reward(self) -> bool:
        return self.final_reward is not None or self.counts["call_rewards"] > 0

    @property
    def num_turns(self) -> int:
        return max((reply.turn for reply in self.replies.values()), default=0)

    def stats(self) -> dict[str, float]:
        """Return statistics of this session, by their names."""
        parents = {reply.parent for reply in self.replies.values()}
        branches = sum(reply not in parents for reply in self.replies.values())
        return {
            "calls": float(self.counts["calls"]),
            "turns": float(self.num_turns),
            "branches": float(branches),
            "drift_calls": float(self.counts["drift_calls"]),
            "drift_tokens": float(self.counts["drift_tokens"]),
            "ignored_sampling": float(self.counts["ignored_sampling"]),
        }

    def _prompt(self, parent: Reply | None, observed: list[int], placed: Sequence[PlacedImage] = ()) -> Prompt:
        self.counts["calls"] += 1
        self.counts["observed_tokens"] += len(observed)
        known = parent.ids() if parent else []
        images = [*(parent.all_images() if parent else ()), *(image.shifted(len(known)) for image in placed)]
        number = self.counts["calls"]
        return Prompt([*known, *observed], parent, observed, 1 + self.num_turns, number, images=images)

    def _adopt(self, prompt: Prompt) -> bool:
        """Take the longest earlier sequence that the prompt begins with as its parent, if it is longer.

        Returns whether there was one.
        """
        parent, depth = prompt.parent, len(prompt.ids) - len(prompt.observed)
        for reply in self.replies.values():
            ids = reply.ids()
            # Equal placeholders may stand for other images.
            images = [image for image in prompt.images if image.end <= len(ids)]
            if len(ids) > depth and prompt.ids[: len(ids)] == ids and reply.all_images() == images:
                depth, prompt.parent = len(ids), reply
        prompt.observed = prompt.ids[depth:]
        return prompt.parent is not parent

    def _is_answer(self, pair: Sequence[Message], before: bytes) -> bool:
        """Return whether an unknown assistant message is an answer of this session in another form.

        It is one if it stands where an answer stood: `before` is the digest of the messages in front of it. It also is
        one if it equals an answer and the message in front of it, the other one of the `pair`, equals the answered one.
        Any other message is the agent's own, such as an example in its prompt.
        """
        return before in self._answered or (len(pair) == 2 and self._digests(pair, b"")[-1] in self._answers)

    def _count_drift(self, prompt: Prompt) -> None:
        shared = max(_num_common(prompt.ids, reply.ids()) for reply in self.replies.values())
        self.counts["drift_calls"] += 1
        self.counts["drift_tokens"] += len(prompt.ids) - shared

    def _digests(self, messages: Sequence[Message], start: Any) -> list[bytes]:
        """Return a digest of the first 0, 1, … messages; `start` is the digest, or the data, before."""
        found = [start if isinstance(start, bytes) else _digest(b"", start)]
        for message in messages:
            found.append(_digest(found[-1], _content_of(message)))
        return found


@contextmanager
def _refusing_bad_text() -> Iterator[None]:
    """Around encoding: text with lone surrogates, which JSON can express, becomes a `RequestError`."""
    try:
        yield
    except (TypeError, UnicodeEncodeError) as error:
        raise RequestError(f"the text cannot be encoded, it may hold half a surrogate pair: {error}") from error


def _reserved(tokenizer: Any) -> set[str]:
    """Return the names with a meaning of their own in rendering and encoding."""
    functions = (tokenizer.apply_chat_template, encode_chat, encode_next)
    return {name for function in functions for name in inspect.signature(function).parameters}


def _content_of(message: Message) -> list[Any]:
    """Return what makes two messages the same. Ids of calls differ between frameworks, and say nothing."""
    calls = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    content = message.get("content")
    return [
        message.get("role"),
        "" if content is None else content,
        message.get("name") if message.get("role") != "tool" else None,
        [[call.get("name"), call.get("arguments")] for call in calls],
    ]


def _digest(before: bytes, value: Any) -> bytes:
    try:
        data = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:
        # Numbers of more than 64 bits, lone surrogates.
        text = json.dumps(value, sort_keys=True)
        try:
            # Such a number in a body was read as a float.
            data = orjson.dumps(orjson.loads(text))
        except ValueError:
            data = text.encode()
    return blake2b(data, key=before, digest_size=16).digest()


def _num_common(a: list[int], b: list[int]) -> int:
    """Return the number of tokens with which both begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _new_records(parent: Reply | None, record: np.ndarray | None) -> np.ndarray | None:
    """Return the rows of `record`, of all tokens, that the path of `parent` does not have."""
    if record is None or parent is None:
        return record
    return record[sum(len(r.routed) for r in parent.path() if r.routed is not None) :].copy()
