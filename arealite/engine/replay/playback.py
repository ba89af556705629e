"""Answers the requests of workflows in a replay, from the record or by servers at recorded versions.

A request belongs to a recorded one if prompt, seed and sampling parameters are equal. If there is none, the workflow
has asked for something else than in the run, and `ReplayMismatch` names the parameter, or the first token in which the
prompts differ.
"""

import asyncio
import uuid
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from itertools import groupby
from typing import Any

from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import AReaLiteError, RequestError
from arealite.api.generation_args import GenerationHyperparameters
from arealite.api.io_struct import ModelRequest, ModelResponse
from arealite.core.record.episodes import RecordedRequest, describe_sampling

_SHOWN = 6


class ReplayMismatch(AReaLiteError):
    """A workflow does something else in a replay than in the run: `what`, with both values as text."""

    def __init__(self, episode: str, what: str, recorded: str, replayed: str):
        super().__init__(f"{what}: recorded {recorded}, replayed {replayed}")
        self.episode, self.what, self.recorded, self.replayed = episode, what, recorded, replayed


class Playback:
    """The recorded requests of episodes that run again. Each is answered once."""

    def __init__(self) -> None:
        self._by_key: dict[Any, deque[RecordedRequest]] = defaultdict(deque)
        self._by_seed: dict[Any, list[RecordedRequest]] = defaultdict(list)

    def add(self, requests: Iterable[RecordedRequest]) -> None:
        for recorded in requests:
            self._by_key[_key(recorded.prompt, recorded.seed, recorded.is_group)].append(recorded)
            self._by_seed[recorded.seed].append(recorded)

    def find(self, request: ModelRequest, is_group: bool) -> RecordedRequest:
        """Return the recorded request that this one repeats; raises `ReplayMismatch` if there is none.

        One that was refused in the run is refused again.
        """
        waiting = self._by_key.get(_key(request.input_ids, request.seed, is_group))
        if not waiting:
            raise self._mismatch(request)
        sampling = describe_sampling(vars(request.gconfig))
        found = next((each for each in waiting if each.sampling in (None, sampling)), None)
        if found is None:
            raise _other_sampling(waiting[0], request)
        waiting.remove(found)
        self._by_seed[request.seed].remove(found)
        if found.error:
            raise RequestError(found.error)
        count = request.gconfig.n_samples if is_group else 1
        if len(found.responses) != count:
            what = f"number of samples of episode {found.episode}"
            raise ReplayMismatch(found.episode, what, str(len(found.responses)), str(count))
        return found

    def _mismatch(self, request: ModelRequest) -> ReplayMismatch:
        left = self._by_seed.get(request.seed)
        if not left:
            what = f"prompt of a request with seed {request.seed}"
            return ReplayMismatch("", what, "none", _show(request.input_ids, 0))
        asked = request.input_ids
        nearest = max(left, key=lambda recorded: _common(recorded.prompt, asked))
        at = _common(nearest.prompt, asked)
        what = f"prompt of a request of episode {nearest.episode}, from token {at} on,"
        return ReplayMismatch(nearest.episode, what, _show(nearest.prompt, at), _show(asked, at))


def _other_sampling(recorded: RecordedRequest, request: ModelRequest) -> ReplayMismatch:
    old = vars(GenerationHyperparameters()) | (recorded.sampling or {})
    new = vars(request.gconfig)
    name = next(key for key in new if key != "n_samples" and old.get(key) != new[key])
    what = f"gconfig.{name} of a request of episode {recorded.episode}"
    return ReplayMismatch(recorded.episode, what, str(old.get(name)), str(new[name]))


def _key(prompt: list[int], seed: int | None, is_group: bool) -> Any:
    return tuple(prompt), seed, is_group


def _common(one: list[int], two: list[int]) -> int:
    """Return how many tokens two prompts have in common at their beginning."""
    return next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def _show(tokens: list[int], start: int) -> str:
    part = tokens[start : start + _SHOWN]
    return f"{part} of {len(tokens)} tokens" if part else f"no more tokens ({len(tokens)})"


class Generation:
    """Generates recorded answers again, each token under the version that sampled it in the run.

    Runs on the event loop of `engine`. Newer weights are loaded after `wait_until_done`, when every recorded token of
    the versions before has been generated: so an update comes where it came in the run.
    """

    def __init__(self, engine: InferenceEngine, first_version: int, unknown: Collection[int] = ()):
        self.engine, self.version = engine, first_version
        # Tokens older than this, or of these versions, were sampled by weights that a replay does not have.
        self.first_version, self.unknown = first_version, unknown
        # Versions of recorded tokens that are not generated yet, with their number, by episode.
        self.left: dict[str, Counter[int]] = {}
        self._changed = asyncio.Condition()

    def expect(self, episode: str, requests: Iterable[RecordedRequest]) -> None:
        """Count what an episode has to generate."""
        versions = (v for each in requests for response in each.responses for v in response.output_versions)
        self.left[episode] = Counter(version for version in versions if self._is_known(version))

    def _is_known(self, version: int) -> bool:
        return version >= self.first_version and version not in self.unknown

    async def finish(self, episode: str) -> None:
        """Expect no more of an episode: it has ended, perhaps otherwise than in the run."""
        async with self._changed:
            self.left.pop(episode, None)
            self._changed.notify_all()

    async def wait_until_done(self, version: int) -> None:
        """Wait until nothing older than `version` is left to generate."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: not any(n for left in self.left.values() for v, n in left.items() if v < version)
            )

    async def set_version(self, version: int) -> None:
        """Let answers of this version be generated: servers hold it."""
        async with self._changed:
            self.version = version
            self._changed.notify_all()

    async def repeat(self, request: ModelRequest, recorded: RecordedRequest) -> list[ModelResponse]:
        """Generate all samples of a request again."""
        return list(
            await asyncio.gather(
                *(self._sample(request, i, recorded, response) for i, response in enumerate(recorded.responses))
            )
        )

    async def _sample(
        self, request: ModelRequest, index: int, recorded: RecordedRequest, response: ModelResponse
    ) -> ModelResponse:
        seed = None if request.seed is None else request.seed + index
        tokens: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        spans = [(version, len(list(group))) for version, group in groupby(response.output_versions)]
        for number, (version, count) in enumerate(spans):
            part = slice(len(tokens), len(tokens) + count)
            if not self._is_known(version):
                new = response.output_tokens[part], response.output_logprobs[part]
            else:
                is_last = number == len(spans) - 1
                new = await self._generate(request, seed, tokens, version, count, is_last)
                _check_answer(recorded.episode, response, part, *new)
            tokens, logprobs, versions = tokens + new[0], logprobs + new[1], versions + [version] * count
            async with self._changed:
                self.left[recorded.episode][version] -= count
                self._changed.notify_all()
        return replace(response, output_tokens=tokens, output_logprobs=logprobs, output_versions=versions)

    async def _generate(
        self, request: ModelRequest, seed: int | None, before: list[int], version: int, count: int, is_last: bool
    ) -> tuple[list[int], list[float]]:
        async with self._changed:
            await self._changed.wait_for(lambda: self.version >= version)
        # The last part ends by itself, as it did in the run.
        room = request.gconfig.max_new_tokens - len(before) if is_last else count
        least = max(0, request.gconfig.min_new_tokens - len(before))
        gconfig = replace(request.gconfig, n_samples=1, max_new_tokens=room, min_new_tokens=min(least, room))
        # Samples of a group become requests of their own.
        name = uuid.uuid4().hex
        asked = replace(request, input_ids=request.input_ids + before, gconfig=gconfig, seed=seed, rid=name)
        answer = await self.engine.agenerate(asked)
        return answer.output_tokens, answer.output_logprobs


def _check_answer(episode: str, response: ModelResponse, part: slice, tokens: list[int], logprobs: list[float]) -> None:
    """Raise `ReplayMismatch` at the first token that is not the recorded one, bit for bit."""
    pairs: list[tuple[str, list[Any], list[Any], Callable[[Any], str]]] = [
        ("tokens", response.output_tokens[part], tokens, str),
        ("logprobs", response.output_logprobs[part], logprobs, repr),
    ]
    for name, old, new, show in pairs:
        at = _common(old, new)
        if at < max(len(old), len(new)):
            texts = (show(values[at]) if at < len(values) else "no token" for values in (old, new))
            what = f"{name} of an answer of episode {episode} at token {part.start + at}"
            raise ReplayMismatch(episode, what, *texts)
