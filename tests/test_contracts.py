"""Equal cost between arms: every expected number is worked by hand, or by the stupid formula written out again."""

from __future__ import annotations

import math
from typing import Any

import pytest
from scipy import stats as oracle

from equipoise.contracts import Curve, Meeting, Reading, flips, leave_one_out, meet, read_at, table, winner
from equipoise.spec.recipe import WSD, Cosine, decays
from equipoise.stats import paired_contrast

# Loss = 5 − log2(tokens ÷ 100) for seed 0; half a nat above for seed 1; seed 2 has no run at 400.
BUDGETS = (1, 2, 3)
STRAIGHT = Curve(
    arm="b",
    tokens={1: 100, 2: 200, 3: 400},
    losses={1: {0: 5.0, 1: 5.5, 2: 9.0}, 2: {0: 4.0, 1: 4.5, 2: 8.0}, 3: {0: 3.0, 1: 3.5}},
)


def reading(curve: Curve, tokens: float, budgets: tuple[int, ...] = BUDGETS) -> Reading:
    found = read_at(curve, tokens, budgets)
    assert isinstance(found, Reading), found
    return found


def test_a_measured_number_of_tokens_is_the_runs_themselves() -> None:
    assert reading(STRAIGHT, 200) == Reading(losses={0: 4.0, 1: 4.5, 2: 8.0}, between=None)
    assert reading(STRAIGHT, 400.00000001).between is None


def test_between_neighbours_it_is_linear_in_the_logarithm() -> None:
    """ln(141.42 ÷ 100) is half of ln 2: the loss is half-way. At 300, log2(3) = 1.58496…"""
    half = reading(STRAIGHT, 100 * math.sqrt(2))
    assert half.between == (100, 200) and half.losses == pytest.approx({0: 4.5, 1: 5.0, 2: 8.5})
    later = reading(STRAIGHT, 300)
    assert later.between == (200, 400)
    assert later.losses == pytest.approx({0: 3.415037499278844, 1: 3.915037499278844})  # seed 2 has no run at 400


@pytest.mark.parametrize(
    ("tokens", "budgets", "said"),
    [
        (99, BUDGETS, "b would need 99 tokens, outside the measured range (100 to 400)"),
        (401, BUDGETS, "b would need 401 tokens, outside the measured range (100 to 400)"),
        (150, (1,), "b would need 150 tokens, outside the measured range (100 alone)"),
        (150, (1, 3), "b would need 150 tokens, between runs 4 times apart (100 and 400; at most 2.2)"),
        (150, (), "b has no complete run"),
    ],
)
def test_elsewhere_nothing_is_read_and_it_says_why(tokens: int, budgets: tuple[int, ...], said: str) -> None:
    assert read_at(STRAIGHT, tokens, budgets) == said


@pytest.mark.parametrize(("high", "readable"), [(220, True), (221, False)])
def test_neighbours_may_be_2_2_times_apart_and_no_more(high: int, readable: bool) -> None:
    curve = Curve(arm="b", tokens={1: 100, 2: high}, losses={1: {0: 1.0}, 2: {0: 0.5}})
    assert isinstance(read_at(curve, 150, (1, 2)), Reading) == readable


def test_no_seed_with_both_neighbours_is_no_reading() -> None:
    curve = Curve(arm="b", tokens={1: 100, 2: 200}, losses={1: {0: 1.0}, 2: {1: 0.5}})
    assert read_at(curve, 150, (1, 2)) == "b would need 150 tokens: no seed has both neighbouring runs"


def test_two_budgets_of_equal_tokens_are_one_point() -> None:
    curve = Curve(arm="b", tokens={1: 100, 2: 100, 3: 200}, losses={1: {0: 2.0}, 2: {0: 2.0}, 3: {0: 1.0}})
    assert reading(curve, 100 * math.sqrt(2)).losses == pytest.approx({0: 1.5})


def test_the_error_of_a_reading_is_the_worst_miss_of_a_run_left_out() -> None:
    """On a straight line there is none. Bent: the middle is read as 4, half-way between 5 and 3; it is 3.9 or 4.25."""
    assert leave_one_out(STRAIGHT, BUDGETS) == pytest.approx(0.0)
    bent = Curve(
        arm="b",
        tokens={1: 100, 2: 200, 3: 400},
        losses={1: {0: 5.0, 1: 5.0}, 2: {0: 3.9, 1: 4.25}, 3: {0: 3.0, 1: 3.0}},
    )
    assert leave_one_out(bent, BUDGETS) == pytest.approx(0.25)  # seed 1 is missed by more
    assert leave_one_out(bent, (1, 2)) is None


LEFT = Curve(arm="a", tokens={1: 100, 2: 200, 3: 400}, losses={b: {0: 4.0 - b, 1: 4.25 - b} for b in BUDGETS})


def equal(budget: int, costs: tuple[float, float], **changed: Any) -> Meeting:
    arguments: dict[str, Any] = {"costs": costs, "budgets": BUDGETS, "seeds": (0, 1, 2), **changed}
    return meet(LEFT, STRAIGHT, budget, **arguments)


def test_equal_costs_a_token_are_the_runs() -> None:
    met = equal(2, (7.0, 7.0))
    assert met.contrast is not None and met.contrast.per_seed == {0: 2.0 - 4.0, 1: 2.25 - 4.5}
    assert (met.left_tokens, met.right_tokens, met.interpolated, met.residual) == (200, 200, None, 0.0)
    low, high = oracle.t.interval(0.95, 1, -2.125, 0.125)  # differences −2 and −2.25: mean −2.125, sd ÷ √2 = 0.125
    assert (met.contrast.ci_low, met.contrast.ci_high) == (pytest.approx(low), pytest.approx(high))


def test_the_dearer_arm_is_read_at_fewer_tokens() -> None:
    """A token of b costs √2 times as much: beside a at 200 stands b at 141.42, which reads 4.5 and 5.0."""
    met = equal(2, (1.0, math.sqrt(2)))
    assert met.right_tokens == pytest.approx(141.4213562) and met.left_tokens == 200
    assert met.interpolated == "b" and met.between == (100, 200) and met.loo_error == pytest.approx(0.0)
    assert met.contrast is not None and met.contrast.per_seed == pytest.approx({0: 2.0 - 4.5, 1: 2.25 - 5.0})


def test_where_that_leaves_the_range_the_other_arm_is_read() -> None:
    """At the largest budget b would need 566 tokens; a is read instead, at 400 ÷ √2, half-way between 2 and 1."""
    met = equal(3, (math.sqrt(2), 1.0))
    assert met.interpolated == "a" and met.between == (200, 400) and met.right_tokens == 400
    assert met.left_tokens == pytest.approx(282.842712)
    assert met.contrast is not None and met.contrast.per_seed == pytest.approx({0: 1.5 - 3.0, 1: 1.75 - 3.5})


def test_with_one_budget_neither_can_be_read() -> None:
    met = equal(2, (1.0, 2.0), budgets=(2,))
    assert met.contrast is None and met.reason == (
        "b would need 100 tokens, outside the measured range (200 alone); "
        "a would need 400 tokens, outside the measured range (200 alone)"
    )


def test_runs_declared_to_cost_the_same_are_taken_and_the_rest_is_stated() -> None:
    met = equal(2, (1.0, 1.04), declared=True)
    assert met.interpolated is None and met.residual == pytest.approx(0.04)
    assert met.contrast is not None and met.contrast.per_seed == {0: -2.0, 1: -2.25}


def test_ends_without_decay_are_no_curve() -> None:
    met = equal(2, (1.0, 2.0), readable=False)
    assert met.reason == "the schedule does not decay, so the ends of runs are no points of one curve"
    assert equal(2, (1.0, 1.0), readable=False).contrast is not None
    assert [decays(s) for s in (Cosine(), Cosine(final_frac=1.0), WSD(warmup_tokens=0))] == [True, False, True]
    assert not decays(WSD(warmup_tokens=0, decay_frac=0.0)) and not decays(WSD(warmup_tokens=0, final_frac=1.0))


def test_seeds_that_are_not_asked_for_count_for_nothing() -> None:
    met = equal(2, (1.0, math.sqrt(2)), seeds=(1,))
    assert met.contrast is not None and list(met.contrast.per_seed) == [1]
    assert equal(2, (1.0, 1.0), seeds=(2,)).reason == "no seed has complete runs of both a and b"


def test_a_winner_is_the_lower_mean_and_clear_beside_zero() -> None:
    clear = Meeting(contrast=paired_contrast({0: 1.0, 1: 1.01, 2: 0.99}, {0: 2.0, 1: 2.0, 2: 2.0}))
    vague = Meeting(contrast=paired_contrast({0: 1.0, 1: 3.0, 2: 2.6}, {0: 2.0, 1: 2.0, 2: 2.0}))
    assert winner(clear, "a", "b") == ("a", True) and winner(vague, "a", "b") == ("b", False)
    assert winner(Meeting(reason="why"), "a", "b") == (None, False)
    found = flips({"tokens": winner(clear, "a", "b"), "train_flops": ("b", True), "seconds": winner(vague, "a", "b")})
    assert found == [
        {"between": ["tokens", "train_flops"], "clear": True},
        {"between": ["tokens", "seconds"], "clear": False},
    ]


def test_a_cell_of_what_was_not_measured_has_the_same_keys() -> None:
    measured, absent = table(equal(2, (1.0, 1.0)), 3, "a", "b"), table(Meeting(reason="why"), 3, "a", "b")
    assert measured.keys() == absent.keys()
    assert (measured["n"], measured["expected_n"], measured["winner"]) == (2, 3, "a")
    assert (absent["mean"], absent["n"], absent["winner"], absent["reason"]) == (None, 0, None, "why")
