"""Run directories → results: hand-made runs with known losses; nothing is dropped silently."""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats as oracle

from equipoise.config import digest, dump
from equipoise.lock import lock_study
from equipoise.matching import resolve_arms
from equipoise.record import append_row, finish_run, start_run, write_losses
from equipoise.results import collect, contrast_pairs, write_results
from equipoise.spec.study import EquivalentClaim, LowerClaim, StudySpec

LOSSES = {"moe": {0: 2.50, 1: 2.55, 2: 2.61}, "dense": {0: 2.60, 1: 2.64, 2: 2.72}}


def layer(collapsed: bool) -> dict[str, Any]:
    return {"usage": [0.5, 0.5, 0.0], "busiest_frac": 0.5, "router_entropy": 0.5, "log_z": 1.0, "collapsed": collapsed}


def make(tmp_path: Path, tiny: Any, spec: StudySpec, **fates: str) -> Path:
    """A study directory; `fates` says what became of a run, e.g. moe_1="diverged" | "missing" | "collapsed"."""
    arms = resolve_arms(spec.arms, tiny.dataset.vocab_size, spec.recipe.seq_len)
    models = {name: arm.model for name, arm in arms.items()}
    lock = lock_study(tmp_path, spec, models, tiny.dataset, "equipoise run tiny")
    from equipoise.lock import locked_runs

    for run in locked_runs(lock):
        fate = fates.get(f"{run.arm}_{run.seed}", "complete")
        if fate == "missing":
            continue
        directory = tmp_path / run.folder
        start_run(directory, run, "{}")
        routing = [layer(fate == "collapsed")] if run.arm == "moe" else []
        for step in (0, 10):
            row = {"kind": "eval", "step": step, "tokens": 512 * step, "flops": step, "loss": 3.0, "elapsed_s": 0.1}
            append_row(directory / "metrics.jsonl", {**row, "routing": routing})
        write_losses(directory, {"final_loss_U": np.ones(3)})
        loss = None if fate == "diverged" else LOSSES[run.arm][run.seed]
        summary = {
            "status": "diverged" if fate == "diverged" else "complete", "digest": digest(run), "val_loss": loss,
            "best_val_loss": loss, "val_bpb": loss, "floor": None, "epochs": 0.5, "routing": routing,
            "collapsed": fate == "collapsed", "shapes": {"a": [2], "b": [3 if run.arm == "moe" else 4]},
            "message": "step 3: lm_loss is not finite" if fate == "diverged" else None,
        }  # fmt: skip
        finish_run(directory, summary)
    return tmp_path


def test_means_gaps_and_verdict_are_those_of_scipy(tiny: Any, tmp_path: Path) -> None:
    found = collect(make(tmp_path, tiny, tiny.spec))
    row = next(r for r in found["table"] if (r["arm"], r["metric"]) == ("moe", "val_loss"))
    values = list(LOSSES["moe"].values())
    assert (row["mean"], row["sd"], row["n"]) == (
        pytest.approx(statistics.mean(values)),
        pytest.approx(statistics.stdev(values)),
        3,
    )
    (gap,) = [g for g in found["gaps"] if g["metric"] == "val_loss"]
    differences = [LOSSES["moe"][s] - LOSSES["dense"][s] for s in (0, 1, 2)]
    low, high = oracle.t.interval(0.95, 2, np.mean(differences), oracle.sem(differences))
    assert (gap["left"], gap["right"], gap["n"]) == ("moe", "dense", 3)
    assert (gap["ci_low"], gap["ci_high"]) == (pytest.approx(low), pytest.approx(high))
    (claim,) = found["claims"]
    expected = oracle.ttest_rel(list(LOSSES["moe"].values()), list(LOSSES["dense"].values()), alternative="less").pvalue
    assert claim["p"]["sup"] == pytest.approx(expected) and claim["verdict"] == "supported"
    assert found["arms"][1]["shared_init"] == {"with": "moe", "tensors": 1, "of": 2}
    assert json.loads(write_results(tmp_path, found).read_text(encoding="utf-8")) == json.loads(json.dumps(dump(found)))


def test_lost_and_diverged_runs_are_named_and_hold_the_verdict(tiny: Any, tmp_path: Path) -> None:
    found = collect(make(tmp_path, tiny, tiny.spec, moe_1="diverged", dense_2="missing"))
    moe, dense = (
        next(r for r in found["table"] if (r["arm"], r["metric"]) == (a, "val_loss")) for a in ("moe", "dense")
    )
    assert (moe["n"], moe["expected_n"], moe["diverged"], moe["lost"]) == (2, 3, [1], [])
    assert (dense["n"], dense["diverged"], dense["lost"]) == (2, [], [2])
    (gap,) = [g for g in found["gaps"] if g["metric"] == "val_loss"]
    assert gap["n"] == 1 and gap["sd"] is None and gap["ci_low"] is None
    (claim,) = found["claims"]
    assert claim["verdict"] == "inconclusive" and "diverged" in claim["reason"]
    statuses = {(r["arm"], r["seed"]): r["status"] for r in found["runs"]}
    assert statuses["moe", 1] == "diverged" and statuses["dense", 2] == "missing"
    assert next(r for r in found["runs"] if r["status"] == "diverged")["message"] == "step 3: lm_loss is not finite"


def test_a_collapsed_run_marks_every_number_of_its_arm(tiny: Any, tmp_path: Path) -> None:
    found = collect(make(tmp_path, tiny, tiny.spec, moe_2="collapsed"))
    assert all(r["collapsed"] == ([2] if r["arm"] == "moe" else []) for r in found["table"])
    assert all(gap["collapsed"] == ["moe"] for gap in found["gaps"])
    (claim,) = found["claims"]
    assert claim["verdict"] == "inconclusive" and "collapsed" in claim["marks"]


def test_one_seed_has_no_spread_and_no_interval(tiny: Any, tmp_path: Path) -> None:
    found = collect(make(tmp_path, tiny, dataclasses.replace(tiny.spec, seeds=(1,))))
    assert all(row["sd"] is None and row["n"] == 1 for row in found["table"])
    assert all(gap["ci_low"] is None and gap["noise_floor"] is None for gap in found["gaps"])
    assert found["claims"][0]["verdict"] == "inconclusive"


def test_scores_on_the_selection_split_judge_no_claim(tiny: Any, tmp_path: Path) -> None:
    recipe = dataclasses.replace(tiny.spec.recipe, eval_split="selection")
    found = collect(make(tmp_path, tiny, dataclasses.replace(tiny.spec, recipe=recipe)))
    assert found["split"] == "selection" and found["claims"] == []


def test_pairs_are_matched_arms_then_claimed_ones_each_once(tiny: Any) -> None:
    arms = {**tiny.spec.arms, "other": dataclasses.replace(tiny.spec.arms["dense"], match=None)}
    model = dataclasses.replace(arms["other"].model, ffn=dataclasses.replace(arms["other"].model.ffn, d_ff=32))
    arms["other"] = dataclasses.replace(arms["other"], model=model)
    claims = (
        LowerClaim(id="a", left="dense", right="moe"),
        EquivalentClaim(id="b", left=("moe", "dense"), right="other", equivalence_margin=0.1),
    )
    spec = dataclasses.replace(tiny.spec, arms=arms, claims=claims)
    assert contrast_pairs(spec) == [("moe", "dense"), ("moe", "other"), ("dense", "other")]


def test_results_do_not_depend_on_where_or_when_they_are_collected(tiny: Any, tmp_path: Path) -> None:
    first, second = (collect(make(tmp_path / name, tiny, tiny.spec)) for name in ("a", "b"))
    for found in (first, second):
        found["provenance"].pop("created")
    assert first == second
