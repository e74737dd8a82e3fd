"""A study executed: what is left of it is handed to an engine, round after round, until nothing is left.

Not for: what is left (`work`), who does it (`shares`), how a run is carried out (`engine`), results (`results`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from equipoise.data.dataset import Dataset
from equipoise.engine import Engine, Event, Stop, Task, run_tasks
from equipoise.engines.commands import Unit, unit
from equipoise.errors import LockedError
from equipoise.estimate import longest_first
from equipoise.files import held
from equipoise.lock import Lock, locked_runs, status
from equipoise.record import RunRecord
from equipoise.shares import Shares, shares_of
from equipoise.spec.run import RunConfig
from equipoise.study import check_disk
from equipoise.trunk import TrunkConfig
from equipoise.work import Work, first_tasks, is_finished, next_tasks, task_of, work_left


class Shown(Protocol):
    """Who shows progress; `done` counts the runs that are finished."""

    done: int

    def say(self, text: str) -> None:
        """One line for people."""

    def show(self, event: Event) -> None:
        """Take an event of the engine."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A study that is prepared and locked, and who is to be told of it."""

    directory: Path
    lock: Lock
    dataset: Dataset
    wait: Callable[[str], None]
    """Called with the name of a process that holds what is wanted, again and again; raises when it is to stop."""
    say: Callable[[str], None]
    """One line for people."""


def execute(
    study: Prepared,
    open_engine: Callable[[Sequence[RunConfig]], AbstractContextManager[Engine]],
    shown: Callable[[int, int, Sequence[str]], AbstractContextManager[Shown]],
    stop: Stop,
) -> dict[Path, int]:
    """Train what is left of the study, as far as no other process is at it, until nothing is; exit codes of runs.

    What others are at is waited for: should one of them die, its runs are taken over. `open_engine` is given the runs
    that are left; `shown` the number of runs, how many are done, and the folders to come.
    """
    directory, tokenizer = study.directory, study.dataset.tokenizer().to_json()
    shares = shares_of(directory, study.lock)
    codes: dict[Path, int] = {}
    first = True
    while True:
        left = _plan(study, shares, tokenizer, first)
        tasks = [
            task for task in left.tasks if codes.get(task.directory, LockedError.exit_code) == LockedError.exit_code
        ]
        tasks = [tasks[index] for index in longest_first([task.run for task in tasks])]
        if not tasks:
            if first:
                study.say(f"{left.headline}; nothing {'free' if left.others else 'to train'}")
            if not left.others:
                return codes
            first = False
            study.wait(", ".join(shares.holders(left.others)) or "another process")
            continue
        first = False
        places = [trunk.folder for trunk in left.work.trunks] + [run.folder for run in locked_runs(study.lock)]
        try:
            with open_engine(left.work.runs) as engine:
                study.say(f"{left.headline}, {engine.how}")
                with shown(left.total, left.done, places) as progress:
                    codes |= run_tasks(
                        tasks,
                        engine,
                        on_event=progress.show,
                        stop=stop,
                        follow=partial(_follow, directory, tokenizer, progress),
                        take=shares.take,
                    )
        finally:
            shares.give_back()


def units_left(study: Prepared, arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[str, list[Unit]]:
    """What is left of the study that no other process is at, as units for a shell, and a line about it for people.

    Every run has its directory then, and nothing is trained.
    """
    tokenizer = study.dataset.tokenizer().to_json()
    left = _plan(study, shares_of(study.directory, study.lock), tokenizer, first=True)
    tasks = [left.tasks[index] for index in longest_first([task.run for task in left.tasks])]
    units = []
    for task in tasks:
        waiting = left.work.trunks[task.run] if isinstance(task.run, TrunkConfig) else ()
        after = [task_of(study.directory, run) for run in sorted(waiting, key=lambda run: -run.budget)]
        units.append(unit(task, after, arguments, environment))
    return left.headline, units


@dataclass(frozen=True, kw_only=True)
class _Left:
    """What is to be done now."""

    work: Work
    tasks: Sequence[Task]
    others: Sequence[RunRecord]
    """Runs that other processes are at."""
    total: int
    done: int
    headline: str


def _plan(study: Prepared, shares: Shares, tokenizer: str, first: bool) -> _Left:
    """Look at the study, the first time at every byte; every run of what is left has its directory then."""
    with held(study.directory / ".plan.lock", str(study.directory), study.wait), shares.planning() as free:
        records = status(study.directory, study.lock, deep=first)
        by_whom = [(record, record.locked is not None and record.locked.folder in free) for record in records]
        work = work_left(study.directory, [record for record, is_free in by_whom if is_free], study.say)
        if first:
            check_disk(study.directory, work.runs, list(work.trunks))
        tasks = first_tasks(study.directory, work, tokenizer)
    others = [record for record, is_free in by_whom if not is_free and not is_finished(record)]
    done = len(records) - len(work.runs) - len(others)
    headline = f"{study.directory}: {len(records)} runs, {done} done"
    headline += f", {len(others)} with others" if others else ""
    headline += f", {len(work.trunks)} trunk(s) first" if work.trunks else ""
    return _Left(work=work, tasks=tasks, others=others, total=len(records), done=done, headline=headline)


def _follow(directory: Path, tokenizer: str, shown: Shown, task: Task) -> list[Task]:
    after = next_tasks(directory, task, tokenizer, shown.say)
    shown.done -= len(after) - task.num_runs if after else 0  # finished ones that are done again
    return after
