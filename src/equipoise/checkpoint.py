"""Atomic, verified save and restore of a training state: weights, optimizer, and a small JSON state. No pickle.

One checkpoint is one folder `step-00000040` holding `model.safetensors`, `optim.safetensors`, `state.json` and
`manifest.json` (size and SHA-256 of each). It is built in a temporary folder, made durable, then renamed: a folder of
that name is whole or was altered afterwards, and the manifest tells which. There is no random state to save: every
random number is a pure function of seed, purpose and step (`equipoise.rng`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from equipoise.errors import IntegrityError, ResourceError
from equipoise.faults import reason
from equipoise.files import describe_file, file_faults, read_json, read_sealed, seal, sync_folder, write_json
from equipoise.optim import AdamW
from equipoise.shapes import CheckpointState, Manifest, hold

SCHEMA_VERSION = 1
FILES = ("model.safetensors", "optim.safetensors", "state.json")
FIELDS = ("step", "exp_avg", "exp_avg_sq")
"""What AdamW keeps of a parameter."""


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """Everything a resumed run needs: restoring it continues bit for bit."""

    step: int
    """Updates done."""
    run: str
    """Digest of the RunConfig it belongs to."""
    model: dict[str, Tensor]
    """Weights by name, as the bare model names them, the biases of routers balanced by them included."""
    optim: dict[str, Tensor]
    """AdamW state as `<parameter>/<field>`."""
    state: dict[str, Any]
    """JSON values: best evaluation so far, last evaluated step, training seconds."""


def save_checkpoint(folder: Path, train_state: TrainState, keep: Iterable[int]) -> Path:
    """Write `train_state` under `folder`, then delete what is neither newest two nor in `keep`.

    Returns the checkpoint's path. An existing checkpoint of the same step is replaced. On any error the temporary
    folder is removed and older checkpoints stay as they were; ResourceError when the disk is full.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = checkpoint_path(folder, train_state.step)
    temporary = folder / f".{target.name}.{os.getpid()}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        _save_tensors(train_state.model, temporary / "model.safetensors")
        _save_tensors(train_state.optim, temporary / "optim.safetensors")
        write_json(
            temporary / "state.json", {"step": train_state.step, "run": train_state.run, "state": train_state.state}
        )
        for name in FILES:
            _sync(temporary / name)
        files = {name: describe_file(temporary / name) for name in FILES}
        write_json(
            temporary / "manifest.json",
            seal({"schema_version": SCHEMA_VERSION, "step": train_state.step, "files": files}),
        )
        if target.exists():  # saved twice at one step, as when stopped before and after its evaluation
            target.rename(_replaced(target))
        temporary.rename(target)
        sync_folder(folder)
        if faults := file_faults(target, files):  # nothing older goes before this one has been read again
            raise IntegrityError(f"{target}/{faults[0]}, just after it was written; is the disk failing?")
        shutil.rmtree(_replaced(target), ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    _retain(folder, {train_state.step, *keep})
    return target


def load_checkpoint(path: Path) -> TrainState:
    """Read one checkpoint folder; IntegrityError naming the first file that is missing, altered or unreadable."""
    manifest = read_sealed(path / "manifest.json")
    hold(path / "manifest.json", manifest, Manifest)
    files = manifest["files"]
    if manifest["schema_version"] != SCHEMA_VERSION or set(files) != set(FILES):
        raise IntegrityError(f"{path}/manifest.json: expected schema_version {SCHEMA_VERSION} of {', '.join(FILES)}")
    faults = file_faults(path, files)
    if faults:
        raise IntegrityError(f"{path}/{faults[0]}")
    stored = read_json(path / "state.json")
    hold(path / "state.json", stored, CheckpointState)
    step = stored["step"]
    if manifest["step"] != step or checkpoint_path(path.parent, step).name != path.name:
        raise IntegrityError(f"{path}: holds step {step}, which is not what its name and manifest say")
    return TrainState(
        step=step,
        run=stored["run"],
        model=_load_tensors(path / "model.safetensors"),
        optim=_load_tensors(path / "optim.safetensors"),
        state=stored["state"],
    )


def load_latest(
    folder: Path,
    run: str,
    set_aside: Callable[[str], None] | None = None,
    fault: Callable[[TrainState], str | None] = lambda _: None,
) -> TrainState | None:
    """The newest checkpoint of the run with digest `run` that verifies, or None. Reads only, unless told otherwise.

    `fault` may name a further reason not to take one. With `set_aside` (the run's own process passes it) each newer
    one that is not taken is renamed `corrupt-…`, never deleted, and told of in one line; leftovers of a killed save
    are removed.
    """
    if set_aside is not None:
        _tidy(folder)
    for path in sorted(folder.glob("step-*"), reverse=True):
        try:
            found = load_checkpoint(path)
            why = f"{path}: belongs to another run" if found.run != run else fault(found)
            if why:
                raise IntegrityError(why)
            return found
        except IntegrityError as error:
            if set_aside is None:
                continue
            aside = path.with_name(f"corrupt-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            set_aside(f"{error}; set aside as {aside.name}, falling back to an earlier checkpoint")
    return None


def _tidy(folder: Path) -> None:
    """Finish or undo what a killed save left behind."""
    for temporary in folder.glob(".step-*.tmp"):
        shutil.rmtree(temporary, ignore_errors=True)
    for old in folder.glob(".step-*.old"):
        target = folder / old.name.removeprefix(".").removesuffix(".old")
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(target)


def _replaced(target: Path) -> Path:
    """Where a checkpoint lies while another of the same step takes its place."""
    return target.with_name(f".{target.name}.old")


def checkpoint_path(folder: Path, step: int) -> Path:
    """Folder of the checkpoint at `step`."""
    return folder / f"step-{step:08d}"


def restore_model(model: torch.nn.Module, tensors: dict[str, Tensor]) -> None:
    """Put weights back; IntegrityError naming the first that is missing, unknown, or of another shape or type.

    Nothing is loaded unless everything fits, and no prefix is guessed away: a weight is never left at its random start.
    """
    own = model.state_dict()
    faults = [f"{name!r} is missing" for name in own if name not in tensors]
    faults += [f"{name!r} is no parameter of this model" for name in tensors if name not in own]
    for name, tensor in own.items():
        found = tensors.get(name, tensor)
        if found.shape != tensor.shape:
            faults.append(f"{name!r} is {list(found.shape)}; expected {list(tensor.shape)}")
        elif found.dtype != tensor.dtype:
            faults.append(f"{name!r} is {found.dtype}; expected {tensor.dtype}")
    if faults:
        raise IntegrityError(f"model.safetensors: {faults[0]}")
    model.load_state_dict(tensors)


def optimizer_tensors(model: torch.nn.Module, optimizer: AdamW) -> dict[str, Tensor]:
    """The optimizer's state keyed `<parameter>/<field>`; parameters without state yet are left out."""
    return {
        f"{name}/{field}": value
        for name, parameter in model.named_parameters()
        for field, value in optimizer.state.get(parameter, {}).items()
    }


def restore_optimizer(model: torch.nn.Module, optimizer: AdamW, tensors: dict[str, Tensor]) -> None:
    """Put back what `optimizer_tensors` returned; IntegrityError when it is not of this model's parameters."""
    parameters = dict(model.named_parameters())
    known: dict[str, set[str]] = {}
    for key, value in tensors.items():
        name, _, field = key.rpartition("/")
        if name not in parameters:
            raise IntegrityError(f"optim.safetensors: {name!r} is no parameter of this model")
        shape = torch.Size() if field == "step" else parameters[name].shape
        if field not in FIELDS or value.shape != shape or value.dtype != torch.float32:
            raise IntegrityError(
                f"optim.safetensors: {key!r} is {list(value.shape)} of {value.dtype}; expected {', '.join(FIELDS)} of "
                f"a parameter, {list(shape)} of torch.float32"
            )
        known.setdefault(name, set()).add(field)
    lacking = [name for name, fields in known.items() if fields != set(FIELDS)]
    if lacking:
        raise IntegrityError(f"optim.safetensors: {lacking[0]!r} lacks one of {', '.join(FIELDS)}")
    for key, value in tensors.items():
        name, _, field = key.rpartition("/")
        device = "cpu" if field == "step" and not optimizer.fused else parameters[name].device
        optimizer.state.setdefault(parameters[name], {})[field] = value.to(device)


def _save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file; its library reports a full disk as an error of its own."""
    try:
        save_file(_plain(tensors), path)
    except SafetensorError as error:
        raise ResourceError(
            f"{path}: cannot be written ({reason(error)}); the checkpoints before it are whole"
        ) from None


def _load_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise IntegrityError(f"{path}: not a readable safetensors file ({reason(error)})") from None


def _plain(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _retain(folder: Path, keep: set[int]) -> None:
    names = (path.name.removeprefix("step-") for path in folder.glob("step-*"))
    steps = sorted(int(name) for name in names if name.isdecimal())  # what else lies there is nobody's to delete
    for step in set(steps[:-2]) - keep:
        shutil.rmtree(checkpoint_path(folder, step))
