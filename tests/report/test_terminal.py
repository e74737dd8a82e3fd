"""What a study's results look like on a terminal, and that nothing about a drawing can hide them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

import equipoise.report.write
import equipoise.results
from equipoise.cli.console import parts
from equipoise.cli.reports import report, show_results, write_outputs
from equipoise.report import fairness


def shown(results: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    show_results(results)
    return capsys.readouterr().out


def test_tables_come_first_and_verdicts_last(results: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(results, capsys)
    places = [
        text.index(part) for part in (results["question"], "Widths, ", "Losses by budget", "Paired gaps", "SUPPORTED ")
    ]
    assert places == sorted(places)
    assert re.search(r"^SUPPORTED +moe-beats-dense-at-equal-active$", text, re.MULTILINE)
    assert re.search(r"^REFUTED +moe-equals-dense-at-equal-total \[post hoc, repeated data\]$", text, re.MULTILINE)
    assert (
        "moe reaches a lower best validation loss than dense-active" in text and results["claims"][0]["reason"] in text
    )
    assert "seed 1: diverged" in text and "(collapsed)" in text


@pytest.mark.parametrize(("metric", "title"), [("best_val_loss", "best validation loss"), ("val_bpb", "bits per byte")])
def test_gaps_are_those_of_the_first_claims_metric(
    results: dict[str, Any], capsys: pytest.CaptureFixture[str], metric: str, title: str
) -> None:
    results["claims"][0]["metric"] = metric
    text = shown(results, capsys)
    assert f"Paired gaps in {title}, left − right" in text
    means = {row["metric"]: f"{row['mean']:+.4f}".replace("-", "−") for row in results["gaps"][-2:]}
    assert means[metric] in text and means[({*means} - {metric}).pop()] not in text


def test_without_claims_gaps_are_in_the_final_loss(results: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    text = shown({**results, "claims": [], "split": "selection"}, capsys)
    assert "Paired gaps in selection loss" in text and "scored on the selection split: for choosing" in text


def test_what_was_shown_beside_a_verdict(results: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    claim = results["claims"][0]
    claim["post_hoc_contrasts"] = [{**claim["contrasts"][0], "n": 4, "expected_n": 5, "dropped": [4], "mean": -0.0712}]
    assert "post hoc, not judged: moe − dense-active at 426.3M tokens −0.0712" in shown(results, capsys)


def test_contracts_have_a_row_each_and_fit_80_columns(
    results: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Every number of the wide table is there, and no line of the table is wider than a small terminal."""
    wide, narrow = (make(results, "best_val_loss") for make in (fairness.contracts_table, fairness.contracts_list))
    assert narrow.title == wide.title and narrow.notes == wide.notes and set(wide.facts) <= set(narrow.facts)
    assert len(narrow.rows) == 3 * len(wide.rows)
    for index, row in enumerate(wide.rows):
        for place in range(3):
            contrast, budget, contract, mean, bounds, seeds, marks = narrow.rows[3 * index + place]
            cell, words = row[3 + place], row[3 + place].text.replace("\n", " ")
            together = f"{mean.text} [{bounds.text}], n = {seeds.text}" if mean.text else bounds.text
            assert (together, marks.text) == (words, ", ".join(cell.marks))
            assert contract.text == ("tokens", "training FLOPs", "seconds")[place]
            assert (contrast, budget.text) == (row[0], row[2].text)
        assert any(row[0].text in fact and row[1].text in fact for fact in narrow.facts)
        assert row[6].text == "–" or any(f"at {row[2].text}" in fact and row[6].text in fact for fact in narrow.facts)
    for row in results["contracts"]["rows"]:
        for name in ("tokens", "train_flops", "seconds"):
            row[name] |= {"interpolated": None, "collapsed": []}
    bare = fairness.contracts_list(results, "best_val_loss")
    cells = [[cell.text for cell in row] for row in bare.rows]
    headings = [(cell.text, cell.number) for cell in bare.header]
    assert parts(headings, cells, 80) == [list(range(6))], "without marks one table"
    assert "training FLOPs" in shown(results, capsys).split(bare.title)[1].split("Arms agree on")[0]


def test_no_text_can_act_on_the_terminal(hostile: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    hostile = {**hostile, "question": "a\x1b[2Jb\u202e", "name": "\x1b]0;x\x07"}
    text = shown(hostile, capsys)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\u200f\u2028]", text) and "a\\u001b[2Jb\\u202e" in text


def test_printing_loads_no_drawing_library(results: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(json.dumps(results), encoding="utf-8")
    code = (
        "import json, pathlib, sys\nfrom equipoise.cli.reports import show_results\n"
        "show_results(json.loads(pathlib.Path('results.json').read_text(encoding='utf-8')))\n"
        "print(*sorted({'torch', 'matplotlib', 'jinja2'} & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, encoding="utf-8", check=False
    )
    assert done.returncode == 0 and done.stderr.strip() == "" and "SUPPORTED" in done.stdout


# ------------------------------------------------------------------------------------------------ a report that fails


@pytest.fixture
def collected(results: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The made-up study in place of a directory's, with few figures."""
    few = {**results, "routing": [], "curves": [], "samples": []}
    monkeypatch.setattr(equipoise.results, "collect", lambda _: few)
    return few


@pytest.fixture
def undrawable(collected: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The same, and rendering fails in two lines."""

    def fail(*_: Any) -> None:
        raise RuntimeError("no font\nat all")

    monkeypatch.setattr(equipoise.report.write, "write_report", fail)
    return collected


def test_results_are_shown_before_the_report_is_made(
    collected: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[list[str]] = []
    results, path = write_outputs(tmp_path, lambda _: seen.append(sorted(p.name for p in tmp_path.iterdir())))
    assert seen == [["results.json"]]
    assert path == tmp_path / "report.html" and path.exists() and results["name"] == "tinystories"
    assert capsys.readouterr().err == ""


def test_a_failed_rendering_is_one_warning_and_hides_no_result(
    undrawable: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results, path = write_outputs(tmp_path, show_results)
    said = capsys.readouterr()
    assert path is None and results["claims"] and "SUPPORTED" in said.out
    assert said.err == (
        f"warning: {tmp_path}: no new report.html and results.md (RuntimeError: no font at all); "
        "results.json is complete\n"
    )
    assert json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["name"] == "tinystories"


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_ends_with_1_then(
    undrawable: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    with pytest.raises(typer.Exit) as ended:
        report(tmp_path, as_json)
    assert ended.value.exit_code == 1
    said = capsys.readouterr()
    assert "warning: " in said.err and "report: " not in said.err
    assert json.loads(said.out)["claims"] if as_json else "SUPPORTED" in said.out


def test_a_reader_who_went_away_still_gets_the_report(collected: dict[str, Any], tmp_path: Path) -> None:
    def gone(_: Any) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        write_outputs(tmp_path, gone)
    assert (tmp_path / "report.html").exists() and (tmp_path / "results.json").exists()
