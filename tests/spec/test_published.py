"""Published values of a study file: read, checked against its arms and budgets, and never part of what is locked."""

from __future__ import annotations

from typing import Any

import pytest

from equipoise.errors import ConfigError
from equipoise.spec.study import StudySpec, load_study_table, parse_study


def quick(*published: dict[str, Any]) -> StudySpec:
    table = load_study_table("quick")[0]
    return parse_study({**table, "published": list(published)})


VALUE: dict[str, Any] = {"arm": "moe", "mean": 1.5, "source": "a paper"}


def test_a_value_is_of_the_best_loss_at_the_largest_budget_unless_it_says_more() -> None:
    (value,) = quick(VALUE).published
    assert (value.minus, value.budget, value.metric, value.sd) == (None, "largest", "best_val_loss", None)
    (gap,) = quick({**VALUE, "minus": "dense-total", "budget": 500_000, "metric": "val_bpb", "sd": 0.1}).published
    assert (gap.arm, gap.minus, gap.budget, gap.metric, gap.sd) == ("moe", "dense-total", 500_000, "val_bpb", 0.1)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"arm": "mo"}, "published.1.arm: \"mo\" is not accepted; expected one of moe, dense-active, dense-total"),
        ({"minus": "moe"}, "published.1.minus: \"moe\" is not accepted; expected one of dense-active, dense-total"),
        (
            {"budget": 7},
            "published.1.budget: 7 is not accepted; expected largest or one of the study's budgets, 500000",
        ),
        ({"sd": -0.1}, "published.1.sd: -0.1 is not accepted; expected 0 or more"),
        ({"metric": "log_z"}, "published.1.metric: \"log_z\" is not accepted; expected"),
        ({"from": "x"}, "published.1.from: unknown field"),
    ],
)  # fmt: skip
def test_what_is_refused_says_where_and_what_is_accepted(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        quick(VALUE, {**VALUE, **fields})
    assert len(str(caught.value).splitlines()) == 1 and str(caught.value).startswith(said)


def test_infinity_is_no_mean() -> None:
    with pytest.raises(ConfigError, match=r"published\.0\.mean: .* expected a finite number"):
        quick({**VALUE, "mean": float("inf")})


@pytest.mark.parametrize("name", ["tinystories", "budgets", "tinystories-cpu", "budgets-cpu"])
def test_presets_hold_the_published_gaps_as_differences_of_the_published_levels(name: str) -> None:
    values = {(value.arm, value.minus): value for value in parse_study(load_study_table(name)[0]).published}
    assert len(values) == 5
    for (arm, minus), value in values.items():
        if minus is not None:  # 0.0758 and 0.0180 are rounded, as are the levels: to 0.0001 each
            assert value.mean == pytest.approx(values[arm, None].mean - values[minus, None].mean, abs=0.00015)
