"""Numbers that others published about such arms, to be shown beside the study's own.

Not for: judging. No verdict reads them; vocabularies differ, so their order and gaps compare, not their levels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from equipoise.config import check, config
from equipoise.faults import did_you_mean, not_accepted
from equipoise.spec.claims import Metric


@config
class Published:
    """The loss that somebody published for an arm, or for the gap between two arms."""

    arm: str
    """The arm of this study that it is shown beside."""
    minus: str | None = None
    """Another arm: the value is then the published gap, arm − minus."""
    budget: int | Literal["largest"] = "largest"
    """The budget of this study that it is shown at."""
    metric: Metric = "best_val_loss"
    """Which loss it is."""
    mean: float
    """The published mean, in the metric's unit."""
    sd: float | None = None
    """The published standard deviation over seeds; none = not published."""
    source: str
    """Where it was published, and in what it differs from this study."""

    def __post_init__(self) -> None:
        check(
            self,
            ("mean", math.isfinite(self.mean), "a finite number"),
            ("sd", self.sd is None or 0 <= self.sd < math.inf, "0 or more"),
        )


def published_faults(
    values: Sequence[Published | None], arms: Mapping[str, Any], budgets: Sequence[int] | None
) -> list[str]:
    """Faults between published values and the study; None stands for one whose own faults were said already."""
    faults = []
    for index, value in enumerate(values):
        if value is None:
            continue
        for field, name in (("arm", value.arm), ("minus", value.minus)):
            others = [other for other in arms if field == "arm" or other != value.arm]
            if name is not None and name not in others:
                expected = f"one of {', '.join(others)}{did_you_mean(name, others)}" if others else "no arm to subtract"
                faults.append(not_accepted(f"published.{index}.{field}", name, expected))
        if budgets is not None and value.budget not in ("largest", *budgets):
            expected = f"largest or one of the study's budgets, {', '.join(str(budget) for budget in budgets)}"
            faults.append(not_accepted(f"published.{index}.budget", value.budget, expected))
    return faults
