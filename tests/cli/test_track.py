"""`--track` moves no result: the same study with it, and the real TensorBoard beside it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from equipoise.record import masked, read_rows

RUNS = [f"{arm}/5120-s{seed}" for seed in (0, 1, 2) for arm in ("moe", "dense")]


def test_tracked_runs_are_the_same_runs(finished: Path, tmp_path: Path, equipoise: Any) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    shutil.copytree(finished, tmp_path / "copy")
    study, before = tmp_path / "copy" / "runs" / "tiny", finished / "runs" / "tiny"
    shutil.rmtree(study / "moe" / "5120-s0")
    again = equipoise("run", "study.toml", "--jobs", "1", "--track", "tensorboard", cwd=tmp_path / "copy")
    assert again.returncode == 0 and "6 runs, 5 done" in again.stderr and "tensorboard" not in again.stderr
    name = "moe/5120-s0/metrics.jsonl"
    assert masked(read_rows(study / name)) == masked(read_rows(before / name))
    summaries = [
        json.loads((place / "moe/5120-s0/summary.json").read_text(encoding="utf-8")) for place in (study, before)
    ]
    assert summaries[0]["digest"] == summaries[1]["digest"] and summaries[0]["val_loss"] == summaries[1]["val_loss"]
    assert sorted(summaries[0]["files"]) == sorted(summaries[1]["files"])
    for run in RUNS:
        assert len(list((study / "tensorboard" / run).glob("events.out.tfevents.*"))) == 1


def test_an_unknown_tracker_trains_nothing(equipoise: Any, tmp_path: Path) -> None:
    refused = equipoise("train", "quick", "--arm", "moe", "--seed", "0", "--track", "comet", cwd=tmp_path)
    assert refused.returncode == 2 and "error: --track comet: expected tensorboard or wandb" in refused.stderr
    assert not list(tmp_path.iterdir())
