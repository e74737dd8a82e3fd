"""At which budget a paired gap is zero: per seed a line through the gaps on ln tokens; what the seeds say together.

A crossing beyond the smallest or largest budget is not given as a number: nothing was measured there. Not for: claims
(`trend` tests the slope), nor for curves within a run.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from equipoise.stats import EQUAL, fit_line, paired_contrast

Where = Literal["within", "below", "above", "never"]
"""In the measured range; below its smallest budget; above its largest; or the fit has no slope."""


def crossing(tokens_B: Sequence[float], gaps_B: Sequence[float]) -> tuple[float | None, Where]:
    """Tokens at which the line through (ln tokens, gap) is 0, and where that is; a number only within the range.

    >>> round(crossing([1000, 4000], [-0.1, 0.1])[0], 6)
    2000.0
    >>> crossing([1000, 4000], [0.2, 0.1])
    (None, 'above')
    """
    x_B = np.log(tokens_B)
    slope, height = (float(value) for value in fit_line(x_B, gaps_B))
    low, high = float(x_B.min()), float(x_B.max())
    if abs(slope) * (high - low) <= EQUAL:
        return None, "never"
    at = float(x_B.mean()) - height / slope
    if not low - EQUAL <= at <= high + EQUAL:
        return None, "below" if at < low else "above"
    return math.exp(at), "within"


def crossovers(
    gaps: Sequence[Mapping[str, Any]], tokens: Mapping[tuple[str, int], int], confidence: float
) -> list[dict[str, Any]]:
    """A row per contrast and metric that has gaps at two budgets or more, from rows of gaps as they stand in results.

    `tokens` maps arm (or family) and budget to the tokens trained; of two arms that differ in them the geometric mean
    counts, as for the claim `trend`. Rows with `post_hoc: false` are over what was declared; where anything was added,
    a second row is over everything.
    """
    groups: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for row in gaps:
        groups.setdefault((row["left"], row["right"], row["metric"]), []).append(row)
    rows = []
    for (left, right, metric), own in groups.items():
        declared = {row["budget"]: row for row in own if not row["post_hoc"]}
        late = {row["budget"]: row for row in own if row["post_hoc"]}
        for post_hoc, by_budget in ((False, declared), (True, {**declared, **late} if late else {})):
            if len(by_budget) > 1:
                head = {"left": left, "right": right, "metric": metric, "post_hoc": post_hoc}
                trained = [math.sqrt(tokens[left, b] * tokens[right, b]) for b in sorted(by_budget)]
                rows.append({**head, **_summary(by_budget, trained, confidence)})
    return rows


def _summary(by_budget: Mapping[int, Mapping[str, Any]], trained: Sequence[float], confidence: float) -> dict[str, Any]:
    """The crossings of the seeds that have a gap at every budget, and what they say together.

    Median and range count a crossing beyond the range as infinitely far that way, and are None where that makes them
    infinite. The geometric mean and its t interval (on ln tokens) exist when every seed crosses within the range; an
    end of the interval beyond the range is None.
    """
    budgets = sorted(by_budget)
    per_budget = [{int(seed): value for seed, value in by_budget[budget]["per_seed"].items()} for budget in budgets]
    seeds = sorted(set.intersection(*(set(values) for values in per_budget)))
    found = {seed: crossing(trained, [values[seed] for values in per_budget]) for seed in seeds}
    ends = {"below": -math.inf, "above": math.inf, "never": math.nan}
    places = [ends[where] if at is None else at for at, where in found.values()]
    ordered = sorted(places) if places and not any(math.isnan(place) for place in places) else [math.nan]
    logs = {seed: math.log(at) for seed, (at, _) in found.items() if at is not None}
    contrast = paired_contrast(logs, dict.fromkeys(logs, 0.0), confidence) if len(logs) == len(seeds) else None
    summary = {"median": _median(ordered), "low": ordered[0], "high": ordered[-1]}
    fit: dict[str, float | None] = {"mean": None, "ci_low": None, "ci_high": None}
    if contrast is not None and contrast.mean is not None:
        low, high = math.log(min(trained)), math.log(max(trained))
        fit["mean"] = math.exp(contrast.mean)
        for end in ("ci_low", "ci_high"):
            value = getattr(contrast, end)
            fit[end] = math.exp(value) if value is not None and low <= value <= high else None
    return {
        "budgets": budgets,
        "n": len(seeds),
        "expected_n": max(by_budget[budget]["expected_n"] for budget in budgets),
        "per_seed": {seed: at for seed, (at, _) in found.items()},
        "where": {seed: where for seed, (_, where) in found.items()},
        **{name: value if math.isfinite(value) else None for name, value in summary.items()},
        **fit,
        "confidence": confidence,
    }


def _median(ordered: Sequence[float]) -> float:
    """The middle value, or of two the geometric mean; NaN where one is infinite."""
    low, high = statistics.median_low(ordered), statistics.median_high(ordered)
    return low if low == high else math.sqrt(low) * math.sqrt(high) if 0 < low < high < math.inf else math.nan
