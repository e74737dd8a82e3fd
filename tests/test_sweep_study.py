"""A study with a sweep and an own budget, trained in this process: from the lock to the page."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from equipoise.cli.run import _measure_updates
from equipoise.config import dump, read_toml
from equipoise.lock import lock_study, locked_runs, note_finished
from equipoise.matching import resolve_arms
from equipoise.probe import measure_in_turn
from equipoise.report.markdown import render_markdown
from equipoise.report.page import render_html
from equipoise.results import collect
from equipoise.spec.study import parse_study
from equipoise.step_time import StepTimes, probed_models, read_step_times, write_step_times
from equipoise.train import train

ADDED = """
[arms.wide]
match = { to = "moe", on = "total_params", adjust = "ffn.d_ff", rtol = 0.05 }
model.ffn = { kind = "dense" }
budget = { on = "tokens_per_expert", to = "moe" }
"""


@pytest.fixture(scope="module")
def study(tiny: Any, tiny_toml: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Four arms (moe at two rates) × one seed × two budgets of 1 to 4 updates."""
    text = tiny_toml.replace("seeds = [0, 1, 2]", "seeds = [0]").replace("budgets = [5120]", "budgets = [1536, 2048]")
    text = text.replace("[arms.moe.model.ffn]", "[arms.moe]\nlr = { sweep = [1e-3, 1e-1] }\n[arms.moe.model.ffn]")
    spec = parse_study(read_toml(text.replace("[[claims]]", ADDED + "[[claims]]"), "tiny"))
    directory = tmp_path_factory.mktemp("swept")
    arms = resolve_arms(spec.arms, tiny.dataset.vocab_size, 256)
    lock = lock_study(directory, spec, {name: arm.model for name, arm in arms.items()}, tiny.dataset)
    summaries = {run.folder: train(run, directory / run.folder, tiny.dataset) for run in locked_runs(lock)}
    write_step_times(directory, note_finished(directory), measure_in_turn(probed_models(lock), spec.recipe, "cpu"))
    return SimpleNamespace(directory=directory, lock=lock, summaries=summaries, results=collect(directory))


def test_runs_lie_under_their_own_tokens(study: Any) -> None:
    """3 updates of moe give each of 3 experts, 2 chosen, the tokens of 2; 4 those of 2.67, which is nearest to 3."""
    assert sorted(study.summaries) == [
        "dense/1536-s0", "dense/2048-s0", "moe@lr=1e-1/1536-s0", "moe@lr=1e-1/2048-s0", "moe@lr=1e-3/1536-s0",
        "moe@lr=1e-3/2048-s0", "wide/1024-s0", "wide/1536-s0",
    ]  # fmt: skip
    rows = {(row["arm"], row["budget"]): row for row in study.results["runs"]}
    assert (rows["wide", 1536]["tokens"], rows["wide", 2048]["tokens"]) == (1024, 1536)
    assert study.results["arms"][3]["own_budgets"][0]["tokens"] == 1024


def test_members_start_alike_and_are_scored_on_selection(study: Any, tiny: Any, tmp_path: Path) -> None:
    """The same run, told to evaluate on the selection split, finds as its loss what the member wrote beside its own."""
    member = next(run for run in locked_runs(study.lock) if run.folder == "moe@lr=1e-3/1536-s0")
    recipe = dataclasses.replace(member.recipe, eval_split="selection")
    other = train(dataclasses.replace(member, recipe=recipe, select=False), tmp_path / "other", tiny.dataset)
    assert study.summaries[member.folder]["selection_loss"] == other["val_loss"]
    assert other["selection_loss"] is None and study.summaries["dense/1536-s0"]["selection_loss"] is None
    metrics = [study.directory / f"moe@lr={lr}/1536-s0/metrics.jsonl" for lr in ("1e-3", "1e-1")]
    rows = [json.loads(path.read_text(encoding="utf-8").splitlines()[0]) for path in metrics]
    assert rows[0]["step"] == 0 and rows[0]["loss"] == rows[1]["loss"]


def test_the_family_stands_for_the_chosen_member(study: Any) -> None:
    losses = {run: summary["selection_loss"] for run, summary in study.summaries.items() if run.startswith("moe")}
    chosen = min(("1e-3", "1e-1"), key=lambda lr: losses[f"moe@lr={lr}/2048-s0"])
    choice = study.results["lr_sweep"]["choices"][1]
    assert (choice["budget"], choice["arm"]) == (2048, f"moe@lr={chosen}")
    (claim,) = study.results["claims"]
    assert f"lr {chosen} of moe, chosen on the selection split" in claim["marks"]
    difference = study.summaries[f"moe@lr={chosen}/2048-s0"]["val_loss"] - study.summaries["dense/2048-s0"]["val_loss"]
    assert claim["contrasts"][0]["per_seed"] == {"0": pytest.approx(difference)}
    assert {(gap["left"], gap["right"]) for gap in study.results["gaps"]} == {("moe", "dense"), ("moe", "wide")}


def test_the_matrix_is_there_and_the_same_when_rebuilt(study: Any) -> None:
    assert json.dumps(dump(collect(study.directory))) == json.dumps(dump(study.results))
    contracts = study.results["contracts"]
    assert set(contracts["step_time"]["step_s"]) == {"moe", "dense", "wide"}
    assert all(seconds > 0 for seconds in contracts["step_time"]["step_s"].values())
    assert len(contracts["rows"]) == 2 * 2 * 3  # pairs, budgets, metrics
    (study.directory / "step_time.json").write_text("{}", encoding="utf-8")
    broken = collect(study.directory)["contracts"]
    assert broken["step_time"] is None and broken["step_time_reason"].startswith("step_time.json: cannot be used")
    assert all(row["seconds"]["mean"] is None for row in broken["rows"])


def test_page_and_markdown_show_them(study: Any) -> None:
    page, text = render_html(study.results), render_markdown(study.results)
    for said in ("equal training FLOPs", "Arms with budgets of their own", "sweep charged", "chosen on the selection"):
        assert said in page and said in text


def test_updates_are_measured_once_after_the_last_run(
    study: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a child process; one that fails is a warning and costs nothing else; what is there is not measured again."""
    path = study.directory / "step_time.json"
    path.unlink()
    _measure_updates(study.directory, "cpu", lambda: 15, True)
    said = "nothing is compared at equal seconds (stopped while measuring; run again to go on)"
    assert said in capsys.readouterr().err
    assert not path.exists()
    _measure_updates(study.directory, "cpu", lambda: 0, True)
    times = read_step_times(study.directory, study.lock)
    assert isinstance(times, StepTimes) and times.environment["device"] == "cpu"
    monkeypatch.setattr("equipoise.probe.measure_in_turn", lambda *_: pytest.fail("measured again"))
    _measure_updates(study.directory, "cpu", lambda: 0, True)
