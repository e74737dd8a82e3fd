"""Published values stand in a column of their own, under a heading that says what they are not."""

from __future__ import annotations

from typing import Any

import pytest

from equipoise.report.markdown import render_markdown
from equipoise.report.tables import gaps_table, results_table
from equipoise.report.values import Table

HEADING = "published (vocabulary unknown: compare order and gaps, not levels)"
LARGE = 426_300_000


def value(arm: str, minus: str | None, mean: float, sd: float | None = None, **other: Any) -> dict[str, Any]:
    metric = {"metric": "best_val_loss", "budget": LARGE, "source": "somewhere"}
    return {"arm": arm, "minus": minus, "mean": mean, "sd": sd} | metric | other


@pytest.fixture
def beside(results: dict[str, Any]) -> dict[str, Any]:
    published = [
        value("moe", None, 1.5788, 0.002),
        value("dense-total", None, 1.5608),
        value("moe", "dense-active", -0.0758, 0.0021),
        value("dense-total", "moe", -0.018, 0.002, source="elsewhere"),  # the other way round
    ]
    return {**results, "published": published}


def column(table: Table, label: str) -> list[str]:
    place = [cell.text for cell in table.header].index(label)
    return [row[place].text for row in table.rows]


def test_the_results_have_them_beside_arm_and_budget(beside: dict[str, Any]) -> None:
    table = results_table(beside)
    assert [row[1].text for row in table.rows] == 2 * ["moe", "dense-active", "dense-total"]
    assert column(table, HEADING) == [
        "–", "–", "–", "1.5788 ± 0.0020\nbest validation loss", "–", "1.5608\nbest validation loss",
    ]  # fmt: skip
    assert "Published: somewhere; elsewhere. Mean ± sd over its own seeds; no verdict reads it." in table.facts


def test_gaps_have_them_whichever_way_round_they_were_written(beside: dict[str, Any]) -> None:
    assert column(gaps_table(beside, "best_val_loss"), HEADING) == ["–", "−0.0758 ± 0.0021", "–", "+0.0180 ± 0.0020"]
    every = gaps_table(beside)
    assert [text for text in column(every, HEADING) if text != "–"] == ["−0.0758 ± 0.0021", "+0.0180 ± 0.0020"]


def test_a_floor_has_none(beside: dict[str, Any]) -> None:
    beside["floor_reason"] = "no grammar"
    assert column(results_table(beside), HEADING)[-1] == "–"


def test_without_any_there_is_no_column(results: dict[str, Any]) -> None:
    for table in (results_table(results), gaps_table(results)):
        assert HEADING not in [cell.text for cell in table.header]
        assert not any("Published" in fact for fact in table.facts)


def test_markdown_has_them_too(beside: dict[str, Any]) -> None:
    text = render_markdown(beside)
    assert text.count(HEADING) == 2 and "| 1.5788 ± 0.0020 best validation loss |" in text
