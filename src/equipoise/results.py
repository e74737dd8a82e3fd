"""A study directory → one plain table of everything it found, written as `results.json`. No torch, no drawing.

What the terminal, the figures and the report show is in this one value; none of them reads a run directory. No mean
drops a seed silently: every row says how many values it has, how many it should have, and which seeds are missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from equipoise import __version__
from equipoise.config import dump
from equipoise.errors import IntegrityError
from equipoise.files import read_json, write_json
from equipoise.matching import resolve_arms
from equipoise.record import RunRecord
from equipoise.spec.study import StudySpec, left_arms, num_steps
from equipoise.stats import mean_sd, paired_contrast
from equipoise.study import Lock, arm_table, read_lock, status
from equipoise.verdict import Cell, Lost, judge, table

SCHEMA_VERSION: Final = 1
METRICS: Final = ("val_loss", "best_val_loss", "val_bpb")
CONFIDENCE: Final = 0.95
CURVE_POINTS: Final = 200
"""Points a curve keeps at most: beyond that they cannot be told apart in a figure."""

SCOPE: Final = (
    "Models of this size on this corpus; nothing here says what happens at other scales or on other text.",
    "The study measures validation loss. It tests no mechanism: why one arm is ahead is not answered.",
    "Equal parameters, tokens or FLOPs are not equal seconds: no wall-clock claim is made. Run times depend on the "
    "machine and are shown as measured.",
    "Intervals are 95 % t intervals of the paired difference over seeds, not adjusted for other comparisons. Verdicts "
    "use one-sided t tests with Holm's adjustment over the claims declared before the first run.",
    "A recipe that suits one arm better than another is part of what is compared: all arms share one recipe.",
)


def collect(directory: Path) -> dict[str, Any]:
    """Everything the study in `directory` found so far, as plain JSON values (see docs/design.md for the schema).

    Runs that are missing or unfinished are listed as such. Raises IntegrityError when the lock is missing or altered.
    """
    lock = read_lock(directory)
    spec = lock.study
    records = status(directory, lock)
    arms = resolve_arms(spec.arms, next(iter(lock.models.values()))["vocab_size"], spec.recipe.seq_len)
    cells = {(arm, budget): _cell(records, spec, arm, budget) for arm in spec.arms for budget in spec.budgets}
    tokens = {budget: num_steps(budget, spec.recipe) * spec.recipe.batch_tokens for budget in spec.budgets}
    epochs = {budget: _first(records, budget, "epochs") for budget in spec.budgets}
    first = next((record.summary for record in records if record.summary and record.status == "complete"), None)
    shapes = _shapes(records)
    return {
        "schema_version": SCHEMA_VERSION,
        "name": spec.name,
        "question": spec.question,
        "alpha": spec.alpha,
        "split": spec.recipe.eval_split,
        "vocab_size": next(iter(lock.models.values()))["vocab_size"],
        "arms": [
            {**arm_table(arm), "shared_init": _shared(shapes, name, arm.match.to if arm.match else None)}
            for name, arm in arms.items()
        ],
        "seeds": list(spec.seeds),
        "budgets": list(spec.budgets),
        "tokens_per_budget": {str(budget): count for budget, count in tokens.items()},
        "epochs": {str(budget): value for budget, value in epochs.items()},
        "data": {**lock.dataset, "digest": lock.data},
        "floor": first["floor"] if first else None,
        "runs": [_run_row(record) for record in records],
        "table": _table(cells, spec),
        "gaps": _gaps(cells, spec),
        "claims": _claims(cells, lock, epochs),
        "curves": [_curve(record) for record in records if record.status in ("complete", "diverged", "interrupted")],
        "routing": [_routing(record) for record in records if record.summary and record.summary["routing"]],
        "samples": [
            {**_place(record), **row} for record in records if record.status == "complete" for row in record.samples()
        ],
        "scope": list(SCOPE),
        "provenance": _provenance(directory, lock, records),
    }


def write_results(directory: Path, results: Mapping[str, Any]) -> Path:
    """Write `results.json` atomically; returns its path."""
    path = directory / "results.json"
    write_json(path, results)
    return path


# ------------------------------------------------------------------------------------------------ runs


def _place(record: RunRecord) -> dict[str, Any]:
    if record.config is not None:
        return {"arm": record.config.arm, "seed": record.config.seed, "budget": record.config.budget}
    budget, _, seed = record.directory.name.rpartition("-s")
    return {"arm": record.directory.parent.name, "seed": int(seed), "budget": int(budget)}


def _run_row(record: RunRecord) -> dict[str, Any]:
    names = (
        *METRICS, "best_step", "collapsed", "num_spikes", "steps", "tokens", "train_s", "tokens_per_s",
        "peak_memory_bytes", "train_flops", "message",
    )  # fmt: skip
    summary = record.summary or {}
    fault = {"message": record.fault} if record.fault else {}
    return {**_place(record), "status": record.status, **{name: summary.get(name) for name in names}, **fault}


def _cell(records: Iterable[RunRecord], spec: StudySpec, arm: str, budget: int) -> Cell:
    values: dict[str, dict[int, float]] = {metric: {} for metric in METRICS}
    lost: dict[int, Lost] = {}
    collapsed = []
    for record in records:
        place = _place(record)
        if (place["arm"], place["budget"]) != (arm, budget):
            continue
        if record.status != "complete":
            lost[place["seed"]] = record.status
            continue
        assert record.summary is not None
        for metric in METRICS:
            values[metric][place["seed"]] = record.summary[metric]
        if record.summary["collapsed"]:
            collapsed.append(place["seed"])
    return Cell(values=values, lost=lost, collapsed=collapsed)


def _first(records: Iterable[RunRecord], budget: int, name: str) -> float | None:
    found = (r.summary for r in records if r.summary and r.config and r.config.budget == budget)
    return next((summary[name] for summary in found), None)


# ------------------------------------------------------------------------------------------------ tables


def _table(cells: Mapping[tuple[str, int], Cell], spec: StudySpec) -> list[dict[str, Any]]:
    rows = []
    for budget in spec.budgets:
        for arm in spec.arms:
            cell = cells[arm, budget]
            for metric in METRICS:
                mean, sd, n = mean_sd(cell.values[metric].values())
                rows.append(
                    {
                        "arm": arm,
                        "budget": budget,
                        "metric": metric,
                        "n": n,
                        "expected_n": len(spec.seeds),
                        "mean": mean,
                        "sd": sd,
                        "values": {str(seed): value for seed, value in sorted(cell.values[metric].items())},
                        "lost": sorted(seed for seed, why in cell.lost.items() if why != "diverged"),
                        "diverged": sorted(seed for seed, why in cell.lost.items() if why == "diverged"),
                        "collapsed": sorted(cell.collapsed),
                    }
                )
    return rows


def contrast_pairs(spec: StudySpec) -> list[tuple[str, str]]:
    """The pairs a study is about, left − right: each reference arm and what is matched to it, then claimed pairs."""
    pairs = [(arm.match.to, name) for name, arm in spec.arms.items() if arm.match]
    pairs += [(left, claim.right) for claim in spec.claims for left in left_arms(claim)]
    kept: list[tuple[str, str]] = []
    for left, right in pairs:
        if (left, right) not in kept and (right, left) not in kept:
            kept.append((left, right))
    return kept


def _gaps(cells: Mapping[tuple[str, int], Cell], spec: StudySpec) -> list[dict[str, Any]]:
    rows = []
    for budget in spec.budgets:
        for left, right in contrast_pairs(spec):
            for metric in METRICS:
                values = [cells[arm, budget].values[metric] for arm in (left, right)]
                contrast = paired_contrast(values[0], values[1], CONFIDENCE, alpha=spec.alpha)
                collapsed = [arm for arm in (left, right) if cells[arm, budget].collapsed]
                row = {"left": left, "right": right, "budget": budget, "metric": metric, "collapsed": collapsed}
                rows.append({**row, **dump(contrast)})
    return rows


def _claims(
    cells: Mapping[tuple[str, int], Cell], lock: Lock, epochs: Mapping[int, float | None]
) -> list[dict[str, Any]]:
    """Verdicts; none when the runs were scored on the selection split, which is for choosing a recipe."""
    spec = lock.study
    if spec.recipe.eval_split != "validation":
        return []
    late_arms = set(lock.post_hoc("arms"))
    post_hoc = [*lock.post_hoc("claims"), *(c.id for c in spec.claims if late_arms & {*left_arms(c), c.right})]
    verdicts = judge(
        spec.claims,
        cells,
        seeds=spec.seeds,
        budgets=spec.budgets,
        alpha=spec.alpha,
        epochs={budget: value for budget, value in epochs.items() if value is not None},
        post_hoc=post_hoc,
        locked_seeds=[seed for seed in spec.seeds if seed not in lock.post_hoc("seeds")],
        locked_budgets=[budget for budget in spec.budgets if budget not in lock.post_hoc("budgets")],
    )
    return [table(verdict) for verdict in verdicts]


# ------------------------------------------------------------------------------------------------ curves


def _thinned(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most CURVE_POINTS rows, evenly chosen, first and last kept."""
    if len(rows) <= CURVE_POINTS:
        return rows
    last = len(rows) - 1
    return [rows[round(i * last / (CURVE_POINTS - 1))] for i in range(CURVE_POINTS)]


def _curve(record: RunRecord) -> dict[str, Any]:
    names = {"step": "step", "tokens": "tokens", "flops": "flops", "elapsed_s": "seconds", "loss": "loss"}
    points = [{new: row[old] for old, new in names.items()} for row in _thinned(record.rows("eval"))]
    return {**_place(record), "status": record.status, "points": points}


def _routing(record: RunRecord) -> dict[str, Any]:
    assert record.config is not None and record.summary is not None
    ffn = dump(record.config.model.ffn)
    points = [
        {"step": row["step"], "tokens": row["tokens"], "layers": row["routing"]}
        for row in _thinned(record.rows("eval"))
    ]
    return {
        **_place(record),
        "num_experts": ffn["num_experts"],
        "top_k": ffn["top_k"],
        "points": points,
        "final": record.summary["routing"],
        "collapsed": record.summary["collapsed"],
    }


def _shapes(records: Iterable[RunRecord]) -> dict[str, dict[str, list[int]]]:
    """Tensor shapes per arm, from the first run that recorded them."""
    return {r.config.arm: r.summary["shapes"] for r in records if r.config and r.summary}


def _shared(shapes: Mapping[str, dict[str, list[int]]], arm: str, other: str | None) -> dict[str, Any] | None:
    """How many tensors start from the same values as the reference arm's: those of equal name and shape."""
    if other is None or arm not in shapes or other not in shapes:
        return None
    equal = [name for name, shape in shapes[arm].items() if shapes[other].get(name) == shape]
    return {"with": other, "tensors": len(equal), "of": len(shapes[arm])}


# ------------------------------------------------------------------------------------------------ provenance


def _provenance(directory: Path, lock: Lock, records: Iterable[RunRecord]) -> dict[str, Any]:
    environments: list[dict[str, Any]] = []
    for record in records:
        path = record.directory / "environment.json"
        if record.summary is None or not path.exists():
            continue
        try:
            found = read_json(path)
        except IntegrityError:
            continue
        if found not in environments:
            environments.append(found)
    return {
        "equipoise": __version__,
        "created": lock.created,
        "amendments": list(lock.amendments),
        "lock_digest": lock.digest(),
        "data_digest": lock.data,
        "environments": environments,
        "commands": [lock.command] if lock.command else [],
        "study": dump(lock.study),
    }
