"""The order of runs, when the last one ends, and what a curve costs."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from equipoise.estimate import affordable_curve_tokens, curve_share, longest_first, makespan
from equipoise.spec.recipe import WSD
from equipoise.spec.study import load_study_table, parse_study


def test_the_longest_run_starts_first(tiny: Any) -> None:
    """By FLOPs: the larger budget before the smaller, at one budget the costlier arm; equal ones as declared."""
    dense, moe = (next(run for run in tiny.runs if run.arm == arm) for arm in ("dense", "moe"))
    wide = dataclasses.replace(moe, arm="wide", model=dataclasses.replace(moe.model, num_layers=3))
    runs = [
        dense,
        dataclasses.replace(dense, budget=51_200),
        wide,
        dataclasses.replace(dense, seed=1),
        dataclasses.replace(wide, budget=51_200),
    ]
    assert longest_first(runs) == [4, 1, 2, 0, 3]
    assert longest_first([]) == []


@pytest.mark.parametrize("lengths", [(5, 3, 3, 2, 2, 1), (4, 4, 1), (7,), (1, 2, 3, 4, 5), ()])
@pytest.mark.parametrize("jobs", [1, 2, 3, 10])
def test_the_end_is_that_of_a_clock_that_ticks(lengths: tuple[int, ...], jobs: int) -> None:
    waiting, running, now = list(lengths), [], 0
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(waiting.pop(0))
        now += 1
        running = [left - 1 for left in running if left > 1]
    assert makespan(lengths, jobs) == now


def test_longest_first_is_never_far_from_the_best_order() -> None:
    """Graham's bound for two places, 7/6, against every order there is."""
    lengths = (7, 6, 5, 4, 3, 2)
    best = min(makespan(order, 2) for order in itertools.permutations(lengths))
    assert best == 14 and makespan(lengths, 2) <= 7 / 6 * best


def test_a_curve_costs_a_third_a_token() -> None:
    recipe = dataclasses.replace(
        parse_study(load_study_table("quick")[0]).recipe, num_evals=9, curve_tokens=600, batch_tokens=1024
    )
    # 10 points of 600 tokens against 100 updates of 1,024 that cost three times as much a token
    assert curve_share(recipe, 100) == pytest.approx(6000 / 307_200)
    assert curve_share(recipe, 100, eval_tokens=60) == pytest.approx(600 / 307_200)
    assert curve_share(recipe, 4) == pytest.approx(5 * 600 / (3 * 4096))  # no more points than updates
    most = affordable_curve_tokens(recipe, 100)
    for tokens, fits in ((most, True), (most + 1, False)):
        assert (curve_share(dataclasses.replace(recipe, curve_tokens=tokens), 100) <= 0.05) == fits


def test_a_curve_of_nested_points_has_as_many_as_it_has() -> None:
    """WSD: 100 updates, at least 9 points: every 8th update and the last, 13 of them, and the one before the first."""
    recipe = parse_study(load_study_table("quick")[0]).recipe
    recipe = dataclasses.replace(recipe, num_evals=9, curve_tokens=600, schedule=WSD(warmup_tokens=0))
    assert curve_share(recipe, 100) == pytest.approx(14 * 600 / 307_200)
    assert affordable_curve_tokens(recipe, 100) == int(0.05 * 307_200 / 14)
