"""Nouns of what is claimed before the first run. Not for judging (`verdict`)."""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from equipoise.config import TAG, check, config
from equipoise.faults import did_you_mean, not_accepted
from equipoise.spec.reach import reach

Metric = Literal["val_loss", "best_val_loss", "val_bpb"]
RoutingMetric = Literal[
    "busiest_frac", "usage_variance", "load_cv", "max_vio", "usage_entropy", "router_entropy", "log_z", "topk_share"
]
ROUTING_METRICS: Final[tuple[str, ...]] = typing.get_args(RoutingMetric)
"""Diagnostics of `routing.diagnose` that are one number a layer."""
WEIGHED_METRICS: Final = ("router_entropy", "log_z")
"""Those of the routing metrics that only a router with weights has."""


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
class Step:
    """From one arm to another: `left` is where the step leads to, `right` where it begins."""

    left: str
    """The arm after the step."""
    right: str
    """The arm before it."""

    def __post_init__(self) -> None:
        check(self, ("right", self.right != self.left, "an arm that is not on the left"))


@config
class LargerClaim:
    """The lead of `left` over `right`, metric(right) − metric(left), is larger than that of each step in `than`."""

    kind: Literal["larger"] = "larger"
    id: str
    """Name of the claim, unique in the study."""
    left: str
    """The arm whose lead is said to be larger."""
    right: str
    """The arm it leads."""
    than: tuple[Step, ...]
    """The other steps; the claim holds only if the lead is larger than each of theirs."""
    metric: Metric = "val_loss"
    """What the leads are in, per seed."""
    budget: int | Literal["largest"] = "largest"
    """At which token budget."""
    allow_collapsed: bool = False
    """Judge even if a run's routing collapsed (the verdict is then marked)."""

    def __post_init__(self) -> None:
        steps = [(step.left, step.right) for step in self.than]
        others = len(set(steps)) == len(steps) > 0 and (self.left, self.right) not in steps
        check(self, ("than", others, "a list of different steps { left, right }, none of them left over right itself"))


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


AnyClaim = LowerClaim | EquivalentClaim | LargerClaim | TrendClaim | FasterClaim | RoutingClaim
Claim = Annotated[AnyClaim, TAG]


def left_arms(claim: AnyClaim) -> tuple[str, ...]:
    """The arms on the left of a claim, always as a tuple; of a routing claim its one arm."""
    if isinstance(claim, RoutingClaim):
        return (claim.arm,)
    return claim.left if isinstance(claim.left, tuple) else (claim.left,)


def right_arm(claim: AnyClaim) -> str | None:
    """The arm a claim compares with; a routing claim has none."""
    return None if isinstance(claim, RoutingClaim) else claim.right


def claim_pairs(claim: AnyClaim) -> tuple[tuple[str, str], ...]:
    """Every (left, right) whose difference a claim is about, its own first; none of a routing claim."""
    right = right_arm(claim)
    own = () if right is None else tuple((left, right) for left in left_arms(claim))
    steps = claim.than if isinstance(claim, LargerClaim) else ()
    return (*own, *((step.left, step.right) for step in steps))


def claim_arms(claim: AnyClaim) -> tuple[str, ...]:
    """Every arm a claim names, each once: left before right before those of other steps."""
    return tuple(dict.fromkeys((*left_arms(claim), *(arm for pair in claim_pairs(claim) for arm in pair))))


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
    for side, arm in _places(claim):
        if arm not in arms:
            faults.append(not_accepted(f"{where}.{side}", arm, f"one of {', '.join(arms)}{did_you_mean(arm, arms)}"))
        elif claim.metric in ROUTING_METRICS and arms[arm] and arms[arm].model.ffn.kind != "moe":
            faults.append(not_accepted(f"{where}.{side}", arm, f"a routed arm, for metric = {claim.metric!r}"))
        elif claim.metric in WEIGHED_METRICS and arms[arm] and not arms[arm].model.ffn.router_has_weights:
            expected = f"an arm whose router has weights, for metric = {claim.metric!r}"
            faults.append(not_accepted(f"{where}.{side}", arm, expected))
    if right_arm(claim) in left_arms(claim):
        faults.append(not_accepted(f"{where}.right", right_arm(claim), "an arm that is not on the left"))
    if not faults and claim.metric in ROUTING_METRICS and all(arms[arm] for arm in claim_arms(claim)):
        faults += _reach_faults(where, claim, arms)
    return faults + (_budget_faults(where, claim, arms, budgets) if budgets else [])


def _places(claim: AnyClaim) -> list[tuple[str, str]]:
    """(field, arm) for every place of a claim that names an arm."""
    if isinstance(claim, RoutingClaim):
        return [("arm", claim.arm)]
    steps = claim.than if isinstance(claim, LargerClaim) else ()
    others = [(f"than.{i}.{side}", getattr(step, side)) for i, step in enumerate(steps) for side in ("left", "right")]
    return [*(("left", arm) for arm in left_arms(claim)), ("right", claim.right), *others]


def _reach_faults(where: str, claim: AnyClaim, arms: Mapping[str, Any]) -> list[str]:
    """What a claim about a routing diagnostic says that no router could contradict, or none could do."""

    def ends(arm: str) -> tuple[float, float]:
        return reach(claim.metric, arms[arm].model.ffn.num_experts, arms[arm].model.ffn.top_k)

    def said(arm: str) -> str:
        (low, high), ffn = ends(arm), arms[arm].model.ffn
        of = f"{claim.metric} of {arm}, {ffn.top_k} of {ffn.num_experts} experts a token,"
        return f"{of} is always {low:g}" if low == high else f"{of} lies within {low:g} to {high:g}"

    if isinstance(claim, RoutingClaim):
        low, high = ends(claim.arm)
        above = claim.direction == "above"
        if low == high:
            return [not_accepted(f"{where}.metric", claim.metric, f"a diagnostic that can vary; {said(claim.arm)}")]
        if low <= claim.threshold < high if above else low < claim.threshold <= high:
            return []
        expected = f"{low:g} or more and below {high:g}" if above else f"above {low:g} and at most {high:g}"
        return [not_accepted(f"{where}.threshold", claim.threshold, f"{expected}; {said(claim.arm)}")]
    faults: list[str] = []
    if not isinstance(claim, LowerClaim):
        return faults
    for left in left_arms(claim):
        (low, high), (right_low, right_high) = ends(left), ends(claim.right)
        least, most = right_low - high, right_high - low  # of left's lead, right − left
        both = f"{said(left)}, and {said(claim.right)}"
        if most <= 0:
            faults.append(not_accepted(f"{where}.left", left, f"an arm that can lie below {claim.right}; {both}"))
        elif not least <= claim.margin < most:
            floor = f"{least:g} or more and " if least > 0 else ""
            faults.append(not_accepted(f"{where}.margin", claim.margin, f"{floor}below {most:g}; {both}"))
    return faults


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
