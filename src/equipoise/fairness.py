"""The contract matrix of a study: each pair of arms at equal tokens, equal training FLOPs and equal seconds.

Not for: the arithmetic of equal cost (`contracts`), choosing among swept arms (`sweeps`), verdicts (`verdict`), nor for
reading any file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from equipoise.budgets import ArmBudget, arm_budgets, per_token
from equipoise.contracts import Curve, Meeting, flips, meet, table, winner
from equipoise.evidence import METRICS, Evidence
from equipoise.matching import measure
from equipoise.spec.model import ModelConfig
from equipoise.spec.recipe import decays
from equipoise.spec.study import Quantity, StudySpec
from equipoise.spec.sweep import standing_for, units
from equipoise.step_time import StepTimes

CONTRACTS: Final = ("tokens", "train_flops", "seconds")
"""What may be held equal, in the order of the columns."""
QUANTITIES: Final[tuple[Quantity, ...]] = ("active_params", "total_params", "flops_per_token")
AGREES: Final = 0.01
"""Two arms agree on a quantity within this: what a match reaches by default."""

Cells = Mapping[tuple[str, int], Mapping[int, Evidence]]
"""(arm or family, budget) → seed → run."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """What the comparisons of a study rest on."""

    spec: StudySpec
    models: Mapping[str, ModelConfig]
    """Resolved model per arm."""
    cells: Cells
    """Of arms, and of families once these are chosen."""
    late_arms: Sequence[str]
    """Arms added after the first finished run, and families of such arms alone."""
    late_budgets: Sequence[int]
    locked_seeds: Sequence[int]
    all_seeds: Sequence[int]

    def view(self, arms: Iterable[str], budget: int) -> tuple[bool, Sequence[int], Sequence[int]]:
        """Post hoc?, and the seeds and budgets that a comparison of these arms at this budget may use."""
        if budget in self.late_budgets or any(arm in self.late_arms for arm in arms):
            return True, self.all_seeds, self.spec.budgets
        return False, self.locked_seeds, [b for b in self.spec.budgets if b not in self.late_budgets]


def compared(spec: StudySpec) -> list[tuple[str, str]]:
    """The pairs of the matrix, left − right: reference and matched arm, reference and own budget, routed and dense."""
    of = {name: spec.arms[members[0]] for name, members in units(spec.arms).items()}
    pairs = [(arm.match.to, name) for name, arm in of.items() if arm.match]
    pairs += [(arm.budget.to, name) for name, arm in of.items() if arm.budget]
    kinds = {name: arm.model.ffn.kind for name, arm in of.items()}
    pairs += [(left, right) for right in of for left in of if (kinds[left], kinds[right]) == ("moe", "dense")]
    kept: list[tuple[str, str]] = []
    for left, right in pairs:
        if (left, right) not in kept and (right, left) not in kept:
            kept.append((left, right))
    return kept


def contract_rows(study: Study, times: StepTimes | str) -> list[dict[str, Any]]:
    """A row per pair, budget and metric: the gap under each contract, and between which of them the winner flips."""
    spec, budgets = study.spec, arm_budgets(study.spec, study.models)
    rows = []
    for left, right in compared(spec):
        for budget in spec.budgets:
            late, seeds, _ = study.view((left, right), budget)
            for metric in METRICS:
                meetings = {
                    contract: _meeting(study, budgets, (left, right), budget, metric, contract, times)
                    for contract in CONTRACTS
                }
                winners = {contract: winner(meeting, left, right) for contract, meeting in meetings.items()}
                rows.append(
                    {
                        "left": left,
                        "right": right,
                        "budget": budget,
                        "metric": metric,
                        "post_hoc": late,
                        "agreement": _agreement(study, left, right),
                        **{
                            contract: {
                                **table(meeting, len(seeds), left, right),
                                "collapsed": _collapsed(study, budgets, (left, right), budget, metric, meeting),
                            }
                            for contract, meeting in meetings.items()
                        },
                        "flips": flips(winners),
                    }
                )
    return rows


def _meeting(
    study: Study,
    budgets: Mapping[tuple[str, int], ArmBudget],
    pair: tuple[str, str],
    budget: int,
    metric: str,
    contract: str,
    times: StepTimes | str,
) -> Meeting:
    left, right = (curve(study, budgets, name, metric) for name in pair)
    costs, declared = (1.0, 1.0), False
    if contract == "tokens" and left.tokens[budget] != right.tokens[budget]:
        trained = " and ".join(f"{curve.arm} trains on {curve.tokens[budget]:,} tokens" for curve in (left, right))
        return Meeting(reason=f"budgets of their own: {trained}")
    if contract == "train_flops":
        costs = flops(study, pair[0]), flops(study, pair[1])
        declared = _declared(study.spec, *pair) or _declared(study.spec, *pair[::-1])
    if contract == "seconds":
        if isinstance(times, str):
            return Meeting(reason=times)
        costs = _step_s(study, pair[0], times), _step_s(study, pair[1], times)
    _, seeds, usable = study.view(pair, budget)
    return meet(
        left,
        right,
        budget,
        costs=costs,
        budgets=usable,
        seeds=seeds,
        alpha=study.spec.alpha,
        declared=declared,
        readable=decays(study.spec.recipe.schedule),
    )


def curve(study: Study, budgets: Mapping[tuple[str, int], ArmBudget], name: str, metric: str) -> Curve:
    """The end points of an arm or family in one metric."""
    arm = standing_for(name, study.spec.arms)
    return Curve(
        arm=name,
        tokens={budget: budgets[arm, budget].tokens for budget in study.spec.budgets},
        losses={
            budget: {seed: run.summary[metric] for seed, run in study.cells[name, budget].items() if run.complete}
            for budget in study.spec.budgets
        },
    )


def flops(study: Study, name: str) -> float:
    """Training FLOPs of a token."""
    model = study.models[standing_for(name, study.models)]
    return float(per_token("train_flops", model, study.spec.recipe.seq_len))


def _step_s(study: Study, name: str, times: StepTimes) -> float:
    """Seconds of an update, which has as many tokens in every arm; a member of a family takes what the family does."""
    owner = next(unit for unit, members in units(study.spec.arms).items() if name in (unit, *members))
    return times.step_s[owner]


def _declared(spec: StudySpec, to: str, name: str) -> bool:
    """Whether `name` was given as many training FLOPs as `to` by declaration."""
    arm, other = spec.arms[standing_for(name, spec.arms)], spec.arms[standing_for(to, spec.arms)]
    if arm.budget is not None:
        return arm.budget.to == to and arm.budget.on == "train_flops"
    return other.budget is None and arm.match is not None and (arm.match.to, arm.match.on) == (to, "flops_per_token")


def _agreement(study: Study, left: str, right: str) -> dict[str, Any]:
    """right ÷ left − 1 of what arms are matched on, and the names of what agrees, within 1 % or as declared."""
    models = [study.models[standing_for(name, study.models)] for name in (left, right)]
    ratios: dict[str, float] = {}
    for quantity in QUANTITIES:
        one, other = (measure(model, quantity, study.spec.recipe.seq_len) for model in models)
        ratios[quantity] = other / one - 1
    match = study.spec.arms[standing_for(right, study.spec.arms)].match
    asked = match.on if match and match.to == left else None
    return {**ratios, "on": [name for name, ratio in ratios.items() if abs(ratio) <= AGREES or name == asked]}


def _collapsed(
    study: Study,
    budgets: Mapping[tuple[str, int], ArmBudget],
    pair: tuple[str, str],
    budget: int,
    metric: str,
    meeting: Meeting,
) -> list[str]:
    """Arms of the pair with a collapsed run among those that entered."""
    if meeting.contrast is None:
        return []
    found = []
    for name in pair:
        arm = standing_for(name, study.spec.arms)
        read = meeting.between if meeting.interpolated == name and meeting.between else ()
        at = [b for b in study.spec.budgets if budgets[arm, b].tokens in read] if read else [budget]
        runs = [study.cells[name, b][seed] for b in at for seed in meeting.contrast.per_seed]
        found += [name] if any(run.complete and run.collapsed(metric) for run in runs) else []
    return found
