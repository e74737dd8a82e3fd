"""Progress of `run`: a live table in a terminal, elsewhere one plain line now and then, on stderr.

Not for: what the table looks like (`live`), or finding out what runs do (`watching`).
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Final

from rich.console import RenderableType

from equipoise.cli.console import say
from equipoise.cli.live import Sparse, frame, is_live, line, live_screen, terminal
from equipoise.engine import Event, Stop
from equipoise.errors import EquipoiseError
from equipoise.spec.run import RunConfig
from equipoise.text import one_line
from equipoise.watching import Snapshot, Watcher, last_error

LOOK_EVERY_S: Final = 1.0
"""Seconds between two looks at the files of the runs, for the live table."""
STOPPED_BY: Final = {129: "SIGHUP", 130: "Ctrl-C", 143: "SIGTERM"}


class Progress:
    """Shows what `engine.run_tasks` reports, and what else is said meanwhile; used as a context manager."""

    def __init__(self, directory: Path, total: int, done: int, quiet: bool, stop: Stop) -> None:
        self.total = total
        self.done = done
        self.quiet = quiet
        self.stop = stop
        self.notes: list[str] = []
        self.watcher = Watcher(directory)
        self.snapshot: Snapshot | None = None
        self.looked = 0.0
        self.sparse = Sparse()
        console = terminal(stderr=True)
        live = not quiet and sys.stderr.isatty() and is_live(console)
        self.live = live_screen(console, self._frame) if live else None

    def __enter__(self) -> Progress:
        if self.live:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live:
            self.live.stop()
            for note in self.notes:  # the table is gone with its screen; what happened stays to be read
                say(note)

    def say(self, text: str) -> None:
        """One line for people, without disturbing the table."""
        if self.live:
            self.notes = [*self.notes, text]
        else:
            say(text, self.quiet)

    def show(self, event: Event) -> None:
        """Take one event of the engine."""
        if event.kind == "finished":
            self.done += event.exit_code == 0 and isinstance(event.task.run, RunConfig)
            self.say(f"[{self.done}/{self.total}] {event.task.run.folder}: {end(event)}")
        if self.live:
            if time.monotonic() - self.looked >= LOOK_EVERY_S:
                self._look()
        elif event.kind == "progress" and not self.quiet and self.sparse.due():
            self._look()
            for run in self.snapshot.runs if self.snapshot else ():
                if run.state == "training":
                    self.say(f"[{self.done}/{self.total}] {one_line(run.name)}: {line(run)}")

    def _look(self) -> None:
        self.looked = time.monotonic()
        try:
            self.snapshot = self.watcher.look()
        except (EquipoiseError, OSError) as error:  # no reason to stop training
            self.say(f"progress cannot be read: {one_line(str(error))}")

    def _frame(self, width: int, height: int) -> RenderableType:
        if self.snapshot is None:
            return ""
        asked = self.stop.number != 0
        hint = "stopping: runs save themselves (Ctrl-C again: kill them)" if asked else "Ctrl-C: save and stop"
        return frame(self.snapshot, width, height, notes=self.notes, hint=hint)


def end(event: Event) -> str:
    """How a run ended, for people: of one that failed the reason that it gave itself."""
    code, log = event.exit_code or 0, event.task.log
    if code == 0:
        return "complete"
    if code in STOPPED_BY:
        return "saved and stopped"
    if code < 0:
        why = "killed; did the system run out of memory?" if code == -9 else f"ended by signal {-code}"
    else:
        why = last_error(log) or "gave no reason"
    return f"exit code {code}: {one_line(why.removeprefix(f'{event.task.directory}: '))}; see {log}"
