"""What the runs of a study are doing, from the files they write: one snapshot, as often as somebody looks. Reads only.

Any process may look, at any time: before the first run, while runs train, after some failed, when all is done.

Not for: showing it (the command line), judging results (`evidence`), starting runs (`engine`).
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from equipoise.accounting import count_flops
from equipoise.config import misfit
from equipoise.errors import ConfigError
from equipoise.estimate import makespan
from equipoise.files import parse_json
from equipoise.lock import Lock, held_to, locked_runs, read_lock
from equipoise.record import RunRecord, read_run
from equipoise.shapes import Row
from equipoise.spec.run import RunConfig
from equipoise.trunk import TrunkConfig, branched_at, checkpoint_steps, trunks_of

RECENT_ROWS: Final = 64
"""Updates that speed is read over: one alone jumps too much to be read."""
TAIL_BYTES: Final = 1 << 18
"""How much of a growing file is read at first; a row of an update takes about 240 bytes."""

State = Literal["waiting", "training", "complete", "diverged", "stopped", "failed", "broken"]
StudyState = Literal["not begun", "running", "stopped", "finished"]


@dataclass(frozen=True, kw_only=True)
class Health:
    """How a router spread its tokens at the newest evaluation, in the layer where it did so worst."""

    busiest_frac: float
    """Largest share of assignments that one expert of a layer took, at most 1/K."""
    num_dead: int
    """Experts without any assignment, over all layers."""
    collapsed: bool
    """Whether in some layer the K busiest experts took 90 % or more."""


@dataclass(frozen=True, kw_only=True)
class Watched:
    """One run, or one trunk, as its files have it now."""

    name: str
    """Its folder in the study."""
    is_trunk: bool
    """Whether it is the trunk of several budgets."""
    state: State
    """waiting (nothing done) · training · complete · diverged · stopped (to be gone on with) · failed · broken."""
    step: int
    """Updates done."""
    num_steps: int
    """Updates of the whole."""
    loss: float | None = None
    """Training loss of the newest update, nats per token."""
    eval_loss: float | None = None
    """Loss at the newest point of the curve; of a complete run that of its final weights on the whole split."""
    lr: float | None = None
    """Learning rate of the newest update as a share of its peak."""
    update_s: float | None = None
    """Seconds of an update, mean of the newest ones."""
    tokens_per_s: float | None = None
    """Training tokens per second, over the same updates."""
    elapsed_s: float | None = None
    """Seconds spent in updates."""
    left_s: float | None = None
    """Seconds of updates that are left, at that speed; None unless it is training."""
    routing: Health | None = None
    """Of a routed arm; None of a dense one, and before the first evaluation."""
    message: str | None = None
    """Why it diverged, failed or is broken."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A study as its directory has it now."""

    directory: str
    """Where it lies."""
    study: str | None
    """Its name; None before it is locked."""
    state: StudyState
    """not begun (no lock yet) · running (a process is at work on it) · stopped · finished."""
    held_by: str | None
    """The process that is at work on the study."""
    command: str | None
    """The command line that declared it, or added to it last."""
    left_s: float | None
    """Seconds until the last run ends, if it is running and the speed of every arm is known."""
    runs: tuple[Watched, ...]
    """Trunks that runs still wait for, then every run in the study's order."""

    def count(self, *states: State) -> int:
        """Runs in one of these states; trunks are not counted."""
        return sum(run.state in states for run in self.runs if not run.is_trunk)

    @property
    def num_runs(self) -> int:
        """Runs of the study, without trunks."""
        return sum(not run.is_trunk for run in self.runs)


class Watcher:
    """A study directory that is looked at again and again; what no longer changes is read once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lock: tuple[tuple[int, ...], Lock] | None = None
        self._records: dict[Path, tuple[tuple[int, ...], RunRecord]] = {}
        self._complete: dict[Path, tuple[RunRecord, Watched]] = {}

    def look(self) -> Snapshot:
        """The study now. ConfigError when there is no such folder, IntegrityError when its lock cannot be read."""
        if not self.directory.is_dir():
            raise ConfigError(f"{self.directory}: no such folder; expected the folder of a study, e.g. runs/quick")
        held_by, since = at_work(self.directory / ".study.lock"), _stamp(self.directory / ".study.holder")
        stamp = _stamp(self.directory / "lock.json")
        if not stamp:
            state: StudyState = "running" if held_by else "not begun"
            nothing: dict[str, Any] = {"study": None, "command": None, "left_s": None, "runs": ()}
            return Snapshot(directory=str(self.directory), state=state, held_by=held_by, **nothing)
        if self._lock is None or self._lock[0] != stamp:
            self._lock = stamp, read_lock(self.directory)
        lock = self._lock[1]
        runs = locked_runs(lock)
        began = since[0] if held_by and since else 0
        alone = {run: self._run(run, bool(held_by), began) for run in runs}
        done = {run for run, one in alone.items() if one.state in ("complete", "diverged")}
        wanted = [trunk for trunk in trunks_of(runs) if not done.issuperset(trunk.runs)]
        watched = [*(self._trunk(trunk, bool(held_by), began) for trunk in wanted), *alone.values()]
        finished = len(done) == len(runs)
        working = bool(held_by) or any(one.state == "training" for one in watched)
        return Snapshot(
            directory=str(self.directory),
            study=lock.study.name,
            state="running" if working else "finished" if finished else "stopped",
            held_by=held_by,
            command=lock.command or None,
            left_s=_time_left(runs, watched) if working else None,
            runs=tuple(watched),
        )

    def _run(self, run: RunConfig, held: bool, began: int) -> Watched:
        place = self.directory / run.folder
        record = self._record(run, place)
        if record.status in ("complete", "diverged"):
            known = self._complete.get(place)
            if known is None or known[0] is not record:
                self._complete[place] = known = record, _finished(run, place, record)
            return known[1]
        growing = _growing(run, place)
        state, why = self._unfinished(place, run.folder, growing["step"] > 0, held, began)
        if record.status == "broken" and state != "training":
            state, why = ("waiting", None) if held else ("broken", record.fault)
        return _watched(run, growing, state, why)

    def _trunk(self, trunk: TrunkConfig, held: bool, began: int) -> Watched:
        place = self.directory / trunk.folder
        growing = _growing(trunk, place)
        growing["step"] = growing["step"] or max(checkpoint_steps(place), default=0)
        state, why = self._unfinished(place, trunk.folder, growing["step"] > 0, held, began)
        if growing["step"] >= trunk.num_steps:
            state, why = "complete", None
        return _watched(trunk, growing, state, why)

    def _record(self, run: RunConfig, place: Path) -> RunRecord:
        """The record of a run, read again only when its configuration or its summary is another file than before."""
        stamp = (*_stamp(place / "config.json"), 0, *_stamp(place / "summary.json"))
        known = self._records.get(place)
        if known is None or known[0] != stamp:
            self._records[place] = known = stamp, held_to(run, read_run(place, deep=False))
        return known[1]

    def _unfinished(self, place: Path, name: str, begun: bool, held: bool, began: int) -> tuple[State, str | None]:
        """What a run that is not finished is doing, and why it failed if it did so since the study was last started."""
        if at_work(place.parent / f".{place.name}.lock"):
            return "training", None
        log = self.directory / "logs" / f"{name}.log"
        told = _stamp(log)
        why = last_error(log) if told and told[0] >= began else None
        if why and "run again to go on" not in why:
            return "failed", why.removeprefix(f"{place}: ")
        return ("stopped" if begun and not held else "waiting"), None


def at_work(lock: Path) -> str | None:
    """The process that holds a lock file (see `files.held`), as its note says; None without one. Touches nothing.

    The note of a process of this machine that was killed is passed over.
    """
    try:
        who = lock.with_suffix(".holder").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    words = who.split()
    if os.name == "posix" and len(words) > 3 and words[1].isdecimal() and words[3] == platform.node():
        try:
            os.kill(int(words[1]), 0)  # asks whether it is there, and does nothing to it
        except (ProcessLookupError, OverflowError):
            return None
        except PermissionError:  # it is, and is another user's
            pass
    return who or None


def last_error(log: Path) -> str | None:
    """The reason a child process gave when it failed last: the newest line of its log, if it is one of an error."""
    with contextlib.suppress(OSError):
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
        said = [line for line in lines if line.strip()][-1:]
        return said[0].removeprefix("error: ") if said and said[0].startswith("error: ") else None
    return None


# ------------------------------------------------------------------------------------------------ one run


def _watched(run: RunConfig | TrunkConfig, growing: dict[str, Any], state: State, why: str | None) -> Watched:
    update_s = growing.get("update_s")
    left = (run.num_steps - growing["step"]) * update_s if state == "training" and update_s is not None else None
    return Watched(
        name=run.folder,
        is_trunk=isinstance(run, TrunkConfig),
        state=state,
        num_steps=run.num_steps,
        left_s=left,
        message=why,
        **growing,
    )


def _finished(run: RunConfig, place: Path, record: RunRecord) -> Watched:
    summary = record.summary or {}
    growing = {**_growing(run, place), "step": summary.get("steps", 0)}
    growing["eval_loss"] = summary.get("val_loss", growing.get("eval_loss"))
    state: State = "diverged" if record.status == "diverged" else "complete"
    return _watched(run, growing, state, summary.get("message"))


def _growing(run: RunConfig | TrunkConfig, place: Path) -> dict[str, Any]:
    """What the record of a run says now, as fields of `Watched`; a row that cannot be read says nothing."""
    updates, point = newest_rows(place / "metrics.jsonl")
    found: dict[str, Any] = {"step": max((row["step"] for row in (*updates, point) if row), default=0)}
    with contextlib.suppress(KeyError, TypeError, ValueError, ArithmeticError):
        if updates:
            first, last = updates[0], updates[-1]
            steps, seconds = last["step"] - first["step"], last["elapsed_s"] - first["elapsed_s"]
            update_s = seconds / steps if steps > 0 else last["elapsed_s"] / last["step"]
            found |= {"loss": last["lm_loss"], "lr": last["lr"] / run.recipe.optim.lr, "elapsed_s": last["elapsed_s"]}
            found |= {"update_s": update_s, "tokens_per_s": run.recipe.batch_tokens / update_s if update_s else None}
    with contextlib.suppress(KeyError, TypeError, ValueError, ArithmeticError):
        if point:
            found |= {"eval_loss": point["loss"], "routing": _health(point["routing"])}
    return found


def _health(layers: Sequence[dict[str, Any]]) -> Health | None:
    if not layers:
        return None
    return Health(
        busiest_frac=max(layer["busiest_frac"] for layer in layers),
        num_dead=sum(len(layer["dead"]) for layer in layers),
        collapsed=any(layer["collapsed"] for layer in layers),
    )


def newest_rows(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """The newest rows of updates (at most 64, in order) and the newest evaluation of a file that may be growing.

    A line that is torn, or cannot be read, is passed over. Without a file: none.
    """
    try:
        size = path.stat().st_size
        lines, point = _tail(path, size, TAIL_BYTES), None
        if (point := _newest(lines, b'{"kind":"eval"')) is None and size > TAIL_BYTES:
            point = _newest(_tail(path, size, size), b'{"kind":"eval"')
    except OSError:
        return [], None
    updates = [line for line in lines if line.startswith(b'{"kind":"train"')][-RECENT_ROWS:]
    return [row for line in updates if (row := _row(line))], point


def _tail(path: Path, size: int, num_bytes: int) -> list[bytes]:
    """The whole lines among the last `num_bytes` of a file of `size` bytes."""
    begin = max(0, size - num_bytes)
    with path.open("rb") as file:
        file.seek(begin)
        return file.read().split(b"\n")[1 if begin else 0 : -1]


def _newest(lines: Sequence[bytes], beginning: bytes) -> dict[str, Any] | None:
    return next((row for line in reversed(lines) if line.startswith(beginning) and (row := _row(line))), None)


def _row(line: bytes) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError):
        row: dict[str, Any] = parse_json(line)
        return row if misfit(Row, row) is None else None
    return None


# ------------------------------------------------------------------------------------------------ the study


def _time_left(runs: Sequence[RunConfig], watched: Sequence[Watched]) -> float | None:
    """Seconds until the last run ends, as many at a time as now; None when no speed is known.

    An arm that has no speed yet is taken to do as many FLOPs a second as the others.
    """
    of = {run.folder: run for run in runs} | {trunk.folder: trunk for trunk in trunks_of(runs)}
    unfinished = [one for one in watched if one.state in ("waiting", "training")]
    rates: dict[str, float] = {}
    for one in watched:  # what trains now last: it is the newest
        if one.update_s:
            rates[of[one.name].arm] = one.update_s
    rates |= {of[one.name].arm: one.update_s for one in watched if one.state == "training" and one.update_s}
    flops = {run.arm: count_flops(run.model, run.recipe.seq_len).training * run.recipe.batch_tokens for run in runs}
    speeds = [flops[arm] / update_s for arm, update_s in rates.items()]
    if not speeds or not unfinished:
        return None
    speed = sum(speeds) / len(speeds)
    shared = {run for trunk in trunks_of(runs) for run in trunk.runs}
    lengths = []
    for one in unfinished:
        run = of[one.name]
        done = max(one.step, branched_at(run) if isinstance(run, RunConfig) and run in shared else 0)
        lengths.append((run.num_steps - done) * rates.get(run.arm, flops[run.arm] / speed))
    jobs = sum(one.state == "training" for one in watched)
    return makespan(sorted(lengths, reverse=True), max(1, jobs))


def _stamp(path: Path) -> tuple[int, ...]:
    """Time of the last change in ns, and size; empty without the file."""
    with contextlib.suppress(OSError):
        found = path.stat()
        return found.st_mtime_ns, found.st_size
    return ()


def is_over(snapshot: Snapshot) -> bool:
    """Whether there is nothing more to see unless somebody starts the study again."""
    return snapshot.state in ("finished", "stopped", "not begun")


def failures(runs: Iterable[Watched]) -> list[Watched]:
    """Those that need somebody."""
    return [run for run in runs if run.state in ("diverged", "failed", "broken")]
