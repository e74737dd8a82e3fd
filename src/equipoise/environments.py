"""The machines and versions a study's runs were made with, and in what they differ where numbers depend on it.

Not for: recording them (`session`), nor for marking a verdict (`results`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from equipoise.evidence import Evidence

SAME: Final = ("equipoise", "torch", "numpy", "cpu_capability", "device", "threads", "micro_sequences", "processes")
"""Fields of an environment that have to be equal for two runs to be comparable bit for bit; on a GPU also which one.
`micro_sequences` is there only when memory ran out (`--auto-micro-batch`), `processes` when there were several."""


def distinct(environments: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each different environment once, in the order of first use."""
    kept: list[dict[str, Any]] = []
    for environment in environments:
        if environment not in kept:
            kept.append(environment)
    return kept


def mixed(runs: Iterable[Evidence]) -> dict[str, Any] | None:
    """How the environments of the complete runs differ: fields, and runs that went on elsewhere; None when in nothing.

    Only fields that numbers depend on count; on a CPU `compute` merely says why it was chosen, on a GPU which it is.
    """
    complete = [run for run in runs if run.complete]
    environments = [environment for run in complete for environment in run.environments]
    names = (*SAME, *(["compute"] if any(e.get("device") != "cpu" for e in environments) else []))
    differing = [name for name in names if len({str(e.get(name)) for e in environments}) > 1]
    resumed = [
        {**run.place, "steps": list(run.summary["resumed_elsewhere"])}
        for run in complete
        if run.summary["resumed_elsewhere"]
    ]
    return {"fields": differing, "resumed": resumed} if differing or resumed else None
