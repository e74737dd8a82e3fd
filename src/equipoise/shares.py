"""Several processes at one study: each takes the units of work that nobody holds, and gives them back when it ends.

A unit is a run, or a trunk with the runs that branch off it. It is held by a lock file beside it, which is free again
when its holder dies; the child that trains holds the lock of its own directory as well, and may outlive its parent.

Not for: what is left to do (`work`), executing it (`engine`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock

from equipoise.engine import Task
from equipoise.files import give_back, holder, take
from equipoise.lock import Lock, locked_runs
from equipoise.record import RunRecord
from equipoise.trunk import trunks_of


def run_lock(directory: Path) -> Path:
    """Lock file of whoever trains the run or trunk in `directory`."""
    return directory.parent / f".{directory.name}.lock"


@dataclass(kw_only=True)
class Shares:
    """What this process holds of the study in `directory`."""

    directory: Path
    units: dict[str, str]
    """Folder of a run or trunk → folder of the unit it belongs to."""
    held: dict[str, FileLock] = field(default_factory=dict)
    """Units taken, with their locks."""

    def take(self, task: Task) -> bool:
        """Whether `task` is this process's to do, now or already; False when another process is at it."""
        return self._take(self.units[task.run.folder]) and not self._is_trained(task.run.folder)

    @contextmanager
    def planning(self) -> Iterator[set[str]]:
        """Hold every unit that nobody else holds for the time of a `with` block, which gets the folders of its runs.

        What stands in the way of a unit may be deleted meanwhile, for no one is at it.
        """
        before = set(self.held)
        free = {unit for unit in dict.fromkeys(self.units.values()) if self._take(unit)}
        idle = {folder for folder, unit in self.units.items() if unit in free}
        busy = {self.units[folder] for folder in idle if self._is_trained(folder)}
        try:
            yield {folder for folder in idle if self.units[folder] not in busy}
        finally:
            for unit in free - before:
                give_back(self.held.pop(unit))

    def holders(self, records: Iterable[RunRecord]) -> list[str]:
        """Who holds the units of these runs, each once."""
        folders = [record.locked.folder for record in records if record.locked]
        units = dict.fromkeys(self.units[folder] for folder in folders if self.units[folder] not in self.held)
        return list(dict.fromkeys(holder(self._lock(unit)) for unit in units))

    def give_back(self) -> None:
        """Let go of everything."""
        for lock in self.held.values():
            give_back(lock)
        self.held.clear()

    def _take(self, unit: str) -> bool:
        if unit not in self.held:
            lock = take(self._lock(unit))
            if lock is None:
                return False
            self.held[unit] = lock
        return True

    def _is_trained(self, folder: str) -> bool:
        """Whether a process is training there, one that this one did not start."""
        lock = take(run_lock(self.directory / folder))
        if lock is None:
            return True
        give_back(lock)
        return False

    def _lock(self, unit: str) -> Path:
        place = self.directory / unit
        return place.parent / f".{place.name}.unit.lock"


def shares_of(directory: Path, lock: Lock) -> Shares:
    """The units of a study, none of them taken."""
    runs = locked_runs(lock)
    units = {run.folder: run.folder for run in runs}
    for trunk in trunks_of(runs):
        units |= {trunk.folder: trunk.folder, **{run.folder: trunk.folder for run in trunk.runs}}
    return Shares(directory=directory, units=units)
