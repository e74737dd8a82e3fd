"""Numbers and texts as people read them, against values worked by hand."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest

from equipoise import text

FORMATS = (
    text.count, text.short, text.number, text.loss, text.gap, text.percent, text.probability, text.scientific,
    text.duration, text.size,
)  # fmt: skip


@pytest.mark.parametrize("show", FORMATS)
@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_a_missing_number_says_so(show, value) -> None:  # type: ignore[no-untyped-def]  # ten signatures
    assert show(value) == "n/a"


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (text.count(-1234.4), "−1,234"),
        (text.short(999_960), "1M"),
        (text.short(999), "999"),
        (text.number(-0.12345), "−0.1235"),
        (text.number(2.5, 1), "2.5"),
        (text.loss(-0.00001), "−1.0e-05"),
        (text.gap(-0.018), "−0.0180"),
        (text.gap(0.0), "0.0000"),
        (text.gap(-0.0), "0.0000"),
        (text.percent(-0.0004), "−0.04 %"),
        (text.percent(-0.00001), "0.00 %"),
        (text.probability(0.9996), "1"),
        (text.scientific(0), "0"),
        (text.scientific(9.1e7), "9.10e7"),
        (text.duration(0.31), "0.3 s"),
        (text.duration(59 * 60), "59 min"),
        (text.duration(26 * 3600 + 60), "26 h 1 min"),
        (text.size(1023), "1023 B"),
        (text.size(1536), "1.5 KiB"),
        (text.size(5 * 2**40), "5.0 TiB"),
        (text.size(5000 * 2**40), "5000.0 TiB"),
    ],
)
def test_formats(shown: str, expected: str) -> None:
    assert shown == expected


def test_nothing_unseen_passes_and_nothing_is_lost() -> None:
    assert text.visible("a\x1b[2J\u202eb\tc\n") == "a\\u001b[2J\\u202eb\tc\n"
    assert text.one_line("  a\n\n b\u2028c ") == "a b\\u2028c"
    assert text.shortened("x" * 41) == "x" * 19 + "…" + "x" * 19


def test_no_other_file_has_number_formats_of_its_own() -> None:
    """A function of one of these names belongs in `text`, the one home of formats."""
    names = {show.__name__ for show in FORMATS} | {"signed", "whole", "decimal", "memory"}
    package = Path(text.__file__).parent
    twice = [
        f"{path.relative_to(package)}: {node.name}"
        for path in sorted(package.rglob("*.py"))
        if path.name != "text.py" and path.parent.name in ("cli", "report", "figures")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name in names
    ]
    assert not twice
