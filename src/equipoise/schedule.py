"""What happens at which step, as pure functions: the learning rate, evaluations, samples, where a budget branches off.

Nothing is stored, so nothing can be lost on resume.
"""

from __future__ import annotations

import math

from equipoise.spec.recipe import WSD, Cosine, Recipe


def warmup_steps(num_steps: int, batch_tokens: int, schedule: Cosine | WSD) -> int:
    """Steps of linear warm-up: at least 1 (so that no update has learning rate 0), at most `num_steps`."""
    if isinstance(schedule, Cosine):
        wanted = math.floor(schedule.warmup_frac * num_steps + 0.5)
    else:
        wanted = (2 * schedule.warmup_tokens + batch_tokens) // (2 * batch_tokens)
    return min(max(1, wanted), num_steps)


def learning_rate(step: int, num_steps: int, batch_tokens: int, peak: float, schedule: Cosine | WSD) -> float:
    """Learning rate of update `step` (0-based, 0 ≤ step < num_steps).

    Warm-up rises linearly and reaches `peak` at its last step. Cosine then falls to `final_frac · peak` at the last
    step; WSD stays at `peak` and falls linearly over the last `decay_frac` of the steps, at least one unless that is 0.
    So the last update has the final rate whenever a step is left after the warm-up. Raises ValueError for other steps.

    >>> learning_rate(0, 10, 1, 1.0, Cosine(warmup_frac=0.2, final_frac=0.1))
    0.5
    """
    if not 0 <= step < num_steps:
        raise ValueError(f"step = {step} is not accepted; expected 0 to {num_steps - 1}")
    warmup = warmup_steps(num_steps, batch_tokens, schedule)
    if step < warmup:
        return peak * (step + 1) / warmup
    if isinstance(schedule, Cosine):
        progress = (step + 1 - warmup) / (num_steps - warmup)
        return peak * (schedule.final_frac + (1 - schedule.final_frac) * 0.5 * (1 + math.cos(math.pi * progress)))
    decay = _decay_steps(num_steps, warmup, schedule)
    into = step + 1 - (num_steps - decay)
    if into <= 0:
        return peak
    return peak * (1 + (schedule.final_frac - 1) * into / decay)


def _decay_steps(num_steps: int, warmup: int, schedule: WSD) -> int:
    wanted = max(1, math.floor(schedule.decay_frac * num_steps + 0.5)) if schedule.decay_frac > 0 else 0
    return min(wanted, num_steps - warmup)


def branch_step(num_steps: int, batch_tokens: int, schedule: Cosine | WSD) -> int:
    """Updates that a run has in common with every longer run of its arm and seed: warm-up and stable part of WSD.

    0 when there are none: another schedule, or a budget that ends within the warm-up.
    """
    if isinstance(schedule, Cosine) or warmup_steps(num_steps + 1, batch_tokens, schedule) > num_steps:
        return 0
    return num_steps - _decay_steps(num_steps, warmup_steps(num_steps, batch_tokens, schedule), schedule)


# ------------------------------------------------------------------------------------------------ points


def eval_steps(num_steps: int, recipe: Recipe) -> frozenset[int]:
    """Steps with an evaluation: 0, and evenly spaced ones of which the last is `num_steps`.

    There are `num_evals` of them beyond 0. With WSD they are the multiples of a power of two, the largest that gives
    at least `num_evals` (so less than twice as many): the points of a budget are then points of every smaller budget
    as far as that goes, which is what lets budgets share a trunk.
    """
    if isinstance(recipe.schedule, WSD):
        return frozenset({0}) | _nested(num_steps, recipe.num_evals)
    points = min(recipe.num_evals, num_steps)  # more would fall on the same steps
    return frozenset({0, *(round(num_steps * i / points) for i in range(1, points + 1))})


def sample_steps(num_steps: int, recipe: Recipe) -> frozenset[int]:
    """Evaluation steps at which samples are written: those nearest a quarter, half, three quarters, and the end.

    With WSD the nested points that are at least four (see `eval_steps`), or all if there are fewer evaluations.
    """
    if isinstance(recipe.schedule, WSD):
        return _nested(num_steps, min(4, recipe.num_evals))
    points = sorted(eval_steps(num_steps, recipe) - {0})
    return frozenset(min(points, key=lambda step: abs(step - num_steps * q / 4)) for q in (1, 2, 3, 4))


def _nested(num_steps: int, points: int) -> frozenset[int]:
    """Multiples of the largest power of two that fits `points` times into `num_steps` (1 if none does), and the end."""
    spacing = 1 << max(0, (num_steps // points).bit_length() - 1)
    return frozenset({*range(spacing, num_steps, spacing), num_steps})
