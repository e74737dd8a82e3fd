"""Nouns of what is claimed before the first run. Not for judging (`verdict`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from equipoise.config import TAG, check, config
from equipoise.faults import did_you_mean, not_accepted

Metric = Literal["val_loss", "best_val_loss", "val_bpb"]


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
    metric: Metric = "val_loss"
    """What is compared, per seed."""
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


Claim = Annotated[LowerClaim | EquivalentClaim, TAG]


def left_arms(claim: LowerClaim | EquivalentClaim) -> tuple[str, ...]:
    """The arms on the left of a claim, always as a tuple."""
    return claim.left if isinstance(claim.left, tuple) else (claim.left,)


def _all_different(left: str | tuple[str, ...]) -> bool:
    return isinstance(left, str) or len(set(left)) == len(left) > 0


def claim_faults(
    where: str,
    claim: LowerClaim | EquivalentClaim,
    claims: Sequence[LowerClaim | EquivalentClaim | None],
    arms: Mapping[str, Any],
    budgets: tuple[int, ...] | None,
) -> list[str]:
    """Faults of one claim against the study's other claims, arms and budgets; None = said already."""
    faults = []
    if not claim.id.strip() or [other.id for other in claims if other].count(claim.id) > 1:
        faults.append(not_accepted(f"{where}.id", claim.id, "a name of its own"))
    for side, names in (("left", left_arms(claim)), ("right", (claim.right,))):
        for arm in names:
            if arm not in arms:
                faults.append(
                    not_accepted(f"{where}.{side}", arm, f"one of {', '.join(arms)}{did_you_mean(arm, arms)}")
                )
    if claim.right in left_arms(claim):
        faults.append(not_accepted(f"{where}.right", claim.right, "an arm that is not on the left"))
    if budgets and claim.budget != "largest" and claim.budget not in budgets:
        faults.append(
            not_accepted(f"{where}.budget", claim.budget, f"'largest' or one of {', '.join(map(str, budgets))}")
        )
    return faults
