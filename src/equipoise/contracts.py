"""Two arms at equal cost: which of their runs meet, and the paired gap there; read off between runs where none meet.

A contract says what "equal" means. Each arm is a curve of end points, one a budget: tokens trained and the loss of each
seed after its own schedule has decayed. At equal cost the one arm stands at a run of its own, and the other's loss is
read from its curve, per seed and linear in the logarithm of its tokens, between neighbours at most MAX_RATIO apart; and
nowhere else: outside the measured range there is no number. Not for: reading runs (the caller hands over plain values),
what a token costs (`budgets`, `step_time`), nor verdicts (claims are judged at their budget).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from equipoise.config import dump
from equipoise.stats import Contrast, paired_contrast

MAX_RATIO: Final = 2.2
"""Neighbouring budgets further apart than this (doublings and a little) are not read between: the curve bends."""
SAME: Final = 1e-9
"""Relative difference of two token counts that is rounding: counts are whole, costs are float64."""

Losses = Mapping[int, float]
"""Seed → loss."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The end points of one arm."""

    arm: str
    """What it is called."""
    tokens: Mapping[int, int]
    """Budget of the study → tokens its runs were trained on."""
    losses: Mapping[int, Losses]
    """Budget of the study → losses of the complete runs; nothing for a budget without one."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The losses of an arm at some number of tokens."""

    losses: Losses
    between: tuple[int, int] | None
    """Tokens of the two runs it was read between; None: these are the runs themselves."""


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Two arms at equal cost, or why they cannot be compared there."""

    contrast: Contrast | None = None
    """left − right per seed; None: not measured."""
    left_tokens: float | None = None
    """Tokens of the left arm at which it is compared."""
    right_tokens: float | None = None
    """Tokens of the right arm."""
    interpolated: str | None = None
    """The arm that was read between its runs; None: both stand at runs."""
    between: tuple[int, int] | None = None
    """Tokens of these runs."""
    loo_error: float | None = None
    """Leave-one-out error of reading that arm's curve (see `leave_one_out`)."""
    residual: float | None = None
    """Cost of the right arm ÷ cost of the left − 1, where runs are taken as equal although rounding is left."""
    reason: str | None = None
    """Why it is not measured."""


def read_at(curve: Curve, tokens: float, budgets: Iterable[int]) -> Reading | str:
    """The losses at `tokens`, or why there are none, using runs of `budgets` alone.

    At a measured number of tokens the runs themselves; between neighbours lo < tokens < hi with hi ≤ MAX_RATIO · lo,
    for each seed that has both, loss(lo) + (loss(hi) − loss(lo)) · ln(tokens ÷ lo) ÷ ln(hi ÷ lo).

    >>> curve = Curve(arm="a", tokens={1: 100, 2: 200}, losses={1: {0: 4.0}, 2: {0: 3.0}})
    >>> round(read_at(curve, 100 * 2**0.5, (1, 2)).losses[0], 6)
    3.5
    """
    points = _points(curve, budgets)
    for at, losses in points:
        if abs(tokens - at) <= SAME * at:
            return Reading(losses=losses, between=None)
    needs = f"{curve.arm} would need {_count(tokens)} tokens"
    if not points:
        return f"{curve.arm} has no complete run"
    if tokens < points[0][0] or tokens > points[-1][0]:
        measured = _count(points[0][0])
        measured += f" to {_count(points[-1][0])}" if len(points) > 1 else " alone"
        return f"{needs}, outside the measured range ({measured})"
    index = next(i for i, (at, _) in enumerate(points) if at > tokens)
    (low, at_low), (high, at_high) = points[index - 1], points[index]
    if high > MAX_RATIO * low:
        return f"{needs}, between runs {high / low:.2g} times apart ({_count(low)} and {_count(high)}; at most 2.2)"
    losses = _between(low, at_low, high, at_high, tokens)
    return Reading(losses=losses, between=(low, high)) if losses else f"{needs}: no seed has both neighbouring runs"


def leave_one_out(curve: Curve, budgets: Iterable[int]) -> float | None:
    """The largest error, over seeds and inner points, of reading a run's own loss between its two neighbours.

    Each inner point is left out and read from the points beside it, which lie further apart than any interval that is
    really used: an indication of the error, and no bound where the curve bends most. None below three points.
    """
    points = _points(curve, budgets)
    errors = [
        abs(read - points[i][1][seed])
        for i in range(1, len(points) - 1)
        for seed, read in _between(*points[i - 1], *points[i + 1], points[i][0]).items()
        if seed in points[i][1]
    ]
    return max(errors, default=None)


def meet(
    left: Curve,
    right: Curve,
    budget: int,
    *,
    costs: tuple[float, float],
    budgets: Sequence[int],
    seeds: Iterable[int],
    alpha: float = 0.05,
    declared: bool = False,
    readable: bool = True,
) -> Meeting:
    """The contrast left − right at equal cost, near `budget`; `costs` is what one token costs each arm, in one unit.

    Where the runs at `budget` cost the same, or were `declared` to (an own budget, a match on FLOPs), they are taken
    themselves, and the residual is stated. Otherwise left stands at its run and right is read from its curve; where
    that leaves its measured range, right stands at its run and left is read. With `readable` false nothing is read.
    Runs of `budgets` and `seeds` alone are used.
    """
    cost_left, cost_right = costs
    seeds = set(seeds)
    spent = (cost_left * left.tokens[budget], cost_right * right.tokens[budget])
    residual = spent[1] / spent[0] - 1
    if declared or abs(residual) <= SAME:
        sides = (left.losses.get(budget, {}), right.losses.get(budget, {}))
        contrast = _contrast(*sides, seeds, alpha)
        if contrast.n == 0:
            return Meeting(reason=f"no seed has complete runs of both {left.arm} and {right.arm}")
        at = (left.tokens[budget], right.tokens[budget])
        return Meeting(contrast=contrast, left_tokens=at[0], right_tokens=at[1], residual=residual)
    if not readable:
        return Meeting(reason="the schedule does not decay, so the ends of runs are no points of one curve")
    reasons = []
    for still, moving, tokens in (
        (left, right, spent[0] / cost_right),
        (right, left, spent[1] / cost_left),
    ):
        reading = read_at(moving, tokens, budgets)
        if isinstance(reading, str):
            reasons.append(reading)
            continue
        sides = (still.losses.get(budget, {}), reading.losses)
        contrast = _contrast(*(sides if still is left else sides[::-1]), seeds, alpha)
        if contrast.n == 0:
            reasons.append(f"no seed has complete runs of both {left.arm} and {right.arm}")
            continue
        at_both = (still.tokens[budget], tokens) if still is left else (tokens, still.tokens[budget])
        return Meeting(
            contrast=contrast,
            left_tokens=at_both[0],
            right_tokens=at_both[1],
            interpolated=moving.arm if reading.between else None,
            between=reading.between,
            loo_error=leave_one_out(moving, budgets) if reading.between else None,
        )
    return Meeting(reason="; ".join(dict.fromkeys(reasons)))


def winner(meeting: Meeting, left: str, right: str) -> tuple[str | None, bool]:
    """The arm with the lower mean (None: not measured, or equal), and whether the 95 % interval excludes 0."""
    contrast = meeting.contrast
    if contrast is None or not contrast.mean:
        return None, False
    clear = contrast.ci_low is not None and contrast.ci_high is not None and contrast.ci_low * contrast.ci_high > 0
    return left if contrast.mean < 0 else right, clear


def flips(winners: Mapping[str, tuple[str | None, bool]]) -> list[dict[str, Any]]:
    """The pairs of contracts under which different arms are ahead; `clear` when both intervals exclude 0.

    >>> flips({"tokens": ("moe", True), "train_flops": ("dense", True), "seconds": (None, False)})
    [{'between': ['tokens', 'train_flops'], 'clear': True}]
    """
    names = [name for name, (arm, _) in winners.items() if arm]
    return [
        {"between": [one, other], "clear": winners[one][1] and winners[other][1]}
        for index, one in enumerate(names)
        for other in names[index + 1 :]
        if winners[one][0] != winners[other][0]
    ]


def table(meeting: Meeting, expected_n: int, left: str, right: str) -> dict[str, Any]:
    """A meeting as plain JSON values: a cell of "contracts" in results.json."""
    arm, clear = winner(meeting, left, right)
    names = ("left_tokens", "right_tokens", "interpolated", "loo_error", "residual", "reason")
    empty = dict.fromkeys(("mean", "sd", "ci_low", "ci_high")) | {"n": 0, "per_seed": {}}
    contrast = dump(meeting.contrast) if meeting.contrast else empty
    return {
        **{name: contrast[name] for name in empty},
        "expected_n": expected_n,
        "winner": arm,
        "clear": clear,
        **{name: getattr(meeting, name) for name in names},
        "between": list(meeting.between) if meeting.between else None,
    }


def _points(curve: Curve, budgets: Iterable[int]) -> list[tuple[int, Losses]]:
    """Tokens and losses of the budgets that have any, by rising tokens, each number of tokens once."""
    found = {curve.tokens[budget]: curve.losses[budget] for budget in budgets if curve.losses.get(budget)}
    return sorted(found.items(), key=lambda point: point[0])


def _contrast(left: Losses, right: Losses, seeds: set[int], alpha: float) -> Contrast:
    own = [{seed: loss for seed, loss in side.items() if seed in seeds} for side in (left, right)]
    return paired_contrast(own[0], own[1], alpha=alpha)


def _between(low: float, at_low: Losses, high: float, at_high: Losses, tokens: float) -> dict[int, float]:
    share = math.log(tokens / low) / math.log(high / low)
    return {seed: at_low[seed] + (at_high[seed] - at_low[seed]) * share for seed in at_low if seed in at_high}


def _count(tokens: float) -> str:
    return f"{tokens:,.0f}"
