"""How long runs and studies take: seconds from measured rates, the order of runs, the share of curve evaluations.

Pure arithmetic. Not for: measuring (`bench`), or starting what measures (`probe`).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from equipoise.accounting import count_flops
from equipoise.schedule import eval_steps
from equipoise.spec.recipe import Recipe
from equipoise.spec.run import RunConfig
from equipoise.trunk import TrunkConfig

MAX_CURVE_SHARE: Final = 0.05
"""Share of a run's training that its curve may cost before `plan` warns: beyond it, runs wait for pictures."""
SAMPLED_POINTS: Final = 4
"""Samples are written at a quarter, half, three quarters and the end of a run."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a probe measured of one arm, other runs being at work beside it."""

    start_s: float
    """Seconds from starting a process to its first update."""
    update_s: float
    """Seconds of one update."""
    score_token_s: float
    """Seconds of scoring one token."""
    sample_token_s: float
    """Seconds of writing one token of a sample."""


@dataclass(frozen=True, kw_only=True)
class RunTime:
    """Seconds of one run, by what they are spent on."""

    start_s: float
    """Imports, model, first touch of everything."""
    updates_s: float
    """Training."""
    curve_s: float
    """Points of the curve."""
    samples_s: float
    """Samples along the way."""
    final_s: float
    """Scoring the final weights on the whole evaluation set, of a member of a sweep on the selection split too; once
    more where the best ones are others, not counted."""

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.start_s + self.updates_s + self.curve_s + self.samples_s + self.final_s


def run_time(
    recipe: Recipe, num_steps: int, eval_tokens: int | None, rates: Rates, selection_tokens: int | None = 0
) -> RunTime:
    """Estimated seconds of a run of `num_steps` updates.

    `eval_tokens` is the size of the evaluation split, `selection_tokens` that of the selection split where the run is
    scored on it too; None where a size is not known, and then the final scoring counts only as far as the recipe
    bounds it.
    """
    bound = recipe.eval_tokens or None
    splits = [[size for size in (tokens, bound) if size is not None] for tokens in (eval_tokens, selection_tokens)]
    return RunTime(
        start_s=rates.start_s,
        updates_s=rates.update_s * num_steps,
        curve_s=rates.score_token_s * curve_targets(recipe, num_steps, eval_tokens),
        samples_s=rates.sample_token_s * SAMPLED_POINTS * len(recipe.samples.prompts) * recipe.samples.num_tokens,
        final_s=rates.score_token_s * sum(min(known, default=0) for known in splits),
    )


def with_trunk(whole: Sequence[RunTime], steps: Sequence[int], branches: Sequence[int]) -> list[RunTime]:
    """What one arm and seed take instead of `whole` (one entry a budget) where budgets share a trunk: it, and branches.

    `steps` are those of the budgets, `branches` where each branches off (0 = it shares nothing).
    """
    longest = max(range(len(steps)), key=lambda index: branches[index])
    share = branches[longest] / steps[longest]
    trunk = replace(
        whole[longest],
        updates_s=whole[longest].updates_s * share,
        curve_s=whole[longest].curve_s * share,
        samples_s=0.0,
        final_s=0.0,
    )
    rest = [1 - branch / step for branch, step in zip(branches, steps, strict=True)]
    return [
        trunk,
        *(
            replace(run, updates_s=run.updates_s * left, curve_s=run.curve_s * left)
            for run, left in zip(whole, rest, strict=True)
        ),
    ]


def curve_targets(recipe: Recipe, num_steps: int, eval_tokens: int | None = None) -> int:
    """Tokens that all points of a run's curve score together, the one before the first update included."""
    points = len(eval_steps(num_steps, recipe))
    return points * (recipe.curve_tokens if eval_tokens is None else min(recipe.curve_tokens, eval_tokens))


def curve_share(recipe: Recipe, num_steps: int, eval_tokens: int | None = None) -> float:
    """FLOPs of a run's curve ÷ FLOPs of its training, where a trained token costs three scored ones."""
    return curve_targets(recipe, num_steps, eval_tokens) / (3 * num_steps * recipe.batch_tokens)


def affordable_curve_tokens(recipe: Recipe, num_steps: int) -> int:
    """The largest `recipe.curve_tokens` with which the curve costs at most `MAX_CURVE_SHARE` of the training.

    >>> from equipoise.spec.recipe import Optim
    >>> recipe = Recipe(seq_len=100, batch_tokens=1000, balance_group=1, num_evals=19, optim=Optim(lr=1e-3))
    >>> affordable_curve_tokens(recipe, 200)
    1500
    """
    points = len(eval_steps(num_steps, recipe))
    return int(MAX_CURVE_SHARE * 3 * num_steps * recipe.batch_tokens / points + 1e-9)


def run_flops(run: RunConfig | TrunkConfig) -> int:
    """Training FLOPs of a run or a trunk."""
    return run.num_steps * run.recipe.batch_tokens * count_flops(run.model, run.recipe.seq_len).training


def longest_first(runs: Sequence[RunConfig | TrunkConfig]) -> list[int]:
    """Indices of `runs` by falling training FLOPs, equal ones as they stand: no long run is left to the end, when the
    other cores would have nothing to do (Graham 1969, longest processing time first).
    """
    return sorted(range(len(runs)), key=lambda index: -run_flops(runs[index]))


def makespan(seconds: Sequence[float], num_jobs: int) -> float:
    """When the last of these runs ends, started in this order, `num_jobs` at a time, each as soon as there is a place.

    >>> makespan([4, 1, 1, 1, 1], 2), makespan([1, 1, 1, 1, 4], 2)
    (4, 6)
    """
    free_at: list[float] = [0] * min(num_jobs, len(seconds))
    for length in seconds:
        heapq.heapreplace(free_at, free_at[0] + length)
    return max(free_at, default=0)
