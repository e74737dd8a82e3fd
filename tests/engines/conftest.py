"""A study with trunks run by `--engine local`, the same by another engine, and when two are the same byte for byte."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from equipoise.record import MASKED_FIELDS

MASKED = {*MASKED_FIELDS, "timed_s", "timed_tokens", "seconds", "rows", "files", "self_digest", "created", "commands"}
"""What measures the machine, the digests of what holds it, and the time and the command line of a study's beginning."""


def study_toml(tiny_toml: str, budgets: str = "[2048, 4096]") -> str:
    """One arm, one seed, two budgets that branch off a trunk: three children."""
    text = tiny_toml[: tiny_toml.index("[arms.dense]")]
    text = text.replace("seeds = [0, 1, 2]", "seeds = [0]").replace("budgets = [5120]", f"budgets = {budgets}")
    text = text.replace("num_evals = 4", "num_evals = 2")
    return text.replace("optim =", 'schedule = { kind = "wsd", warmup_tokens = 512 }\noptim =')


def masked(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: masked(item) for name, item in value.items() if name not in MASKED}
    return [masked(item) for item in value] if isinstance(value, list) else value


def tree(study: Path) -> dict[str, Any]:
    """Every file of every run and trunk: bytes, or what JSON says but for masked fields."""
    found: dict[str, Any] = {}
    for path in study.glob("*/*-s*/**/*"):
        if path.is_file() and path.suffix not in (".lock", ".holder"):
            name, content = path.relative_to(study).as_posix(), path.read_bytes()
            if path.suffix == ".jsonl":
                found[name] = [masked(json.loads(line)) for line in content.splitlines()]
            else:
                found[name] = masked(json.loads(content)) if path.suffix == ".json" else content
    return found


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_toml: str) -> Path:
    """Where the studies of a test process lie, in `study.toml`'s company."""
    place = tmp_path_factory.mktemp("engines")
    (place / "study.toml").write_text(study_toml(tiny_toml), encoding="utf-8")
    return place


@pytest.fixture(scope="session")
def start(folder: Path, tiny_cache: Path) -> Callable[..., subprocess.Popen[str]]:
    """Start `equipoise run study.toml --out OUT` with more options."""

    def call(out: str, *options: str, **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "equipoise",
                "run",
                "study.toml",
                "--cache",
                str(tiny_cache),
                "--out",
                out,
                *options,
            ],
            cwd=folder,
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
        )

    return call


@pytest.fixture(scope="session")
def run(start: Callable[..., subprocess.Popen[str]]) -> Callable[..., tuple[int, str, str]]:
    """Run it to its end: exit code, stdout, stderr."""

    def call(out: str, *options: str, **variables: str) -> tuple[int, str, str]:
        child = start(out, *options, **variables)
        said, told = child.communicate(timeout=280)
        return child.returncode, said, told

    return call


@pytest.fixture(scope="session")
def local(folder: Path, run: Callable[..., tuple[int, str, str]]) -> Path:
    """The study as the machine itself runs it."""
    code, _, told = run("local", "--jobs", "2")
    assert code == 0, told
    return folder / "local"


LONG = ("--set", "budgets=[204_800]", "--set", "base.model.num_layers=2", "--set", "recipe.samples.num_tokens=1")
"""One run of 400 updates: long enough to be stopped twice."""


@pytest.fixture(scope="session")
def long_local(folder: Path, run: Callable[..., tuple[int, str, str]]) -> Path:
    """The longer study, never stopped."""
    code, _, told = run("long-local", "--jobs", "2", *LONG)
    assert code == 0, told
    return folder / "long-local"


def wait_for(condition: Callable[[], Any], seconds: float = 240) -> Any:
    """What `condition` returns once that is true."""
    until = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < until, f"nothing in {seconds} s"
        time.sleep(0.02)
    return found


def updates(directory: Path) -> int:
    """Updates that the run there has recorded so far."""
    path = directory / "metrics.jsonl"
    return path.read_bytes().count(b'"kind":"train"') if path.exists() else 0


def trainer(directory: Path) -> int:
    """The process that trains in a directory, 0 when none does."""
    try:
        words = (directory.parent / f".{directory.name}.holder").read_text(encoding="utf-8").split()
    except OSError:
        return 0
    return int(words[1]) if words else 0


def parent(pid: int) -> int:
    """The process that started a process."""
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    return int(stat.rpartition(")")[2].split()[1])


@pytest.fixture
def helpers() -> Iterator[Any]:
    """What a test needs of this file: conftest modules cannot be imported by name."""
    from types import SimpleNamespace

    yield SimpleNamespace(tree=tree, masked=masked, wait_for=wait_for, updates=updates, trainer=trainer, parent=parent)


def plant_failure(study: Path) -> Callable[[], None]:
    """Put something in the way of a run; returns what takes it away."""
    obstacle = study / "moe" / "4096-s0" / "checkpoints"
    obstacle.parent.mkdir(parents=True)
    obstacle.write_text("in the way", encoding="utf-8")
    return obstacle.unlink


@pytest.fixture
def check_whole(folder: Path, run: Any, local: Path) -> Callable[..., None]:
    """A study by another engine: one run fails and stops no other, the same command does it alone, all is as local."""

    def check(out: str, *options: str) -> None:
        clear = plant_failure(folder / out)
        code, said, told = run(out, *options, "--json")
        assert code != 0 and "1 trunk(s) first" in told, told
        assert f"moe/4096-s0: exit code {code}: " in told and "in the way" not in told and "checkpoints" in told
        rows = {f"{row['arm']}/{row['budget']}": row["status"] for row in json.loads(said)["runs"]}
        assert {name for name, status in rows.items() if status == "complete"} == rows.keys() - {"moe/4096"}
        clear()
        code, said, told = run(out, *options, "--json")
        assert code == 0 and "2 runs, 1 done" in told and told.count(": complete") == 1, told
        own, other = tree(folder / out), tree(local)
        assert own.keys() == other.keys()
        assert [name for name in own if own[name] != other[name]] == []
        results = json.loads((local / "results.json").read_text(encoding="utf-8"))
        for part in ("runs", "table", "curves", "routing"):
            assert masked(json.loads(said)[part]) == masked(results[part])
        lock, same = (json.loads((study / "lock.json").read_text(encoding="utf-8")) for study in (folder / out, local))
        assert lock["study"] == same["study"]

    return check


@pytest.fixture
def check_stopped(folder: Path, start: Any, run: Any, long_local: Path) -> Callable[..., None]:
    """A longer study by another engine whose worker is lost, which is stopped, and which goes on, as if nothing was."""

    def check(out: str, lose: Callable[[int], None], *options: str) -> None:
        """`lose` is given the process that the engine carries a run out in, and makes it go away."""
        run_there = folder / out / "moe" / "204800-s0"
        child = start(out, *options, *LONG)
        try:
            wait_for(lambda: child.poll() is not None or updates(run_there) > 40)
            assert child.poll() is None, child.communicate()
            first = trainer(run_there)
            lose(parent(parent(first)))  # train ← nursery ← the engine's process
            wait_for(lambda: child.poll() is not None or trainer(run_there) not in (0, first))
            wait_for(lambda: child.poll() is not None or updates(run_there) > 100)
            child.terminate()
            _, told = child.communicate(timeout=120)
        finally:
            child.kill()
        assert child.returncode == 143, told
        assert "stopped; " in told and "run again to go on" in told
        wait_for(lambda: not trainer(run_there), 60)
        assert updates(run_there) < 400 and list((run_there / "checkpoints").glob("step-*"))
        code, _, told = run(out, *options, *LONG)
        assert code == 0, told
        log = (folder / out / "logs" / "moe" / "204800-s0.log").read_text(encoding="utf-8")
        assert log.count("going on from step ") >= 2, log
        own, other = tree(folder / out), tree(long_local)
        assert own.keys() == other.keys()
        assert [name for name in own if own[name] != other[name]] == []

    return check
