"""A signal in any phase of training: saved at that very step, 143 or 130, and what goes on is the run never stopped.

The signals are real ones, sent to this process by the phase that is to be interrupted.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from equipoise.engine import Stop, catching_signals
from equipoise.errors import Interrupted
from equipoise.record import masked, read_rows, read_run
from equipoise.spec.run import RunConfig
from equipoise.train import train
from equipoise.trunk import checkpoint_steps

# What is interrupted: a function, at which of its calls, and the step at which the run is then saved.
PHASES = {
    "before the first update": ("equipoise.train.open_session", 1, 0),
    "first evaluation": ("equipoise.score.token_losses", 1, 0),
    "first update": ("equipoise.train.train_step", 1, 1),
    "update": ("equipoise.train.train_step", 4, 4),
    "evaluation": ("equipoise.session.evaluate", 2, 2),
    "sampling": ("equipoise.model.transformer._choose", 2, 2),
    "saving": ("equipoise.checkpoint._save_tensors", 2, 2),
    "last update": ("equipoise.train.train_step", 10, 10),
    "final scoring": ("equipoise.finish.load_checkpoint", 1, 10),
}


def short_run(tiny: Any) -> RunConfig:
    """Ten updates with a rate so high that the best point of the curve is not the last: both are scored."""
    run = next(run for run in tiny.runs if run.arm == "moe" and run.seed == 0)
    optim = dataclasses.replace(run.recipe.optim, lr=2.0, grad_clip=0.0)
    schedule = dataclasses.replace(run.recipe.schedule, warmup_frac=0.99, final_frac=1.0)
    return dataclasses.replace(run, recipe=dataclasses.replace(run.recipe, optim=optim, schedule=schedule))


def left_behind(directory: Path) -> list[Any]:
    newest = directory / "checkpoints" / f"step-{checkpoint_steps(directory)[-1]:08d}"
    files = (newest / "model.safetensors", newest / "optim.safetensors", directory / "val_losses.safetensors")
    rows = [masked(read_rows(directory / name)) for name in ("metrics.jsonl", "samples.jsonl")]
    return [*rows, *(path.read_bytes() for path in files)]


@pytest.fixture(scope="module", autouse=True)
def two_batches() -> Iterator[None]:
    """An evaluation takes two batches, so that a signal can come between them."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("equipoise.score.FORWARD_TOKENS", 256)
        yield


@pytest.fixture(scope="module")
def straight(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    directory = tmp_path_factory.mktemp("straight")
    summary = train(short_run(tiny), directory, tiny.dataset)
    assert summary["best_step"] < 10
    return left_behind(directory)


def interrupting(name: str, at: int, number: int, stop: Stop, patched: pytest.MonkeyPatch) -> None:
    """Have the `at`-th call of a function send this process a signal before it does its work."""
    module, _, function = name.rpartition(".")
    original: Callable[..., Any] = getattr(__import__(module, fromlist=["x"]), function)
    calls = 0

    def interrupted(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            os.kill(os.getpid(), number)
            end = time.monotonic() + 60
            while not stop() and time.monotonic() < end:
                time.sleep(0.001)
        return original(*arguments, **named)

    patched.setattr(name, interrupted)


@pytest.mark.usefixtures("every_point_saved")
@pytest.mark.parametrize("phase", PHASES)
def test_saved_at_that_step_and_the_rest_is_the_same(
    tiny: Any, straight: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    number = signal.SIGTERM if list(PHASES).index(phase) % 2 else signal.SIGINT
    name, at, step = PHASES[phase]
    with monkeypatch.context() as patched, pytest.raises(Interrupted) as stopped, catching_signals() as stop:
        interrupting(name, at, number, stop, patched)
        train(short_run(tiny), tmp_path, tiny.dataset, stop_signal=stop)
    assert stopped.value.exit_code == 128 + number
    record = read_run(tmp_path)
    assert record.status == "interrupted" and checkpoint_steps(tmp_path)[-1] == step
    assert len(record.rows("train")) == step, "no further update was done"
    where = f"checkpoints/step-{step:08d}: saved at step {step} of 10"
    assert (where if phase != "final scoring" else "all 10 steps are saved") in str(stopped.value)
    train(short_run(tiny), tmp_path, tiny.dataset)
    assert left_behind(tmp_path) == straight
