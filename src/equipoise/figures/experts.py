"""What became of the routing of one run: how even and how settled it was, and which experts go together.

Not for: the share of single experts, entropy and log Z of the router (`figures.routing`), or single tokens (`report`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from equipoise.figures import style
from equipoise.text import is_number

COLUMNS: Final = 4
"""Heat maps side by side."""
WRITTEN: Final = 8
"""Experts up to which a heat map has its numbers written into it."""
DEEPEST: Final = 0.7
"""Opacity of a share of 1: text in ink has to stay readable on it."""


def has_saturation(routing: Mapping[str, Any]) -> bool:
    """Whether the choices of this run were kept along its training."""
    return any(point.get("saturation") for point in routing["points"])


@style.drawn
def settling(routing: Mapping[str, Any], *, width: float = 840) -> Figure:
    """Usage entropy (1 = even use) and saturation of each layer over training: one entry of `results["routing"]`.

    Saturation is the share of the final choices that were made already; the dashed line is chance, K/E. Layers are
    told apart by their depth of tone, the first the palest.
    """
    points = style.thinned(routing["points"], 100)
    num_layers = max((len(point["layers"]) for point in points), default=1)
    figure, axes = style.blank(width, 200, 1, 2)
    divisor, unit = style.unit("tokens", max((point["tokens"] for point in points), default=0))
    handles: dict[str, Line2D] = {}
    for layer in range(num_layers):
        depth = (layer + 1) / num_layers
        look: dict[str, Any] = {"color": style.INK, "alpha": 0.3 + 0.7 * depth, "linewidth": 1.0 + 0.8 * depth}
        use = [(p["tokens"] / divisor, p["layers"][layer]["usage_entropy"]) for p in points]
        settled = [(p["tokens"] / divisor, p["saturation"][layer]) for p in points if p.get("saturation")]
        for ax, placed in zip(axes, (use, settled), strict=True):
            shown = [(x, y) for x, y in placed if is_number(y)]
            (handles[f"layer {layer}"],) = ax.plot([x for x, _ in shown], [y for _, y in shown], **look)
    chance = routing["top_k"] / routing["num_experts"]
    axes[1].axhline(chance, color=style.INK, linewidth=0.9, linestyle=(0, (4, 3)))
    handles["by chance, K/E"] = Line2D([], [], color=style.INK, linewidth=0.9, linestyle=(0, (4, 3)))
    for ax, label in zip(axes, ("usage entropy", "saturation: share of the final choices"), strict=True):
        ax.set_xlim(0, max((point["tokens"] / divisor for point in points), default=1) or 1)
        ax.set_ylim(0, 1.02)
        style.title(ax, label)
        style.axis_labels(ax, unit, "")
    style.legend(
        figure, ((line, name) for name, line in handles.items()), loc="lower left", ncols=10, bbox_to_anchor=(0.05, 0.0)
    )
    style.place(figure, left=50, right=12, top=22, bottom=62, wspace=40)
    return figure


@style.drawn
def coactivation(layers: Sequence[Mapping[str, Any]], *, width: float = 840) -> Figure:
    """Of the tokens that chose the expert of a row, the share that also chose that of the column, layer by layer.

    `layers` are those of an arm of `results["explorer"]`. The darker, the larger; the diagonal, always 1, stays empty.
    Tones are told apart by hundredths, and all cells of a tone are one path: a cell each would fill megabytes.
    """
    num_experts = max((len(layer["coactivation"]) for layer in layers), default=1)
    columns = min(COLUMNS, max(1, len(layers)))
    rows = max(1, math.ceil(len(layers) / columns))
    panel = min(190.0, (width - 60) / columns - 36)
    width = 46 + columns * (panel + 36)
    figure, axes = style.blank(width, 30 + rows * (panel + 56), rows, columns)
    for place, ax in enumerate(axes):
        if place >= len(layers):
            ax.set_visible(False)
            continue
        tones: dict[int, list[Path]] = {}
        for row, shares in enumerate(layers[place]["coactivation"]):
            for column, share in enumerate(shares):
                if row == column or not is_number(share):
                    continue
                tones.setdefault(round(100 * share), []).append(_cell(row, column))
                if num_experts <= WRITTEN:
                    style.write(ax, column, row, f"{share:.2f}", ha="center", va="center", fontsize=9)
        for hundredths, cells in sorted(tones.items()):
            tone = {"facecolor": style.INK, "alpha": DEEPEST * hundredths / 100, "linewidth": 0}
            ax.add_patch(PathPatch(Path.make_compound_path(*cells), **tone))
        ax.set_xlim(-0.5, num_experts - 0.5)
        ax.set_ylim(num_experts - 0.5, -0.5)
        step = max(1, math.ceil(num_experts / 8))
        ax.set_xticks(range(0, num_experts, step))
        ax.set_yticks(range(0, num_experts, step))
        ax.grid(visible=False)
        style.title(ax, f"layer {place}")
        style.axis_labels(
            ax, "and this one" if place + columns >= len(layers) else "", "chose expert" if place % columns == 0 else ""
        )
    style.place(figure, left=46, right=10, top=24, bottom=44, wspace=36, hspace=56)
    return figure


def _cell(row: int, column: int) -> Path:
    left, right, top, bottom = column - 0.5, column + 0.5, row - 0.5, row + 0.5
    return Path([(left, top), (right, top), (right, bottom), (left, bottom), (left, top)], closed=True)
