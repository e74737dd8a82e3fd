"""A study at work, for people: a table that fits any terminal, or one plain line a run. Shared by `run` and `watch`.

On a terminal the table fills the alternate screen, as in `top`: nothing wraps, nothing is left behind when the window
changes its size, and what was there before comes back at the end. Not for: finding out what runs do (`watching`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from equipoise.text import MISSING, count, duration, loss, number, one_line, shortened
from equipoise.watching import Health, Snapshot, State, Watched, failures

FRAMES_PER_S: Final = 2.0
URGENT: Final[tuple[State, ...]] = ("training", "failed", "broken", "diverged", "stopped", "waiting", "complete")
"""Which rows stay where there is no room for all: the first."""
STYLES: Final[dict[State, str]] = {
    "failed": "red",
    "broken": "red",
    "diverged": "red",
    "training": "bold",
    "waiting": "dim",
    "stopped": "yellow",
}
HEADINGS: Final = ("run", "step", "loss", "val loss", "tok/s", "left", "busiest expert")
GAP: Final = 2
"""Blanks between two columns."""


def is_live(console: Console) -> bool:
    """Whether a table can be kept up to date there: a terminal that can move its cursor."""
    return console.is_terminal and not console.is_dumb_terminal and console.file.isatty()


def terminal(*, stderr: bool) -> Console:
    """The console of standard error or output for a live table."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, highlight=False, emoji=False, markup=False)


def live_screen(console: Console, frame: Callable[[int, int], RenderableType]) -> Live:
    """A screen that shows what `frame(width, height)` returns, twice a second, at the size the terminal then has.

    Stop it, or leave its `with` block, and the terminal is as it was.
    """
    return Live(
        console=console,
        screen=True,
        refresh_per_second=FRAMES_PER_S,
        redirect_stdout=False,
        redirect_stderr=False,
        get_renderable=lambda: frame(*console.size),
    )


# ------------------------------------------------------------------------------------------------ the table


def frame(snapshot: Snapshot, width: int, height: int, *, notes: Sequence[str] = (), hint: str = "") -> RenderableType:
    """The study in at most `width` × `height` cells: a headline, the runs there is room for, and the newest `notes`."""
    told = [f"{run.name}: {run.state}: {run.message}" for run in failures(snapshot.runs) if run.message] + list(notes)
    told = told[len(told) - min(len(told), height // 5) :]
    airy = height >= 10
    rows, hidden = _chosen(snapshot.runs, height - 2 - airy - len(told) - bool(hint))
    parts: list[RenderableType] = [_clipped(headline(snapshot), "bold"), *([Text("")] if airy else [])]
    if rows:
        parts.append(_table(rows, width))
    if hidden:
        parts.append(_clipped(f"… and {hidden}", "dim"))
    parts += [_clipped(one_line(line)) for line in told]
    parts += [_clipped(hint, "dim")] if hint else []
    return Group(*parts)


def whole_table(snapshot: Snapshot, width: int) -> RenderableType:
    """Every run of the study, however many lines that takes, without a headline."""
    return _table(snapshot.runs, width)


def headline(snapshot: Snapshot) -> str:
    """The study in a line: how many runs, in which states, and how long it will take."""
    if snapshot.study is None:
        who = snapshot.held_by
        doing = f"being prepared by {one_line(who)}" if who else "no study has begun here (no lock.json)"
        return f"{one_line(snapshot.directory)}: {doing}"
    parts = [f"{snapshot.count('complete')} of {snapshot.num_runs} runs complete"]
    for state in URGENT[:-1]:
        if number_of := snapshot.count(state):
            parts.append(f"{number_of} {state}")
    if snapshot.left_s is not None:
        parts.append(f"about {duration(snapshot.left_s)} left")
    if snapshot.state == "stopped":
        parts.append("nobody is at work on it")
    return f"{one_line(snapshot.study)}: {', '.join(parts)}"


def _chosen(runs: Sequence[Watched], room: int) -> tuple[list[Watched], str]:
    """At most `room` rows, the urgent ones, in the study's order; and in words what was left out."""
    if len(runs) <= room:
        return list(runs), ""
    order = sorted(range(len(runs)), key=lambda index: (URGENT.index(runs[index].state), index))
    kept = set(order[: max(0, room - 1)])
    left = [run.state for index, run in enumerate(runs) if index not in kept]
    words = ", ".join(f"{left.count(state)} {state}" for state in URGENT if state in left)
    return [run for index, run in enumerate(runs) if index in kept], words


def _table(runs: Sequence[Watched], width: int) -> Table:
    """The rows in columns; where they do not fit, val loss goes first, then names lose their middle, then more goes."""
    cells = [_cells(run) for run in runs]
    columns = list(range(len(HEADINGS)))
    wide = {index: max(len(HEADINGS[index]), *(len(row[index]) for row in cells)) for index in columns}
    for index, name_width in ((3, wide[0]), (4, 22), (6, 16), (2, 12), (5, 8)):
        if name_width + sum(wide[i] + GAP for i in columns[1:]) > width:
            columns.remove(index)
    name_width = max(8, min(wide[0], width - sum(wide[i] + GAP for i in columns[1:])))
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="dim")
    for index in columns:
        right = index not in (0, 6)
        table.add_column(Text(HEADINGS[index]), justify="right" if right else "left", no_wrap=True, overflow="ellipsis")
    for run, row in zip(runs, cells, strict=True):
        shown = [shortened(row[0], name_width), *(row[index] for index in columns[1:])]
        table.add_row(*(Text(cell) for cell in shown), style=STYLES.get(run.state, ""))
    return table


def _cells(run: Watched) -> tuple[str, ...]:
    """One cell a heading; what a run is doing stands where the time left would."""
    training = run.state == "training"
    return (
        one_line(run.name),
        f"{run.step:,}/{run.num_steps:,}",
        loss(run.loss) if run.loss is not None else "",
        loss(run.eval_loss) if run.eval_loss is not None else "",
        count(run.tokens_per_s) if training and run.tokens_per_s is not None else "",
        (duration(run.left_s) if run.left_s is not None else "starting") if training else run.state,
        health(run.routing),
    )


def health(routing: Health | None) -> str:
    """How a router spreads its tokens, in a few words; nothing for a dense arm.

    >>> health(Health(busiest_frac=0.34, num_dead=2, collapsed=False))
    '34 %, 2 dead'
    """
    if routing is None:
        return ""
    dead = f", {routing.num_dead} dead" if routing.num_dead else ""
    return f"{100 * routing.busiest_frac:.0f} %{dead}{', collapsed' if routing.collapsed else ''}"


def _clipped(line: str, style: str = "") -> Text:
    return Text(line, style=style, no_wrap=True, overflow="ellipsis")


# ------------------------------------------------------------------------------------------------ plain lines


class Sparse:
    """When the next plain lines are due: after 15 seconds at first, then whenever a twentieth more time has passed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.began = self.last = clock()

    def due(self) -> bool:
        """Whether lines are due; if so, the wait for the next begins."""
        now = self.clock()
        if now - self.last < max(15.0, 0.05 * (now - self.began)):
            return False
        self.last = now
        return True


def line(run: Watched) -> str:
    """step/total (share) · losses · learning rate as a share of its peak · speed · elapsed · time left · routing."""
    share = 100 * run.step // run.num_steps
    parts = [f"step {run.step}/{run.num_steps} ({share} %)"]
    facts: tuple[tuple[str, Any, Callable[[Any], str]], ...] = (
        ("loss {}", run.loss, number),
        ("validation loss {}", run.eval_loss, number),
        ("lr {}×", run.lr, lambda value: f"{value:.2f}"),
        ("{} ms/step", run.update_s, lambda value: f"{value * 1e3:.0f}"),
        ("{} tok/s", run.tokens_per_s, count),
        ("elapsed {}", run.elapsed_s, duration),
        ("left {}", run.left_s, duration),
        ("busiest expert {}", health(run.routing) or None, str),
    )
    parts += [form.format(show(value)) for form, value, show in facts if value is not None]
    return " ".join(parts)


def ending(run: Watched) -> str:
    """What became of a run, in a line."""
    if run.state == "complete":
        return f"complete, validation loss {loss(run.eval_loss) if run.eval_loss is not None else MISSING}"
    return f"{run.state}: {one_line(run.message)}" if run.message else run.state
