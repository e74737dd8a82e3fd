"""Nouns of what is claimed before the first run. Not for judging (`verdict`)."""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from equipoise.config import TAG, check, config
from equipoise.faults import did_you_mean, not_accepted

Metric = Literal["val_loss", "best_val_loss", "val_bpb"]
RoutingMetric = Literal[
    "busiest_frac", "usage_variance", "load_cv", "max_vio", "usage_entropy", "router_entropy", "log_z", "topk_share"
]
ROUTING_METRICS: Final[tuple[str, ...]] = typing.get_args(RoutingMetric)
WEIGHED_METRICS: Final = ("router_entropy", "log_z")
"""Those of the routing metrics that only a router with weights has."""
"""Diagnostics of `routing.diagnose` that are one number a layer."""


@config
class LowerClaim:
    """`left` reaches a lower metric than `right`, by more than `margin`."""

    kind: Literal["lower"] = "lower"
    id: str
    """Name of the claim, unique in the study."""
    left: str | tuple[str, ...]
    """The arm said to be lower; a list holds only if every member does."""
    right: str
    """The arm it is compared with."""
    metric: Literal[Metric, RoutingMetric] = "val_loss"
    """What is compared, per seed; a routing diagnostic is that of the final evaluation, the mean over layers."""
    budget: int | Literal["largest"] = "largest"
    """At which token budget."""
    margin: float = 0.0
    """δ ≥ 0: supported only when left is lower by more than this."""
    equivalence_margin: float | None = None
    """ε > margin: also test for equivalence within ±ε."""
    allow_collapsed: bool = False
    """Judge even if a run's routing collapsed (the verdict is then marked)."""

    def __post_init__(self) -> None:
        wide = self.equivalence_margin is None or self.equivalence_margin > self.margin
        check(
            self,
            ("left", _all_different(self.left), "one arm or a list of different arms"),
            ("margin", self.margin >= 0, "0 or more"),
            ("equivalence_margin", wide, f"above margin = {self.margin}"),
        )


@config
class EquivalentClaim:
    """`left` and `right` differ by less than `equivalence_margin` either way."""

    kind: Literal["equivalent"] = "equivalent"
    id: str
    """Name of the claim, unique in the study."""
    left: str | tuple[str, ...]
    """The arm said to be equivalent; a list holds only if every member is."""
    right: str
    """The arm it is compared with."""
    equivalence_margin: float
    """ε > 0, in units of the metric."""
    metric: Metric = "val_loss"
    """What is compared, per seed."""
    budget: int | Literal["largest"] = "largest"
    """At which token budget."""
    allow_collapsed: bool = False
    """Judge even if a run's routing collapsed (the verdict is then marked)."""

    def __post_init__(self) -> None:
        check(
            self,
            ("left", _all_different(self.left), "one arm or a list of different arms"),
            ("equivalence_margin", self.equivalence_margin > 0, "above 0"),
        )


@config
class TrendClaim:
    """The lead of `left`, metric(right) − metric(left), grows or narrows from budget to budget."""

    kind: Literal["trend"] = "trend"
    id: str
    """Name of the claim, unique in the study."""
    left: str
    """The arm whose lead is followed."""
    right: str
    """The arm it is compared with."""
    direction: Literal["grows", "narrows"]
    """The sign of the lead's slope on ln budget: above 0, or below."""
    metric: Metric = "val_loss"
    """What is compared, per seed and budget."""
    allow_collapsed: bool = False
    """Judge even if a run's routing collapsed (the verdict is then marked)."""


@config
class FasterClaim:
    """`left` needs fewer tokens than `right` to reach the same loss."""

    kind: Literal["faster"] = "faster"
    id: str
    """Name of the claim, unique in the study."""
    left: str
    """The arm said to be faster."""
    right: str
    """The arm it is compared with."""
    metric: Literal["val_loss"] = "val_loss"
    """The loss at the end of a finished schedule; no other point of a curve says what a budget buys."""
    allow_collapsed: bool = False
    """Judge even if a run's routing collapsed (the verdict is then marked)."""


@config
class RoutingClaim:
    """A routing diagnostic of one arm lies above or below a threshold."""

    kind: Literal["routing"] = "routing"
    id: str
    """Name of the claim, unique in the study."""
    arm: str
    """The routed arm."""
    metric: RoutingMetric
    """The diagnostic, per seed."""
    direction: Literal["above", "below"]
    """Where it is said to lie."""
    threshold: float
    """What it is held against, in the diagnostic's own unit."""
    layers: Literal["mean", "max"] = "mean"
    """The mean over layers, or the largest of any layer: that of `topk_share` ≥ 0.9 is what *collapsed* means."""
    at_frac: float = 1.0
    """Share of the training done, above 0 to 1; below 1 the curve's evaluation nearest to it, the earlier of two."""
    budget: int | Literal["largest"] = "largest"
    """At which token budget."""

    def __post_init__(self) -> None:
        check(
            self,
            ("threshold", math.isfinite(self.threshold), "a finite number"),
            ("at_frac", 0 < self.at_frac <= 1, "above 0 to 1"),
        )


AnyClaim = LowerClaim | EquivalentClaim | TrendClaim | FasterClaim | RoutingClaim
Claim = Annotated[AnyClaim, TAG]


def left_arms(claim: AnyClaim) -> tuple[str, ...]:
    """The arms on the left of a claim, always as a tuple; of a routing claim its one arm."""
    if isinstance(claim, RoutingClaim):
        return (claim.arm,)
    return claim.left if isinstance(claim.left, tuple) else (claim.left,)


def right_arm(claim: AnyClaim) -> str | None:
    """The arm a claim compares with; a routing claim has none."""
    return None if isinstance(claim, RoutingClaim) else claim.right


def claim_arms(claim: AnyClaim) -> tuple[str, ...]:
    """Every arm a claim names, left before right."""
    right = right_arm(claim)
    return left_arms(claim) if right is None else (*left_arms(claim), right)


def _all_different(left: str | tuple[str, ...]) -> bool:
    return isinstance(left, str) or len(set(left)) == len(left) > 0


def claim_faults(
    where: str,
    claim: AnyClaim,
    claims: Sequence[AnyClaim | None],
    arms: Mapping[str, Any],
    budgets: tuple[int, ...] | None,
) -> list[str]:
    """Faults of one claim against the study's other claims, arms and budgets; None = said already."""
    faults = []
    if not claim.id.strip() or [other.id for other in claims if other].count(claim.id) > 1:
        faults.append(not_accepted(f"{where}.id", claim.id, "a name of its own"))
    right = right_arm(claim)
    sides = (("arm" if right is None else "left", left_arms(claim)), ("right", (right,) if right is not None else ()))
    for side, names in sides:
        for arm in names:
            if arm not in arms:
                faults.append(
                    not_accepted(f"{where}.{side}", arm, f"one of {', '.join(arms)}{did_you_mean(arm, arms)}")
                )
            elif claim.metric in ROUTING_METRICS and arms[arm] and arms[arm].model.ffn.kind != "moe":
                faults.append(not_accepted(f"{where}.{side}", arm, f"a routed arm, for metric = {claim.metric!r}"))
            elif claim.metric in WEIGHED_METRICS and arms[arm] and not arms[arm].model.ffn.router_has_weights:
                expected = f"an arm whose router has weights, for metric = {claim.metric!r}"
                faults.append(not_accepted(f"{where}.{side}", arm, expected))
    if right in left_arms(claim):
        faults.append(not_accepted(f"{where}.right", right, "an arm that is not on the left"))
    return faults + (_budget_faults(where, claim, arms, budgets) if budgets else [])


def _budget_faults(where: str, claim: AnyClaim, arms: Mapping[str, Any], budgets: tuple[int, ...]) -> list[str]:
    own = [name for name in claim_arms(claim) if name in arms and arms[name] and arms[name].budget]
    if isinstance(claim, FasterClaim) and len(budgets) == 1 and own:
        return [
            f"{where}.kind: 'faster' is not accepted over 1 budget for {own[0]}, which has a budget of its own; "
            "expected 3 budgets or more, or arms that train along one schedule"
        ]
    if isinstance(claim, TrendClaim | FasterClaim):
        accepted = "2 or more" if isinstance(claim, TrendClaim) else "1, or 3 or more"
        enough = len(budgets) != 2 if isinstance(claim, FasterClaim) else len(budgets) >= 2
        text = f"{where}.kind: {claim.kind!r} is not accepted over {len(budgets)} budget(s); expected {accepted}"
        return [] if enough else [text]
    if claim.budget != "largest" and claim.budget not in budgets:
        expected = f"'largest' or one of {', '.join(map(str, budgets))}"
        return [not_accepted(f"{where}.budget", claim.budget, expected)]
    return []
