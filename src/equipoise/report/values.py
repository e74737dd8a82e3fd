"""A table as a value: cells of formatted text with the marks that must stand at them, and what the marks rest on.

Page, Markdown and terminal render the same values. Not for: what any table shows (`tables`, `details`, `statements`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from equipoise.spec.sweep import standing_for

METRICS: Final = ("val_loss", "best_val_loss", "val_bpb")
"""Columns of the results table, in order; the first two in nats per token. `metric_name` says them in words."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell: formatted text, what kind it is, and marks that stand beside it."""

    text: str
    """What is shown; names are as given, hence still to be escaped. A newline is where a page may break the line."""
    number: bool = False
    """Aligned to the right, with figures of equal width."""
    marks: tuple[str, ...] = ()
    """Warnings that belong to this very number, such as "collapsed"."""
    arm: int | None = None
    """The arm's place in the study, for its colour, where the cell names an arm."""
    head: bool = False
    """The cell heads its row."""
    prose: bool = False
    """Words that may take several lines."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A captioned table."""

    title: str
    """Its caption, one sentence or less."""
    header: tuple[Cell, ...]
    """One cell a column."""
    rows: tuple[tuple[Cell, ...], ...]
    """As many cells a row as the header has."""
    facts: tuple[str, ...] = ()
    """Sentences below it that belong to these very numbers, wherever they are shown."""
    notes: tuple[str, ...] = ()
    """Sentences that say how to read such a table; a terminal may do without."""
    grouped: bool = False
    """Rows of equal first cell stand together, and are set off from the next."""


def normalised(results: Mapping[str, Any]) -> dict[str, Any]:
    """The results as JSON would give them back: keys are text, whoever made them."""
    value: dict[str, Any] = json.loads(json.dumps(results))
    return value


def arm_index(results: Mapping[str, Any], arm: str) -> int | None:
    """The place of an arm in the study, of a family that of its first member; None for anything else."""
    names = [entry["name"] for entry in results["arms"]]
    found = standing_for(arm, names)
    return names.index(found) if found in names else None


def main_metric(results: Mapping[str, Any]) -> str:
    """The metric a study is mostly about: that of its first claim about a loss, or the final loss."""
    return next((str(claim["metric"]) for claim in results["claims"] if claim["metric"] in METRICS), "val_loss")


def metric_name(results: Mapping[str, Any], metric: str) -> str:
    """A metric in words, with the split it was measured on.

    >>> metric_name({"split": "validation"}, "best_val_loss")
    'best validation loss'
    """
    known = {
        "val_loss": f"{results['split']} loss",
        "best_val_loss": f"best {results['split']} loss",
        "val_bpb": "bits per byte",
    }
    return known.get(metric, f"{metric} (mean over layers)")


def is_post_hoc(
    results: Mapping[str, Any], *, arm: str | None = None, budget: int | None = None, seed: int | None = None
) -> bool:
    """Whether this arm, budget or seed was added after the first finished run."""
    late = results["post_hoc"]
    return arm in late["arms"] or budget in late["budgets"] or seed in late["seeds"]


def marks(row: Mapping[str, Any]) -> tuple[str, ...]:
    """What has to stand at a number of this row: that a collapsed run entered it."""
    return ("collapsed",) if row["collapsed"] else ()


def added(row: Mapping[str, Any]) -> tuple[str, ...]:
    """What has to stand at the head of this row: that it rests on what was added after the first finished run."""
    return ("post hoc",) if row["post_hoc"] else ()


def seed_count(row: Mapping[str, Any]) -> str:
    """Seeds a contrast is over, of those it should be over, and which it is without.

    >>> seed_count({"n": 3, "expected_n": 3, "dropped": []})
    '3 of 3'
    >>> seed_count({"n": 2, "expected_n": 3, "dropped": [1]})
    '2 of 3, without seed 1'
    """
    dropped = [str(seed) for seed in row["dropped"]]
    without = f", without seed{'s' if len(dropped) > 1 else ''} {', '.join(dropped)}" if dropped else ""
    return f"{row['n']} of {row['expected_n']}{without}"
