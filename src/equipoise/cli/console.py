"""How every command speaks: results on stdout (text or one JSON document), everything else on stderr, one cache folder.

Not for: what is said. The only file below which environment variables are not read (cache folder, colour).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from equipoise.config import Table, apply_override, dump
from equipoise.spec.study import StudySpec, load_study_table, parse_study

SCHEMA_VERSION: Final = 1

StudyArgument = Annotated[str, typer.Argument(metavar="STUDY", help="A study file, or the name of a preset.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="PATH=VALUE", help="Override one field, e.g. --set base.model.num_layers=4; repeatable."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")]
CacheOption = Annotated[Path | None, typer.Option("--cache", metavar="DIR", help="Where prepared corpora are kept.")]
DeviceOption = Annotated[str, typer.Option("--device", metavar="auto|cpu|cuda", help="Where to compute.")]
QuietOption = Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")]


def out() -> Console:
    """The console for results: stdout; no colour when piped, wide enough then that no table is cut."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 160, emoji=False, markup=False)


def say(message: str, quiet: bool = False) -> None:
    """One line for people, on stderr."""
    if not quiet:
        print(message, file=sys.stderr, flush=True)


def emit_json(value: Any) -> None:
    """The one JSON document of a command; no NaN literals (ValueError)."""
    document = dump(value)
    if isinstance(document, dict):
        document = {"schema_version": SCHEMA_VERSION, **document}
    print(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False))


def show_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> None:
    """A table on stdout: the first `left` columns left, the others right; cells are plain text, never markup."""
    table = RichTable(title=Text(title), title_justify="left", title_style="bold", box=None, pad_edge=False)
    for index, heading in enumerate(headings):
        justify: Literal["left", "right"] = "left" if index < left else "right"
        table.add_column(Text(heading), justify=justify, overflow="fold", header_style="dim")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    out().print(table)
    out().print()


def default_cache() -> Path:
    """EQUIPOISE_CACHE, else the user's cache folder (XDG_CACHE_HOME or ~/.cache) / equipoise."""
    named = os.environ.get("EQUIPOISE_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "equipoise"


def read_study(name: str, overrides: Sequence[str] | None) -> StudySpec:
    """A study from a file or preset, with `--set` applied; ConfigError with every fault."""
    table: Table = load_study_table(name)[0]
    for assignment in overrides or ():
        table = apply_override(table, assignment)
    return parse_study(table)


def count(value: float | None) -> str:
    """A whole number with thousands separators, or n/a."""
    return "n/a" if value is None else f"{value:,.0f}"


def number(value: float | None, digits: int = 4) -> str:
    """A fixed-point number, or n/a."""
    return "n/a" if value is None else f"{value:.{digits}f}"


def signed(value: float | None, digits: int = 4) -> str:
    """A fixed-point number with its sign (a true minus), or n/a."""
    return "n/a" if value is None else f"{value:+.{digits}f}".replace("-", "−")


def duration(seconds: float | None) -> str:
    """Seconds as h/m/s, or n/a.

    >>> duration(3723.2)
    '1h02m'
    """
    if seconds is None:
        return "n/a"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def size(num_bytes: float | None) -> str:
    """Bytes in binary units, or n/a."""
    if num_bytes is None:
        return "n/a"
    value, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"


def scientific(value: float | None) -> str:
    """A number in scientific notation, or n/a."""
    return "n/a" if value is None else f"{value:.2e}"
