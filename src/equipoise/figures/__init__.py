"""Figures of a study: plain results in, one `matplotlib.figure.Figure` out of each function.

Not for: computing statistics (the results hold them), placing figures on a page (`report`). No function here needs a
display, a window system or pyplot; none writes a file.
"""

from __future__ import annotations

from equipoise.figures.budgets import gap_over_budgets, gaps_of
from equipoise.figures.curves import loss_curves
from equipoise.figures.effects import contrast_label, effects
from equipoise.figures.experts import coactivation, has_saturation, settling
from equipoise.figures.routing import expert_usage, has_router_health, router_health
from equipoise.figures.style import Axis, saved

__all__ = [
    "Axis",
    "coactivation",
    "contrast_label",
    "effects",
    "expert_usage",
    "gap_over_budgets",
    "gaps_of",
    "has_router_health",
    "has_saturation",
    "loss_curves",
    "router_health",
    "saved",
    "settling",
]
