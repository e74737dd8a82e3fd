"""Seconds of one update of each arm, as measured once for a study: `<study>/step_time.json`, written and read.

Not for: measuring (`probe` does, by a child process). What is read here was written by another
process and may be from another machine: it is checked, and says where it was measured. A study without it, or with a
broken one, is compared at equal tokens and FLOPs alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from equipoise.config import digest
from equipoise.errors import IntegrityError
from equipoise.files import read_sealed, seal, write_json
from equipoise.lock import Lock
from equipoise.spec.model import ModelConfig
from equipoise.spec.sweep import units
from equipoise.text import is_number

SCHEMA_VERSION: Final = 1
NAME: Final = "step_time.json"
BUSY_CORES: Final = 0.5
"""More than half a core at work for others before the probe: the machine was not idle, and the times say so."""


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """What a probe measured."""

    step_s: Mapping[str, float]
    """Arm, or family of arms → median seconds of one update."""
    spread: Mapping[str, float]
    """The same → (slowest − fastest round) ÷ median."""
    measured: str
    """When, UTC."""
    environment: Mapping[str, Any]
    """Machine, threads and versions."""
    load: float | None
    """Load average over a minute before the probe, where the system has one; the study's own runs are in it."""
    busy_cores: float | None
    """Cores at work for others just before the probe; None where the system does not say."""

    def table(self) -> dict[str, Any]:
        """As plain JSON values, for results.json."""
        names = ("measured", "load", "busy_cores")
        mappings = {name: dict(getattr(self, name)) for name in ("step_s", "spread", "environment")}
        return {**mappings, **{name: getattr(self, name) for name in names}, "idle": self.idle}

    @property
    def idle(self) -> bool | None:
        """Whether nothing else was running; None where the system does not say."""
        return None if self.busy_cores is None else self.busy_cores <= BUSY_CORES


def probed_models(lock: Lock) -> dict[str, ModelConfig]:
    """What has to be probed: a model per arm, members of a sweep once, under the name of the family."""
    return {name: lock.models[members[0]] for name, members in units(lock.study.arms).items()}


def write_step_times(directory: Path, lock: Lock, measured: Mapping[str, Any]) -> Path:
    """Write what the probe said, beside the models and the recipe it was measured on; returns the path."""
    about = {"models": digest(probed_models(lock)), "recipe": digest(lock.study.recipe)}
    write_json(directory / NAME, seal({"schema_version": SCHEMA_VERSION, **about, **measured}))
    return directory / NAME


def read_step_times(directory: Path, lock: Lock) -> StepTimes | str:
    """The step times of a study, or in a few words why there are none. Never raises for what the file holds."""
    path = directory / NAME
    if not path.exists():
        return f"no {NAME}; `equipoise run` writes it after the last run"
    try:
        stored = read_sealed(path)
        if stored["schema_version"] != SCHEMA_VERSION:
            return f"{NAME}: schema_version {stored['schema_version']!r}; expected {SCHEMA_VERSION}"
        about = {"models": digest(probed_models(lock)), "recipe": digest(lock.study.recipe)}
        if any(stored[name] != value for name, value in about.items()):
            return f"{NAME}: measured on other arms or another recipe; `equipoise run` measures anew"
        times = {name: _times(stored["rounds"][name], name) for name in probed_models(lock)}
        return StepTimes(
            step_s={name: median for name, (median, _) in times.items()},
            spread={name: spread for name, (_, spread) in times.items()},
            measured=str(stored["measured"]),
            environment={str(key): value for key, value in stored["environment"].items()},
            load=_number_or_none(stored["load"]),
            busy_cores=_number_or_none(stored["busy_cores"]),
        )
    except (IntegrityError, KeyError, TypeError, ValueError, AttributeError) as error:
        return f"{NAME}: cannot be used ({' '.join(str(error).split())})"


def _times(rounds: Any, name: str) -> tuple[float, float]:
    """Median and relative spread of the rounds of one arm; ValueError when they are no seconds."""
    if not isinstance(rounds, list) or not rounds or not all(is_number(value) and value > 0 for value in rounds):
        raise ValueError(f"rounds of {name}: expected seconds above 0")
    median = statistics.median(float(value) for value in rounds)
    return median, (max(rounds) - min(rounds)) / median


def _number_or_none(value: Any) -> float | None:
    return float(value) if is_number(value) else None
