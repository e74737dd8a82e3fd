"""How every command speaks: results on stdout (text or one JSON document), everything else on stderr, one cache folder.

Not for: what is said. The only file below which environment variables are not read (cache folder, colour).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from equipoise.cli.output import is_unicode
from equipoise.config import Table, apply_override, dump
from equipoise.errors import ConfigError, Interrupted
from equipoise.faults import did_you_mean
from equipoise.spec.study import StudySpec, load_study_table, parse_study, preset_names

SCHEMA_VERSION: Final = 1
WAIT_S: Final = 0.2
"""Seconds between two looks at what another process holds."""


def place(name: str) -> Callable[[str], Path]:
    """Reads the path that `name` (an option or an argument) is given; ConfigError for one that can name nothing."""

    def read(text: str) -> Path:
        if not text or "\0" in text:
            raise ConfigError(f"{name} {json.dumps(text)}: expected a path; the current folder is written .")
        return Path(text)

    return read


def _studies(incomplete: str) -> list[str]:
    """For the shell: presets, study files and folders that begin so."""
    folder, _, beginning = incomplete.rpartition("/")
    found = [] if folder else [name for name in preset_names() if name.startswith(incomplete)]
    with contextlib.suppress(OSError, ValueError):
        for path in sorted(Path(folder or ("/" if incomplete.startswith("/") else ".")).iterdir()):
            if path.name.startswith(beginning or "") and (path.suffix == ".toml" or path.is_dir()):
                name = incomplete[: len(incomplete) - len(beginning)] + path.name
                found += [] if path.name.startswith(".") else [f"{name}/" if path.is_dir() else name]
    return found


def one_of(*words: str) -> Callable[[str], list[str]]:
    """For the shell: those of `words` that begin with what was typed."""
    return lambda incomplete: [word for word in words if word.startswith(incomplete)]


StudyArgument = Annotated[
    str, typer.Argument(metavar="STUDY", help="A study file, or the name of a preset.", autocompletion=_studies)
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="PATH=VALUE", help="Override one field, e.g. --set base.model.num_layers=4; repeatable."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")]
CacheOption = Annotated[
    Path | None,
    typer.Option("--cache", metavar="DIR", help="Where prepared corpora are kept.", parser=place("--cache")),
]
DEVICES: Final = ("auto", "cpu", "cuda")
DeviceOption = Annotated[
    str,
    typer.Option("--device", metavar="auto|cpu|cuda", help="Where to compute.", autocompletion=one_of(*DEVICES)),
]
JobsOption = Annotated[
    str, typer.Option("--jobs", metavar="auto|N", help="Runs at a time; auto = what a short probe finds best.")
]
MicroOption = Annotated[
    bool,
    typer.Option(
        "--auto-micro-batch", help="When an update finds no memory, do it in forward passes of half as many sequences."
    ),
]
QuietOption = Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")]


def out() -> Console:
    """The console for results: stdout; no colour when piped, wide enough then that no table is cut."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 160, emoji=False, markup=False)


def say(message: str, quiet: bool = False) -> None:
    """One line for people, on stderr; nobody listening is no reason to stop."""
    if not quiet:
        with contextlib.suppress(OSError):
            print(message, file=sys.stderr, flush=True)


def check_device(device: str) -> None:
    """ConfigError unless `device` is one of auto, cpu, cuda."""
    if device not in DEVICES:
        raise ConfigError(f"--device {device}: expected auto, cpu or cuda{did_you_mean(device, DEVICES)}")


def read_jobs(jobs: str) -> int | None:
    """The number of runs at a time; None for `auto`. ConfigError for anything else."""
    if jobs == "auto":
        return None
    if not re.fullmatch(r"0*[1-9][0-9]{0,5}", jobs, re.ASCII):
        raise ConfigError(f"--jobs {jobs[:80]}: expected auto or a whole number of at least 1 and below a million")
    return int(jobs)


def emit_json(value: Any) -> None:
    """The one JSON document of a command; no NaN literals (ValueError)."""
    document = dump(value)
    if isinstance(document, dict):
        document = {"schema_version": SCHEMA_VERSION, **document}
    print(json.dumps(document, indent=2, ensure_ascii=not is_unicode(sys.stdout), allow_nan=False))


def show_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> None:
    """A table on stdout: the first `left` columns left, the others right; cells are plain text, never markup."""
    print_table(title, [(heading, index >= left) for index, heading in enumerate(headings)], rows)


def print_table(
    title: str, columns: Iterable[tuple[str, bool]], rows: Iterable[Sequence[str]], facts: Iterable[str] = ()
) -> None:
    """A table on stdout, with sentences below it; of each column its heading and whether it is aligned to the right.

    What does not fit side by side comes below, each time behind the columns that tell the rows apart; prose breaks
    between words.
    """
    console, headings, cells = out(), list(columns), [list(row) for row in rows]
    console.print(Text(title, style="bold"), soft_wrap=not sys.stdout.isatty())
    for number, part in enumerate(parts(headings, cells, console.width)):
        if number:
            console.print()
        table = RichTable(box=None, pad_edge=False)
        for index in part:
            heading, right = headings[index]
            justify: Literal["left", "right"] = "right" if right else "left"
            fixed = not is_prose([row[index] for row in cells])
            table.add_column(Text(heading), justify=justify, overflow="fold", header_style="dim", no_wrap=fixed)
        for row in cells:
            table.add_row(*(Text(row[index]) for index in part))
        console.print(table)
    for fact in facts:
        prose(fact, style="dim")
    console.print()


COLUMN_GAP: Final = 2
"""Blanks between two columns."""
PROSE_WIDTH: Final = 28
"""Cells of a column of words at least, before it breaks between them."""


def is_prose(cells: Iterable[str]) -> bool:
    """Whether a column holds words that may break, and not names or numbers alone."""
    return any(len(cell) > PROSE_WIDTH and " " in cell for cell in cells)


def parts(headings: Sequence[tuple[str, bool]], rows: Sequence[Sequence[str]], width: int) -> list[list[int]]:
    """The columns of a table, in as many parts as it takes for each to fit `width`.

    In all are the first columns that tell every row from the others, or the very first where those leave no room.

    >>> parts([("arm", False), ("total", True), ("active", True)], [["moe", "164,672", "115,520"]], 20)
    [[0, 1], [0, 2]]
    >>> rows = [["1M", "moe", "0.75", "3 of 3"], ["1M", "dense", "0.74", "3 of 3"]]
    >>> parts([("budget", True), ("arm", False), ("loss", True), ("seeds", False)], rows, 22)
    [[0, 1, 2], [0, 1, 3]]
    """
    needs = []
    for index, (heading, _) in enumerate(headings):
        column = [heading, *(row[index] for row in rows)]
        whole = max(cell_len(cell) for cell in column)
        words = max(cell_len(word) for cell in column for word in cell.split() or [""])
        needs.append(min(whole, max(words, PROSE_WIDTH)) if is_prose(column[1:]) else whole)
    keys = next((list(range(n)) for n in (1, 2, 3) if len({tuple(row[:n]) for row in rows}) == len(rows)), [0])
    if sum(needs[i] + COLUMN_GAP for i in keys) + max(needs[len(keys) :], default=0) > width:
        keys = [0]
    found = [keys]
    for index in range(len(keys), len(headings)):
        if found[-1] != keys and sum(needs[i] + COLUMN_GAP for i in found[-1]) + needs[index] > width:
            found.append(keys)
        found[-1] = [*found[-1], index]
    return found


def prose(text: str, indent: int = 0, style: str = "") -> None:
    """A sentence on stdout: in a terminal broken between words under its own indent, else in one line."""
    console, blanks = out(), " " * indent
    if sys.stdout.isatty() and console.width > indent + 20:
        text = textwrap.fill(text, console.width, subsequent_indent=blanks, break_on_hyphens=False)
    console.print(Text(text, style=style), soft_wrap=True)


def waiting(directory: Path, stop: Callable[[], int], quiet: bool) -> Callable[[str], None]:
    """What to do while another process holds what is wanted: name it once, look at `stop`, let a moment pass.

    What is returned raises Interrupted when a signal came.
    """
    said: set[str] = set()

    def wait(who: str) -> None:
        if who not in said:
            said.add(who)
            say(f"{directory}: waiting for {who}", quiet)
        if number := stop():
            raise Interrupted(f"{directory}: stopped while waiting for {who}; run again to go on", number)
        time.sleep(WAIT_S)

    return wait


def default_cache() -> Path:
    """EQUIPOISE_CACHE, else the user's cache folder (XDG_CACHE_HOME or ~/.cache) / equipoise."""
    named = os.environ.get("EQUIPOISE_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "equipoise"


def read_study(name: str, overrides: Sequence[str] | None) -> StudySpec:
    """A study from a file or preset, with `--set` applied; ConfigError with every fault, of overrides and of fields."""
    table: Table = load_study_table(name)[0]
    faults: list[str] = []
    for assignment in overrides or ():
        try:
            table = apply_override(table, assignment)
        except ConfigError as error:
            faults += str(error).split("\n")
    try:
        study = parse_study(table)
    except ConfigError as error:
        raise ConfigError("\n".join([*faults, *str(error).split("\n")])) from None
    if faults:
        raise ConfigError("\n".join(faults))
    return study
