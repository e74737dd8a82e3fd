"""`equipoise archive`: a copy without weights reports the same, is gone on from, and is never written over.

The trunks of a copy are tested by `tests/test_archive.py`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest


def files(folder: Path) -> dict[str, bytes]:
    """Every file in a folder by its path, but for lock files."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith("."))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def stamps(folder: Path) -> dict[str, int]:
    """When each record in a folder was written; without what is made of the records."""
    runs = [path for path in folder.rglob("*") if path.is_file() and path.parent.parent.parent == folder]
    return {path.relative_to(folder).as_posix(): path.stat().st_mtime_ns for path in runs}


@pytest.fixture
def place(finished: Path, tmp_path: Path) -> Path:
    """A folder with the study file, and the finished study in `runs/tiny`."""
    shutil.copytree(finished, tmp_path / "place")
    return tmp_path / "place"


def test_a_copy_has_everything_but_weights_and_reports_the_same(place: Path, equipoise: Any) -> None:
    done = equipoise("archive", "runs/tiny", "results/tiny", cwd=place)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("results/tiny: 6 run(s) copied, 0 there before, 0 of 6 not finished")
    source, copy = files(place / "runs/tiny"), files(place / "results/tiny")
    left = {name for name in source if "/checkpoints/" in name or name.startswith("logs/")}
    assert len(left) > 12 and copy == {name: content for name, content in source.items() if name not in left}
    again = equipoise("report", "results/tiny", cwd=place)
    assert again.returncode == 0 and files(place / "results/tiny") == copy


def test_a_second_call_writes_nothing_and_json_names_the_runs(place: Path, equipoise: Any) -> None:
    assert equipoise("archive", "runs/tiny", "results/tiny", cwd=place).returncode == 0
    shutil.rmtree(place / "results/tiny/moe/5120-s1")
    before = stamps(place / "results/tiny")
    found = json.loads(equipoise("archive", "runs/tiny", "results/tiny", "--json", cwd=place).stdout)
    assert found["copied"] == ["moe/5120-s1"] and len(found["kept"]) == 5 and found["left"] == []
    after = stamps(place / "results/tiny")
    assert before == {name: when for name, when in after.items() if name in before} and len(after) > len(before)


def test_a_copy_is_gone_on_from_without_training_anything_again(place: Path, equipoise: Any) -> None:
    assert equipoise("archive", "runs/tiny", "results/tiny", cwd=place).returncode == 0
    before = files(place / "results/tiny")
    done = equipoise("run", "study.toml", "--out", "results/tiny", cwd=place)
    assert done.returncode == 0 and "6 runs, 6 done; nothing to train" in done.stderr
    assert files(place / "results/tiny") == before
    more = equipoise("run", "study.toml", "--out", "results/tiny", "--set", "seeds=[0, 1, 2, 3]", cwd=place)
    assert more.returncode == 0 and "8 runs, 6 done" in more.stderr
    refused = equipoise("archive", "runs/tiny", "results/tiny", cwd=place)
    assert refused.returncode == 5 and "not an earlier state of this study (seeds: 3 was removed" in refused.stderr
    assert "amendments: it was added to there)" in refused.stderr


def test_what_would_be_written_over_is_refused(place: Path, equipoise: Any) -> None:
    same = equipoise("archive", "runs/tiny", "runs/tiny", cwd=place)
    assert same.returncode == 2 and "the study itself; expected another folder, e.g. results/tiny" in same.stderr
    for within in ("runs/tiny/copy", "runs/../runs/tiny/moe/5120-s1"):
        refused = equipoise("archive", "runs/tiny", within, cwd=place)
        assert refused.returncode == 2 and "within the study itself; expected another folder" in refused.stderr
    assert not (place / "runs/tiny/copy").exists()
    (place / "text").mkdir()
    (place / "text/notes.md").touch()
    foreign = equipoise("archive", "runs/tiny", "text", cwd=place)
    assert foreign.returncode == 5 and "text: holds files but no study" in foreign.stderr
    assert [path.name for path in (place / "text").iterdir()] == ["notes.md"]
    none = equipoise("archive", "runs", "results/new", cwd=place)
    assert none.returncode == 5 and "no lock.json" in none.stderr and not (place / "results").exists()
