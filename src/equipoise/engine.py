"""Where runs execute: one loop over tasks, whatever starts them, and `local`, child processes on this machine.

A task is carried out by `equipoise train <run directory> …`; the run directory holds its whole configuration and is the
only thing that comes back. An engine says how such a command is started, and how its end is known; the loop is the same
for all of them. A task that failed never stops the others.

Not for: other machines (`engines/`), what there is to do (`work`), training.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from equipoise.errors import Interrupted
from equipoise.forks import Child, Nursery
from equipoise.spec.run import RunConfig
from equipoise.trunk import TrunkConfig

SAVED: Final = (129, 130, 143)
"""Exit codes of a run that was told to stop, and did, after its state was saved."""
POLL_S: Final = 0.05
"""Seconds between two looks at what has ended: a place that is free costs a study time."""
SHOWN_S: Final = 0.25
"""Seconds between two tellings that a task is at work."""
UNBOUNDED: Final = 1_000_000
"""Tasks started at a time where a scheduler decides how many run: more than any study has."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One run, or one trunk, to execute."""

    run: RunConfig | TrunkConfig
    """What to train."""
    directory: Path
    """Its directory; `config.json` or `trunk.json` is there already."""
    log: Path
    """Where the child's output goes."""
    num_runs: int = 1
    """Runs that are finished when it is; of a trunk those that wait for it."""


def command_line(task: Task, arguments: Sequence[str]) -> list[str]:
    """What carries out a task, as arguments of `equipoise`, the same in any folder and on any machine of a file system.

    `arguments` are those that all tasks of a study share.
    """
    return ["train", str(task.directory.resolve()), *arguments]


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Something that executes tasks: the local machine, or a scheduler (see `engines/`)."""

    start: Callable[[Sequence[Task]], Sequence[Child]]
    """Starts tasks, or puts them in a queue; each is a child whose exit code is that of its `command_line`."""
    num_jobs: int
    """Tasks started at a time, at most."""
    how: str
    """For people, after "6 runs, 0 done": "2 at a time"."""
    retries: int = 0
    """How often a task that somebody else told to stop (a scheduler that needs the place) is started again."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened to a task, for whoever shows progress: `progress` says that it is still at work."""

    kind: Literal["started", "progress", "finished"]
    task: Task
    exit_code: int | None = None
    """The child's exit code, for `finished`; 0 = complete."""


@dataclass
class Stop:
    """Signals received so far; `number` is the first one, 0 while there is none."""

    number: int = 0
    count: int = 0

    def __call__(self) -> int:
        return self.number


@contextmanager
def catching_signals(second: Callable[[int], None] = lambda _: None) -> Iterator[Stop]:
    """Count SIGINT, SIGTERM and SIGHUP instead of dying of them.

    A thread does it, told by the system as soon as a signal comes: a handler in Python has to wait until whatever
    computes is done, and two signals in that time would be one. `second` is called there with the number of the second
    signal and of all after it, for callers that then quit at once.
    """
    stop = Stop()
    names = ("SIGINT", "SIGTERM", "SIGHUP")  # a closed terminal is a reason to save too; Windows has no SIGHUP
    numbers = {getattr(signal, name) for name in names if hasattr(signal, name)}
    told, tell = socket.socketpair()  # what Windows can be told by, too
    tell.setblocking(False)

    def watch() -> None:
        while received := told.recv(1):
            if received[0] in numbers:
                stop.number = stop.number or received[0]
                stop.count += 1
                if stop.count > 1:
                    second(received[0])

    watcher = threading.Thread(target=watch, name="signals", daemon=True)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    told_before = signal.set_wakeup_fd(tell.fileno(), warn_on_full_buffer=False)
    watcher.start()
    try:
        yield stop
    except Interrupted as error:  # who noticed that it is to stop may not know because of which signal
        raise Interrupted(str(error), stop.number or error.signal_number) from None
    finally:
        signal.set_wakeup_fd(told_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        tell.close()
        watcher.join()
        told.close()


def run_tasks(
    tasks: Sequence[Task],
    engine: Engine,
    *,
    on_event: Callable[[Event], None],
    stop: Stop,
    follow: Callable[[Task], Sequence[Task]] = lambda _: (),
    take: Callable[[Task], bool] = lambda _: True,
    poll_s: float = POLL_S,
) -> dict[Path, int]:
    """Execute `tasks` in order, as many at a time as the engine says; returns the exit code per run directory.

    `follow` is asked after each task that succeeded for those that it makes possible; they come last, because what
    follows a trunk is short. `take` is asked before a task starts whether it is this process's to do; what is not is
    passed over and has no exit code.

    When `stop` is set no further task starts, the signal is passed on and the children are waited for (each saves
    itself and exits); a second signal kills them. Raises Interrupted then.
    """
    waiting = list(tasks)
    running: list[tuple[Task, Child]] = []
    codes: dict[Path, int] = {}
    again: Counter[Path] = Counter()
    unfinished = sum(task.num_runs for task in tasks)
    passed_on = False
    shown = 0.0
    try:
        while running or (waiting and not stop.number):
            starting: list[Task] = []
            while waiting and len(running) + len(starting) < engine.num_jobs and not stop.number:
                task = waiting.pop(0)
                starting += [task] if take(task) else []
            running += zip(starting, engine.start(starting) if starting else (), strict=True)
            for task in starting:
                on_event(Event(kind="started", task=task))
            if stop.number and not passed_on:
                passed_on = True
                for _, child in running:
                    child.send_signal(stop.number)
            if stop.count > 1:
                break
            tell = time.monotonic() - shown >= SHOWN_S
            shown = time.monotonic() if tell else shown
            for task, child in list(running):
                code = child.poll()
                if code is None:
                    if tell:
                        on_event(Event(kind="progress", task=task))
                    continue
                running.remove((task, child))
                on_event(Event(kind="finished", task=task, exit_code=code))
                if code in SAVED and not stop.number and again[task.directory] < engine.retries:
                    again[task.directory] += 1
                    waiting.append(task)
                    continue
                codes[task.directory] = code
                if code == 0:
                    after = follow(task)
                    waiting += after
                    unfinished += sum(one.num_runs for one in after) - task.num_runs
            time.sleep(poll_s if running else 0)
    finally:
        for _, child in running:  # a second signal, or an error of ours: leave no orphan
            child.kill()
            child.wait()
    if stop.number:
        raise Interrupted(f"stopped; {unfinished} run(s) not finished, run again to go on", stop.number)
    return codes


# ------------------------------------------------------------------------------------------------ this machine


def local_engine(
    *, num_jobs: int, arguments: Sequence[str], environment: Mapping[str, str], forker: Nursery | None, why: str = ""
) -> Engine:
    """Child processes on this machine, forked by `forker` where there is one.

    `environment` is that of this process and of `forker`; `why` says where the number of jobs comes from, for people.
    """

    def start(tasks: Sequence[Task]) -> list[Child]:
        return [start_child(command_line(task, arguments), task.log, forker, environment) for task in tasks]

    return Engine(start=start, num_jobs=num_jobs, how=f"{num_jobs} at a time{why}")


def start_child(line: Sequence[str], log: Path, forker: Nursery | None, environment: Mapping[str, str]) -> Child:
    """Start `equipoise` with these arguments, output appended to `log`; forked if possible, else a new interpreter.

    `environment` is that of `forker` as well. The child has a session of its own: a Ctrl-C in the terminal reaches the
    parent only, which passes it on once.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    child = forker.start(line, log) if forker else None
    if child is not None:
        return child
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "equipoise", *line],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )
