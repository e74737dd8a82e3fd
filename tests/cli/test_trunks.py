"""A study of several budgets under WSD as a user runs it: trunks, status, a signal while the trunk trains."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

SCHEDULE = 'batch_tokens = 512\nschedule = { kind = "wsd", warmup_tokens = 1024, decay_frac = 0.4 }'


@pytest.fixture
def folder(tiny_toml: str, tmp_path: Path) -> Path:
    one_arm = tiny_toml[: tiny_toml.index("[arms.dense]")]
    study = one_arm.replace("batch_tokens = 512", SCHEDULE).replace("[5120]", "[2560, 5120]")
    (tmp_path / "study.toml").write_text(study.replace("[0, 1, 2]", "[0]"), encoding="utf-8")
    return tmp_path


def test_budgets_branch_from_a_trunk_and_a_larger_one_extends_it(folder: Path, equipoise: Any) -> None:
    done = equipoise("run", "study.toml", "--jobs", "2", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "2 runs, 0 done, 1 trunk(s) first, 2 at a time" in done.stderr and "[2/2]" in done.stderr
    assert "branch from a shared trunk, each bit for bit the run trained alone" in done.stdout
    found = json.loads((folder / "runs/tiny/results.json").read_text(encoding="utf-8"))
    assert [run["branched_from"]["step"] for run in found["runs"]] == [6, 3]
    assert found["schedule"]["kind"] == "wsd" and found["training_flops"]["trunks"] == 1
    assert found["training_flops"]["spent"] * 15 == found["training_flops"]["alone"] * 12  # 6 + 4 + 2 of 10 + 5
    grown = equipoise("run", "study.toml", "--set", "budgets=[2560, 5120, 10_240]", cwd=folder)
    assert grown.returncode == 0 and "3 runs, 2 done, 1 trunk(s) first, 1 at a time" in grown.stderr
    log = (folder / "runs/tiny/logs/moe/trunk-s0.log").read_text(encoding="utf-8")
    assert "going on from step 6" in log
    shown = json.loads(equipoise("status", "runs/tiny", "--json", cwd=folder).stdout)
    assert [(t["trunk"], t["step"], t["steps"]) for t in shown["trunks"]] == [("moe/trunk-s0", 12, 12)]
    again = equipoise("run", "study.toml", "--set", "budgets=[2560, 5120, 10_240]", cwd=folder)
    assert "3 runs, 3 done; nothing to train" in again.stderr


def test_a_signal_while_the_trunk_trains_saves_it_and_the_study_goes_on(
    folder: Path, equipoise: Any, tiny_cache: Path
) -> None:
    one = ["--set", "budgets=[1024, 1_024_000, 2_048_000]"]
    command = [sys.executable, "-m", "equipoise", "run", "study.toml", "--cache", str(tiny_cache), *one]
    child = subprocess.Popen(
        command, cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, encoding="utf-8"
    )
    metrics = folder / "runs/tiny/moe/trunk-s0/metrics.jsonl"
    deadline = time.monotonic() + 200
    while not (metrics.exists() and metrics.stat().st_size > 2000) and time.monotonic() < deadline:
        time.sleep(0.1)
    child.send_signal(signal.SIGTERM)
    _, said = child.communicate(timeout=100)
    assert child.returncode == 143 and "stopped; 3 run(s) not finished" in said
    shown = equipoise("status", "runs/tiny", cwd=folder)
    assert "Trunks: updates that budgets share" in shown.stdout and "0 of 3 runs complete" in shown.stdout
    trunk = folder / "runs/tiny/moe/trunk-s0"
    assert list((trunk / "checkpoints").glob("step-*"))
    refused = equipoise("train", str(trunk), "--seed", "0", cwd=folder)
    assert refused.returncode == 2 and "are a study's" in refused.stderr
