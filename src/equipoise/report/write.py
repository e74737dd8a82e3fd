"""Both renderings of a study, written into its directory.

Both are pure functions of the results: the same results give the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from equipoise.files import write_bytes
from equipoise.report.markdown import render_markdown
from equipoise.report.page import render_html


def write_report(results: Mapping[str, Any], directory: Path) -> tuple[Path, Path]:
    """Write `report.html` and `results.md` into an existing directory; returns both paths.

    Each file is replaced whole: a reader sees the old one or the new one. OSError is left to the caller.
    """
    contents = {"report.html": render_html(results), "results.md": render_markdown(results)}
    for name, content in contents.items():
        write_bytes(directory / name, content.encode())
    return directory / "report.html", directory / "results.md"
