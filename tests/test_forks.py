"""Forked children: exit codes, signals, output, and what happens when the process that asked is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from equipoise import forks
from equipoise.cli import main
from equipoise.forks import ONE_THREAD, Nursery, nursery

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="children are forked on Linux alone")

SERVER = """
import os, signal, sys, threading, time
from equipoise.forks import serve

def stopped(number, frame):
    print("told to end", flush=True)
    sys.exit(143)

def command(arguments):
    what = arguments[0]
    print("doing", what)
    if what == "sleep":
        signal.signal(signal.SIGTERM, stopped)
        print("ready", os.getsid(0) == os.getpid(), flush=True)
        time.sleep(60)
    if what == "fail":
        raise ValueError("no such luck")
    return int(what)

if "late" in sys.argv:
    time.sleep(60)
if "threads" in sys.argv:
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
serve(command)
"""


@contextmanager
def serving(*arguments: str) -> Iterator[Nursery]:
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
    )
    assert server.stdin is not None and server.stdout is not None
    try:
        yield Nursery(server=server)
    finally:
        server.stdin.close()
        server.wait(timeout=30)
        server.stdout.close()


def text_of(log: Path, wanted: str) -> str:
    """The log's text, once it holds `wanted`."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        if log.exists() and wanted in log.read_text(encoding="utf-8"):
            return log.read_text(encoding="utf-8")
        time.sleep(0.01)
    raise AssertionError(f"{log} never said {wanted!r}")


def test_exit_codes_and_output(tmp_path: Path) -> None:
    with serving() as forker:
        logs = {what: tmp_path / f"{what}.log" for what in ("0", "3", "fail")}
        logs["3"].write_text("before\n", encoding="utf-8")
        children = {what: forker.start([what], log) for what, log in logs.items()}
        codes = {what: child.wait() for what, child in children.items() if child}
        assert codes == {"0": 0, "3": 3, "fail": 1}
        assert logs["3"].read_text(encoding="utf-8") == "before\ndoing 3\n"
        assert "ValueError: no such luck" in logs["fail"].read_text(encoding="utf-8")
        assert all(child and child.poll() == codes[what] for what, child in children.items())


def test_signals_reach_a_child_in_a_session_of_its_own(tmp_path: Path) -> None:
    with serving() as forker:
        logs = [tmp_path / "a.log", tmp_path / "b.log"]
        told, killed = (forker.start(["sleep"], log) for log in logs)
        assert told and killed
        assert all("ready True" in text_of(log, "ready") for log in logs)
        assert told.poll() is None and killed.poll() is None
        told.send_signal(signal.SIGTERM)
        killed.kill()
        assert (told.wait(), killed.wait()) == (143, -signal.SIGKILL)
        told.send_signal(signal.SIGTERM)  # it has ended: nothing to send to


def test_children_are_told_to_end_when_nobody_asks_any_more(tmp_path: Path) -> None:
    with serving() as forker:
        log = tmp_path / "a.log"
        assert forker.start(["sleep"], log)
        text_of(log, "ready")
    assert "told to end" in log.read_text(encoding="utf-8")


def test_children_of_a_server_that_is_gone_are_waited_for_and_can_be_told_to_end(tmp_path: Path) -> None:
    with serving() as forker:
        log = tmp_path / "a.log"
        child = forker.start(["sleep"], log)
        assert child
        text_of(log, "ready")
        forker.server.kill()
        forker.server.wait()
        assert child.poll() is None
        assert forker.start(["0"], log) is None
        child.send_signal(signal.SIGTERM)
        assert child.wait() == 1  # how it ended nobody knows
        assert "told to end" in log.read_text(encoding="utf-8")


def test_a_signal_to_all_processes_leaves_the_server_to_the_last(tmp_path: Path) -> None:
    with serving() as forker:
        log = tmp_path / "a.log"
        child = forker.start(["sleep"], log)
        assert child
        text_of(log, "ready")
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            forker.server.send_signal(number)
        child.send_signal(signal.SIGTERM)
        assert child.wait() == 143


def test_a_server_that_does_not_answer_in_time_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "START_S", 0.2)
    with serving("late") as forker:
        assert forker.start(["3"], tmp_path / "a.log") is None
        assert forker.server.wait() == -signal.SIGKILL
        assert forker.start(["0"], tmp_path / "b.log") is None
    assert not (tmp_path / "a.log").exists()


def test_nothing_is_forked_beside_threads(tmp_path: Path) -> None:
    with serving("threads") as forker:
        assert forker.start(["0"], tmp_path / "a.log") is None


def test_leaving_a_nursery_whose_server_died_is_no_error(tmp_path: Path) -> None:
    with nursery(os.environ) as forker:
        assert forker is not None
        forker.server.kill()
        forker.server.wait()
        assert forker.start(["train", "nothing"], tmp_path / "a.log") is None


def test_the_command_line_forks_runs(tmp_path: Path) -> None:
    with nursery(os.environ) as forker:
        assert forker is not None
        child = forker.start(["train", str(tmp_path / "nothing")], tmp_path / "a.log")
        assert child is not None and child.wait() == 2
    assert "no such study file or preset" in (tmp_path / "a.log").read_text(encoding="utf-8")


def test_one_thread_is_for_loading_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is started with the variable whatever it was; what it forks is started without."""
    monkeypatch.setenv(ONE_THREAD, "3")
    with nursery({"A": "b", ONE_THREAD: "3"}) as forker:
        assert forker is not None
        place, end = Path(f"/proc/{forker.server.pid}/environ"), time.monotonic() + 30
        while not (content := place.read_bytes()) and time.monotonic() < end:
            time.sleep(0.01)  # the program is being loaded
        given = content.split(b"\0")
        assert sorted(filter(None, given)) == [b"A=b", f"{ONE_THREAD}=1".encode()]
    seen = []
    monkeypatch.setattr(forks, "serve", lambda command: seen.append(ONE_THREAD in os.environ))
    main.nursery()
    assert seen == [False]
