"""Adapters to experiment trackers: numbers of one run in, TensorBoard's event files or an offline run of wandb out.

Both write into the study's folder and send nothing anywhere. Each package is imported when the first run is opened.

Not for: reading a run's record or surviving a failure (`tracking`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from equipoise.config import digest
from equipoise.text import is_number


@dataclass(frozen=True, kw_only=True)
class Opened:
    """One run at a tracker."""

    write: Callable[[int, float, Mapping[str, float]], None]
    """Takes a step, the Unix time it is given, and its numbers by name; steps never fall."""
    close: Callable[[Mapping[str, float]], None]
    """Takes the numbers of the run's summary, as far as there are any."""


Opener = Callable[[Path, str, Mapping[str, Any]], Opened]
"""Opens a run anew, in place of what an earlier call left: the study's folder, the run's place in it, its config."""


def open_tensorboard(study: Path, place: str, config: Mapping[str, Any]) -> Opened:
    """A run as event files in `<study>/tensorboard/<place>`, for `tensorboard --logdir <study>/tensorboard`."""
    from tensorboard.summary import Writer

    folder = study / "tensorboard" / place
    for old in folder.glob("events.out.tfevents.*"):
        old.unlink()
    writer = Writer(str(folder))

    def write(step: int, when: float, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step, wall_time=when)

    def close(summary: Mapping[str, float]) -> None:
        for name, value in summary.items():
            writer.add_scalar(f"summary/{name}", value, int(summary.get("steps", 0)))
        writer.close()

    return Opened(write=write, close=close)


def open_wandb(study: Path, place: str, config: Mapping[str, Any]) -> Opened:
    """A run as `<study>/wandb/offline-run-<time>-<id>`, for `wandb sync`; its id is the same every time."""
    import wandb

    name = digest([study.resolve().name, place, dict(config)])[:16]
    for old in (study / "wandb").glob(f"offline-run-*-{name}"):
        shutil.rmtree(old)
    run = wandb.init(
        project="equipoise",
        group=study.resolve().name,
        name=place,
        id=name,
        dir=str(study),
        config=dict(config),
        mode="offline",  # whatever the environment says: nothing is sent
        reinit="create_new",  # several runs of a study are open at a time
        settings=wandb.Settings(
            silent=True, console="off", disable_git=True, save_code=False, x_disable_stats=True, x_disable_meta=True
        ),
    )

    def write(step: int, when: float, numbers: Mapping[str, float]) -> None:
        run.log(dict(numbers), step=step)

    def close(summary: Mapping[str, float]) -> None:
        run.summary.update(dict(summary))
        run.finish()

    return Opened(write=write, close=close)


TRACKERS: Final[dict[str, Opener]] = {"tensorboard": open_tensorboard, "wandb": open_wandb}
"""Name, which is that of the package and of the extra too → what opens a run there."""


def numbers_of(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row of `metrics.jsonl` by the names a tracker shows; what is none is left out.

    >>> numbers_of({"kind": "eval", "step": 3, "loss": 2.5, "routing": [{"log_z": 1.0, "usage": [0.5, 0.5]}]})
    {'eval/loss': 2.5, 'routing/log_z/layer-0': 1.0}
    """
    found = {f"{row['kind']}/{name}": value for name, value in row.items() if name not in ("kind", "step")}
    for layer, diagnostics in enumerate(row.get("routing") or ()):
        found |= {f"routing/{name}/layer-{layer}": value for name, value in diagnostics.items()}
    return {name: float(value) for name, value in found.items() if is_number(value)}
