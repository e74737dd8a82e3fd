"""The curves as numbers for the page's script: every seed, and per arm the mean with its interval.

Not for: drawing (`templates/curves.js`; without a script the page shows `figures.loss_curves`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from equipoise import figures, text
from equipoise.figures import curves, style
from equipoise.stats import paired_contrast

AXES: Final[tuple[tuple[figures.Axis, str, str], ...]] = (
    ("tokens", "tokens", "tokens"),
    ("flops", "FLOPs", "training FLOPs"),
    ("seconds", "seconds", "training time"),
)
"""Axis, its name on the button, and in full."""

LIMIT: Final = 120
"""Points of a line at most: more than a screen tells apart."""


def curve_data(results: Mapping[str, Any]) -> dict[str, Any] | None:
    """Everything the script draws, as JSON values; None where no run has been evaluated.

    Of each budget: `units` (per axis divisor and label), `frame` (lowest and highest loss after the first quarter of
    training), and per arm its `seeds` and `mean`. A point is [tokens, FLOPs, seconds, loss], of a mean also the ends of
    the 95 % t interval over seeds (null for one seed): of the arm alone, not of a difference, hence not a test.
    """
    budgets = [_budget(results, budget) for budget in results["budgets"] if curves.arm_curves(results, budget)]
    if not budgets:
        return None
    floor = results["curve_floor"]["loss"] if results["curve_floor"] else None
    return {"metric": f"{results['split']} loss", "floor": floor, "budgets": budgets}


def _budget(results: Mapping[str, Any], budget: int) -> dict[str, Any]:
    own = [curve for arm in curves.arm_curves(results, budget) for curve in arm.own]
    units = {}
    for axis, *_ in AXES:
        longest = max((point[axis] or 0 for curve in own for point in curve["points"]), default=0)
        divisor, label = style.unit(axis, longest)
        units[axis] = {"divisor": divisor, "label": label}
    return {
        "title": f"{text.short(budget)} tokens a run",
        "units": units,
        "frame": [_rounded(end) for end in curves.frame(results, budget)],
        "arms": [_arm(results, arm) for arm in curves.arm_curves(results, budget)],
    }


def _arm(results: Mapping[str, Any], arm: curves.ArmCurves) -> dict[str, Any]:
    look = style.arm_style(results, arm.arm)
    dashes = look["linestyle"]
    return {
        "name": arm.arm,
        "notes": ", ".join(arm.notes),
        "colour": f"arm-{style.ARMS.index(look['color'])}",
        "marker": look["marker"],
        "dashes": "" if isinstance(dashes, str) else " ".join(f"{2 * length:g}" for length in dashes[1]),
        "seeds": [
            {
                "seed": curve["seed"],
                "whole": curve["seed"] in arm.whole,
                "points": [_point(point) for point in style.thinned(curves.scored(curve), LIMIT)],
            }
            for curve in arm.own
        ],
        "mean": style.thinned(_means(arm.finished), LIMIT),
    }


def _point(point: Mapping[str, Any]) -> list[float | None]:
    return [*(_rounded(point[axis]) for axis, *_ in AXES), _rounded(point["loss"])]


def _means(finished: tuple[Mapping[str, Any], ...]) -> list[list[float | None]]:
    """Mean and interval at each step that all of these runs were evaluated at."""
    by_step = [{point["step"]: point for point in curves.scored(curve)} for curve in finished]
    common = sorted(set.intersection(*map(set, by_step))) if by_step else []
    rows = []
    for step in common:
        points = [points[step] for points in by_step]
        losses = {index: point["loss"] for index, point in enumerate(points)}
        over = paired_contrast(losses, dict.fromkeys(losses, 0.0))
        where = [
            sum(values) / len(values) if all(text.is_number(value) for value in values) else None
            for values in ([point[axis] for point in points] for axis, *_ in AXES)
        ]
        rows.append([_rounded(value) for value in (*where, over.mean, over.ci_low, over.ci_high)])
    return rows


def _rounded(value: float | None) -> float | None:
    """Six significant digits: more than is shown, and short."""
    if value is None or not text.is_number(value):
        return None
    short = float(f"{value:.6g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short
