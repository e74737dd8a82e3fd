"""The main job as a user does it: run, look, run again, add, break, stop."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from equipoise.record import MASKED_FIELDS, read_run

RUNS = [f"{arm}/5120-s{seed}" for seed in (0, 1, 2) for arm in ("moe", "dense")]


def without_time(value: Any) -> Any:
    """Results with what measures the machine taken out."""
    machine = {*MASKED_FIELDS, "seconds"}
    if isinstance(value, dict):
        return {key: without_time(item) for key, item in value.items() if key not in machine}
    return [without_time(item) for item in value] if isinstance(value, list) else value


def results(folder: Path) -> Any:
    return json.loads((folder / "runs" / "tiny" / "results.json").read_text(encoding="utf-8"))


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "copy")
    return tmp_path / "copy"


def test_run_ends_with_results_and_a_verdict(finished: Path) -> None:
    shown = (finished / "stdout").read_text(encoding="utf-8")
    assert "does it run?" in shown and "known floor" in shown and "± " in shown
    assert re.search(r"(SUPPORTED|REFUTED|EQUIVALENT|INCONCLUSIVE) +moe-lower", shown)
    told = (finished / "stderr").read_text(encoding="utf-8")  # the verdict does not wait for what comes after
    assert re.search(r"(SUPPORTED|REFUTED|EQUIVALENT|INCONCLUSIVE) moe-lower.*95 % interval.*\n.*measuring one", told)
    found = results(finished)
    assert [row["status"] for row in found["runs"]] == ["complete"] * 6
    (gap,) = [gap for gap in found["gaps"] if gap["metric"] == "val_loss"]
    per_seed = {
        str(seed): value["moe"] - value["dense"]
        for seed in (0, 1, 2)
        for value in [{r["arm"]: r["val_loss"] for r in found["runs"] if r["seed"] == seed}]
    }
    assert gap["per_seed"] == pytest.approx(per_seed) and gap["n"] == 3
    assert found["floor"]["loss"] < min(row["val_loss"] for row in found["runs"])
    shared = next(arm["shared_init"] for arm in found["arms"] if arm["name"] == "dense")
    assert shared["with"] == "moe" and 8 <= shared["tensors"] < shared["of"]
    for name in ("report.html", "results.md", "lock.json", "step_time.json"):
        assert (finished / "runs" / "tiny" / name).stat().st_size > 500


def test_running_again_trains_nothing_and_changes_no_result(copy: Path, equipoise: Any) -> None:
    study = copy / "runs" / "tiny"
    before = {path: path.stat().st_mtime_ns for run in RUNS for path in (study / run).rglob("*") if path.is_file()}
    report, table = (study / "report.html").read_bytes(), (study / "results.json").read_bytes()
    again = equipoise("run", "study.toml", cwd=copy)
    assert again.returncode == 0 and "6 runs, 6 done" in again.stderr
    assert {
        path: path.stat().st_mtime_ns for run in RUNS for path in (study / run).rglob("*") if path.is_file()
    } == before
    assert (study / "report.html").read_bytes() == report and (study / "results.json").read_bytes() == table


def test_only_what_is_missing_or_altered_is_done_again(copy: Path, equipoise: Any) -> None:
    study, before = copy / "runs" / "tiny", without_time(results(copy))
    shutil.rmtree(study / "moe" / "5120-s0")
    metrics = study / "dense" / "5120-s1" / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-40])
    kept = (study / "dense" / "5120-s0" / "summary.json").stat().st_mtime_ns
    again = equipoise("run", "study.toml", cwd=copy)
    assert again.returncode == 0 and "6 runs, 4 done" in again.stderr
    assert (study / "dense" / "5120-s0" / "summary.json").stat().st_mtime_ns == kept
    assert without_time(results(copy)) == before


def test_a_seed_added_later_is_post_hoc_beside_the_locked_verdict(copy: Path, equipoise: Any) -> None:
    before = results(copy)["claims"][0]
    again = equipoise("run", "study.toml", "--set", "seeds=[0, 1, 2, 3]", cwd=copy)
    assert again.returncode == 0 and "8 runs, 6 done" in again.stderr
    (claim,) = results(copy)["claims"]
    assert claim["verdict"] == before["verdict"] and claim["p"] == before["p"]
    assert claim["contrasts"][0]["n"] == 3 and claim["post_hoc_contrasts"][0]["n"] == 4


def test_runs_without_their_lock_are_refused_so_no_claim_is_made_after_the_fact(copy: Path, equipoise: Any) -> None:
    (copy / "runs" / "tiny" / "lock.json").unlink()
    refused = equipoise("run", "study.toml", cwd=copy)
    assert refused.returncode == 5 and "holds 6 run(s) but no lock.json" in refused.stderr


def test_another_run_in_a_place_is_refused_naming_the_field(copy: Path, equipoise: Any) -> None:
    """A finished run that was copied into another's place."""
    study = copy / "runs" / "tiny"
    shutil.rmtree(study / "moe" / "5120-s1")
    shutil.copytree(study / "moe" / "5120-s0", study / "moe" / "5120-s1")
    refused = equipoise("run", "study.toml", cwd=copy)
    assert refused.returncode == 5 and "holds another run (seed: 0 → 1)" in refused.stderr


def test_changing_a_locked_study_is_refused_and_nothing_is_lost(copy: Path, equipoise: Any) -> None:
    lock = (copy / "runs" / "tiny" / "lock.json").read_bytes()
    refused = equipoise("run", "study.toml", "--set", "recipe.optim.lr=0.1", cwd=copy)
    assert refused.returncode == 2 and "recipe.optim.lr: 0.003 → 0.1" in refused.stderr
    assert (copy / "runs" / "tiny" / "lock.json").read_bytes() == lock


def test_a_run_that_fails_stops_no_other_and_is_shown(copy: Path, equipoise: Any) -> None:
    """A run directory that cannot be written to: its child fails, the others are there."""
    study = copy / "runs" / "tiny"
    shutil.rmtree(study / "moe" / "5120-s0")
    shutil.rmtree(study / "dense" / "5120-s2")
    (study / "moe" / "5120-s0" / "checkpoints").mkdir(parents=True)
    (study / "moe" / "5120-s0" / "checkpoints").rmdir()
    (study / "moe" / "5120-s0" / "checkpoints").write_text("in the way", encoding="utf-8")
    again = equipoise("run", "study.toml", "--json", cwd=copy)
    assert again.returncode != 0
    assert re.search(r"moe/5120-s0: exit code \d+: .*checkpoints.*; see runs/tiny/logs/moe/5120-s0\.log", again.stderr)
    assert "1 of 6 runs not complete (moe 5120 seed 0: " in again.stderr and "the same command tries" in again.stderr
    found = json.loads(again.stdout)
    assert {row["status"] for row in found["runs"] if (row["arm"], row["seed"]) != ("moe", 0)} == {"complete"}
    row = next(row for row in found["table"] if row["arm"] == "moe" and row["metric"] == "val_loss")
    assert row["n"] == 2 and row["expected_n"] == 3 and row["lost"] == [0]
    assert found["claims"][0]["verdict"] == "inconclusive" and "lost run" in found["claims"][0]["marks"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_saves_leaves_no_orphan_and_the_study_goes_on(
    finished: Path, tmp_path: Path, equipoise: Any, tiny_cache: Path, number: signal.Signals
) -> None:
    (tmp_path / "study.toml").write_bytes((finished / "study.toml").read_bytes())
    long = ["--set", "budgets=[1_024_000]", "--set", "seeds=[0]"]
    command = [sys.executable, "-m", "equipoise", "run", "study.toml", "--cache", str(tiny_cache), *long]
    child = subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, encoding="utf-8"
    )
    metrics = [tmp_path / "runs" / "tiny" / arm / "1024000-s0" / "metrics.jsonl" for arm in ("moe", "dense")]
    deadline = time.monotonic() + 120
    while not all(path.exists() and path.stat().st_size > 2000 for path in metrics) and time.monotonic() < deadline:
        time.sleep(0.1)
    child.send_signal(number)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 128 + number
    assert "stopped; 2 run(s) not finished" in said
    for path in metrics:
        record = read_run(path.parent)
        assert record.status == "interrupted"
        (saved,) = sorted((path.parent / "checkpoints").glob("step-*"))[-1:]
        assert int(saved.name.removeprefix("step-")) == record.rows("train")[-1]["step"]


def test_two_at_once_one_is_refused_naming_the_holder(copy: Path, equipoise: Any, tiny_cache: Path) -> None:
    shutil.rmtree(copy / "runs" / "tiny" / "moe")
    command = [sys.executable, "-m", "equipoise", "run", "study.toml", "--cache", str(tiny_cache)]
    child = subprocess.Popen(command, cwd=copy, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    holder = copy / "runs" / "tiny" / ".study.holder"
    while not holder.exists():
        assert child.poll() is None
        time.sleep(0.02)
    second = equipoise("run", "study.toml", cwd=copy)
    assert second.returncode == 6 and f"held by process {child.pid}" in second.stderr
    assert child.wait(timeout=120) == 0


def test_a_vocabulary_the_text_cannot_fill_is_matched_anew_before_the_lock(
    equipoise: Any, tiny_toml: str, tmp_path: Path
) -> None:
    """100,000 pieces are asked for; the widths are solved for what the tokenizer really has."""
    study = tiny_toml.replace("vocab_size = 512", "vocab_size = 100_000").replace("seeds = [0, 1, 2]", "seeds = [0]")
    (tmp_path / "study.toml").write_text(study.replace("rtol = 0.05", "rtol = 0.2"), encoding="utf-8")
    done = equipoise("train", "study.toml", "--arm", "dense", "--seed", "0", cwd=tmp_path)
    assert done.returncode == 0 and "reached of 100000; arms matched anew" in done.stderr
    models = json.loads((tmp_path / "runs" / "tiny" / "lock.json").read_text(encoding="utf-8"))["models"]
    tokenizer = json.loads((tmp_path / "runs/tiny/dense/5120-s0/tokenizer.json").read_text(encoding="utf-8"))
    assert models["moe"]["vocab_size"] == models["dense"]["vocab_size"] == len(tokenizer["model"]["vocab"]) < 5000
