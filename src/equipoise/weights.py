"""The trained weights of a run directory, read and verified, as arrays; no torch.

Not for: going on with a run or reading its optimizer (`checkpoint`), or making a model of the weights (`model`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.accounting import size_fault
from equipoise.errors import ConfigError, IntegrityError
from equipoise.record import WEIGHTS, read_run, read_tensors
from equipoise.spec.run import RunConfig


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The weights of a complete run, and which they are."""

    directory: Path
    """The run directory."""
    run: RunConfig
    """What was run."""
    summary: dict[str, Any]
    """What came of it: the run's `summary.json`."""
    step: int
    """Updates after which the weights were saved."""
    best: bool
    """Whether those of the lowest point of the curve were asked for, instead of the last."""
    tensors: dict[str, np.ndarray]
    """float32, by name in the bare model: parameters, and the biases of routers balanced by them."""


def read_weights(directory: Path, *, best: bool = False) -> Weights:
    """The last weights of a complete run or, with `best`, those at the lowest point of its curve.

    Every file of the run is compared with the SHA-256 in its summary first. Raises ConfigError when there is no run or
    it is not complete, IntegrityError when a file is altered or the checkpoint was deleted.
    """
    record = read_run(directory)
    if record.fault:
        raise IntegrityError(f"{directory}: {record.fault}")
    if record.config is None:
        raise ConfigError(f"{directory}: no run directory; expected one that holds a config.json")
    if record.summary is None or record.status != "complete":
        then = "" if record.status == "diverged" else f"; finish it first: equipoise train {directory}"
        raise ConfigError(f"{directory}: {record.status}; expected a complete run{then}")
    step = record.summary.get("best_step" if best else "steps")
    if step is None or "params" not in record.summary:
        raise IntegrityError(f"{directory}/summary.json: it does not say which step's weights are kept")
    name = f"{WEIGHTS}/step-{step:08d}/model.safetensors"
    path = directory / name
    if not path.exists():
        raise IntegrityError(
            f"{path}: deleted; expected the run's weights (to have them again, delete {directory} and run the study)"
        )
    if name not in record.summary["files"]:
        raise IntegrityError(f"{path}: not in the list of summary.json; the files there are not the run's own")
    tensors = read_tensors(path)
    fault = size_fault(record.config.model, {name: tensor.size for name, tensor in tensors.items()})
    if fault:
        raise IntegrityError(f"{path}: {fault}")
    return Weights(
        directory=directory,
        run=record.config,
        summary=record.summary,
        step=step,
        best=best,
        tensors=tensors,
    )
