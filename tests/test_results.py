"""Run directories → results: hand-made runs with known losses; nothing is dropped silently, nothing mixed in."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats as oracle

from equipoise.comparisons import contrast_pairs
from equipoise.config import digest, dump
from equipoise.errors import ConfigError
from equipoise.files import write_json
from equipoise.lock import lock_study, locked_runs, note_finished, read_lock
from equipoise.matching import resolve_arms
from equipoise.record import append_row, finish_run, start_run, write_losses
from equipoise.report.details import components_table
from equipoise.report.markdown import render_markdown
from equipoise.report.page import render_html
from equipoise.results import collect, settled, write_results
from equipoise.spec.claims import EquivalentClaim, FasterClaim, LargerClaim, LowerClaim, RoutingClaim, Step, TrendClaim
from equipoise.spec.run import RunConfig
from equipoise.spec.study import OwnBudget, StudySpec

LOSSES = {
    "moe": {0: 2.50, 1: 2.55, 2: 2.61, 3: 9.00},
    "dense": {0: 2.60, 1: 2.64, 2: 2.72, 3: 1.00},
    "other": {0: 2.70, 1: 2.71, 2: 2.72, 3: 2.73},
}
HERE = {"equipoise": "1", "torch": "2", "numpy": "2", "cpu_capability": "AVX2", "device": "cpu", "threads": 1}
FLOOR = {"loss": 1.5, "loss_se": 0.1, "bpb": 0.7, "bpb_se": 0.05, "num_documents": 12}


def layer(collapsed: bool) -> dict[str, Any]:
    return {"usage": [0.5, 0.5, 0.0], "busiest_frac": 0.5, "router_entropy": 0.5, "log_z": 1.0, "collapsed": collapsed}


def make(tmp_path: Path, tiny: Any, spec: StudySpec, **fates: str) -> Path:
    """A study directory, locked and run; `fates` says what became of a run: diverged, missing, collapsed, or at what
    it was lowest: best_collapsed. A second call on the same directory adds what the first had not.
    """
    models = {name: arm.model for name, arm in resolve_arms(spec.arms, tiny.dataset.vocab_size, 256).items()}
    lock = lock_study(tmp_path, spec, models, tiny.dataset, "equipoise run tiny")
    for run in locked_runs(lock):
        fate = fates.get(f"{run.arm}_{run.seed}", "complete")
        if fate != "missing" and not (tmp_path / run.folder).exists():
            write_run(tmp_path / run.folder, run, fate)
    note_finished(tmp_path)
    return tmp_path


def write_run(directory: Path, run: RunConfig, fate: str = "complete", **changed: Any) -> None:
    """One run directory; `changed` are fields of its summary."""
    start_run(directory, run, "{}")
    routing = [layer(fate == "collapsed")] if run.arm == "moe" else []
    for step in (0, 10):
        row = {"kind": "eval", "step": step, "tokens": 512 * step, "flops": step, "loss": 3.0, "elapsed_s": 0.1}
        append_row(directory / "metrics.jsonl", {**row, "routing": routing})
    append_row(directory / "samples.jsonl", {"step": 10, "tokens": 5120, "prompt": "Once", "text": f"by {run.arm}"})
    write_losses(directory, {"final_loss_U": np.ones(3)})
    write_json(directory / "environment.json", {"environments": changed.pop("environments", [HERE])})
    loss = None if fate == "diverged" else LOSSES[run.arm][run.seed]
    summary = {
        "status": "diverged" if fate == "diverged" else "complete", "digest": digest(run), "val_loss": loss,
        "best_val_loss": loss, "val_bpb": loss, "floor": FLOOR, "curve_floor": {**FLOOR, "loss": 1.4},
        "floor_reason": None, "val_targets": 900, "val_targets_total": 1200, "num_spikes": None,
        "epochs": 0.1 if fate == "diverged" else 0.5, "routing": routing, "best_routing": routing,
        "collapsed": fate == "collapsed", "best_collapsed": fate in ("collapsed", "best_collapsed"),
        "resumed_elsewhere": [],
        "init": {"a": [[2], 0.02], "b": [[3 if run.arm == "moe" else 4], 0.02], "c": [[5], 0.02 * len(run.arm)]},
        "message": "step 3: lm_loss is not finite" if fate == "diverged" else None,
    }  # fmt: skip
    finish_run(directory, {**summary, **changed})


def rewrite(study: Path, place: str, tiny: Any, **changed: Any) -> None:
    """The run of this folder made anew with other fields in its summary, its checksums right."""
    run = next(run for run in tiny.runs if run.folder == place)
    shutil.rmtree(study / place)
    write_run(study / place, run, **changed)


def rows(found: dict[str, Any], table: str, **where: Any) -> list[dict[str, Any]]:
    return [row for row in found[table] if all(row[key] == value for key, value in where.items())]


def test_means_gaps_and_verdict_are_those_of_scipy(tiny: Any, tmp_path: Path) -> None:
    found = collect(make(tmp_path, tiny, tiny.spec))
    row = next(r for r in found["table"] if (r["arm"], r["metric"]) == ("moe", "val_loss"))
    values = [LOSSES["moe"][seed] for seed in (0, 1, 2)]
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
    pairs = [[LOSSES[arm][seed] for seed in (0, 1, 2)] for arm in ("moe", "dense")]
    expected = oracle.ttest_rel(*pairs, alternative="less").pvalue
    assert claim["p"]["sup"] == pytest.approx(expected) and claim["verdict"] == "supported"
    assert (gap["expected_n"], gap["dropped"], gap["post_hoc"]) == (3, [], False)
    assert found["arms"][1]["shared_init"] == {"with": "moe", "tensors": 1, "of": 3}
    assert json.loads(write_results(tmp_path, found).read_text(encoding="utf-8")) == json.loads(json.dumps(dump(found)))


def test_computed_numbers_have_twelve_digits_and_recorded_ones_all(tiny: Any, tmp_path: Path) -> None:
    """A sum that is off in its last digit, as on another processor, gives the same results, byte for byte."""
    study, long = make(tmp_path, tiny, tiny.spec), 2.5012345678901234
    run = next(run for run in tiny.runs if run.folder == "moe/5120-s0")
    shutil.rmtree(study / run.folder)
    write_run(study / run.folder, run, val_loss=long)
    found = collect(study)
    computed = [*(found[part] for part in ("table", "gaps", "crossovers")), found["claims"][0]["contrasts"]]
    texts = re.findall(r"-?\d+\.\d+(?:e-\d+)?", json.dumps(computed))
    assert len(texts) > 40 and all(float(f"{float(text):.12g}") == float(text) for text in texts)
    assert settled({"mean": (0.1 + 0.2, 3, "0.30000000000000004")}) == settled(
        {"mean": [0.3, 3, "0.30000000000000004"]}
    )
    assert rows(found, "runs", arm="moe", seed=0)[0]["val_loss"] == long


def test_results_are_a_row_a_line(tiny: Any, tmp_path: Path) -> None:
    found = collect(make(tmp_path, tiny, tiny.spec))
    lines = write_results(tmp_path, found).read_text(encoding="utf-8").splitlines()
    runs = lines[lines.index('"runs": [') + 1 :][: len(found["runs"])]
    assert [json.loads(line.rstrip(",")) for line in runs] == json.loads(json.dumps(dump(found["runs"])))
    assert max(line.count('"arm"') for line in runs) == 1


def test_lost_and_diverged_runs_are_named_and_hold_the_verdict(tiny: Any, tmp_path: Path) -> None:
    found = collect(make(tmp_path, tiny, tiny.spec, moe_1="diverged", dense_2="missing"))
    moe, dense = (
        next(r for r in found["table"] if (r["arm"], r["metric"]) == (a, "val_loss")) for a in ("moe", "dense")
    )
    assert (moe["n"], moe["expected_n"], moe["diverged"], moe["lost"]) == (2, 3, [1], [])
    assert (dense["n"], dense["diverged"], dense["lost"]) == (2, [], [2])
    (gap,) = [g for g in found["gaps"] if g["metric"] == "val_loss"]
    assert gap["n"] == 1 and gap["sd"] is None and gap["ci_low"] is None
    assert gap["expected_n"] == 3 and gap["dropped"] == [1, 2]
    assert found["claims"][0]["contrasts"][0]["dropped"] == [1, 2]
    (claim,) = found["claims"]
    assert claim["verdict"] == "inconclusive" and "diverged" in claim["reason"]
    statuses = {(r["arm"], r["seed"]): r["status"] for r in found["runs"]}
    assert statuses["moe", 1] == "diverged" and statuses["dense", 2] == "missing"
    assert next(r for r in found["runs"] if r["status"] == "diverged")["message"] == "step 3: lm_loss is not finite"


def test_epochs_are_those_of_a_whole_run(tiny: Any, tmp_path: Path) -> None:
    """Not of how far the first run got, which diverged."""
    assert collect(make(tmp_path, tiny, tiny.spec, moe_0="diverged"))["epochs"] == {"5120": 0.5}


def test_a_collapsed_run_marks_every_number_of_its_arm(tiny: Any, tmp_path: Path) -> None:
    found = collect(make(tmp_path, tiny, tiny.spec, moe_2="collapsed"))
    assert all(r["collapsed"] == ([2] if r["arm"] == "moe" else []) for r in found["table"])
    assert all(gap["collapsed"] == ["moe"] for gap in found["gaps"])
    (claim,) = found["claims"]
    assert claim["verdict"] == "inconclusive" and "collapsed" in claim["marks"]
    assert claim["contrasts"][0]["collapsed"] == ["moe"]


def test_a_collapse_at_the_best_step_marks_the_best_losses_alone(tiny: Any, tmp_path: Path) -> None:
    found = collect(make(tmp_path, tiny, tiny.spec, moe_2="best_collapsed"))
    for row in rows(found, "table", arm="moe"):
        assert row["collapsed"] == ([2] if row["metric"] == "best_val_loss" else []), row["metric"]
    for gap in found["gaps"]:
        assert gap["collapsed"] == (["moe"] if gap["metric"] == "best_val_loss" else [])
    (claim,) = found["claims"]
    assert claim["metric"] == "val_loss" and claim["contrasts"][0]["collapsed"] == []
    assert claim["verdict"] == "inconclusive" and "collapsed" in claim["marks"]  # a collapsed run all the same


def test_an_unpaired_collapse_marks_its_arm_and_no_gap(tiny: Any, tmp_path: Path) -> None:
    """The gap is without seed 2: nothing collapsed entered it."""
    found = collect(make(tmp_path, tiny, tiny.spec, moe_2="collapsed", dense_2="missing"))
    assert all(row["collapsed"] == [2] for row in rows(found, "table", arm="moe"))
    assert all(gap["collapsed"] == [] and gap["dropped"] == [2] for gap in found["gaps"])


def test_one_seed_has_no_spread_and_no_interval(tiny: Any, tmp_path: Path) -> None:
    found = collect(make(tmp_path, tiny, dataclasses.replace(tiny.spec, seeds=(1,))))
    assert all(row["sd"] is None and row["n"] == 1 for row in found["table"])
    assert all(gap["ci_low"] is None and gap["noise_floor"] is None for gap in found["gaps"])
    assert found["claims"][0]["verdict"] == "inconclusive"


def test_scores_on_the_selection_split_judge_no_claim(tiny: Any, tmp_path: Path) -> None:
    recipe = dataclasses.replace(tiny.spec.recipe, eval_split="selection")
    found = collect(make(tmp_path, tiny, dataclasses.replace(tiny.spec, recipe=recipe)))
    assert found["split"] == "selection" and found["claims"] == []


def unmatched(tiny: Any) -> Any:
    """The dense arm with a width of its own, matched to nothing."""
    dense = tiny.spec.arms["dense"]
    ffn = dataclasses.replace(dense.model.ffn, d_ff=32)
    return dataclasses.replace(dense, match=None, model=dataclasses.replace(dense.model, ffn=ffn))


def test_pairs_are_matched_arms_then_claimed_ones_each_once(tiny: Any) -> None:
    arms = {**tiny.spec.arms, "other": unmatched(tiny)}
    claims = (
        LowerClaim(id="a", left="dense", right="moe"),
        EquivalentClaim(id="b", left=("moe", "dense"), right="other", equivalence_margin=0.1),
    )
    spec = dataclasses.replace(tiny.spec, arms=arms, claims=claims)
    assert contrast_pairs(spec) == [("moe", "dense"), ("moe", "other"), ("dense", "other")]


def test_a_larger_lead_goes_from_the_lock_to_the_page(tiny: Any, tmp_path: Path) -> None:
    """moe leads dense by 0.10, 0.09, 0.11, dense leads other by 0.10, 0.07, 0.00: more by 0, 0.02, 0.11."""
    claim = LargerClaim(id="main", left="moe", right="dense", than=(Step(left="dense", right="other"),))
    arms = {**tiny.spec.arms, "other": unmatched(tiny)}
    spec = dataclasses.replace(tiny.spec, arms=arms, claims=(*tiny.spec.claims, claim))
    found = collect(make(tmp_path, tiny, spec, moe_2="collapsed", other_0="best_collapsed"))
    row = found["claims"][1]
    (contrast,) = row["contrasts"]
    assert contrast["per_seed"] == {str(seed): pytest.approx(d) for seed, d in enumerate((0.0, 0.02, 0.11))}
    leads = [
        [LOSSES[right][seed] - LOSSES[left][seed] for seed in (0, 1, 2)]
        for left, right in (("moe", "dense"), ("dense", "other"))
    ]
    assert contrast["collapsed"] == ["moe"] and contrast["than"] == {"left": "dense", "right": "other"}
    assert row["verdict"] == "inconclusive" and row["marks"] == ["collapsed"] and row["p"]["sup"] is None
    assert [match["arm"] for match in row["matches"]] == ["dense"]
    spec = dataclasses.replace(spec, claims=(dataclasses.replace(claim, allow_collapsed=True), *tiny.spec.claims))
    found = collect(make(tmp_path / "allowed", tiny, spec, moe_2="collapsed"))
    row = found["claims"][0]
    assert row["p"]["sup"] == pytest.approx(oracle.ttest_rel(*leads, alternative="greater").pvalue)
    assert [(gap["left"], gap["right"]) for gap in rows(found, "gaps", metric="val_loss")] == [
        ("moe", "dense"),
        ("dense", "other"),
    ]
    for shown in (render({**found, "routing": [], "curves": []}) for render in (render_markdown, render_html)):
        assert "the lead of moe over dense in validation loss is larger than that of dense over other" in shown
        assert "lead of moe over dense − lead of dense over other" in shown
    changed = dataclasses.replace(claim, than=(Step(left="other", right="dense"),), allow_collapsed=True)
    with pytest.raises(ConfigError, match=r"locked, claims\.main\.than: \[.*other.*\] → \[.*other.*\]"):
        make(tmp_path / "allowed", tiny, dataclasses.replace(spec, claims=(changed, *tiny.spec.claims)))


def test_epochs_of_an_arm_with_its_own_budget_are_its_own(tiny: Any, tmp_path: Path) -> None:
    """dense trains on another budget and repeats its data; the study's budget does not."""
    dense = dataclasses.replace(tiny.spec.arms["dense"], budget=OwnBudget(on="tokens_per_expert", to="moe"))
    spec = dataclasses.replace(tiny.spec, arms={**tiny.spec.arms, "dense": dense})
    study = make(tmp_path, tiny, spec, **{f"dense_{seed}": "missing" for seed in (0, 1, 2)})
    assert collect(study)["arms"][1]["own_budgets"][0]["epochs"] is None
    for run in locked_runs(read_lock(study)):
        if run.arm == "dense":
            write_run(study / run.folder, run, epochs=1.25)
    found = collect(study)
    moe, dense_row = found["arms"]
    assert found["epochs"] == {"5120": 0.5} and moe["own_budgets"] == []
    assert [(own["budget"], own["tokens"], own["epochs"]) for own in dense_row["own_budgets"]] == [(5120, 3584, 1.25)]
    assert found["claims"][0]["marks"] == ["repeated data", "own budget: dense 3,584 tokens"]
    shown = render_markdown({**found, "routing": []})
    assert "own budget: 3,584 tokens, 1.25 epochs" in shown and "0.50 epochs" in shown
    assert re.search(r"\| dense \| tokens per expert of moe \| 5,120 \| 3,584 \| 7 \| 1.25 \|", shown)


def test_results_do_not_depend_on_where_or_when_they_are_collected(tiny: Any, tmp_path: Path) -> None:
    first, second = (collect(make(tmp_path / name, tiny, tiny.spec)) for name in ("a", "b"))
    for found in (first, second):
        for when in ("created", "first_finished", "lock_digest"):
            found["provenance"].pop(when)
    assert first == second


def test_parameters_by_component_sum_to_the_total(tiny: Any, tmp_path: Path) -> None:
    """Also as shown: the active experts are part of all experts, no component of their own."""
    found = collect(make(tmp_path, tiny, tiny.spec))
    for arm in found["arms"]:
        assert sum(arm["by_component"].values()) == arm["params"]["total"]
    shown = components_table(found).rows
    for column in range(1, len(found["arms"]) + 1):
        counts = [int(row[column].text.replace(",", "")) for row in shown]
        assert sum(counts[:-1]) == counts[-1] > 0


def test_tensors_are_shared_when_name_shape_and_spread_agree(tiny: Any, tmp_path: Path) -> None:
    """a: all agree; b: another shape; c: another standard deviation."""
    study = make(tmp_path, tiny, tiny.spec)
    assert collect(study)["arms"][1]["shared_init"] == {"with": "moe", "tensors": 1, "of": 3}
    for seed in (0, 1, 2):
        rewrite(study, f"dense/5120-s{seed}", tiny, init={"a": [[2], 0.03], "c": [[5], 0.06]})
    assert collect(study)["arms"][1]["shared_init"] == {"with": "moe", "tensors": 1, "of": 2}


def test_floors_and_how_much_was_scored_come_along(tiny: Any, tmp_path: Path) -> None:
    found = collect(make(tmp_path, tiny, tiny.spec))
    assert found["floor"] == FLOOR and found["curve_floor"]["loss"] == 1.4 and found["floor_reason"] is None
    assert (found["val_targets"], found["val_targets_total"]) == (900, 1200)
    assert all(run["num_spikes"] is None for run in found["runs"])


# ------------------------------------------------------------------------------------------------ added later


def test_a_late_seed_enters_no_number_of_what_was_declared(tiny: Any, tmp_path: Path) -> None:
    before = collect(make(tmp_path, tiny, tiny.spec))
    found = collect(make(tmp_path, tiny, dataclasses.replace(tiny.spec, seeds=(0, 1, 2, 3))))
    assert found["post_hoc"] == {"arms": [], "seeds": [3], "budgets": [], "claims": []}
    for table in ("table", "gaps"):
        assert rows(found, table, post_hoc=False) == before[table]
        assert len(rows(found, table, post_hoc=True)) == len(before[table])
    late = rows(found, "table", arm="moe", metric="val_loss", post_hoc=True)[0]
    assert late["n"] == late["expected_n"] == 4 and late["mean"] == pytest.approx(
        statistics.mean(LOSSES["moe"].values())
    )
    assert rows(found, "gaps", metric="val_loss", post_hoc=True)[0]["per_seed"] == {
        str(seed): pytest.approx(LOSSES["moe"][seed] - LOSSES["dense"][seed]) for seed in range(4)
    }
    assert [run["seed"] for run in found["runs"] if run["post_hoc"]] == [3, 3]
    (claim,) = found["claims"]
    assert [c["expected_n"] for c in (*claim["contrasts"], *claim["post_hoc_contrasts"])] == [3, 4]


def test_a_late_arm_and_what_only_a_late_claim_names_are_post_hoc(tiny: Any, tmp_path: Path) -> None:
    make(tmp_path, tiny, tiny.spec)
    arms = {**tiny.spec.arms, "other": unmatched(tiny)}
    claims = (*tiny.spec.claims, LowerClaim(id="late", left="moe", right="other"))
    found = collect(make(tmp_path, tiny, dataclasses.replace(tiny.spec, arms=arms, claims=claims)))
    assert found["post_hoc"]["arms"] == ["other"] and found["post_hoc"]["claims"] == ["late"]
    assert {row["arm"] for row in rows(found, "table", post_hoc=True)} == {"other"}
    assert {row["arm"] for row in rows(found, "table", post_hoc=False)} == {"moe", "dense"}
    assert {(gap["right"], gap["post_hoc"]) for gap in found["gaps"]} == {("dense", False), ("other", True)}
    assert [claim["post_hoc"] for claim in found["claims"]] == [False, True]


def test_a_pair_that_only_a_late_claim_names_is_post_hoc(tiny: Any, tmp_path: Path) -> None:
    spec = dataclasses.replace(tiny.spec, claims=(), arms={**tiny.spec.arms, "dense": unmatched(tiny)})
    assert collect(make(tmp_path, tiny, spec))["gaps"] == []
    found = collect(make(tmp_path, tiny, dataclasses.replace(spec, claims=tiny.spec.claims)))
    assert len(found["gaps"]) == 3 and all(gap["post_hoc"] for gap in found["gaps"])


def test_a_late_budget_is_post_hoc(tiny: Any, tmp_path: Path) -> None:
    make(tmp_path, tiny, tiny.spec)
    found = collect(make(tmp_path, tiny, dataclasses.replace(tiny.spec, budgets=(5120, 10240))))
    for table in ("table", "gaps"):
        assert all(row["post_hoc"] == (row["budget"] == 10240) for row in found[table])
    assert all(run["post_hoc"] == (run["budget"] == 10240) for run in found["runs"])
    assert found["claims"][0]["budget"] == 5120


def test_what_was_added_before_any_run_finished_is_declared(tiny: Any, tmp_path: Path) -> None:
    make(tmp_path, tiny, tiny.spec, **{f"{arm}_{seed}": "missing" for arm in ("moe", "dense") for seed in (0, 1, 2)})
    found = collect(make(tmp_path, tiny, dataclasses.replace(tiny.spec, seeds=(0, 1, 2, 3))))
    assert not any(row["post_hoc"] for table in ("table", "gaps", "runs") for row in found[table])


# ------------------------------------------------------------------------------------------------ over budgets

SHARES = {0: [(0.6, 1.0), (0.5, 2.0)], 5: [(0.95, 1.0), (0.7, 3.0)], 10: [(0.7, 1.0), (0.6, 2.0)]}
"""At steps of a training: `topk_share` and `log_z` of two layers."""


def wider(tiny: Any) -> StudySpec:
    """Three budgets and a claim of every kind that does not need them all equal."""
    claims = (
        *tiny.spec.claims,
        TrendClaim(id="grows", left="moe", right="dense", direction="grows"),
        FasterClaim(id="faster", left="moe", right="dense"),
        RoutingClaim(
            id="early", arm="moe", metric="topk_share", direction="above", threshold=0.9, layers="max", at_frac=0.45
        ),
        RoutingClaim(id="late", arm="moe", metric="log_z", direction="below", threshold=2.0, budget=5120),
    )
    return dataclasses.replace(tiny.spec, budgets=(5120, 10240, 20480), claims=claims)


def loss_of(arm: str, seed: int, budget: int) -> float:
    """dense falls by 0.1 a doubling; moe leads by 0.02 at first, and by 0.05 (and a little by the seed) more each."""
    doublings = {5120: 0, 10240: 1, 20480: 2}[budget]
    lead = 0.02 + (0.05 + 0.001 * seed) * doublings if arm == "moe" else 0.0
    return 3.0 + 0.1 * seed - 0.1 * doublings - lead


def widely(study: Path, tiny: Any, spec: StudySpec) -> Path:
    """The study above run, with routing that changes and losses per document."""
    models = {name: arm.model for name, arm in resolve_arms(spec.arms, tiny.dataset.vocab_size, 256).items()}
    for run in locked_runs(lock_study(study, spec, models, tiny.dataset, "equipoise run tiny")):
        directory = study / run.folder
        if directory.exists():
            continue
        loss = loss_of(run.arm, run.seed, run.budget)
        moe = run.arm == "moe"
        layers = {
            step: [{**layer(False), "topk_share": share, "log_z": z} for share, z in values] if moe else []
            for step, values in SHARES.items()
        }
        write_run(
            directory, run, tokens=2 * run.budget, val_loss=loss, best_val_loss=loss, val_bpb=loss, routing=layers[10]
        )
        (directory / "summary.json").unlink()
        (directory / "metrics.jsonl").unlink()
        for step, rows_ in layers.items():
            row = {"kind": "eval", "step": step, "tokens": 512 * step, "flops": step, "loss": 3.0, "elapsed_s": 0.1}
            append_row(directory / "metrics.jsonl", {**row, "routing": rows_})
        nats = np.array([4.0, 8.0, 2.0]) * loss
        units = {"unit_tokens_U": np.array([4, 8, 2]), "unit_document_U": np.array([0, 1, 2])}
        write_losses(
            directory, {"final_loss_U": nats, "best_loss_U": nats, "unit_bytes_U": np.array([9, 9, 9]), **units}
        )
        finish_run(directory, summary_of(run, loss, layers[10]))
    note_finished(study)
    return study


def summary_of(run: RunConfig, loss: float, routing: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "status": "complete", "digest": digest(run), "val_loss": loss, "best_val_loss": loss, "val_bpb": loss,
        "epochs": 0.5, "routing": routing, "best_routing": routing, "collapsed": False, "best_collapsed": False,
        "resumed_elsewhere": [], "init": {}, "message": None, "tokens": 2 * run.budget,
    }  # fmt: skip


def test_every_kind_of_claim_is_judged_from_run_directories(tiny: Any, tmp_path: Path) -> None:
    found = collect(widely(tmp_path, tiny, wider(tiny)))
    claims = {claim["id"]: claim for claim in found["claims"]}
    slope = claims["grows"]["contrasts"][0]
    assert [slope["per_seed"][seed] * math.log(2) for seed in ("0", "1", "2")] == pytest.approx([0.05, 0.051, 0.052])
    assert (claims["grows"]["verdict"], slope["budget"], slope["budgets"]) == ("supported", None, [5120, 10240, 20480])
    assert slope["expected_n"] == 3 and slope["dropped"] == []
    # dense ends at 2.8 (+ 0.1 a seed); moe is at 2.98 and 2.83, then 2.68: it gets there in 1 + 0.03/0.15 doublings
    ratio = claims["faster"]["contrasts"][0]["per_seed"]["0"]
    assert ratio == pytest.approx((1 + 0.03 / 0.15 - 2) * math.log(2)) and claims["faster"]["verdict"] == "supported"
    assert claims["early"]["contrasts"][0]["per_seed"] == dict.fromkeys("012", 0.95)  # step 5 is nearest to 4.5
    assert claims["late"]["contrasts"][0]["mean"] == pytest.approx(1.5)
    assert claims["late"]["contrasts"][0]["right"] is None and claims["late"]["matches"] == []
    assert {claim["verdict"] for claim in claims.values()} == {"supported"}
    write_results(tmp_path, found)
    shown = render_markdown({**found, "routing": []})
    for claim in ("the lead of moe over dense in validation loss grows", "moe reaches the same loss with fewer tokens"):
        assert claim in shown
    assert "topk\\_share of moe (largest of any layer, after 45 % of training) lies above 0.9" in shown
    assert "below the measured range" in shown


def test_kinds_added_after_the_first_run_are_post_hoc(tiny: Any, tmp_path: Path) -> None:
    spec = wider(tiny)
    widely(tmp_path, tiny, dataclasses.replace(spec, claims=spec.claims[:2]))
    found = collect(widely(tmp_path, tiny, spec))
    assert found["post_hoc"]["claims"] == ["faster", "early", "late"]
    assert [claim["post_hoc"] for claim in found["claims"]] == [False, False, True, True, True]
    changed = dataclasses.replace(spec.claims[1], direction="narrows")
    with pytest.raises(ConfigError, match=r"claims\.grows\.direction: \"?grows\"? → \"?narrows\"?"):
        widely(tmp_path, tiny, dataclasses.replace(spec, claims=(spec.claims[0], changed, *spec.claims[2:])))


def test_crossovers_and_the_interval_over_documents_come_with_the_gaps(tiny: Any, tmp_path: Path) -> None:
    found = collect(widely(tmp_path, tiny, wider(tiny)))
    (row,) = rows(found, "crossovers", metric="val_loss")
    assert row["where"] == dict.fromkeys((0, 1, 2), "below") and row["median"] is None  # it led all along
    for gap in found["gaps"]:
        own = gap["validation_sampling"]
        if gap["metric"] == "val_bpb":
            assert own is None
        else:  # every document has the same loss per token: resampling them changes nothing
            assert (own["ci_low"], own["ci_high"]) == pytest.approx((gap["mean"], gap["mean"]))
            assert own["num_documents"] == 3


def test_tokens_per_expert_and_the_match_without_embeddings(tiny: Any, tmp_path: Path) -> None:
    found = collect(make(tmp_path, tiny, tiny.spec))
    moe, dense = found["arms"]
    assert (moe["tokens_per_expert"], dense["tokens_per_expert"]) == ({"5120": 5120 * 2 / 3}, {"5120": 5120.0})
    (match,) = found["claims"][0]["matches"]
    without = dense["params"]["active_nonembedding"] / moe["params"]["active_nonembedding"] - 1
    assert match["residual_nonembedding"] == dense["match"]["residual_nonembedding"] == pytest.approx(without)
    assert (match["arm"], match["to"], match["on"]) == ("dense", "moe", "active_params")
    assert match["holds_nonembedding"] == (abs(without) <= 0.05) and abs(without) > abs(match["residual"])
    shown = render_markdown({**found, "routing": []})
    assert "residual without embeddings" in shown and "tokens per expert at 5.12k" in shown
    assert "with embeddings not counted" in shown


DERIVED = ("files", "self_digest", "schema_version")
"""Of a summary, what `finish_run` adds."""


def make_explorer(**changed: Any) -> dict[str, Any]:
    """An `explorer.json` of a routed run of the tiny study: a story of two tokens."""
    choices = {"experts": [[[0, 1], [2, 0]]], "weights": [[[0.6, 0.4], [0.9, 0.1]]]}
    story = {"tokens": ["a", " b"], "losses": [1.0, 2.0], "end_loss": None, **choices, **changed}
    top = {"token": "a", "share": 0.5, "count": 10}
    layer = {"coactivation": [[1.0, 0.5, 0.5]] * 3, "top_tokens": [[top], [], []]}
    return {"stories": [story], "layers": [layer]}


def explain(study: Path, place: str, explored: dict[str, Any]) -> None:
    """Put an `explorer.json` into a complete run."""
    directory = study / place
    summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    (directory / "explorer.json").write_text(json.dumps(explored), encoding="utf-8")
    finish_run(directory, {name: value for name, value in summary.items() if name not in DERIVED})


def test_the_explorer_takes_the_seed_that_most_arms_have(tiny: Any, tmp_path: Path) -> None:
    study = make(tmp_path, tiny, tiny.spec)
    assert collect(study)["explorer"] is None
    dense = {**make_explorer(experts=[], weights=[]), "layers": []}
    explain(study, "moe/5120-s0", make_explorer())
    explain(study, "moe/5120-s1", make_explorer(end_loss=0.5))
    explain(study, "dense/5120-s1", dense)
    found = collect(study)["explorer"]
    assert (found["budget"], found["seed"]) == (5120, 1)
    assert found["arms"] == [
        {"arm": "moe", "top_k": 2, "num_experts": 3, **make_explorer(end_loss=0.5)},
        {"arm": "dense", "top_k": 0, "num_experts": 0, **dense},
    ]


# ------------------------------------------------------------------------------------------------ broken runs


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("metrics.jsonl", b"{not json\n{}\n", "metrics.jsonl:1: not a JSON line"),
        ("metrics.jsonl", b'{"kind":"eval","step":0}\n', "cannot be read: 'tokens' is missing"),
        ("metrics.jsonl", b"[1]\n", "metrics.jsonl:1: all of it: [1] is not accepted; expected a valid dictionary"),
        (
            "metrics.jsonl",
            b'{"kind":"eval","step":0,"tokens":0,"flops":0,"elapsed_s":0,"loss":NaN,"routing":[]}\n',
            "metrics.jsonl:1: not a JSON line; the file was changed after it was written (NaN is no number)",
        ),
        ("samples.jsonl", b'{"step":10}\n', "cannot be read: 'tokens' is missing"),
        ("samples.jsonl", b"\xff\xfe\n{}\n", "samples.jsonl:1: not a JSON line"),
        ("val_losses.safetensors", b"\x00" * 40, "val_losses.safetensors: not a readable safetensors file ("),
        (
            "metrics.jsonl",
            b'{"kind":"eval","step":0,"tokens":0,"flops":0,"elapsed_s":0,"loss":1,"routing":[],'
            b'"chosen":{"tokens":9,"layers":["AAAA"]}}\n',
            "cannot be read: ValueError: choices of 3 bytes; expected 4 for 9 × 3",
        ),
        ("explorer.json", b"{", "explorer.json: not readable as JSON"),
        ("explorer.json", b"{}", "explorer.json: stories"),
        (
            "explorer.json",
            json.dumps(make_explorer(losses=[1.0])).encode(),
            "losses: 1 is not accepted; expected 2, one a",
        ),
        ("explorer.json", json.dumps(make_explorer(tokens=[1, 2])).encode(), "explorer.json: stories"),
        ("explorer.json", json.dumps(make_explorer(losses=[1.0, float("nan")])).encode(), "not readable as JSON (NaN"),
        ("explorer.json", json.dumps(make_explorer(experts=[])).encode(), "expected 2 of 3 experts in 1 layers"),
        (
            "explorer.json",
            json.dumps(make_explorer(experts=[[[0, 3], [1, 0]]])).encode(),
            "expected 2 of 3 experts in 1",
        ),
        ("explorer.json", json.dumps({**make_explorer(), "layers": []}).encode(), "layers: expected 1 of 3 experts"),
        ("environment.json", b"{}", "environment.json: environments: missing"),
        ("environment.json", b'{"environments": []}', "it names no environment"),
        ("summary.json", {"val_loss": None}, "summary.json: val_loss = None; expected a finite number"),
        (
            "summary.json",
            {"best_val_loss": "low"},
            'summary.json: best_val_loss: "low" is not accepted; expected a valid number',
        ),
        (
            "summary.json",
            {"resumed_elsewhere": None},
            "summary.json: resumed_elsewhere: null is not accepted; expected a valid list",
        ),
    ],
)
def test_a_run_that_cannot_be_read_is_broken_and_the_others_go_on(
    tiny: Any, tmp_path: Path, name: str, content: Any, said: str
) -> None:
    """Its checksums are right: what is wrong shows only when the content is read."""
    study = make(tmp_path, tiny, tiny.spec)
    directory = study / "moe" / "5120-s1"
    summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    (directory / "summary.json").unlink()
    for derived in DERIVED:
        summary.pop(derived)
    if name == "summary.json":
        summary |= content
    else:
        (directory / name).write_bytes(content)
    finish_run(directory, summary)
    found = collect(study)
    (broken,) = [run for run in found["runs"] if run["status"] != "complete"]
    assert (broken["arm"], broken["seed"], broken["status"]) == ("moe", 1, "broken") and said in broken["message"]
    assert str(tmp_path) not in broken["message"], "where the study lies is no part of what it found"
    assert broken["val_loss"] is None
    row = rows(found, "table", arm="moe", metric="val_loss")[0]
    assert row["n"] == 2 and row["lost"] == [1]
    assert "moe seed 1 is broken" in found["claims"][0]["reason"]
    assert len(found["curves"]) == len(found["samples"]) == 5 and len(found["routing"]) == 2
    write_results(study, found)


def test_an_unfinished_run_with_unreadable_rows_is_broken(tiny: Any, tmp_path: Path) -> None:
    study = make(tmp_path, tiny, tiny.spec)
    directory = study / "dense" / "5120-s0"
    (directory / "summary.json").unlink()
    (directory / "checkpoints" / "step-10").mkdir(parents=True)
    (directory / "checkpoints" / "step-10" / "manifest.json").write_text("{}", encoding="utf-8")
    statuses = [rows(collect(study), "runs", arm="dense", seed=0)[0]["status"]]
    (directory / "metrics.jsonl").write_bytes(b"no row\n{}\n")
    statuses.append(rows(collect(study), "runs", arm="dense", seed=0)[0]["status"])
    assert statuses == ["interrupted", "broken"]


def test_a_run_of_another_configuration_is_broken(tiny: Any, tmp_path: Path) -> None:
    study = make(tmp_path, tiny, tiny.spec)
    run = next(run for run in tiny.runs if run.folder == "moe/5120-s2")
    shutil.rmtree(study / run.folder)
    optim = dataclasses.replace(run.recipe.optim, lr=0.5)
    write_run(study / run.folder, dataclasses.replace(run, recipe=dataclasses.replace(run.recipe, optim=optim)))
    found = collect(study)
    (broken,) = [row for row in found["runs"] if row["status"] != "complete"]
    assert broken["status"] == "broken" and "lr: 0.003 → 0.5" in broken["message"] and broken["seed"] == 2


# ------------------------------------------------------------------------------------------------ environments


@pytest.mark.parametrize("field", ["equipoise", "torch", "numpy", "cpu_capability", "device", "threads"])
def test_runs_of_different_environments_mark_every_verdict(tiny: Any, tmp_path: Path, field: str) -> None:
    study = make(tmp_path, tiny, tiny.spec)
    rewrite(study, "dense/5120-s2", tiny, environments=[{**HERE, field: "other"}])
    found = collect(study)
    assert found["claims"][0]["marks"] == ["mixed environments"] and found["claims"][0]["verdict"] == "supported"
    assert found["provenance"]["mixed"] == {"fields": [field], "resumed": []}
    assert [env[field] for env in found["provenance"]["environments"]] == [HERE[field], "other"]
    assert [run["environments"] for run in found["runs"]] == [[0]] * 5 + [[1]]


@pytest.mark.parametrize(
    "other", [{"cpu": "x", "cores": 3, "python": "9"}, {"compute": "CPU (asked for), float32"}], ids=["trivia", "why"]
)
def test_what_no_number_depends_on_is_no_mixture(tiny: Any, tmp_path: Path, other: dict[str, Any]) -> None:
    study = make(tmp_path, tiny, tiny.spec)
    rewrite(study, "dense/5120-s2", tiny, environments=[{**HERE, **other}])
    found = collect(study)
    assert found["claims"][0]["marks"] == [] and found["provenance"]["mixed"] is None
    assert len(found["provenance"]["environments"]) == 2


def test_two_kinds_of_gpu_are_a_mixture(tiny: Any, tmp_path: Path) -> None:
    study = make(tmp_path, tiny, tiny.spec)
    for run in tiny.runs:
        card = "A" if run.seed else "B"
        rewrite(study, run.folder, tiny, environments=[{**HERE, "device": "cuda", "compute": card}])
    assert collect(study)["provenance"]["mixed"] == {"fields": ["compute"], "resumed": []}


def test_a_run_that_went_on_elsewhere_is_a_mixture(tiny: Any, tmp_path: Path) -> None:
    study = make(tmp_path, tiny, tiny.spec)
    rewrite(study, "moe/5120-s0", tiny, resumed_elsewhere=[4, 7], environments=[HERE, {**HERE, "cores": 9}])
    found = collect(study)
    assert found["claims"][0]["marks"] == ["mixed environments"]
    assert found["provenance"]["mixed"] == {
        "fields": [],
        "resumed": [{"arm": "moe", "seed": 0, "budget": 5120, "steps": [4, 7]}],
    }
    assert rows(found, "runs", arm="moe", seed=0)[0]["environments"] == [0, 1]


def test_a_diverged_run_elsewhere_is_no_mixture(tiny: Any, tmp_path: Path) -> None:
    """It carries no number."""
    study = make(tmp_path, tiny, tiny.spec)
    rewrite(study, "moe/5120-s0", tiny, fate="diverged", environments=[{**HERE, "torch": "9"}])
    assert collect(study)["provenance"]["mixed"] is None
