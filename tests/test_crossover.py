"""Crossovers against NumPy's fit, hand-worked lines, and SciPy's interval."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats as scipy_stats

from equipoise.crossover import crossing, crossovers

TOKENS = {1000: 1024, 2000: 2048, 4000: 4096}
TRAINED = {(arm, budget): tokens for arm in "ab" for budget, tokens in TOKENS.items()}


def rows(*seeds: list[float], **fields: Any) -> list[dict[str, Any]]:
    """A gap row per budget from a list of gaps per seed."""
    head = {"left": "a", "right": "b", "metric": "val_loss", "post_hoc": False, "expected_n": len(seeds), **fields}
    return [
        {**head, "budget": budget, "per_seed": {seed: gaps[place] for seed, gaps in enumerate(seeds)}}
        for place, budget in enumerate(TOKENS)
    ]


def test_a_crossing_is_the_root_of_numpys_line() -> None:
    gaps = [-0.05, 0.01, 0.02]
    slope, intercept = np.polyfit(np.log(list(TOKENS.values())), gaps, 1)
    at, where = crossing(list(TOKENS.values()), gaps)
    assert (at, where) == (pytest.approx(math.exp(-intercept / slope)), "within")


@pytest.mark.parametrize(
    ("gaps", "where"),
    [
        ([0.3, 0.2, 0.1], "above"),
        ([-0.1, -0.2, -0.3], "below"),
        ([0.1, 0.1, 0.1], "never"),
        ([0.0, 0.0, 0.0], "never"),
    ],
)
def test_beyond_the_measured_range_there_is_no_number(gaps: list[float], where: str) -> None:
    assert crossing(list(TOKENS.values()), gaps) == (None, where)


def test_a_crossing_at_an_end_is_within() -> None:
    at, where = crossing([1024, 4096], [0.0, 0.2])
    assert (at, where) == (pytest.approx(1024), "within")


def test_seeds_that_all_cross_have_a_mean_with_scipys_interval_on_ln_tokens() -> None:
    (row,) = crossovers(rows([-0.2, 0.0, 0.2], [-0.1, 0.1, 0.3], [-0.21, 0.01, 0.2]), TRAINED, 0.95)
    logs = [math.log(row["per_seed"][seed]) for seed in range(3)]
    assert row["per_seed"][0] == pytest.approx(2048) and row["per_seed"][1] == pytest.approx(1024 * math.sqrt(2))
    low, high = scipy_stats.t.interval(0.95, 2, np.mean(logs), scipy_stats.sem(logs))
    assert row["mean"] == pytest.approx(math.exp(np.mean(logs)))
    assert (row["ci_low"], row["ci_high"]) == pytest.approx((math.exp(low), math.exp(high)))
    (wide,) = crossovers(rows([-0.2, 0.0, 0.2], [-0.05, 0.15, 0.35]), TRAINED, 0.95)
    assert wide["mean"] and (wide["ci_low"], wide["ci_high"]) == (None, None)  # beyond the measured range
    assert (row["median"], row["low"], row["high"]) == pytest.approx(
        (math.exp(np.median(logs)), math.exp(min(logs)), math.exp(max(logs)))
    )
    assert (row["n"], row["expected_n"], row["budgets"]) == (3, 3, [1000, 2000, 4000])


def test_a_seed_beyond_leaves_a_median_and_an_open_range() -> None:
    within, above = [-0.2, 0.0, 0.2], [-0.3, -0.2, -0.1]
    (row,) = crossovers(rows(within, within, above), TRAINED, 0.95)
    assert row["where"] == {0: "within", 1: "within", 2: "above"} and row["per_seed"][2] is None
    assert (row["median"], row["low"], row["high"]) == (pytest.approx(2048), pytest.approx(2048), None)
    assert row["mean"] is None and row["ci_low"] is None
    (row,) = crossovers(rows(within, above, above), TRAINED, 0.95)
    assert (row["median"], row["high"]) == (None, None)
    (row,) = crossovers(rows(within, within, [0.1, 0.1, 0.1]), TRAINED, 0.95)
    assert (row["median"], row["low"], row["where"][2]) == (None, None, "never")


def test_only_seeds_with_every_budget_count() -> None:
    gaps = rows([-0.2, 0.0, 0.2], [-0.2, 0.0, 0.2])
    del gaps[1]["per_seed"][0]
    (row,) = crossovers(gaps, TRAINED, 0.95)
    assert (row["n"], row["expected_n"], row["ci_low"]) == (1, 2, None) and row["mean"] == pytest.approx(2048)
    for gap in gaps:
        gap["per_seed"] = {}
    (row,) = crossovers(gaps, TRAINED, 0.95)
    assert (row["n"], row["median"], row["mean"]) == (0, None, None)


def test_what_came_late_has_a_row_of_its_own_and_one_budget_has_none() -> None:
    assert crossovers(rows([-0.2, 0.0, 0.2])[:1], TRAINED, 0.95) == []
    declared = rows([-0.2, 0.0, 0.2])
    late = rows([-0.2, 0.0, 0.2], [-0.1, 0.1, 0.3], post_hoc=True)
    assert [(row["post_hoc"], row["n"]) for row in crossovers([*declared, *late], TRAINED, 0.95)] == [
        (False, 1),
        (True, 2),
    ]
    added = [*declared[:2], {**declared[2], "post_hoc": True}]
    assert [row["budgets"] for row in crossovers(added, TRAINED, 0.95)] == [[1000, 2000], [1000, 2000, 4000]]
