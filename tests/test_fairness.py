"""The contract matrix and sweeps, on runs written by hand; expected numbers are the definitions written out again."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from equipoise.accounting import count_flops
from equipoise.budgets import arm_budgets
from equipoise.evidence import METRICS, Evidence
from equipoise.fairness import Study, compared, contract_rows
from equipoise.spec.study import Arm, OwnBudget, StudySpec
from equipoise.step_time import StepTimes
from equipoise.sweeps import cells_of_families, choose, sweep_rows, terms

SEEDS = (0, 1, 2)
# arm → budget → seed → loss: at the small budget moe leads by 0.1 to 0.12, at the large one dense by 0.02.
LOSSES = {
    "moe": {5120: (4.0, 4.1, 4.2), 10240: (3.52, 3.62, 3.72)},
    "dense": {5120: (4.1, 4.22, 4.31), 10240: (3.5, 3.6, 3.7)},
}
TIMES = StepTimes(
    step_s={"moe": 0.2, "dense": 0.15}, spread={}, measured="", environment={}, load=None, busy_cores=None
)


def evidence(arm: str, budget: int, seed: int, loss: float | None, selection: float = 0.0) -> Evidence:
    return Evidence(
        arm=arm,
        seed=seed,
        budget=budget,
        post_hoc=False,
        status="diverged" if loss is None else "complete",
        message=None,
        summary={} if loss is None else {**dict.fromkeys(METRICS, loss), "selection_loss": selection},
    )


def make(spec: StudySpec, models: Any, losses: Any, selection: Any = None, **changed: Any) -> Study:
    cells = {
        (arm, budget): {
            seed: evidence(arm, budget, seed, losses[arm][budget][seed], (selection or {}).get(arm, 0.0))
            for seed in SEEDS
        }
        for arm in spec.arms
        for budget in spec.budgets
    }
    return Study(
        spec=spec,
        models=models,
        cells=cells,
        **{"late_arms": (), "late_budgets": (), "locked_seeds": SEEDS, "all_seeds": SEEDS, **changed},
    )


@pytest.fixture
def plain(tiny: Any) -> Study:
    return make(dataclasses.replace(tiny.spec, budgets=(5120, 10240)), tiny.models, LOSSES)


def row(study: Study, budget: int, times: Any = TIMES) -> dict[str, Any]:
    (found,) = [r for r in contract_rows(study, times) if (r["budget"], r["metric"]) == (budget, "val_loss")]
    return found


def between(low: float, high: float, share: float) -> float:
    return low + (high - low) * share


def test_equal_tokens_are_the_runs(plain: Study) -> None:
    cell = row(plain, 5120)["tokens"]
    assert cell["per_seed"] == pytest.approx({"0": -0.1, "1": -0.12, "2": -0.11})
    assert (cell["n"], cell["winner"], cell["clear"], cell["interpolated"]) == (3, "moe", True, None)


def test_equal_training_flops_are_read_where_they_fall(plain: Study) -> None:
    """dense costs a little less a token: it is read above 5,120; at 10,240 that is out of range, and moe is read."""
    moe, dense = (count_flops(plain.models[arm], 256).training for arm in ("moe", "dense"))
    assert dense < moe
    small, large = row(plain, 5120)["train_flops"], row(plain, 10240)["train_flops"]
    assert small["interpolated"] == "dense" and small["right_tokens"] == pytest.approx(5120 * moe / dense)
    at = between(4.1, 3.5, math.log2(moe / dense))
    assert small["per_seed"]["0"] == pytest.approx(4.0 - at) and small["between"] == [5120, 10240]
    assert large["interpolated"] == "moe" and large["left_tokens"] == pytest.approx(10240 * dense / moe)
    assert large["per_seed"]["0"] == pytest.approx(between(4.0, 3.52, 1 + math.log2(dense / moe)) - 3.5)


def test_equal_seconds_need_a_probe(plain: Study) -> None:
    """0.2 s against 0.15 s an update: beside moe at 5,120 stands dense at 6,826.7, which is log2(4/3) of the way."""
    cell = row(plain, 5120)["seconds"]
    assert cell["right_tokens"] == pytest.approx(5120 * 4 / 3) and cell["interpolated"] == "dense"
    assert cell["per_seed"]["2"] == pytest.approx(4.2 - between(4.31, 3.7, math.log2(4 / 3)))
    other = row(plain, 10240)["seconds"]
    assert other["left_tokens"] == pytest.approx(7680) and other["interpolated"] == "moe"
    assert other["per_seed"]["1"] == pytest.approx(between(4.1, 3.62, math.log2(1.5)) - 3.6)
    absent = row(plain, 5120, "no step_time.json")["seconds"]
    assert (absent["mean"], absent["reason"]) == (None, "no step_time.json")


def test_a_flip_is_named(plain: Study) -> None:
    """At 5,120 moe leads at equal tokens and FLOPs; given a third more tokens, dense leads: 4.1 − 0.6 · 0.415 < 4."""
    assert row(plain, 5120)["flips"] == [
        {"between": ["tokens", "seconds"], "clear": True},
        {"between": ["train_flops", "seconds"], "clear": True},
    ]


def test_what_an_arm_matches(plain: Study) -> None:
    agreement = row(plain, 5120)["agreement"]
    assert "active_params" in agreement["on"] and "total_params" not in agreement["on"]
    moe, dense = (count_flops(plain.models[arm], 256).training for arm in ("moe", "dense"))
    assert agreement["flops_per_token"] == pytest.approx(dense / moe - 1)


def test_an_own_budget_is_equal_flops_by_declaration(plain: Study) -> None:
    arms = {**plain.spec.arms}
    arms["dense"] = dataclasses.replace(arms["dense"], budget=OwnBudget(on="train_flops", to="moe"))
    found = row(dataclasses.replace(plain, spec=dataclasses.replace(plain.spec, arms=arms)), 5120)
    cost = {arm: count_flops(plain.models[arm], 256).training for arm in ("moe", "dense")}
    assert found["train_flops"]["interpolated"] is None
    assert found["train_flops"]["residual"] == pytest.approx(cost["dense"] / cost["moe"] - 1)
    arms["dense"] = dataclasses.replace(arms["dense"], budget=OwnBudget(on="tokens_per_expert", to="moe"))
    other = row(dataclasses.replace(plain, spec=dataclasses.replace(plain.spec, arms=arms)), 5120)
    assert other["tokens"]["mean"] is None
    assert other["tokens"]["reason"] == (
        "budgets of their own: moe trains on 5,120 tokens and dense trains on 3,584 tokens"
    )


def test_late_seeds_and_budgets_enter_nothing_declared(plain: Study) -> None:
    late = dataclasses.replace(plain, locked_seeds=(0, 1), late_budgets=(10240,))
    small, large = row(late, 5120), row(late, 10240)
    assert (small["post_hoc"], small["tokens"]["n"], small["tokens"]["expected_n"]) == (False, 2, 2)
    assert small["train_flops"]["mean"] is None  # its only neighbour was added late
    assert (large["post_hoc"], large["tokens"]["n"]) == (True, 3)


# ------------------------------------------------------------------------------------------------ sweeps

SWEPT = ("dense@lr=1e-3", "dense@lr=1e-2")


def swept(tiny: Any, losses: Any, selection: Any, **changed: Any) -> Study:
    dense = tiny.spec.arms["dense"]
    arms = {"moe": tiny.spec.arms["moe"], **{arm: dataclasses.replace(dense, lr=float(arm[9:])) for arm in SWEPT}}
    recipe = dataclasses.replace(tiny.spec.recipe, optim=dataclasses.replace(tiny.spec.recipe.optim, lr=1e-3))
    spec = dataclasses.replace(tiny.spec, arms=arms, budgets=(5120, 10240), recipe=recipe)
    models = {arm: tiny.models["dense" if arm in SWEPT else "moe"] for arm in arms}
    return make(spec, models, losses, selection, **changed)


TWO = {
    "moe": LOSSES["moe"],
    SWEPT[0]: {5120: (4.3, 4.4, 4.5), 10240: (3.4, 3.6, 3.7)},
    SWEPT[1]: LOSSES["dense"],
}


def test_the_selection_split_chooses_and_not_validation(tiny: Any) -> None:
    """The first rate is worse on validation everywhere but better on selection: it is taken."""
    worse = {**TWO, SWEPT[0]: dict.fromkeys((5120, 10240), (9.0, 9.0, 9.0))}
    study = swept(tiny, worse, {SWEPT[0]: 1.0, SWEPT[1]: 2.0})
    first = choose(study)[0]
    assert (first.arm, first.at_edge, first.reason) == (SWEPT[0], True, None)
    assert first.losses == {SWEPT[0]: 1.0, SWEPT[1]: 2.0}
    cells = cells_of_families(study, choose(study))
    assert cells["dense", 5120] == study.cells[SWEPT[0], 5120]


def test_of_equals_the_lower_rate(tiny: Any) -> None:
    assert choose(swept(tiny, TWO, {SWEPT[0]: 1.0, SWEPT[1]: 1.0}))[0].arm == SWEPT[0]


def test_a_rate_that_diverged_is_not_chosen_and_one_missing_waits(tiny: Any) -> None:
    one = {**TWO, SWEPT[0]: {5120: (1.0, None, 1.0), 10240: (None, None, None)}}
    assert [c.arm for c in choose(swept(tiny, one, {}))] == [SWEPT[1], SWEPT[1]]
    both = {**one, SWEPT[1]: one[SWEPT[0]]}
    assert choose(swept(tiny, both, {}))[0].reason == "a run of every rate diverged"
    study = swept(tiny, TWO, {})
    cell = study.cells[SWEPT[1], 5120]
    lost = {**cell, 1: dataclasses.replace(cell[1], status="interrupted", summary={})}
    waiting = dataclasses.replace(study, cells={**study.cells, (SWEPT[1], 5120): lost})
    choice = choose(waiting)[0]
    assert choice.arm is None and choice.reason == "dense@lr=1e-2 seed 1 is interrupted"
    cells = cells_of_families(waiting, [choice])
    assert {run.status for run in cells["dense", 5120].values()} == {"missing"}


def test_a_rate_added_late_moves_no_choice(tiny: Any) -> None:
    study = swept(tiny, TWO, {SWEPT[0]: 2.0, SWEPT[1]: 1.0}, late_arms=(SWEPT[1],))
    assert choose(study)[0].arm == SWEPT[0]


def gap(tiny: Any, budget: int) -> dict[str, Any]:
    study = swept(tiny, TWO, {SWEPT[0]: 2.0, SWEPT[1]: 1.0})
    choices = choose(study)
    found = sweep_rows(dataclasses.replace(study, cells=cells_of_families(study, choices)), choices)
    assert found is not None
    (one,) = [row for row in found["gaps"] if (row["budget"], row["metric"]) == (budget, "val_loss")]
    assert (one["left"], one["right"]) == ("moe", "dense")
    return one


def test_the_gap_at_the_shared_rate_and_at_the_best(tiny: Any) -> None:
    found = gap(tiny, 5120)
    (shared,) = found["shared"]
    assert shared["lr"] == 1e-3 and shared["per_seed"] == pytest.approx({"0": -0.3, "1": -0.3, "2": -0.3})
    assert found["best"]["lr"] == [1e-3, 1e-2]
    assert found["best"]["per_seed"] == pytest.approx({"0": -0.1, "1": -0.12, "2": -0.11})


def test_the_sweep_is_charged_in_training_flops(tiny: Any) -> None:
    """Two runs of dense were paid for one: at moe's FLOPs of 10,240 tokens dense stands near 5,120."""
    moe, dense = (count_flops(tiny.models[arm], 256).training for arm in ("moe", "dense"))
    charged = gap(tiny, 10240)["charged"]
    assert charged["cost_factor"] == [1, 2] and charged["interpolated"] == "dense"
    assert charged["right_tokens"] == pytest.approx(10240 * moe / (2 * dense))
    share = math.log2(moe / dense)
    assert charged["per_seed"]["0"] == pytest.approx(3.52 - between(4.1, 3.5, share))
    assert gap(tiny, 5120)["charged"]["interpolated"] == "moe"


def test_the_terms_of_a_claim_are_said(tiny: Any) -> None:
    study = swept(tiny, TWO, {SWEPT[0]: 2.0, SWEPT[1]: 1.0})
    budgets = arm_budgets(study.spec, study.models)
    arms = ("moe", "dense")
    assert terms(arms, [5120], study.spec, budgets, choose(study)) == [
        "lr 1e-2 of dense, chosen on the selection split"
    ]
    moe = dataclasses.replace(study.spec.arms["moe"], budget=OwnBudget(on="tokens_per_expert", to="dense"))
    own = dataclasses.replace(study.spec, arms={**study.spec.arms, "moe": moe})
    assert terms(arms, [5120], own, arm_budgets(own, study.models), []) == ["own budget: moe 7,680 tokens"]
    assert terms(["moe"], [5120, 10240], own, arm_budgets(own, study.models), []) == [
        "own budget: moe 7,680 tokens at 5,120",
        "own budget: moe 15,360 tokens at 10,240",
    ]


def test_the_pairs_of_the_matrix(tiny: Any) -> None:
    assert compared(tiny.spec) == [("moe", "dense")]
    assert compared(swept(tiny, TWO, {}).spec) == [("moe", "dense")]
    free = {**tiny.spec.arms, "other": Arm(model=tiny.models["dense"])}
    assert compared(dataclasses.replace(tiny.spec, arms={**free, "copy": tiny.spec.arms["moe"]})) == [
        ("moe", "dense"), ("copy", "dense"), ("moe", "other"), ("copy", "other"),
    ]  # fmt: skip
    assert sweep_rows(make(tiny.spec, tiny.models, LOSSES), []) is None
