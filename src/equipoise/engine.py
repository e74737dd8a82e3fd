"""Where runs execute: child processes on this machine, a few at a time. Knows runs and exit codes, no training.

A child is `python -m equipoise train <run directory> …`; the run directory holds its whole configuration and is the
only thing that comes back. A failed child never stops the others.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from equipoise.config import dump
from equipoise.errors import EquipoiseError, Interrupted
from equipoise.record import last_row
from equipoise.spec.model import ModelConfig
from equipoise.spec.recipe import Recipe
from equipoise.spec.run import RunConfig


@dataclass(frozen=True, kw_only=True)
class Task:
    """One run to execute."""

    run: RunConfig
    """What to train."""
    directory: Path
    """Its run directory; `config.json` is there already."""
    log: Path
    """Where the child's output goes."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened to a task, for whoever shows progress."""

    kind: Literal["started", "progress", "finished"]
    task: Task
    row: dict[str, Any] | None = None
    """The newest row of its metrics, for `progress`."""
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
    """Count SIGINT, SIGTERM and SIGHUP instead of dying of them; the handler does nothing but set a flag.

    `second` is called with the number of a second signal, for callers that then quit at once.
    """
    stop = Stop()

    def handle(number: int, frame: FrameType | None) -> None:
        stop.count += 1
        stop.number = stop.number or number
        if stop.count > 1:
            second(number)

    names = ("SIGINT", "SIGTERM", "SIGHUP")  # a closed terminal is a reason to save too; Windows has no SIGHUP
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_local(
    tasks: Sequence[Task],
    *,
    num_jobs: int,
    arguments: Sequence[str],
    on_event: Callable[[Event], None],
    stop: Stop,
    poll_s: float = 0.25,
) -> dict[Path, int]:
    """Execute `tasks` in order, at most `num_jobs` at a time; returns the exit code per run directory.

    `arguments` are appended to every child's command line. When `stop` is set no further task starts, the signal is
    passed on and the children are waited for (each saves itself and exits); a second signal kills them. Raises
    Interrupted then.
    """
    waiting = list(tasks)
    running: list[tuple[Task, subprocess.Popen[bytes]]] = []
    codes: dict[Path, int] = {}
    passed_on = False
    try:
        while running or (waiting and not stop.number):
            while waiting and len(running) < num_jobs and not stop.number:
                task = waiting.pop(0)
                running.append((task, _start(task, arguments)))
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
                    on_event(Event(kind="progress", task=task, row=last_row(task.directory / "metrics.jsonl")))
                else:
                    running.remove((task, child))
                    codes[task.directory] = code
                    on_event(Event(kind="finished", task=task, exit_code=code))
            time.sleep(poll_s if running else 0)
    finally:
        for _, child in running:  # a second signal, or an error of ours: leave no orphan
            child.kill()
            child.wait()
    if stop.number:
        unfinished = len(tasks) - sum(code == 0 for code in codes.values())
        raise Interrupted(f"stopped; {unfinished} run(s) not finished, run again to go on", stop.number)
    return codes


def _start(task: Task, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    task.log.parent.mkdir(parents=True, exist_ok=True)
    with task.log.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "equipoise", "train", str(task.directory), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C in the terminal reaches the parent only, which passes it on once
        )


def default_jobs(threads: int) -> int:
    """Runs at a time: one per `threads` cores; one where there is a GPU, which a run has for itself."""
    if shutil.which("nvidia-smi"):
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // threads)


def probe_steps(models: Mapping[str, ModelConfig], recipe: Recipe) -> dict[str, float]:
    """Seconds of one update per model, measured in a child process, one after the other.

    Raises EquipoiseError with what the child said when it fails.
    """
    request = json.dumps({"recipe": dump(recipe), "models": dump(models)})
    command = [sys.executable, "-m", "equipoise", "step-time"]
    child = subprocess.run(command, input=request, capture_output=True, text=True, encoding="utf-8", check=False)
    if child.returncode:
        said = child.stderr.strip().splitlines()[-1:] or [f"exit code {child.returncode}"]
        raise EquipoiseError(f"the probe of one update failed: {said[0].removeprefix('error: ')}")
    return dict(json.loads(child.stdout))
