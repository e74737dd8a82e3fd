"""A study directory → one plain table of everything it found, written as `results.json`. No torch, no drawing.

What the terminal, the figures and the report show is in this one value; none of them reads a run directory. No mean
drops a seed silently: every row says how many values it has, how many it should have, and which seeds are missing. What
was added after the first finished run never enters a number of what was declared: it has rows of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from equipoise import __version__
from equipoise.config import dump
from equipoise.evidence import METRICS, Evidence, gather
from equipoise.files import write_json
from equipoise.lock import Lock, read_lock
from equipoise.matching import resolve_arms
from equipoise.spec.claims import left_arms
from equipoise.spec.run import num_steps
from equipoise.spec.study import StudySpec
from equipoise.stats import mean_sd, paired_contrast
from equipoise.study import arm_table
from equipoise.verdict import Cell, judge, table

SCHEMA_VERSION: Final = 1
CONFIDENCE: Final = 0.95
SAME: Final = ("equipoise", "torch", "numpy", "cpu_capability", "device", "threads")
"""Fields of an environment that have to be equal for two runs to be comparable bit for bit; on a GPU also which one."""
MIXED: Final = "mixed environments"
"""The mark of every verdict of a study whose runs did not share one environment."""

SCOPE: Final = (
    "Models of this size on this corpus; nothing here says what happens at other scales or on other text.",
    "The study measures validation loss. It tests no mechanism: why one arm is ahead is not answered.",
    "Equal parameters, tokens or FLOPs are not equal seconds: no wall-clock claim is made. Run times depend on the "
    "machine and are shown as measured.",
    "Intervals are 95 % t intervals of the paired difference over seeds, not adjusted for other comparisons. Verdicts "
    "use one-sided t tests with Holm's adjustment over the claims declared before the first run.",
    "A recipe that suits one arm better than another is part of what is compared: all arms share one recipe.",
)

Cells = Mapping[tuple[str, int], Mapping[int, Evidence]]
"""(arm, budget) → seed → run."""


@dataclass(frozen=True, kw_only=True)
class Late:
    """What was added after the first finished run, and the seeds that a number may be over."""

    arms: tuple[str, ...]
    budgets: tuple[int, ...]
    seeds: tuple[int, ...]
    claims: tuple[str, ...]
    """Added late themselves, or naming a late arm."""
    locked_seeds: tuple[int, ...]
    all_seeds: tuple[int, ...]

    def views(self, late: bool) -> list[tuple[bool, tuple[int, ...]]]:
        """(post hoc?, seeds) of each row to be shown: of what is late, one of all seeds; else the locked ones first."""
        if late:
            return [(True, self.all_seeds)]
        rest = [(True, self.all_seeds)] if self.seeds else []
        return [(False, self.locked_seeds), *rest]


def collect(directory: Path) -> dict[str, Any]:
    """Everything the study in `directory` found so far, as plain JSON values (see docs/design.md for the schema).

    Runs that are missing, unfinished or unreadable are listed as such. Raises IntegrityError when the lock is missing
    or altered, never for what lies in a run directory.
    """
    lock = read_lock(directory)
    spec, late = lock.study, _late(lock)
    runs = gather(directory, lock)
    vocab_size = next(iter(lock.models.values())).vocab_size
    arms = resolve_arms(spec.arms, vocab_size, spec.recipe.seq_len)
    cells = {
        (arm, budget): {run.seed: run for run in runs if (run.arm, run.budget) == (arm, budget)}
        for arm in spec.arms
        for budget in spec.budgets
    }
    first = next((run.summary for run in runs if run.complete), {})
    epochs = {
        budget: next((run.summary["epochs"] for run in runs if run.complete and run.budget == budget), None)
        for budget in spec.budgets
    }
    mixed = _mixed(runs)
    environments = _distinct(environment for run in runs for environment in run.environments)
    return {
        "schema_version": SCHEMA_VERSION,
        "name": spec.name,
        "question": spec.question,
        "alpha": spec.alpha,
        "split": spec.recipe.eval_split,
        "vocab_size": vocab_size,
        "arms": [
            {**arm_table(arm), "shared_init": _shared(runs, name, arm.match.to if arm.match else None)}
            for name, arm in arms.items()
        ],
        "seeds": list(spec.seeds),
        "budgets": list(spec.budgets),
        "post_hoc": {kind: list(getattr(late, kind)) for kind in ("arms", "seeds", "budgets", "claims")},
        "tokens_per_budget": {str(b): num_steps(b, spec.recipe) * spec.recipe.batch_tokens for b in spec.budgets},
        "epochs": {str(budget): value for budget, value in epochs.items()},
        "data": {**lock.dataset, "digest": lock.data},
        **{name: first.get(name) for name in ("floor", "floor_reason", "curve_floor")},
        **{name: first.get(name) for name in ("val_targets", "val_targets_total")},
        "runs": [_run_row(run, environments) for run in runs],
        "table": _table(cells, spec, late),
        "gaps": _gaps(cells, spec, late),
        "claims": _claims(cells, lock, late, epochs, [MIXED] if mixed else []),
        "curves": [
            {**run.place, "status": run.status, "points": list(run.points)}
            for run in runs
            if run.status in ("complete", "diverged", "interrupted")
        ],
        "routing": [
            {**run.place, **run.routing, "collapsed": run.collapsed("val_loss")} for run in runs if run.routing
        ],
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


def write_results(directory: Path, results: Mapping[str, Any]) -> Path:
    """Write `results.json` atomically; returns its path."""
    path = directory / "results.json"
    write_json(path, results)
    return path


def _late(lock: Lock) -> Late:
    spec = lock.study
    arms, seeds = lock.post_hoc("arms"), lock.post_hoc("seeds")
    own = lock.post_hoc("claims")
    claims = [claim.id for claim in spec.claims if claim.id in own or {*left_arms(claim), claim.right} & set(arms)]
    return Late(
        arms=tuple(arms),
        budgets=tuple(lock.post_hoc("budgets")),
        seeds=tuple(seeds),
        claims=tuple(claims),
        locked_seeds=tuple(seed for seed in spec.seeds if seed not in seeds),
        all_seeds=spec.seeds,
    )


# ------------------------------------------------------------------------------------------------ tables


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
        "message": run.message,
        "environments": sorted({environments.index(environment) for environment in run.environments}),
    }


def _values(cell: Mapping[int, Evidence], metric: str, seeds: Sequence[int]) -> dict[int, float]:
    return {seed: cell[seed].summary[metric] for seed in sorted(seeds) if cell[seed].complete}


def _collapsed(cell: Mapping[int, Evidence], metric: str, seeds: Iterable[int]) -> list[int]:
    return sorted(seed for seed in seeds if cell[seed].complete and cell[seed].collapsed(metric))


def _table(cells: Cells, spec: StudySpec, late: Late) -> list[dict[str, Any]]:
    rows = []
    for budget in spec.budgets:
        for arm in spec.arms:
            cell = cells[arm, budget]
            for post_hoc, seeds in late.views(arm in late.arms or budget in late.budgets):
                lost = sorted(seed for seed in seeds if not cell[seed].complete)
                for metric in METRICS:
                    values = _values(cell, metric, seeds)
                    mean, sd, n = mean_sd(values.values())
                    rows.append(
                        {
                            "arm": arm,
                            "budget": budget,
                            "metric": metric,
                            "post_hoc": post_hoc,
                            "seeds": list(seeds),
                            "n": n,
                            "expected_n": len(seeds),
                            "mean": mean,
                            "sd": sd,
                            "values": {str(seed): value for seed, value in values.items()},
                            "lost": [seed for seed in lost if cell[seed].status != "diverged"],
                            "diverged": [seed for seed in lost if cell[seed].status == "diverged"],
                            "collapsed": _collapsed(cell, metric, seeds),
                        }
                    )
    return rows


def contrast_pairs(spec: StudySpec, without: Sequence[str] = ()) -> list[tuple[str, str]]:
    """The pairs a study is about, left − right: each reference arm and what is matched to it, then claimed pairs.

    Claims whose id is in `without` count for nothing.
    """
    pairs = [(arm.match.to, name) for name, arm in spec.arms.items() if arm.match]
    pairs += [(left, claim.right) for claim in spec.claims if claim.id not in without for left in left_arms(claim)]
    kept: list[tuple[str, str]] = []
    for left, right in pairs:
        if (left, right) not in kept and (right, left) not in kept:
            kept.append((left, right))
    return kept


def _gaps(cells: Cells, spec: StudySpec, late: Late) -> list[dict[str, Any]]:
    rows = []
    declared = contrast_pairs(spec, late.claims)
    for budget in spec.budgets:
        for left, right in (*declared, *(pair for pair in contrast_pairs(spec) if pair not in declared)):
            added = (left, right) not in declared or {left, right} & set(late.arms) or budget in late.budgets
            for post_hoc, seeds in late.views(bool(added)):
                for metric in METRICS:
                    values = [_values(cells[arm, budget], metric, seeds) for arm in (left, right)]
                    row = {"left": left, "right": right, "budget": budget, "metric": metric, "post_hoc": post_hoc}
                    contrast = dump(paired_contrast(values[0], values[1], CONFIDENCE, alpha=spec.alpha))
                    rows.append({**row, **contrast, **_carried(cells, row, contrast, seeds)})
    return rows


def _carried(cells: Cells, row: Mapping[str, Any], contrast: Mapping[str, Any], seeds: Sequence[int]) -> dict[str, Any]:
    """What has to stand beside a contrast: seeds it should be over, those it is without, arms that collapsed in it."""
    paired = [seed for seed in seeds if str(seed) in map(str, contrast["per_seed"])]
    return {
        "expected_n": len(seeds),
        "dropped": sorted(set(seeds) - set(paired)),
        "collapsed": [
            arm for arm in (row["left"], row["right"]) if _collapsed(cells[arm, row["budget"]], row["metric"], paired)
        ],
    }


def _claims(
    cells: Cells, lock: Lock, late: Late, epochs: Mapping[int, float | None], marks: Sequence[str]
) -> list[dict[str, Any]]:
    """Verdicts; none when the runs were scored on the selection split, which is for choosing a recipe."""
    spec = lock.study
    if spec.recipe.eval_split != "validation":
        return []
    verdicts = judge(
        spec.claims,
        {place: _judged(cell) for place, cell in cells.items()},
        seeds=spec.seeds,
        budgets=spec.budgets,
        alpha=spec.alpha,
        epochs={budget: value for budget, value in epochs.items() if value is not None},
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
                {**c, **_carried(cells, {**c, "metric": row["metric"]}, c, seeds.get(kind, late.all_seeds))}
                for c in row[kind]
            ]
        rows.append({**row, "marks": [*row["marks"], *marks]})
    return rows


def _judged(cell: Mapping[int, Evidence]) -> Cell:
    """A cell as verdicts want it. A run whose routing collapsed at its end or at its best step counts as collapsed."""
    return Cell(
        values={metric: _values(cell, metric, list(cell)) for metric in METRICS},
        lost={seed: run.status for seed, run in cell.items() if run.status != "complete"},
        collapsed={seed for metric in METRICS for seed in _collapsed(cell, metric, cell)},
    )


# ------------------------------------------------------------------------------------------------ provenance


def _shared(runs: Iterable[Evidence], arm: str, other: str | None) -> dict[str, Any] | None:
    """How many tensors start from the same values as the reference arm's: those of equal name, shape and spread."""
    init: dict[str, dict[str, Any]] = {run.arm: run.summary["init"] for run in runs if "init" in run.summary}
    if other is None or arm not in init or other not in init:
        return None
    equal = [name for name, drawn in init[arm].items() if init[other].get(name) == drawn]
    return {"with": other, "tensors": len(equal), "of": len(init[arm])}


def _distinct(environments: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    kept: list[dict[str, Any]] = []
    for environment in environments:
        if environment not in kept:
            kept.append(environment)
    return kept


def _mixed(runs: Iterable[Evidence]) -> dict[str, Any] | None:
    """How the environments of the complete runs differ: fields, and runs that went on elsewhere; None when in nothing.

    Only fields that numbers depend on count; on a CPU `compute` merely says why it was chosen, on a GPU which it is.
    """
    complete = [run for run in runs if run.complete]
    environments = [environment for run in complete for environment in run.environments]
    names = (*SAME, *(["compute"] if any(e.get("device") != "cpu" for e in environments) else []))
    differing = [name for name in names if len({str(e.get(name)) for e in environments}) > 1]
    resumed = [
        {**run.place, "steps": list(run.summary["resumed_elsewhere"])}
        for run in complete
        if run.summary["resumed_elsewhere"]
    ]
    return {"fields": differing, "resumed": resumed} if differing or resumed else None
