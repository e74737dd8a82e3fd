"""Where runs execute: child processes on this machine, a few at a time. Knows runs and exit codes, no training.

A child is `equipoise train <run directory> …`, forked where that can be done, else a new interpreter; the run directory
holds its whole configuration and is the only thing that comes back. A failed child never stops the others.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from equipoise.errors import Interrupted
from equipoise.forks import Child, Nursery, nursery
from equipoise.spec.run import RunConfig
from equipoise.trunk import TrunkConfig


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


def run_local(
    tasks: Sequence[Task],
    *,
    num_jobs: int,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    on_event: Callable[[Event], None],
    stop: Stop,
    follow: Callable[[Task], Sequence[Task]] = lambda _: (),
    take: Callable[[Task], bool] = lambda _: True,
    poll_s: float = 0.25,
) -> dict[Path, int]:
    """Execute `tasks` in order, at most `num_jobs` at a time; returns the exit code per run directory.

    `follow` is asked after each task that succeeded for those that it makes possible; they come last, because what
    follows a trunk is short. `take` is asked before a task starts whether it is this process's to do; what is not is
    passed over and has no exit code.

    `arguments` are appended to every child's command line; `environment` is that of this process. When `stop` is set no
    further task starts, the signal is passed on and the children are waited for (each saves itself and exits); a second
    signal kills them. Raises Interrupted then.
    """
    waiting = list(tasks)
    running: list[tuple[Task, Child]] = []
    codes: dict[Path, int] = {}
    unfinished = sum(task.num_runs for task in tasks)
    passed_on = False
    with nursery(environment) if sum(task.num_runs for task in tasks) > 1 else nullcontext() as forker:
        try:
            while running or (waiting and not stop.number):
                while waiting and len(running) < num_jobs and not stop.number:
                    task = waiting.pop(0)
                    if not take(task):
                        continue
                    running.append((task, _start(task, arguments, forker)))
                    on_event(Event(kind="started", task=task))
                if stop.number and not passed_on:
                    passed_on = True
                    for _, child in running:
                        child.send_signal(stop.number)
                if stop.count > 1:
                    break
                for task, child in list(running):
                    code = child.poll()
                    if code is None:
                        on_event(Event(kind="progress", task=task))
                    else:
                        running.remove((task, child))
                        codes[task.directory] = code
                        on_event(Event(kind="finished", task=task, exit_code=code))
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


def _start(task: Task, arguments: Sequence[str], forker: Nursery | None) -> Child:
    """A child of its own session: a Ctrl-C in the terminal reaches the parent only, which passes it on once."""
    task.log.parent.mkdir(parents=True, exist_ok=True)
    line = ["train", str(task.directory), *arguments]
    child = forker.start(line, task.log) if forker else None
    if child is not None:
        return child
    with task.log.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "equipoise", *line],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
