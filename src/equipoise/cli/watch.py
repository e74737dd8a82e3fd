"""`equipoise watch`: a study at work, followed from another terminal."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from typing import Final

import typer
from rich.console import RenderableType

from equipoise.cli.console import JsonOption, emit_json, out, say
from equipoise.cli.live import Sparse, ending, frame, headline, is_live, line, live_screen, terminal, whole_table
from equipoise.cli.reports import DirectoryArgument
from equipoise.text import one_line
from equipoise.watching import Snapshot, State, Watcher, failures, is_over

LOOK_EVERY_S: Final = 1.0
"""Seconds between two looks at the files of the runs."""


def watch(
    directory: DirectoryArgument,
    as_json: JsonOption = False,
) -> None:
    """Follow a study that another process runs: step, loss, speed, time left and routing of every run. Reads only.

    On a terminal it stays until the study is finished or you leave with Ctrl-C (exit code 0), and also shows one that
    is not begun yet. Elsewhere it prints a line now and then, and ends when nobody is at work on the study. With --json
    it prints one snapshot.

    Example: equipoise watch runs/quick
    """
    from equipoise.engine import catching_signals

    watcher = Watcher(directory)
    snapshot = watcher.look()
    if as_json:
        emit_json(snapshot)
        return
    with catching_signals() as stop:

        def looks() -> Iterator[Snapshot]:
            """One look a second, until a signal asks to leave."""
            while not stop.number:
                yield watcher.look()
                until = time.monotonic() + LOOK_EVERY_S
                while time.monotonic() < until and not stop.number:
                    time.sleep(0.05)

        on_screen = sys.stdout.isatty() and is_live(terminal(stderr=False))
        if snapshot.state == "finished" or (is_over(snapshot) and not on_screen):
            pass
        elif on_screen:
            snapshot = _on_screen(looks(), snapshot)
        else:
            snapshot = _in_lines(looks(), snapshot)
    if stop.number not in (0, signal.SIGINT):
        raise typer.Exit(128 + stop.number)
    _show_end(snapshot)


def _on_screen(looks: Iterator[Snapshot], snapshot: Snapshot) -> Snapshot:
    """Keep a table up to date until the study is finished; returns the last look."""

    def now(width: int, height: int) -> RenderableType:
        return frame(snapshot, width, height, hint="Ctrl-C: leave (what runs goes on)")

    with live_screen(terminal(stderr=False), now):
        for snapshot in looks:  # what the screen shows
            if snapshot.state == "finished":
                break
    return snapshot


def _in_lines(looks: Iterator[Snapshot], snapshot: Snapshot, sparse: Sparse | None = None) -> Snapshot:
    """Print what ends, and now and then what trains, until nobody is at work on the study; returns the last look."""
    sparse = sparse or Sparse()
    said: dict[str, State] = {run.name: run.state for run in snapshot.runs}
    _lines(snapshot, "training")
    for snapshot in looks:
        for run in snapshot.runs:
            if run.state not in ("training", "waiting", said.get(run.name)):
                _print(snapshot, run.name, ending(run))
            said[run.name] = run.state
        if is_over(snapshot):
            break
        if sparse.due():
            _lines(snapshot, "training")
    return snapshot


def _lines(snapshot: Snapshot, state: State) -> None:
    for run in snapshot.runs:
        if run.state == state:
            _print(snapshot, run.name, line(run))


def _print(snapshot: Snapshot, name: str, text: str) -> None:
    print(f"[{snapshot.count('complete')}/{snapshot.num_runs}] {one_line(name)}: {text}", flush=True)


def _show_end(snapshot: Snapshot) -> None:
    """The whole table where it stays to be read, and what to do next."""
    console = out()
    console.print(headline(snapshot), soft_wrap=True)
    if snapshot.runs:
        console.print(whole_table(snapshot, console.width))
    for run in failures(snapshot.runs):
        console.print(f"{one_line(run.name)}: {ending(run)}", soft_wrap=True)
    if snapshot.state == "finished":
        say(f"verdicts and report: equipoise report {snapshot.directory}")
    elif snapshot.state == "stopped":
        say(f"to go on, or to try again what failed: {one_line(snapshot.command or 'equipoise run')}")
    elif snapshot.state == "not begun":
        say(f"{snapshot.directory}: to begin one there: equipoise run STUDY --out {snapshot.directory}")
