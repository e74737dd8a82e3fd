"""How many seeds it takes to see a gap, judged from the spread over seeds that a finished study showed.

A plan for the next study, not a verdict on this one: computed from the measured gap it only restates the p value
(Hoenig & Heisey 2001), so name the gap that would matter with `--gap`. Not for: testing (`stats`), printing (`cli`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from scipy.special import chdtri, nctdtr, ndtr, stdtrit

from equipoise.measures import MIN_SEEDS
from equipoise.text import is_number

POWER: Final = 0.8
"""The chance of seeing the gap that the seeds are to give; the convention since Cohen (1988)."""
LIMIT: Final = 10_000
"""Seeds beyond which no exact number is sought: nobody trains so many."""
UPPER: Final = 0.8
"""Confidence of the upper limit of a standard deviation (Browne 1995: planning with it holds the power four in five
times, while the plain estimate falls short of it more often than not)."""

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(200)


def power_one_sided(distance: float, sd: float, n: int, alpha: float) -> float:
    """Chance that a one-sided t test at `alpha` over n seeds sees a mean `distance` ≥ 0 beyond the tested value.

    Noncentral t with n − 1 degrees of freedom and noncentrality distance ÷ (sd ÷ √n); exact for normal differences.

    >>> round(power_one_sided(1.0, 1.0, 8, 0.05), 3)
    0.815
    """
    critical = float(stdtrit(n - 1, 1 - alpha))
    return 1.0 - float(nctdtr(n - 1, distance / sd * math.sqrt(n), critical))


def power_equivalence(gap: float, margin: float, sd: float, n: int, alpha: float) -> float:
    """Chance that both one-sided t tests at `alpha` over n seeds put the mean within ±margin when it is `gap`.

    Given the spread s that is seen, the mean has to fall within ±(margin − t·s ÷ √n): a normal probability, averaged
    over s = sd·√(χ² ÷ (n − 1)) by Gauss–Legendre quadrature in the probability of χ² (200 nodes; error below 1e-4).
    """
    quantiles = (_NODES + 1) / 2
    spread = np.sqrt(chdtri(n - 1, 1 - quantiles) / (n - 1))
    room = margin / sd * math.sqrt(n) - float(stdtrit(n - 1, 1 - alpha)) * spread
    shift = gap / sd * math.sqrt(n)
    within = np.where(room > 0, ndtr(room - shift) - ndtr(-room - shift), 0.0)
    return float(np.sum(_WEIGHTS / 2 * within))


def fewest_seeds(power_of: Callable[[int], float]) -> int | None:
    """The smallest n from MIN_SEEDS on whose power is at least POWER; None beyond LIMIT. Power must rise with n."""
    low, high = MIN_SEEDS - 1, MIN_SEEDS
    while power_of(high) < POWER:
        if high == LIMIT:
            return None
        low, high = high, min(2 * high, LIMIT)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power_of(middle) >= POWER else (middle, high)
    return high


def upper_sd(sd: float, n: int) -> float:
    """The upper limit, with confidence UPPER, of a standard deviation estimated from n values: sd·√((n − 1) ÷ χ²).

    >>> round(upper_sd(1.0, 3), 3)  # χ² with 2 degrees of freedom is below 0.446 one time in five
    2.117
    """
    return sd * math.sqrt((n - 1) / float(chdtri(n - 1, UPPER)))


# ------------------------------------------------------------------------------------------------ of a study


def plan_seeds(results: Mapping[str, Any], gap: float | None = None, alpha: float | None = None) -> dict[str, Any]:
    """Seeds needed per claim, and per paired gap in the final loss that no claim is about, as plain JSON values.

    Every test is at `alpha` (None: the study's) ÷ the number of claims of its family, Holm's first step and so at most
    too many seeds. `gap` is the true gap assumed: how far left is ahead of right, or for `larger` by how much that lead
    exceeds the other; None assumes the measured mean. It is for losses; slopes, ratios and routing values are planned
    with what was measured. A row without a spread (fewer than two seeds) has no number.
    """
    level = results["alpha"] if alpha is None else alpha
    rows = []
    for claim in results["claims"]:
        family = sum(other["post_hoc"] == claim["post_hoc"] for other in results["claims"])
        for contrast in claim["contrasts"]:
            rows.append(_row(claim, contrast, gap, level / family))
    about = {_place(row) for row in rows if row["than"] is None}
    family = max(1, sum(not claim["post_hoc"] for claim in results["claims"]))
    lower = {"id": None, "kind": "lower", "metric": "val_loss", "margin": 0.0, "equivalence_margin": None}
    for row in results["gaps"]:
        if row["metric"] == "val_loss" and not row["post_hoc"] and _place(row) not in about:
            rows.append(_row(lower, {**row, "than": None, "statistic": "difference"}, gap, level / family))
    return {
        "name": results["name"],
        "power": POWER,
        "alpha": level,
        "gap": gap,
        "limit": LIMIT,
        "sd_confidence": UPPER,
        "contrasts": rows,
    }


def _place(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a gap is of; dense − MoE takes as many seeds as MoE − dense."""
    return frozenset((row["left"], row["right"])), row["budget"], row["metric"]


def _row(claim: Mapping[str, Any], contrast: Mapping[str, Any], gap: float | None, alpha: float) -> dict[str, Any]:
    """One contrast: what is assumed, what is asked, and the seeds it takes with the measured spread and its limit."""
    mean, sd, n = contrast["mean"], contrast["sd"], contrast["n"]
    # A lead is right − left, so it lies below zero as a difference, above it as a difference of leads.
    given = {} if gap is None else {"difference": -gap, "lead_difference": gap}
    assumed = given.get(contrast["statistic"], mean)
    spreads = (sd, upper_sd(sd, n)) if is_number(sd) else (None, None)
    names = ("left", "right", "than", "budget", "statistic", "n", "mean", "sd")
    row: dict[str, Any] = {
        "claim": claim["id"],
        "kind": claim["kind"],
        "metric": claim["metric"],
        **{name: contrast[name] for name in names},
        "sd_upper": spreads[1],
        "alpha": alpha,
        "assumed": assumed,
        "tested": claim["threshold"] if claim["kind"] == "routing" else -(claim["margin"] or 0.0),
        "equivalence_margin": claim["equivalence_margin"],
    }
    for name, spread in (("seeds", spreads[0]), ("seeds_upper", spreads[1])):
        row[name] = None if claim["kind"] == "equivalent" else _one_sided(row, spread)
        row[name.replace("seeds", "seeds_equivalence")] = _equivalence(row, spread)
    return row


def _one_sided(row: Mapping[str, Any], sd: float | None) -> int | None:
    """Seeds to see on which side of the tested value the mean lies; None where it is assumed to lie right there."""
    if row["assumed"] is None or sd is None:
        return None
    distance = abs(row["assumed"] - row["tested"])
    if sd == 0:
        return MIN_SEEDS if distance > 0 else None
    return fewest_seeds(lambda n: power_one_sided(distance, sd, n, row["alpha"])) if distance > 0 else None


def _equivalence(row: Mapping[str, Any], sd: float | None) -> int | None:
    """Seeds to see that the mean lies within ±ε; None where no ε is declared, or the assumed gap is not within it."""
    gap, margin, alpha = row["assumed"], row["equivalence_margin"], row["alpha"]
    if gap is None or sd is None or margin is None or abs(gap) >= margin:
        return None
    return MIN_SEEDS if sd == 0 else fewest_seeds(lambda n: power_equivalence(gap, margin, sd, n, alpha))
