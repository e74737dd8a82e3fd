"""How far preparing has got: bytes of text done in a stage, how fast, how long the stage still takes.

Not for: showing it (the command line), or deciding what is done (`unfinished`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

LOOK_S: Final = 0.2
"""Seconds between two reports: as often as a terminal is worth being drawn."""
WARM_S: Final = 1.0
"""Seconds of work before a rate is told; of less it is noise."""
STAGES: Final = ("reading", "learning the tokenizer", "encoding")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A look at a stage of preparing."""

    stage: int
    """Index into `STAGES`."""
    done_bytes: int
    """Bytes of text that are done, those of an earlier process included."""
    total_bytes: int | None
    """Bytes of text of the whole stage; while reading as far as the files tell; None: unknown."""
    bytes_per_s: float | None
    """Since this process began with the stage; None: too early to say."""

    @property
    def left_s(self) -> float | None:
        """Seconds that the stage still takes at this rate; None: not known.

        >>> Progress(stage=2, done_bytes=30, total_bytes=90, bytes_per_s=20.0).left_s
        3.0
        """
        if self.total_bytes is None or not self.bytes_per_s:
            return None
        return max(0, self.total_bytes - self.done_bytes) / self.bytes_per_s


class Meter:
    """Counts the bytes of one stage and reports now and then (mutable: it is a count)."""

    def __init__(
        self,
        stage: int,
        total_bytes: int | None,
        watch: Callable[[Progress], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stage, self._total, self._watch, self._clock = stage, total_bytes, watch, clock
        self._done = self._skipped = 0
        self._began = self._looked = clock()

    def skip(self, num_bytes: int) -> None:
        """Count what an earlier process did: it is done, but tells nothing of how fast this one is."""
        self._done += num_bytes
        self._skipped += num_bytes
        self._began = self._clock()
        self._look(self._began)

    def add(self, num_bytes: int) -> None:
        """Count bytes that were done now."""
        self._done += num_bytes
        self._look(self._clock())

    def _look(self, now: float) -> None:
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        passed = now - self._began
        rate = (self._done - self._skipped) / passed if passed >= WARM_S else None
        self._watch(
            Progress(stage=self._stage, done_bytes=self._done, total_bytes=self._total, bytes_per_s=rate or None)
        )
