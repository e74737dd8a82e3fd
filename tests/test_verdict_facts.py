"""Which runs may carry a verdict: lost and collapsed runs, too few seeds, what came after the lock, repeated data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from equipoise.spec.claims import LowerClaim
from equipoise.verdict import Cell, Verdict, judge

BUDGET = 1000
THREE = (0, 1, 2)
GOOD = (-0.11, -0.10, -0.09)
"""Differences of three seeds that support "left is lower"."""


def lower(id: str = "c", left: str | tuple[str, ...] = "left", right: str = "right", **fields: Any) -> LowerClaim:
    return LowerClaim(id=id, left=left, right=right, **fields)


def differing(*differences: float) -> dict[str, dict[int, float]]:
    """Arms "left" and "right" with these differences, one a seed."""
    right = {seed: 2.0 + 0.25 * seed for seed in range(len(differences))}
    return {"left": {seed: right[seed] + d for seed, d in enumerate(differences)}, "right": right}


def cells(arms: Mapping[str, Mapping[int, float]], **facts: Any) -> dict[tuple[str, int], Cell]:
    """One budget, one metric; `facts` go to the arm "left"."""
    return {
        (name, BUDGET): Cell(values={"val_loss": values}, **(facts if name == "left" else {}))
        for name, values in arms.items()
    }


def three_arms(
    mean_a: float, mean_b: float, sd: float = 0.01, lost_b: int | None = None
) -> dict[tuple[str, int], Cell]:
    """Arms a and b with these mean differences to "right"; the run of seed `lost_b` of b diverged."""
    right = {0: 2.0, 1: 2.5, 2: 1.5}
    arms = {name: {s: right[s] + mean + sd * (s - 1) for s in right} for name, mean in (("a", mean_a), ("b", mean_b))}
    runs = cells({**arms, "right": right})
    if lost_b is not None:
        runs["b", BUDGET] = Cell(values={"val_loss": arms["b"]}, lost={lost_b: "diverged"})
    return runs


def one(claim: LowerClaim, runs: Mapping[tuple[str, int], Cell], seeds: Sequence[int] = THREE, **how: Any) -> Verdict:
    (verdict,) = judge([claim], runs, seeds=seeds, budgets=[BUDGET], **how)
    return verdict


# ------------------------------------------------------------------------------------------------ held claims


@pytest.mark.parametrize(
    ("differences", "reason"),
    [
        (
            (-0.5,),
            "not judged: a verdict needs 3 seeds with both arms, here is 1; "
            "left is lower than right by 0.5000 nats per token (n = 1)",
        ),
        (
            (-0.5, -0.5001),
            "not judged: a verdict needs 3 seeds with both arms, here are 2; left is lower than right by 0.5000 nats "
            "per token (unadjusted 95 % interval of the difference −0.5007 to −0.4994, n = 2)",
        ),
    ],
)
def test_one_or_two_seeds_give_no_verdict(differences: tuple[float, ...], reason: str) -> None:
    verdict = one(lower(), cells(differing(*differences)), range(len(differences)))
    assert verdict.verdict == "inconclusive"
    assert verdict.reason == reason
    assert verdict.p == verdict.p_adjusted == {}
    assert verdict.marks == ()


def test_a_list_is_held_by_one_lost_run_of_one_member() -> None:
    runs = three_arms(-0.10, -0.06, lost_b=1)
    verdict = one(lower(left=("a", "b")), runs)
    assert verdict.verdict == "inconclusive"
    assert [pair.contrast.n for pair in verdict.contrasts] == [3, 2]
    assert verdict.reason.startswith("not judged: b seed 1 diverged, and a verdict needs 3 seeds")


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ("diverged", "left seed 3 diverged"),
        ("missing", "left seed 3 is missing"),
        ("started", "left seed 3 is unfinished"),
        ("interrupted", "left seed 3 is interrupted"),
        ("broken", "left seed 3 is broken"),
    ],
)
def test_a_lost_run_is_at_most_inconclusive_and_said(status: str, said: str) -> None:
    """Three whole seeds of four would support the claim; whatever value the lost run left behind is not used."""
    arms = differing(*GOOD, +9.0)
    verdict = one(lower(), cells(arms, lost={3: status}), range(4))
    assert verdict.verdict == "inconclusive"
    assert verdict.reason.startswith(
        f"not judged: {said}; left is lower than right by 0.1000 nats per token (unadjusted "
    )
    assert verdict.contrasts[0].contrast.n == 3
    assert verdict.marks == ("lost run",)


def test_a_seed_without_a_value_is_a_lost_run() -> None:
    arms = differing(*GOOD)
    verdict = one(lower(), cells(arms), range(5))
    assert verdict.held == ("left seeds 3, 4 are missing", "right seeds 3, 4 are missing")
    arms["right"][2] = math.nan
    verdict = one(lower(), cells(arms))
    assert verdict.held[0] == "right seed 2 is without a finite val_loss"
    assert verdict.contrasts[0].contrast.n == 2
    del arms["right"]
    verdict = one(lower(), cells(arms))
    assert verdict.held[0] == "right seeds 0, 1, 2 are missing"
    assert verdict.reason.endswith("here are 0; no seed has both left and right")


def test_a_collapsed_run_holds_the_claim_unless_allowed() -> None:
    runs = cells(differing(*GOOD), collapsed=[2, 0])
    held = one(lower(), runs)
    assert held.verdict == "inconclusive"
    assert held.reason.startswith("not judged: routing collapsed in left seeds 0, 2; left is lower than right by ")
    assert held.marks == ("collapsed",)
    allowed = one(lower(allow_collapsed=True), runs)
    assert allowed.verdict == "supported"
    assert allowed.marks == ("collapsed",)
    assert one(lower(left="right", right="left"), runs).verdict == "inconclusive"  # in either arm


def test_a_held_claim_enters_holm_with_1() -> None:
    """A held claim makes the other pay for two, two of them for three: 0.02·2 is below 0.05, 0.02·3 is not."""
    runs = three_arms(-0.0280, -0.10, lost_b=0)
    claims = [lower("one", "a"), lower("held", "b")]
    first, held = judge(claims, runs, seeds=THREE, budgets=[BUDGET])
    assert first.p["sup"] == pytest.approx(0.0200, abs=1e-4)
    assert first.p_adjusted["sup"] == pytest.approx(2 * first.p["sup"])
    assert (held.p, held.p_adjusted) == ({}, {})
    third = judge([*claims, lower("held2", "b")], runs, seeds=THREE, budgets=[BUDGET])[0]
    assert third.p_adjusted["sup"] == pytest.approx(3 * first.p["sup"])
    assert (first.verdict, third.verdict) == ("supported", "inconclusive")


def test_a_claim_without_equivalence_enters_that_family_with_1() -> None:
    runs = three_arms(0.002, -0.2)
    alone = one(lower(left="a", equivalence_margin=0.05), runs)
    pair = judge([lower("x", "a", equivalence_margin=0.05), lower("y", "b")], runs, seeds=THREE, budgets=[BUDGET])
    assert pair[0].p_adjusted["eq"] == pytest.approx(2 * alone.p["eq"])
    assert [verdict.verdict for verdict in pair] == ["equivalent", "supported"]


# ------------------------------------------------------------------------------------------------ lock and marks


def test_post_hoc_claims_are_a_family_of_their_own() -> None:
    runs = cells(differing(-0.084, -0.057, -0.030))
    claims = [lower("late1"), lower("locked"), lower("late2")]
    verdicts = judge(claims, runs, seeds=THREE, budgets=[BUDGET], post_hoc={"late1", "late2"})
    assert [verdict.claim.id for verdict in verdicts] == ["late1", "locked", "late2"]
    assert [verdict.post_hoc for verdict in verdicts] == [True, False, True]
    assert [verdict.verdict for verdict in verdicts] == ["inconclusive", "supported", "inconclusive"]
    assert [verdict.marks for verdict in verdicts] == [("post hoc",), (), ("post hoc",)]
    assert "(over 2 post hoc claims)" in verdicts[0].reason


def test_seeds_added_after_the_lock_are_shown_and_not_judged() -> None:
    """The locked seeds support the claim, all five do not; a lost run among the added ones does not hold it."""
    arms = differing(*GOOD, 0.3, 0.5)
    locked = one(lower(), cells(arms), range(5), locked_seeds=THREE)
    assert locked.verdict == "supported"
    assert (locked.contrasts[0].contrast.n, locked.post_hoc_contrasts[0].contrast.n) == (3, 5)
    assert locked.post_hoc_contrasts[0].contrast.mean == pytest.approx(0.1)
    late = one(lower(), cells(arms), range(5), locked_seeds=THREE, post_hoc=["c"])
    assert late.verdict == "inconclusive"
    assert (late.contrasts[0].contrast.n, late.post_hoc_contrasts) == (5, ())
    lost = one(lower(), cells(arms, lost={4: "diverged"}), range(5), locked_seeds=THREE)
    assert lost.verdict == "supported"
    assert lost.post_hoc_contrasts[0].contrast.n == 4


def test_a_budget_added_after_the_lock_is_shown_and_not_judged() -> None:
    small, large = differing(*GOOD), differing(0.11, 0.10, 0.09)
    runs = cells(small) | {(name, 9000): Cell(values={"val_loss": values}) for name, values in large.items()}
    claims = [lower("largest"), lower("added", budget=9000), lower("named", budget=BUDGET)]
    largest, added, named = judge(claims, runs, seeds=THREE, budgets=[9000, BUDGET], locked_budgets=[BUDGET])
    assert (largest.budget, largest.verdict, largest.post_hoc) == (BUDGET, "supported", False)
    assert [(pair.budget, pair.contrast.mean) for pair in largest.post_hoc_contrasts] == [(9000, pytest.approx(0.1))]
    assert (added.budget, added.verdict, added.post_hoc) == (9000, "refuted", True)
    assert (named.budget, named.post_hoc_contrasts) == (BUDGET, ())
    assert largest.p_adjusted["sup"] == pytest.approx(2 * largest.p["sup"])  # the added one is in another family
    everything = judge([lower()], runs, seeds=THREE, budgets=[BUDGET, 9000])[0]
    assert (everything.budget, everything.verdict) == (9000, "refuted")


@pytest.mark.parametrize(
    ("epochs", "marks"),
    [(1.0, ()), (1.01, ("repeated data",)), (4.0, ("repeated data",)), (4.2, ("repeated data", "more than 4 epochs"))],
)
def test_repeated_data_is_marked(epochs: float, marks: tuple[str, ...]) -> None:
    runs = cells(differing(*GOOD), epochs=epochs)
    runs["another", BUDGET] = Cell(values={}, epochs=99.0)  # repeats it more often, and has no part in the claim
    verdict = one(lower(), runs)
    assert (verdict.verdict, verdict.marks) == ("supported", marks)
