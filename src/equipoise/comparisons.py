"""Means of arms and paired gaps between them, as rows of results; and which of them are post hoc.

No mean drops a seed silently: every row says how many values it has, how many it should have, and which seeds are
missing. What was added after the first finished run never enters a number of what was declared: it has rows of its own.

Not for: other contracts than the runs themselves (`fairness`), verdicts (`verdict`), or reading anything (`evidence`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from equipoise.config import dump
from equipoise.evidence import METRICS, Evidence
from equipoise.fairness import Cells
from equipoise.lock import Lock
from equipoise.spec.claims import claim_arms, claim_pairs
from equipoise.spec.study import StudySpec
from equipoise.spec.sweep import families, units
from equipoise.stats import mean_sd, paired_contrast


@dataclass(frozen=True, kw_only=True)
class Late:
    """What was added after the first finished run, and the seeds that a number may be over."""

    arms: tuple[str, ...]
    names: tuple[str, ...]
    """The arms, and the families of such arms alone."""
    budgets: tuple[int, ...]
    seeds: tuple[int, ...]
    claims: tuple[str, ...]
    """Added late themselves, or naming a late arm or family."""
    locked_seeds: tuple[int, ...]
    all_seeds: tuple[int, ...]

    def views(self, late: bool) -> list[tuple[bool, tuple[int, ...]]]:
        """(post hoc?, seeds) of each row to be shown: of what is late, one of all seeds; else the locked ones first."""
        if late:
            return [(True, self.all_seeds)]
        rest = [(True, self.all_seeds)] if self.seeds else []
        return [(False, self.locked_seeds), *rest]


def added_late(lock: Lock) -> Late:
    """What the lock says was added after the first finished run."""
    spec = lock.study
    arms, seeds = lock.post_hoc("arms"), lock.post_hoc("seeds")
    own = lock.post_hoc("claims")
    names = [*arms, *(name for name, members in families(spec.arms).items() if set(members) <= set(arms))]
    claims = [claim.id for claim in spec.claims if claim.id in own or {*claim_arms(claim)} & set(names)]
    return Late(
        arms=tuple(arms),
        names=tuple(names),
        budgets=tuple(lock.post_hoc("budgets")),
        seeds=tuple(seeds),
        claims=tuple(claims),
        locked_seeds=tuple(seed for seed in spec.seeds if seed not in seeds),
        all_seeds=spec.seeds,
    )


# ------------------------------------------------------------------------------------------------ one cell


def values_of(cell: Mapping[int, Evidence], metric: str, seeds: Iterable[int]) -> dict[int, float]:
    """Seed → value of the complete runs, seeds rising."""
    return {seed: cell[seed].summary[metric] for seed in sorted(seeds) if cell[seed].complete}


def collapsed_seeds(cell: Mapping[int, Evidence], metric: str, seeds: Iterable[int]) -> list[int]:
    """Seeds whose routing had collapsed in the weights that the metric was measured on, rising."""
    return sorted(seed for seed in seeds if cell[seed].complete and cell[seed].collapsed(metric))


# ------------------------------------------------------------------------------------------------ rows


def mean_rows(cells: Cells, spec: StudySpec, late: Late) -> list[dict[str, Any]]:
    """A row per budget, arm and metric: mean and sd over seeds, and the seeds that are not in it."""
    rows = []
    for budget in spec.budgets:
        for arm in spec.arms:
            cell = cells[arm, budget]
            for post_hoc, seeds in late.views(arm in late.arms or budget in late.budgets):
                lost = sorted(seed for seed in seeds if not cell[seed].complete)
                for metric in METRICS:
                    values = values_of(cell, metric, seeds)
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
                            "collapsed": collapsed_seeds(cell, metric, seeds),
                        }
                    )
    return rows


def contrast_pairs(spec: StudySpec, without: Sequence[str] = ()) -> list[tuple[str, str]]:
    """The pairs a study is about, left − right: each reference arm and what is matched to it, then claimed pairs.

    A sweep is one side of a pair, under the name of its family, unless a claim names a member. Claims whose id is in
    `without` count for nothing.
    """
    of = {name: spec.arms[members[0]] for name, members in units(spec.arms).items()}
    pairs = [(arm.match.to, name) for name, arm in of.items() if arm.match]
    for claim in spec.claims:
        pairs += claim_pairs(claim) if claim.id not in without else ()
    kept: list[tuple[str, str]] = []
    for left, right in pairs:
        if (left, right) not in kept and (right, left) not in kept:
            kept.append((left, right))
    return kept


def gap_rows(cells: Cells, spec: StudySpec, late: Late, confidence: float) -> list[dict[str, Any]]:
    """A row per budget, pair and metric: the paired contrast left − right, and what has to stand beside it."""
    rows = []
    declared = contrast_pairs(spec, late.claims)
    for budget in spec.budgets:
        for left, right in (*declared, *(pair for pair in contrast_pairs(spec) if pair not in declared)):
            added = (left, right) not in declared or {left, right} & set(late.names) or budget in late.budgets
            for post_hoc, seeds in late.views(bool(added)):
                for metric in METRICS:
                    values = [values_of(cells[arm, budget], metric, seeds) for arm in (left, right)]
                    row = {"left": left, "right": right, "budget": budget, "metric": metric, "post_hoc": post_hoc}
                    contrast = dump(paired_contrast(values[0], values[1], confidence, alpha=spec.alpha))
                    rows.append({**row, **contrast, **carried(cells, row, contrast, seeds)})
    return rows


def carried(cells: Cells, row: Mapping[str, Any], contrast: Mapping[str, Any], seeds: Sequence[int]) -> dict[str, Any]:
    """What has to stand beside a contrast: seeds it should be over, those it is without, arms that collapsed in it."""
    paired = [seed for seed in seeds if str(seed) in map(str, contrast["per_seed"])]
    budgets = row.get("budgets", [row["budget"]])
    step = row.get("than") or {}
    named = (row["left"], row["right"], step.get("left"), step.get("right"))
    arms = [arm for arm in dict.fromkeys(named) if arm is not None]
    return {
        "expected_n": len(seeds),
        "dropped": sorted(set(seeds) - set(paired)),
        "collapsed": [
            arm for arm in arms if any(collapsed_seeds(cells[arm, b], row["metric"], paired) for b in budgets)
        ],
    }
