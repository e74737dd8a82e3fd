"""results/: every study there is read whole, gives the committed pages byte for byte, and is fit to be committed.

The bytes of a page depend on what draws it, so they are compared under the versions of constraints.txt alone.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
from pathlib import Path

import pytest

from equipoise.figures.style import saved
from equipoise.lock import read_lock, status
from equipoise.report.publish import study_figures
from equipoise.report.write import write_report, write_tables
from equipoise.results import collect, write_results

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
STUDIES = sorted(path.name for path in RESULTS.glob("*") if path.is_dir())
LIMIT = 2_000_000
DRAWING = ("jinja2", "markupsafe", "matplotlib", "numpy", "scipy")
WEIGHTS = re.compile(r"(^|/)(checkpoints|trunk-s\d+)/|(?<!val_losses)\.safetensors$")
TEXTS = (".json", ".jsonl", ".html", ".md", ".csv", ".tex", ".svg")
PLACE = re.compile(
    rb"""(?<![\w./])/(?:home|root|tmp|work|Users|mnt|media|scratch|data|var|opt|srv)/|\b[A-Z]:\\\\?[A-Za-z]"""
)


def other_versions() -> list[str]:
    """What is installed in another version than constraints.txt pins."""
    pins = dict(
        re.findall(r"^([\w.-]+)==([\w.]+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8").lower(), re.M)
    )
    installed = {name: importlib.metadata.version(name) for name in DRAWING}
    return [f"{name} {version}, pinned {pins[name]}" for name, version in installed.items() if pins[name] != version]


def committed(folder: Path) -> list[Path]:
    """Files of a folder as far as git does not ignore them; without git all of them."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "."]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, encoding="utf-8", check=True)
    except (OSError, subprocess.CalledProcessError):
        return [path for path in folder.rglob("*") if path.is_file()]
    return [folder / name for name in done.stdout.split("\0") if name and (folder / name).is_file()]


def test_there_is_a_study_where_there_is_the_folder() -> None:
    assert bool(STUDIES) == RESULTS.exists()


@pytest.mark.parametrize("name", STUDIES)
def test_every_run_is_as_it_was_written(name: str) -> None:
    records = status(RESULTS / name, read_lock(RESULTS / name), deep=True)
    assert {record.status for record in records} <= {"complete", "diverged", "missing"}, [r.fault for r in records]
    assert any(record.status == "complete" for record in records)


@pytest.mark.parametrize("name", STUDIES)
def test_the_pages_are_rebuilt_byte_for_byte(name: str, tmp_path: Path) -> None:
    if others := other_versions():
        pytest.skip(f"pages are compared under constraints.txt; here: {'; '.join(others)}")
    results = collect(RESULTS / name)
    written = [write_results(tmp_path, results), *write_report(results, tmp_path), *write_tables(results, tmp_path)]
    assert len(written) == 6
    for path in written:
        assert path.read_bytes() == (RESULTS / name / path.name).read_bytes(), f"{path.name}: make results"
    figures = {f"{title}.svg": figure for title, figure in study_figures(results)}
    assert set(figures) == {path.name for path in (RESULTS / name / "figures").glob("*.svg")}
    for file, figure in figures.items():
        assert saved(figure, "svg", file.removesuffix(".svg")) == (RESULTS / name / "figures" / file).read_bytes(), file


@pytest.mark.parametrize("name", STUDIES)
def test_it_is_small_has_no_weights_and_no_place(name: str) -> None:
    files = committed(RESULTS / name)
    names = {path.relative_to(RESULTS / name).as_posix(): path for path in files}
    assert {"lock.json", "results.json", "results.csv", "results.md", "results.tex", "report.html"} <= set(names)
    assert not [name for name in names if WEIGHTS.search(name)]
    assert not [f"{name}: {path.stat().st_size:,}" for name, path in names.items() if path.stat().st_size >= LIMIT]
    assert not [name for name, path in names.items() if path.suffix in TEXTS and PLACE.search(path.read_bytes())]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b'"path": "/home/ada/x"', True),
        (b"--cache /tmp/x", True),
        (b"C:\\\\Users\\\\ada", True),
        (b'"path": "stories"', False),
        (b"https://example.org/home/x", False),
        (b"moe/trunk-s0 and/or /data alone", False),
    ],
)
def test_a_place_is_noticed(text: bytes, found: bool) -> None:
    assert bool(PLACE.search(text)) == found


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("moe/1-s0/checkpoints/step-00000001/manifest.json", True),
        ("moe/trunk-s0/metrics.jsonl", True),
        ("moe/1-s0/model.safetensors", True),
        ("moe/1-s0/val_losses.safetensors", False),
    ],
)
def test_weights_are_noticed(name: str, found: bool) -> None:
    assert bool(WEIGHTS.search(name)) == found
