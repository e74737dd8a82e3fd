"""A study that is looked at while it is not begun, at work, partly failed, stopped and finished; nothing is written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from equipoise.errors import ConfigError, IntegrityError
from equipoise.watching import Watcher, at_work, failures, is_over, last_error, newest_rows


def everything(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


def by_name(snapshot: Any) -> dict[str, Any]:
    return {run.name: run for run in snapshot.runs}


def test_a_folder_without_a_study_is_not_begun(tmp_path: Path) -> None:
    snapshot = Watcher(tmp_path).look()
    assert (snapshot.state, snapshot.study, snapshot.runs, snapshot.left_s) == ("not begun", None, (), None)
    assert is_over(snapshot) and not list(tmp_path.iterdir())
    with pytest.raises(
        ConfigError, match=r"nowhere: no such folder; expected the folder of a study, e\.g\. runs/quick"
    ):
        Watcher(tmp_path / "nowhere").look()
    (tmp_path / "lock.json").write_text("{", encoding="utf-8")
    with pytest.raises(IntegrityError, match=r"lock\.json: not readable as JSON"):
        Watcher(tmp_path).look()


def test_a_study_being_prepared_is_at_work(tmp_path: Path, begun: Any) -> None:
    begun.holds(tmp_path / "other" / ".study.lock")
    snapshot = Watcher(tmp_path / "other").look()
    assert snapshot.state == "running" and snapshot.held_by.startswith("process ") and not is_over(snapshot)


def test_a_locked_study_waits(begun: Any) -> None:
    before = everything(begun.directory)
    snapshot = Watcher(begun.directory).look()
    assert snapshot.state == "stopped" and snapshot.num_runs == snapshot.count("waiting") == 6
    assert snapshot.command == "equipoise run study.toml" and snapshot.study == "tiny" and snapshot.left_s is None
    assert [run.name for run in snapshot.runs] == [run.folder for run in begun.runs]
    assert everything(begun.directory) == before


def test_runs_at_work_have_speed_time_and_routing(begun: Any) -> None:
    moe, dense = begun.runs[:2]
    begun.holds(begun.directory / ".study.lock")
    for run, steps in ((moe, 4), (dense, 8)):
        begun.rows(run, steps)
        begun.holds(begun.directory / run.arm / f".{run.folder.split('/')[1]}.lock")
    before = everything(begun.directory)
    snapshot = Watcher(begun.directory).look()
    assert everything(begun.directory) == before
    assert snapshot.state == "running" and snapshot.count("training") == 2 and snapshot.count("waiting") == 4
    one = by_name(snapshot)[moe.folder]
    assert (one.state, one.step, one.num_steps) == ("training", 4, 10)
    assert one.loss == pytest.approx(4.96) and one.eval_loss == 5.0 and one.lr == pytest.approx(1.0)
    assert one.update_s == pytest.approx(0.1) and one.tokens_per_s == pytest.approx(5120)
    assert one.elapsed_s == pytest.approx(0.4) and one.left_s == pytest.approx(0.6)
    assert (one.routing.busiest_frac, one.routing.num_dead, one.routing.collapsed) == (0.45, 1, False)
    assert by_name(snapshot)[dense.folder].routing is None
    # two at a time, longest first: 1 + 1, then 1 + 0.6 and 1 + 0.2
    assert snapshot.left_s == pytest.approx(2.6)


def test_a_run_whose_process_was_killed_is_not_at_work(begun: Any) -> None:
    run = begun.runs[0]
    begun.rows(run, 3)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    lock = begun.directory / run.arm / f".{run.folder.split('/')[1]}.lock"
    begun.holds(lock, dead.pid)
    assert at_work(lock) is None and by_name(Watcher(begun.directory).look())[run.folder].state == "stopped"
    lock.with_suffix(".holder").write_text("process 1 on another-machine since long ago", encoding="utf-8")
    assert at_work(lock) == "process 1 on another-machine since long ago"
    assert by_name(Watcher(begun.directory).look())[run.folder].state == "training"
    lock.with_suffix(".holder").write_bytes(b"\xff")
    assert at_work(lock) is None


def test_what_ended_says_how(begun: Any) -> None:
    complete, diverged, failed, stopped, broken, waiting = begun.runs
    begun.finish(complete)
    begun.finish(diverged, "diverged", message="step 3: lm_loss is nan")
    begun.rows(failed, 2)
    begun.log(failed, f"error: {begun.directory / failed.folder}: out of memory (tried to allocate)")
    begun.rows(stopped, 2)
    begun.log(stopped, "error: x/checkpoints/step-00000002: saved at step 2 of 10; run again to go on")
    begun.finish(broken)
    (begun.directory / broken.folder / "metrics.jsonl").write_text("", encoding="utf-8")
    watcher = Watcher(begun.directory)
    snapshot = watcher.look()
    states = {run.name: (run.state, run.message) for run in snapshot.runs}
    assert states[complete.folder] == ("complete", None)
    assert states[diverged.folder] == ("diverged", "step 3: lm_loss is nan")
    assert states[failed.folder] == ("failed", "out of memory (tried to allocate)")
    assert states[stopped.folder] == ("stopped", None) and states[waiting.folder] == ("waiting", None)
    assert states[broken.folder][0] == "broken" and "metrics.jsonl" in states[broken.folder][1]
    assert by_name(snapshot)[complete.folder].eval_loss == 4.25 and by_name(snapshot)[complete.folder].step == 10
    assert {run.name for run in failures(snapshot.runs)} == {diverged.folder, failed.folder, broken.folder}
    assert snapshot.state == "stopped" and watcher.look() == snapshot


def test_a_failure_of_an_earlier_attempt_is_forgotten_when_the_study_starts_again(begun: Any) -> None:
    import os

    run = begun.runs[0]
    begun.rows(run, 2)
    begun.log(run, "error: no")
    begun.holds(begun.directory / ".study.lock")
    log = begun.directory / "logs" / f"{run.folder}.log"
    os.utime(log, ns=(0, (begun.directory / ".study.holder").stat().st_mtime_ns - 1))
    assert by_name(Watcher(begun.directory).look())[run.folder].state == "waiting"
    os.utime(log, ns=(0, (begun.directory / ".study.holder").stat().st_mtime_ns + 1))
    assert by_name(Watcher(begun.directory).look())[run.folder].state == "failed"


def test_what_changes_is_seen_and_a_finished_study_says_so(begun: Any) -> None:
    watcher = Watcher(begun.directory)
    first = watcher.look()
    for run in begun.runs:
        begun.finish(run)
    assert first.state == "stopped" and watcher.look().state == "finished"
    assert watcher.look().count("complete") == 6 and is_over(watcher.look())


def test_newest_rows_of_a_file_that_grows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert newest_rows(path) == ([], None)

    def text(row: dict[str, Any]) -> str:
        return json.dumps(row, separators=(",", ":")) + "\n"

    evaluation = text({"kind": "eval", "step": 1, "loss": 2.0})
    updates = [text({"kind": "train", "step": step, "x": "y" * 200}) for step in range(1, 3000)]
    path.write_text(evaluation + "".join(updates) + '{"kind":"train","st', encoding="utf-8")
    rows, point = newest_rows(path)
    assert [row["step"] for row in rows] == list(range(2936, 3000)), "64 whole rows, the torn one left out"
    assert point == {"kind": "eval", "step": 1, "loss": 2.0}, "found beyond the tail that is read first"
    path.write_text('{"kind":"train","step":"x"}\n{"kind":"train"\n[1]\n', encoding="utf-8")
    assert newest_rows(path) == ([], None)


def test_the_reason_is_the_last_line_of_a_log_if_it_is_one(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_error(log) is None
    log.write_text("error: old\nstarted again\n", encoding="utf-8")
    assert last_error(log) is None
    log.write_bytes(b"started\nerror: disk \xff is full\n\n")
    assert last_error(log) == "disk \ufffd is full"
