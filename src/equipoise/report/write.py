"""Every rendering of a study, written into its directory.

All are pure functions of the results: the same results give the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from equipoise.files import write_bytes
from equipoise.report.latex import render_latex
from equipoise.report.markdown import render_markdown
from equipoise.report.page import render_html
from equipoise.report.publish import figure_files, is_ours
from equipoise.report.spreadsheet import render_gaps, render_runs


def write_report(results: Mapping[str, Any], directory: Path) -> tuple[Path, Path]:
    """Write `report.html` and `results.md` into an existing directory; returns both paths.

    Each file is replaced whole: a reader sees the old one or the new one. OSError is left to the caller.
    """
    html, markdown = _write(directory, {"report.html": render_html(results), "results.md": render_markdown(results)})
    return html, markdown


def write_tables(results: Mapping[str, Any], directory: Path) -> tuple[Path, ...]:
    """Write `results.csv`, `gaps.csv` and `results.tex`, as `write_report` does; returns their paths."""
    contents = {
        "results.csv": render_runs(results),
        "gaps.csv": render_gaps(results),
        "results.tex": render_latex(results),
    }
    return _write(directory, contents)


def write_figures(results: Mapping[str, Any], directory: Path) -> tuple[Path, ...]:
    """Write every figure into the folder `figures`, each as SVG and PDF; returns their paths.

    Figures of an earlier report that this one does not have are deleted; other files in the folder stay.
    """
    folder = directory / "figures"
    written = []
    for name, content in figure_files(results):
        write_bytes(folder / name, content)
        written.append(folder / name)
    _delete(path for path in folder.glob("*") if is_ours(path.name) and path not in written)
    return tuple(written)


def _write(directory: Path, contents: Mapping[str, str]) -> tuple[Path, ...]:
    for name, content in contents.items():
        write_bytes(directory / name, content.encode())
    return tuple(directory / name for name in contents)


def _delete(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink()
