"""The plan before a study, and the disk it needs."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from equipoise.cli.plan import show_plan
from equipoise.config import dump, read_toml
from equipoise.errors import ResourceError
from equipoise.estimate import Rates
from equipoise.spec.study import parse_study
from equipoise.study import DataFacts, check_disk, plan


def by_hand(rest: float) -> float:
    """Runs of 50, 50, 50, 25, 25, 25, 5, 5, 5, 2.5, 2.5, 2.5 seconds and `rest` each, handed out to two places."""
    places = [0.0, 0.0]
    for updates_s in (50, 50, 50, 25, 25, 25, 5, 5, 5, 2.5, 2.5, 2.5):
        places[places.index(min(places))] += updates_s + rest
    return max(places)


def test_the_plan_counts_runs_steps_tokens_flops_and_disk(tiny: Any, tiny_toml: str) -> None:
    spec = parse_study(read_toml(tiny_toml.replace("budgets = [5120]", "budgets = [5120, 51200]"), "tiny"))
    rates = {
        name: Rates(start_s=2.0, update_s=update_s, score_token_s=0.001, sample_token_s=0.125)
        for name, update_s in (("moe", 0.5), ("dense", 0.25))
    }
    facts = DataFacts(vocab_size=300, train_tokens=25_601, certain=True, eval_tokens=4000)
    planned = plan(spec, facts, rates, 2)
    assert planned["num_runs"] == 12
    assert [(b["steps"], b["tokens"], b["epochs"]) for b in planned["budgets"]] == [(10, 5120, 0.2), (100, 51200, 2.0)]
    # a run: 2 s start, its updates, 5 points of 512 tokens, 4 samples of 4 tokens, 4,000 tokens at the end
    moe, dense = planned["time"]["arms"]["moe"], planned["time"]["arms"]["dense"]
    assert moe["updates_s"] == pytest.approx(3 * 110 * 0.5) and dense["updates_s"] == pytest.approx(3 * 110 * 0.25)
    rest = 2 + 5 * 512 * 0.001 + 4 * 4 * 0.125 + 4000 * 0.001
    assert moe["total_s"] == pytest.approx(3 * 110 * 0.5 + 6 * rest)
    # two at a time, long ones first
    assert planned["time"]["study_s"] == pytest.approx(by_hand(rest))
    assert planned["budgets"][0]["curve_share"] == pytest.approx(5 * 512 / (3 * 5120))
    assert planned["budgets"][0]["affordable_curve_tokens"] == 153
    flops = [arm["flops_per_token"] for arm in planned["arms"]]
    assert planned["train_flops"] == sum(flops) * (5120 + 51200) * 3
    params = [arm["params"]["total"] for arm in planned["arms"]]
    # per run at most four checkpoints of weights and two moments in float32, and 240 bytes a step
    assert planned["disk_bytes"] == 6 * 4 * 12 * sum(params) + 158_400
    for arm in planned["arms"]:
        assert sum(arm["by_component"].values()) == arm["params"]["total"]
    assert json.loads(json.dumps(dump(planned), allow_nan=False))["name"] == "tiny"
    unknown = plan(spec, DataFacts(vocab_size=300, train_tokens=None, certain=False))
    assert unknown["budgets"][0]["epochs"] is None and unknown["time"] is None


@pytest.mark.parametrize(("eval_tokens", "each"), [(0, 4000 + 700), (500, 500 + 500), (1000, 1000 + 700)])
def test_a_plan_counts_that_swept_arms_are_scored_on_selection_too(tiny_toml: str, eval_tokens: int, each: int) -> None:
    """Two members × three seeds; `recipe.eval_tokens` bounds either scoring. dense is no member."""
    toml = tiny_toml.replace("[arms.moe.model.ffn]", "[arms.moe]\nlr = { sweep = [1e-3, 1e-1] }\n[arms.moe.model.ffn]")
    toml = toml.replace("curve_tokens = 512", f"curve_tokens = 512\neval_tokens = {eval_tokens}")
    spec = parse_study(read_toml(toml, "tiny"))
    rates = dict.fromkeys(spec.arms, Rates(start_s=0.0, update_s=0.0, score_token_s=0.01, sample_token_s=0.0))
    facts = DataFacts(vocab_size=300, train_tokens=None, certain=True, eval_tokens=4000, selection_tokens=700)
    arms = plan(spec, facts, rates, 1)["time"]["arms"]
    for member in ("moe@lr=1e-3", "moe@lr=1e-1"):
        assert arms[member]["final_s"] == pytest.approx(3 * 0.01 * each)
    assert arms["dense"]["final_s"] == pytest.approx(3 * 0.01 * min(4000, eval_tokens or 4000))
    unknown = DataFacts(vocab_size=300, train_tokens=None, certain=False)
    assert plan(spec, unknown, rates, 1)["time"]["arms"]["moe@lr=1e-3"]["final_s"] == pytest.approx(0.06 * eval_tokens)


def test_a_disk_too_small_is_refused_before_anything_is_trained(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_disk(tmp_path, tiny.runs)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000_000))
    with pytest.raises(ResourceError, match=r"1,000,000 bytes free; expected at least [\d,]+ for 6 runs"):
        check_disk(tmp_path, tiny.runs)


def test_a_wsd_plan_counts_a_shared_trunk_once(tiny: Any, tiny_toml: str) -> None:
    """1 : 2 : 4 : 8 with a decay of a fifth: 64 + 2 + 4 + 8 + 16 updates instead of 10 + 20 + 40 + 80."""
    schedule = 'schedule = { kind = "wsd", warmup_tokens = 1024 }\nbatch_tokens = 512'
    toml = tiny_toml.replace("batch_tokens = 512", schedule)
    spec = parse_study(read_toml(toml.replace("[5120]", "[5120, 10_240, 20_480, 40_960]"), "tiny"))
    facts = DataFacts(vocab_size=300, train_tokens=None, certain=False)
    rates = {
        name: Rates(start_s=0.0, update_s=update_s, score_token_s=0.0, sample_token_s=0.0)
        for name, update_s in (("moe", 0.5), ("dense", 0.25))
    }
    planned = plan(spec, facts, rates, 1)
    assert [arm["updates"] for arm in planned["arms"]] == [{"of_trunk": 64, "per_seed": 94, "from_scratch": 150}] * 2
    assert [budget["branch_step"] for budget in planned["budgets"]] == [8, 16, 32, 64]
    assert planned["train_flops"] == sum(arm["flops_per_token"] for arm in planned["arms"]) * 94 * 512 * 3
    assert planned["time"]["study_s"] == pytest.approx((0.5 + 0.25) * 94 * 3)
    params = sum(arm["params"]["total"] for arm in planned["arms"])
    # per seed 4 runs of 4 checkpoints, a trunk of 2 × 4 + 3; 240 bytes a row of each
    assert planned["disk_bytes"] == 3 * (12 * params * (4 * 4 + 11) + 2 * 240 * (150 + 64))
    alone = plan(parse_study(read_toml(toml, "tiny")), facts)
    assert alone["arms"][0]["updates"] == {"of_trunk": 0, "per_seed": 10, "from_scratch": 10}


def test_an_arm_with_budgets_of_its_own_is_planned_on_them(
    tiny: Any, tiny_toml: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """2 of 3 experts: 40 updates of moe give an expert the tokens of 26.67, so of dense 27; 80 those of 53.33: 53.

    Less a decay of a fifth, 5 and 11 whole updates of dense, 22 and 42 of them can be shared.
    """
    schedule = 'schedule = { kind = "wsd", warmup_tokens = 1024 }\nbatch_tokens = 512'
    toml = tiny_toml.replace("batch_tokens = 512", schedule).replace("[5120]", "[20_480, 40_960]")
    toml = toml.replace("[arms.dense]", '[arms.dense]\nbudget = { on = "tokens_per_expert", to = "moe" }')
    facts = DataFacts(vocab_size=300, train_tokens=None, certain=False)
    rates = {
        name: Rates(start_s=0.0, update_s=update_s, score_token_s=0.0, sample_token_s=0.0)
        for name, update_s in (("moe", 0.5), ("dense", 0.25))
    }
    planned = plan(parse_study(read_toml(toml, "tiny")), dataclasses.replace(facts, train_tokens=2561), rates, 1)
    moe, dense = planned["arms"]
    assert [own["epochs"] for own in dense["own_budgets"]] == [5.4, 10.6]  # of 10 windows of 256 tokens
    assert [budget["epochs"] for budget in planned["budgets"]] == [8, 16]
    show_plan(planned)
    shown = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "27 5.40 (estimated)" in shown
    assert "warning: 13,824 tokens of dense repeat the training data 5.4 times" in shown
    unknown = plan(parse_study(read_toml(toml, "tiny")), facts)
    assert [own["epochs"] for own in unknown["arms"][1]["own_budgets"]] == [None, None]
    assert [(own["budget"], own["steps"], own["tokens"]) for own in dense["own_budgets"]] == [
        (20_480, 27, 27 * 512),
        (40_960, 53, 53 * 512),
    ]
    assert moe["updates"] == {"of_trunk": 64, "per_seed": 64 + 8 + 16, "from_scratch": 120}
    assert dense["updates"] == {"of_trunk": 42, "per_seed": 42 + 11 + 5, "from_scratch": 80}
    assert moe["tokens_per_expert"]["20480"] == pytest.approx(20_480 * 2 / 3)
    assert dense["tokens_per_expert"] == {"20480": 27 * 512, "40960": 53 * 512}
    assert planned["train_flops"] == (moe["flops_per_token"] * 88 + dense["flops_per_token"] * 58) * 512 * 3
    assert planned["time"]["study_s"] == pytest.approx(3 * (88 * 0.5 + 58 * 0.25))
    params = [arm["params"]["total"] for arm in planned["arms"]]
    # per seed 2 runs of 4 checkpoints, a trunk of 2 × 2 + 3; 240 bytes a row of each
    assert planned["disk_bytes"] == 3 * (12 * sum(params) * (2 * 4 + 7) + 240 * (120 + 64 + 80 + 42))
