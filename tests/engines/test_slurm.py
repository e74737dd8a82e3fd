"""Jobs by submitit: its executor for this machine is Slurm's in every respect but the queue."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from equipoise.engine import Task
from equipoise.engines import on_slurm
from equipoise.engines.on_slurm import _parameters, _why_refused, slurm_engine
from equipoise.engines.options import SlurmOptions
from equipoise.errors import ConfigError
from equipoise.watching import last_error

pytest.importorskip("submitit", reason="the extra slurm is not installed")
pytestmark = pytest.mark.timeout(900)  # several commands each, every run of which loads torch
HERE = ("--engine", "slurm", "--engine-option", "cluster=local")


def task(folder: Path, name: str) -> Task:
    run = SimpleNamespace(folder=name)
    return Task(run=run, directory=folder / name, log=folder / f"{name}.log")  # type: ignore[arg-type]


def test_a_study_by_submitit_is_that_of_this_machine_byte_for_byte(check_whole: Any, folder: Path) -> None:
    check_whole("by-submitit", *HERE)
    assert list((folder / "by-submitit" / "slurm").glob("*_result.pkl"))


def test_a_warned_job_s_run_and_a_stopped_study_go_on_as_if_nothing_had_been(check_stopped: Any) -> None:
    """The warning is the one of a preemption or of the end of a job's time: the run is saved, the job queued again."""
    check_stopped("warned", lambda pid: os.kill(pid, signal.SIGUSR2), *HERE)


def test_what_sbatch_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script that submitit makes of the options for an array of three; sbatch and srun are there and do nothing."""
    place = tmp_path / "bin"
    place.mkdir()
    for name in ("sbatch", "srun", "squeue", "scancel"):
        (place / name).write_text('#!/bin/sh\ntest -f "$1" && cat "$1" > "$SCRIPT"\necho job 71\n', encoding="utf-8")
        (place / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{place}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SCRIPT", str(tmp_path / "script"))
    options = SlurmOptions(partition="gpu", minutes=90, memory_gb=7.5, sbatch={"account": "me", "constraint": "h100"})
    tasks = [task(tmp_path, name) for name in "abc"]
    with slurm_engine(
        options, study=tmp_path / "tiny", num_jobs=2, cpus=4, gpus=1, arguments=["--data", "d"], environment={}
    ) as engine:
        assert engine.how == "as Slurm jobs in partition gpu, 4 core(s) and 1 GPU(s) and 90 minutes a run, 2 at a time"
        children = engine.start(tasks)
        monkeypatch.setattr(on_slurm, "ASK_S", 0.0)
        monkeypatch.setattr(on_slurm, "LOOK_S", 0.0)
        assert [child.poll() for child in children] == [None] * 3, "a job may be between two states"
        assert [child.poll() for child in children] == [1] * 3, "no job of the array is in the queue any more"
    said = last_error(tmp_path / "a.log")
    assert said == f"job 71_0 left no result and is not in the queue any more; see {tmp_path}/tiny/slurm/71_0_0_log.err"
    scripts = (tmp_path / "script").read_text(encoding="utf-8").splitlines()
    for line in (
        "--partition=gpu",
        "--time=90",
        "--mem=7680MB",
        "--cpus-per-task=4",
        "--gpus-per-node=1",
        "--account=me",
        "--constraint=h100",
        "--array=0-2%2",
        "--signal=USR2@120",
        "--job-name=equipoise-tiny",
    ):
        assert f"#SBATCH {line}" in scripts, (line, scripts)
    assert len(list((tmp_path / "tiny" / "slurm").glob("71_*_submitted.pkl"))) == 3
    assert "gpus_per_node" not in _parameters(SlurmOptions(), "tiny", 1, 0, None)


def test_what_sbatch_refuses_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "bin"
    place.mkdir()
    for name in ("sbatch", "srun", "squeue"):
        (place / name).write_text("#!/bin/sh\necho 'sbatch: error: invalid account' >&2\nexit 1\n", encoding="utf-8")
        (place / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{place}{os.pathsep}{os.environ['PATH']}")
    where = {"study": tmp_path, "num_jobs": None, "cpus": 1, "gpus": 0, "arguments": [], "environment": {}}
    with (
        slurm_engine(SlurmOptions(), **where) as engine,  # type: ignore[arg-type]
        pytest.raises(ConfigError, match=r"^--engine slurm: sbatch refused: invalid account$"),
    ):
        engine.start([task(tmp_path, "a")])


def test_without_slurm_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    where = {"study": tmp_path, "num_jobs": None, "cpus": 1, "gpus": 0, "arguments": [], "environment": {}}
    with (
        pytest.raises(
            ConfigError, match=r"^--engine slurm: sbatch, srun and squeue are not on the PATH; expected a machine"
        ),
        slurm_engine(SlurmOptions(), **where),  # type: ignore[arg-type]
    ):
        pass


def test_what_sbatch_says_is_told_in_a_line() -> None:
    said = "sbatch: error: invalid partition specified: gpuu\nsbatch: error: Batch job submission failed: Invalid\n"
    assert _why_refused(said) == "invalid partition specified: gpuu; Batch job submission failed: Invalid"
    assert _why_refused("something\nelse\n") == "else"
