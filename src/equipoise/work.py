"""What is left of a study to do: runs that can start, and trunks that have to be trained before others can.

A trunk and the runs that branch off it are one unit: nothing is done as long as every run of it is there, with or
without the trunk; a run that is missing needs the trunk's checkpoint; and when a trunk that was trained again came out
different, all runs that branched off the old one are done again.

Not for: executing it (`engine`), training (`train`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from equipoise.engine import Task
from equipoise.errors import IntegrityError
from equipoise.record import RunRecord, read_run, start_run
from equipoise.spec.run import RunConfig
from equipoise.trunk import (
    TrunkConfig,
    branched_at,
    can_branch,
    checkpoint_digest,
    checkpoint_steps,
    read_branch,
    read_trunk,
    rewind,
    start_trunk,
    trunks_of,
)

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a study has left to do."""

    ready: tuple[RunConfig, ...]
    """Runs that can start at once, in the study's order."""
    trunks: dict[TrunkConfig, tuple[RunConfig, ...]]
    """Trunks to train, each with the runs that wait for it."""

    @property
    def runs(self) -> list[RunConfig]:
        """Every run that is not finished."""
        return [*self.ready, *(run for waiting in self.trunks.values() for run in waiting)]


def is_finished(record: RunRecord) -> bool:
    """Whether a run has nothing left to do."""
    return record.status in ("complete", "diverged")


def work_left(directory: Path, records: Sequence[RunRecord], say: Say) -> Work:
    """What is left in a study `directory` whose runs are `records`.

    Deletes what stands in the way, and says so: runs that branched off another trunk than the one there, and
    checkpoints of a trunk beyond one that is needed and lost. Raises IntegrityError when a place holds another trunk.
    """
    locked = {record.locked: record for record in records if record.locked is not None}
    left = {run for run, record in locked.items() if not is_finished(record)}
    waiting: dict[TrunkConfig, tuple[RunConfig, ...]] = {}
    for trunk in trunks_of(locked):
        if not left & set(trunk.runs):
            continue
        left |= set(drop_stale(directory, trunk, say))
        place = directory / trunk.folder
        starting = [run for run in trunk.runs if run in left and not checkpoint_steps(directory / run.folder)]
        if _has_to_be_trained(place, trunk, starting, say):
            waiting[trunk] = tuple(run for run in locked if run in left and run in trunk.runs)
    held = {run for runs in waiting.values() for run in runs}
    return Work(ready=tuple(run for run in locked if run in left - held), trunks=waiting)


def first_tasks(directory: Path, work: Work, tokenizer_json: str) -> list[Task]:
    """What can be executed at once, trunks first, for they are long. Every run of `work` has its directory then."""
    for run in work.runs:
        start_run(directory / run.folder, run, tokenizer_json)
    for trunk in work.trunks:
        start_trunk(directory / trunk.folder, trunk)
    trunks = [task_of(directory, trunk, len(waiting)) for trunk, waiting in work.trunks.items()]
    return [*trunks, *(task_of(directory, run) for run in work.ready)]


def next_tasks(directory: Path, task: Task, tokenizer_json: str, say: Say) -> list[Task]:
    """The runs that a trunk makes possible once it is trained, large budgets first; none after a run."""
    trunk = task.run
    if isinstance(trunk, RunConfig):
        return []
    drop_stale(directory, trunk, say)
    runs = [run for run in reversed(trunk.runs) if not is_finished(read_run(directory / run.folder))]
    for run in runs:
        start_run(directory / run.folder, run, tokenizer_json)
    return [task_of(directory, run) for run in runs]


def task_of(directory: Path, run: RunConfig | TrunkConfig, num_runs: int = 1) -> Task:
    """The task of a run or trunk of the study in `directory`."""
    log = directory / "logs" / f"{run.folder}.log"
    return Task(run=run, directory=directory / run.folder, log=log, num_runs=num_runs)


def drop_stale(directory: Path, trunk: TrunkConfig, say: Say) -> list[RunConfig]:
    """Delete the runs of a trunk that branched, all of them if one branched off another trunk; returns them.

    A run that was trained from its own start is no branch, and stays.
    """
    place = directory / trunk.folder
    branches, stale = [], ""
    for run in trunk.runs:
        try:
            note = read_branch(directory / run.folder)
            if note is None:
                continue
            branches.append(run)
            now = checkpoint_digest(place, note["step"])
        except IntegrityError:  # nothing to compare with, or the note is damaged: its run is then broken and done again
            continue
        if now != note["checkpoint"]:
            stale = f"{run.folder} branched from checkpoint {note['checkpoint'][:12]}…, which now is {now[:12]}…"
    if not stale:
        return []
    say(f"{place}: {stale}; all {len(branches)} branch(es) of {trunk.arm}, seed {trunk.seed} are done again")
    for run in branches:
        shutil.rmtree(directory / run.folder)
    return branches


def _has_to_be_trained(place: Path, trunk: TrunkConfig, starting: Sequence[RunConfig], say: Say) -> bool:
    """Whether a run that is about to start needs a checkpoint that the trunk has not, but would have.

    A budget added below one the trunk has passed is not served by it: that run is trained from what there is, which
    takes no more updates than training the trunk again.
    """
    try:
        before = read_trunk(place)
    except IntegrityError:
        before = None
    reached = max(checkpoint_steps(place), default=0)
    budgets = before.budgets if before else trunk.budgets
    lacking = [
        branched_at(run)
        for run in starting
        if (run.budget in budgets or branched_at(run) > reached) and not can_branch(place, run)
    ]
    lost = [step for step in lacking if step <= reached]
    if lost:
        say(f"{place}: its checkpoint of step {min(lost)} is gone or damaged; trained again up to there")
        rewind(place, min(lost))
    return bool(lacking)
