"""Tables a reader opens for detail: parameters by component, every run, the routing of the trained models.

Not for: means and gaps (`tables`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from equipoise.figures import text
from equipoise.report.tables import METRICS, Cell, Table, arm_index

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
        header=(Cell(text=""), *(Cell(text=arm["name"], number=True, arm=index) for index, arm in enumerate(arms))),
        rows=tuple(
            (Cell(text=name, head=True), *(Cell(text=text.whole(value), number=True) for value in values))
            for name, values in rows
        ),
    )


def runs_table(results: Mapping[str, Any]) -> Table:
    """Every run with its own numbers."""
    rows = []
    for run in results["runs"]:
        marks = ("collapsed",) if run["collapsed"] else ()
        losses = (run["val_loss"], run["best_val_loss"], run["val_bpb"])
        rows.append(
            (
                Cell(text=run["arm"], head=True, arm=arm_index(results, run["arm"])),
                Cell(text=text.short(run["budget"]), number=True),
                Cell(text=str(run["seed"]), number=True),
                Cell(text=f"{run['status']}: {run['message']}" if run["message"] else run["status"]),
                *(
                    Cell(text=text.loss(value), number=True, marks=marks if value is not None else ())
                    for value in losses
                ),
                Cell(text=text.whole(run["best_step"]), number=True),
                Cell(text=text.whole(run["num_spikes"]), number=True),
                Cell(text=text.whole(run["tokens"]), number=True),
                Cell(text=text.scientific(run["train_flops"]), number=True),
                Cell(text=text.duration(run["train_s"]), number=True),
                Cell(text=text.whole(run["tokens_per_s"]), number=True),
                Cell(text=text.memory(run["peak_memory_bytes"]), number=True),
            )
        )
    labels = ("arm", "budget", "seed", "status", *METRICS.values(), "best step", "spikes", "tokens", "training FLOPs")
    labels += ("training time", "tokens/s", "peak memory")
    header = tuple(Cell(text=label, number=label not in ("arm", "status")) for label in labels)
    notes = (
        "Times are each run's own, on a machine that may have done other work: no ground for a claim about speed.",
    )
    return Table(title="Every run", header=header, rows=tuple(rows), notes=notes)


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
                Cell(text=text.decimal(row["busiest_frac"]), number=True, marks=marks),
                Cell(text=text.decimal(1 / entry["top_k"]), number=True),
                Cell(text=text.decimal(row["usage_entropy"]), number=True, marks=marks),
                Cell(text=text.decimal(row["router_entropy"]), number=True, marks=marks),
                Cell(text=text.decimal(row["log_z"]), number=True, marks=marks),
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
    notes = (
        "Busiest share: of all assignments, what the busiest expert got; no expert can exceed 1/K. Entropies are "
        "divided by ln E: 1 is even use, or an undecided router. Dead: not one assignment in the whole evaluation. "
        "Collapsed: the K busiest experts of the layer take at least 90 %.",
    )
    return Table(
        title="Routing at the end of training, over the whole final evaluation",
        header=header,
        rows=tuple(rows),
        notes=notes,
    )
