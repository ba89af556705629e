"""Metrics of an evaluation: pass@k, maj@k, 95% intervals, and a paired test of two evaluations.

Pure functions on plain numbers; `trainer.evaluator` applies them. A question has n answers. An answer is solved if its
reward is at least 1: partial credit is no pass.
"""

import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations
from math import comb
from statistics import fmean, stdev

import numpy as np

# Two-sided 95% quantile of the normal distribution.
_Z = 1.959964
# Subsets of answers for maj@k: all of them up to this many, else so many drawn at random.
_MAX_SUBSETS = 256


def solved_statistics(solved: Sequence[Sequence[bool]], votes: Sequence[Sequence[int]]) -> dict[str, float]:
    """Return pass@k and maj@k with their intervals, from the answers to each question."""
    stats, num_answers = {}, sum(map(len, solved))
    for k in reported_counts(min(map(len, solved))):
        metrics = {f"pass@{k}": [pass_at_k(len(own), sum(own), k) for own in solved]}
        if k > 1:
            metrics[f"maj@{k}"] = [majority_at_k(*pair, k) for pair in zip(votes, solved, strict=True)]
        for name, scores in metrics.items():
            low, high = interval(scores, num_answers)
            stats |= {name: fmean(scores), f"{name}/low": low, f"{name}/high": high}
    return stats


def score_statistics(rewards: Sequence[float]) -> dict[str, float]:
    """Return the mean reward, one for each question, and from two questions on its interval."""
    stats = {"reward": fmean(rewards)}
    if len(rewards) > 1:
        stats["reward/low"], stats["reward/high"] = mean_interval(rewards)
    return stats


def reported_counts(n: int) -> list[int]:
    """Return for which k, with n answers to a question, pass@k is reported: 1, 2, 4, … and n."""
    return sorted({1 << i for i in range(n.bit_length())} | {n})


def pass_at_k(n: int, num_solved: int, k: int) -> float:
    """Return the probability that k of n answers, drawn without replacement, contain a solved one.

    1 − C(n−c, k) / C(n, k), an unbiased estimate of the probability for k new answers (arXiv 2107.03374).
    """
    return 1.0 - comb(n - num_solved, k) / comb(n, k)


def majority_at_k(votes: Sequence[int], solved: Sequence[bool], k: int) -> float:
    """Return the probability that the most frequent of k answers, drawn without replacement, is right.

    Equal answers have equal `votes`. A tie is broken at random: the right share of the most frequent answers counts.
    """
    n = len(votes)
    groups: dict[int, list[bool]] = {}
    for vote, is_solved in zip(votes, solved, strict=True):
        groups.setdefault(vote, []).append(is_solved)
    score = {vote: fmean(members) for vote, members in groups.items()}
    subsets: Iterable[Sequence[int]]
    if comb(n, k) <= _MAX_SUBSETS:
        subsets = combinations(votes, k)
    else:
        # The same subsets for every question and checkpoint.
        draw = random.Random(n * 1_000 + k)
        subsets = [draw.sample(list(votes), k) for _ in range(_MAX_SUBSETS)]
    return fmean(_winner_score(subset, score) for subset in subsets)


def _winner_score(votes: Sequence[int], score: dict[int, float]) -> float:
    counts = Counter(votes)
    most = max(counts.values())
    return fmean(score[vote] for vote, count in counts.items() if count == most)


def interval(scores: Sequence[float], num_answers: int) -> tuple[float, float]:
    """Return the 95% interval of the mean of scores in [0, 1], one for each question.

    Wilson's interval, for as many independent answers as the variance between questions corresponds to (answers to one
    question are correlated). It does not collapse where all scores are 0 or 1, as the bootstrap does.
    `num_answers` over all questions is an upper limit of that number.
    """
    mean = fmean(scores)
    square = _Z**2 / _effective_answers(scores, mean, num_answers)
    center = (mean + square / 2) / (1 + square)
    half = math.sqrt(square * mean * (1 - mean) + square**2 / 4) / (1 + square)
    # Rounding must not exclude the mean itself.
    return min(mean, max(0.0, center - half)), max(mean, min(1.0, center + half))


def mean_interval(scores: Sequence[float]) -> tuple[float, float]:
    """Return the 95% interval of the mean of scores without limits, one for each question (at least two)."""
    mean, half = fmean(scores), _t_quantile(len(scores) - 1) * stdev(scores) / math.sqrt(len(scores))
    return mean - half, mean + half


def _effective_answers(scores: Sequence[float], mean: float, num_answers: int) -> float:
    """Return how many independent answers tell as much: from the number of questions to that of answers.

    The variance of the mean over that of independent answers (the design effect), corrected for the few questions from
    which it is estimated (Korn and Graubard 1998).
    """
    num_questions = len(scores)
    # Nothing is known about the variance between questions.
    if num_questions == 1 or mean in (0.0, 1.0):
        return num_questions
    variance = sum((score - mean) ** 2 for score in scores) / (num_questions - 1) / num_questions
    effective = float(num_answers)
    if variance > 0:
        effective = min(effective, num_answers * mean * (1 - mean) / (num_answers - 1) / variance)
    effective *= (_t_quantile(num_answers - 1) / _t_quantile(num_questions - 1)) ** 2
    return min(max(effective, num_questions), num_answers)


def _t_quantile(degrees: int) -> float:
    """Return the two-sided 95% quantile of Student's distribution, within 1%."""
    if degrees <= 2:
        return (12.7062, 4.3027)[degrees - 1]
    # Its expansion in 1 / degrees (Abramowitz and Stegun 26.7.5).
    terms = (
        (_Z**3 + _Z) / 4,
        (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / 96,
        (3 * _Z**7 + 19 * _Z**5 + 17 * _Z**3 - 15 * _Z) / 384,
    )
    return _Z + sum(term / degrees**power for power, term in enumerate(terms, 1))


def paired_p_value(differences: Sequence[int]) -> float:
    """Return the p-value of "neither of two evaluations is better", from the difference of each question.

    A difference is a whole number, such as the difference of solved answers. The exact permutation test: under the
    hypothesis each difference has either sign with the same probability. For differences of ±1 it is McNemar's exact
    test.
    """
    sizes = [abs(d) for d in differences if d]
    probability = np.ones(1)
    for size in sizes:
        wider = np.zeros(len(probability) + 2 * size)
        wider[: len(probability)] += 0.5 * probability
        wider[2 * size :] += 0.5 * probability
        probability = wider
    total = sum(sizes)
    distance = np.abs(np.arange(-total, total + 1))
    return min(1.0, float(probability[distance >= abs(sum(differences))].sum()))
