"""How far preparing a corpus has got: one line that is kept up to date in a terminal, elsewhere one now and then.

Not for: runs (`progress`), or what the numbers are (`equipoise.data.progress`).
"""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import RenderableType
from rich.live import Live
from rich.text import Text

from equipoise.cli.console import say
from equipoise.cli.live import FRAMES_PER_S, Sparse, is_live, terminal
from equipoise.data.progress import STAGES, Progress
from equipoise.text import count, duration


class Preparing:
    """Shows what `prepare` reports; used as a context manager (mutable: it is what is on the screen)."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        self.sparse = Sparse()
        self.progress: Progress | None = None
        console = terminal(stderr=True)
        live = not quiet and sys.stderr.isatty() and is_live(console)
        self.screen = (
            Live(
                console=console,
                transient=True,  # nothing stays of it
                refresh_per_second=FRAMES_PER_S,
                redirect_stdout=False,
                redirect_stderr=False,
                get_renderable=self._line,
            )
            if live
            else None
        )

    def __enter__(self) -> Preparing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.screen:
            self.screen.stop()

    def say(self, text: str) -> None:
        """One line for people, above the one that changes."""
        if self.screen and self.screen.is_started:
            self.screen.console.print(Text(text), soft_wrap=True)
        else:
            say(text, self.quiet)

    def show(self, progress: Progress) -> None:
        """Take how far it has got."""
        self.progress = progress
        if self.screen:
            if not self.screen.is_started:  # with the first report: most corpora are in the cache, and there is none
                self.screen.start()
        elif self.sparse.due():
            say(line(progress), self.quiet)

    def _line(self) -> RenderableType:
        text = line(self.progress) if self.progress else ""
        return Text(f"{text} (Ctrl-C: stop and keep it)" if text else "", no_wrap=True, overflow="ellipsis")


def line(progress: Progress) -> str:
    """Stage, megabytes, speed and time left of the stage, in a line.

    >>> line(Progress(stage=2, done_bytes=512_000_000, total_bytes=1_900_000_000, bytes_per_s=8.9e6))
    'data: encoding (3 of 3): 512 of 1,900 MB (26 %), 8.9 MB/s, 3 min left'
    """
    total, done = progress.total_bytes, progress.done_bytes
    amount = f"{count(done // 10**6)} MB"
    if total:
        done = min(done, total)  # while reading the total is what files tell
        amount = f"{count(done // 10**6)} of {count(total // 10**6)} MB ({100 * done // total} %)"
    parts = [f"data: {STAGES[progress.stage]} ({progress.stage + 1} of {len(STAGES)}): {amount}"]
    if progress.bytes_per_s:
        parts.append(f"{progress.bytes_per_s / 1e6:.1f} MB/s")
    if progress.left_s:
        parts.append(f"{duration(progress.left_s)} left")
    return ", ".join(parts)
