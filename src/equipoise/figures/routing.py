"""What the routers of one run did while it trained: the share of each expert, and the state of the router.

Not for: judging collapse (`routing.diagnose` does), or comparing experts across seeds, which share no identity.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from equipoise.figures import style
from equipoise.text import is_number

COLUMNS: Final = 4
"""Layers side by side."""


@style.drawn
def expert_usage(routing: Mapping[str, Any], *, width: float = 840, columns: int = COLUMNS) -> Figure:
    """Share of the assignments each expert gets, layer by layer, over training: one entry of `results["routing"]`.

    The frame ends at the ceiling 1/K, which an expert chosen by every token reaches; the dashed line is an even share,
    1/E. Up to eight experts have a colour each; of more, the busiest and the idlest at the end are coloured. `width` is
    in points; `columns` layers at most stand side by side, the height follows.
    """
    points = style.thinned(routing["points"], 100)
    num_layers = max((len(point["layers"]) for point in points), default=1)
    num_experts, ceiling = routing["num_experts"], 1 / routing["top_k"]
    columns = min(columns, num_layers)
    rows = math.ceil(num_layers / columns)
    figure, axes = style.blank(width, 66 + 132 * rows, rows, columns)
    divisor, unit = style.unit("tokens", max((point["tokens"] for point in points), default=0))
    handles: dict[str, Line2D] = {}
    for layer, ax in enumerate(axes):
        if layer >= num_layers:
            ax.set_visible(False)
            continue
        x = [point["tokens"] / divisor for point in points]
        usage = [point["layers"][layer]["usage"] for point in points]
        for expert, look in _expert_looks(num_experts, usage[-1] if usage else []).items():
            (line,) = ax.plot(x, [row[expert] for row in usage], **look)
            if look["color"] in style.EXPERTS and num_experts <= len(style.EXPERTS):
                handles[f"expert {expert}"] = line
        ax.axhline(1 / num_experts, color=style.INK, linewidth=0.9, linestyle=(0, (4, 3)))
        ax.set_ylim(0, ceiling * 1.02)
        ax.set_xlim(0, max(x, default=1) or 1)
        style.title(ax, f"layer {layer}")
        ax.set_yticks([0, ceiling / 2, ceiling])
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
        style.axis_labels(ax, unit if layer + columns >= num_layers else "", "share" if layer % columns == 0 else "")
    if num_experts > len(style.EXPERTS):
        for name, colour in (("busiest at the end", style.EXPERTS[0]), ("idlest at the end", style.EXPERTS[1])):
            handles[name] = Line2D([], [], color=colour, linewidth=1.8)
        handles["other experts"] = Line2D([], [], color=style.MUTED, linewidth=0.7, alpha=0.6)
    handles[f"even share, 1/{num_experts}"] = Line2D([], [], color=style.INK, linewidth=0.9, linestyle=(0, (4, 3)))
    more = style.legend_below(figure, [(line, name) for name, line in handles.items()])
    style.place(figure, left=50, right=12, top=22, bottom=62 + more, wspace=36, hspace=36)
    return figure


def has_router_health(routing: Mapping[str, Any]) -> bool:
    """Whether there is anything for `router_health` to draw: hash and random routers have neither number."""
    rows = (row for point in routing["points"] for row in point["layers"])
    return any(is_number(row[field]) for row in rows for field in ("router_entropy", "log_z"))


@style.drawn
def router_health(routing: Mapping[str, Any], *, width: float = 840) -> Figure:
    """Router entropy (1 = undecided) and mean log Z of each layer over training: one entry of `results["routing"]`.

    Layers are told apart by their depth of tone, the first the palest.
    """
    points = style.thinned(routing["points"], 100)
    num_layers = max((len(point["layers"]) for point in points), default=1)
    figure, axes = style.blank(width, 200, 1, 2)
    divisor, unit = style.unit("tokens", max((point["tokens"] for point in points), default=0))
    handles: dict[str, Line2D] = {}
    for ax, field, label in zip(axes, ("router_entropy", "log_z"), ("router entropy", "log Z"), strict=True):
        for layer in range(num_layers):
            placed = [
                (p["tokens"] / divisor, p["layers"][layer][field])
                for p in points
                if is_number(p["layers"][layer][field])
            ]
            tone = 0.3 + 0.7 * (layer + 1) / num_layers
            width_ = 1.0 + 0.8 * (layer + 1) / num_layers
            (line,) = ax.plot(
                [x for x, _ in placed], [y for _, y in placed], color=style.INK, alpha=tone, linewidth=width_
            )
            handles[f"layer {layer}"] = line
        ax.set_xlim(0, max((p["tokens"] / divisor for p in points), default=1) or 1)
        style.title(ax, label)
        style.axis_labels(ax, unit, "")
    axes[0].set_ylim(0, 1.02)
    more = style.legend_below(figure, [(line, name) for name, line in handles.items()])
    style.place(figure, left=50, right=12, top=22, bottom=62 + more, wspace=40)
    return figure


def _expert_looks(num_experts: int, final: list[float]) -> dict[int, dict[str, Any]]:
    """How each expert is drawn, in drawing order."""
    if num_experts <= len(style.EXPERTS):
        return {expert: {"color": style.EXPERTS[expert], "linewidth": 1.6} for expert in range(num_experts)}
    looks: dict[int, dict[str, Any]] = {
        expert: {"color": style.MUTED, "linewidth": 0.7, "alpha": 0.6} for expert in range(num_experts)
    }
    if final:
        busiest, idlest = final.index(max(final)), final.index(min(final))
        for expert, colour in ((busiest, style.EXPERTS[0]), (idlest, style.EXPERTS[1])):
            looks.pop(expert, None)
            looks[expert] = {"color": colour, "linewidth": 1.8}
    return looks
