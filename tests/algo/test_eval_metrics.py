"""Metrics of evaluations against values computed by hand and by brute force."""

import random
from itertools import combinations
from math import comb
from statistics import fmean

import pytest

from arealite.algo.eval_metrics import _t_quantile, interval, majority_at_k, paired_p_value, pass_at_k, reported_counts


def test_reported_counts_are_powers_of_two_and_all_answers():
    assert [reported_counts(n) for n in (1, 2, 3, 8, 12)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 12]]


def test_pass_at_k_by_hand():
    # Of four answers one is right: one draw finds it with 1/4, two with 1 - (3/4)(2/3) = 1/2, four always.
    assert [pass_at_k(4, 1, k) for k in (1, 2, 4)] == [0.25, 0.5, 1.0]
    assert pass_at_k(8, 0, 8) == 0 and pass_at_k(8, 8, 1) == 1
    # Fewer wrong answers than draws.
    assert pass_at_k(8, 5, 4) == 1


@pytest.mark.parametrize(("n", "solved", "k"), [(5, 2, 3), (8, 1, 4), (6, 3, 2)])
def test_pass_at_k_is_the_share_of_subsets_with_a_solved_answer(n, solved, k):
    answers = [i < solved for i in range(n)]
    assert pass_at_k(n, solved, k) == pytest.approx(fmean(any(s) for s in combinations(answers, k)))


def test_pass_at_k_is_unbiased():
    """Averaged over all outcomes of n answers, it is the probability for k new answers."""
    n, p = 6, 0.3
    for k in (1, 2, 4):
        outcomes = ((comb(n, c) * p**c * (1 - p) ** (n - c), c) for c in range(n + 1))
        assert sum(weight * pass_at_k(n, c, k) for weight, c in outcomes) == pytest.approx(1 - (1 - p) ** k)


def test_majority_by_hand():
    votes, solved = [0, 0, 2, 3], [True, True, False, False]
    # One answer of four: half of them are right. All four: the right answer has two votes of four.
    assert majority_at_k(votes, solved, 1) == 0.5 and majority_at_k(votes, solved, 4) == 1
    # Pairs: {0,0} right; {0,2} and {0,3}, twice each, are ties; {2,3} wrong. (1 + 4/2 + 0) / 6
    assert majority_at_k(votes, solved, 2) == pytest.approx(0.5)
    # The majority is wrong though one answer is right.
    assert majority_at_k([0, 1, 1, 1], [True, False, False, False], 4) == 0


def test_majority_of_many_answers_is_close_to_brute_force():
    draw = random.Random(1)
    votes = [draw.choice([0, 0, 0, 1, 1, 2, 3]) for _ in range(14)]
    solved = [vote == 0 for vote in votes]

    def right(subset):
        most = max(subset.count(v) for v in subset)
        winners = {v for v in subset if subset.count(v) == most}
        return (0 in winners) / len(winners)

    # C(14, 7) = 3432 subsets, of which 256 are drawn: four standard errors of a mean of numbers in [0, 1].
    brute = fmean(right(subset) for subset in combinations(votes, 7))
    assert majority_at_k(votes, solved, 7) == pytest.approx(brute, abs=4 * 0.5 / 16)
    assert majority_at_k(votes, solved, 14) == right(votes)


def test_the_interval_of_single_answers_is_wilsons():
    # Wilson 1927 for 10 of 50 (z = 1.96): 0.1124, 0.3304.
    assert interval([1.0] * 10 + [0.0] * 40, 50) == pytest.approx((0.1124, 0.3304), abs=1e-4)
    # 0 of 20: z² / (20 + z²).
    assert interval([0.0] * 20, 20) == pytest.approx((0, 3.8415 / 23.8415), abs=1e-4)
    assert interval([1.0] * 20, 160) == pytest.approx((20 / 23.8415, 1), abs=1e-4)


def test_repeated_answers_to_few_questions_are_not_independent():
    clustered, single = interval([1.0] * 5 + [0.0] * 15, 20 * 8), interval([1.0] * 5 + [0.0] * 15, 20)
    assert clustered == single
    # If every question is answered right half of the time, all answers count, but for the few questions that show it:
    # 160 (1.975 / 2.093)² = 142.5.
    low, high = interval([0.5] * 20, 160)
    assert (low, high) == pytest.approx(interval([1.0, 0.0] * 71, 142), abs=1e-3)
    # One question says nothing about others, however many answers it has.
    assert interval([0.5], 64) == pytest.approx((0.0546, 0.9454), abs=1e-4)
    assert interval([1.0], 64) == interval([1.0], 1)


@pytest.mark.parametrize(
    ("degrees", "value"), [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (50, 2.009)]
)
def test_quantiles_of_students_distribution(degrees, value):
    assert _t_quantile(degrees) == pytest.approx(value, rel=0.01)


@pytest.mark.parametrize("num_questions", [2, 3, 5, 8])
@pytest.mark.parametrize("shape", [(1, 2), (0.3, 0.3), (5, 5)])
def test_the_interval_of_few_questions_is_not_too_narrow(num_questions, shape):
    """Eight answers to each question. By the quantiles of the normal distribution 77 to 93 of 100 contain the truth."""
    draw, covered, rounds, truth = random.Random(3), 0, 1000, shape[0] / sum(shape)
    for _ in range(rounds):
        rates = [draw.betavariate(*shape) for _ in range(num_questions)]
        scores = [sum(draw.random() < rate for _ in range(8)) / 8 for rate in rates]
        low, high = interval(scores, num_questions * 8)
        covered += low <= truth <= high
    # Four standard errors of a proportion of 0.95 over 1000 rounds are 0.028.
    assert covered / rounds > 0.95 - 0.028


def test_the_interval_contains_the_truth_in_95_of_100_evaluations():
    draw, covered, rounds, num_questions, n = random.Random(7), 0, 600, 60, 4
    # Probabilities of a question: Beta(1, 2), mean 1/3.
    for _ in range(rounds):
        rates = [draw.betavariate(1, 2) for _ in range(num_questions)]
        scores = [sum(draw.random() < rate for _ in range(n)) / n for rate in rates]
        low, high = interval(scores, num_questions * n)
        covered += low <= 1 / 3 <= high
    # Four standard errors of a proportion of 0.95 over 600 rounds are 0.036.
    assert covered / rounds == pytest.approx(0.95, abs=0.036)


def test_the_paired_test_is_mcnemars_for_single_answers():
    gained, lost = 9, 2
    # Binomial(11, 1/2): two-sided P(at most 2 or at least 9).
    exact = 2 * sum(comb(11, i) for i in range(3)) / 2**11
    assert paired_p_value([1] * gained + [-1] * lost + [0] * 40) == pytest.approx(exact)
    assert paired_p_value([0] * 5) == 1 and paired_p_value([]) == 1
    assert paired_p_value([1, -1]) == 1


def test_the_paired_test_enumerates_all_signs():
    differences = [3, -1, 2, 2]
    signs = [[1 if i >> j & 1 else -1 for j in range(4)] for i in range(16)]
    sums = [sum(s * abs(d) for s, d in zip(row, differences, strict=True)) for row in signs]
    assert paired_p_value(differences) == pytest.approx(fmean(abs(s) >= 6 for s in sums))
