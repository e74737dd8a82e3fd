"""A study on disk: arms × seeds × budgets as runs, the plan before, the lock, the status. Never loads torch.

Not for: solving widths (`matching`), training (`train`), starting processes (`engine`), statistics (`results`).

    <study>/lock.json                    what was declared before the first run, and dated amendments
    <study>/<arm>/<tokens>-s<seed>/      one run directory each (see `equipoise.record`)
    <study>/logs/                        what the child processes printed
    <study>/results.json, results.md, report.html
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from equipoise.config import Table, differences, digest, dump, load
from equipoise.data.dataset import Dataset
from equipoise.data.packing import epochs
from equipoise.errors import ConfigError, IntegrityError
from equipoise.files import read_json, write_json
from equipoise.matching import ResolvedArm, resolve_arms
from equipoise.record import RunRecord, read_run
from equipoise.spec.study import RunConfig, StudySpec, num_steps

SCHEMA_VERSION: Final = 1
GROWING: Final = ("seeds", "budgets", "claims", "arms")
"""What may be added to a locked study; nothing of it may change or go."""
FREE: Final = ("question",)
"""Words that no result depends on."""
CHECKPOINTS_HELD: Final = 4
"""Checkpoints of a run that can lie on disk at once: the newest two, the best, and the one being written."""
BYTES_PER_STEP: Final = 240
"""Measured size of one row of metrics.jsonl."""


@dataclass(frozen=True, kw_only=True)
class Lock:
    """What a study directory was declared to be."""

    study: StudySpec
    """The study with all amendments."""
    models: dict[str, Any]
    """Resolved model per arm, dumped."""
    data: str
    """Digest of the data set."""
    dataset: dict[str, Any]
    """What the data set says of itself (title, licence, splits, duplicates)."""
    created: str
    """When, UTC."""
    command: str
    """The command line that declared it; not part of the digest."""
    amendments: tuple[dict[str, Any], ...]
    """What was added later: `date`, `added` (names per kind), `after_first_run`."""

    def post_hoc(self, kind: str) -> list[Any]:
        """Names (or seeds, budgets) of `kind` that were added after the first finished run."""
        return [item for a in self.amendments if a["after_first_run"] for item in a["added"].get(kind, [])]

    def digest(self) -> str:
        """SHA-256 of what is locked."""
        return digest({"study": self.study, "models": self.models, "data": self.data, "amendments": self.amendments})


# ------------------------------------------------------------------------------------------------ runs


def expand(spec: StudySpec, arms: Mapping[str, ResolvedArm], data: str) -> tuple[RunConfig, ...]:
    """Every run of the study, large budgets first (so that no long run is left for last), then seed by seed."""
    return tuple(
        RunConfig(arm=name, seed=seed, budget=budget, model=arms[name].model, recipe=spec.recipe, data=data)
        for budget in sorted(spec.budgets, reverse=True)
        for seed in spec.seeds
        for name in spec.arms
    )


def locked_runs(lock: Lock) -> tuple[RunConfig, ...]:
    """Every run that a lock declares."""
    vocab_size = next(iter(lock.models.values()))["vocab_size"]
    return expand(lock.study, resolve_arms(lock.study.arms, vocab_size, lock.study.recipe.seq_len), lock.data)


def status(directory: Path, lock: Lock) -> list[RunRecord]:
    """The state of every run of the study, in the study's order."""
    return [read_run(directory / run.folder) for run in locked_runs(lock)]


# ------------------------------------------------------------------------------------------------ plan


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """What is known of the data when planning."""

    vocab_size: int
    """Vocabulary the arms are resolved with."""
    train_tokens: int | None
    """Tokens of the train split; None before the corpus was seen."""
    certain: bool
    """False: requested vocabulary or estimated tokens."""


def plan(
    spec: StudySpec, facts: DataFacts, step_s: Mapping[str, float] | None = None, num_jobs: int = 1
) -> dict[str, Any]:
    """The study before it runs, as plain JSON values: arms, budgets, cost. Writes nothing.

    `step_s` are measured seconds of one update per arm; without them there is no time estimate. Raises ConfigError
    when an arm cannot be matched.
    """
    recipe = spec.recipe
    arms = resolve_arms(spec.arms, facts.vocab_size, recipe.seq_len)
    steps = {budget: num_steps(budget, recipe) for budget in spec.budgets}
    budgets = [
        {
            "budget": budget,
            "steps": steps[budget],
            "tokens": steps[budget] * recipe.batch_tokens,
            "epochs": None
            if facts.train_tokens is None
            else epochs(steps[budget] * recipe.batch_tokens, facts.train_tokens, recipe.seq_len),
        }
        for budget in spec.budgets
    ]
    per_arm = [
        sum(steps.values()) * len(spec.seeds) * arm.flops.training * recipe.batch_tokens for arm in arms.values()
    ]
    seconds = None
    if step_s is not None:
        seconds = sum(step_s[name] * sum(steps.values()) * len(spec.seeds) for name in spec.arms) / num_jobs
    return {
        "schema_version": SCHEMA_VERSION,
        "name": spec.name,
        "question": spec.question,
        "vocab_size": facts.vocab_size,
        "train_tokens": facts.train_tokens,
        "data_certain": facts.certain,
        "arms": [arm_table(arm) for arm in arms.values()],
        "seeds": list(spec.seeds),
        "budgets": budgets,
        "num_runs": len(spec.arms) * len(spec.seeds) * len(spec.budgets),
        "train_flops": sum(per_arm),
        "disk_bytes": sum(_run_bytes(arm, sum(steps.values()), len(steps)) * len(spec.seeds) for arm in arms.values()),
        "step_s": dict(step_s) if step_s is not None else None,
        "train_s": seconds,
        "jobs": num_jobs,
        "claims": dump(spec.claims),
        "recipe": dump(recipe),
    }


def _run_bytes(arm: ResolvedArm, steps: int, num_budgets: int) -> int:
    """Weights and two moments in float32 per checkpoint, and the record."""
    return arm.params.total * 12 * CHECKPOINTS_HELD * num_budgets + steps * BYTES_PER_STEP


def arm_table(arm: ResolvedArm) -> dict[str, Any]:
    """One arm as plain JSON values: widths, parameters by component, FLOPs, and the match with its residual."""
    model, ffn = arm.model, arm.model.ffn
    widths: dict[str, int] = {
        "d_model": model.d_model,
        "num_layers": model.num_layers,
        "num_heads": model.num_heads,
        "num_kv_heads": model.num_kv_heads,
    }
    if ffn.kind == "moe":
        widths |= {"num_experts": ffn.num_experts, "top_k": ffn.top_k, "d_expert": ffn.width}
    else:
        widths |= {"d_ff": ffn.width}
    match = None
    if arm.match is not None:
        match = {**dump(arm.match), "quantity": arm.quantity, "reference": arm.reference, "residual": arm.residual}
    totals = ("total", "active", "total_nonembedding", "active_nonembedding")
    return {
        "name": arm.name,
        "kind": ffn.kind,
        "widths": widths,
        "params": {name: getattr(arm.params, name) for name in totals},
        "by_component": dump(arm.params),
        "flops_per_token": arm.flops.training,
        "forward_flops_per_token": arm.flops.forward,
        "match": match,
    }


# ------------------------------------------------------------------------------------------------ lock


def read_lock(directory: Path) -> Lock:
    """The lock of a study directory; IntegrityError when there is none or it is altered."""
    path = directory / "lock.json"
    if not path.exists():
        raise IntegrityError(
            f"{directory}: no lock.json there; expected the folder of a study that was started with `run`"
        )
    stored = read_json(path)
    try:
        lock = Lock(
            study=load(StudySpec, stored["study"]),
            models=stored["models"],
            data=stored["data"],
            dataset=stored["dataset"],
            created=stored["created"],
            command=stored["command"],
            amendments=tuple(stored["amendments"]),
        )
    except (KeyError, TypeError, ConfigError) as error:
        raise IntegrityError(f"{path}: not a study lock ({str(error).splitlines()[0]})") from None
    if stored.get("digest") != lock.digest():
        raise IntegrityError(
            f"{path}: its digest does not match its content; the file was changed after it was written"
        )
    return lock


def lock_study(
    directory: Path, spec: StudySpec, arms: Mapping[str, ResolvedArm], dataset: Dataset, command: str = ""
) -> Lock:
    """Lock the study, or hold it to the lock that is there: additions become a dated amendment, changes are refused.

    As long as no run has begun, everything may still change. Raises ConfigError naming every field that was changed
    or removed.
    """
    fresh = Lock(
        study=spec,
        models={name: dump(arm.model) for name, arm in arms.items()},
        data=dataset.digest,
        dataset=dataset.info,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        amendments=(),
    )
    path = directory / "lock.json"
    if not path.exists():
        return _write_lock(path, fresh)
    old = read_lock(directory)
    records = status(directory, old)
    if all(record.status == "missing" for record in records):
        return _write_lock(path, fresh)
    refused = [line for line in _changes(old, fresh) if line]
    if refused:
        raise ConfigError(
            "\n".join(f"{directory}: locked, {line}" for line in refused)
            + "\nwhat has begun stays as it was declared; add to it, or take another --out"
        )
    added = _added(dump(old.study), dump(spec))
    amendments = old.amendments
    if added:
        finished = any(record.status in ("complete", "diverged") for record in records)
        date = datetime.now(UTC).isoformat(timespec="seconds")
        amendments = (*amendments, {"date": date, "added": added, "after_first_run": finished})
    return _write_lock(
        path,
        Lock(
            study=spec,
            models=fresh.models,
            data=old.data,
            dataset=old.dataset,
            created=old.created,
            command=command if added else old.command,
            amendments=amendments,
        ),
    )


def _write_lock(path: Path, lock: Lock) -> Lock:
    write_json(
        path,
        {
            "schema_version": SCHEMA_VERSION,
            "digest": lock.digest(),
            "created": lock.created,
            "command": lock.command,
            "data": lock.data,
            "amendments": list(lock.amendments),
            "study": lock.study,
            "models": lock.models,
            "dataset": lock.dataset,
        },
    )
    return lock


def _changes(old: Lock, new: Lock) -> list[str]:
    """One line per declared thing that the new study changes or drops."""
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
    lines += _kept_changes("resolved arms", old.models, {k: v for k, v in new.models.items() if k in old.models})
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
