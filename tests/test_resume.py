"""A run stopped at chosen steps, or dying at the worst moments, is byte for byte the run that was never stopped.

40 updates of two windows over a data set of 26: an epoch ends with update 13, 26 and 39. The curve has points at 0, 20
and 40, where checkpoints are saved.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import equipoise.checkpoint as checkpoint
import equipoise.session as session
import equipoise.train as training
from equipoise.errors import Interrupted
from equipoise.record import masked, read_rows
from equipoise.spec.model import BalanceBias
from equipoise.spec.run import RunConfig
from equipoise.train import train
from equipoise.trunk import checkpoint_steps

STEPS, WINDOWS = 40, 26
STOPS = (1, 7, 13, 20, 39)
KINDS = [("dense", "fused"), ("moe", "plain"), ("bias", "fused")]

Batches = list[tuple[int, tuple[str, ...]]]


def forty_steps(tiny: Any, arm: str, kernels: Any) -> RunConfig:
    run = next(run for run in tiny.runs if run.seed == 0 and run.arm == ("dense" if arm == "dense" else "moe"))
    if arm == "bias":
        ffn = dataclasses.replace(run.model.ffn, balance=BalanceBias(rate=0.01), z_coef=0.0)
        run = dataclasses.replace(run, model=dataclasses.replace(run.model, ffn=ffn))
    recipe = dataclasses.replace(run.recipe, kernels=kernels, num_evals=2)
    return dataclasses.replace(run, recipe=recipe, budget=STEPS * recipe.batch_tokens)


def left_behind(directory: Path) -> dict[str, Any]:
    """Everything two equal runs have in common: weights, optimizer, rows, texts and losses."""
    newest = directory / "checkpoints" / f"step-{checkpoint_steps(directory)[-1]:08d}"
    files = (newest / "model.safetensors", newest / "optim.safetensors", directory / "val_losses.safetensors")
    rows = {name: masked(read_rows(directory / name)) for name in ("metrics.jsonl", "samples.jsonl")}
    return {"step": newest.name, **rows, **{path.name: path.read_bytes() for path in files}}


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> Batches:
    """(step, hash of each window) of every batch that is trained on, from a data set cut to 26 windows."""
    seen: Batches = []
    original = training.batch

    def logged(tokens: Any, seq_len: int, num: int, seed: int, step: int) -> Any:
        found = original(tokens[: WINDOWS * seq_len + 1], seq_len, num, seed, step)
        windows = zip(*found, strict=True)
        seen.append((step, tuple(hashlib.sha256(x.tobytes() + y.tobytes()).hexdigest() for x, y in windows)))
        return found

    monkeypatch.setattr(training, "batch", logged)
    return seen


def stop_at(step: int, batches: Batches) -> Callable[[], int]:
    """A SIGTERM that comes during the last of `step` updates: before its evaluation, where it has one."""
    return lambda: 15 if batches and batches[-1][0] == step - 1 else 0


@pytest.mark.parametrize(("arm", "kernels"), KINDS)
def test_stopped_at_chosen_steps_not_a_byte_differs_and_no_batch_is_missing_or_repeated(
    tiny: Any, tmp_path: Path, batches: Batches, arm: str, kernels: str
) -> None:
    run = forty_steps(tiny, arm, kernels)
    train(run, tmp_path / "straight", tiny.dataset)
    straight = batches.copy()
    assert [step for step, _ in straight] == list(range(STEPS))
    order = [window for _, windows in straight for window in windows]
    epochs = [order[start : start + WINDOWS] for start in (0, WINDOWS, 2 * WINDOWS)]
    assert len(set(epochs[0])) == WINDOWS and sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2]
    batches.clear()
    for stop in STOPS:
        with pytest.raises(Interrupted, match=rf"saved at step {stop} of 40") as stopped:
            train(run, tmp_path / "stopped", tiny.dataset, stop_signal=stop_at(stop, batches))
        assert stopped.value.exit_code == 143
        assert checkpoint_steps(tmp_path / "stopped")[-1] == stop
    train(run, tmp_path / "stopped", tiny.dataset)
    assert batches == straight
    assert left_behind(tmp_path / "stopped") == left_behind(tmp_path / "straight")


class Died(BaseException):
    """What no handler of ours may catch: the process is gone."""


DEATHS = ["evaluation", "rows", "weights", "manifest", "replace", "retain", "summary"]


@pytest.mark.usefixtures("every_point_saved")
@pytest.mark.parametrize("death", DEATHS)
def test_dying_at_the_worst_moments_not_a_byte_differs(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, death: str
) -> None:
    """In an evaluation, after its rows and before the save, within a save, after it, and before the summary.

    Whatever would clean up is kept from doing so.
    """
    run = next(run for run in tiny.runs if run.arm == "dense" and run.seed == 0)
    train(run, tmp_path / "straight", tiny.dataset)
    if death == "replace":  # a checkpoint of that step is there: stopped before its evaluation
        with pytest.raises(Interrupted):
            polls = iter([0] * 7)
            train(run, tmp_path / "died", tiny.dataset, stop_signal=lambda: next(polls, 15))

    def die(*_: Any, **__: Any) -> Any:
        raise Died

    place = {
        "evaluation": ("equipoise.session.evaluate", 2),
        "rows": ("equipoise.train.keep_session", 2),
        "weights": ("equipoise.checkpoint._save_tensors", 4),  # the optimizer of the second checkpoint
        "manifest": ("equipoise.checkpoint.write_json", 4),
        "replace": ("equipoise.checkpoint.sync_folder", 1),
        "retain": ("equipoise.checkpoint._retain", 3),
        "summary": ("equipoise.finish.finish_run", 1),
    }
    name, at = place[death]
    module, _, function = name.rpartition(".")
    original, calls = getattr(__import__(module, fromlist=["x"]), function), 0

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        return die() if calls == at else original(*arguments, **named)

    with monkeypatch.context() as patched:
        patched.setattr(name, counted)
        if death != "retain":
            patched.setattr(checkpoint.shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(Died):
            train(run, tmp_path / "died", tiny.dataset)
    said: list[str] = []
    train(run, tmp_path / "died", tiny.dataset, log=said.append)
    assert left_behind(tmp_path / "died") == left_behind(tmp_path / "straight")
    assert not [line for line in said if "set aside" in line]
    leftovers = [path.name for path in (tmp_path / "died" / "checkpoints").iterdir() if path.name.startswith(".")]
    assert leftovers == []


@pytest.fixture
def overshooting(tiny: Any) -> RunConfig:
    """Ten points of a curve whose best is not the last: far too high a rate after it."""
    run = next(run for run in tiny.runs if run.arm == "dense" and run.seed == 0)
    optim = dataclasses.replace(run.recipe.optim, lr=1.0, grad_clip=0.0)
    schedule = dataclasses.replace(run.recipe.schedule, warmup_frac=0.99, final_frac=1.0)
    return dataclasses.replace(
        run, recipe=dataclasses.replace(run.recipe, optim=optim, schedule=schedule, num_evals=10)
    )


@pytest.mark.usefixtures("every_point_saved")
def test_what_is_kept_is_the_newest_two_the_best_and_the_last(
    tiny: Any, overshooting: RunConfig, tmp_path: Path
) -> None:
    summary = train(overshooting, tmp_path, tiny.dataset)
    assert summary["best_step"] < 9
    assert checkpoint_steps(tmp_path) == [summary["best_step"], 9, 10]


def test_points_that_follow_each_other_soon_are_saved_with_the_next_checkpoint_if_they_are_needed(
    tiny: Any, overshooting: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same run, summary and best weights; also when it is stopped while the best weights are in memory alone."""
    saved: list[int] = []

    def save(folder: Path, state: checkpoint.TrainState, keep: Any) -> Path:
        saved.append(state.step)
        return checkpoint.save_checkpoint(folder, state, keep)

    monkeypatch.setattr(session, "save_checkpoint", save)
    monkeypatch.setattr(session, "SAVE_S", 0.0)
    often = train(overshooting, tmp_path / "often", tiny.dataset)
    assert saved == list(range(1, 11))
    best = often["best_step"]

    monkeypatch.setattr(session, "SAVE_S", 1e9)
    saved.clear()
    seldom = train(overshooting, tmp_path / "seldom", tiny.dataset)
    assert saved == [best, 9, 10] and best < 9

    saved.clear()

    def stop() -> int:
        rows = read_rows(tmp_path / "stopped" / "metrics.jsonl")
        return 15 if sum(row["kind"] == "train" for row in rows) == best + 2 else 0

    with pytest.raises(Interrupted):
        train(overshooting, tmp_path / "stopped", tiny.dataset, stop_signal=stop)
    assert saved == [best, best + 2] and best + 2 < 10
    stopped = train(overshooting, tmp_path / "stopped", tiny.dataset)
    assert saved == [best, best + 2, 9, 10]

    for summary, name in ((seldom, "seldom"), (stopped, "stopped")):
        assert left_behind(tmp_path / name) == left_behind(tmp_path / "often")
        assert {file: summary["files"][file] for file in weights_of(summary)} == {
            file: often["files"][file] for file in weights_of(often)
        }
        assert {int(file.split("/")[1][5:]) for file in weights_of(summary)} == {best, 10}


def weights_of(summary: dict[str, Any]) -> list[str]:
    """The weight files that a summary names."""
    return [name for name in summary["files"] if name.endswith(("model.safetensors", "optim.safetensors"))]
