"""The worked examples of docs/extending.md: applied to a copy of the source, tested, checked for form, and trained."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")


def call(*command: str, cwd: Path) -> str:
    """Standard output of a Python module run on the changed source; fails with what it said."""
    environment = {**os.environ, "PYTHONPATH": str(cwd / "src"), "EQUIPOISE_CACHE": str(cwd / "cache")}
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source with every change and new file of the page."""
    folder = tmp_path_factory.mktemp("extended")
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    changes = re.findall(r"^```diff\n(.*?)^```$", PAGE, re.M | re.S)
    assert len(changes) == 2
    if shutil.which("git") is None:
        pytest.skip("git needed: it applies the changes")
    for change in changes:
        done = subprocess.run(
            ["git", "apply", "-"],
            cwd=folder,
            input=change,
            capture_output=True,
            text=True,
            encoding="utf-8",
            check=False,
        )
        assert done.returncode == 0, f"the change no longer fits the source:\n{done.stderr}{change}"
    for path, body in new_files().items():
        assert not (ROOT / path).exists()
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(body, encoding="utf-8")
    return folder


def new_files() -> dict[str, str]:
    found = dict(re.findall(r"^New file `([^`]+)`:\n\n```python\n(.*?)^```$", PAGE, re.M | re.S))
    assert len(found) == PAGE.count("```python")
    return found


def test_the_tests_of_the_page_pass(changed: Path) -> None:
    tests = [path for path in new_files() if path.startswith("tests/")]
    assert len(tests) == 2
    out = call("pytest", "-q", "-p", "no:cacheprovider", *tests, cwd=changed)
    assert re.search(r"[.]{7,}", out), out


def test_the_code_of_the_page_keeps_the_house_form(changed: Path) -> None:
    call("ruff", "check", "--no-cache", "src", "tests", cwd=changed)
    call("ruff", "format", "--no-cache", "--check", "src", "tests", cwd=changed)


def test_a_study_trains_on_the_corpus_with_the_router(changed: Path, tiny_toml: str) -> None:
    stories = "".join(
        f'{number},"Once, in place {number},\nthere was a cat of {number * 7919} lives."\n' for number in range(90)
    )
    (changed / "songs.csv").write_text("title,lyrics\n" + stories, encoding="utf-8")
    (changed / "study.toml").write_text(tiny_toml, encoding="utf-8")
    overrides = ['corpus={kind="csv", path="songs.csv", column="lyrics"}', 'arms.moe.model.ffn.router="sigmoid"']
    overrides += ["seeds=[0]"]
    options = [word for override in overrides for word in ("--set", override)]
    assert "sigmoid router" in call("equipoise", "plan", "study.toml", *options, cwd=changed)
    call("equipoise", "run", "study.toml", "--jobs", "1", *options, cwd=changed)
    results = json.loads((changed / "runs" / "tiny" / "results.json").read_text(encoding="utf-8"))
    assert [run["status"] for run in results["runs"]] == ["complete", "complete"]
    assert results["data"]["kind"] == "csv"
    assert "3 experts, top-2, sigmoid router" in [arm["ffn"] for arm in results["arms"]]
