"""Published values as cells beside the study's own: a column of their own, under a heading that says what they are not.

Not for: where the values come from (`spec/published.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from equipoise import text
from equipoise.report.values import Cell, metric_name

HEADING: Final = "published (vocabulary unknown: compare order and gaps, not levels)"


def has_published(results: Mapping[str, Any], *, gaps: bool) -> bool:
    """Whether anything was published about single arms, or about gaps between two."""
    return any((value["minus"] is not None) == gaps for value in results["published"])


def arm_cell(results: Mapping[str, Any], arm: str, budget: int) -> Cell:
    """What was published for an arm at this budget, each value with its metric; a dash where nothing was."""
    found = [value for value in results["published"] if (value["arm"], value["minus"]) == (arm, None)]
    return _cell(
        f"{_mean_sd(value, text.loss(value['mean']))}\n{metric_name(results, value['metric'])}"
        for value in found
        if value["budget"] == budget
    )


def gap_cell(results: Mapping[str, Any], left: str, right: str, budget: int, metric: str) -> Cell:
    """What was published for left − right, whichever way round it was written; a dash where nothing was."""
    sides = {(left, right): 1, (right, left): -1}
    return _cell(
        _mean_sd(value, text.gap(sides[value["arm"], value["minus"]] * value["mean"]))
        for value in results["published"]
        if (value["arm"], value["minus"]) in sides and (value["budget"], value["metric"]) == (budget, metric)
    )


def sources(results: Mapping[str, Any]) -> list[str]:
    """Where the published values come from, as sentences."""
    found = list(dict.fromkeys(value["source"] for value in results["published"]))
    return [f"Published: {'; '.join(found)}. Mean ± sd over its own seeds; no verdict reads it."] if found else []


def _cell(lines: Iterable[str]) -> Cell:
    return Cell(text="\n".join(lines) or "–", number=True)


def _mean_sd(value: Mapping[str, Any], mean: str) -> str:
    return mean if value["sd"] is None else f"{mean} ± {text.loss(value['sd'])}"
