"""Validation loss along training: each seed thin, the mean of the finished seeds bold.

Not for: comparing arms (the gaps and verdicts do); a curve is scored on a subset of the validation windows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
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
    runs = {(run["arm"], run["seed"], run["budget"]): run for run in results["runs"]}
    curves = [curve for curve in results["curves"] if curve["budget"] == budget]
    longest = max((point[axis] or 0 for curve in curves for point in curve["points"]), default=0)
    divisor, label = style.unit(axis, longest)
    entries: list[tuple[Line2D, str]] = []
    ends: list[tuple[float, float, str]] = []
    for arm in (entry["name"] for entry in results["arms"]):
        own = [curve for curve in curves if curve["arm"] == arm]
        if not own:
            continue
        look = style.arm_style(results, arm)
        late = {curve["seed"] for curve in own if runs[arm, curve["seed"], budget]["post_hoc"]}
        counted = {curve["seed"] for curve in own} - late or late  # of a late arm or budget all seeds are late
        finished: list[Mapping[str, Any]] = []
        for curve in own:
            complete = runs[arm, curve["seed"], budget]["status"] == "complete"
            x, y = _line(style.thinned(_scored(curve)), axis, divisor)
            dashes = look["linestyle"] if complete else (0, (3, 2))
            ax.plot(x, y, color=look["color"], linestyle=dashes, linewidth=0.8, alpha=0.5, label="")
            if complete and curve["seed"] in counted:
                finished.append(curve)
            if not complete and len(x):
                ends.append((x[-1], y[-1], look["color"]))
        x, y = _line(style.thinned(_mean(finished, axis)), axis, divisor)
        every = max(1, len(x) // 6)
        ax.plot(x, y, **look, linewidth=2, markersize=4.5, markevery=every)
        fallen = any(
            runs[arm, curve["seed"], budget][name] for curve in own for name in ("collapsed", "best_collapsed")
        )
        entries.append(
            (Line2D([], [], **look, linewidth=2, markersize=4.5), _label(arm, finished, counted, late, fallen))
        )
    if results["curve_floor"]:
        floor = ax.axhline(results["curve_floor"]["loss"], color=style.INK, linewidth=1, linestyle=(0, (1, 2)))
        entries.append((floor, "the grammar itself"))
    low, high = _limits(results, curves, runs)
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


def _scored(curve: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [point for point in curve["points"] if is_number(point["loss"])]


def _line(points: Sequence[Mapping[str, Any]], axis: Axis, divisor: float) -> tuple[np.ndarray, np.ndarray]:
    placed = [point for point in points if is_number(point[axis])]
    return np.array([p[axis] / divisor for p in placed], float), np.array([p["loss"] for p in placed], float)


def _mean(curves: Sequence[Mapping[str, Any]], axis: Axis) -> list[dict[str, float]]:
    """Means of loss and of the axis at the steps that every one of these runs was evaluated at."""
    steps: dict[int, list[Mapping[str, Any]]] = {}
    for curve in curves:
        for point in _scored(curve):
            steps.setdefault(point["step"], []).append(point)
    common = [steps[step] for step in sorted(steps) if len(steps[step]) == len(curves)]
    return [
        {"loss": float(np.mean([p["loss"] for p in points])), axis: float(np.mean([p[axis] for p in points]))}
        for points in common
        if all(is_number(point[axis]) for point in points)
    ]


def _label(arm: str, finished: Sequence[Any], counted: Set[int], late: Set[int], collapsed: bool) -> str:
    """The arm, and what a reader of its line must know."""
    notes = ["collapsed"] if collapsed else []
    if len(finished) < len(counted):
        notes.append(f"{len(finished)} of {len(counted)} finished")
    if late:
        notes.append("post hoc" if late == counted else f"without {len(late)} post hoc")
    return f"{shortened(arm, 26)} ({', '.join(notes)})" if notes else arm


def _limits(
    results: Mapping[str, Any], curves: Sequence[Mapping[str, Any]], runs: Mapping[tuple[str, int, int], Any]
) -> tuple[float, float]:
    """Lowest and highest loss to be framed, over the finished runs among these."""
    framed = []
    for curve in curves:
        points = _scored(curve)
        if points and runs[curve["arm"], curve["seed"], curve["budget"]]["status"] == "complete":
            framed += [p["loss"] for p in points if p["tokens"] >= STEEP_FRAC * points[-1]["tokens"]]
    if results["curve_floor"]:
        framed.append(results["curve_floor"]["loss"])
    low, high = min(framed, default=0.0), max(framed, default=1.0)
    return (low, high) if high > low else (low - 0.5, low + 0.5)
