"""A paired gap against the budget: every seed, the mean with its 95 % interval, and where it crosses zero.

Not for: fitting (`crossover` does), or for what lies outside the measured budgets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from equipoise.figures import style
from equipoise.figures.effects import contrast_label
from equipoise.text import is_number, loss, short


def gaps_of(results: Mapping[str, Any], metric: str) -> dict[tuple[str, str], list[Mapping[str, Any]]]:
    """Contrast → its measured gaps by rising budget: of what was declared, and of late budgets what there is."""
    found: dict[tuple[str, str], dict[int, Mapping[str, Any]]] = {}
    for row in sorted(results["gaps"], key=lambda row: not row["post_hoc"]):  # what was declared comes last, and stays
        if row["metric"] == metric and is_number(row["mean"]):
            found.setdefault((row["left"], row["right"]), {})[row["budget"]] = row
    order = list(dict.fromkeys((row["left"], row["right"]) for row in results["gaps"]))
    return {pair: [found[pair][budget] for budget in sorted(found[pair])] for pair in order if pair in found}


@style.drawn
def gap_over_budgets(
    results: Mapping[str, Any], left: str, right: str, metric: str, *, size: tuple[float, float] = (380, 250)
) -> Figure:
    """The gap left − right in the metric's unit at each budget (tokens, logarithmic); contrasts share the frame.

    Small open circles are seeds; the filled mark is the mean in the colour of the left arm, hollow where the budget
    came late; the bar is the interval (absent for one seed). A dashed line stands where the seeds' crossings have their
    geometric mean, the shade around it is that mean's interval, small ticks on zero are single seeds: all only within
    the measured range. `size` is in points.
    """
    figure, (ax,) = style.blank(*size)
    by_pair = gaps_of(results, metric)
    rows = by_pair.get((left, right), [])
    look = style.arm_style(results, left)
    for row in rows:
        seeds = [value for value in row["per_seed"].values() if is_number(value)]
        x = [1.05 * row["budget"]] * len(seeds)  # beside the bar, not under it
        ax.plot(x, seeds, "o", mfc="none", mec=style.MUTED, markersize=4, markeredgewidth=0.9, zorder=2)
        if is_number(row["ci_low"]) and is_number(row["ci_high"]):
            ends = [row["ci_low"], row["ci_high"]]
            ax.plot([row["budget"]] * 2, ends, color=look["color"], linewidth=2.2, solid_capstyle="butt")
        face = "none" if row["post_hoc"] else look["color"]
        ax.plot([row["budget"]], [row["mean"]], color=look["color"], marker=look["marker"], markersize=7, mfc=face)
    ax.plot([row["budget"] for row in rows], [row["mean"] for row in rows], color=look["color"], linewidth=1)
    ax.axhline(0, color=style.INK, linewidth=0.9)
    _crossing(ax, results, left, right, metric)
    budgets = sorted({row["budget"] for own in by_pair.values() for row in own})
    ax.set_xscale("log")
    ax.set_xlim(budgets[0] / 1.25, budgets[-1] * 1.25)
    ax.minorticks_off()
    ax.set_xticks(budgets, [short(budget) for budget in budgets], parse_math=False)
    low, high = _limits([row for own in by_pair.values() for row in own])
    ax.set_ylim(low, high)
    ax.yaxis.set_major_formatter(lambda value, _: loss(value).rstrip("0").rstrip(".") if value else "0")
    style.title(ax, contrast_label({"left": left, "right": right, "collapsed": [], "dropped": []}))
    style.axis_labels(ax, "budget (tokens)", "")
    style.place(figure, left=58, right=14, top=24, bottom=42)
    return figure


def _crossing(ax: Any, results: Mapping[str, Any], left: str, right: str, metric: str) -> None:
    """Where the seeds cross zero: declared seeds alone, where there are any."""
    own = [row for row in results["crossovers"] if (row["left"], row["right"], row["metric"]) == (left, right, metric)]
    for row in sorted(own, key=lambda row: bool(row["post_hoc"]))[:1]:
        seeds = [at for at in row["per_seed"].values() if is_number(at)]
        ax.plot(seeds, [0] * len(seeds), "|", color=style.INK, markersize=9, markeredgewidth=1.3)
        if is_number(row["mean"]):
            ax.axvline(row["mean"], color=style.INK, linewidth=1, linestyle=(0, (4, 3)))
            if is_number(row["ci_low"]) and is_number(row["ci_high"]):
                ax.axvspan(row["ci_low"], row["ci_high"], color=style.MUTED, alpha=0.15, linewidth=0)


def _limits(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    ends = [0.0]
    for row in rows:
        ends += [row[name] for name in ("mean", "ci_low", "ci_high") if is_number(row[name])]
        ends += [value for value in row["per_seed"].values() if is_number(value)]
    pad = 0.06 * (max(ends) - min(ends)) or 0.01
    return min(ends) - pad, max(ends) + pad
