"""Lines for a shell: each a unit of work, safe to paste, and together the study, byte for byte."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from equipoise.engine import Task
from equipoise.engines.commands import unit
from equipoise.errors import ConfigError

LINES = ("--engine", "commands")


def test_the_lines_are_the_study_and_run_gathers_it(run: Any, folder: Path, local: Path, helpers: Any) -> None:
    out = "by 'hand' & $HOME; `echo`"  # a place that no shell leaves alone unless it is quoted
    code, said, told = run(out, *LINES)
    (line,) = said.splitlines()
    assert code == 0 and "2 runs, 0 done, 1 trunk(s) first; 1 line(s)" in told
    study = folder / out
    assert not list(study.glob("*/*-s*/metrics.jsonl")), "nothing is trained by printing"
    assert [name.rsplit("/", 1)[-1] for name in trained(line)] == ["trunk-s0", "4096-s0", "2048-s0"]
    (listed,) = json.loads(run(out, *LINES, "--json")[1])["commands"]
    assert listed == {"runs": ["moe/4096-s0", "moe/2048-s0"], "command": line}
    for part in line.split(" && ")[:2]:  # the trunk and one budget: what is left is a line of its own
        shell(part, folder)
    code, said, told = run(out, *LINES)
    assert said.splitlines() == [line.split(" && ")[2]] and "2 runs, 1 done; 1 line(s)" in told
    shell(said, folder)
    assert run(out, *LINES)[1:] == ("", f"{out}: 2 runs, 2 done; 0 line(s): nothing to train\n")
    code, said, told = run(out)
    assert code == 0 and "2 runs, 2 done; nothing to train" in told and "does it run?" in said
    own, other = helpers.tree(study), helpers.tree(local)
    assert own.keys() == other.keys() and [name for name in own if own[name] != other[name]] == []


def trained(line: str) -> list[str]:
    """The directories that a line trains, in order."""
    words = shlex.split(line)
    return [words[index + 1] for index, word in enumerate(words) if word == "train"]


def shell(line: str, folder: Path) -> None:
    """What a person does: paste it into a shell, in another folder."""
    subprocess.run(["sh", "-c", line], cwd=folder.parent, check=True, capture_output=True, timeout=240)


def test_a_line_carries_what_numbers_depend_on_and_is_one_line(tmp_path: Path) -> None:
    def task(name: str) -> Task:
        run = SimpleNamespace(folder=name)
        return Task(run=run, directory=tmp_path / name, log=tmp_path / "log")  # type: ignore[arg-type]

    environment = {"HOME": "/root", "MKL_CBWR": "a b", "OMP_NUM_THREADS": "3", "SECRET": "x"}
    words = shlex.split(unit(task("a"), [task("b")], ["--data", "it's here"], environment).command)
    assert words[:3] == ["env", "MKL_CBWR=a b", "OMP_NUM_THREADS=3"] and words.count("&&") == 1
    assert words[4:].count("it's here") == 2 and "SECRET=x" not in words
    assert not unit(task("a"), [], [], {"HOME": "/root"}).command.startswith("env ")
    with pytest.raises(ConfigError, match="expected paths without line breaks"):
        unit(task("a\nb"), [], [], {})
