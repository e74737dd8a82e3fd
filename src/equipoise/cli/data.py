"""`equipoise data fetch`: the corpora that studies use, from where they are published into a folder."""

from __future__ import annotations

import json
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from equipoise.cli.console import JsonOption, QuietOption, emit_json, out, place, say, show_table
from equipoise.cli.live import Sparse, is_live, terminal
from equipoise.errors import ConfigError, DataError, Interrupted
from equipoise.faults import not_accepted, printable
from equipoise.text import count, duration, size

if TYPE_CHECKING:
    from equipoise.fetch.download import Progress
    from equipoise.fetch.manifest import Manifest

app = typer.Typer(
    no_args_is_help=True, help="Get the corpora that studies use.\n\nExample: equipoise data fetch tinystories"
)
fetch = typer.Typer(no_args_is_help=True)
app.add_typer(
    fetch,
    name="fetch",
    help="Fetch a corpus into a folder: what is there is checked, what was broken off is gone on with."
    "\n\nExample: equipoise data fetch tinystories",
)

NAMED: Final = 20
"""Missing books, and reasons, that are named one by one."""


def _out_option(default: str) -> Any:
    text = f"Folder to fetch into; default {default}."
    return typer.Option("--out", metavar="DIR", help=text, parser=place("--out"))


@fetch.command()
def tinystories(
    destination: Annotated[Path | None, _out_option("data/tinystories")] = None,
    gpt4: Annotated[
        bool,
        typer.Option("--gpt4", help="The second version, which GPT-4 alone wrote (2.1 GiB; data/tinystories-gpt4)."),
    ] = False,
    revision: Annotated[
        str | None,
        typer.Option(
            "--revision", metavar="REV", help="A commit, branch or tag of the data set; default a fixed commit."
        ),
    ] = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Fetch TinyStories (1.8 GiB) from the Hugging Face hub: the official text files of a fixed revision.

    Size and SHA-256 of each file are checked and written to manifest.json, with address and revision.

    Needs the package huggingface_hub (extra data). HF_ENDPOINT, HF_TOKEN and proxies are honoured.

    Example: equipoise data fetch tinystories
    """
    from equipoise.fetch.stories import REVISION, fetch_stories

    if revision is not None and not (revision.isprintable() and revision.strip()):
        raise ConfigError(not_accepted("--revision", revision, "a commit, branch or tag"))
    folder = destination or Path("data") / ("tinystories-gpt4" if gpt4 else "tinystories")
    with _fetching(folder, quiet) as progress:
        manifest, fetched = fetch_stories(folder, progress, gpt4=gpt4, revision=revision or REVISION)
    _show(folder, manifest, "tinystories", sorted(manifest["files"]), fetched, {}, as_json)


@fetch.command()
def gutenberg(
    numbers: Annotated[
        list[str], typer.Argument(metavar="IDS...", help="Numbers of books: 11 84 1342, 11,84,1342 or 100-110.")
    ],
    destination: Annotated[Path | None, _out_option("data/gutenberg")] = None,
    mirror: Annotated[
        str | None,
        typer.Option("--mirror", metavar="URL", help="Another of www.gutenberg.org/MIRRORS.ALL, or your own."),
    ] = None,
    pause: Annotated[
        float, typer.Option("--pause", metavar="SECONDS", help="Between requests; Project Gutenberg asks for 2.")
    ] = 2.0,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Fetch books of Project Gutenberg by number, from a mirror, into a folder that grows with every call.

    A book's number is in its address: www.gutenberg.org/ebooks/84 is 84.

    Books that are not there are named at the end, with exit code 3; the others are kept.

    Example: equipoise data fetch gutenberg 11 84 1342
    """
    from equipoise.fetch.books import MIRROR, check_mirror, fetch_books, read_numbers

    wanted = read_numbers(numbers)
    if not 0 <= pause <= 3600:
        raise ConfigError(not_accepted("--pause", pause, "seconds from 0 to 3600"))
    source = check_mirror(mirror or MIRROR)
    folder = destination or Path("data") / "gutenberg"
    with _fetching(folder, quiet) as progress:
        books = fetch_books(wanted, folder, progress, mirror=source, pause_s=pause)
    here = [name for name in (f"pg{number}.txt" for number in wanted) if name in {*books.fetched, *books.present}]
    _show(folder, books.manifest, "gutenberg", here, books.fetched, books.failed, as_json)
    if books.failed:
        raise typer.Exit(DataError.exit_code)


@contextmanager
def _fetching(folder: Path, quiet: bool) -> Iterator[Progress]:
    """Hold `folder` and show progress for the time of a `with` block; a signal ends it as Interrupted."""
    from equipoise.fetch.download import Progress
    from equipoise.files import held

    shown = _Shown(quiet)
    with _interruptible(folder), held(folder / ".fetch.lock", f"folder {folder}"), shown:
        yield Progress(report=shown.report, say=shown.say)


@contextmanager
def _interruptible(folder: Path) -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP end the block at once: a part is as good as the bytes that it has."""
    numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    got = [signal.SIGINT]

    def stop(number: int, _: object) -> None:
        got[0] = signal.Signals(number)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(f"{folder}: interrupted; the same command goes on from here", got[0]) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Shown:
    """Shows on standard error how far downloads are: bars in a terminal, elsewhere a line now and then."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        console = terminal(stderr=True)
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        live = not quiet and sys.stderr.isatty() and is_live(console)
        self.bars = RichProgress(*columns, console=console, transient=True) if live else None
        self.task: Any = None
        self.name = ""
        self.began = (0.0, 0)
        self.sparse = Sparse()

    def __enter__(self) -> _Shown:
        if self.bars:
            self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bars:
            self.bars.stop()

    def say(self, line: str) -> None:
        """One line for people."""
        if self.bars:
            self.bars.console.print(Text(printable(line)), soft_wrap=True)
        else:
            say(printable(line), self.quiet)

    def report(self, name: str, have: int, total: int | None) -> None:
        """So many bytes of the file `name` are here."""
        if name != self.name:
            self.name, self.began = name, (time.monotonic(), have)
            if self.bars:
                if self.task is not None:
                    self.bars.remove_task(self.task)
                self.task = self.bars.add_task(name, total=total, completed=have)
            else:
                self.say(f"{name}: {size(total) if total else 'size unknown'}")
        if self.bars:
            self.bars.update(self.task, completed=have, total=total)
        elif self.sparse.due():
            self.say(f"{name}: {_so_far(have, total, self.began)}")


def _so_far(have: int, total: int | None, began: tuple[float, int]) -> str:
    """How much is here, how fast it comes, and how long the rest will take."""
    rate = (have - began[1]) / max(1e-9, time.monotonic() - began[0])
    parts = [f"{size(have)} of {size(total)} ({100 * have // total} %)" if total else size(have)]
    if rate > 0:
        parts += [f"{size(rate)}/s", *([f"{duration((total - have) / rate)} left"] if total else [])]
    return ", ".join(parts)


def _show(
    folder: Path,
    manifest: Manifest,
    kind: str,
    here: Sequence[str],
    fetched: Sequence[str],
    failed: dict[int, str],
    as_json: bool,
) -> None:
    """What is in the folder now, and the command that uses it; what is missing on standard error, in one line."""
    setting = f"corpus.path={json.dumps(str(folder), ensure_ascii=False)}"
    command = shlex.join(["equipoise", "run", kind, "--set", setting])
    files = {name: manifest["files"][name] for name in here}
    if as_json:
        emit_json(
            {
                "directory": str(folder),
                **{key: value for key, value in manifest.items() if key not in ("schema_version", "files")},
                "files": [{"name": name, **file, "fetched_now": name in fetched} for name, file in files.items()],
                "missing": {str(number): why for number, why in failed.items()},
                "command": command,
            }
        )
    elif files:
        revision = f" at revision {manifest['revision']}" if manifest["revision"] else ""
        rows = [
            [name, count(file["bytes"]), "fetched" if name in fetched else "was here", file["sha256"]]
            for name, file in files.items()
        ]
        show_table(printable(f"{folder}: {manifest['source']}{revision}"), ["file", "bytes", "", "SHA-256"], rows)
        out().print(f"licence: {manifest['licence']}", soft_wrap=True)
        out().print(f"use it with: {printable(command)}", soft_wrap=True)
    if failed:
        say(printable(f"{len(failed)} of {len(failed) + len(here)} books are not there: {_reasons(failed)}"))


def _reasons(failed: dict[int, str]) -> str:
    """Which books are missing, by reason, in one line of bounded length.

    >>> _reasons({5: "gone", 6: "broken", 9: "gone"})
    '5, 9 (gone); 6 (broken)'
    """
    by_reason: dict[str, list[int]] = {}
    for number, why in failed.items():
        by_reason.setdefault(why, []).append(number)
    told = []
    for why, numbers in list(by_reason.items())[:NAMED]:
        more = f" and {len(numbers) - NAMED:,} more" if len(numbers) > NAMED else ""
        told.append(f"{', '.join(map(str, numbers[:NAMED]))}{more} ({why})")
    if len(by_reason) > NAMED:
        told.append(f"and others for {len(by_reason) - NAMED:,} more reasons")
    return "; ".join(told)
