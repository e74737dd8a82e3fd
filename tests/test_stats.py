"""`stats` against scipy, closed forms at two degrees of freedom, textbook Holm, closed testing, walks along curves."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from equipoise import stats

values = st.lists(st.floats(-5, 5, allow_subnormal=False), min_size=3, max_size=8)
p_values = st.lists(st.floats(0, 1), min_size=1, max_size=5)


def p_t2(t: float) -> float:
    """P(T ≤ t) of Student's t with two degrees of freedom has a closed form: the whole test for three seeds."""
    return 0.5 + t / (2 * math.sqrt(2 + t * t))


# ------------------------------------------------------------------------------------------------ mean and sd


def test_mean_and_sd_by_hand() -> None:
    assert stats.mean_sd([2.0, 4.0, 9.0]) == (5.0, math.sqrt(13.0), 3)  # (9 + 1 + 16) / 2
    assert stats.mean_sd([2.5]) == (2.5, None, 1)
    assert stats.mean_sd([]) == (None, None, 0)


def test_equal_values_have_no_spread_at_all() -> None:
    assert stats.mean_sd([0.1] * 3) == (0.1, 0.0, 3)  # sum / 3 would be 0.10000000000000002


def test_spread_of_near_equal_large_values_is_kept() -> None:
    assert stats.mean_sd([1e9, 1e9 + 1, 1e9 + 2]) == (1e9 + 1, 1.0, 3)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_must_be_finite(bad: float) -> None:
    with pytest.raises(ValueError, match=rf"^mean and sd: {bad} is not accepted; expected finite numbers$"):
        stats.mean_sd([1.0, bad])


# ------------------------------------------------------------------------------------------------ contrasts


def test_contrast_of_three_seeds_by_hand() -> None:
    """The published gap: −0.0758 ± 0.0021 over three seeds; t(0.975, 2) = 4.30265, t(0.95, 2) = 2.91999."""
    right = {0: 1.65, 1: 1.66, 2: 1.64}
    left = {0: 1.65 - 0.0779, 1: 1.66 - 0.0758, 2: 1.64 - 0.0737}
    contrast = stats.paired_contrast(left, right)
    assert contrast.n == 3
    assert contrast.confidence == 0.95
    assert contrast.mean == pytest.approx(-0.0758, abs=1e-12)
    assert contrast.sd == pytest.approx(0.0021, abs=1e-12)
    assert contrast.ci_low == pytest.approx(-0.0758 - 4.30265 * 0.0021 / math.sqrt(3), abs=1e-7)
    assert contrast.ci_high == pytest.approx(-0.0758 + 4.30265 * 0.0021 / math.sqrt(3), abs=1e-7)
    assert contrast.noise_floor == pytest.approx(2.91999 * 0.0021 / math.sqrt(3), abs=1e-7)


@settings(max_examples=60)
@given(data=st.data(), left=values, confidence=st.sampled_from([0.5, 0.8, 0.95, 0.99]))
def test_contrast_agrees_with_scipy(data: st.DataObject, left: list[float], confidence: float) -> None:
    right = data.draw(st.lists(st.floats(-5, 5), min_size=len(left), max_size=len(left)))
    differences = np.subtract(left, right)
    sd = float(np.std(differences, ddof=1))
    contrast = stats.paired_contrast(dict(enumerate(left)), dict(enumerate(right)), confidence, alpha=0.1)
    assert contrast.sd == pytest.approx(sd, rel=1e-9, abs=1e-14)
    if sd < 1e-6:
        return  # scipy warns of lost precision; without spread is tested below
    low, high = scipy_stats.t.interval(confidence, len(left) - 1, np.mean(differences), sd / math.sqrt(len(left)))
    assert (contrast.ci_low, contrast.ci_high) == pytest.approx((low, high), rel=1e-9, abs=1e-12)
    assert contrast.noise_floor == pytest.approx(scipy_stats.t.ppf(0.9, len(left) - 1) * sd / math.sqrt(len(left)))
    oracle = scipy_stats.ttest_rel(left, right)
    assert contrast.mean is not None
    two_sided = 2 * min(test(contrast.mean, sd, len(left), 0.0) for test in (stats.p_below, stats.p_above))
    assert two_sided == pytest.approx(oracle.pvalue, rel=1e-7, abs=1e-15)


def test_seeds_of_one_arm_alone_are_ignored() -> None:
    contrast = stats.paired_contrast({3: 1.0, 0: 2.0, 7: 100.0}, {0: 1.5, 3: 0.0, 5: 100.0})
    assert dict(contrast.per_seed) == {0: 0.5, 3: 1.0}
    assert list(contrast.per_seed) == [0, 3]
    assert contrast.n == 2


def test_two_seeds_have_an_interval_one_has_none_and_none_has_no_mean() -> None:
    two = stats.paired_contrast({0: 1.0, 1: 2.0}, {0: 0.0, 1: 0.0})
    assert two.ci_high == pytest.approx(1.5 + 12.7062 * 0.5, abs=1e-4)  # t(0.975, 1) = 12.7062, sd / √2 = 0.5
    one = stats.paired_contrast({0: 1.0}, {0: 3.0})
    assert (one.n, one.mean, one.sd, one.ci_low, one.ci_high, one.noise_floor) == (1, -2.0, None, None, None, None)
    none = stats.paired_contrast({0: 1.0}, {1: 3.0})
    assert (none.n, none.mean, none.sd, none.ci_low, none.ci_high, none.noise_floor) == (
        0,
        None,
        None,
        None,
        None,
        None,
    )
    assert dict(none.per_seed) == {}


def test_rounding_is_no_spread() -> None:
    """2.3 − 2.2, 1.1 − 1.0 and 0.7 − 0.6 are three different floats around 0.1."""
    left, right = {0: 2.3, 1: 1.1, 2: 0.7}, {0: 2.2, 1: 1.0, 2: 0.6}
    contrast = stats.paired_contrast(left, right)
    assert len(set(contrast.per_seed.values())) == 3
    assert contrast.sd == 0.0
    assert contrast.ci_low == contrast.ci_high == contrast.mean
    assert contrast.noise_floor == 0.0
    assert contrast.mean is not None
    assert stats.p_above(contrast.mean, contrast.sd, 3, 0.1) == 1.0  # equal to the shift, whatever the last bit says
    assert stats.p_below(contrast.mean, contrast.sd, 3, 0.1) == 1.0


def test_a_small_true_spread_stays() -> None:
    contrast = stats.paired_contrast({0: 2.0, 1: 2.0 + 1e-9, 2: 2.0 - 1e-9}, {0: 1.0, 1: 1.0, 2: 1.0})
    assert contrast.sd == pytest.approx(1e-9, rel=1e-5)


@pytest.mark.parametrize("level", [0.0, 1.0, -0.5, math.nan])
def test_levels_lie_between_0_and_1(level: float) -> None:
    with pytest.raises(ValueError, match=rf"^confidence = {level} is not accepted; expected between 0 and 1$"):
        stats.paired_contrast({0: 1.0}, {0: 1.0}, level)
    with pytest.raises(ValueError, match=rf"^alpha = {level} is not accepted; expected between 0 and 1$"):
        stats.paired_contrast({0: 1.0}, {0: 1.0}, alpha=level)


# ------------------------------------------------------------------------------------------------ tests


def test_one_sided_p_has_its_closed_form_for_three_seeds() -> None:
    for mean, sd, shift in [(-0.0758, 0.0021, 0.0), (0.018, 0.002, 0.0), (-0.057, 0.027, -0.02), (0.5, 2.0, 0.7)]:
        t = (mean - shift) / (sd / math.sqrt(3))
        assert stats.p_below(mean, sd, 3, shift) == pytest.approx(p_t2(t), rel=1e-9)
        assert stats.p_above(mean, sd, 3, shift) == pytest.approx(p_t2(-t), rel=1e-9)


@settings(max_examples=60)
@given(sample=values, shift=st.floats(-3, 3))
def test_one_sided_p_agrees_with_scipy(sample: list[float], shift: float) -> None:
    mean, sd, n = stats.mean_sd(sample)
    if mean is None or sd is None or sd < 1e-6:
        return
    for ours, alternative in ((stats.p_below, "less"), (stats.p_above, "greater")):
        oracle = scipy_stats.ttest_1samp(sample, shift, alternative=alternative).pvalue
        assert ours(mean, sd, n, shift) == pytest.approx(oracle, rel=1e-6, abs=1e-15)


def test_equivalence_is_the_larger_and_its_opposite_twice_the_smaller() -> None:
    low, high = (0.01 + 0.05) / (0.02 / math.sqrt(3)), (0.01 - 0.05) / (0.02 / math.sqrt(3))
    assert stats.p_within(0.01, 0.02, 3, 0.05) == pytest.approx(max(p_t2(-low), p_t2(high)), rel=1e-9)
    assert stats.p_outside(0.01, 0.02, 3, 0.05) == 1.0  # twice the smaller of 1 − those, capped
    low, high = (-0.09 + 0.05) / (0.02 / math.sqrt(3)), (-0.09 - 0.05) / (0.02 / math.sqrt(3))
    assert stats.p_outside(-0.09, 0.02, 3, 0.05) == pytest.approx(2 * min(p_t2(low), p_t2(-high)), rel=1e-9)


@pytest.mark.parametrize(
    ("mean", "below", "above", "within", "outside"),
    [
        (-0.2, 0.0, 1.0, 1.0, 0.0),  # beyond −0.1
        (-0.1, 1.0, 1.0, 1.0, 1.0),  # on the border: nothing is shown, either way
        (0.0, 1.0, 0.0, 0.0, 1.0),
        (0.1, 1.0, 0.0, 1.0, 1.0),
        (0.2, 1.0, 0.0, 1.0, 0.0),
    ],
)
def test_without_spread_the_side_of_the_mean_decides(
    mean: float, below: float, above: float, within: float, outside: float
) -> None:
    assert stats.p_below(mean, 0.0, 3, -0.1) == below
    assert stats.p_above(mean, 0.0, 3, -0.1) == above
    assert stats.p_within(mean, 0.0, 3, 0.1) == within
    assert stats.p_outside(mean, 0.0, 3, 0.1) == outside


def test_arrays_of_studies_mix_with_and_without_spread() -> None:
    p = stats.p_below([-1.0, 0.0, -1.0, 1.0], [0.0, 0.0, 1.0, 1e-320], 3, 0.0)
    assert p.tolist() == [0.0, 1.0, pytest.approx(p_t2(-math.sqrt(3))), 1.0]


def test_a_test_needs_two_values() -> None:
    with pytest.raises(ValueError, match=r"^t test: n = 1 is not accepted; expected 2 or more$"):
        stats.p_above(0.0, 1.0, 1, 0.0)


# ------------------------------------------------------------------------------------------------ Holm


@pytest.mark.parametrize(
    ("raw", "adjusted"),
    [
        ([0.01, 0.04, 0.03, 0.005], [0.03, 0.06, 0.06, 0.02]),  # 0.005·4, 0.01·3, 0.03·2, max(0.06, 0.04·1)
        ([0.01, 0.02, 0.03], [0.03, 0.04, 0.04]),
        ([0.6, 0.5, 0.001], [1.0, 1.0, 0.003]),
        ([0.02, 0.02], [0.04, 0.04]),
        ([0.04], [0.04]),
        ([], []),
    ],
)
def test_holm_by_hand(raw: list[float], adjusted: list[float]) -> None:
    assert stats.holm(raw).tolist() == pytest.approx(adjusted, abs=1e-15)


@settings(max_examples=80)
@given(p=p_values)
def test_holm_is_closed_testing_with_bonferroni(p: list[float]) -> None:
    """A hypothesis is rejected when every intersection that holds it is: an oracle by all subsets."""
    everyone = range(len(p))
    subsets = [s for size in range(1, len(p) + 1) for s in itertools.combinations(everyone, size)]
    oracle = [max(min(1.0, len(s) * min(p[j] for j in s)) for s in subsets if i in s) for i in everyone]
    assert stats.holm(p).tolist() == pytest.approx(oracle, abs=1e-12)


def test_holm_works_along_the_last_axis() -> None:
    rows = np.array([[0.01, 0.04, 0.03], [0.5, 0.001, 0.2]])
    assert stats.holm(rows).tolist() == [stats.holm(row).tolist() for row in rows]
    assert rows.tolist() == [[0.01, 0.04, 0.03], [0.5, 0.001, 0.2]]


# ------------------------------------------------------------------------------------------------ over budgets


@settings(max_examples=40)
@given(ys=st.lists(st.floats(-5, 5), min_size=3, max_size=3))
def test_a_line_is_scipys(ys: list[float]) -> None:
    x = [0.3, 1.1, 4.7]
    oracle = scipy_stats.linregress(x, ys)
    slope, height = stats.fit_line(x, ys)
    assert (slope, height) == (pytest.approx(oracle.slope, abs=1e-12), pytest.approx(sum(ys) / 3, abs=1e-12))
    both, _ = stats.fit_line(x, [ys, ys[::-1]])
    assert both.tolist() == pytest.approx([oracle.slope, scipy_stats.linregress(x, ys[::-1]).slope], abs=1e-12)


def test_a_line_needs_two_places() -> None:
    with pytest.raises(
        ValueError, match=r"^line: x = \[2.0, 2.0\] is not accepted; expected two different values or more$"
    ):
        stats.fit_line([2.0, 2.0], [1.0, 3.0])


def reach_slowly(x: list[float], y: list[float], target: float) -> float | None:
    """A hundred thousand steps along the curve."""
    for place in np.linspace(x[0], x[-1], 100_001):
        if np.interp(place, x, y) <= target:
            return float(place)
    return None


@settings(max_examples=25)
@given(y=st.lists(st.floats(0, 5), min_size=4, max_size=4), target=st.floats(0.5, 4.5))
def test_first_reach_is_a_walk_along_the_curve(y: list[float], target: float) -> None:
    x = [1.0, 1.5, 3.0, 4.0]
    found, bound = stats.first_reach(x, y, target)
    slowly = reach_slowly(x, y, target)
    if slowly is None:
        assert math.isnan(found) or np.interp(float(found), x, y) == pytest.approx(target, abs=1e-9)
    else:
        assert found == pytest.approx(slowly, abs=4e-5)
    assert bound == (y[0] < target)


def test_first_reach_works_on_arrays_of_curves() -> None:
    x, y = [0.0, 1.0, 2.0], [[5.0, 3.0, 2.0], [1.0, 3.0, 2.0], [2.0, 3.0, 2.0], [5.0, 4.0, 3.0]]
    found, bound = stats.first_reach(x, y, [4.0, 2.0, 2.0, 2.5])
    assert found[:3].tolist() == [0.5, 0.0, 0.0] and math.isnan(found[3])
    assert bound.tolist() == [False, True, False, False]
