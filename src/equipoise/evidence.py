"""What each run of a study left behind, read whole: a run that cannot be read is broken, and the others go on.

Not for: means, contrasts or verdicts (`results`). Every value here is checked to be what its readers expect, and can
be written as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from equipoise.explored import read_explorer
from equipoise.files import read_json
from equipoise.lock import Lock, status, study_budget
from equipoise.record import EXPLORER, RunRecord, Status
from equipoise.routing import saturation, unpacked
from equipoise.shapes import Environments, hold
from equipoise.text import is_number

METRICS: Final = ("val_loss", "best_val_loss", "val_bpb")
"""What a complete run was scored by, the final loss first."""
SUMMARY: Final = {"init": dict, "resumed_elsewhere": list, "collapsed": bool, "best_collapsed": bool, "routing": list}
"""Fields of a summary that results are made of, besides the metrics, and what they hold."""
CURVE_POINTS: Final = 200
"""Points a curve keeps at most: beyond that they cannot be told apart in a figure."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One run of a study: what the lock declares, what became of it, and what it measured."""

    arm: str
    seed: int
    budget: int
    """The study's, at which it is compared; its own may be another."""
    post_hoc: bool
    """Its arm, seed or budget was added after the first finished run."""
    status: Status
    """As `record.RunRecord.status`; also broken when anything it recorded cannot be read."""
    message: str | None
    """Why it diverged, or what is broken."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """The summary of a complete or diverged run, else empty."""
    environments: tuple[dict[str, Any], ...] = ()
    """The machines and versions it ran with, one after the other; of a complete or diverged run."""
    points: tuple[dict[str, Any], ...] = ()
    """Its curve: step, tokens, flops, seconds, loss."""
    routing: dict[str, Any] | None = None
    """`top_k`, `num_experts`, `points` along training, each with the `saturation` of its layers where the choices were
    kept, and `final`; of a complete run of a routed arm."""
    samples: tuple[dict[str, Any], ...] = ()
    """Texts of a complete run."""
    explorer: dict[str, Any] | None = None
    """`stories` token by token and, of each routed `layers`, what experts are used for (see `equipoise.explored`);
    of a complete run that kept it."""
    losses: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Of a complete run, the arrays of `val_losses.safetensors`: loss per validation unit, and what the units are."""

    @property
    def place(self) -> dict[str, Any]:
        """Arm, seed and budget."""
        return {"arm": self.arm, "seed": self.seed, "budget": self.budget}

    @property
    def complete(self) -> bool:
        """Whether it carries results."""
        return self.status == "complete"

    def collapsed(self, metric: str) -> bool:
        """Whether the routing had collapsed in the weights that this metric was measured on."""
        return bool(self.summary.get("best_collapsed" if metric == "best_val_loss" else "collapsed"))

    @property
    def curve(self) -> dict[int, float]:
        """Tokens trained → loss of the curve's evaluations."""
        return {point["tokens"]: point["loss"] for point in self.points if is_number(point["loss"])}

    def diagnostic(self, metric: str, layers: Literal["mean", "max"] = "mean", at_frac: float = 1.0) -> float | None:
        """A routing diagnostic over the layers; None for a run without routing, or without this diagnostic.

        At the end of training (`at_frac` 1) over the whole final evaluation; before it over the curve's evaluation
        whose step is nearest to that share of the training, the earlier of two equally near.
        """
        if self.routing is None:
            return None
        rows = self.routing["final"]
        trained = [point for point in self.routing["points"] if point["step"]]  # not before the first update
        if at_frac < 1 and trained:
            due = at_frac * trained[-1]["step"]
            rows = min(trained, key=lambda point: abs(point["step"] - due))["layers"]
        values = [row.get(metric) for row in rows]
        if not values or not all(map(is_number, values)):
            return None
        return float(max(values) if layers == "max" else math.fsum(values) / len(values))


def gather(directory: Path, lock: Lock) -> list[Evidence]:
    """Every run that the lock declares, in the study's order. Never fails for what lies in a run directory.

    Messages name files as they lie in the study: where the study lies is no part of what it found.
    """
    late = {kind: lock.post_hoc(kind) for kind in ("arms", "seeds", "budgets")}
    budgets = study_budget(lock)
    found = [_read(record, late, budgets) for record in status(directory, lock)]
    return [
        dataclasses.replace(run, message=run.message.replace(f"{directory}{os.sep}", "")) if run.message else run
        for run in found
    ]


def _read(record: RunRecord, late: Mapping[str, list[Any]], budgets: Mapping[tuple[str, int], int]) -> Evidence:
    run = record.locked
    assert run is not None  # what `status` returns carries the locked run
    budget = budgets[run.arm, run.budget]
    evidence = Evidence(
        arm=run.arm,
        seed=run.seed,
        budget=budget,
        post_hoc=run.arm in late["arms"] or run.seed in late["seeds"] or budget in late["budgets"],
        status=record.status,
        message=record.fault,
    )
    if record.status in ("missing", "started", "broken"):
        return evidence
    try:
        whole = dataclasses.replace(evidence, **_content(record))
        json.dumps(dataclasses.asdict(whole), allow_nan=False)
        return dataclasses.replace(whole, losses=record.losses()) if whole.complete else whole
    except Exception as error:  # whatever its files hold: one run must not hide the others
        return dataclasses.replace(evidence, status="broken", message=f"cannot be read: {_said(error)}")


def _said(error: Exception) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    if isinstance(error, KeyError):
        return f"{text} is missing"
    return text if type(error).__module__.startswith("equipoise") else f"{type(error).__name__}: {text}"


def _content(record: RunRecord) -> dict[str, Any]:
    """What an interrupted, complete or diverged run holds; raises whatever reading or checking it raises."""
    evaluations = _thinned(record.rows("eval"))
    names = {"step": "step", "tokens": "tokens", "flops": "flops", "elapsed_s": "seconds", "loss": "loss"}
    found: dict[str, Any] = {"points": tuple({new: row[old] for old, new in names.items()} for row in evaluations)}
    samples = record.samples()
    if record.summary is None:
        return found
    found["summary"] = summary = record.summary
    for name, kind in SUMMARY.items():
        if not isinstance(summary[name], kind):
            raise ValueError(f"summary.json: {name} = {summary[name]!r}; expected {kind.__name__}")
    found["message"] = summary["message"]
    found["environments"] = tuple(dict(environment) for environment in _environments(record))
    if record.status == "diverged":
        return found
    scored = ("selection_loss",) if record.locked is not None and record.locked.select else ()
    wrong = [name for name in (*METRICS, "epochs", *scored) if not is_number(summary[name])]
    if wrong:
        raise ValueError(f"summary.json: {wrong[0]} = {summary[wrong[0]]!r}; expected a finite number")
    found["samples"] = tuple({name: row[name] for name in ("step", "tokens", "prompt", "text")} for row in samples)
    if summary["routing"]:
        found["routing"] = _routing(record, evaluations)
    if EXPLORER in summary["files"] and record.locked is not None:
        found["explorer"] = read_explorer(record.directory / EXPLORER, record.locked.model)
    return found


def _environments(record: RunRecord) -> list[dict[str, Any]]:
    stored = read_json(record.directory / "environment.json")
    hold("environment.json", stored, Environments)
    if not stored["environments"]:
        raise ValueError("environment.json: it names no environment")
    return list(stored["environments"])


def _routing(record: RunRecord, evaluations: list[dict[str, Any]]) -> dict[str, Any]:
    assert record.locked is not None and record.summary is not None
    ffn = record.locked.model.ffn
    if ffn.kind != "moe":
        raise ValueError("summary.json: it has routing, but the arm is dense")
    return {
        "num_experts": ffn.num_experts,
        "top_k": ffn.top_k,
        "points": [
            {"step": r["step"], "tokens": r["tokens"], "layers": r["routing"], "saturation": settled}
            for r, settled in zip(evaluations, _saturations(evaluations, ffn.num_experts), strict=True)
        ],
        "final": record.summary["routing"],
    }


def _saturations(evaluations: list[dict[str, Any]], num_experts: int) -> list[list[float] | None]:
    """Per evaluation and layer the share of the last one's choices that it made already; None where none were kept."""
    kept = [
        [unpacked(layer, row["chosen"]["tokens"], num_experts) for layer in row["chosen"]["layers"]]
        if "chosen" in row
        else None
        for row in evaluations
    ]
    if not kept or kept[-1] is None:
        return [None for _ in kept]
    final = kept[-1]
    return [
        None if layers is None else [saturation(*pair) for pair in zip(layers, final, strict=True)] for layers in kept
    ]


def _thinned(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most CURVE_POINTS rows, evenly chosen, first and last kept."""
    if len(rows) <= CURVE_POINTS:
        return rows
    last = len(rows) - 1
    return [rows[round(i * last / (CURVE_POINTS - 1))] for i in range(CURVE_POINTS)]
