"""Sweeps in a study file: the arms they become, the names a claim may use, and every fault in one line."""

from __future__ import annotations

from typing import Any

import pytest

from equipoise.config import apply_override, dump, load, read_toml
from equipoise.errors import ConfigError
from equipoise.matching import resolve_arms
from equipoise.spec.study import StudySpec, parse_study
from equipoise.spec.sweep import families, family, lr_text, standing_for, units


def study(tiny_toml: str, *overrides: str) -> StudySpec:
    table: dict[str, Any] = read_toml(tiny_toml, "tiny")
    for override in overrides:
        table = apply_override(table, override)
    return parse_study(table)


def faults(tiny_toml: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        study(tiny_toml, *overrides)
    return str(caught.value).splitlines()


def test_a_sweep_becomes_arms_in_its_place(tiny_toml: str) -> None:
    spec = study(tiny_toml, "arms.moe.lr={ sweep = [1e-3, 0.0015] }")
    assert list(spec.arms) == ["moe@lr=1e-3", "moe@lr=1.5e-3", "dense"]
    assert [spec.recipe_of(arm).optim.lr for arm in spec.arms] == [1e-3, 1.5e-3, 3e-3]
    one, other, _ = spec.arms.values()
    assert one.model == other.model and spec.arms["dense"].match.to == "moe"  # type: ignore[union-attr]
    assert spec.recipe_of("dense") == spec.recipe
    assert load(StudySpec, dump(spec)) == spec  # as a lock holds it


def test_what_is_matched_to_a_family_is_matched_to_its_model(tiny_toml: str) -> None:
    plain, swept = study(tiny_toml), study(tiny_toml, "arms.moe.lr={ sweep = [1e-3, 3e-3] }")
    one, other = (resolve_arms(spec.arms, 512, 256)["dense"] for spec in (plain, swept))
    assert one.model == other.model and one.residual == other.residual


def test_one_rate_of_its_own(tiny_toml: str) -> None:
    spec = study(tiny_toml, "arms.dense.lr=0.01")
    assert list(spec.arms) == ["moe", "dense"] and spec.recipe_of("dense").optim.lr == 0.01
    assert spec.recipe_of("moe") == spec.recipe


def test_a_claim_names_the_family_or_a_member(tiny_toml: str) -> None:
    sweep = "arms.moe.lr={ sweep = [1e-3, 3e-3] }"
    assert study(tiny_toml, sweep).claims[0].left == "moe"
    assert study(tiny_toml, sweep, 'claims.0.left="moe@lr=3e-3"').claims[0].left == "moe@lr=3e-3"
    (line,) = faults(tiny_toml, sweep, 'claims.0.left="moe@lr=3e-4"')
    assert line.startswith('claims.0.left: "moe@lr=3e-4" is not accepted; expected one of moe@lr=1e-3')


def test_names_and_families() -> None:
    arms = ["moe", "d@lr=1e-3", "d@lr=3e-3"]
    assert families(arms) == {"d": ("d@lr=1e-3", "d@lr=3e-3")} and list(units(arms)) == ["moe", "d"]
    assert [standing_for(name, arms) for name in ("d", "d@lr=3e-3", "moe", "x")] == [
        "d@lr=1e-3",
        "d@lr=3e-3",
        "moe",
        "x",
    ]
    assert family("d@lr=3e-3") == "d" and family("moe") is None


@pytest.mark.parametrize("lr", [3e-4, 1e-3, 0.0015, 0.01, 0.1, 1.0, 12.5, 3e-10, 0.30000000000000004])
def test_a_rate_in_a_name_reads_back(lr: float) -> None:
    assert float(lr_text(lr)) == lr and "+" not in lr_text(lr)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("arms.moe.lr={ sweep = [1e-3] }", "arms.moe.lr.sweep: [0.001] is not accepted; expected a list of 2 or more"),
        ("arms.moe.lr={ sweep = [1e-3, 1e-3] }", "arms.moe.lr.sweep: [0.001, 0.001] is not accepted"),
        ("arms.moe.lr={ sweep = [1e-3, 0] }", "arms.moe.lr.sweep: [0.001, 0] is not accepted"),
        ("arms.moe.lr={ sweep = [1e-3, true] }", "arms.moe.lr.sweep: [0.001, true] is not accepted"),
        ("arms.moe.lr={ sweep = 1e-3 }", "arms.moe.lr.sweep: 0.001 is not accepted"),
        ("arms.moe.lr={ grid = [1e-3] }", 'arms.moe.lr: {"grid": [0.001]} is not accepted; expected a number'),
        ("arms.moe.lr=0.0", "arms.moe.lr: 0.0 is not accepted; expected above 0"),
        ('arms.dense.budget={ on = "train_flops", to = "mo" }', 'arms.dense.budget.to: "mo" is not accepted; exp'),
        ('arms.dense.budget={ on = "train_flops", to = "dense" }', 'arms.dense.budget.to: "dense" is not accepted'),
        ('arms.dense.budget={ on = "flops", to = "moe" }', 'arms.dense.budget.on: "flops" is not accepted; expected'),
    ],
)  # fmt: skip
def test_faults_in_one_line(tiny_toml: str, override: str, line: str) -> None:
    (said,) = faults(tiny_toml, override)
    assert said.startswith(line)


def test_a_fault_of_a_swept_arm_is_said_once_under_its_written_name(tiny_toml: str) -> None:
    sweep = "arms.moe.lr={ sweep = [1e-3, 3e-3] }"
    assert faults(tiny_toml, sweep, "arms.moe.model.ffn.top_k=9") == [
        "arms.moe.model.ffn.top_k: 9 is not accepted; expected 1 to num_experts = 3"
    ]


def test_a_budget_may_not_follow_one_that_follows(tiny_toml: str) -> None:
    said = faults(
        tiny_toml,
        'arms.moe.budget={ on = "train_flops", to = "dense" }',
        'arms.dense.budget={ on = "train_flops", to = "moe" }',
    )
    assert said == [
        'arms.moe.budget.to: "dense" is not accepted; expected an arm without a budget of its own',
        'arms.dense.budget.to: "moe" is not accepted; expected an arm without a budget of its own',
    ]


def test_the_mark_of_a_member_is_no_part_of_a_written_name(tiny_toml: str) -> None:
    text = tiny_toml.replace("[arms.dense]", '[arms."dense@lr=1"]').replace('right = "dense"', 'right = "dense@lr=1"')
    said = faults(text, "arms.moe.model.ffn.top_k=9")
    assert any(line.startswith("arms: \"dense@lr=1\" is not accepted; expected a name without '@lr='") for line in said)


def test_one_schedule_is_needed_to_be_faster_along_it(tiny_toml: str) -> None:
    """The mean gap along one training is of arms that are at the same tokens of the same schedule."""
    budget = 'arms.dense.budget={ on = "train_flops", to = "moe" }'
    assert faults(tiny_toml.replace('kind = "lower"', 'kind = "faster"'), budget) == [
        "claims.0.kind: 'faster' is not accepted over 1 budget for dense, which has a budget of its own; "
        "expected 3 budgets or more, or arms that train along one schedule"
    ]
