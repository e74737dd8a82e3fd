"""docs/scale.md: its tables and its quoted output are what its script makes of the code, and its sums are right."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("scale_tables", ROOT / "docs" / "scale_tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_code_says(script: ModuleType) -> None:
    assert script.page(PAGE) == PAGE, "docs/scale.md is out of date: make docs"
    assert set(re.findall(r"<!-- table ([a-z-]+) -->", PAGE)) == set(script.tables())


def test_a_change_is_noticed(script: ModuleType) -> None:
    altered = PAGE.replace("| 3.35", "| 3.36").replace("| 3,350 |", "| 3,351 |")
    assert altered != PAGE and script.page(altered) == PAGE
    said = PAGE.replace("whole study: about 25 min", "whole study: about 24 min")
    assert said != PAGE and script.page(said) == PAGE


def test_the_trillion_by_hand() -> None:
    """MoE: 16 layers of 4·2,048² attention, 64 · 3·2,048·1,024 experts, 64 · 2,048 router and two norms, one norm more,
    embedding and head 2 · 50,304 · 2,048. FLOPs a token: 6 for each active weight but the embedding's, and attention
    3 · 16 · 4 · 4,096 · 2,048; half of that for the time."""
    attention, expert, embedding = 4 * 2048**2, 3 * 2048 * 1024, 50_304 * 2048
    rest = 16 * (attention + 64 * 2048 + 2 * 2048) + 2048 + 2 * embedding
    total, active = rest + 16 * 64 * expert, rest + 16 * 8 * expert
    weights = 16 * (attention + 64 * 2048 + 8 * expert) + embedding
    scores = 3 * 16 * 4 * 4096 * 2048
    tokens = 238_419 * 4_194_304  # the whole number of updates nearest to 10^12
    hours = (6 * weights + scores / 2) * tokens / (989.4e12 * 0.4) / 3600
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| moe | {active / 1e9:.4g}B |"))
    shown_total, flops, shown_hours, days = (cell.strip() for cell in row.split("|")[3:7])
    assert shown_total == f"{total / 1e9:.4g}B" and days == f"{hours / 64 / 24:.1f}"
    assert flops == f"{(6 * weights + scores) * tokens / 1e21:.2f}e21"
    # Points of the curve are a little more than this: 2^20 tokens forward, a third of an update's cost each.
    assert hours - 0.5 < float(shown_hours.replace(",", "")) < 1.0005 * hours + 0.5
