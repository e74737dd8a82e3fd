"""Simulated studies with known truth, judged by the very functions that judge: error rates and coverage.

20,000 studies and more, seeded. At the border of a null the chance of a false answer is its level, 5 %; with 20,000
studies its estimate has a standard error of 0.15 %, so the bound of 5.5 % is three of them away.
"""

from __future__ import annotations

import numpy as np
import pytest

from equipoise import stats

STUDIES = 60_000
SEEDS = (3, 5)
BUDGETS = np.log([1e6, 2e6, 4e6, 8e6])


def runs(n: int, *shape: int) -> stats.Array:
    """Losses of the runs of one arm: noise that a seed has in all arms is the caller's to add."""
    return np.random.default_rng([n, *shape]).normal(0.0, 0.02, size=(STUDIES, *shape, n))


def moments(values: stats.Array) -> tuple[stats.Array, stats.Array]:
    return values.mean(axis=-1), values.std(axis=-1, ddof=1)


@pytest.mark.parametrize("n", SEEDS)
def test_t_intervals_cover_the_truth_95_times_in_100(n: int) -> None:
    rows = runs(n)[:20_000] - 0.05
    zero = dict.fromkeys(range(n), 0.0)
    covered = 0
    for row in rows.tolist():
        contrast = stats.paired_contrast(dict(enumerate(row)), zero)
        assert contrast.ci_low is not None and contrast.ci_high is not None
        covered += contrast.ci_low <= -0.05 <= contrast.ci_high
    assert covered / len(rows) == pytest.approx(0.95, abs=0.01)


@pytest.mark.parametrize("n", SEEDS)
@pytest.mark.parametrize("margin", [0.0, 0.02])
def test_one_claim_at_the_border_of_its_null(n: int, margin: float) -> None:
    """Of `lower` and, with the threshold in place of −margin, of `routing`: either side."""
    mean, sd = moments(runs(n) - margin)
    for test in (stats.p_below, stats.p_above):
        assert 0.045 <= np.mean(test(mean, sd, n, -margin) <= 0.05) <= 0.055


@pytest.mark.parametrize("n", SEEDS)
def test_the_size_of_the_equivalence_test(n: int) -> None:
    for border in (-0.1, 0.1):
        mean, sd = moments(runs(n) + border)
        assert np.mean(stats.p_within(mean, sd, n, 0.1) <= 0.05) <= 0.055
        assert np.mean(stats.p_outside(mean, sd, n, 0.1) <= 0.05) <= 0.055


@pytest.mark.parametrize("n", SEEDS)
@pytest.mark.parametrize("num_false", [5, 2])
def test_a_family_of_five_has_one_error_rate(n: int, num_false: int) -> None:
    """All five nulls true, or two of them beside three real gaps; one reference arm serves all five claims."""
    gaps = np.where(np.arange(5) < num_false, 0.0, -1.0)
    mean, sd = moments(runs(n, 5) + gaps[:, None] - runs(n, 1))
    supported = stats.holm(stats.p_below(mean, sd, n, 0.0)) <= 0.05
    assert np.mean(supported[:, :num_false].any(axis=-1)) <= 0.055
    assert supported[:, num_false:].sum() >= 0.9 * STUDIES * (5 - num_false)


@pytest.mark.parametrize("n", SEEDS)
@pytest.mark.parametrize("other", [0.0, 0.5])
def test_a_lead_that_is_not_the_largest_is_rarely_said_to_be(n: int, other: float) -> None:
    """Four rungs, as in the preset ladder: the middle step gains as much as the first, and `other` more than the last.

    Neighbouring steps share an arm, so the two differences of leads are correlated; the claim takes the larger p, its
    opposite twice the smaller.
    """
    a, b, c, d = np.moveaxis(runs(n, 4) + np.array([0.6, 0.3, 0.0, other - 0.3])[:, None], -2, 0)
    first, last = ((b - c) - (a - b), (b - c) - (c - d))
    p_sup, p_ref = ([test(*moments(x), n, 0.0) for x in (first, last)] for test in (stats.p_above, stats.p_below))
    assert np.mean(np.maximum(*p_sup) <= 0.05) <= 0.055
    assert np.mean(2 * np.minimum(*p_ref) <= 0.05) <= 0.055
    if other:  # far from the last step's border the whole level is spent at the first one's
        assert np.mean(np.maximum(*p_sup) <= 0.05) >= 0.045


@pytest.mark.parametrize("n", SEEDS)
def test_a_lead_without_a_trend_rarely_has_one(n: int) -> None:
    lead = 0.1 + np.random.default_rng(n).normal(0.0, 0.02, size=(STUDIES // 2, n, 4))
    slope, _ = stats.fit_line(BUDGETS, lead)
    mean, sd = moments(slope)
    assert 0.045 <= np.mean(stats.p_above(mean, sd, n, 0.0) <= 0.05) <= 0.055


@pytest.mark.parametrize("n", SEEDS)
def test_equal_arms_are_rarely_faster(n: int) -> None:
    """The statistic is symmetric between equal arms but not normal; false answers stay below the level all the same."""
    noise = np.random.default_rng(n).normal(0.0, 0.01, size=(2, STUDIES // 2, n, 4))
    left, right = 3.0 - 0.3 * (BUDGETS - BUDGETS[0]) + noise
    target = np.maximum(left[..., -1], right[..., -1])
    ours, theirs = (stats.first_reach(BUDGETS, curve, target)[0] for curve in (left, right))
    mean, sd = moments(ours - theirs)
    for test in (stats.p_below, stats.p_above):
        assert np.mean(test(mean, sd, n, 0.0) <= 0.05) <= 0.055
