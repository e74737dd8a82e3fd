"""What a claim measures: one number a seed, the contrast over seeds it gives, and the tests made of it.

Not for: which runs may carry a claim, or how claims share an error rate (`verdict`); words (`reasons`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np

from equipoise import stats
from equipoise.spec.claims import (
    AnyClaim,
    EquivalentClaim,
    FasterClaim,
    LargerClaim,
    LowerClaim,
    RoutingClaim,
    Step,
    TrendClaim,
    left_arms,
    right_arm,
)

Lost = Literal["missing", "started", "interrupted", "diverged", "broken"]
Statistic = Literal["difference", "lead_difference", "slope", "log_ratio", "curve_gap", "value"]
"""What a contrast is of: left − right; left's lead over right less that of another step; slope of left's lead on ln
budget; ln(left's budget ÷ right's); the mean of left − right along one training; the value of one arm."""
PValues = Mapping[str, float]
"""p by test: "sup" for the claim, "ref" against it, "eq" for equivalence; a test that was not made is absent."""

MIN_SEEDS: Final = 3
"""Fewer paired seeds give no verdict: at two, t has one degree of freedom and must exceed 6.3 for p ≤ 0.05."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What is known of the runs of one arm at one budget."""

    values: Mapping[str, Mapping[int, float]]
    """Metric (or `routing_key` of a routing claim) → seed → value."""
    lost: Mapping[int, Lost] = field(default_factory=dict)
    """Seeds whose run is not complete, and why; values they may have are ignored."""
    collapsed: Collection[int] = ()
    """Seeds whose routing collapsed."""
    tokens: int | None = None
    """Tokens a run is really trained on; None = as many as the budget says."""
    epochs: float = 0.0
    """The most passes over the training data that a run has made."""
    curves: Mapping[int, Mapping[int, float]] = field(default_factory=dict)
    """Seed → tokens trained → loss of the curve's evaluations."""


Cells = Mapping[tuple[str, int], Cell]
"""(arm, budget) → its runs."""


@dataclass(frozen=True, kw_only=True)
class ArmContrast:
    """A contrast, the arms it is between, and its own tests."""

    left: str
    right: str | None
    """None: the left arm alone, whose value is held against a threshold."""
    than: Step | None = None
    """The step whose lead is taken from left's lead over right; None: none is."""
    budget: int | None
    """None: over several budgets."""
    budgets: tuple[int, ...]
    """Every budget it is over, rising."""
    statistic: Statistic
    contrast: stats.Contrast
    bounds: tuple[int, ...] = ()
    """Seeds whose value is a bound: a curve was below the target already at the smallest budget."""
    p: PValues
    """The claim's tests for this contrast alone, unadjusted; empty below MIN_SEEDS."""

    @property
    def arms(self) -> tuple[str, ...]:
        """Every arm it is of."""
        return _arms(self.left, self.right, self.than)


def routing_key(claim: RoutingClaim) -> str:
    """The name under which a cell holds what a routing claim is about: diagnostic, layers and time."""
    return f"{claim.metric}, {claim.layers} over layers, at_frac {claim.at_frac:g}"


def value_key(claim: AnyClaim) -> str:
    """The name under which a cell holds the values a claim needs."""
    return routing_key(claim) if isinstance(claim, RoutingClaim) else claim.metric


def cell_of(cells: Cells, arm: str, budget: int) -> Cell:
    """The cell, an empty one where nothing is known."""
    return cells.get((arm, budget), Cell(values={}))


def measure(
    claim: AnyClaim, cells: Cells, seeds: Iterable[int], budgets: Sequence[int], alpha: float
) -> tuple[ArmContrast, ...]:
    """One contrast per left arm, of `larger` per other step, over those of the seeds whose runs are complete in every
    arm at every budget needed.

    `budgets` is one budget, or for `trend` and `faster` all that are judged.
    """
    ordered, right_name = tuple(sorted(budgets)), right_arm(claim)
    steps: tuple[Step | None, ...] = claim.than if isinstance(claim, LargerClaim) else (None,)
    pairs = []
    for arm, than in ((arm, than) for arm in left_arms(claim) for than in steps):
        needed = [cell_of(cells, name, b) for name in _arms(arm, right_name, than) for b in ordered]
        whole = [seed for seed in seeds if not any(seed in cell.lost for cell in needed)]
        statistic, left, right, bounds = _per_seed(claim, arm, than, cells, whole, ordered)
        contrast = stats.paired_contrast(left, right, alpha=alpha)
        pairs.append(
            ArmContrast(
                left=arm,
                right=right_name,
                than=than,
                budget=ordered[0] if len(ordered) == 1 else None,
                budgets=ordered,
                statistic=statistic,
                contrast=contrast,
                bounds=bounds,
                p=_tests(claim, contrast) if contrast.n >= MIN_SEEDS else {},
            )
        )
    return tuple(pairs)


def combined(members: Sequence[PValues]) -> PValues:
    """The claim holds only if every member does, and fails if any one does (Bonferroni over the members)."""
    largest = {test: max(member[test] for member in members) for test in members[0]}
    return largest | {"ref": min(1.0, len(members) * min(member["ref"] for member in members))}


def _arms(left: str, right: str | None, than: Step | None) -> tuple[str, ...]:
    step = () if than is None else (than.left, than.right)
    return tuple(dict.fromkeys((left, *(() if right is None else (right,)), *step)))


# ------------------------------------------------------------------------------------------------ per seed

PerSeed = tuple[Statistic, dict[int, float], dict[int, float], tuple[int, ...]]
"""What is measured, the value of each seed on the left and on the right, and the seeds whose value is a bound."""


def _per_seed(
    claim: AnyClaim, arm: str, than: Step | None, cells: Cells, seeds: Sequence[int], budgets: tuple[int, ...]
) -> PerSeed:
    if isinstance(claim, RoutingClaim):
        values = _values(cells, arm, budgets[0], routing_key(claim), seeds)
        return "value", values, dict.fromkeys(values, 0.0), ()
    if isinstance(claim, LowerClaim | EquivalentClaim):
        left, right = (_values(cells, name, budgets[0], claim.metric, seeds) for name in (arm, claim.right))
        return "difference", left, right, ()
    if isinstance(claim, LargerClaim):
        assert than is not None
        return _leads(claim, than, cells, seeds, budgets[0])
    if isinstance(claim, FasterClaim) and len(budgets) == 1:
        gaps = _curve_gaps(cell_of(cells, arm, budgets[0]), cell_of(cells, claim.right, budgets[0]), seeds)
        return "curve_gap", gaps, dict.fromkeys(gaps, 0.0), ()
    return _over_budgets(claim, arm, cells, seeds, budgets)


def _leads(claim: LargerClaim, than: Step, cells: Cells, seeds: Sequence[int], budget: int) -> PerSeed:
    """The lead of left over right less that of `than`: (right − left) − (than.right − than.left), as two sums.

    Sums rather than leads, so that what is only rounding is judged by the size of the losses it comes from.
    """
    plus, minus = ((claim.right, than.left), (claim.left, than.right))
    sums = []
    for names in (plus, minus):
        one, other = (_values(cells, name, budget, claim.metric, seeds) for name in names)
        sums.append({seed: one[seed] + other[seed] for seed in one if seed in other})
    return "lead_difference", sums[0], sums[1], ()


def _over_budgets(
    claim: TrendClaim | FasterClaim, arm: str, cells: Cells, seeds: Sequence[int], budgets: tuple[int, ...]
) -> PerSeed:
    names = (arm, claim.right)
    losses = [[_values(cells, name, budget, claim.metric, seeds) for budget in budgets] for name in names]
    whole = [seed for seed in seeds if all(seed in own for side in losses for own in side)]
    trend = isinstance(claim, TrendClaim)
    if not whole or len(budgets) < 2:
        return "slope" if trend else "log_ratio", {}, {}, ()
    x_B, x_right_B = (np.log([cell_of(cells, name, budget).tokens or budget for budget in budgets]) for name in names)
    y_SB, y_right_SB = (np.array([[own[seed] for own in side] for seed in whole]) for side in losses)
    if trend:  # the slope of a difference is the difference of the slopes; left's lead is right − left
        first, second = (stats.fit_line((x_B + x_right_B) / 2, y)[0] for y in (y_right_SB, y_SB))
        bound = np.zeros(len(whole), dtype=bool)
    else:
        target_S = np.maximum(y_SB[:, -1], y_right_SB[:, -1])
        (first, early), (second, early_right) = (
            stats.first_reach(x, y, target_S) for x, y in ((x_B, y_SB), (x_right_B, y_right_SB))
        )
        bound = early | early_right
    return (
        "slope" if trend else "log_ratio",
        dict(zip(whole, first.tolist(), strict=True)),
        dict(zip(whole, second.tolist(), strict=True)),
        tuple(seed for seed, is_bound in zip(whole, bound, strict=True) if is_bound),
    )


def _values(cells: Cells, arm: str, budget: int, key: str, seeds: Iterable[int]) -> dict[int, float]:
    values = cell_of(cells, arm, budget).values.get(key, {})
    return {seed: values[seed] for seed in seeds if seed in values and math.isfinite(values[seed])}


def _curve_gaps(left: Cell, right: Cell, seeds: Iterable[int]) -> dict[int, float]:
    """Per seed the mean of left − right over the evaluations of both curves, the one before training left out."""
    gaps = {}
    for seed in seeds:
        ours, theirs = left.curves.get(seed, {}), right.curves.get(seed, {})
        both = [tokens for tokens in ours if tokens in theirs and tokens > 0]
        if both:
            gaps[seed] = math.fsum(ours[tokens] - theirs[tokens] for tokens in both) / len(both)
    return gaps


# ------------------------------------------------------------------------------------------------ tests


def _tests(claim: AnyClaim, contrast: stats.Contrast) -> PValues:
    """The tests of one contrast."""
    mean, sd, n = contrast.mean, contrast.sd, contrast.n
    assert mean is not None and sd is not None
    if isinstance(claim, EquivalentClaim):
        within, outside = (test(mean, sd, n, claim.equivalence_margin) for test in (stats.p_within, stats.p_outside))
        p = {"sup": within, "ref": outside}
    else:
        at = null_value(claim)
        below, above = stats.p_below(mean, sd, n, at), stats.p_above(mean, sd, n, at)
        p = {"sup": below, "ref": above} if claims_below(claim) else {"sup": above, "ref": below}
        if isinstance(claim, LowerClaim) and claim.equivalence_margin is not None:
            p["eq"] = stats.p_within(mean, sd, n, claim.equivalence_margin)
    return {test: float(value) for test, value in p.items()}


def null_value(claim: AnyClaim) -> float:
    """The value that the one-sided tests of a claim hold the mean against."""
    if isinstance(claim, LowerClaim):
        return -claim.margin
    return claim.threshold if isinstance(claim, RoutingClaim) else 0.0


def claims_below(claim: AnyClaim) -> bool:
    """Whether a claim says that the mean lies below `null_value`."""
    if isinstance(claim, TrendClaim | RoutingClaim):
        return claim.direction in ("narrows", "below")
    return not isinstance(claim, LargerClaim)
