"""`--engine-option NAME=VALUE`: what can be said to an engine, read and checked. Not part of a study or its lock.

Not for: what an engine does with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from equipoise.errors import ConfigError
from equipoise.faults import did_you_mean, printable

ENGINES: Final = ("local", "ray", "slurm", "commands")
PACKAGES: Final = {"ray": "ray", "slurm": "submitit"}
"""Engine, which is the name of its extra too → the package it needs."""
SBATCH: Final = "sbatch."
"""What begins so is handed to sbatch as it is."""


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """What can be said to `--engine ray`."""

    address: str = "local"
    """`local`: a Ray of this machine, for the time of the study; `auto`: the cluster this machine belongs to, or
    RAY_ADDRESS; else where a cluster's head is, HOST:PORT or ray://HOST:PORT."""
    cpus: int | None = None
    """Cores of a run; default the threads of the recipe for each of its processes."""
    gpus: float | None = None
    """GPUs of a run, a fraction where several share a card; default one a process with --device cuda, else 0."""
    memory_gb: float | None = None
    """Memory that a run is booked for; default none."""
    retries: int = 3
    """How often a run whose worker was lost, or told to stop, goes on elsewhere."""


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """What can be said to `--engine slurm`."""

    partition: str | None = None
    """Where jobs are queued; default the cluster's."""
    minutes: int = 240
    """Time limit of a job. A run that needs longer is saved before and goes on in another job, `retries` times."""
    cpus: int | None = None
    """Cores of a run; default the threads of the recipe for each of its processes."""
    gpus: int | None = None
    """GPUs of a run; default one a process with --device cuda, else 0."""
    memory_gb: float | None = None
    """Memory of a run; default the cluster's."""
    retries: int = 3
    """How often a run that was out of time, or told to stop, goes on in another job."""
    cluster: Literal["slurm", "local"] = "slurm"
    """`local`: submitit's processes on this machine, in place of Slurm: to try the rest."""
    sbatch: Mapping[str, str] = field(default_factory=dict)
    """Any other option of sbatch by its long name: `sbatch.account=NAME`, `sbatch.constraint=h100`."""


Options = RayOptions | SlurmOptions | None
"""`local` and `commands` have none."""


def _whole(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= least):
            raise ValueError(f"a whole number of at least {least}, below a billion")
        return int(text)

    return read


def _number(zero: bool) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (value > 0 or (zero and value == 0)) or value > 1e6:
            raise ValueError("a number of at least 0" if zero else "a number above 0")
        return value

    return read


def _share_of_gpus(text: str) -> float:
    value = _number(zero=True)(text)
    if value != round(value, 4) or (value > 1 and not value.is_integer()):
        raise ValueError("a whole number, or a fraction of one GPU in steps of 0.0001")
    return value


def _text(text: str) -> str:
    if not text or not text.isprintable():
        raise ValueError("some text")
    return text


def _cluster(text: str) -> str:
    if text not in ("slurm", "local"):
        raise ValueError("slurm or local")
    return text


_SHARED: Final[dict[str, Callable[[str], Any]]] = {
    "cpus": _whole(1),
    "memory_gb": _number(zero=False),
    "retries": _whole(0),
}
_READERS: Final[dict[str, dict[str, Callable[[str], Any]]]] = {
    "local": {},
    "ray": {**_SHARED, "address": _text, "gpus": _share_of_gpus},
    "slurm": {**_SHARED, "partition": _text, "minutes": _whole(1), "gpus": _whole(0), "cluster": _cluster},
    "commands": {},
}


def read_options(engine: str, assignments: Sequence[str]) -> Options:
    """What `assignments` (NAME=VALUE) say to an engine; of a name given twice the last counts.

    ConfigError with every fault: an engine, a name or a value that is not known.
    """
    if engine not in ENGINES:
        raise ConfigError(f"--engine {engine}: expected {_either(ENGINES)}{did_you_mean(engine, ENGINES)}")
    readers, faults = _READERS[engine], []
    found: dict[str, Any] = {}
    sbatch: dict[str, str] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        where = f"--engine-option {printable(assignment)}"
        if not equals:
            faults.append(f"{where}: expected NAME=VALUE")
            continue
        try:
            if engine == "slurm" and name.startswith(SBATCH) and len(name) > len(SBATCH):
                sbatch[_text(name.removeprefix(SBATCH)).replace("_", "-")] = _text(value)
            elif name in readers:
                found[name] = readers[name](value)
            else:
                known = [*readers, *([f"{SBATCH}NAME"] if engine == "slurm" else [])]
                expected = f"one of {', '.join(known)}{did_you_mean(name, known)}" if known else "none"
                faults.append(f"{where}: --engine {engine} has no {printable(name)}; expected {expected}")
        except ValueError as error:
            faults.append(f"{where}: expected {error}")
    if faults:
        raise ConfigError("\n".join(faults))
    if engine == "slurm":
        return SlurmOptions(**found, sbatch=sbatch)
    return RayOptions(**found) if engine == "ray" else None


def choose_device(options: RayOptions | SlurmOptions, device: str, processes: int = 1) -> tuple[str, float]:
    """The `--device` of runs (`auto` stays `auto` only where they have no GPU), and how many GPUs each is given.

    A run that was given a GPU must not fall back to a CPU, and each of its processes takes one. ConfigError for GPUs
    that nothing would use, fewer than the processes of a run, or a GPU device without one.
    """
    gpus = options.gpus if options.gpus is not None else float(processes * (device == "cuda"))
    if gpus and device == "cpu":
        raise ConfigError(f"--engine-option gpus={gpus:g}: nothing uses them with --device cpu; expected 0")
    if not gpus and device == "cuda":
        raise ConfigError("--engine-option gpus=0: --device cuda needs one; expected more than 0, or --device cpu")
    if gpus and 1 < processes != gpus:
        raise ConfigError(
            f"--engine-option gpus={gpus:g}: each of the {processes} processes of a run takes one; expected {processes}"
        )
    return ("cuda" if gpus else device), gpus


def _either(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"
