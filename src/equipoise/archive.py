"""A study's records in another folder, without weights: small enough to commit, whole enough to report and to go on.

Copied are the lock, the step times, and of every finished run all that its summary records, but no checkpoint. Trunks,
logs and unfinished runs stay behind; what is made of the records is made anew. Absolute paths, which say more of a
workplace than of a study, are cut to their last part.

Not for: results and report (`results`, `report`), nor for moving a study with its weights, which is copying a folder.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from equipoise.errors import ConfigError, IntegrityError
from equipoise.faults import show
from equipoise.files import file_sha256, regular_bytes, write_bytes
from equipoise.lock import Lock, changes, read_lock, status, with_first_finished, write_lock
from equipoise.record import WEIGHTS, RunRecord, read_run
from equipoise.step_time import NAME as STEP_TIME
from equipoise.work import is_finished

_ABSOLUTE: Final = re.compile(r"(?<![\w.~/\\-])(?:[A-Za-z]:[\\/]|/)(?:[^\s\"'/\\:]+[\\/])*(?=[^\s\"'/\\])")
"""All of an absolute path but its last part; not what follows a name, a dot or a tilde, nor the `//` of an address."""


@dataclass(frozen=True, kw_only=True)
class Archived:
    """What `archive` did, by folder of the runs, in the study's order."""

    copied: tuple[str, ...]
    """Runs that were not there before."""
    kept: tuple[str, ...]
    """Runs that were there already; their files were not touched."""
    left: tuple[str, ...]
    """Runs that are not finished in either folder, or are broken."""


def archive(directory: Path, destination: Path) -> Archived:
    """Copy the records of a study `directory` to `destination`, which may hold an earlier copy; nothing is deleted.

    `directory` is only read. Files that are equal already are left alone, a run's summary is written last, and the lock
    before any run. Raises as `check_place` does, and IntegrityError when the destination holds anything that a copy of
    this very study would not: another study, additions of its own, another outcome of a run.
    """
    check_place(directory, destination)
    lock = read_lock(directory)
    records = status(directory, lock)
    lock = without_places(with_first_finished(lock, records))
    _check_same_study(destination, lock)
    before = [read_run(destination / record.directory.relative_to(directory)) for record in records]
    for record, there in zip(records, before, strict=True):
        _check_same_run(record, there)
    if not (destination / "lock.json").exists() or read_lock(destination) != lock:
        write_lock(destination, lock)
    for record, there in zip(records, before, strict=True):
        if is_finished(record) and not is_finished(there):
            _copy_run(record, there.directory)
    if (directory / STEP_TIME).exists():
        _copy(directory / STEP_TIME, destination / STEP_TIME)
    folders = [record.directory.relative_to(directory).as_posix() for record in records]
    found = list(zip(folders, map(is_finished, records), map(is_finished, before), strict=True))
    return Archived(
        copied=tuple(folder for folder, here, there in found if here and not there),
        kept=tuple(folder for folder, _, there in found if there),
        left=tuple(folder for folder, here, there in found if not here and not there),
    )


def check_place(directory: Path, destination: Path) -> None:
    """ConfigError for a destination in the study `directory`, IntegrityError where files lie that are no study."""
    study, place = directory.resolve(), destination.resolve()
    if place.is_relative_to(study):
        what = "the study itself" if place == study else "within the study itself"
        raise ConfigError(f"{destination}: {what}; expected another folder, e.g. results/{study.name}")
    if (destination / "lock.json").exists() or not destination.is_dir():
        return
    if any(not path.name.startswith(".") for path in destination.iterdir()):
        raise IntegrityError(f"{destination}: holds files but no study; expected a new folder, or a copy of this one")


def without_places(lock: Lock) -> Lock:
    """`lock` with every absolute path, of the corpus and in the command, cut to its last part.

    The content of a corpus is locked by its digest; where it lay is not (see `lock.changes`).
    """
    corpus = lock.study.corpus
    if corpus.kind != "grammar" and corpus.path is not None:
        study = dataclasses.replace(lock.study, corpus=dataclasses.replace(corpus, path=relative(corpus.path)))
        lock = dataclasses.replace(lock, study=study)
    try:
        words = shlex.split(lock.command)
    except ValueError:  # no command line: a lock made by a program may say anything
        return dataclasses.replace(lock, command=relative(lock.command))
    return dataclasses.replace(lock, command=shlex.join(map(relative, words)))


def relative(text: str) -> str:
    """`text` with every absolute path in it cut to its last part.

    >>> relative('corpus.path="/home/ada/my-texts"'), relative("../texts"), relative("/data")
    ('corpus.path="my-texts"', '../texts', 'data')
    """
    return _ABSOLUTE.sub("", text)


def _check_same_study(destination: Path, lock: Lock) -> None:
    """IntegrityError where `destination` holds a study that is no earlier state of the locked one."""
    if not (destination / "lock.json").exists():
        return
    held = read_lock(destination)
    if held.created != lock.created:
        raise IntegrityError(
            f"{destination}: holds another study, {held.study.name} locked {held.created}; expected a copy of "
            f"{lock.study.name} locked {lock.created}, or a new folder"
        )
    differing = changes(held, lock)
    if held.amendments != lock.amendments[: len(held.amendments)]:
        differing.append("amendments: it was added to there")
    if differing:
        raise IntegrityError(f"{destination}: not an earlier state of this study ({'; '.join(differing)})")


def _check_same_run(record: RunRecord, there: RunRecord) -> None:
    if there.status == "broken":
        raise IntegrityError(f"{there.directory}: broken ({there.fault}); delete it, and it is copied anew")
    if is_finished(record) and is_finished(there) and record.summary != there.summary:
        raise IntegrityError(
            f"{there.directory}: holds another outcome of this run than {record.directory}; "
            "delete the one that is not to stay"
        )


def _copy_run(record: RunRecord, place: Path) -> None:
    assert record.summary is not None  # what a finished run has
    for name in record.summary["files"]:
        if not name.startswith(f"{WEIGHTS}/"):
            if Path(name).name != name:  # of a record we wrote nothing else lies in a folder
                raise IntegrityError(f"{record.directory}/summary.json: files: {show(name)}; expected names of files")
            _copy(record.directory / name, place / name)
    _copy(record.directory / "summary.json", place / "summary.json")


def _copy(source: Path, target: Path) -> None:
    """Copy one file atomically, unless the target is the same already."""
    if not target.is_file() or file_sha256(source) != file_sha256(target):
        write_bytes(target, regular_bytes(source))
