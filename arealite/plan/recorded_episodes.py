"""The shapes of recorded episodes: tokens of each sample and turn, and the waits between them.

Used by `recorded`. The parts of episodes have the tokens of all answers. In recordings of older versions the ledger has
those of samples whose text was kept; those of others follow from the sum of their episode. A workflow may also generate
what is not in a trajectory (a check of the answer, a dropped turn): there servers count these tokens, and they are
divided among episodes by the steps for which these generated. Episodes that had not ended are like longer ones that
had.
"""

import math
from bisect import bisect
from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from statistics import mean
from typing import NamedTuple

from arealite.core.foresee.recording import PlayedEpisode, Recording
from arealite.core.foresee.rerun import Simulation
from arealite.core.foresee.speed import fit_speed
from arealite.plan.workload import EpisodeShape

# Servers count this much more than trajectories have before other generation is assumed.
_NOTICEABLE = 1.15


class SampleTokens(NamedTuple):
    """Tokens of a sample, with its prompt, and those of its answer."""

    tokens: float
    answer: float


class _Lengths(NamedTuple):
    prompt: float
    answers: list[float]


def in_steps(recording: Recording) -> list[PlayedEpisode]:
    """Return all started episodes with the steps of their server instead of the seconds of generations.

    A step of a full server takes longer. If the speed of servers is not known, seconds stay. Modelled servers answer
    at once: the latency of answers counts as steps.
    """
    found, simulation = [], Simulation(recording, fit_speed(recording, latency_s=0.0))
    for episode, works in zip(recording.started, simulation.works.episodes, strict=True):
        kinds = [kind for kind, _ in episode.parts]
        found.append(episode._replace(parts=tuple(zip(kinds, works, strict=True))))
    return found


def with_unfinished(
    started: Sequence[PlayedEpisode], played: Sequence[PlayedEpisode], shapes: Sequence[EpisodeShape]
) -> list[EpisodeShape]:
    """Return the shapes of all started episodes in their order.

    `shapes` are those of `played`. One that had not ended gets the shape of the one whose generations are most alike.
    """
    known = {episode.number: shape for episode, shape in zip(played, shapes, strict=True)}
    ended = sorted((sum(_turns(e)[0]), e.number) for e in played)
    result = []
    for episode in started:
        if episode.state == "running":
            work = sum(_turns(episode)[0])
            place = bisect(ended, (work, 0))
            near = min(ended[max(0, place - 1) : place + 1], key=lambda other: abs(other[0] - work))
            result.append(known[near[1]])
        elif episode.number in known:
            result.append(known[episode.number])
    return result


def make_shapes(
    episodes: Sequence[PlayedEpisode],
    samples: Mapping[int, Sequence[SampleTokens]],
    num_generated: float | None,
    limit: float = math.inf,
    computed: float | None = None,
) -> list[EpisodeShape]:
    """Return the shapes of episodes.

    `num_generated` are all tokens that servers have counted, `limit` are those of the longest possible answer,
    `computed` the prompt tokens of a generation.
    """
    lengths = _all_lengths(episodes, samples, limit)
    step_s = _step_s(episodes, lengths, num_generated)
    shapes = []
    for episode, known in zip(episodes, lengths, strict=True):
        turns, waits, last_s = _turns(episode)
        if any(episode.answers):
            shapes.append(_counted(episode, known, waits, last_s)._replace(computed=computed))
            continue
        longest = max(known.answers)
        extra = 0.0 if step_s is None else max(0.0, sum(turns) / step_s - longest)
        total_s = sum(turns) or 1.0
        shares = [seconds / total_s for seconds in turns] if sum(turns) else [1.0]
        answers = [[(answer + extra) * share for answer in known.answers] for share in shares]
        kept = [answer / (answer + extra) for answer in known.answers]
        shapes.append(EpisodeShape(known.prompt, answers, kept, waits, last_s, computed))
    return shapes


def _counted(episode: PlayedEpisode, known: _Lengths, waits: list[float], last_s: float) -> EpisodeShape:
    """Return the shape of an episode whose answers were counted."""
    count = len(known.answers)
    # More answers than samples: those of a sample follow each other, while other samples generate.
    answers = [[float(sum(turn[number::count])) for number in range(count)] for turn in episode.answers]
    totals = [sum(lengths) for lengths in zip(*answers, strict=True)]
    kept = [min(1.0, answer / max(total, 1.0)) for answer, total in zip(known.answers, totals, strict=True)]
    return EpisodeShape(known.prompt, answers, kept, waits, last_s)


def _all_lengths(
    episodes: Sequence[PlayedEpisode], samples: Mapping[int, Sequence[SampleTokens]], limit: float
) -> list[_Lengths]:
    known = {number: _known(found) for number, found in samples.items() if found}
    prompt = mean(lengths.prompt for lengths in known.values()) if known else 1.0
    # Samples of episodes without text differ as those of an episode of about the same mean do.
    others = sorted(((mean(one.answers), one.answers) for one in known.values()), key=lambda pair: pair[0])
    others = others or [(1.0, [1.0])]
    limit = max(limit, *(max(answers) for _, answers in others))
    result = []
    for episode in episodes:
        found = known.get(episode.number)
        if found is None:
            average = max(1.0, episode.sample_tokens - prompt)
            found = _Lengths(prompt, _like(_nearest(others, average), average, max(1, episode.samples), limit))
        result.append(found)
    return result


def _nearest(others: Sequence[tuple[float, list[float]]], average: float) -> list[float]:
    """Return the answers whose mean is nearest; `others` are in order of their means."""
    place = bisect(others, average, key=lambda other: other[0])
    return min(others[max(0, place - 1) : place + 1], key=lambda other: abs(other[0] - average))[1]


def _like(answers: Sequence[float], average: float, count: int, limit: float) -> list[float]:
    """Return `count` answers of this average that differ as `answers` do, up to `limit` tokens."""
    drawn = list(islice(cycle(answers), count))
    before = mean(drawn)
    if average > before and limit < math.inf:
        # What is missing to the limit shrinks: longer answers are more alike.
        left = max(0.0, limit - average) / max(1e-9, limit - before)
        return [max(average, limit) - left * (limit - answer) for answer in drawn]
    return [max(1.0, answer * average / before) for answer in drawn]


def _known(found: Sequence[SampleTokens]) -> _Lengths:
    prompt = mean(sample.tokens - sample.answer for sample in found)
    return _Lengths(max(1.0, prompt), [max(1.0, sample.answer) for sample in found])


def _turns(episode: PlayedEpisode) -> tuple[list[float], list[float], float]:
    """Return the seconds of each generation, of the wait before it, and of all other waits."""
    turns: list[float] = []
    waits: list[float] = []
    waited_s = before_s = 0.0
    for kind, seconds in episode.parts:
        if kind != "generate":
            waited_s += seconds
            continue
        before_s += 0.0 if turns else waited_s
        waits.append(waited_s if turns else 0.0)
        turns.append(seconds)
        waited_s = 0.0
    return turns or [0.0], waits or [0.0], before_s + waited_s


def _step_s(
    episodes: Sequence[PlayedEpisode], lengths: Sequence[_Lengths], num_generated: float | None
) -> float | None:
    """Return the seconds of a token with which the times of all episodes account for `num_generated`.

    None if trajectories alone account for it.
    """
    total = sum(sum(known.answers) for known in lengths)
    if not num_generated or num_generated < _NOTICEABLE * total:
        return None
    rows = [(sum(_turns(e)[0]), max(k.answers), len(k.answers)) for e, k in zip(episodes, lengths, strict=True)]
    low, high = 1e-9, 1e3
    for _ in range(80):
        middle = (low * high) ** 0.5
        extra = sum(count * max(0.0, seconds / middle - longest) for seconds, longest, count in rows)
        low, high = (middle, high) if extra > num_generated - total else (low, middle)
    return high
