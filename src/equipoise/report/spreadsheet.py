"""`results.csv` and `gaps.csv`: a run a row, a paired gap a row, every number with all its digits.

UTF-8, commas, one line a row, an empty field for what is absent; columns are the fields of `loading.RunRow` and
`loading.GapRow`. Not for: means (a spreadsheet's reader groups the runs), or words about the numbers (`markdown`).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

from equipoise.loading import GapRow, RunRow, as_rows
from equipoise.text import one_line

_FORMULA: Final = ("=", "+", "-", "@")
"""A text that begins so is computed by spreadsheet programs; with an apostrophe before it, it is a text."""


def render_runs(results: Mapping[str, Any]) -> str:
    """Every run of the study as CSV."""
    return _csv(RunRow, as_rows(results).runs)


def render_gaps(results: Mapping[str, Any]) -> str:
    """Every paired gap of the study as CSV."""
    return _csv(GapRow, as_rows(results).gaps)


def _csv(kind: type[Any], rows: Sequence[Any]) -> str:
    target = io.StringIO()
    writer = csv.writer(target, lineterminator="\n")
    names = [field.name for field in fields(kind)]
    writer.writerow(names)
    writer.writerows([_field(getattr(row, name)) for name in names] for row in rows)
    return target.getvalue()


def _field(value: Any) -> str:
    """A value as it is written: numbers to their last digit, true and false, seeds with a blank between."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    if isinstance(value, (int, float)):
        return repr(value)
    line = one_line(str(value))
    return f"'{line}" if line.startswith(_FORMULA) else line
