"""Tables a reader opens for detail: parameters by component, every run, the routing of the trained models.

Not for: means and gaps (`tables`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from equipoise import text
from equipoise.report.tables import arm_headings
from equipoise.report.values import METRICS, Cell, Table, added, arm_index, metric_name

_COMPONENTS: Final = ("embedding", "head", "attention", "norms", "ffn", "router", "experts")


def components_table(results: Mapping[str, Any]) -> Table:
    """Parameters by component, an arm a column."""
    arms = results["arms"]
    names = {name for arm in arms for name in arm["by_component"]}
    ordered = [name for name in _COMPONENTS if name in names] + sorted(names - set(_COMPONENTS))
    rows = [(name, [arm["by_component"].get(name, 0) for arm in arms]) for name in ordered]
    rows.append(("total", [arm["params"]["total"] for arm in arms]))
    return Table(
        title="Parameters by component",
        header=(Cell(text=""), *arm_headings(results)),
        rows=tuple(
            (Cell(text=name, head=True), *(Cell(text=text.count(value), number=True) for value in values))
            for name, values in rows
        ),
    )


def runs_table(results: Mapping[str, Any]) -> Table:
    """Every run with its own numbers."""
    rows = []
    for run in results["runs"]:
        rows.append(
            (
                Cell(text=run["arm"], head=True, arm=arm_index(results, run["arm"]), marks=added(run)),
                Cell(text=text.short(run["budget"]), number=True),
                Cell(text=str(run["seed"]), number=True),
                Cell(
                    text=f"{run['status']}: {run['message']}" if run["message"] else run["status"],
                    prose=True,
                ),
                *(_run_loss(run, metric) for metric in METRICS),
                Cell(text=text.count(run["best_step"]), number=True),
                Cell(text=text.count(run["num_spikes"]), number=True),
                Cell(text=text.count(run["tokens"]), number=True),
                Cell(text=text.scientific(run["train_flops"]), number=True),
                Cell(text=text.duration(run["train_s"]), number=True),
                Cell(text=text.count(run["tokens_per_s"]), number=True),
                Cell(text=text.size(run["peak_memory_bytes"]), number=True),
            )
        )
    labels = ("arm", "budget", "seed", "status", *(metric_name(results, metric) for metric in METRICS), "best step")
    labels += ("spikes", "tokens", "training FLOPs", "training time", "tokens/s", "peak memory")
    header = tuple(Cell(text=label, number=label not in ("arm", "status")) for label in labels)
    notes = (
        "Times are each run's own, on a machine that may have done other work: no ground for a claim about speed.",
    )
    return Table(title="Every run", header=header, rows=tuple(rows), notes=notes)


def _run_loss(run: Mapping[str, Any], metric: str) -> Cell:
    """A run's loss; marked when its routing had collapsed in the weights it was measured on."""
    fallen = run["best_collapsed" if metric == "best_val_loss" else "collapsed"] and run[metric] is not None
    return Cell(text=text.loss(run[metric]), number=True, marks=("collapsed",) if fallen else ())


def routing_table(results: Mapping[str, Any], entries: Sequence[Mapping[str, Any]], *, one_run: bool = False) -> Table:
    """Routing at the end of training, layer by layer, over the final evaluation; `one_run` leaves out whose it is."""
    rows = []
    for entry in entries:
        who = (
            Cell(text=entry["arm"], head=True, arm=arm_index(results, entry["arm"])),
            Cell(text=text.short(entry["budget"]), number=True),
            Cell(text=str(entry["seed"]), number=True),
        )
        for layer, row in enumerate(entry["final"]):
            marks = ("collapsed",) if row["collapsed"] else ()
            cells = (
                Cell(text=str(layer), number=True, head=one_run),
                Cell(text=text.number(row["busiest_frac"], 3), number=True, marks=marks),
                Cell(text=text.number(1 / entry["top_k"], 3), number=True),
                Cell(text=text.number(row["usage_entropy"], 3), number=True, marks=marks),
                Cell(text=text.number(row["router_entropy"], 3), number=True, marks=marks),
                Cell(text=text.number(row["log_z"], 3), number=True, marks=marks),
                Cell(text=", ".join(str(expert) for expert in row["dead"]) or "none"),
            )
            rows.append(cells if one_run else (*who, *cells))
    labels: tuple[str, ...] = (
        "layer",
        "busiest share",
        "ceiling 1/K",
        "usage entropy",
        "router entropy",
        "log Z",
        "dead experts",
    )
    labels = labels if one_run else ("arm", "budget", "seed", *labels)
    header = tuple(Cell(text=label, number=label not in ("arm", "dead experts")) for label in labels)
    notes: tuple[str, ...] = (
        "Busiest share: of all assignments, what the busiest expert got; no expert can exceed 1/K. Entropies are "
        "divided by ln E: 1 is even use, or an undecided router. Dead: not one assignment in the whole evaluation. "
        "Collapsed: the K busiest experts of the layer take at least 90 %.",
    )
    if any(row["log_z"] is None for entry in entries for row in entry["final"]):
        notes += ("A hash or random router has no probabilities, hence neither router entropy nor log Z.",)
    return Table(
        title="Routing at the end of training, over the whole final evaluation",
        header=header,
        rows=tuple(rows),
        notes=notes,
    )
