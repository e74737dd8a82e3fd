"""Units of work between processes: each is done once, whoever takes it; what a dead process held is taken over."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from equipoise.engine import Task
from equipoise.files import give_back, held, holder, take
from equipoise.lock import lock_study, locked_runs, read_lock, status
from equipoise.shares import run_lock, shares_of

EIGHT = """
import os, signal, sys, time
from pathlib import Path
from equipoise.engine import Task
from equipoise.errors import LockedError
from equipoise.files import held
from equipoise.lock import locked_runs, read_lock
from equipoise.shares import run_lock, shares_of

study = Path(sys.argv[1])
lock = read_lock(study)
tasks = [Task(run=run, directory=study / run.folder, log=study / "log") for run in locked_runs(lock)]

def work(number):
    shares, mine = shares_of(study, lock), tasks[number % len(tasks):] + tasks[:number % len(tasks)]
    while not all((task.directory / "done").exists() for task in tasks):
        with shares.planning():
            pass
        for task in mine:
            if not shares.take(task):
                continue
            with held(run_lock(task.directory), "run"):
                if (task.directory / "done").exists():
                    continue
                task.directory.mkdir(parents=True, exist_ok=True)
                with (task.directory / "trained").open("a", encoding="utf-8") as file:
                    file.write(f"{number} begins\\n")
                time.sleep(0.02)
                if number < 2 and not (study / f"died-{number}").exists():
                    (study / f"died-{number}").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                (task.directory / "done").touch()
                with (task.directory / "trained").open("a", encoding="utf-8") as file:
                    file.write(f"{number} ends\\n")
        shares.give_back()
        time.sleep(0.002)

children = []
for number in range(8):
    child = os.fork()
    if child == 0:
        work(number)
        os._exit(0)
    children.append(child)
print(sorted(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
"""


@pytest.fixture
def study(tiny: Any, tmp_path: Path) -> Path:
    lock_study(tmp_path, tiny.spec, tiny.models, tiny.dataset)
    return tmp_path


@pytest.mark.skipif(sys.platform != "linux", reason="the eight processes are forked")
def test_eight_processes_do_every_run_once_and_take_over_what_two_dead_ones_held(study: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EIGHT, str(study)], capture_output=True, encoding="utf-8", timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[-9, -9, 0, 0, 0, 0, 0, 0]"
    begun = 0
    for run in locked_runs(read_lock(study)):
        lines = (study / run.folder / "trained").read_text(encoding="utf-8").splitlines()
        begun += sum(line.endswith("begins") for line in lines)
        assert sum(line.endswith("ends") for line in lines) == 1 and lines[-1].endswith("ends")
        assert lines[-2].split()[0] == lines[-1].split()[0]
    assert begun == 6 + 2


def task_of(study: Path, place: int) -> Task:
    run = locked_runs(read_lock(study))[place]
    return Task(run=run, directory=study / run.folder, log=study / "log")


def test_a_unit_is_one_process_s_until_it_is_given_back(study: Path) -> None:
    here, there = (shares_of(study, read_lock(study)) for _ in range(2))
    records = status(study, read_lock(study))
    assert here.take(task_of(study, 0)) and here.take(task_of(study, 0))
    assert not there.take(task_of(study, 0)) and there.take(task_of(study, 1))
    with there.planning() as free:
        assert task_of(study, 0).run.folder not in free and len(free) == 5
    (who,) = there.holders(records[:1])
    assert who.startswith("process ") and " on " in who and " since 20" in who
    here.give_back()
    assert there.take(task_of(study, 0))


def test_a_run_that_a_child_without_its_parent_still_trains_is_left_alone(study: Path) -> None:
    shares = shares_of(study, read_lock(study))
    task = task_of(study, 0)
    with held(run_lock(task.directory), "run"):
        assert not shares.take(task)
        shares.give_back()
        with shares.planning() as free:
            assert task.run.folder not in free
    assert shares.take(task)


def test_planning_gives_back_only_what_it_took(study: Path) -> None:
    here, there = (shares_of(study, read_lock(study)) for _ in range(2))
    assert here.take(task_of(study, 0))
    with here.planning() as free:
        assert len(free) == 6 and not there.take(task_of(study, 3))
    assert there.take(task_of(study, 3)) and not there.take(task_of(study, 0))


def test_waiting_names_the_holder_until_it_lets_go(tmp_path: Path) -> None:
    lock = take(tmp_path / "a.lock")
    assert lock is not None and take(tmp_path / "a.lock") is None
    heard: list[str] = []

    def wait(who: str) -> None:
        heard.append(who)
        if len(heard) == 3:
            give_back(lock)

    with held(tmp_path / "a.lock", "it", wait):
        assert len(heard) == 3 and all(who.startswith("process ") for who in heard)
    assert holder(tmp_path / "a.lock") == "another process", "nobody has left a note"
