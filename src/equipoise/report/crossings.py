"""The table of crossovers: at which budget each paired gap is zero, per seed and in all.

Not for: fitting (`crossover`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from equipoise import text
from equipoise.report.values import Cell, Table, added, arm_index, metric_name
from equipoise.text import MISSING


def crossovers_table(results: Mapping[str, Any], metric: str | None = None) -> Table:
    """Where each paired gap crosses zero on the way from the smallest to the largest budget: one metric, or all."""
    rows = []
    for row in results["crossovers"]:
        if metric not in (None, row["metric"]):
            continue
        within = sum(where == "within" for where in row["where"].values())
        rows.append(
            (
                Cell(
                    text=f"{row['left']} \u2212 {row['right']}",
                    head=True,
                    arm=arm_index(results, row["left"]),
                    marks=added(row),
                ),
                *([] if metric else [Cell(text=metric_name(results, row["metric"]))]),
                Cell(text=f"{text.short(row['budgets'][0])} to {text.short(row['budgets'][-1])}", number=True),
                Cell(text=f"{within} of {row['n']}", number=True),
                Cell(text=_crossing(row, "median"), number=True),
                Cell(text=f"{_crossing(row, 'low')} to {_crossing(row, 'high')}" if row["n"] else MISSING, number=True),
                Cell(text=_crossing_mean(row), number=True),
                Cell(text="; ".join(f"seed {seed}: {_place(row, seed)}" for seed in row["where"]) or "–", prose=True),
            )
        )
    labels = ["contrast", "metric", "budgets", "seeds that cross", "median", "range", "mean, 95 % interval", "per seed"]
    if metric:
        labels.remove("metric")
    header = tuple(Cell(text=label, number=label not in ("contrast", "metric", "per seed")) for label in labels)
    notes = (
        "Per seed a straight line through the gaps on the logarithm of tokens trained; in tokens, where it is zero. "
        "Beyond: the line is zero only outside the measured range, where nothing was measured; never: it has no slope. "
        "The mean is geometric; its t interval is unadjusted; both exist only if every seed crosses within the range.",
    )
    of = f" in {metric_name(results, metric)}" if metric else ""
    return Table(title=f"Budget at which a gap{of} is zero", header=header, rows=tuple(rows), notes=notes, grouped=True)


def _crossing(row: Mapping[str, Any], name: str) -> str:
    if row[name] is not None:
        return text.short(row[name])
    return "beyond" if row["n"] else MISSING


def _crossing_mean(row: Mapping[str, Any]) -> str:
    if row["mean"] is None:
        return MISSING
    ends = [text.short(row[end]) if row[end] is not None else "beyond" for end in ("ci_low", "ci_high")]
    return f"{text.short(row['mean'])}, {' to '.join(ends) if row['n'] > 1 else MISSING}"


def _place(row: Mapping[str, Any], seed: str) -> str:
    if row["per_seed"][seed] is not None:
        return text.short(row["per_seed"][seed])
    return {"below": "below the measured range", "above": "beyond the measured range", "never": "never"}[
        row["where"][seed]
    ]
