"""A study directory → one plain table of everything it found, written as `results.json`. No torch, no drawing.

What the terminal, the figures and the report show is in this one value; none of them reads a run directory. What was
added after the first finished run never enters a number of what was declared (`comparisons`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from equipoise import __version__, fairness, sweeps
from equipoise.budgets import arm_budgets
from equipoise.comparisons import Late, added_late, carried, collapsed_seeds, gap_rows, mean_rows, values_of
from equipoise.config import dump
from equipoise.crossover import crossovers
from equipoise.environments import distinct
from equipoise.environments import mixed as mixed_environments
from equipoise.evidence import METRICS, Evidence, gather
from equipoise.fairness import Cells
from equipoise.files import write_bytes
from equipoise.lock import Lock, read_lock
from equipoise.matching import resolve_arms
from equipoise.measures import Cell, value_key
from equipoise.sampling import with_sampling
from equipoise.spec.claims import ROUTING_METRICS, AnyClaim, RoutingClaim, claim_arms, claim_pairs
from equipoise.spec.run import num_steps
from equipoise.spec.study import StudySpec
from equipoise.spec.sweep import standing_for
from equipoise.step_time import StepTimes, read_step_times
from equipoise.study import arm_tables, matches_between
from equipoise.trunk import spent_flops
from equipoise.verdict import judge, table

SCHEMA_VERSION: Final = 1
CONFIDENCE: Final = 0.95
DIGITS: Final = 12
"""Significant digits of numbers that are computed here; what was recorded keeps all of its own. Beyond them sums and
logarithms depend on the processor, its libraries and the threads, and the same records are to give the same bytes."""
MIXED: Final = "mixed environments"
"""The mark of every verdict of a study whose runs did not share one environment."""

SCOPE: Final = (
    "Models of this size on this corpus; nothing here says what happens at other scales or on other text.",
    "The study measures validation loss. It tests no mechanism: why one arm is ahead is not answered.",
    "Equal parameters, tokens or FLOPs are not equal seconds: no wall-clock claim is made. Run times depend on the "
    "machine and are shown as measured.",
    "Intervals are 95 % t intervals of the paired difference over seeds, not adjusted for other comparisons. Verdicts "
    "use one-sided t tests with Holm's adjustment over the claims declared before the first run. Intervals for "
    "validation sampling hold the runs fixed and resample documents alone: they say nothing about other seeds.",
    "A recipe that suits one arm better than another is part of what is compared: all arms share one recipe, but for "
    "the learning rate where an arm declares its own.",
)


def collect(directory: Path) -> dict[str, Any]:
    """Everything the study in `directory` found so far, as plain JSON values (see docs/design.md for the schema).

    Runs that are missing, unfinished or unreadable are listed as such. Raises IntegrityError when the lock is missing
    or altered, never for what lies in a run directory.
    """
    lock = read_lock(directory)
    spec, late = lock.study, added_late(lock)
    runs = gather(directory, lock)
    vocab_size = next(iter(lock.models.values())).vocab_size
    arms = resolve_arms(spec.arms, vocab_size, spec.recipe.seq_len)
    cells: Cells = {
        (arm, budget): {run.seed: run for run in runs if (run.arm, run.budget) == (arm, budget)}
        for arm in spec.arms
        for budget in spec.budgets
    }
    study = fairness.Study(
        spec=spec,
        models=lock.models,
        cells=cells,
        late_arms=late.names,
        late_budgets=late.budgets,
        locked_seeds=late.locked_seeds,
        all_seeds=late.all_seeds,
    )
    choices = sweeps.choose(study)
    cells = sweeps.cells_of_families(study, choices)
    study, times = replace(study, cells=cells), read_step_times(directory, lock)
    budgets = arm_budgets(spec, lock.models)
    trained = {(name, budget): budgets[standing_for(name, spec.arms), budget].tokens for name, budget in cells}
    first = next((run.summary for run in runs if run.complete), {})
    seen = {(run.arm, run.budget): run.summary["epochs"] for run in reversed(runs) if run.complete}
    alike = [name for name, arm in spec.arms.items() if arm.budget is None]
    epochs = {b: next((seen[name, b] for name in alike if (name, b) in seen), None) for b in spec.budgets}
    tokens = {b: num_steps(b, spec.recipe) * spec.recipe.batch_tokens for b in spec.budgets}
    arm_rows = arm_tables(spec, arms, budgets, seen)
    losses = {(*place, seed): run.losses for place, cell in cells.items() for seed, run in cell.items() if run.complete}
    gaps = settled(with_sampling(gap_rows(cells, spec, late, CONFIDENCE), losses, CONFIDENCE))
    mixed = mixed_environments(runs)
    environments = distinct(environment for run in runs for environment in run.environments)
    return {
        "schema_version": SCHEMA_VERSION,
        "name": spec.name,
        "question": spec.question,
        "alpha": spec.alpha,
        "split": spec.recipe.eval_split,
        "vocab_size": vocab_size,
        "arms": [
            {**row, "shared_init": _shared(runs, row["name"], standing_for(row["match"]["to"], spec.arms))}
            if row["match"]
            else {**row, "shared_init": None}
            for row in arm_rows
        ],
        "seeds": list(spec.seeds),
        "budgets": list(spec.budgets),
        "post_hoc": {kind: list(getattr(late, kind)) for kind in ("arms", "seeds", "budgets", "claims")},
        "tokens_per_budget": {str(budget): count for budget, count in tokens.items()},
        "schedule": dump(spec.recipe.schedule),
        "training_flops": spent_flops(run.summary for run in runs if run.summary),
        "epochs": {str(budget): value for budget, value in epochs.items()},
        "data": {**lock.dataset, "digest": lock.data},
        **{name: first.get(name) for name in ("floor", "floor_reason", "curve_floor")},
        **{name: first.get(name) for name in ("val_targets", "val_targets_total")},
        "runs": [_run_row(run, environments) for run in runs],
        "table": settled(mean_rows(cells, spec, late)),
        "published": [
            {**dump(value), "budget": max(spec.budgets) if value.budget == "largest" else value.budget}
            for value in spec.published
        ],
        "gaps": gaps,
        "crossovers": settled(crossovers(gaps, trained, CONFIDENCE)),
        "claims": [
            {
                **settled(row),
                "marks": [*row["marks"], *sweeps.terms(claim_arms(claim), row["budgets"], spec, budgets, choices)],
                "matches": matches_between(arm_rows, claim_pairs(claim)),
            }
            for claim, row in _claims(cells, lock, late, trained, [MIXED] if mixed else [])
        ],
        "contracts": {
            "step_time": times.table() if isinstance(times, StepTimes) else None,
            "step_time_reason": None if isinstance(times, StepTimes) else times,
            "rows": settled(fairness.contract_rows(study, times)),
        },
        "lr_sweep": settled(sweeps.sweep_rows(study, choices)),
        "curves": [
            {**run.place, "status": run.status, "points": list(run.points)}
            for run in runs
            if run.status in ("complete", "diverged", "interrupted")
        ],
        "routing": [
            {**run.place, **run.routing, "collapsed": run.collapsed("val_loss")} for run in runs if run.routing
        ],
        "explorer": explored_arms(runs, spec),
        "samples": [{**run.place, **sample} for run in runs for sample in run.samples],
        "scope": list(SCOPE),
        "provenance": {
            "equipoise": __version__,
            "created": lock.created,
            "first_finished": lock.first_finished,
            "amendments": list(lock.amendments),
            "lock_digest": lock.digest(),
            "data_digest": lock.data,
            "environments": environments,
            "mixed": mixed,
            "commands": [lock.command] if lock.command else [],
            "study": dump(lock.study),
        },
    }


def settled(value: Any) -> Any:
    """`value` (JSON values) with every float in it at `DIGITS` significant digits.

    >>> settled({"mean": [1 / 3, 2], "n": 3})
    {'mean': [0.333333333333, 2], 'n': 3}
    """
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: settled(item) for key, item in value.items()}
    return [settled(item) for item in value] if isinstance(value, list | tuple) else value


def write_results(directory: Path, results: Mapping[str, Any]) -> Path:
    """Write `results.json` atomically, a row a line; returns its path.

    Lines are what a change of results is seen by; a number a line would double the file.
    """
    path = directory / "results.json"
    parts = [f"{json.dumps(key)}: {_lines(value)}" for key, value in results.items()]
    write_bytes(path, ("{\n" + ",\n".join(parts) + "\n}\n").encode())
    return path


def _lines(value: Any) -> str:
    """JSON text of `value`: a list of objects an object a line, anything else on one line."""
    if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        return "[\n" + ",\n".join(map(_lines, value)) + "\n]"
    return json.dumps(dump(value), ensure_ascii=False, allow_nan=False)


def _run_row(run: Evidence, environments: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    names = (
        *METRICS, "best_step", "collapsed", "best_collapsed", "num_spikes", "steps", "tokens", "train_s",
        "tokens_per_s", "peak_memory_bytes", "train_flops",
    )  # fmt: skip
    return {
        **run.place,
        "status": run.status,
        "post_hoc": run.post_hoc,
        **{name: run.summary.get(name) for name in names},
        "branched_from": run.summary.get("branched_from"),
        "message": run.message,
        "environments": sorted({environments.index(environment) for environment in run.environments}),
    }


# ------------------------------------------------------------------------------------------------ claims


def _claims(
    cells: Cells,
    lock: Lock,
    late: Late,
    trained: Mapping[tuple[str, int], int],
    marks: Sequence[str],
) -> list[tuple[AnyClaim, dict[str, Any]]]:
    """Claims and verdicts; none when the runs were scored on the selection split, which is for choosing a recipe."""
    spec = lock.study
    if spec.recipe.eval_split != "validation":
        return []
    verdicts = judge(
        spec.claims,
        {place: _judged(place[0], cell, spec, trained[place]) for place, cell in cells.items()},
        seeds=spec.seeds,
        budgets=spec.budgets,
        alpha=spec.alpha,
        post_hoc=late.claims,
        locked_seeds=late.locked_seeds,
        locked_budgets=[budget for budget in spec.budgets if budget not in late.budgets],
    )
    rows = []
    for verdict in verdicts:
        row = table(verdict)
        seeds = {"contrasts": late.all_seeds if verdict.post_hoc else late.locked_seeds}
        for kind in ("contrasts", "post_hoc_contrasts"):
            row[kind] = [
                {**c, **carried(cells, {**c, "metric": row["metric"]}, c, seeds.get(kind, late.all_seeds))}
                for c in row[kind]
            ]
        rows.append((verdict.claim, {**row, "marks": [*row["marks"], *marks]}))
    return rows


def _judged(name: str, cell: Mapping[int, Evidence], spec: StudySpec, trained: int) -> Cell:
    """A cell of an arm or family as verdicts want it; `trained` are the tokens of its runs.

    A run whose routing collapsed at its end or at its best step counts as collapsed.
    """
    values = {metric: values_of(cell, metric, list(cell)) for metric in METRICS}
    for claim in spec.claims:
        if claim.metric in ROUTING_METRICS and name in claim_arms(claim):
            values[value_key(claim)] = {
                seed: value
                for seed, run in cell.items()
                if run.complete and (value := _diagnostic(run, claim)) is not None
            }
    return Cell(
        values=values,
        lost={seed: run.status for seed, run in cell.items() if run.status != "complete"},
        collapsed={seed for metric in METRICS for seed in collapsed_seeds(cell, metric, cell)},
        tokens=trained,
        epochs=max((run.summary["epochs"] for run in cell.values() if run.complete), default=0.0),
        curves={seed: run.curve for seed, run in cell.items() if run.complete},
    )


def _diagnostic(run: Evidence, claim: AnyClaim) -> float | None:
    if isinstance(claim, RoutingClaim):
        return run.diagnostic(claim.metric, claim.layers, claim.at_frac)
    return run.diagnostic(claim.metric)


# ------------------------------------------------------------------------------------------------ arms


def explored_arms(runs: Sequence[Evidence], spec: StudySpec) -> dict[str, Any] | None:
    """The token by token view of one run an arm, all of one seed and budget: of those that most arms have, the largest
    budget and then the first seed. None when no run kept one.
    """
    kept = {(run.budget, run.seed, run.arm): run.explorer for run in runs if run.complete and run.explorer}
    places = [(budget, seed) for budget in sorted(spec.budgets, reverse=True) for seed in spec.seeds]
    chosen = max(places, key=lambda place: sum((*place, arm) in kept for arm in spec.arms), default=None)
    if chosen is None or not kept:
        return None
    routed = {run.arm: run.routing for run in runs if run.routing}
    return {
        "budget": chosen[0],
        "seed": chosen[1],
        "arms": [
            {
                "arm": arm,
                "top_k": routed[arm]["top_k"] if arm in routed else 0,
                "num_experts": routed[arm]["num_experts"] if arm in routed else 0,
                **found,
            }
            for arm in spec.arms
            if (found := kept.get((*chosen, arm)))
        ],
    }


def _shared(runs: Iterable[Evidence], arm: str, other: str) -> dict[str, Any] | None:
    """How many tensors start from the same values as the reference arm's: those of equal name, shape and spread."""
    init: dict[str, dict[str, Any]] = {run.arm: run.summary["init"] for run in runs if "init" in run.summary}
    if arm not in init or other not in init:
        return None
    equal = [name for name, drawn in init[arm].items() if init[other].get(name) == drawn]
    return {"with": other, "tensors": len(equal), "of": len(init[arm])}
