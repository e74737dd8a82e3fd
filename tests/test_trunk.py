"""Budgets that share a trunk: each is, byte for byte, the run trained from its own start, whatever happened on the way.

The oracle is always the same run trained alone. `execute` does in this process what `equipoise run` does with children.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import equipoise.train as training
from equipoise.data.dataset import Dataset
from equipoise.engine import Task
from equipoise.errors import DivergedError, IntegrityError, Interrupted
from equipoise.files import describe_file, read_json, seal, write_json
from equipoise.record import MASKED_FIELDS, RunRecord, masked, read_rows, read_run
from equipoise.schedule import eval_steps
from equipoise.spec.recipe import WSD
from equipoise.spec.run import RunConfig
from equipoise.train import train, train_trunk
from equipoise.trunk import (
    TrunkConfig,
    branched_at,
    can_branch,
    checkpoint_steps,
    count_updates,
    read_branch,
    read_trunk,
    spent_flops,
    start_trunk,
    trunks_of,
)
from equipoise.work import drop_stale, first_tasks, next_tasks, work_left

BUDGETS = (2_560, 5_120, 10_240)  # 5, 10 and 20 updates, which branch off at 3, 6 and 12
SMALL, MIDDLE, LARGE = BUDGETS


def wsd_runs(
    tiny: Any, arm: str, budgets: Sequence[int] = BUDGETS, seed: int = 0, kernels: Any = "fused", lr: float = 3e-3
) -> list[RunConfig]:
    """Runs of one arm and seed under WSD, two updates of warm-up and 40 % of decay."""
    run = next(run for run in tiny.runs if run.arm == arm and run.seed == seed)
    optim = dataclasses.replace(run.recipe.optim, lr=lr, grad_clip=1.0 if lr < 1 else 0.0)
    schedule = WSD(warmup_tokens=1_024, decay_frac=0.4, final_frac=0.1 if lr < 1 else 1.0)
    recipe = dataclasses.replace(run.recipe, schedule=schedule, kernels=kernels, optim=optim)
    return [dataclasses.replace(run, budget=budget, recipe=recipe) for budget in budgets]


def recorded(study: Path, runs: Sequence[RunConfig]) -> list[RunRecord]:
    return [dataclasses.replace(read_run(study / run.folder), locked=run) for run in runs]


def execute(study: Path, runs: Sequence[RunConfig], dataset: Dataset, **options: Any) -> tuple[list[str], list[str]]:
    """Everything left of a study: the folders executed, in order, and what was said about it."""
    said: list[str] = []
    tokenizer = dataset.tokenizer().to_json()
    tasks = first_tasks(study, work_left(study, recorded(study, runs), said.append), tokenizer)
    done: list[str] = []
    while tasks:
        task: Task = tasks.pop(0)
        run = task.run
        if isinstance(run, TrunkConfig):
            train_trunk(run, task.directory, dataset, log=said.append, **options)
        else:
            trunk = task.directory.parent / f"trunk-s{run.seed}"
            train(run, task.directory, dataset, log=said.append, trunk=trunk if trunk.exists() else None, **options)
        done.append(run.folder.split("/")[-1])
        tasks += next_tasks(study, task, tokenizer, said.append)
    return done, said


def last_state(directory: Path) -> bytes:
    newest = directory / "checkpoints" / f"step-{checkpoint_steps(directory)[-1]:08d}"
    return (newest / "model.safetensors").read_bytes() + (newest / "optim.safetensors").read_bytes()


def assert_same_run(directory: Path, alone: Path) -> None:
    """Everything that a run leaves behind, but for what measures the machine and which checkpoints are still there."""
    assert last_state(directory) == last_state(alone)
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert masked(read_rows(directory / name)) == masked(read_rows(alone / name)), name
    losses = "val_losses.safetensors"
    assert (directory / losses).read_bytes() == (alone / losses).read_bytes()
    for name in ("config.json", "tokenizer.json", "environment.json"):
        assert (directory / name).read_bytes() == (alone / name).read_bytes(), name
    free = {*MASKED_FIELDS, "files", "branched_from", "self_digest"}
    own, other = (
        {key: value for key, value in read_json(place / "summary.json").items() if key not in free}
        for place in (directory, alone)
    )
    assert own == other


@pytest.fixture(scope="module")
def alone(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[RunConfig], Path]:
    """A run trained from its own start, once per test process."""
    folder, places = tmp_path_factory.mktemp("alone"), dict[RunConfig, Path]()

    def trained(run: RunConfig) -> Path:
        if run not in places:
            places[run] = folder / str(len(places))
            train(run, places[run], tiny.dataset)
        return places[run]

    return trained


@pytest.fixture(scope="module")
def finished(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dense arm's three budgets by way of a trunk. Tests that change it copy it first."""
    study = tmp_path_factory.mktemp("finished")
    execute(study, wsd_runs(tiny, "dense"), tiny.dataset)
    return study


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "copy")
    return tmp_path / "copy"


# ------------------------------------------------------------------------------------------------ equality


@pytest.mark.parametrize("kernels", ["fused", "plain"])
@pytest.mark.parametrize("arm", ["moe", "dense"])
def test_every_budget_is_the_run_trained_alone_and_no_update_is_done_twice(
    tiny: Any, alone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arm: str, kernels: str
) -> None:
    runs, updates, step = wsd_runs(tiny, arm, kernels=kernels), [], training.train_step
    with monkeypatch.context() as patched:
        patched.setattr(training, "train_step", lambda *a, **k: (updates.append(1), step(*a, **k))[1])
        done, _ = execute(tmp_path, runs, tiny.dataset)
    assert done == ["trunk-s0", "10240-s0", "5120-s0", "2560-s0"]
    assert len(updates) == 12 + (20 - 12) + (10 - 6) + (5 - 3)
    assert count_updates(BUDGETS, runs[0].recipe) == (26, 12)
    for run, branched in zip(runs, (3, 6, 12), strict=True):
        assert_same_run(tmp_path / run.folder, alone(run))
        note = read_json(tmp_path / run.folder / "summary.json")["branched_from"]
        assert note == read_branch(tmp_path / run.folder) and note["step"] == branched
        assert read_json(alone(run) / "summary.json")["branched_from"] is None


@pytest.mark.parametrize("arm", ["moe", "dense"])
def test_stopping_trunk_and_branches_anywhere_changes_no_byte(tiny: Any, alone: Any, tmp_path: Path, arm: str) -> None:
    runs, stops = wsd_runs(tiny, arm), 0

    def stop_after(polls: int) -> Callable[[], int]:
        left = iter([0] * polls)
        return lambda: next(left, 15)

    while True:
        try:
            execute(tmp_path, runs, tiny.dataset, stop_signal=stop_after(5 + 7 * stops))
            break
        except Interrupted as error:
            assert error.exit_code == 143
            stops += 1
    assert stops >= 4
    for run in runs:
        assert_same_run(tmp_path / run.folder, alone(run))


def test_best_weights_of_the_trunk_are_the_runs_best(tiny: Any, alone: Any, tmp_path: Path) -> None:
    """A rate far too high, to the end: the lowest points of curves lie within the trunk."""
    runs = wsd_runs(tiny, "dense", lr=4.0)
    execute(tmp_path, runs, tiny.dataset)
    for run in runs:
        assert_same_run(tmp_path / run.folder, alone(run))
    best = [read_json(tmp_path / run.folder / "summary.json")["best_step"] for run in runs]
    assert any(step < branched_at(run) for step, run in zip(best, runs, strict=True)), best


def test_weights_at_the_very_step_where_a_run_branches_off_may_stay_its_best(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every update after it makes them worse; the state taken over from the trunk is then saved in the end."""
    runs = wsd_runs(tiny, "dense")
    step = training.train_step

    def spoiling(model: Any, *rest: Any, **named: Any) -> Any:
        stats = step(model, *rest, **named)
        if named["step"] >= branched_at(rest[3]):
            with torch.no_grad():
                model.final_norm.weight.fill_(-50.0)
        return stats

    monkeypatch.setattr(training, "train_step", spoiling)
    execute(tmp_path, runs, tiny.dataset)
    best = [read_json(tmp_path / run.folder / "summary.json")["best_step"] for run in runs]
    assert any(step == branched_at(run) for step, run in zip(best, runs, strict=True)), best
    for run in runs:
        train(run, tmp_path / "alone" / run.folder, tiny.dataset)
        assert_same_run(tmp_path / run.folder, tmp_path / "alone" / run.folder)


def test_a_trunk_that_diverges_leaves_each_run_its_own_end(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Diverging at update 8: the smallest two budgets are complete, the largest ends as it does alone."""
    step = training.train_step

    def failing(*arguments: Any, **named: Any) -> Any:
        if arguments[4].budget == LARGE and next(iter(arguments[1].state.values()), {}).get("step", 0) >= 8:
            raise DivergedError("lm_loss is not finite")
        return step(*arguments, **named)

    monkeypatch.setattr(training, "train_step", failing)
    runs = wsd_runs(tiny, "dense")
    with pytest.raises(DivergedError, match="step 8: lm_loss is not finite"):
        execute(tmp_path / "study", runs, tiny.dataset)
    with pytest.raises(DivergedError, match="step 8: lm_loss is not finite"):
        train(runs[2], tmp_path / "alone", tiny.dataset)
    via, own = (read_run(place) for place in (tmp_path / "study" / runs[2].folder, tmp_path / "alone"))
    assert via.status == own.status == "diverged" and masked(via.rows("train")) == masked(own.rows("train"))
    done, _ = execute(tmp_path / "study", runs, tiny.dataset)
    assert done == ["2560-s0", "5120-s0"], "the trunk serves them; what diverged is finished"
    assert read_branch(tmp_path / "study" / runs[1].folder) is not None


# ------------------------------------------------------------------------------------------------ one unit of work


def test_complete_without_its_trunk_there_is_nothing_to_do(tiny: Any, copy: Path) -> None:
    runs = wsd_runs(tiny, "dense")
    assert execute(copy, runs, tiny.dataset) == ([], [])
    shutil.rmtree(copy / "dense" / "trunk-s0")
    assert execute(copy, runs, tiny.dataset) == ([], [])


def test_a_missing_branch_is_taken_from_the_trunk_there(tiny: Any, alone: Any, copy: Path) -> None:
    runs = wsd_runs(tiny, "dense")
    shutil.rmtree(copy / runs[1].folder)
    done, said = execute(copy, runs, tiny.dataset)
    assert done == ["5120-s0"] and any("branched from" in line and "at step 6" in line for line in said)
    assert_same_run(copy / runs[1].folder, alone(runs[1]))


@pytest.mark.parametrize("how", ["all", "one", "damaged", "record"])
def test_a_trunk_whose_checkpoints_are_gone_is_trained_again_and_equal_branches_stay(
    tiny: Any, alone: Any, copy: Path, how: str
) -> None:
    runs, trunk = wsd_runs(tiny, "dense"), copy / "dense" / "trunk-s0"
    step = trunk / "checkpoints" / "step-00000006"
    if how == "damaged":
        (step / "model.safetensors").write_bytes(b"nothing")
    elif how == "record":
        (trunk / "trunk.json").write_text("{}", encoding="utf-8")
        shutil.rmtree(step)
    else:
        shutil.rmtree(step if how == "one" else step.parent)
    shutil.rmtree(copy / runs[1].folder)
    kept = (copy / runs[2].folder / "summary.json").stat().st_mtime_ns
    done, said = execute(copy, runs, tiny.dataset)
    assert done == ["trunk-s0", "5120-s0"]
    assert ("step 6 is gone or damaged; trained again" in " ".join(said)) == (how != "all")
    assert (copy / runs[2].folder / "summary.json").stat().st_mtime_ns == kept
    assert_same_run(copy / runs[1].folder, alone(runs[1]))


def test_another_trunk_means_all_its_branches_are_done_again_and_says_so(tiny: Any, copy: Path) -> None:
    """Branches noted another checkpoint than the one that training the trunk again gives."""
    runs = wsd_runs(tiny, "dense")
    note = copy / runs[2].folder / "branch.json"
    write_json(note, {"step": 12, "checkpoint": "f" * 64})
    assert read_run(note.parent).status == "broken", "what a complete run recorded cannot be changed unseen"
    summary = read_json(note.parent / "summary.json")  # as it would be, had that trunk been
    files = {**summary["files"], "branch.json": describe_file(note)}
    unsealed = {key: value for key, value in summary.items() if key != "self_digest"}
    write_json(note.parent / "summary.json", seal({**unsealed, "files": files}))
    assert execute(copy, runs, tiny.dataset) == ([], []), "complete is complete"
    shutil.rmtree(copy / "dense" / "trunk-s0")
    shutil.rmtree(copy / runs[0].folder)
    done, said = execute(copy, runs, tiny.dataset)
    assert done == ["trunk-s0", "10240-s0", "5120-s0", "2560-s0"]
    (line,) = [line for line in said if "done again" in line]
    assert "10240-s0 branched from checkpoint ffffffffffff…, which now is " in line
    assert "all 2 branch(es) of dense, seed 0 are done again" in line
    assert read_branch(copy / runs[2].folder) != {"step": 12, "checkpoint": "f" * 64}
    assert drop_stale(copy, trunks_of(runs)[0], said.append) == []


def test_a_larger_budget_extends_the_trunk(tiny: Any, alone: Any, tmp_path: Path) -> None:
    runs = wsd_runs(tiny, "moe")
    execute(tmp_path, runs[:2], tiny.dataset)
    trunk = tmp_path / "moe" / "trunk-s0"
    assert checkpoint_steps(trunk)[-1] == 6
    kept = (trunk / "checkpoints" / "step-00000003" / "manifest.json").stat().st_mtime_ns
    done, said = execute(tmp_path, runs, tiny.dataset)
    assert done == ["trunk-s0", "10240-s0"] and any("trunk-s0: going on from step 6" in line for line in said)
    assert (trunk / "checkpoints" / "step-00000003" / "manifest.json").stat().st_mtime_ns == kept
    assert_same_run(tmp_path / runs[2].folder, alone(runs[2]))
    config = read_trunk(trunk)
    assert config is not None and config.budgets == BUDGETS and config.num_steps == 12


def test_a_budget_between_takes_what_the_trunk_has_and_a_smaller_one_starts_alone(
    tiny: Any, alone: Any, tmp_path: Path
) -> None:
    runs = wsd_runs(tiny, "dense", [3_584, MIDDLE, LARGE])  # 7 updates branch off at 4, where 10 are evaluated too
    execute(tmp_path, [runs[0], runs[2]], tiny.dataset)
    done, _ = execute(tmp_path, runs, tiny.dataset)
    assert done == ["5120-s0"], "no trunk is trained again for less than it has passed"
    assert (read_branch(tmp_path / runs[1].folder) or {})["step"] == 4
    assert_same_run(tmp_path / runs[1].folder, alone(runs[1]))
    (less,) = wsd_runs(tiny, "dense", [1_536])  # 3 updates, evaluated at each: at 1, where no other one was
    done, _ = execute(tmp_path, [*runs, less], tiny.dataset)
    assert done == ["1536-s0"] and read_json(tmp_path / less.folder / "summary.json")["steps"] == 3
    assert_same_run(tmp_path / less.folder, alone(less))


def test_a_seed_added_has_a_trunk_of_its_own(tiny: Any, copy: Path) -> None:
    runs = [*wsd_runs(tiny, "dense"), *wsd_runs(tiny, "dense", BUDGETS[:2], seed=1)]
    done, _ = execute(copy, runs, tiny.dataset)
    assert done == ["trunk-s1", "5120-s1", "2560-s1"]


def test_a_run_begun_alone_goes_on_alone(tiny: Any, alone: Any, copy: Path) -> None:
    """Its own checkpoint comes before the trunk's; a run from its own start is nobody's branch."""
    run = wsd_runs(tiny, "dense")[1]
    shutil.rmtree(copy / run.folder)
    polls = iter([0] * 12)
    with pytest.raises(Interrupted):
        train(run, copy / run.folder, tiny.dataset, stop_signal=lambda: next(polls, 15))
    assert checkpoint_steps(copy / run.folder)
    assert execute(copy, wsd_runs(tiny, "dense"), tiny.dataset)[0] == ["5120-s0"]
    assert read_branch(copy / run.folder) is None
    assert_same_run(copy / run.folder, alone(run))


def test_killed_while_branching_off_it_is_done_again(tiny: Any, alone: Any, copy: Path) -> None:
    """Rows and the note are written, the checkpoint is not."""
    run = wsd_runs(tiny, "dense")[2]
    before = (copy / run.folder / "metrics.jsonl").read_bytes()
    for name in ("checkpoints", "summary.json", "val_losses.safetensors"):
        place = copy / run.folder / name
        shutil.rmtree(place) if place.is_dir() else place.unlink()
    (copy / run.folder / "metrics.jsonl").write_bytes(before[: len(before) // 3])
    assert execute(copy, wsd_runs(tiny, "dense"), tiny.dataset)[0] == ["10240-s0"]
    assert_same_run(copy / run.folder, alone(run))


# ------------------------------------------------------------------------------------------------ the noun


def test_there_is_a_trunk_only_where_budgets_share_updates(tiny: Any) -> None:
    assert trunks_of(tiny.runs) == () and trunks_of(wsd_runs(tiny, "dense", [LARGE])) == ()
    short = wsd_runs(tiny, "dense", [512, LARGE])  # one update, within the warm-up of two
    assert [branched_at(run) for run in short] == [0, 12] and trunks_of(short) == ()
    assert count_updates([512, LARGE], short[0].recipe) == (21, 0)
    (trunk,) = trunks_of(wsd_runs(tiny, "dense"))
    assert trunk.budgets == BUDGETS and trunk.folder == "dense/trunk-s0" and trunk.num_steps == 12
    # 5 updates: every one; 10: every second; 20: every fourth, each up to where it branches off
    assert trunk.evals == {0, 1, 2, 3} | {2, 4, 6} | {4, 8, 12}
    assert trunk.evals == {s for r in trunk.runs for s in eval_steps(r.num_steps, r.recipe) if s <= branched_at(r)}


def test_a_place_that_holds_another_trunk_is_refused_naming_the_field(tiny: Any, copy: Path) -> None:
    (other,) = trunks_of(wsd_runs(tiny, "dense", seed=1))
    with pytest.raises(IntegrityError, match=r"trunk-s0: holds another trunk \(seed: 0 → 1\)"):
        start_trunk(copy / "dense" / "trunk-s0", other)
    with pytest.raises(IntegrityError, match="the run needs 000000000000"):
        train_trunk(dataclasses.replace(other, data="0" * 64), copy / "dense" / "trunk-s1", tiny.dataset)


def test_what_cannot_be_read_is_told(tiny: Any, copy: Path) -> None:
    run = wsd_runs(tiny, "dense")[1]
    write_json(copy / run.folder / "branch.json", {"step": 6})
    with pytest.raises(IntegrityError, match=r"branch\.json: expected step and checkpoint"):
        read_branch(copy / run.folder)
    trunk = copy / "dense" / "trunk-s0"
    assert can_branch(trunk, run)
    write_json(trunk / "trunk.json", seal({"schema_version": 1, "trunk": {"arm": "dense"}}))
    with pytest.raises(IntegrityError, match=r"trunk\.json: not a trunk \("):
        read_trunk(trunk)
    (trunk / "metrics.jsonl").write_text("", encoding="utf-8")
    said: list[str] = []
    shutil.rmtree(copy / run.folder)
    train(run, copy / run.folder, tiny.dataset, log=said.append, trunk=trunk)
    assert any("step 6 is of no use" in line and "missing or altered" in line for line in said)
    assert any("nothing to branch from; trained from the start" in line for line in said)
    assert read_branch(copy / run.folder) is None


def test_flops_spent_count_a_trunk_once_and_runs_alone_in_full() -> None:
    """Seed 0: runs of 5, 10 and 20 updates branch at 3, 6 and 12; seed 1 and a run of 7 updates without a trunk."""
    runs = [
        {"arm": "a", "seed": 0, "steps": n, "train_flops": 100 * n, "branched_from": {"step": s, "checkpoint": "c"}}
        for n, s in ((5, 3), (10, 6), (20, 12))
    ]
    alone = {"arm": "a", "seed": 1, "steps": 7, "train_flops": 700, "branched_from": None}
    assert spent_flops([*runs, alone]) == {"alone": 4200, "spent": 100 * (12 + 2 + 4 + 8 + 7), "trunks": 1}
    assert spent_flops([]) == {"alone": 0, "spent": 0, "trunks": 0}
