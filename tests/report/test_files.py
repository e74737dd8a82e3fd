"""What a study leaves for papers and spreadsheets: CSV, LaTeX, and every figure as SVG and PDF."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from equipoise.cli.reports import write_outputs
from equipoise.figures import loss_curves, style
from equipoise.loading import GapRow, RunRow
from equipoise.report.latex import escaped, render_latex
from equipoise.report.publish import is_ours, study_figures
from equipoise.report.spreadsheet import render_gaps, render_runs
from equipoise.report.write import write_figures, write_tables


def few(results: dict[str, Any]) -> dict[str, Any]:
    """The same study with one of each figure."""
    budget = results["budgets"][1]
    kept = {name: [row for row in results[name] if row["budget"] == budget] for name in ("curves", "routing")}
    return {**results, **kept, "claims": results["claims"][:1], "gaps": results["gaps"][:1]}


# ------------------------------------------------------------------------------------------------ CSV


def test_a_run_is_a_row_with_all_its_digits(results: dict[str, Any]) -> None:
    rows = list(csv.DictReader(io.StringIO(render_runs(results))))
    assert list(rows[0]) == [field.name for field in fields(RunRow)] and len(rows) == len(results["runs"])
    for row, run in zip(rows, results["runs"], strict=True):
        assert (row["arm"], int(row["seed"]), int(row["budget"])) == (run["arm"], run["seed"], run["budget"])
        assert (float(row["val_loss"]) if row["val_loss"] else None) == run["val_loss"]  # equal to the last digit
        assert row["collapsed"] == ("true" if run["collapsed"] else "false")
    (lost,) = [row for row in rows if row["status"] == "diverged"]
    assert lost["val_loss"] == "" and lost["best_step"] == ""


def test_a_gap_is_a_row(results: dict[str, Any]) -> None:
    rows = list(csv.DictReader(io.StringIO(render_gaps(results))))
    assert list(rows[0]) == [field.name for field in fields(GapRow)]
    assert [float(row["ci_low"]) for row in rows] == [gap["ci_low"] for gap in results["gaps"]]
    (first,) = [row for row in rows if (row["right"], row["budget"]) == ("dense-active", "40500000")][:1]
    assert (first["dropped"], first["left_collapsed"], first["right_collapsed"]) == ("1", "true", "false")


def test_no_text_is_a_formula_or_a_second_line(results: dict[str, Any]) -> None:
    results["arms"][0]["name"] = '=HYPERLINK(1)\n,"x\u202e'
    for run in results["runs"]:
        run["arm"] = results["arms"][0]["name"] if run["arm"] == "moe" else run["arm"]
    text = render_runs(results)
    rows = list(csv.DictReader(io.StringIO(text)))
    assert rows[0]["arm"] == "'=HYPERLINK(1) ,\"x\\u202e" and len(text.splitlines()) == len(rows) + 1


# ------------------------------------------------------------------------------------------------ LaTeX

LITERAL = re.compile(
    r"\\[{}&#%_]|\\(?:textbackslash|textasciicircum|textasciitilde|ldots|char3[46])\{\}|\$[^$]*\$|\{\W?\}"
)


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("a_b & 5 % #1 {x} $y$", r"a\_b \& 5 \% \#1 \{x\} \char36{}y\char36{}"),
        (r"\input{/etc/passwd}^~", r"\textbackslash{}input\{/etc/passwd\}\textasciicircum{}\textasciitilde{}"),
        ("a--b ---c ''d ?`", "a-{}-b -{}-{}-c '{}'d ?{}{`}"),
        ("[1] *", "{[}1{]} {*}"),
        ("−0.5 ± 0.1 × ≤ α", r"$-$0.5 $\pm$ 0.1 $\times$ $\leq$ $\alpha$"),
        ("é Ж 龘\U0001f600\u202e", "é U+0416 U+9F98U+1F600\\textbackslash{}u202e"),
        ("two\n\nlines", "two lines"),
    ],
)
def test_every_text_is_literal(text: str, written: str) -> None:
    assert escaped(text) == written


def test_hostile_names_begin_no_command_and_rows_stay_whole(hostile: dict[str, Any]) -> None:
    """What is left of a cell when literal forms are taken out holds no character that LaTeX acts on."""
    text = render_latex(hostile)
    tables = re.findall(r"\\begin\{tabular\}\{@\{\}([lr]+)@\{\}\}\n(.*?)\\end\{tabular\}", text, re.S)
    assert len(tables) == 5
    for shape, body in tables:
        for line in body.splitlines():
            if line.strip() in (r"\toprule", r"\midrule", r"\bottomrule", r"\addlinespace", ""):
                continue
            assert line.endswith(r" \\")
            left = LITERAL.sub("", line.removesuffix(r" \\"))
            assert left.count("&") == len(shape) - 1, line
            assert not set(left) & set("\\{}$#%_^~`[]*"), line
    assert text.count("{") == text.count("}")
    assert text.isascii() or not set(text) - set(map(chr, range(256)))


def test_numbers_marks_and_verdicts_are_in_the_tables(results: dict[str, Any]) -> None:
    text = render_latex(results)
    row = next(r for r in results["table"] if (r["arm"], r["metric"], r["collapsed"]) == ("moe", "val_loss", [2]))
    assert re.search(rf"40\.5M & moe.* & {row['mean']:.4f} \$\\pm\$ {row['sd']:.4f}\$\^\{{\w}}\$", text)
    assert re.search(r"\$\^\{\w\}\$ collapsed\.", text) and re.search(r"\$\^\{\w\}\$ seed 1: diverged\.", text)
    assert r"moe-beats-dense-at-equal-active & supported & " in text
    assert text.count(r"\toprule") == text.count(r"\midrule") == text.count(r"\bottomrule") == 5
    assert r"\label{tab:tinystories-losses}" in text and r"\usepackage{booktabs}" in text.splitlines()[1]


def test_without_claims_and_gaps_there_are_fewer_tables(results: dict[str, Any]) -> None:
    text = render_latex({**results, "claims": [], "gaps": [], "crossovers": []})
    assert text.count(r"\begin{table}") == 2


# ------------------------------------------------------------------------------------------------ figures


def test_every_figure_is_there_as_svg_and_pdf_and_what_is_stale_goes(results: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "figures"
    folder.mkdir()
    for name in ("effect-gone.svg", "mine.svg", "effect-notes.txt"):
        (folder / name).write_text("x", encoding="utf-8")
    written = write_figures(few(results), tmp_path)
    names = [
        "effect-moe-beats-dense-at-equal-active", "gaps-best-val-loss", "curves-tokens-426300000",
        "curves-flops-426300000", "curves-seconds-426300000", "usage-moe-426300000-s0", "router-moe-426300000-s0",
    ]  # fmt: skip
    assert [path.name for path in written] == [f"{name}.{kind}" for name in names for kind in ("svg", "pdf")]
    assert {path.name for path in folder.iterdir()} == {*(p.name for p in written), "mine.svg", "effect-notes.txt"}
    for path in written:
        content = path.read_bytes()
        if path.suffix == ".svg":
            root = ElementTree.fromstring(content)
            shown = [str(text.text) for text in root.iter("{http://www.w3.org/2000/svg}text")]
            assert shown and b"dc:date" not in content and b"sans-serif" in content
        else:
            assert content.startswith(b"%PDF-") and b"CreationDate" not in content and b"/Type3" not in content


def test_gaps_are_also_drawn_against_the_budget_and_choices_by_expert(results: dict[str, Any]) -> None:
    """Where there is more than one budget, and where the explorer saw a routed run."""
    several = {**few(results), "gaps": results["gaps"], "routing": [], "curves": []}
    metrics = dict.fromkeys(row["metric"] for row in results["gaps"])
    budgets = {row["budget"] for row in results["gaps"]}
    assert len(budgets) > 1
    names = [name for name, _ in study_figures(several) if name.startswith("budgets-")]
    assert "budgets-best-val-loss-moe-dense-active" in names and len(names) == 2 * len(metrics)
    layer = {"coactivation": [[0.5, 0.2, 0.3], [0.2, 0.4, 0.2], [0.3, 0.2, 0.5]], "top_tokens": []}
    arm = {"arm": "moe", "top_k": 2, "num_experts": 3, "stories": [], "layers": [layer]}
    seen = {**several, "gaps": [], "explorer": {"arms": [arm, {**arm, "arm": "dense", "layers": []}]}}
    assert [name for name, _ in study_figures(seen) if "coactivation" in name] == ["coactivation-moe"]


def test_names_that_cannot_be_file_names_are_told_apart(hostile: dict[str, Any]) -> None:
    names = [name for name, _ in study_figures({**few(hostile), "claims": hostile["claims"], "curves": []})]
    assert len({name.lower() for name in names}) == len(names)
    assert all(is_ours(f"{name}.svg") for name in names)


def test_a_claims_figure_names_its_axis_and_margins(results: dict[str, Any]) -> None:
    (_, figure), *_ = study_figures({**few(results), "curves": [], "routing": [], "gaps": []})
    assert figure.axes[0].get_xlabel() == "best validation loss, left \u2212 right (nats/token)"
    assert "\u2212δ" in [text.get_text() for text in figure.axes[0].texts]


def test_files_are_the_same_bytes_in_another_process(results: dict[str, Any], tmp_path: Path) -> None:
    """With another hash seed, another time, and a matplotlibrc of somebody else's."""
    code = """
import hashlib, json, sys
from equipoise.figures import loss_curves, style
results = json.load(sys.stdin)
figure = loss_curves(results, results["budgets"][1])
print(*(hashlib.sha256(style.saved(figure, kind, "a")).hexdigest() for kind in ("svg", "pdf")))
"""
    (tmp_path / "matplotlibrc").write_text("pdf.fonttype: 3\nfont.size: 30\n", encoding="utf-8")
    environment = {**os.environ, "PYTHONHASHSEED": "7", "SOURCE_DATE_EPOCH": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, input=json.dumps(few(results)),
        capture_output=True, encoding="utf-8", check=False,
    )  # fmt: skip
    figure = loss_curves(few(results), results["budgets"][1])
    here = [hashlib.sha256(style.saved(figure, kind, "a")).hexdigest() for kind in ("svg", "pdf")]
    assert done.stdout.split() == here, done.stderr


def test_tables_are_the_same_bytes_every_time(results: dict[str, Any], tmp_path: Path) -> None:
    first = [path.read_bytes() for path in write_tables(results, tmp_path)]
    assert first == [path.read_bytes() for path in write_tables(results, tmp_path)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gaps.csv", "results.csv", "results.tex"]


def test_the_code_in_the_document_runs(
    results: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "analysis.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    (tmp_path / "results.json").write_text(json.dumps(results), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for block in blocks:
        exec(block.replace("runs/quick", "results.json"), {})
    assert len(blocks) == 2 and "moe-beats-dense-at-equal-active supported" in capsys.readouterr().out
    assert (tmp_path / "loss.pdf").stat().st_size > 5000 and (tmp_path / "gaps.svg").stat().st_size > 5000


def test_every_function_the_document_names_is_exported() -> None:
    from equipoise import figures

    text = (Path(__file__).parents[2] / "docs" / "analysis.md").read_text(encoding="utf-8")
    names = re.findall(r"^\| `(\w+)\(", text, re.M)
    assert len(names) >= 4 and set(names) <= set(figures.__all__)


def test_a_study_without_a_single_number_still_has_its_files(results: dict[str, Any], tmp_path: Path) -> None:
    bare = {**results, "curves": [], "routing": [], "samples": [], "claims": [], "gaps": [], "crossovers": []}
    assert write_figures(bare, tmp_path) == () and len(write_tables(bare, tmp_path)) == 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("equipoise.results.collect", lambda _: bare)
        assert write_outputs(tmp_path)[1] == tmp_path / "report.html"
