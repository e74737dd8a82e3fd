"""docs/tutorial.md as a reader follows it: text, study file, plan, a slip, and a small run up to the verdicts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import Call

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "tutorial.md").read_text(encoding="utf-8")


def fenced(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.M | re.S)


def printed_after(command: str) -> list[str]:
    """Lines of the block of output that follows a command."""
    block = PAGE.partition(f"$ {command}")[2].partition("```text\n")[2].partition("```")[0]
    return [line.rstrip() for line in block.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the reader works, after steps 2 and 3."""
    folder = tmp_path_factory.mktemp("tutorial")
    (script,) = fenced("python")
    (study,) = fenced("toml")
    (folder / "my_text.py").write_text(script, encoding="utf-8")
    (folder / "my-study.toml").write_text(study, encoding="utf-8")
    subprocess.run([sys.executable, "my_text.py"], cwd=folder, check=True)
    assert len((folder / "my-text.jsonl").read_text(encoding="utf-8").splitlines()) > 1000
    return folder


def test_plan_prints_what_the_page_shows(equipoise: Call, folder: Path) -> None:
    done = equipoise("plan", "my-study.toml", cwd=folder)
    assert done.returncode == 0, done.stderr
    said = [line.rstrip() for line in done.stdout.splitlines()]
    shown = [line for line in printed_after("equipoise plan my-study.toml\n") if line != "…"]
    # How often a text is repeated, and what is known of it before it is prepared, depend on the Python it comes from.
    depends = re.compile(r"^(300,000|tokens asked|vocabulary) ")
    assert [line for line in shown if line not in said and not depends.match(line)] == []
    assert len(shown) > 8
    assert "warning" not in done.stdout


def test_slips_are_told_as_the_page_shows(equipoise: Call, folder: Path) -> None:
    options = ["--set", "recipe.seq_length=128", "--set", "arms.moe.model.ffn.top_k=5"]
    done = equipoise("plan", "my-study.toml", *options, cwd=folder)
    assert done.returncode == 2
    assert done.stderr.splitlines() == printed_after("equipoise plan my-study.toml --set recipe.seq_length=128")


def test_its_claims_get_their_verdicts(equipoise: Call, folder: Path) -> None:
    """One seed and two updates instead of three and 293."""
    small = [
        "seeds=[0]",
        "budgets=[2048]",
        "recipe.num_evals=1",
        "recipe.eval_tokens=1024",
        "recipe.samples.prompts=[]",
    ]
    options = [word for assignment in small for word in ("--set", assignment)]
    done = equipoise("run", "my-study.toml", "--jobs", "1", *options, cwd=folder)
    assert done.returncode == 0, done.stderr
    judged = [line.split()[1] for line in done.stdout.splitlines() if re.match(r"[A-Z]{4,} +\S", line)]
    assert judged == re.findall(r'^id += "(.*)"$', PAGE, re.M)
    assert (folder / "runs" / "my-study" / "report.html").exists()
