"""Follows the records of runs while they grow, and hands every new row to trackers: beside the training, never in it.

A thread reads the `metrics.jsonl` that runs write anyway, so nothing that is computed knows of it. A tracker that fails
is said once and left alone; the record has everything, and a later call hands it over from the beginning. Not for: what
a tracker does with a row (`trackers`).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from equipoise.errors import EquipoiseError
from equipoise.files import read_json, write_bytes
from equipoise.text import is_number, one_line
from equipoise.trackers import TRACKERS, Opened, Opener, numbers_of

POLL_S: Final = 1.0
"""Seconds between two looks at the records."""
DRAIN_S: Final = 30.0
"""Seconds that a tracker has for one record, when every run has ended; and for all of them, when it was interrupted."""

Warn = Callable[[str], None]


@dataclass(kw_only=True)
class _Followed:
    """How far one record was handed to one tracker."""

    opened: Opened | None = None
    offset: int = 0
    last: bytes = b""
    """The line before `offset`: where it is another now, the record was cut back in between."""
    seen: tuple[int, int] = (0, 0)
    """Size and time of change of the record when it was last read."""


@dataclass(kw_only=True)
class _Watch:
    """What the thread and those who wait for it share."""

    study: Path
    places: Sequence[str]
    warn: Warn
    poll_s: float
    ended: threading.Event
    """Set when the block is over: one last look is due."""
    alive: float
    """When a record was last handed over, or found to hold nothing new; monotonic seconds."""


@contextmanager
def tracking(
    names: Sequence[str],
    study: Path,
    places: Sequence[str],
    warn: Warn,
    *,
    interrupted: Callable[[], bool] = lambda: False,
    poll_s: float = POLL_S,
) -> Iterator[None]:
    """Hand the records of a study to these trackers during a `with` block, and what is left of them at its end.

    `places` are the folders inside the study's that may have a record, now or later. What was tracked to its end before
    is not handed over again. Raises nothing: what goes wrong is one `warn` a tracker.
    """
    usable = [name for name in dict.fromkeys(names) if _installed(name, warn)]
    if not usable:
        yield
        return
    watch = _Watch(
        study=study, places=places, warn=warn, poll_s=poll_s, ended=threading.Event(), alive=time.monotonic()
    )
    thread = threading.Thread(target=_follow, args=(usable, watch), daemon=True)
    thread.start()
    try:
        yield
    finally:
        began = watch.alive = time.monotonic()
        watch.ended.set()
        while thread.is_alive() and time.monotonic() < DRAIN_S + (began if interrupted() else watch.alive):
            thread.join(min(DRAIN_S, 0.2))
        if thread.is_alive():
            warn(f"{', '.join(usable)}: not done after {DRAIN_S:.0f} s; the same command goes on with it")


def _installed(name: str, warn: Warn) -> bool:
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.origin is not None:  # a mere folder of that name has no origin
        return True
    warn(
        f"--track {name}: the package {name} is not installed, so nothing is handed to it; "
        f"python -m pip install 'equipoise[{name}]', then the same command again: the record has everything"
    )
    return False


def _follow(names: Sequence[str], watch: _Watch) -> None:
    """What the thread does: look at every record and hand over what is new, once more after the block ended."""
    left: dict[str, dict[str, _Followed]] = {name: {place: _Followed() for place in watch.places} for name in names}
    while True:
        last_look = watch.ended.is_set()
        for name, records in list(left.items()):
            try:
                for place, followed in records.items():
                    _hand_over(name, watch.study, place, followed)
                    if last_look and followed.opened is not None:
                        followed.opened.close({})
                    watch.alive = time.monotonic()
            except (Exception, SystemExit) as error:  # of a package that is not ours: anything
                del left[name]
                watch.warn(f"{name}: nothing more is handed to it ({one_line(f'{type(error).__name__}: {error}')})")
        if last_look or not left:
            return
        watch.ended.wait(watch.poll_s)


def _hand_over(name: str, study: Path, place: str, followed: _Followed) -> None:
    """Give the new rows of one record to a tracker, from its beginning where the record is another than it was."""
    folder = study / place
    record, stamp = folder / "metrics.jsonl", study / name / place / "tracked"
    complete = (folder / "summary.json").exists()  # before the rows are read: then they are all there
    if not record.exists():
        return
    state = record.stat()
    seen = (state.st_size, state.st_mtime_ns)
    if seen == followed.seen and (followed.opened is None or not complete):
        return
    followed.seen = seen
    with record.open("rb") as file:
        file.seek(followed.offset - len(followed.last))
        if file.read(len(followed.last)) != followed.last and followed.opened is not None:
            followed.opened.close({})
            followed.opened = None
        if followed.opened is None:  # not yet, or anew
            file.seek(0)
            content = file.read()
            followed.offset, followed.last = 0, b""
        else:
            content = file.read()
    lines = content[: content.rfind(b"\n") + 1].splitlines(keepends=True)
    if not lines and (followed.opened is None or not complete):
        return
    if followed.opened is None and complete and _read_stamp(stamp) == _stamp(content):
        followed.offset, followed.last = len(content), lines[-1]
        return
    if followed.opened is None:
        opener: Opener = TRACKERS[name]
        followed.opened = opener(study, place, _config(folder))
    began = _began(folder)
    for line in lines:
        # Whether a record is whole is judged elsewhere.
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            row: dict[str, Any] = json.loads(line)
            when, numbers = began + float(row["elapsed_s"]), numbers_of(row)
            followed.opened.write(int(row["step"]), when, numbers)
    followed.offset += sum(map(len, lines))
    followed.last = lines[-1] if lines else followed.last
    if complete:
        followed.opened.close(_summary(folder))
        followed.opened = None
        write_bytes(stamp, _stamp(record.read_bytes()))


def _stamp(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def _read_stamp(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def _config(folder: Path) -> dict[str, Any]:
    """What the run is a function of, as it is on disk; empty where that cannot be read."""
    with contextlib.suppress(EquipoiseError):
        return dict(read_json(folder / "config.json").get("run") or {})
    return {}


def _began(folder: Path) -> float:
    """When the run was begun, Unix seconds: then the times of its rows are those it had, whenever they are read."""
    for name in ("config.json", "trunk.json"):
        if (folder / name).exists():
            return (folder / name).stat().st_mtime
    return time.time()


def _summary(folder: Path) -> dict[str, float]:
    """The numbers of a run's summary."""
    with contextlib.suppress(EquipoiseError):
        summary = read_json(folder / "summary.json")
        return {name: float(value) for name, value in summary.items() if is_number(value)}
    return {}
