"""Rows and arrays of a study: every number is the one of results.json, and what is absent is NaN or None."""

from __future__ import annotations

import copy
import inspect
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import equipoise
from equipoise.errors import ConfigError, IntegrityError
from equipoise.loading import DIAGNOSTICS, as_rows, read_results
from equipoise.routing import diagnose

LAYER = {"usage": [0.5, 0.25, 0.25], **dict.fromkeys(DIAGNOSTICS, 0.5), "log_z": 1.5}
RUN = {
    "arm": "moe", "seed": 3, "budget": 100, "status": "complete", "post_hoc": False, "val_loss": 1.25,
    "best_val_loss": 1.0, "val_bpb": 0.5, "best_step": 4, "collapsed": False, "best_collapsed": False,
    "num_spikes": None, "steps": 8, "tokens": 96, "train_s": 2.5, "tokens_per_s": 40.0, "peak_memory_bytes": 7,
    "train_flops": 960,
}  # fmt: skip
GAP = {
    "left": "moe", "right": "dense", "budget": 100, "metric": "val_loss", "post_hoc": False, "n": 1, "expected_n": 2,
    "mean": 0.5, "sd": None, "ci_low": None, "ci_high": None, "confidence": 0.95, "noise_floor": None,
    "per_seed": {"3": 0.5}, "dropped": [5], "collapsed": ["dense"], "validation_sampling": None,
}  # fmt: skip
NOTHING = dict.fromkeys(("val_loss", "best_val_loss", "val_bpb", "best_step", "collapsed", "best_collapsed", "steps",
                         "tokens", "train_s", "tokens_per_s", "peak_memory_bytes", "train_flops"))  # fmt: skip
RESULTS: dict[str, Any] = {
    "schema_version": 1, "name": "s", "question": "?", "split": "validation", "seeds": [3, 5], "budgets": [50, 100],
    "arms": [{"name": "moe", "params": {"total": 9, "active": 6}},
             {"name": "dense", "params": {"total": 7, "active": 7}}],
    "runs": [RUN, {**RUN, "arm": "dense", "val_loss": 0.75}, {**RUN, "seed": 5, "status": "diverged", **NOTHING}],
    "gaps": [GAP],
    "claims": [{"id": "c", "kind": "lower", "metric": "val_loss", "verdict": "inconclusive", "post_hoc": False,
                "marks": ["lost run"], "reason": "too few", "p": {}}],
    "curves": [{"arm": "moe", "seed": 3, "budget": 100, "points": [
        {"step": 0, "tokens": 0, "flops": 0, "seconds": 0.0, "loss": 3.0},
        {"step": 4, "tokens": 48, "flops": 480, "seconds": 1.5, "loss": None}]}],
    "routing": [{"arm": "moe", "seed": 3, "budget": 100, "num_experts": 3, "top_k": 1, "points": [
        {"step": 0, "tokens": 0, "layers": [LAYER, {**LAYER, "log_z": None}]}]}],
}  # fmt: skip


def test_rows_hold_what_the_results_say() -> None:
    study = as_rows(RESULTS)
    assert (study.arms, study.seeds, study.budgets, study.split) == (("moe", "dense"), (3, 5), (50, 100), "validation")
    first, _, lost = study.runs
    assert (first.val_loss, first.total_params, first.active_params, first.tokens) == (1.25, 9, 6, 96)
    assert (lost.status, lost.val_loss, lost.collapsed) == ("diverged", None, None)
    (gap,) = study.gaps
    assert (gap.mean, gap.sd, gap.left_collapsed, gap.right_collapsed, gap.dropped) == (0.5, None, False, True, (5,))
    (claim,) = study.claims
    assert (claim.id, claim.verdict, claim.marks) == ("c", "inconclusive", ("lost run",))


def test_values_are_arms_by_seeds_with_nan_for_what_is_absent() -> None:
    study = as_rows(RESULTS)
    expected = np.array([[1.25, math.nan], [0.75, math.nan]])
    np.testing.assert_array_equal(study.values(), expected)
    np.testing.assert_array_equal(study.values("val_bpb", 100)[:, 0], [0.5, 0.5])
    assert np.isnan(study.values("val_loss", 50)).all() and study.values().dtype == np.float64


def test_a_curve_and_a_routing_are_arrays() -> None:
    study = as_rows(RESULTS)
    curve = study.curve("moe", 3)
    assert curve.steps_P.tolist() == [0, 4] and curve.tokens_P.tolist() == [0, 48]
    np.testing.assert_array_equal(curve.loss_P, [3.0, math.nan])
    np.testing.assert_array_equal(curve.seconds_P, [0.0, 1.5])
    routing = study.routing("moe", 3, 100)
    assert routing.usage_PLE.shape == (1, 2, 3) and routing.usage_PLE[0, 1].tolist() == [0.5, 0.25, 0.25]
    np.testing.assert_array_equal(routing.diagnostics["log_z"], [[1.5, math.nan]])
    assert set(routing.diagnostics) == set(DIAGNOSTICS)


def test_every_diagnostic_is_one_that_routing_measures() -> None:
    source = inspect.getsource(diagnose)
    assert all(f'"{name}"' in source for name in DIAGNOSTICS)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.values("loss"), r"metric 'loss': expected one of val_loss, best_val_loss, val_bpb"),
        (lambda s: s.values("val_loss", 7), r"budget 7: expected one of 50, 100"),
        (lambda s: s.curve("mo", 3), r"arm 'mo': expected one of moe, dense"),
        (lambda s: s.curve("moe", 4), r"seed 4: expected one of 3, 5"),
        (
            lambda s: s.curve("moe", 5),
            r"moe, seed 5, 100 tokens: no curves of this run; expected a run of moe that has one",
        ),
        (lambda s: s.routing("dense", 3), r"dense, seed 3, 100 tokens: no routing of this run; expected a run of moe"),
    ],
)
def test_what_is_not_there_is_named(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call(as_rows(RESULTS))


def test_a_results_file_alone_is_a_study_too(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(RESULTS), encoding="utf-8")
    assert equipoise.load_study(str(path)) == as_rows(RESULTS)


def test_what_is_no_study_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    with pytest.raises(ConfigError, match="no such folder"):
        read_results(path)
    with pytest.raises(IntegrityError, match=r"no lock\.json there"):
        read_results(tmp_path)
    for content, message in (
        ({}, "not the results of a study; expected a study's folder, or a results.json with schema_version 1"),
        ({**RESULTS, "schema_version": 2}, "not the results of a study; expected"),
        ({**RESULTS, "runs": [{}]}, r"not the results of a study \(KeyError"),
        ({**RESULTS, "arms": None}, r"not the results of a study \(TypeError"),
    ):
        path.write_text(json.dumps(content), encoding="utf-8")
        with pytest.raises(IntegrityError, match=message):
            read_results(path)
    path.write_text("{", encoding="utf-8")
    with pytest.raises(IntegrityError, match="not readable as JSON"):
        read_results(path)


def test_rows_do_not_share_with_what_they_came_from() -> None:
    source = copy.deepcopy(RESULTS)
    study = as_rows(source)
    source["name"] = "other"
    assert study.results["name"] == "s"


def test_loading_a_study_loads_no_torch_and_draws_nothing(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(json.dumps(RESULTS), encoding="utf-8")
    code = "import sys, equipoise\nequipoise.load_study('results.json')\n"
    code += "print(*{'torch', 'matplotlib'} & set(sys.modules))"
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0 and done.stdout.strip() == "", done.stderr
