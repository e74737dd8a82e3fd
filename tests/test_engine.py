"""Executing tasks as child processes, and signals: they reach the children, nothing is left running, twice is at once.

Children are bare interpreters: no run is trained here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from equipoise.data.prepare import prepare
from equipoise.engine import SHOWN_S, Engine, Event, Stop, Task, catching_signals, run_tasks
from equipoise.errors import Interrupted
from equipoise.probe import Probes

SAVES = """
import signal, sys, time
def save(number, frame):
    print("saved", flush=True)
    sys.exit(128 + number)
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, save)
print("ready", flush=True)
time.sleep(600)
"""
IGNORES = SAVES.replace("sys.exit(128 + number)", "pass")


@dataclass
class Started:
    """An engine whose children are bare interpreters that run the text in the task's name, in the order of start."""

    children: list[tuple[str, subprocess.Popen[bytes]]] = field(default_factory=list)

    def start(self, tasks: Sequence[Any]) -> list[Any]:
        for task in tasks:
            with task.log.open("ab") as log:
                child = subprocess.Popen(
                    [sys.executable, "-S", "-c", task.run.code],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    start_new_session=True,
                )
            self.children.append((task.run.folder, child))
        return [child for _, child in self.children[-len(tasks) :]]

    def engine(self, num_jobs: int, retries: int = 0) -> Engine:
        return Engine(start=self.start, num_jobs=num_jobs, how="as a test says", retries=retries)


@pytest.fixture
def started() -> Started:
    return Started()


def tasks_of(folder: Path, *codes: str) -> list[Task]:
    runs = [SimpleNamespace(folder=str(index), code=code) for index, code in enumerate(codes)]
    return [Task(run=run, directory=folder / run.folder, log=folder / f"{run.folder}.log") for run in runs]  # type: ignore[arg-type]


def when_ready(folder: Path, number: int, then: Any) -> threading.Thread:
    """Call `then` once so many children have said that they are ready."""

    def wait() -> None:
        until = time.monotonic() + 120
        while time.monotonic() < until:
            if sum("ready" in log.read_text(encoding="utf-8") for log in folder.glob("*.log")) >= number:
                then()
                return
            time.sleep(0.01)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def gone(children: Started) -> bool:
    return all(child.poll() is not None for _, child in children.children)


def test_exit_codes_order_and_what_follows(tmp_path: Path, started: Started) -> None:
    """Two at a time; one that fails stops no other; a task that succeeded makes others possible, which come last."""
    tasks = tasks_of(tmp_path, "raise SystemExit(3)", "pass", "pass")
    (after,) = tasks_of(tmp_path / "..", "raise SystemExit(4)")
    after = Task(run=SimpleNamespace(folder="after", code="pass"), directory=tmp_path / "after", log=after.log)  # type: ignore[arg-type]
    events: list[Event] = []
    codes = run_tasks(
        tasks,
        started.engine(2),
        on_event=events.append,
        stop=Stop(),
        follow=lambda task: [after] if task is tasks[1] else [],
        poll_s=0.01,
    )
    assert codes == {tmp_path / "0": 3, tmp_path / "1": 0, tmp_path / "2": 0, tmp_path / "after": 0}
    assert [name for name, _ in started.children] == ["0", "1", "2", "after"]
    assert [event.exit_code for event in events if event.kind == "finished" and event.task is tasks[0]] == [3]


def test_what_is_at_work_is_told_a_few_times_a_second_however_often_it_is_looked_at(
    tmp_path: Path, started: Started
) -> None:
    events: list[Event] = []
    began = time.monotonic()
    run_tasks(
        tasks_of(tmp_path, f"import time; time.sleep({3 * SHOWN_S})"),
        started.engine(1),
        on_event=events.append,
        stop=Stop(),
        poll_s=SHOWN_S / 50,
    )
    told = [event.kind for event in events]
    assert 1 <= told.count("progress") <= (time.monotonic() - began) / SHOWN_S + 1
    assert (told[0], told[-1]) == ("started", "finished")


def test_what_somebody_else_told_to_stop_is_started_again_as_often_as_the_engine_says(
    tmp_path: Path, started: Started
) -> None:
    """The first saves itself twice and then succeeds, the second never does, the third is no such case."""
    codes = (
        f"from pathlib import Path; p = Path({str(tmp_path / 'n')!r}); p.open('a').write('x'); "
        "raise SystemExit(143 if len(p.read_text()) < 3 else 0)",
        "raise SystemExit(130)",
        "raise SystemExit(4)",
    )
    events: list[Event] = []
    ended = run_tasks(
        tasks_of(tmp_path, *codes), started.engine(3, retries=2), on_event=events.append, stop=Stop(), poll_s=0.01
    )
    assert ended == {tmp_path / "0": 0, tmp_path / "1": 130, tmp_path / "2": 4}
    assert sorted(name for name, _ in started.children) == ["0"] * 3 + ["1"] * 3 + ["2"]
    told = [event.exit_code for event in events if event.kind == "finished" and event.task.run.folder == "0"]
    assert told == [143, 143, 0]


def test_what_is_not_this_process_to_do_is_passed_over(tmp_path: Path, started: Started) -> None:
    codes = run_tasks(
        tasks_of(tmp_path, "pass", "pass", "pass"),
        started.engine(1),
        on_event=lambda _: None,
        stop=Stop(),
        take=lambda task: task.run.folder != "1",
        poll_s=0.01,
    )
    assert codes == {tmp_path / "0": 0, tmp_path / "2": 0} and [name for name, _ in started.children] == ["0", "2"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_once_children_save_and_nothing_further_starts(
    tmp_path: Path, started: Started, number: signal.Signals
) -> None:
    tasks = tasks_of(tmp_path, SAVES, SAVES, SAVES)
    with pytest.raises(Interrupted, match="stopped; 3 run") as stopped, catching_signals() as stop:
        thread = when_ready(tmp_path, 2, lambda: os.kill(os.getpid(), number))
        run_tasks(tasks, started.engine(2), on_event=lambda _: None, stop=stop, poll_s=0.01)
    thread.join()
    assert stopped.value.exit_code == 128 + number
    assert [child.returncode for _, child in started.children] == [128 + number] * 2 and gone(started)
    for name, _ in started.children:
        assert (tmp_path / f"{name}.log").read_text(encoding="utf-8") == "ready\nsaved\n", "told once"


def test_a_second_signal_kills_children_that_do_not_end(tmp_path: Path, started: Started) -> None:
    def twice() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)

    with pytest.raises(Interrupted) as stopped, catching_signals() as stop:
        thread = when_ready(tmp_path, 2, twice)
        run_tasks(
            tasks_of(tmp_path, IGNORES, IGNORES),
            started.engine(2),
            on_event=lambda _: None,
            stop=stop,
            poll_s=0.01,
        )
    thread.join()
    assert stopped.value.exit_code == 143
    assert gone(started) and {child.returncode for _, child in started.children} == {-signal.SIGKILL}


def test_an_error_of_ours_leaves_no_orphan(tmp_path: Path, started: Started) -> None:
    def broken(event: Event) -> None:
        if event.kind == "progress":
            raise ValueError("not our day")

    with pytest.raises(ValueError, match="not our day"):
        run_tasks(
            tasks_of(tmp_path, SAVES, SAVES),
            started.engine(2),
            on_event=broken,
            stop=Stop(),
            poll_s=0.01,
        )
    assert gone(started)


# ------------------------------------------------------------------------------------------------ counting


BUSY = """
import hashlib, os, sys
from equipoise.engine import catching_signals
with catching_signals(second=lambda number: os._exit(128 + number)) as stop:
    print("busy", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"a", b"b", 2_000_000_000)  # an hour in which no line of Python is run
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_quits_at_once_whatever_computes(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, encoding="utf-8") as child:
        assert child.stdout is not None and child.stdout.readline() == "busy\n"
        child.send_signal(number)
        time.sleep(0.2)
        assert child.poll() is None
        child.send_signal(number)
        assert child.wait(timeout=60) == 128 + number


def until(condition: Any) -> None:
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)


def test_signals_are_counted_and_handlers_put_back() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    second: list[int] = []
    with catching_signals(second.append) as stop:
        assert stop() == 0
        os.kill(os.getpid(), signal.SIGHUP)
        until(stop)
        assert stop() == signal.SIGHUP and not second
        os.kill(os.getpid(), signal.SIGINT)
        until(lambda: second)
        assert stop() == signal.SIGHUP and stop.count == 2 and second == [signal.SIGINT]
    assert {number: signal.getsignal(number) for number in before} == before
    assert not [thread for thread in threading.enumerate() if thread.name == "signals"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("phase", ["reading", "learning the tokenizer", "encoding"])
def test_a_signal_while_data_is_prepared_keeps_what_is_finished(
    tiny: Any, tmp_path: Path, number: signal.Signals, phase: str
) -> None:
    with pytest.raises(Interrupted, match="what is finished was kept") as stopped, catching_signals() as stop:

        def say(line: str) -> None:
            if phase in line:
                os.kill(os.getpid(), number)
                until(stop)

        prepare(tiny.spec.corpus, tiny.spec.tokenizer, tmp_path, progress=say, should_stop=lambda: stop() != 0)
    assert stopped.value.exit_code == 128 + number
    (left,) = [path.name for path in tmp_path.iterdir() if path.is_dir()]
    assert left == f".{tiny.dataset.directory.name}.unfinished"
    assert prepare(tiny.spec.corpus, tiny.spec.tokenizer, tmp_path).digest == tiny.dataset.digest


def test_a_signal_while_runs_at_a_time_are_tried_has_its_own_exit_code() -> None:
    with pytest.raises(Interrupted, match="stopped while measuring") as stopped, catching_signals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        until(stop)
        Probes(children=[], should_stop=lambda: stop() != 0).ask({"do": "update"})
    assert stopped.value.exit_code == 143
