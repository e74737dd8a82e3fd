"""Solve the one open width of a matched arm so that it agrees with its reference arm; state what is left over.

Not for: deciding what should agree (that is the study's `match`), or counting (that is `accounting`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from equipoise.accounting import FlopCount, ParamCount, count_flops, count_params
from equipoise.errors import ConfigError
from equipoise.spec.model import ModelConfig, MoEFFN, Width, with_widths
from equipoise.spec.study import Arm, Match, Quantity
from equipoise.spec.sweep import standing_for

WIDTH_STEP = 8
"""Widths move in steps of 8: grouped kernels need rows of 16 bytes, which is 8 numbers of bfloat16."""


@dataclass(frozen=True, kw_only=True)
class ResolvedArm:
    """An arm with every width a number, and how well it meets what it is matched to."""

    name: str
    """Name of the arm."""
    model: ModelConfig
    """The model: no open width, no rule, vocabulary set."""
    match: Match | None
    """What was asked for; None for an arm that is written out, and then the next three are None too."""
    quantity: int | None
    """The matched quantity of this arm."""
    reference: int | None
    """The same quantity of the reference arm."""
    residual: float | None
    """quantity ÷ reference − 1."""
    params: ParamCount
    """Parameters by component."""
    flops: FlopCount
    """FLOPs per token by component, at the recipe's seq_len."""


def resolve_arms(arms: Mapping[str, Arm], vocab_size: int, seq_len: int) -> dict[str, ResolvedArm]:
    """Every arm with its widths solved, in the given order; `vocab_size` is what the tokenizer has.

    The admissible width whose quantity is closest to the reference wins, the smaller one of two equally close.
    Raises ConfigError, one line an arm, where the closest is further away than `match.rtol`, or a width is beyond what
    a model may have.
    """
    written: dict[str, ModelConfig] = {}
    faults: list[str] = []
    for name, arm in arms.items():
        if arm.match is None:
            try:
                written[name] = with_widths(_with_vocab(arm.model, vocab_size))
            except ValueError as error:  # of a rule that follows d_model
                faults.append(f"arms.{name}.model.{error}")
    if faults:
        raise ConfigError("\n".join(faults))
    resolved: dict[str, ResolvedArm] = {}
    for name, arm in arms.items():
        if arm.match is None:
            resolved[name] = _resolved(name, written[name], seq_len)
            continue
        target = measure(written[standing_for(arm.match.to, written)], arm.match.on, seq_len)
        try:
            model = solve(_with_vocab(arm.model, vocab_size), arm.match, target, seq_len)
        except ConfigError as error:
            faults.append(f"arms.{name}.match: {error}")
            continue
        resolved[name] = _resolved(name, model, seq_len, arm.match, target)
    if faults:
        raise ConfigError("\n".join(faults))
    return resolved


def solve(model: ModelConfig, match: Match, target: int, seq_len: int) -> ModelConfig:
    """`model` with the width `match.adjust` set so that `match.on` is as close to `target` as it can be.

    Every quantity rises strictly with every width: a rule that follows `d_model` never falls, and the embedding alone
    grows with each step. So the closest width is one of the two that bracket the target, and bisection finds them.
    Raises ConfigError naming both when neither is within `match.rtol`.
    """
    step = width_step(model, match.adjust)

    def quantity(steps: int) -> int:
        return measure(with_width(model, match.adjust, steps * step), match.on, seq_len)

    try:
        below, above = _bracket(quantity, target)
    except ValueError as error:
        raise ConfigError(
            f"{match.on} = {target:,} of {match.to!r} asks for widths that no model may have: "
            f"{str(error).splitlines()[0]}; make {match.to!r} smaller or adjust another width"
        ) from None
    best = min((s for s in (below, above) if s > 0), key=lambda s: abs(quantity(s) - target))
    if abs(quantity(best) - target) > Fraction(str(match.rtol)) * target:

        def tried(steps: int) -> str:
            value = quantity(steps)
            return f"{match.adjust} = {steps * step:,} gives {value:,} ({value / target - 1:+.2%})"

        raise ConfigError(
            f"{match.on} = {target:,} of {match.to!r} is not reached within rtol = {match.rtol:g}; nearest below: "
            f"{tried(below) if below else 'none'}; nearest above: {tried(above)}; raise rtol or adjust another width"
        )
    return with_width(model, match.adjust, best * step)


def measure(model: ModelConfig, on: Quantity, seq_len: int) -> int:
    """The quantity `on` of a resolved model: parameters, or training FLOPs per token."""
    if on == "flops_per_token":
        return count_flops(model, seq_len).training
    return count_params(model).total if on == "total_params" else count_params(model).active


def width_step(model: ModelConfig, adjust: Width) -> int:
    """Smallest step of the adjusted width: 8; for `d_model` also a whole number of rotated pairs in every head.

    >>> from equipoise.spec.model import DenseFFN
    >>> width_step(ModelConfig(num_layers=1, num_heads=12, ffn=DenseFFN()), "d_model")
    24
    """
    return math.lcm(WIDTH_STEP, 2 * model.num_heads) if adjust == "d_model" else WIDTH_STEP


def with_width(model: ModelConfig, adjust: Width, width: int) -> ModelConfig:
    """`model` with the adjusted width set to `width`, and a rule that follows `d_model` replaced by its number."""
    if adjust == "d_model":
        return with_widths(dataclasses.replace(model, d_model=width))
    if isinstance(model.ffn, MoEFFN):
        return dataclasses.replace(model, ffn=dataclasses.replace(model.ffn, d_expert=width))
    return dataclasses.replace(model, ffn=dataclasses.replace(model.ffn, d_ff=width))


def _bracket(quantity: Callable[[int], int], target: int) -> tuple[int, int]:
    """The largest number of steps with quantity ≤ target (0 = none) and the next one; quantity rises strictly."""
    low, high = 0, 1
    while quantity(high) <= target:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if quantity(middle) <= target:
            low = middle
        else:
            high = middle
    return low, high


def _with_vocab(model: ModelConfig, vocab_size: int) -> ModelConfig:
    return dataclasses.replace(model, vocab_size=vocab_size)


def _resolved(
    name: str, model: ModelConfig, seq_len: int, match: Match | None = None, target: int | None = None
) -> ResolvedArm:
    quantity = measure(model, match.on, seq_len) if match else None
    return ResolvedArm(
        name=name,
        model=model,
        match=match,
        quantity=quantity,
        reference=target,
        residual=quantity / target - 1 if quantity is not None and target else None,
        params=count_params(model),
        flops=count_flops(model, seq_len),
    )
