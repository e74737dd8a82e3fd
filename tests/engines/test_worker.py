"""What happens on a worker: the command's child has the environment of the study's process, and outlives no one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from equipoise import engine
from equipoise.engines import worker
from equipoise.engines.worker import NO_GPU, attempt, carried, note_failure
from equipoise.files import held
from equipoise.shares import run_lock
from equipoise.watching import last_error


def test_a_child_gets_the_numeric_environment_of_the_study_and_the_rest_of_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OMP_NUM_THREADS and MKL_CBWR are set on the worker alone; they reach no child unless the study has them."""
    given: list[dict[str, str]] = []

    class Ended:
        def poll(self) -> int:
            return 5

    def start(line: Any, log: Path, forker: Any, environment: dict[str, str]) -> Any:
        given.append(dict(environment))
        return Ended()

    from contextlib import nullcontext

    monkeypatch.setattr(worker, "nursery", lambda environment: nullcontext())
    monkeypatch.setattr(worker, "start_child", start)
    for name in [name for name in os.environ if carried({name: ""})]:
        monkeypatch.delenv(name)
    for name, value in {"OMP_NUM_THREADS": "7", "MKL_CBWR": "AVX", "HOME_OF_WORKER": "x", "PYTHONPATH": "/w"}.items():
        monkeypatch.setenv(name, value)
    study = {"OMP_NUM_THREADS": "1", "PYTHONPATH": "/study", "HOME": "/me", "PATH": "/bin"}
    with attempt(["train", str(tmp_path / "run")], tmp_path / "log", {**carried(study), **NO_GPU}) as running:
        assert running.wait() == 5
    environment = given[0]
    assert environment["OMP_NUM_THREADS"] == "1" and environment["PYTHONPATH"] == "/study"
    with attempt(["train", str(tmp_path / "run")], tmp_path / "log", {}):
        assert given[1]["PYTHONPATH"] == "/w" and "OMP_NUM_THREADS" not in given[1]
    assert "MKL_CBWR" not in environment and environment["HOME_OF_WORKER"] == "x"
    assert environment["CUDA_VISIBLE_DEVICES"] == "" and environment["PATH"] == os.environ["PATH"] != "/bin"


def test_a_stop_tells_the_child_once_by_either_way_of_starting_it(tmp_path: Path) -> None:
    told: list[Any] = []

    class Child:
        def send_signal(self, number: int) -> None:
            told.append(number)

    class Forker:
        def close(self) -> None:
            told.append("closed")

    for forker in (Forker(), None):
        running = worker.Attempt(child=Child(), forker=forker)  # type: ignore[arg-type]
        running.stop()
        running.stop()
    assert told == ["closed", signal.SIGTERM]


KILLED = """
import sys
from pathlib import Path
from equipoise.engines.worker import attempt
with attempt(["train", sys.argv[1], "--data", sys.argv[2]], Path(sys.argv[3]), {}) as running:
    raise SystemExit(running.wait())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="children are forked on Linux alone")
def test_a_killed_worker_s_child_saves_itself_and_the_next_attempt_waits_for_it(
    tiny: Any, tmp_path: Path, helpers: Any
) -> None:
    from dataclasses import replace

    from equipoise.record import start_run

    run, directory, log = replace(tiny.runs[0], budget=1_024_000), tmp_path / "arm" / "run", tmp_path / "log"
    start_run(directory, run, tiny.dataset.tokenizer().to_json())
    command = [sys.executable, "-c", KILLED, str(directory), str(tiny.dataset.directory), str(log)]
    with subprocess.Popen(command) as first:
        helpers.wait_for(lambda: helpers.updates(directory) > 20)
        child = helpers.trainer(directory)
        first.kill()
    with subprocess.Popen(command) as second:
        helpers.wait_for(lambda: helpers.trainer(directory) not in (0, child))
        helpers.wait_for(lambda: helpers.updates(directory) > 60)
        os.kill(helpers.trainer(directory), signal.SIGTERM)
        assert second.wait(timeout=120) == 143
    said = log.read_text(encoding="utf-8")
    assert "going on from step " in said and "held by" not in said


def test_an_attempt_gives_up_waiting_and_lets_the_command_name_who_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "SAVING_S", 0.0)
    monkeypatch.setattr(worker, "POLL_S", 0.0)
    with held(run_lock(tmp_path / "run"), "run"):
        worker._wait_for_another(tmp_path / "run")


def test_why_a_task_has_no_exit_code_is_told_like_any_failure(tmp_path: Path) -> None:
    note_failure(tmp_path / "logs" / "a.log", "job 7 ended (NODE_FAIL) without a result")
    assert last_error(tmp_path / "logs" / "a.log") == "job 7 ended (NODE_FAIL) without a result"
    assert engine.SAVED == (129, 130, 143)
