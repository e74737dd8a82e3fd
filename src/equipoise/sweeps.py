"""What sweeps of learning rates chose, and the gaps between arms at equal rates, at the best, and with the sweep paid.

A family of swept arms is one thing to compare: at each budget it stands for the member with the lowest mean loss on the
selection split, on which no number that is shown was measured. Not for: expanding a sweep (`spec.sweep`), verdicts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from equipoise.budgets import ArmBudget, arm_budgets
from equipoise.contracts import Meeting, meet, table
from equipoise.evidence import METRICS, Evidence
from equipoise.fairness import Study, compared, curve, flops
from equipoise.spec.recipe import decays
from equipoise.spec.study import StudySpec
from equipoise.spec.sweep import families, lr_text, standing_for, units
from equipoise.stats import paired_contrast

ENDED: Final = ("complete", "diverged")
"""States of a run that can go no further: a choice waits for all others."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What the selection split chose of a family at one budget."""

    family: str
    budget: int
    arm: str | None
    """The chosen member; None when it could not be chosen."""
    losses: Mapping[str, float | None]
    """Member → mean loss on the selection split over the declared seeds; None where a run diverged or is not there."""
    at_edge: bool
    """The chosen rate is the lowest or the highest of the sweep: a better one may lie beyond."""
    reason: str | None
    """Why nothing was chosen."""


def choose(study: Study) -> list[Choice]:
    """For every family and budget the member whose runs have the lowest mean selection loss; of equals the lower rate.

    Over the declared seeds, and over the members that were declared, where there are any; so what is added later moves
    no choice. A member with a diverged run is not chosen. As long as a run is missing nothing is chosen.
    """
    return [
        _choice(study, name, members, budget)
        for name, members in families(study.spec.arms).items()
        for budget in study.spec.budgets
    ]


def _choice(study: Study, name: str, members: Sequence[str], budget: int) -> Choice:
    declared = [member for member in members if member not in study.late_arms]
    late = budget in study.late_budgets or not declared
    candidates, seeds = declared or list(members), study.all_seeds if late else study.locked_seeds
    losses: dict[str, float | None] = {}
    missing: list[str] = []
    for member in candidates:
        runs = [study.cells[member, budget][seed] for seed in seeds]
        missing += [f"{member} seed {run.seed} is {run.status}" for run in runs if run.status not in ENDED]
        whole = all(run.complete for run in runs)
        losses[member] = sum(run.summary["selection_loss"] for run in runs) / len(runs) if whole else None
    rates = {member: study.spec.recipe_of(member).optim.lr for member in candidates}
    known = sorted((loss, rates[member], member) for member, loss in losses.items() if loss is not None)
    reason: str | None = missing[0] if missing else None if known else "a run of every rate diverged"
    arm = None if reason else known[0][2]
    edges = (min(rates.values()), max(rates.values()))
    at_edge = arm is not None and rates[arm] in edges
    return Choice(family=name, budget=budget, arm=arm, losses=losses, at_edge=at_edge, reason=reason)


def cells_of_families(study: Study, choices: Iterable[Choice]) -> dict[tuple[str, int], Mapping[int, Evidence]]:
    """The cells of the study, and one more per choice: the runs of the chosen member, or none."""
    cells = dict(study.cells)
    for choice in choices:
        if choice.arm is not None:
            cells[choice.family, choice.budget] = study.cells[choice.arm, choice.budget]
            continue
        cells[choice.family, choice.budget] = {
            seed: Evidence(
                arm=choice.family,
                seed=seed,
                budget=choice.budget,
                post_hoc=seed not in study.locked_seeds,
                status="missing",
                message=f"no rate was chosen: {choice.reason}",
            )
            for seed in study.all_seeds
        }
    return cells


def terms(
    arms: Iterable[str],
    at: Sequence[int],
    spec: StudySpec,
    budgets: Mapping[tuple[str, int], ArmBudget],
    choices: Sequence[Choice],
) -> list[str]:
    """What has to be said of the arms of a claim judged at these budgets: tokens that are not the study's, swept rates.

    One text per arm and thing to say; several budgets are named in it.
    """
    said = []
    for name in arms:
        for budget in at:
            where = f" at {budget:,}" if len(at) > 1 else ""
            own = budgets[standing_for(name, spec.arms), budget]
            said += [f"own budget: {name} {own.tokens:,} tokens{where}"] if own.own else []
            for choice in choices:
                if (choice.family, choice.budget) == (name, budget) and choice.arm:
                    lr = lr_text(spec.recipe_of(choice.arm).optim.lr)
                    said.append(f"lr {lr} of {name}{where}, chosen on the selection split")
                elif (choice.family, choice.budget) == (name, budget):
                    said.append(f"no lr chosen for {name}{where}")
    return said


def sweep_rows(study: Study, choices: Sequence[Choice]) -> dict[str, Any] | None:
    """What was swept, what was chosen, and each gap at equal rates, at the best, and with the sweep paid for.

    None in a study without a sweep.
    """
    spec = study.spec
    members = families(spec.arms)
    if not members:
        return None
    budgets = arm_budgets(spec, study.models)
    pairs = [pair for pair in compared(spec) if set(pair) & set(members)]
    return {
        "families": [
            {"name": name, "members": [{"arm": arm, "lr": spec.recipe_of(arm).optim.lr} for arm in arms]}
            for name, arms in members.items()
        ],
        "choices": [
            {
                "family": choice.family,
                "budget": choice.budget,
                "arm": choice.arm,
                "lr": spec.recipe_of(choice.arm).optim.lr if choice.arm else None,
                "selection_loss": dict(choice.losses),
                "at_edge": choice.at_edge,
                "reason": choice.reason,
            }
            for choice in choices
        ],
        "gaps": [
            _sweep_gap(study, budgets, pair, budget, metric, choices)
            for pair in pairs
            for budget in spec.budgets
            for metric in METRICS
        ],
    }


def _sweep_gap(
    study: Study,
    budgets: Mapping[tuple[str, int], ArmBudget],
    pair: tuple[str, str],
    budget: int,
    metric: str,
    choices: Sequence[Choice],
) -> dict[str, Any]:
    left, right = pair
    late, seeds, usable = study.view(pair, budget)
    rates = [_rates(study, name) for name in pair]
    chosen = {choice.family: choice for choice in choices if choice.budget == budget}
    reasons = [f"{name}: {chosen[name].reason}" for name in pair if name in chosen and chosen[name].reason]
    shared = [(lr, rates[0][lr], rates[1][lr]) for lr in rates[0] if lr in rates[1]]
    factors = [len(own) for own in rates]
    charged = (
        Meeting(reason="; ".join(reasons))
        if reasons
        else meet(
            curve(study, budgets, left, metric),
            curve(study, budgets, right, metric),
            budget,
            costs=(factors[0] * flops(study, left), factors[1] * flops(study, right)),
            budgets=usable,
            seeds=seeds,
            alpha=study.spec.alpha,
            readable=decays(study.spec.recipe.schedule),
        )
    )
    best = Meeting(reason="; ".join(reasons)) if reasons else _gap(study, pair, budget, metric, seeds)
    return {
        "left": left,
        "right": right,
        "budget": budget,
        "metric": metric,
        "post_hoc": late,
        "shared": [
            {"lr": lr, **table(_gap(study, (one, other), budget, metric, seeds), len(seeds), one, other)}
            for lr, one, other in shared
        ],
        "best": {**table(best, len(seeds), left, right), "lr": [_best_lr(study, name, chosen) for name in pair]},
        "charged": {**table(charged, len(seeds), left, right), "cost_factor": factors},
    }


def _rates(study: Study, name: str) -> dict[float, str]:
    """Learning rate → the arm that was trained with it; what was added late to a family counts for nothing."""
    members = units(study.spec.arms).get(name, (name,))
    counted = [arm for arm in members if name in study.late_arms or arm not in study.late_arms]
    return {study.spec.recipe_of(arm).optim.lr: arm for arm in counted}


def _best_lr(study: Study, name: str, chosen: Mapping[str, Choice]) -> float | None:
    arm = chosen[name].arm if name in chosen else name
    return study.spec.recipe_of(arm).optim.lr if arm else None


def _gap(study: Study, pair: tuple[str, str], budget: int, metric: str, seeds: Sequence[int]) -> Meeting:
    """The paired gap between two arms or families at one budget, as they were run."""
    left, right = (
        {seed: run.summary[metric] for seed, run in study.cells[name, budget].items() if run.complete and seed in seeds}
        for name in pair
    )
    contrast = paired_contrast(left, right, alpha=study.spec.alpha)
    if contrast.n == 0:
        return Meeting(reason=f"no seed has complete runs of both {pair[0]} and {pair[1]}")
    return Meeting(contrast=contrast)
