"""How every command speaks: results on stdout (text or one JSON document), everything else on stderr, one cache folder.

Not for: what is said. The only file below which environment variables are not read (cache folder, colour).
"""

from __future__ import annotations

import contextlib
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
from equipoise.errors import ConfigError
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
JobsOption = Annotated[
    str, typer.Option("--jobs", metavar="auto|N", help="Runs at a time; auto = what a short probe finds best.")
]
QuietOption = Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")]


def out() -> Console:
    """The console for results: stdout; no colour when piped, wide enough then that no table is cut."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 160, emoji=False, markup=False)


def say(message: str, quiet: bool = False) -> None:
    """One line for people, on stderr; nobody listening is no reason to stop."""
    if not quiet:
        with contextlib.suppress(BrokenPipeError):
            print(message, file=sys.stderr, flush=True)


def check_device(device: str) -> None:
    """ConfigError unless `device` is one of auto, cpu, cuda."""
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device {device}: expected auto, cpu or cuda")


def read_jobs(jobs: str) -> int | None:
    """The number of runs at a time; None for `auto`. ConfigError for anything else."""
    if jobs == "auto":
        return None
    if not jobs.isascii() or not jobs.isdecimal() or int(jobs) < 1:
        raise ConfigError(f"--jobs {jobs}: expected auto or a whole number of at least 1")
    return int(jobs)


def emit_json(value: Any) -> None:
    """The one JSON document of a command; no NaN literals (ValueError)."""
    document = dump(value)
    if isinstance(document, dict):
        document = {"schema_version": SCHEMA_VERSION, **document}
    print(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False))


def show_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> None:
    """A table on stdout: the first `left` columns left, the others right; cells are plain text, never markup."""
    print_table(title, [(heading, index >= left) for index, heading in enumerate(headings)], rows)


def print_table(
    title: str, columns: Iterable[tuple[str, bool]], rows: Iterable[Sequence[str]], facts: Iterable[str] = ()
) -> None:
    """A table on stdout, with sentences below it; of each column its heading and whether it is aligned to the right."""
    table = RichTable(title=Text(title), title_justify="left", title_style="bold", box=None, pad_edge=False)
    for heading, right in columns:
        justify: Literal["left", "right"] = "right" if right else "left"
        table.add_column(Text(heading), justify=justify, overflow="fold", header_style="dim")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    out().print(table)
    for fact in facts:
        out().print(Text(fact, style="dim"), soft_wrap=True)
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
