"""What a simulated run does: batches, lengths of prompts and answers, turns, rewards.

`SimulatedWorkflow` plays an episode as `workflow.rlvr` and `workflow.multi_turn` do, without content: it asks for
answers of drawn lengths, waits for tools and rewards, and returns trajectories with one column for each version.
"""

import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle, islice
from typing import Any, NamedTuple

import numpy as np
import torch

from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import ConfigError
from arealite.api.generation_args import GenerationHyperparameters
from arealite.api.io_struct import Batch, ModelRequest
from arealite.api.workflow_api import RolloutWorkflow
from arealite.core.episode import Trajectories
from arealite.plan.simulated_engine import ANSWERS, Answers
from arealite.utils import clock

# Tokens of each column of a trajectory, in the batch.
TOKENS = "segment_tokens"
# Trajectories have a multiple of so many columns.
_WIDTHS = 8
_FORMS = "constant:N, uniform:LOW,HIGH, lognormal:MEDIAN,SIGMA,MAX or exponential:MEAN,MAX"
_NUM_ARGUMENTS = {"constant": 1, "uniform": 2, "lognormal": 3, "exponential": 2}


@dataclass(frozen=True)
class Distribution:
    """Random numbers of one kind, or drawn from observed `values`."""

    kind: str
    arguments: tuple[float, ...]

    @classmethod
    def parse(cls, text: str, what: str) -> "Distribution":
        """Parse `constant:512`, `lognormal:1000,1.0,8192` and so on; a bare number is constant."""
        kind, _, rest = text.partition(":") if ":" in text else ("constant", "", text)
        arguments = _numbers(rest)
        is_valid = _NUM_ARGUMENTS.get(kind) == len(arguments) and all(0 <= n <= 1e9 for n in arguments)
        if not is_valid or (kind == "uniform" and arguments != sorted(arguments)):
            raise ConfigError(f"{what} is {text!r}; write {_FORMS}, for example lognormal:800,1.0,8192")
        return cls(kind, tuple(arguments))

    @classmethod
    def tokens(cls, text: str, what: str) -> "Distribution":
        """Parse a distribution of numbers of tokens: prompts and answers have one at least."""
        found = cls.parse(text, what)
        # The second number of a lognormal distribution is its width.
        numbers = found.arguments[::2] if found.kind == "lognormal" else found.arguments
        if min(numbers) < 1:
            raise ConfigError(f"{what} is {text!r}, with {min(numbers):g} tokens; give at least 1")
        return found

    @classmethod
    def of(cls, values: list[float]) -> "Distribution":
        """Return the distribution of observed values."""
        return cls("observed", tuple(values))

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Return `count` numbers."""
        a = self.arguments
        if self.kind == "constant":
            return np.full(count, a[0])
        if self.kind == "uniform":
            return rng.uniform(a[0], a[1], count)
        if self.kind == "lognormal":
            return np.minimum(rng.lognormal(np.log(max(a[0], 1e-9)), a[1], count), a[2])
        if self.kind == "exponential":
            return np.minimum(rng.exponential(a[0], count), a[1])
        return rng.choice(np.asarray(a), count)

    def mean(self) -> float:
        """Return the mean, from a sample where limits make a formula long."""
        return float(self.draw(np.random.default_rng(0), 4096).mean())

    @property
    def largest(self) -> float:
        return self.arguments[0] if self.kind == "constant" else max(self.arguments[1:] or self.arguments)


class EpisodeShape(NamedTuple):
    """A recorded episode. A turn generates all samples at once, after `tools` seconds of that turn."""

    prompt: float
    # Generated tokens by turn and sample, and the share of them that is in the trajectory of each sample.
    answers: list[list[float]]
    kept: list[float]
    tools: list[float]
    reward_s: float
    # Prompt tokens that a server computes for each turn; None: `prompt` for the first one.
    computed: float | None = None


@dataclass(frozen=True)
class Workload:
    """A training task: `prompts` groups of `samples` answers make a batch."""

    prompts: int
    samples: int
    prompt_tokens: Distribution
    answer_tokens: Distribution
    # Seconds of the reward of an episode, and of the tool after each turn but the last.
    reward_s: Distribution = Distribution("constant", (0.0,))
    turns: int = 1
    tool_s: Distribution = Distribution("constant", (0.0,))
    # Episodes of a recorded run, which are played in their order instead of drawn ones.
    episodes: tuple[EpisodeShape, ...] = ()

    @property
    def sequence_tokens(self) -> float:
        """Mean tokens of a trained sequence."""
        return self.prompt_tokens.mean() + self.answer_tokens.mean() * self.turns

    @property
    def longest_sequence(self) -> float:
        return self.prompt_tokens.largest + self.answer_tokens.largest * self.turns


class Rows:
    """An endless dataloader of drawn lengths; the same seed draws the same rows."""

    def __init__(self, workload: Workload, seed: int):
        self.workload = workload
        self._rng = np.random.default_rng(seed)

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        if self.workload.episodes:
            played = cycle(self.workload.episodes)
            while True:
                shapes = islice(played, self.workload.prompts)
                yield [{"seed": 0, **shape._asdict()} for shape in shapes]
        w, rng = self.workload, self._rng
        while True:
            prompts = np.maximum(1.0, np.rint(w.prompt_tokens.draw(rng, w.prompts)))
            shape = w.prompts, w.turns, w.samples
            answers = np.maximum(1.0, np.rint(w.answer_tokens.draw(rng, w.prompts * w.turns * w.samples)))
            rewards, tools = w.reward_s.draw(rng, w.prompts), w.tool_s.draw(rng, w.prompts * w.turns)
            columns = prompts.tolist(), answers.reshape(shape).tolist(), rewards.tolist()
            waits = tools.reshape(w.prompts, w.turns).tolist()
            # A seed in the row: the runner then derives none.
            yield [
                {"seed": 0, "prompt": p, "answers": a, "reward_s": r, "tools": t}
                for p, a, r, t in zip(*columns, waits, strict=True)
            ]


class SimulatedWorkflow(RolloutWorkflow):
    """Plays rows of `Rows`."""

    def __init__(self) -> None:
        self._gconfigs: dict[int, GenerationHyperparameters] = {}
        self._num_requests = 0
        self._num_running = 0
        self.most_running = 0
        # Since `reset`: episodes that have ended, and their seconds of generation.
        self.num_ended, self.generate_s = 0, 0.0

    # The executor takes checked trajectories as it takes a batch.
    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Trajectories:  # type: ignore[override]
        self._num_running += 1
        self.most_running = max(self.most_running, self._num_running)
        try:
            return await self._run(engine, data)
        finally:
            self._num_running -= 1

    def reset(self) -> None:
        """Measure the time of generation from now on."""
        self.num_ended, self.generate_s = 0, 0.0

    async def _run(self, engine: InferenceEngine, data: dict[str, Any]) -> Trajectories:
        turns: list[list[float]] = data["answers"]
        began = clock.monotonic()
        if "kept" in data:
            made = await self._replay(engine, data)
        elif len(turns) == 1:
            answers = await self._generate(engine, turns[0], data["prompt"], data["prompt"], None)
            made = answers.made
        else:
            plays = [self._play(engine, data, i) for i in range(len(turns[0]))]
            made = list(await asyncio.gather(*plays))
        self.num_ended += 1
        self.generate_s += clock.monotonic() - began - sum(data["tools"][1:])
        if "kept" in data:
            pairs = zip(made, data["kept"], strict=True)
            made = [[(version, count * share) for version, count in parts] for parts, share in pairs]
        if data["reward_s"]:
            await asyncio.sleep(data["reward_s"])
        return make_trajectories(data["prompt"], made)

    async def _replay(self, engine: InferenceEngine, data: dict[str, Any]) -> list[list[tuple[int, float]]]:
        """Play the turns of a recorded episode: between two of them nothing was generated."""
        made: list[list[tuple[int, float]]] = [[] for _ in data["kept"]]
        context, computed = data["prompt"], data["computed"]
        new = context if computed is None else computed
        for turn, lengths in enumerate(data["answers"]):
            if turn and data["tools"][turn]:
                await asyncio.sleep(data["tools"][turn])
            asked = [number for number, length in enumerate(lengths) if length > 0]
            if not asked:
                continue
            answers = await self._generate(engine, [lengths[number] for number in asked], context, new, None)
            for number, parts in zip(asked, answers.made, strict=True):
                made[number] += parts
            # Later turns continue what is in the trajectory. If nothing else is known, it is in the server's cache.
            context += sum(length * share for length, share in zip(lengths, data["kept"], strict=True)) / len(lengths)
            new = 1.0 if computed is None else computed
        return made

    async def _play(self, engine: InferenceEngine, data: dict[str, Any], sample: int) -> list[tuple[int, float]]:
        """Play the turns of one sample, with a tool between two of them."""
        made: list[tuple[int, float]] = []
        context = new = data["prompt"]
        session = f"session-{self._num_requests}"
        for turn, lengths in enumerate(data["answers"]):
            if turn and data["tools"][turn]:
                await asyncio.sleep(data["tools"][turn])
            answers = await self._generate(engine, [lengths[sample]], context, new, session)
            made += answers.made[0]
            context += lengths[sample]
            # The server has the earlier turns in its cache.
            new = 1.0
        return made

    async def _generate(
        self, engine: InferenceEngine, lengths: list[float], context: float, new: float, session: str | None
    ) -> Answers:
        count = len(lengths)
        gconfig = self._gconfigs.setdefault(count, GenerationHyperparameters(n_samples=count, max_new_tokens=1 << 30))
        answers = Answers(lengths, context, new)
        self._num_requests += 1
        metadata = {ANSWERS: answers} | ({"session": session} if session else {})
        await engine.agenerate_group(ModelRequest([0], gconfig, rid=f"r{self._num_requests}", metadata=metadata))
        return answers


@lru_cache(maxsize=4096)
def _columns(counts: tuple[int, ...], width: int) -> Batch:
    """Return the columns that depend only on how many versions made each answer; batches share them."""
    is_made = np.arange(width)[None] < 1 + np.asarray(counts)[:, None]
    mask = torch.from_numpy(is_made.astype(np.int64))
    generated = mask.clone()
    generated[:, 0] = 0
    zeros = torch.zeros(mask.shape)
    columns = {"input_ids": mask, "attention_mask": mask, "loss_mask": generated, "logprobs": zeros}
    return columns | {"rewards": torch.zeros(len(counts))}


def _tensor(rows: list[list[Any]], dtype: Any) -> torch.Tensor:
    # Faster than `torch.tensor` for nested lists.
    return torch.from_numpy(np.array(rows, dtype))


def make_trajectories(prompt: float, made: list[list[tuple[int, float]]]) -> Trajectories:
    """Return trajectories with one column for the prompt and one for each version of an answer's tokens."""
    counts = tuple(map(len, made))
    # Batches of the same width are joined without padding.
    width = -(-(1 + max(counts)) // _WIDTHS) * _WIDTHS
    versions = [[-1, *(v for v, _ in parts), *[-1] * (width - 1 - len(parts))] for parts in made]
    tokens = [[prompt, *(n for _, n in parts), *[0.0] * (width - 1 - len(parts))] for parts in made]
    batch = _columns(counts, width) | {"versions": _tensor(versions, np.int64), TOKENS: _tensor(tokens, np.float32)}
    oldest = min((version for parts in made for version, _ in parts), default=0)
    return Trajectories(batch, len(made), len(made) + sum(counts), oldest, 0.0)


def _numbers(text: str) -> list[float]:
    """Return numbers with commas between them; none if the text is anything else."""
    if not re.fullmatch(r"[0-9.eE+,-]+", text):
        return []
    try:
        return [float(number) for number in text.split(",")]
    except ValueError:
        return []
