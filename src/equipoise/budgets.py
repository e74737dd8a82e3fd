"""How many tokens each arm trains on at each budget of a study: the budget, or what makes the arm agree with another.

Not for: what is trained then (`lock` makes the runs), or comparing arms of different cost afterwards (`contracts`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from equipoise.accounting import count_flops
from equipoise.errors import ConfigError
from equipoise.spec.model import DenseFFN, ModelConfig
from equipoise.spec.run import num_steps
from equipoise.spec.study import OwnBudget, StudySpec
from equipoise.spec.sweep import standing_for


@dataclass(frozen=True, kw_only=True)
class ArmBudget:
    """What an arm trains on at one budget of the study."""

    arm: str
    budget: int
    """The budget of the study, at which the arm is compared."""
    asked: int
    """The budget its runs are given: the study's, or its own."""
    steps: int
    """Updates it trains for."""
    tokens: int
    """Tokens it trains on: steps · recipe.batch_tokens."""
    own: OwnBudget | None
    """What its own budget agrees on; None where it trains on the study's, and then the next three are None too."""
    quantity: float | None
    """Training FLOPs, or tokens per expert, of the arm."""
    reference: float | None
    """The same of the reference arm."""
    residual: float | None
    """quantity ÷ reference − 1: what rounding to whole updates leaves."""

    def table(self, epochs: float | None) -> dict[str, Any] | None:
        """As plain JSON values, with its passes over the training data; None where it trains on the study's budget."""
        if self.own is None:
            return None
        names = ("budget", "tokens", "steps", "quantity", "reference", "residual")
        own = {name: getattr(self, name) for name in names}
        return {"on": self.own.on, "to": self.own.to, **own, "epochs": epochs}


def arm_budgets(spec: StudySpec, models: Mapping[str, ModelConfig]) -> dict[tuple[str, int], ArmBudget]:
    """(arm, budget of the study) → what the arm trains on there; `models` are the resolved ones.

    An own budget is the whole number of updates, at least 1, whose quantity is nearest to the reference's; halves go
    up. Raises ConfigError where two budgets of the study come to the same tokens for an arm: they would be one run.
    """
    found: dict[tuple[str, int], ArmBudget] = {}
    faults: list[str] = []
    for name, arm in spec.arms.items():
        taken: dict[int, int] = {}
        for budget in spec.budgets:
            found[name, budget] = one = (
                _own(spec, models, name, budget, arm.budget) if arm.budget else _shared(spec, name, budget)
            )
            if one.asked in taken:
                faults.append(
                    f"arms.{name}.budget: budgets {taken[one.asked]:,} and {budget:,} both come to {one.asked:,} "
                    "tokens of this arm; expected budgets further apart or a smaller recipe.batch_tokens"
                )
            taken[one.asked] = budget
    if faults:
        raise ConfigError("\n".join(faults))
    return found


def updates_of(spec: StudySpec, budgets: Mapping[tuple[str, int], ArmBudget]) -> dict[str, list[int]]:
    """Arm → updates of its runs at each budget of the study, in the study's order."""
    return {name: [budgets[name, budget].steps for budget in spec.budgets] for name in spec.arms}


def per_token(on: str, model: ModelConfig, seq_len: int) -> Fraction:
    """What one training token adds: FLOPs of forward and backward, or tokens to each expert (even use)."""
    if on == "train_flops":
        return Fraction(count_flops(model, seq_len).training)
    return Fraction(1) if isinstance(model.ffn, DenseFFN) else Fraction(model.ffn.top_k, model.ffn.num_experts)


def _shared(spec: StudySpec, name: str, budget: int) -> ArmBudget:
    steps = num_steps(budget, spec.recipe)
    return ArmBudget(
        arm=name,
        budget=budget,
        asked=budget,
        steps=steps,
        tokens=steps * spec.recipe.batch_tokens,
        own=None,
        quantity=None,
        reference=None,
        residual=None,
    )


def _own(spec: StudySpec, models: Mapping[str, ModelConfig], name: str, budget: int, own: OwnBudget) -> ArmBudget:
    recipe = spec.recipe
    other = models[standing_for(own.to, models)]
    target = num_steps(budget, recipe) * recipe.batch_tokens * per_token(own.on, other, recipe.seq_len)
    step = recipe.batch_tokens * per_token(own.on, models[name], recipe.seq_len)
    exact = target / step + Fraction(1, 2)
    steps = max(1, exact.numerator // exact.denominator)
    return ArmBudget(
        arm=name,
        budget=budget,
        asked=steps * recipe.batch_tokens,
        steps=steps,
        tokens=steps * recipe.batch_tokens,
        own=own,
        quantity=float(steps * step),
        reference=float(target),
        residual=float(steps * step / target - 1),
    )
