"""An arm's own tokens: worked by hand from FLOPs per token and experts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from equipoise.accounting import count_flops
from equipoise.budgets import arm_budgets, per_token
from equipoise.errors import ConfigError
from equipoise.lock import expand
from equipoise.spec.study import OwnBudget, StudySpec


def with_budget(tiny: Any, own: OwnBudget, budgets: tuple[int, ...] = (5120, 10240)) -> StudySpec:
    arms = {**tiny.spec.arms, "dense": dataclasses.replace(tiny.spec.arms["dense"], budget=own)}
    spec: StudySpec = dataclasses.replace(tiny.spec, arms=arms, budgets=budgets)
    return spec


def test_without_an_own_budget_an_arm_takes_the_study_s(tiny: Any) -> None:
    found = arm_budgets(tiny.spec, tiny.models)
    assert {(one.asked, one.steps, one.tokens, one.table(1.5)) for one in found.values()} == {(5120, 10, 5120, None)}


def test_equal_training_flops_in_whole_updates(tiny: Any) -> None:
    """The nearest number of updates, found by trying all of them."""
    spec = with_budget(tiny, OwnBudget(on="train_flops", to="moe"))
    found = arm_budgets(spec, tiny.models)
    cost = {arm: count_flops(tiny.models[arm], 256).training for arm in ("moe", "dense")}
    for budget in (5120, 10240):
        want = budget * cost["moe"]
        steps = min(range(1, 100), key=lambda n: abs(n * 512 * cost["dense"] - want))
        one = found["dense", budget]
        assert (one.steps, one.tokens, one.asked) == (steps, 512 * steps, 512 * steps)
        assert one.residual == pytest.approx(512 * steps * cost["dense"] / want - 1)
        assert (one.quantity, one.reference) == (512 * steps * cost["dense"], want)
    assert found["moe", 5120].own is None


def test_equal_tokens_per_expert(tiny: Any) -> None:
    """Each of 3 experts, 2 chosen, gets 2/3 of the tokens; a dense layer gets all: it trains on 2/3. 10 · 2/3 → 7."""
    found = arm_budgets(with_budget(tiny, OwnBudget(on="tokens_per_expert", to="moe")), tiny.models)
    one, other = found["dense", 5120], found["dense", 10240]
    assert (one.steps, other.steps) == (7, 13)  # 6.67 and 13.33 updates
    assert one.residual == pytest.approx(7 / (10 * 2 / 3) - 1) and one.reference == pytest.approx(5120 * 2 / 3)
    assert float(per_token("tokens_per_expert", tiny.models["moe"], 256)) == pytest.approx(2 / 3)


def test_runs_get_their_own_budget_and_its_schedule(tiny: Any) -> None:
    spec = with_budget(tiny, OwnBudget(on="tokens_per_expert", to="moe"))
    runs = expand(spec, tiny.models, "data")
    assert {(run.arm, run.folder.split("/")[1][:-3], run.num_steps) for run in runs} == {
        ("moe", "5120", 10), ("moe", "10240", 20), ("dense", "3584", 7), ("dense", "6656", 13),
    }  # fmt: skip


def test_two_budgets_may_not_become_one_run(tiny: Any) -> None:
    spec = with_budget(tiny, OwnBudget(on="tokens_per_expert", to="moe"), budgets=(1024, 512))
    with pytest.raises(ConfigError, match=r"arms\.dense\.budget: budgets 1,024 and 512 both come to 512 tokens"):
        arm_budgets(spec, tiny.models)
