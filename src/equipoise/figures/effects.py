"""Paired differences of two arms: every seed, the mean, its 95 % interval, and the margins it is judged against.

Not for: computing the interval, or deciding anything from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from equipoise.figures import style
from equipoise.text import is_number, loss, shortened

LOWEST, HIGHEST = -0.38, 0.2
"""How far the vertical lines of a row reach below and above its middle; a row is 1 high, its label stands above."""

_FORMS = {
    "lead_difference": "{1} over {2} \u2212 {3} over {4}",
    "slope": "slope of the lead of {1} over {2}",
    "log_ratio": "ln(tokens of {1} ÷ {2})",
}
"""How a contrast that is no plain difference is called."""


def contrast_label(row: Mapping[str, Any], *more: str) -> str:
    """ "left − right" with what a reader must know of it: `more`, seeds left out, and which side collapsed.

    >>> contrast_label({"left": "moe", "right": "dense", "collapsed": ["moe"], "dropped": [1]}, "40M tokens")
    'moe (collapsed) − dense, 40M tokens, without seed 1'
    """
    step = row.get("than") or {}
    names = [row["left"], row["right"], step.get("left"), step.get("right")]
    letters, mark = (10, "") if step else (26, " (collapsed)")  # four names share a line
    sides = [
        f"{shortened(name, letters)}{mark if name in row['collapsed'] else ''}" for name in names if name is not None
    ]
    fallen = ["collapsed"] if step and row["collapsed"] else []
    dropped = [str(seed) for seed in row["dropped"]]
    without = [f"without seed{'s' if len(dropped) > 1 else ''} {', '.join(dropped)}"] if dropped else []
    what = _FORMS.get(row.get("statistic", "difference"), "{}").format(" \u2212 ".join(sides), *sides)
    return ", ".join((what, *fallen, *more, *without))


@style.drawn
def effects(
    results: Mapping[str, Any],
    contrasts: Sequence[Mapping[str, Any]],
    *,
    labels: Sequence[str] | None = None,
    margins: Mapping[str, float] | None = None,
    axis: str = "",
    width: float = 360,
) -> Figure:
    """One row a contrast, left − right in the metric's unit: entries of `results["gaps"]` or of a claim's `contrasts`.

    Small open circles are seeds, the filled mark is the mean in the colour of the left arm, the bar the interval
    (absent for one seed). Zero is a line; `margins` (text → value) are dotted lines. `labels` stand above the rows,
    in place of "left − right", and `axis` below the axis. `width` is in points; the height follows the rows. No line
    runs through a label.
    """
    names = labels or [contrast_label(row) for row in contrasts]
    below = 42 if axis else 24
    figure, (ax,) = style.blank(width, 14 + below + 42 * max(1, len(contrasts)))
    extent = [0.0, *(margins or {}).values()]
    for place, (row, label) in enumerate(zip(contrasts, names, strict=True)):
        y = float(-place)
        ax.plot([0, 0], [y + LOWEST, y + HIGHEST], color=style.MUTED, linewidth=1, solid_capstyle="butt")
        for value in (margins or {}).values():
            ax.plot([value] * 2, [y + LOWEST, y + HIGHEST], color=style.MUTED, linewidth=1, linestyle=(0, (1, 2)))
        look = style.arm_style(results, row["left"])
        seeds = [
            float(row["per_seed"][seed])
            for seed in sorted(row["per_seed"], key=int)
            if is_number(row["per_seed"][seed])
        ]
        ax.plot(seeds, [y - 0.2] * len(seeds), "o", mfc="none", mec=style.MUTED, markersize=4, markeredgewidth=0.9)
        extent += seeds
        if is_number(row["ci_low"]) and is_number(row["ci_high"]):
            ax.plot([row["ci_low"], row["ci_high"]], [y, y], color=look["color"], linewidth=2.4, solid_capstyle="butt")
            extent += [row["ci_low"], row["ci_high"]]
        if is_number(row["mean"]):
            ax.plot([row["mean"]], [y], color=look["color"], marker=look["marker"], markersize=7, linestyle="none")
            extent.append(row["mean"])
        style.write(ax, 0, y + HIGHEST + 0.06, label, transform=ax.get_yaxis_transform(), va="bottom")
    low, high = min(extent), max(extent)
    pad = 0.08 * (high - low) or 0.01
    ax.set_xlim(low - pad, high + pad)
    ax.set_ylim(-max(1, len(contrasts)) + 0.6, 0.75)
    for name, value in (margins or {}).items():
        style.write(ax, value, 1.0, name, transform=ax.get_xaxis_transform(), ha="center", va="bottom", fontsize=9.5)
    ax.grid(visible=False)
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", left=False, labelleft=False)
    ax.xaxis.set_major_formatter(lambda value, _: loss(value).rstrip("0").rstrip(".") if value else "0")
    ax.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    style.axis_labels(ax, axis, "")
    style.place(figure, left=20, right=20, top=16 if margins else 4, bottom=below)
    return figure
