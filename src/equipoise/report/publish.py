"""The figures of a study as files for a paper: which there are, what they are called, and each as SVG and as PDF.

Drawn for the width they are included at: letters of 10 points come out at 8 when a column figure (300 points) is set
3.3 inches wide, and a page figure (500 points) 5.5 inches. White ground, letters as letters (SVG) or as embedded
TrueType (PDF), no dates and no random names: the same results give the same bytes.

Not for: the figures of the page, which follow its colours (`page`, `svg`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

from matplotlib.figure import Figure

from equipoise.figures import (
    coactivation,
    contrast_label,
    effects,
    expert_usage,
    gap_over_budgets,
    gaps_of,
    has_router_health,
    has_saturation,
    loss_curves,
    router_health,
    settling,
    style,
)
from equipoise.report.values import added, metric_name
from equipoise.report.verdicts import cards
from equipoise.text import is_number, short, shortened

COLUMN: Final = 300.0
"""Width in points of a figure that fills a column of a two-column page."""
PAGE: Final = 500.0
"""Width of one that fills the page."""
EXTENSIONS: Final[tuple[Literal["svg"], Literal["pdf"]]] = ("svg", "pdf")

_LETTER: Final = 6.0
"""Points that a letter of a label takes, generously: DejaVu Sans at 10 points."""
_AXES: Final = {
    "slope": "{}: slope of the lead on ln tokens",
    "log_ratio": "ln of the ratio of tokens",
    "value": "{}",
}
"""What is shown of contrasts that are no plain difference."""
_KINDS: Final = ("effect", "gaps", "budgets", "curves", "usage", "router", "settling", "coactivation")


def study_figures(results: Mapping[str, Any]) -> Iterator[tuple[str, Figure]]:
    """(name, figure) of everything that a study has to show, one after the other.

    `effect-<claim>`: a claim's contrasts. `gaps-<metric>`: the paired gaps. `budgets-<metric>-<left>-<right>`: a gap
    against the budget, where there are several. `curves-<axis>-<budget>`: loss against tokens, FLOPs and seconds.
    `usage-<arm>-<budget>-s<seed>`, `router-…` and `settling-…`: the routing of the first complete seed of every routed
    arm at each budget; other seeds are one call of `expert_usage` away. `coactivation-<arm>`: experts chosen together
    by the explorer's run. Names hold letters, digits, dots and hyphens alone.
    """
    taken: set[str] = set()

    def named(*parts: object) -> str:
        words = [re.sub(r"[^A-Za-z0-9.]+", "-", str(part)).strip("-.") or "x" for part in parts]
        name = "-".join(words)[:100]
        while name.lower() in taken:  # two names that differ only in what a file cannot be called
            name += "-x"
        taken.add(name.lower())
        return name

    for card, claim in zip(cards(results), results["claims"], strict=True):
        rows = [row for row in claim["contrasts"] if is_number(row["mean"])]
        if rows:
            labels = [contrast_label(row) for row in rows]
            axis = _axis(results, claim["metric"], rows[0].get("statistic", "difference"))
            figure = effects(results, rows, labels=labels, margins=card.margins, axis=axis, width=_width(labels))
            yield named("effect", claim["id"]), figure
    for metric in dict.fromkeys(row["metric"] for row in results["gaps"]):
        rows = [row for row in results["gaps"] if row["metric"] == metric and is_number(row["mean"])]
        if rows:
            labels = [_gap_label(row) for row in rows]
            axis = _axis(results, metric, "difference")
            yield named("gaps", metric), effects(results, rows, labels=labels, axis=axis, width=_width(labels))
        for (left, right), over in gaps_of(results, metric).items():
            if len(over) > 1:
                figure = gap_over_budgets(results, left, right, metric, size=(COLUMN, 230))
                yield named("budgets", metric, shortened(left, 30), shortened(right, 30)), figure
    for budget in results["budgets"]:
        if any(curve["budget"] == budget and curve["points"] for curve in results["curves"]):
            for axis in style.AXES:
                yield named("curves", axis, budget), loss_curves(results, budget, axis, size=(COLUMN, 230))
    for row in _first_seeds(results):
        place = (shortened(row["arm"], 40), row["budget"], f"s{row['seed']}")
        yield named("usage", *place), expert_usage(row, width=PAGE, columns=2)
        if has_router_health(row):
            yield named("router", *place), router_health(row, width=PAGE)
        if has_saturation(row):
            yield named("settling", *place), settling(row, width=PAGE)
    for arm in (results.get("explorer") or {"arms": []})["arms"]:
        if arm["layers"] and 1 < arm["top_k"] < arm["num_experts"]:
            yield named("coactivation", shortened(arm["arm"], 40)), coactivation(arm["layers"], width=PAGE)


def figure_files(results: Mapping[str, Any]) -> Iterator[tuple[str, bytes]]:
    """(file name, content) of every figure, as SVG and as PDF."""
    for name, figure in study_figures(results):
        for extension in EXTENSIONS:
            yield f"{name}.{extension}", style.saved(figure, extension, name)


def is_ours(name: str) -> bool:
    """Whether a file of this name is one that `figure_files` may have written."""
    return re.fullmatch(rf"({'|'.join(_KINDS)})-[A-Za-z0-9.-]+\.({'|'.join(EXTENSIONS)})", name) is not None


def _width(labels: list[str]) -> float:
    """A column, or as wide as the longest label needs, a page at most."""
    return min(PAGE, max(COLUMN, 20 + _LETTER * max(map(len, labels))))


def _axis(results: Mapping[str, Any], metric: str, statistic: str) -> str:
    """What the axis of an effect counts, with its unit."""
    name = metric_name(results, metric)
    if statistic in _AXES:
        return _AXES[statistic].format(name)
    unit = {"val_loss": " (nats/token)", "best_val_loss": " (nats/token)", "val_bpb": ""}.get(metric, "")
    return f"{name}, left \u2212 right{unit}"


def _gap_label(row: Mapping[str, Any]) -> str:
    return contrast_label(row, f"{short(row['budget'])} tokens", *added(row))


def _first_seeds(results: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Of every routed arm at every budget, the routing of its first seed that has any."""
    first: dict[tuple[str, int], Mapping[str, Any]] = {}
    for row in sorted(results["routing"], key=lambda row: int(row["seed"])):
        if row["points"]:
            first.setdefault((row["arm"], row["budget"]), row)
    return [first[key] for key in sorted(first)]
