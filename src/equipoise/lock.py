"""What a study was declared to be before its first run, and dated amendments; its runs and their state. No torch.

`<study>/lock.json` is written before anything is trained. Nothing of a run that has begun may change; additions after
the first finished run are *post hoc* wherever they are shown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from equipoise.budgets import arm_budgets
from equipoise.config import Table, differences, digest, dump, load
from equipoise.data.dataset import Dataset, Described
from equipoise.errors import ConfigError, IntegrityError
from equipoise.files import read_json, write_json
from equipoise.record import RunRecord, has_begun, other_version, read_run
from equipoise.shapes import LockFile, hold
from equipoise.spec.model import ModelConfig, open_fields
from equipoise.spec.run import RunConfig
from equipoise.spec.study import StudySpec
from equipoise.spec.sweep import family

SCHEMA_VERSION: Final = 1
GROWING: Final = ("seeds", "budgets", "claims", "arms")
"""What may be added to a locked study; nothing of it may change or go."""
FREE: Final = ("question", "published")
"""What no result depends on."""

LOCKED: Final = ("study", "models", "data", "first_finished", "amendments")
"""What the digest of a lock is over."""


@dataclass(frozen=True, kw_only=True)
class Lock:
    """What a study directory was declared to be."""

    study: StudySpec
    """The study with all amendments."""
    models: dict[str, ModelConfig]
    """Resolved model per arm: no open width, the tokenizer's real vocabulary."""
    data: str
    """Digest of the data set."""
    dataset: dict[str, Any]
    """What the data set says of itself (title, licence, splits, duplicates); locked through `data`."""
    created: str
    """When, UTC."""
    command: str
    """The command line that declared it; not part of the digest."""
    first_finished: str | None
    """When the first run was known to be finished, UTC; from then on additions are post hoc, whatever is deleted."""
    amendments: tuple[dict[str, Any], ...]
    """What was added later: `date`, `added` (names per kind), `after_first_run`."""

    def post_hoc(self, kind: str) -> list[Any]:
        """Names (or seeds, budgets) of `kind` that were added after the first finished run."""
        return [item for a in self.amendments if a["after_first_run"] for item in a["added"].get(kind, [])]

    def digest(self) -> str:
        """SHA-256 of what is locked."""
        return digest({name: getattr(self, name) for name in LOCKED})


# ------------------------------------------------------------------------------------------------ runs


def expand(spec: StudySpec, models: Mapping[str, ModelConfig], data: str) -> tuple[RunConfig, ...]:
    """Every run of the study, large budgets first (so that no long run is left for last), then seed by seed.

    An arm with a budget of its own trains on that; a member of a sweep is scored on the selection split too.
    """
    own = arm_budgets(spec, models)
    return tuple(
        RunConfig(
            arm=name,
            seed=seed,
            budget=own[name, budget].asked,
            model=models[name],
            recipe=spec.recipe_of(name),
            data=data,
            select=family(name) is not None,
        )
        for budget in sorted(spec.budgets, reverse=True)
        for seed in spec.seeds
        for name in spec.arms
    )


def study_budget(lock: Lock) -> dict[tuple[str, int], int]:
    """(arm, budget of a run of it) → the budget of the study at which that run is compared."""
    return {(one.arm, one.asked): one.budget for one in arm_budgets(lock.study, lock.models).values()}


def locked_runs(lock: Lock) -> tuple[RunConfig, ...]:
    """Every run that a lock declares."""
    return expand(lock.study, lock.models, lock.data)


def status(directory: Path, lock: Lock, *, deep: bool = False) -> list[RunRecord]:
    """The state of every run of the study, in the study's order; `deep` also reads weight files through.

    A directory that holds another run than the locked one is broken, and its fault names the fields that differ.
    """
    return [held_to(run, read_run(directory / run.folder, deep=deep)) for run in locked_runs(lock)]


def held_to(run: RunConfig, record: RunRecord) -> RunRecord:
    """`record` as that of the locked `run`: broken, naming the fields, when it is another run's."""
    if record.config is None or record.config == run:
        return dataclasses.replace(record, locked=run)
    fault = f"holds another run ({'; '.join(differences(dump(run), dump(record.config)))})"
    return dataclasses.replace(record, locked=run, status="broken", summary=None, fault=fault)


# ------------------------------------------------------------------------------------------------ lock


def read_lock(directory: Path) -> Lock:
    """The lock of a study directory; IntegrityError when there is none or it is altered."""
    path = directory / "lock.json"
    if not directory.is_dir():
        raise ConfigError(f"{directory}: no such folder; expected the folder of a study, e.g. runs/quick")
    if not path.exists():
        raise IntegrityError(
            f"{directory}: no lock.json there; expected the folder of a study that was started with `run`"
        )
    stored = read_json(path)
    if stored.get("schema_version") != SCHEMA_VERSION:
        raise IntegrityError(f"{path}: schema_version {stored.get('schema_version')!r}; expected {SCHEMA_VERSION}")
    hold(f"{path}: not a study lock", stored, LockFile)
    hold(f"{path}: dataset", stored["dataset"], Described)
    try:
        lock = Lock(
            study=load(StudySpec, stored["study"]),
            models={name: load(ModelConfig, model) for name, model in stored["models"].items()},
            data=stored["data"],
            dataset=stored["dataset"],
            created=stored["created"],
            command=stored["command"],
            first_finished=stored["first_finished"],
            amendments=tuple(stored["amendments"]),
        )
    except ConfigError as error:
        why = other_version({name: stored[name] for name in LOCKED}, stored["digest"])
        raise IntegrityError(f"{path}: {why or 'not a study lock'} ({str(error).splitlines()[0]})") from None
    if list(lock.models) != list(lock.study.arms) or any(open_fields(model) for model in lock.models.values()):
        raise IntegrityError(f"{path}: not a study lock (its models are not those of the study's arms)")
    # Of what is stored, not of what it became: a field that came later, at its default, makes no lock a stranger.
    if stored["digest"] != digest({name: stored[name] for name in LOCKED}):
        raise IntegrityError(
            f"{path}: its digest does not match its content; the file was changed after it was written"
        )
    return lock


def lock_study(
    directory: Path, spec: StudySpec, models: Mapping[str, ModelConfig], dataset: Dataset, command: str = ""
) -> Lock:
    """Lock the study, or hold it to the lock that is there: additions become a dated amendment, changes are refused.

    As long as no run has done an update and none was ever finished, everything may still change. Text that has moved
    changes nothing. Raises ConfigError naming every field that was changed or removed.
    """
    fresh = Lock(
        study=spec,
        models=dict(models),
        data=dataset.digest,
        dataset=dataset.info,
        created=_now(),
        command=command,
        first_finished=None,
        amendments=(),
    )
    if not (directory / "lock.json").exists():
        runs = {path.parent for name in ("config.json", "summary.json") for path in directory.glob(f"*/*-s*/{name}")}
        if runs:
            raise IntegrityError(
                f"{directory}: holds {len(runs)} run(s) but no lock.json: what was claimed before them is not known; "
                "put the lock back, or take another --out"
            )
        return write_lock(directory, fresh)
    old = note_finished(directory)
    if old.first_finished is None and not any(map(has_begun, directory.glob("*/*-s*/"))):
        return write_lock(directory, fresh)
    refused = changes(old, fresh)
    if refused:
        raise ConfigError(
            "\n".join(f"{directory}: locked, {line}" for line in refused)
            + "\nwhat has begun stays as it was declared; add to it, or take another name or --out"
        )
    added = _added(dump(old.study), dump(spec))
    study = dataclasses.replace(spec, corpus=old.study.corpus)  # equal but for where the text lies, here and today
    kept = dataclasses.replace(old, study=study, models=fresh.models)
    if added:
        amendment = {"date": _now(), "added": added, "after_first_run": old.first_finished is not None}
        kept = dataclasses.replace(kept, command=command, amendments=(*old.amendments, amendment))
    return write_lock(directory, kept)


def note_finished(directory: Path) -> Lock:
    """Write into the lock, once, that a run is finished (complete or diverged); returns the lock."""
    lock = read_lock(directory)
    noted = with_first_finished(lock, status(directory, lock))
    return lock if noted == lock else write_lock(directory, noted)


def with_first_finished(lock: Lock, records: Sequence[RunRecord]) -> Lock:
    """`lock`, saying when the first of the runs with these `records` was finished, if it does not say so yet."""
    finished = [record.directory for record in records if record.status in ("complete", "diverged")]
    if lock.first_finished is not None or not finished:
        return lock
    first = min((path / "summary.json").stat().st_mtime for path in finished)
    when = datetime.fromtimestamp(first, UTC).isoformat(timespec="seconds")
    return dataclasses.replace(lock, first_finished=when)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def write_lock(directory: Path, lock: Lock) -> Lock:
    """Write `lock` into a study directory, with its digest; returns it."""
    names = ("created", "command", "data", "first_finished", "amendments", "study", "models", "dataset")
    stored = {name: getattr(lock, name) for name in names}
    write_json(directory / "lock.json", {"schema_version": SCHEMA_VERSION, "digest": lock.digest(), **stored})
    return lock


def changes(old: Lock, new: Lock) -> list[str]:
    """One line per declared thing that the study of `new` changes or drops; where its corpus lies is none of them."""
    before, after = dump(old.study), dump(new.study)
    lines = [] if old.data == new.data else [f"the data changed: digest {old.data[:12]}… → {new.data[:12]}…"]
    for key in before:
        if key in FREE or key in GROWING:
            continue
        old_value, new_value = before[key], after[key]
        if key == "corpus":  # the content is locked by its digest; where it lies is not
            old_value, new_value = ({k: v for k, v in value.items() if k != "path"} for value in (old_value, new_value))
        lines += differences(old_value, new_value, key)
    for key in ("seeds", "budgets"):
        lines += [f"{key}: {item} was removed" for item in before[key] if item not in after[key]]
    lines += _kept_changes("claims", _by_id(before["claims"]), _by_id(after["claims"]))
    lines += _kept_changes("arms", before["arms"], after["arms"])
    lines += _kept_changes("resolved arms", dump(old.models), dump(new.models))
    return lines


def _kept_changes(kind: str, before: Table, after: Table) -> list[str]:
    lines: list[str] = []
    for name, value in before.items():
        lines += differences(value, after[name], f"{kind}.{name}") if name in after else [f"{kind}.{name}: was removed"]
    return lines


def _added(before: Table, after: Table) -> dict[str, list[Any]]:
    added: dict[str, Sequence[Any]] = {
        "seeds": [seed for seed in after["seeds"] if seed not in before["seeds"]],
        "budgets": [budget for budget in after["budgets"] if budget not in before["budgets"]],
        "claims": [name for name in _by_id(after["claims"]) if name not in _by_id(before["claims"])],
        "arms": [name for name in after["arms"] if name not in before["arms"]],
    }
    return {kind: list(names) for kind, names in added.items() if names}


def _by_id(claims: Sequence[Table]) -> Table:
    return {claim["id"]: claim for claim in claims}
