"""A study's results as rows and arrays: what `equipoise.load_study` returns, and what `results.csv` is written from.

Not for: computing anything (`results` did), or formatting (`report`). Nothing here is rounded.

Shapes: A arms, N seeds, P points of a curve, L layers, E experts. Absent numbers are None in rows, NaN in arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from equipoise.config import dump
from equipoise.errors import ConfigError, IntegrityError
from equipoise.evidence import METRICS
from equipoise.files import read_json
from equipoise.results import SCHEMA_VERSION, collect

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Row = TypeVar("Row")

DIAGNOSTICS: Final = (
    "router_entropy",
    "log_z",
    "busiest_frac",
    "usage_variance",
    "usage_entropy",
    "load_cv",
    "max_vio",
)
"""Numbers per layer that every point of a routed run has (see docs/design.md, *Diagnostics*)."""


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """One run: a row of `results.csv`, with the columns in this order."""

    arm: str
    seed: int
    budget: int
    """Tokens of the study's budget, at which the run is compared."""
    status: str
    """complete, diverged, interrupted, started, missing or broken; only the first carries results."""
    post_hoc: bool
    """Its arm, seed or budget was added after the first finished run."""
    total_params: int
    active_params: int
    """Parameters that one token's forward pass uses."""
    tokens: int | None
    """Tokens really trained on."""
    steps: int | None
    train_flops: int | float | None
    val_loss: float | None
    """Nats per token at the end of training, on the split that `StudyResults.split` names."""
    best_val_loss: float | None
    """The same in the weights of `best_step`."""
    val_bpb: float | None
    """Bits per byte of raw text, at the end."""
    best_step: int | None
    """Where the curve is lowest."""
    collapsed: bool | None
    """Whether the routing had collapsed in the final weights; a dense run's never has."""
    best_collapsed: bool | None
    """The same in the weights of `best_step`."""
    num_spikes: int | None
    """Updates with a spike of the training loss; None where there are too few to judge."""
    train_s: float | None
    """Seconds spent in updates: of this machine, not of the model."""
    tokens_per_s: float | None
    peak_memory_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class GapRow:
    """One paired gap, left − right: a row of `gaps.csv`, with the columns in this order."""

    left: str
    right: str
    budget: int
    metric: str
    post_hoc: bool
    """It rests on what was added after the first finished run."""
    n: int
    """Seeds both arms have."""
    expected_n: int
    """Seeds both should have."""
    mean: float | None
    sd: float | None
    """Of the paired differences, with n − 1."""
    ci_low: float | None
    """Lower end of the two-sided t interval over seeds, unadjusted."""
    ci_high: float | None
    confidence: float
    noise_floor: float | None
    """The smallest mean gap that these seeds could support."""
    left_collapsed: bool
    """A run of the left arm in it had collapsed."""
    right_collapsed: bool
    dropped: tuple[int, ...]
    """Seeds it is without."""


@dataclass(frozen=True, kw_only=True)
class ClaimRow:
    """One claim and what became of it."""

    id: str
    kind: str
    metric: str
    verdict: str
    """supported, refuted, equivalent or inconclusive."""
    post_hoc: bool
    marks: tuple[str, ...]
    """What has to be said with the verdict, such as "collapsed" or "repeated data"."""
    reason: str
    """The sentence that explains it."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Loss of one run along its training, on the subset of the split that is the same for every run."""

    steps_P: Ints
    tokens_P: Ints
    flops_P: Floats
    seconds_P: Floats
    """Seconds spent in updates so far."""
    loss_P: Floats
    """Nats per token; NaN where it was not finite."""


@dataclass(frozen=True, kw_only=True)
class RoutingHistory:
    """What the routers of one run did along its training."""

    num_experts: int
    top_k: int
    steps_P: Ints
    tokens_P: Ints
    usage_PLE: Floats
    """Share of the assignments each expert gets; 1 over the experts of a layer."""
    diagnostics: dict[str, Floats]
    """Name → values [P, L]; the names are `DIAGNOSTICS`. NaN where a router has none (hash and random routers)."""


@dataclass(frozen=True, kw_only=True)
class StudyResults:
    """Everything a study found, as rows and arrays."""

    name: str
    question: str
    split: str
    """The split the losses are of: validation, or selection while a recipe was being chosen."""
    arms: tuple[str, ...]
    seeds: tuple[int, ...]
    budgets: tuple[int, ...]
    runs: tuple[RunRow, ...]
    """Every run that was declared, whatever became of it."""
    gaps: tuple[GapRow, ...]
    claims: tuple[ClaimRow, ...]
    results: dict[str, Any]
    """The whole of `results.json`: see *Results file* in docs/design.md."""

    def values(self, metric: str = "val_loss", budget: int | None = None) -> Floats:
        """One metric of every run at one budget (None: the largest), arms × seeds [A, N]; NaN without a result.

        Raises ConfigError for a metric or budget that the study does not have.
        """
        _known("metric", metric, METRICS)
        at = max(self.budgets) if budget is None else budget
        _known("budget", at, self.budgets)
        cells = {(run.arm, run.seed): getattr(run, metric) for run in self.runs if run.budget == at}
        return _floats([[cells.get((arm, seed)) for seed in self.seeds] for arm in self.arms])

    def curve(self, arm: str, seed: int, budget: int | None = None) -> Curve:
        """The loss of one run along its training; ConfigError for a run without a curve."""
        points = self._of_run("curves", arm, seed, budget)["points"]
        return Curve(
            steps_P=_ints([point["step"] for point in points]),
            tokens_P=_ints([point["tokens"] for point in points]),
            flops_P=_floats([point["flops"] for point in points]),
            seconds_P=_floats([point["seconds"] for point in points]),
            loss_P=_floats([point["loss"] for point in points]),
        )

    def routing(self, arm: str, seed: int, budget: int | None = None) -> RoutingHistory:
        """The routing of one run along its training; ConfigError for a run without, such as every dense one."""
        row = self._of_run("routing", arm, seed, budget)
        layers = [point["layers"] for point in row["points"]]
        return RoutingHistory(
            num_experts=row["num_experts"],
            top_k=row["top_k"],
            steps_P=_ints([point["step"] for point in row["points"]]),
            tokens_P=_ints([point["tokens"] for point in row["points"]]),
            usage_PLE=_floats([[layer["usage"] for layer in one] for one in layers]),
            diagnostics={name: _floats([[layer[name] for layer in one] for one in layers]) for name in DIAGNOSTICS},
        )

    def _of_run(self, kind: str, arm: str, seed: int, budget: int | None) -> Mapping[str, Any]:
        at = max(self.budgets) if budget is None else budget
        for name, value, known in (("arm", arm, self.arms), ("seed", seed, self.seeds), ("budget", at, self.budgets)):
            _known(name, value, known)
        for row in self.results[kind]:
            if (row["arm"], row["seed"], row["budget"]) == (arm, seed, at):
                return dict(row)
        having = sorted({row["arm"] for row in self.results[kind]})
        raise ConfigError(
            f"{arm}, seed {seed}, {at} tokens: no {kind} of this run; expected a run of {', '.join(having) or 'none'} "
            "that has one"
        )


def read_results(path: Path | str) -> StudyResults:
    """What `equipoise.load_study` documents."""
    place = Path(path)
    results: dict[str, Any] = dump(collect(place)) if not place.is_file() else read_json(place)
    if results.get("schema_version") != SCHEMA_VERSION or "gaps" not in results:
        raise IntegrityError(
            f"{place}: not the results of a study; expected a study's folder, or a results.json with schema_version "
            f"{SCHEMA_VERSION}"
        )
    try:
        return as_rows(results)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise IntegrityError(f"{place}: not the results of a study ({type(error).__name__}: {error})") from None


def as_rows(results: Mapping[str, Any]) -> StudyResults:
    """`results.json`, or what `results.collect` returns, as rows; KeyError or TypeError for anything else."""
    params = {arm["name"]: arm["params"] for arm in results["arms"]}
    counts = {name: {"total_params": own["total"], "active_params": own["active"]} for name, own in params.items()}
    return StudyResults(
        name=results["name"],
        question=results["question"],
        split=results["split"],
        arms=tuple(params),
        seeds=tuple(results["seeds"]),
        budgets=tuple(results["budgets"]),
        runs=tuple(_row(RunRow, {**run, **counts[run["arm"]]}) for run in results["runs"]),
        gaps=tuple(
            _row(
                GapRow,
                {
                    **gap,
                    "left_collapsed": gap["left"] in gap["collapsed"],
                    "right_collapsed": gap["right"] in gap["collapsed"],
                    "dropped": tuple(gap["dropped"]),
                },
            )
            for gap in results["gaps"]
        ),
        claims=tuple(_row(ClaimRow, {**claim, "marks": tuple(claim["marks"])}) for claim in results["claims"]),
        results=dict(results),
    )


def _row(kind: type[Row], values: Mapping[str, Any]) -> Row:
    return kind(**{field.name: values[field.name] for field in fields(kind)})  # type: ignore[arg-type]


def _known(what: str, value: object, known: tuple[Any, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{what} {value!r}: expected one of {', '.join(map(str, known))}")


def _floats(values: Any) -> Floats:
    return np.array(values, dtype=np.float64)  # None becomes NaN


def _ints(values: Any) -> Ints:
    return np.array(values, dtype=np.int64)
