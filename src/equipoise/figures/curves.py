"""Validation loss along training: each seed thin, the mean of the finished seeds bold.

Not for: comparing arms (the gaps and verdicts do); a curve is scored on a subset of the validation windows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from equipoise.figures import style
from equipoise.figures.style import Axis
from equipoise.text import is_number, short, shortened

TOP, BOTTOM = 24.0, 42.0
"""Margins of the frame, in points."""

STEEP_FRAC: Final = 0.25
"""The share of training whose losses may lie above the frame: they would press the rest into one line."""


@dataclass(frozen=True, kw_only=True)
class ArmCurves:
    """The curves of one arm at one budget, and what a reader of them must know."""

    arm: str
    own: tuple[Mapping[str, Any], ...]
    """Every run that was evaluated at all."""
    whole: frozenset[int]
    """Seeds of the runs that are complete."""
    finished: tuple[Mapping[str, Any], ...]
    """Those the mean is over: complete, of a declared seed (of an arm or budget that came late: of any seed)."""
    notes: tuple[str, ...]


def arm_curves(results: Mapping[str, Any], budget: int) -> list[ArmCurves]:
    """The arms that have a curve at this budget, in the order of the study."""
    runs = {(run["arm"], run["seed"]): run for run in results["runs"] if run["budget"] == budget}
    found = []
    for arm in (entry["name"] for entry in results["arms"]):
        own = tuple(curve for curve in results["curves"] if (curve["arm"], curve["budget"]) == (arm, budget))
        if not own:
            continue
        late = {curve["seed"] for curve in own if runs[arm, curve["seed"]]["post_hoc"]}
        counted = {curve["seed"] for curve in own} - late or late  # of a late arm or budget all seeds are late
        whole = frozenset(curve["seed"] for curve in own if runs[arm, curve["seed"]]["status"] == "complete")
        finished = tuple(curve for curve in own if curve["seed"] in whole & counted)
        fallen = any(runs[arm, curve["seed"]][name] for curve in own for name in ("collapsed", "best_collapsed"))
        notes = ["collapsed"] if fallen else []
        if len(finished) < len(counted):
            notes.append(f"{len(finished)} of {len(counted)} finished")
        if late:
            notes.append("post hoc" if late == counted else f"without {len(late)} post hoc")
        found.append(ArmCurves(arm=arm, own=own, whole=whole, finished=finished, notes=tuple(notes)))
    return found


@style.drawn
def loss_curves(
    results: Mapping[str, Any], budget: int, axis: Axis = "tokens", *, size: tuple[float, float] = (410, 290)
) -> Figure:
    """Validation loss (nats/token) of every run of one budget against tokens, training FLOPs or training seconds.

    A run that diverged or was lost is dashed, ends in a cross, and is no part of the mean; nor is a seed that was added
    late. The height of the frame is the same for all axes of a budget, and fits what follows the first quarter of
    training: the steep start lies above. A grammar's own score on the windows of the curve is a dotted line. `size` is
    in points.
    """
    figure, (ax,) = style.blank(*size)
    curves = [curve for curve in results["curves"] if curve["budget"] == budget]
    longest = max((point[axis] or 0 for curve in curves for point in curve["points"]), default=0)
    divisor, label = style.unit(axis, longest)
    entries: list[tuple[Line2D, str]] = []
    ends: list[tuple[float, float, str]] = []
    for arm in arm_curves(results, budget):
        look = style.arm_style(results, arm.arm)
        for curve in arm.own:
            complete = curve["seed"] in arm.whole
            x, y = _line(style.thinned(scored(curve)), axis, divisor)
            dashes = look["linestyle"] if complete else (0, (3, 2))
            ax.plot(x, y, color=look["color"], linestyle=dashes, linewidth=0.8, alpha=0.5, label="")
            if not complete and len(x):
                ends.append((x[-1], y[-1], look["color"]))
        x, y = _line(style.thinned(_mean(arm.finished, axis)), axis, divisor)
        every = max(1, len(x) // 6)
        ax.plot(x, y, **look, linewidth=2, markersize=4.5, markevery=every)
        name = f"{shortened(arm.arm, 26)} ({', '.join(arm.notes)})" if arm.notes else arm.arm
        entries.append((Line2D([], [], **look, linewidth=2, markersize=4.5), name))
    if results["curve_floor"]:
        floor = ax.axhline(results["curve_floor"]["loss"], color=style.INK, linewidth=1, linestyle=(0, (1, 2)))
        entries.append((floor, "the grammar itself"))
    low, high = frame(results, budget)
    margin = 0.05 * (high - low)
    legend_frac = min(0.5, (8 + 15 * len(entries)) / (size[1] - TOP - BOTTOM))  # a line of the legend is 15 points high
    top = low + (high - low) / (1 - legend_frac)
    ax.set_ylim(low - margin, top)
    for x_end, y_end, colour in ends:  # what rose out of the frame ends at its upper edge
        ax.plot([x_end], [min(y_end, top)], color=colour, marker="x", markersize=6, linestyle="none", clip_on=False)
    ax.set_xlim(0, (longest / divisor or 1) * 1.02)
    style.axis_labels(ax, label, f"{results['split']} loss (nats/token)")
    style.title(ax, f"{short(budget)} tokens a run")
    style.legend(ax, entries, loc="upper right")
    style.place(figure, left=54, right=12, top=TOP, bottom=BOTTOM)
    return figure


def scored(curve: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The evaluations of a curve that gave a loss."""
    return [point for point in curve["points"] if is_number(point["loss"])]


def _line(points: Sequence[Mapping[str, Any]], axis: Axis, divisor: float) -> tuple[np.ndarray, np.ndarray]:
    placed = [point for point in points if is_number(point[axis])]
    return np.array([p[axis] / divisor for p in placed], float), np.array([p["loss"] for p in placed], float)


def _mean(curves: Sequence[Mapping[str, Any]], axis: Axis) -> list[dict[str, float]]:
    """Means of loss and of the axis at the steps that every one of these runs was evaluated at."""
    steps: dict[int, list[Mapping[str, Any]]] = {}
    for curve in curves:
        for point in scored(curve):
            steps.setdefault(point["step"], []).append(point)
    common = [steps[step] for step in sorted(steps) if len(steps[step]) == len(curves)]
    return [
        {"loss": float(np.mean([p["loss"] for p in points])), axis: float(np.mean([p[axis] for p in points]))}
        for points in common
        if all(is_number(point[axis]) for point in points)
    ]


def frame(results: Mapping[str, Any], budget: int) -> tuple[float, float]:
    """Lowest and highest loss to be framed, over the finished runs of this budget after the steep start."""
    framed = []
    whole = [curve for arm in arm_curves(results, budget) for curve in arm.own if curve["seed"] in arm.whole]
    for curve in whole:
        if points := scored(curve):
            framed += [p["loss"] for p in points if p["tokens"] >= STEEP_FRAC * points[-1]["tokens"]]
    if results["curve_floor"]:
        framed.append(results["curve_floor"]["loss"])
    low, high = min(framed, default=0.0), max(framed, default=1.0)
    return (low, high) if high > low else (low - 0.5, low + 0.5)
