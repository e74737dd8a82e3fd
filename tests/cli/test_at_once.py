"""Several processes at one study, as users start them: one trains and the others name it, or they share the runs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from equipoise.record import read_run

MOE = [f"moe/5120-s{seed}" for seed in (0, 1, 2)]


@pytest.fixture
def study(finished: Path, tmp_path: Path) -> Path:
    """The folder of the finished study, with one arm lost."""
    shutil.copytree(finished, tmp_path / "copy")
    for name in ("moe", "logs"):
        shutil.rmtree(tmp_path / "copy" / "runs" / "tiny" / name)
    return tmp_path / "copy"


def start(folder: Path, cache: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "equipoise", "run", "study.toml", "--cache", str(cache), *options]
    return subprocess.Popen(
        command, cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, encoding="utf-8"
    )


def trained(folder: Path) -> dict[str, int]:
    """How often each lost run said that it was complete."""
    logs = folder / "runs" / "tiny" / "logs"
    return {run: (logs / f"{run}.log").read_text(encoding="utf-8").count(": complete, ") for run in MOE}


def test_of_eight_at_once_one_trains_each_run_once_and_seven_say_who_holds_it(study: Path, tiny_cache: Path) -> None:
    children = [start(study, tiny_cache) for _ in range(8)]
    said = {child.pid: child.communicate(timeout=400)[1] for child in children}
    (first,) = [child.pid for child in children if child.returncode == 0]
    assert sorted(child.returncode for child in children) == [0] + [6] * 7, said
    for pid, text in said.items():
        assert pid == first or (f"held by process {first} on " in text and "--share" in text)
    assert trained(study) == dict.fromkeys(MOE, 1)


def test_sharing_each_run_is_trained_once_and_a_dead_process_s_are_taken_over(study: Path, tiny_cache: Path) -> None:
    """One that runs the study is killed in the middle of a run; the one beside it does the rest, to equal results."""
    before = json.loads((study / "runs/tiny/results.json").read_text(encoding="utf-8"))
    first = start(study, tiny_cache, "--jobs", "1")
    logs, until = study / "runs" / "tiny" / "logs" / "moe", time.monotonic() + 200
    while not list(logs.glob("*.log")) and time.monotonic() < until:
        time.sleep(0.02)
    beside = start(study, tiny_cache, "--share")
    holder = study / "runs" / "tiny" / ".study.holder"
    assert f"process {first.pid} on" in holder.read_text(encoding="utf-8")
    assert beside.stderr is not None
    heard = beside.stderr.readline()
    os.kill(first.pid, signal.SIGKILL)
    rest = beside.communicate(timeout=400)[1]
    first.communicate()
    assert beside.returncode == 0, rest
    assert f"beside process {first.pid} on " in heard
    assert all(read_run(study / "runs" / "tiny" / run).status == "complete" for run in MOE)
    assert max(trained(study).values()) == 1
    after = json.loads((study / "runs/tiny/results.json").read_text(encoding="utf-8"))
    assert after["table"] == before["table"] and after["claims"] == before["claims"]


def test_what_the_options_do_is_shown(equipoise: Any) -> None:
    for command in ("run", "train"):
        assert "--auto-micro-batch" in equipoise(command, "--help").stdout
    assert "--share" in equipoise("run", "--help").stdout
