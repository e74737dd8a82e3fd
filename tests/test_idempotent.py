"""A study run again after any damage: only what must is done again, and the report is the same, byte for byte.

Two arms, two seeds and two budgets that share trunks: eight runs of four and eight updates.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from equipoise.config import read_toml
from equipoise.lock import Lock, lock_study, locked_runs, note_finished, status
from equipoise.record import MASKED_FIELDS
from equipoise.report.markdown import render_markdown
from equipoise.report.page import render_html
from equipoise.results import collect
from equipoise.spec.study import parse_study
from equipoise.text import is_number
from equipoise.train import train, train_trunk
from equipoise.trunk import TrunkConfig, checkpoint_steps
from equipoise.work import first_tasks, next_tasks, work_left

FILES = (
    "config.json",
    "tokenizer.json",
    "environment.json",
    "branch.json",
    "metrics.jsonl",
    "samples.jsonl",
    "val_losses.safetensors",
    "explorer.json",
    "summary.json",
    "{newest}/model.safetensors",
    "{newest}/optim.safetensors",
    "{newest}/state.json",
    "{newest}/manifest.json",
)
HOW = ("delete", "truncate", "flip")


def declare(tiny: Any, tiny_toml: str, directory: Path, seeds: str = "[0, 1]") -> Lock:
    text = tiny_toml.replace("budgets = [5120]", "budgets = [2048, 4096]").replace("num_evals = 4", "num_evals = 2")
    text = text.replace("optim =", 'schedule = { kind = "wsd", warmup_tokens = 512 }\noptim =')
    spec = parse_study(read_toml(text.replace("seeds = [0, 1, 2]", f"seeds = {seeds}"), "tiny"))
    return lock_study(directory, spec, tiny.models, tiny.dataset)


def execute(directory: Path, lock: Lock, dataset: Any) -> list[str]:
    """Everything that is left to do, as `equipoise run` does it, in this process; the folders executed."""
    tokenizer, said = dataset.tokenizer().to_json(), list[str]()
    tasks = first_tasks(directory, work_left(directory, status(directory, lock, deep=True), said.append), tokenizer)
    done = []
    while tasks:
        task = tasks.pop(0)
        if isinstance(task.run, TrunkConfig):
            train_trunk(task.run, task.directory, dataset)
        else:
            train(task.run, task.directory, dataset, trunk=task.directory.parent / f"trunk-s{task.run.seed}")
        done.append(task.run.folder)
        tasks += next_tasks(directory, task, tokenizer, said.append)
    note_finished(directory)
    return done


def without_machine(value: Any) -> Any:
    """Results in which whatever measures the machine is 1."""
    if isinstance(value, dict):
        masked = {*MASKED_FIELDS, "seconds"}
        return {k: 1.0 if k in masked and is_number(v) else without_machine(v) for k, v in value.items()}
    return [without_machine(item) for item in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def study(tiny: Any, tiny_toml: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("study")
    lock = declare(tiny, tiny_toml, directory)
    assert len(execute(directory, lock, tiny.dataset)) == 8 + 4
    return SimpleNamespace(directory=directory, lock=lock, results=without_machine(collect(directory)))


def damage(directory: Path, name: str, how: str) -> None:
    newest = f"checkpoints/step-{checkpoint_steps(directory)[-1]:08d}"
    path = directory / name.format(newest=newest)
    content = path.read_bytes()
    if how == "delete":
        path.unlink()
    elif how == "truncate":
        path.write_bytes(content[: len(content) // 2])
    else:
        at = 2 * len(content) // 3
        path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])


def test_run_again_there_is_nothing_to_do(study: Any, tiny: Any, tiny_toml: str) -> None:
    assert execute(study.directory, declare(tiny, tiny_toml, study.directory), tiny.dataset) == []
    assert without_machine(collect(study.directory)) == study.results


def test_whatever_file_was_lost_cut_or_altered_only_its_run_is_done_again(study: Any, tiny: Any) -> None:
    """Every file of a run in every way, six damaged runs at a time, two that have to be left alone."""
    runs = [study.directory / run.folder for run in locked_runs(study.lock)]
    damages = [(name, how) for name in FILES for how in HOW]
    for turn, start in enumerate(range(0, len(damages), 6)):
        order = runs[turn % 8 :] + runs[: turn % 8]
        here = damages[start : start + 6]
        hurt, spared = order[: len(here)], order[6:]
        before = {path: path.stat().st_mtime_ns for run in spared for path in run.rglob("*") if path.is_file()}
        for run, (name, how) in zip(hurt, here, strict=True):
            damage(run, name, how)
        done = execute(study.directory, study.lock, tiny.dataset)
        assert sorted(done) == sorted(run.relative_to(study.directory).as_posix() for run in hurt), here
        assert {path: path.stat().st_mtime_ns for run in spared for path in run.rglob("*") if path.is_file()} == before
        assert without_machine(collect(study.directory)) == study.results, here
    again = without_machine(collect(study.directory))
    for render in (render_html, render_markdown):
        assert render(again) == render(study.results)


def test_weights_that_are_gone_altogether_and_trunks_are_no_fault(study: Any, tiny: Any) -> None:
    for run in locked_runs(study.lock):
        shutil.rmtree(study.directory / run.folder / "checkpoints", ignore_errors=True)
    for trunk in study.directory.glob("*/trunk-s*/checkpoints"):
        shutil.rmtree(trunk)
    assert execute(study.directory, study.lock, tiny.dataset) == []
    assert without_machine(collect(study.directory)) == study.results


def test_a_run_that_is_gone_is_done_again_and_a_seed_added_is_all_there_is_to_do(
    study: Any, tiny: Any, tiny_toml: str, tmp_path: Path
) -> None:
    directory = tmp_path / "copy"
    shutil.copytree(study.directory, directory)
    shutil.rmtree(directory / "moe" / "2048-s1")
    done = execute(directory, study.lock, tiny.dataset)
    assert set(done) <= {"moe/trunk-s1", "moe/2048-s1"} and "moe/2048-s1" in done
    assert without_machine(collect(directory)) == study.results
    grown = declare(tiny, tiny_toml, directory, "[0, 1, 5]")
    done = execute(directory, grown, tiny.dataset)
    assert sorted(done) == sorted(f"{arm}/{run}-s5" for arm in ("moe", "dense") for run in ("trunk", "2048", "4096"))
    rows = {(row["arm"], row["budget"], row["metric"]): row for row in study.results["table"]}
    for row in collect(directory)["table"]:
        if not row["post_hoc"]:
            assert row["values"] == rows[row["arm"], row["budget"], row["metric"]]["values"]
