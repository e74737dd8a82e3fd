"""Means, paired contrasts, tests, Holm's adjustment, fits over budgets: arithmetic on numbers per seed.

Not for: deciding anything (`verdict`), nor for resampling documents (`sampling`). The unit of evidence is the seed.
Every function either returns finite numbers, or None where the seeds are too few for the number to exist.

The tests work on whole arrays of studies at once, so that what is simulated is the very code that judges.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtr, stdtrit

Array = NDArray[np.float64]

ROUNDING: Final = 8 * float(np.finfo(np.float64).eps)
"""Relative size of a spread that is only float64 rounding: a difference of two decimals is off by up to 2 eps."""

EQUAL: Final = 1e-12
"""Without spread, a mean this near the tested value (nats or bits) equals it: above rounding, below any digit shown."""


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """The paired difference left − right over the seeds both arms have."""

    n: int
    """Seeds both arms have."""
    mean: float | None
    """Mean difference; None without a seed."""
    sd: float | None
    """Standard deviation of the differences (n − 1); None below two seeds."""
    ci_low: float | None
    """Lower end of the two-sided t interval of the mean, not adjusted for other contrasts; None below two seeds."""
    ci_high: float | None
    """Upper end of that interval."""
    confidence: float
    """Its confidence."""
    noise_floor: float | None
    """Smallest mean gap that these seeds could support: t at 1 − alpha, n − 1 df, × sd ÷ √n; None below two seeds."""
    per_seed: Mapping[int, float]
    """The difference of each seed, by rising seed."""


def mean_sd(values: Iterable[float]) -> tuple[float | None, float | None, int]:
    """Mean (None without a value), standard deviation with n − 1 (None below two values), and n.

    Both are correctly rounded, so equal values have a standard deviation of exactly 0. Raises ValueError for a value
    that is not finite.

    >>> mean_sd([1.0, 2.0, 3.0])
    (2.0, 1.0, 3)
    """
    numbers = [float(value) for value in values]
    for number in numbers:
        if not math.isfinite(number):
            raise ValueError(f"mean and sd: {number} is not accepted; expected finite numbers")
    mean = statistics.mean(numbers) if numbers else None
    return mean, statistics.stdev(numbers) if len(numbers) > 1 else None, len(numbers)


def paired_contrast(
    left_by_seed: Mapping[int, float],
    right_by_seed: Mapping[int, float],
    confidence: float = 0.95,
    *,
    alpha: float = 0.05,
) -> Contrast:
    """The contrast left − right on the seeds that both arms have; seeds of one arm alone are ignored.

    `confidence` is that of the two-sided interval, `alpha` the level of the noise floor. A spread that is nothing but
    float64 rounding counts as 0. Raises ValueError for a value that is not finite or a level outside (0, 1).

    >>> paired_contrast({0: 1.0, 1: 2.0, 2: 9.0}, {0: 0.5, 1: 1.0}).per_seed
    {0: 0.5, 1: 1.0}
    """
    for name, level in (("confidence", confidence), ("alpha", alpha)):
        if not 0 < level < 1:
            raise ValueError(f"{name} = {level} is not accepted; expected between 0 and 1")
    seeds = sorted(left_by_seed.keys() & right_by_seed.keys())
    per_seed = {seed: float(left_by_seed[seed]) - float(right_by_seed[seed]) for seed in seeds}
    mean, sd, n = mean_sd(per_seed.values())
    ci_low = ci_high = noise_floor = None
    if mean is not None and sd is not None:
        largest = max(abs(float(side[seed])) for side in (left_by_seed, right_by_seed) for seed in seeds)
        sd = 0.0 if sd <= ROUNDING * largest else sd
        error = sd / math.sqrt(n)
        half = float(stdtrit(n - 1, (1 + confidence) / 2)) * error
        ci_low, ci_high = mean - half, mean + half
        noise_floor = float(stdtrit(n - 1, 1 - alpha)) * error
    return Contrast(
        n=n,
        mean=mean,
        sd=sd,
        ci_low=ci_low,
        ci_high=ci_high,
        confidence=confidence,
        noise_floor=noise_floor,
        per_seed=per_seed,
    )


# ------------------------------------------------------------------------------------------------ tests


def p_below(mean: ArrayLike, sd: ArrayLike, n: int, shift: float) -> Array:
    """p of the one-sided t test of H0 "true mean ≥ shift" against "below shift", n − 1 degrees of freedom.

    `mean` and `sd` (n − 1) have the shape of the answer, one entry a study. Without spread (sd = 0) p is 0 when the
    mean lies below the shift and 1 when it lies above or is equal. Raises ValueError below two values.

    >>> float(p_below(-1.0, 0.0, 3, 0.0)), float(p_below(0.0, 1.0, 3, 0.0))
    (0.0, 0.5)
    """
    if n < 2:
        raise ValueError(f"t test: n = {n} is not accepted; expected 2 or more")
    distance = np.asarray(mean, dtype=np.float64) - shift
    error = np.asarray(sd, dtype=np.float64) / math.sqrt(n)
    spread = error > 0
    with np.errstate(over="ignore"):  # a spread near the smallest float: t is then infinite, and p rightly 0 or 1
        t = distance / np.where(spread, error, 1.0)
    p: Array = np.where(spread, stdtr(n - 1, t), np.where(distance < -EQUAL, 0.0, 1.0))
    return p


def p_above(mean: ArrayLike, sd: ArrayLike, n: int, shift: float) -> Array:
    """p of the one-sided t test of H0 "true mean ≤ shift" against "above shift"; the mirror image of `p_below`."""
    return p_below(-np.asarray(mean, dtype=np.float64), sd, n, -shift)


def p_within(mean: ArrayLike, sd: ArrayLike, n: int, margin: float) -> Array:
    """p of equivalence within ±margin: the larger of the two one-sided tests (Schuirmann's TOST)."""
    return np.maximum(p_above(mean, sd, n, -margin), p_below(mean, sd, n, margin))


def p_outside(mean: ArrayLike, sd: ArrayLike, n: int, margin: float) -> Array:
    """p against equivalence: twice the smaller test of H0 "mean ≤ margin" and H0 "mean ≥ −margin", at most 1."""
    smaller: Array = np.minimum(p_above(mean, sd, n, margin), p_below(mean, sd, n, -margin))
    return np.minimum(1.0, 2 * smaller)


def holm(p_values: ArrayLike) -> Array:
    """Holm's step-down adjusted p-values along the last axis, in the order given: monotone in p, at most 1.

    The i-th smallest of m (from 0) is multiplied by m − i and is at least the adjusted value before it (Holm 1979).

    >>> holm([0.01, 0.04, 0.03]).round(4).tolist()
    [0.03, 0.06, 0.06]
    """
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p, axis=-1, kind="stable")
    steps = np.arange(p.shape[-1], 0, -1)
    scaled = np.minimum(1.0, steps * np.take_along_axis(p, order, axis=-1))
    adjusted: Array = np.empty_like(p)
    np.put_along_axis(adjusted, order, np.maximum.accumulate(scaled, axis=-1), axis=-1)
    return adjusted


# ------------------------------------------------------------------------------------------------ over budgets


def fit_line(x_B: ArrayLike, y_B: ArrayLike) -> tuple[Array, Array]:
    """Slope and mean height of the least-squares line through B points (x, y), B ≥ 2, at least two different x.

    `y_B` may have leading axes, one fit each: the height is the mean of y along the last axis, which the line has at
    the mean of x. Differences of y that are only float64 rounding may leave a slope of that order. Raises ValueError
    when no two x differ.

    >>> slope, height = fit_line([0.0, 1.0, 2.0], [1.0, 3.0, 5.0])
    >>> float(slope), float(height)
    (2.0, 3.0)
    """
    x, y = np.asarray(x_B, dtype=np.float64), np.asarray(y_B, dtype=np.float64)
    centred = x - x.mean()
    spread = float((centred**2).sum())
    if spread == 0:
        raise ValueError(f"line: x = {x.tolist()} is not accepted; expected two different values or more")
    height: Array = np.asarray(y.mean(axis=-1))
    slope: Array = np.asarray(((y - height[..., None]) * centred).sum(axis=-1) / spread)
    return slope, height


def first_reach(x_B: ArrayLike, y_B: ArrayLike, target: ArrayLike) -> tuple[Array, NDArray[np.bool_]]:
    """The smallest x at which a curve, linear between its points, is at most `target`; and whether that is a bound.

    `x_B` rises. `y_B` may have leading axes, one curve each, and `target` is one number a curve. A curve that is below
    the target already at its first point reached it at that x or before: the x is then an upper bound. NaN where the
    curve never comes down to the target.

    >>> x, bound = first_reach([0.0, 1.0, 2.0], [5.0, 3.0, 2.0], 4.0)
    >>> float(x), bool(bound)
    (0.5, False)
    """
    x, y = np.asarray(x_B, dtype=np.float64), np.asarray(y_B, dtype=np.float64)
    goal = np.asarray(target, dtype=np.float64)[..., None]
    below = y <= goal
    place = np.argmax(below, axis=-1)[..., None]
    before = np.maximum(place - 1, 0)
    high, low = np.take_along_axis(y, before, axis=-1), np.take_along_axis(y, place, axis=-1)
    drop = np.where(high > low, high - low, 1.0)
    share = np.where(place > 0, (high - goal) / drop, 0.0)
    reached = x[before] + share * (x[place] - x[before])
    found: Array = np.where(below.any(axis=-1), reached[..., 0], np.nan)
    return found, y[..., 0] < goal[..., 0]


def welch_interval(
    first: Iterable[float], second: Iterable[float], confidence: float
) -> tuple[float, float | None, float | None]:
    """Mean of `second` less mean of `first`, and its two-sided interval by Welch's t, the two taken as independent.

    The ends are None where a side has fewer than two values. Source: Welch, Biometrika 34 (1947), with Satterthwaite's
    degrees of freedom. Raises ValueError for an empty side.
    """
    sides = [mean_sd(values) for values in (first, second)]
    means, spreads, counts = zip(*sides, strict=True)
    if None in means:
        raise ValueError("Welch's interval: a side without values; expected at least one each")
    difference = float(means[1]) - float(means[0])
    if None in spreads:
        return difference, None, None
    parts = [float(sd) ** 2 / n for sd, n in zip(spreads, counts, strict=True)]
    variance = sum(parts)
    if variance == 0:
        return difference, difference, difference
    freedom = variance**2 / sum(part**2 / (n - 1) for part, n in zip(parts, counts, strict=True))
    half = float(stdtrit(freedom, (1 + confidence) / 2)) * math.sqrt(variance)
    return difference, difference - half, difference + half
