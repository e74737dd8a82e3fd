"""Progress of a study on stderr: a live table in a terminal, one plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Final

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from equipoise.cli.console import say
from equipoise.engine import Event
from equipoise.spec.run import RunConfig
from equipoise.text import count, duration, number
from equipoise.trunk import TrunkConfig

PLAIN_EVERY_S: Final = 15.0
"""Seconds between two plain lines about runs that are under way."""


class Progress:
    """Shows what `engine.run_local` reports; used as a context manager."""

    def __init__(self, total: int, done: int, quiet: bool) -> None:
        self.total = total
        self.done = done
        self.quiet = quiet
        self.began = time.monotonic()
        self.last_plain = time.monotonic()
        self.rows: dict[str, tuple[RunConfig | TrunkConfig, dict[str, Any]]] = {}
        console = Console(stderr=True)
        live = not quiet and sys.stderr.isatty() and not console.is_dumb_terminal
        self.live = Live(console=console, refresh_per_second=2, transient=True) if live else None

    def __enter__(self) -> Progress:
        if self.live:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live:
            self.live.stop()

    def show(self, event: Event) -> None:
        """Take one event of the engine."""
        name = event.task.run.folder
        if event.kind == "progress":
            if event.row:
                self.rows[name] = (event.task.run, event.row)
        elif event.kind == "finished":
            self.rows.pop(name, None)
            self.done += event.exit_code == 0 and isinstance(event.task.run, RunConfig)
            self._line(f"[{self.done}/{self.total}] {name}: {_end(event)}")
        if self.live:
            self.live.update(self._table())
        elif event.kind == "progress" and time.monotonic() - self.last_plain >= PLAIN_EVERY_S:
            self.last_plain = time.monotonic()
            for running, (run, row) in sorted(self.rows.items()):
                self._line(f"[{self.done}/{self.total}] {running}: {_state(run, row)}")

    def _line(self, text: str) -> None:
        if self.live:
            self.live.console.print(Text(text))
        else:
            say(text, self.quiet)

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for heading in (f"{self.done} of {self.total} runs, {duration(time.monotonic() - self.began)}", "state"):
            table.add_column(Text(heading))
        for name, (run, row) in sorted(self.rows.items()):
            table.add_row(Text(name), Text(_state(run, row)))
        return table


def _end(event: Event) -> str:
    """How a run ended, for people."""
    if event.exit_code == 0:
        return "complete"
    if event.exit_code in (130, 143):
        return "saved and stopped"
    return f"exit code {event.exit_code}, see {event.task.log}"


def _state(run: RunConfig | TrunkConfig, row: dict[str, Any]) -> str:
    """step/total (share) · loss · learning rate as a share of its peak · ms/step · tokens/s · elapsed · time left."""
    steps, step = run.num_steps, row["step"]
    done = f"step {step}/{steps} ({100 * step // steps} %)"
    if row["kind"] == "eval":
        return f"{done} validation loss {number(row['loss'])}"
    speed = row["tokens_per_s"]
    parts = (
        done,
        f"loss {number(row['lm_loss'])}",
        f"lr {row['lr'] / run.recipe.optim.lr:.2f}×",
        f"{run.recipe.batch_tokens / speed * 1e3:.0f} ms/step",
        f"{count(speed)} tok/s",
        f"elapsed {duration(row['elapsed_s'])}",
        f"left {duration(row['elapsed_s'] / step * (steps - step))}",
    )
    return " ".join(parts)
