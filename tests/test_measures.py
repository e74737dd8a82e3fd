"""`trend`, `faster` and `routing` against SciPy's line fit, curves worked by hand and closed forms for three seeds."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
from scipy import stats as scipy_stats

from equipoise import stats
from equipoise.measures import Cell, routing_key
from equipoise.spec.claims import AnyClaim, FasterClaim, LowerClaim, RoutingClaim, TrendClaim
from equipoise.verdict import Verdict, judge, table

THREE = (0, 1, 2)
BUDGETS = (1000, 2000, 4000)


def p_t2(t: float) -> float:
    """P(T ≤ t) of Student's t with two degrees of freedom."""
    return 0.5 + t / (2 * math.sqrt(2 + t * t))


def cells(left: Any, right: Any, budgets: Any = BUDGETS, **facts: Any) -> dict[tuple[str, int], Cell]:
    """`left` and `right` hold a row of losses a seed, a column a budget; `facts` go to left at the first budget."""
    return {
        (name, budget): Cell(
            values={"val_loss": {seed: float(row[place]) for seed, row in enumerate(losses)}},
            **(facts if (name, place) == ("left", 0) else {}),
        )
        for name, losses in (("left", left), ("right", right))
        for place, budget in enumerate(budgets)
    }


def one(claim: AnyClaim, runs: dict[tuple[str, int], Cell], budgets: Any = BUDGETS, **how: Any) -> Verdict:
    (verdict,) = judge([claim], runs, seeds=THREE, budgets=budgets, **how)
    return verdict


def trend(direction: Any = "grows", **fields: Any) -> TrendClaim:
    return TrendClaim(id="t", left="left", right="right", direction=direction, **fields)


def faster(**fields: Any) -> FasterClaim:
    return FasterClaim(id="f", left="left", right="right", **fields)


# ------------------------------------------------------------------------------------------------ trend

RIGHT = np.array([[3.0, 2.7, 2.4], [3.1, 2.8, 2.5], [2.9, 2.6, 2.3]])
LEADS = np.array([[0.10, 0.20, 0.31], [0.12, 0.19, 0.30], [0.09, 0.21, 0.29]])


def test_a_trend_is_scipys_slope_on_ln_budget_and_its_t_test() -> None:
    verdict = one(trend(), cells(RIGHT - LEADS, RIGHT))
    slopes = [scipy_stats.linregress(np.log(BUDGETS), row).slope for row in LEADS]
    contrast = verdict.contrasts[0].contrast
    assert list(contrast.per_seed.values()) == pytest.approx(slopes)
    assert verdict.p["sup"] == pytest.approx(scipy_stats.ttest_1samp(slopes, 0, alternative="greater").pvalue)
    assert verdict.p["ref"] == pytest.approx(1 - verdict.p["sup"])
    assert (verdict.verdict, verdict.budget, verdict.budgets) == ("supported", None, BUDGETS)
    assert verdict.reason.startswith(
        "the lead of left over right, in val_loss, grows by 0.1419 nats per token per unit of ln tokens over 3 budgets "
        "from 1k to 4k tokens (unadjusted 95 % interval of the slope "
    )


def test_narrows_is_the_other_side_of_grows() -> None:
    runs = cells(RIGHT - LEADS, RIGHT)
    grows, narrows = one(trend(), runs), one(trend("narrows"), runs)
    assert (narrows.p["sup"], narrows.p["ref"]) == (grows.p["ref"], grows.p["sup"])
    assert narrows.verdict == "refuted"
    assert one(trend("narrows"), cells(RIGHT - LEADS[:, ::-1], RIGHT)).verdict == "supported"


def test_a_trend_counts_the_tokens_really_trained() -> None:
    runs = cells(RIGHT - LEADS, RIGHT)
    real = {place: Cell(values=cell.values, tokens=place[1] ** 2) for place, cell in runs.items()}
    half = one(trend(), real).contrasts[0].contrast.mean
    assert half == pytest.approx(one(trend(), runs).contrasts[0].contrast.mean / 2)  # ln of a square is twice the ln


def test_a_lead_that_never_changes_is_no_trend() -> None:
    flat = one(trend(), cells(RIGHT - 0.1, RIGHT))
    assert flat.verdict == "inconclusive" and flat.p == {"sup": 1.0, "ref": 1.0}
    assert "neither grows nor narrows" in flat.reason


def test_a_trend_needs_every_budget_of_a_seed_and_two_of_them() -> None:
    lost = one(trend(), cells(RIGHT - LEADS, RIGHT, lost={1: "diverged"}))
    assert lost.held[0] == "left seed 1 at 1k tokens diverged" and lost.marks == ("lost run",)
    assert lost.held[1] == "a verdict needs 3 seeds with both arms at every budget, here are 2"
    single = one(trend(), cells(RIGHT - LEADS, RIGHT), budgets=(1000,))
    assert single.held[0] == "it needs at least 2 budgets, here is 1"
    assert single.reason.endswith("no seed has both left and right")
    fallen = one(trend(), cells(RIGHT - LEADS, RIGHT, collapsed=[2]))
    assert fallen.held == ("routing collapsed in left seed 2 at 1k tokens",)
    assert one(trend(allow_collapsed=True), cells(RIGHT - LEADS, RIGHT, collapsed=[2])).verdict == "supported"


def test_budgets_added_after_the_lock_stand_beside_a_trend() -> None:
    runs = cells(RIGHT - LEADS, RIGHT)
    runs["left", BUDGETS[-1]] = dataclasses.replace(runs["left", BUDGETS[-1]], epochs=9.0)
    locked = one(trend(), runs, locked_budgets=BUDGETS[:2])
    assert (locked.budgets, locked.marks) == (BUDGETS[:2], ())
    assert [pair.budgets for pair in locked.post_hoc_contrasts] == [BUDGETS]
    late = one(trend(), runs, locked_budgets=BUDGETS[:2], post_hoc=["t"])
    assert (late.budgets, late.post_hoc_contrasts) == (BUDGETS, ())
    assert late.marks == ("post hoc", "repeated data", "more than 4 epochs")
    more = judge([trend()], runs, seeds=THREE, locked_seeds=(0, 1), budgets=BUDGETS)[0]
    assert [pair.contrast.n for pair in (*more.contrasts, *more.post_hoc_contrasts)] == [2, 3]


# ------------------------------------------------------------------------------------------------ faster


def test_budget_to_reach_a_loss_by_hand() -> None:
    """Targets are right's last losses; left is there half-way, a third of the way, at the last budget."""
    left = [[3.0, 2.5, 2.3], [3.0, 2.8, 2.2], [3.0, 2.6, 2.4]]
    right = [[3.2, 2.9, 2.4], [3.3, 2.9, 2.6], [3.3, 2.8, 2.4]]
    verdict = one(faster(), cells(left, right))
    reach = [2000 * 2**0.5, 2000 * 2 ** (1 / 3), 4000]
    assert list(verdict.contrasts[0].contrast.per_seed.values()) == pytest.approx([math.log(r / 4000) for r in reach])
    assert verdict.contrasts[0].bounds == () and verdict.marks == ()
    mean, sd, _ = stats.mean_sd([math.log(r / 4000) for r in reach])
    assert mean is not None and sd is not None
    assert verdict.p["sup"] == pytest.approx(p_t2(mean / (sd / math.sqrt(3))))
    assert verdict.reason.startswith(
        f"left needs {math.exp(mean):.3g} times the tokens right needs for the same val_loss (geometric mean over "
        "seeds, on loss curves of 3 finished budgets) (unadjusted 95 % interval of the ratio "
    )


def test_the_target_is_the_higher_of_the_two_last_losses_and_the_first_time_counts() -> None:
    slow = [[3.0, 2.3, 2.6]] * 3  # at 2.6 already on the way down, before the curve rises again
    fast = [[2.9, 2.2, 2.1]] * 3
    verdict = one(faster(), cells(slow, fast))
    expected = math.log(2) * ((3.0 - 2.6) / 0.7 - (2.9 - 2.6) / 0.7)
    assert list(verdict.contrasts[0].contrast.per_seed.values()) == pytest.approx([expected] * 3)
    assert verdict.verdict == "refuted"


def test_a_curve_below_the_target_at_the_smallest_budget_is_a_bound_and_marked() -> None:
    left, right = [[2.0, 1.9, 1.8]] * 3, [[3.0, 2.8, 2.5], [3.0, 2.8, 2.4], [3.0, 2.8, 2.3]]
    verdict = one(faster(), cells(left, right))
    assert list(verdict.contrasts[0].contrast.per_seed.values()) == pytest.approx([math.log(1 / 4)] * 3)
    assert (verdict.verdict, verdict.marks, verdict.contrasts[0].bounds) == ("supported", ("bound",), THREE)
    assert "; a bound for seeds 0, 1, 2: below the target already at the smallest budget)" in verdict.reason
    swapped = one(FasterClaim(id="f", left="right", right="left"), cells(left, right))
    assert (swapped.verdict, swapped.marks) == ("refuted", ("bound",))  # a bound never helps the claim it stands in


def test_faster_needs_one_budget_or_three() -> None:
    verdict = one(faster(), cells([[3.0, 2.0]] * 3, [[3.1, 2.1]] * 3, BUDGETS[:2]), BUDGETS[:2])
    assert verdict.held == ("it needs 1 budget, or at least 3, here are 2",)


def test_with_one_budget_faster_is_the_mean_gap_along_the_training_and_says_so() -> None:
    """The evaluation before training (0 tokens) is left out, and so is one that only one arm has."""

    def arm(*losses: float) -> Cell:
        curves = {seed: {0: 9.0, 100: losses[0] + seed, 500: losses[1] + seed} for seed in THREE}
        return Cell(values={"val_loss": dict.fromkeys(THREE, losses[1])}, curves=curves)

    left, right = arm(2.7, 2.49), arm(3.0, 2.5)
    left.curves[0][300] = -50.0  # type: ignore[index]
    right.curves[1][500] = 3.6  # type: ignore[index]
    verdict = one(faster(), {("left", 1000): left, ("right", 1000): right}, budgets=(1000,))
    assert list(verdict.contrasts[0].contrast.per_seed.values()) == pytest.approx([-0.155, -0.205, -0.155])
    assert (verdict.contrasts[0].statistic, verdict.verdict) == ("curve_gap", "supported")
    assert verdict.reason.startswith(
        "left is lower than right by 0.1717 nats per token on average along one training with identical schedules (a "
        "single budget: a gap, not a speed) (unadjusted 95 % interval of the gap "
    )


# ------------------------------------------------------------------------------------------------ routing


def routing(direction: Any = "above", **fields: Any) -> RoutingClaim:
    given: dict[str, Any] = {"metric": "topk_share", "threshold": 0.9, **fields}
    return RoutingClaim(id="r", arm="left", direction=direction, **given)


def shares(claim: RoutingClaim, *values: float, **facts: Any) -> dict[tuple[str, int], Cell]:
    return {("left", 1000): Cell(values={routing_key(claim): dict(enumerate(values))}, **facts)}


def test_a_routing_claim_holds_every_seed_against_the_threshold() -> None:
    claim = routing(layers="max", at_frac=0.05)
    verdict = one(claim, shares(claim, 0.97, 0.99, 0.98), budgets=(1000,))
    assert verdict.p["sup"] == pytest.approx(p_t2(-0.08 / (0.01 / math.sqrt(3))), rel=1e-6)
    assert verdict.verdict == "supported"
    assert verdict.reason == (
        "topk_share (largest of any layer, after 5 % of training) of left is 0.9800, held against 0.9 (unadjusted 95 % "
        "interval of the value 0.9552 to 1.0048, n = 3); the one-sided test gives p = 0.00258 ≤ 0.05"
    )
    below = routing("below", layers="max", at_frac=0.05)
    assert one(below, shares(below, 0.97, 0.99, 0.98), budgets=(1000,)).verdict == "refuted"


def test_a_collapsed_run_never_holds_a_routing_claim_but_a_lost_one_does() -> None:
    claim = routing()
    verdict = one(claim, shares(claim, 1.0, 1.0, 1.0, collapsed=THREE), budgets=(1000,))
    assert (verdict.verdict, verdict.marks) == ("supported", ("collapsed",))
    lost = one(claim, shares(claim, 1.0, 1.0, 1.0, lost={0: "diverged"}), budgets=(1000,))
    assert lost.held == ("left seed 0 diverged", "a verdict needs 3 seeds, here are 2")
    without = one(claim, {("left", 1000): Cell(values={})}, budgets=(1000,))
    assert without.held[0] == "left seeds 0, 1, 2 are without a finite topk_share (mean over layers, at the end)"
    assert without.reason.endswith("; no seed has left")


def test_a_lower_claim_may_be_about_a_routing_diagnostic() -> None:
    values = {"left": (1.0, 1.1, 1.2), "right": (2.0, 2.15, 2.1)}
    runs = {(arm, 1000): Cell(values={"log_z": dict(enumerate(own))}) for arm, own in values.items()}
    verdict = one(LowerClaim(id="z", left="left", right="right", metric="log_z"), runs, budgets=(1000,))
    assert verdict.verdict == "supported"
    assert verdict.reason.startswith("left is lower than right by 0.9833 in log_z (mean over layers) (unadjusted")


# ------------------------------------------------------------------------------------------------ all kinds


def test_kinds_share_one_family_and_are_plain_json() -> None:
    claims = [trend(), faster(), LowerClaim(id="l", left="left", right="right")]
    verdicts = judge(claims, cells(RIGHT - LEADS, RIGHT), seeds=THREE, budgets=BUDGETS)
    raw = [verdict.p["sup"] for verdict in verdicts]
    assert [verdict.p_adjusted["sup"] for verdict in verdicts] == pytest.approx(stats.holm(raw).tolist())
    entries = [table(verdict) for verdict in verdicts]
    assert json.loads(json.dumps(entries, allow_nan=False)) == entries
    assert [entry["contrasts"][0]["statistic"] for entry in entries] == ["slope", "log_ratio", "difference"]
    assert [(entry["direction"], entry["budget"]) for entry in entries] == [("grows", None), (None, None), (None, 4000)]
    claim = routing(threshold=0.4)
    entry = table(one(claim, shares(claim, 0.5, 0.6, 0.7), budgets=(1000,)))
    assert (entry["left"], entry["right"], entry["threshold"], entry["layers"]) == (["left"], None, 0.4, "mean")
