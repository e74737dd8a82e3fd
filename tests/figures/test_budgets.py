"""The gap against the budget: what is drawn where, in one frame for all contrasts."""

from __future__ import annotations

from typing import Any

import pytest

from equipoise.figures import gap_over_budgets, gaps_of, style


def gap(left: str, right: str, budget: int, per_seed: list[float], **other: Any) -> dict[str, Any]:
    mean = sum(per_seed) / len(per_seed)
    return {
        "left": left,
        "right": right,
        "budget": budget,
        "metric": "val_loss",
        "post_hoc": False,
        "mean": mean,
        "ci_low": mean - 0.5,
        "ci_high": mean + 0.5,
        "per_seed": {str(seed): value for seed, value in enumerate(per_seed)},
    } | other


@pytest.fixture
def results() -> dict[str, Any]:
    crossing = {"left": "a", "right": "_b", "metric": "val_loss", "post_hoc": False, "per_seed": {"0": 2e6, "1": 3e6}}
    return {
        "arms": [{"name": name} for name in ("a", "_b", "$c_$")],
        "gaps": [
            gap("a", "_b", 1_000_000, [1.0, 2.0]),
            gap("a", "_b", 4_000_000, [-1.0, -3.0]),
            gap("a", "_b", 1_000_000, [7.0, 7.0], post_hoc=True),
            gap("a", "_b", 8_000_000, [-4.0, -4.0], post_hoc=True),
            gap("a", "_b", 4_000_000, [99.0], metric="val_bpb"),
            gap("_b", "$c_$", 1_000_000, [9.0], ci_low=None, ci_high=None),
            gap("_b", "$c_$", 4_000_000, [0.0], mean=None),
        ],
        "crossovers": [{**crossing, "mean": 2.4e6, "ci_low": 1.5e6, "ci_high": 3.5e6}],
    }


def test_declared_gaps_stand_before_late_ones(results: dict[str, Any]) -> None:
    found = gaps_of(results, "val_loss")
    assert list(found) == [("a", "_b"), ("_b", "$c_$")]
    assert [(row["budget"], row["mean"]) for row in found["a", "_b"]] == [
        (1_000_000, 1.5), (4_000_000, -2.0), (8_000_000, -4.0),
    ]  # fmt: skip
    assert [row["budget"] for row in found["_b", "$c_$"]] == [1_000_000]


def test_means_bars_seeds_and_the_crossing_are_where_they_belong(results: dict[str, Any]) -> None:
    (ax,) = gap_over_budgets(results, "a", "_b", "val_loss").axes
    drawn = [(list(map(float, line.get_xdata())), list(map(float, line.get_ydata()))) for line in ax.lines]
    assert ([1e6, 4e6, 8e6], [1.5, -2.0, -4.0]) in drawn
    assert ([1e6, 1e6], [1.0, 2.0]) in drawn and ([4e6, 4e6], [-2.5, -1.5]) in drawn  # the bars
    assert ([1.05e6, 1.05e6], [1.0, 2.0]) in drawn  # the seeds
    assert ([2e6, 3e6], [0.0, 0.0]) in drawn and ([2.4e6, 2.4e6], [0.0, 1.0]) in drawn  # seeds and mean of the crossing
    (band,) = ax.patches
    assert band.get_bbox().x0 == 1.5e6 and band.get_bbox().x1 == 3.5e6
    hollow = [line for line in ax.lines if list(line.get_xdata()) == [8_000_000]]
    assert [line.get_markerfacecolor() for line in hollow] == ["none"]
    assert ax.get_xscale() == "log" and [tick.get_text() for tick in ax.get_xticklabels()] == ["1M", "4M", "8M"]


def test_contrasts_share_the_frame_and_names_are_literal(results: dict[str, Any]) -> None:
    frames = []
    for left, right in (("a", "_b"), ("_b", "$c_$")):
        (ax,) = gap_over_budgets(results, left, right, "val_loss").axes
        frames.append((ax.get_xlim(), ax.get_ylim()))
        assert ax.get_title(loc="left") == f"{left} − {right}"
    assert frames[0] == frames[1] and frames[0][1][1] > 9.0


def test_the_same_bytes_every_time(results: dict[str, Any]) -> None:
    first, again = (style.svg(gap_over_budgets(results, "_b", "$c_$", "val_loss"), "x") for _ in range(2))
    assert first == again and "$c_$" in first
