"""The learning rate as a pure function of the step: nothing is stored, so nothing can be lost on resume."""

from __future__ import annotations

import math

from equipoise.spec.recipe import WSD, Cosine


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
    wanted = max(1, math.floor(schedule.decay_frac * num_steps + 0.5)) if schedule.decay_frac > 0 else 0
    decay = min(wanted, num_steps - warmup)
    into = step + 1 - (num_steps - decay)
    if into <= 0:
        return peak
    return peak * (1 + (schedule.final_frac - 1) * into / decay)
