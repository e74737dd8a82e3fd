"""The tables of a report as values: header, rows of formatted cells, notes. HTML and Markdown render the same ones.

Not for: any number that is not in the results; nothing is computed here but differences of whole counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from equipoise.figures import text
from equipoise.figures.text import MISSING

METRICS: Final = {
    "val_loss": "final loss",
    "best_val_loss": "best loss",
    "val_bpb": "bits per byte",
}
"""Columns of the results table, in order; the first two in nats per token."""

COUNTS: Final = {
    "total": "parameters, total",
    "active": "parameters, active",
    "total_nonembedding": "total without embeddings",
    "active_nonembedding": "active without embeddings",
}

_WIDTHS: Final = {
    "d_model": "d_model",
    "num_layers": "layers",
    "num_heads": "query heads",
    "num_kv_heads": "key-value heads",
    "d_ff": "d_ff",
    "num_experts": "experts",
    "top_k": "chosen per token (top_k)",
    "d_expert": "d_expert",
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell: formatted text, what kind it is, and marks that stand beside it."""

    text: str
    """What is shown; names are as given, hence still to be escaped."""
    number: bool = False
    """Aligned to the right, with figures of equal width."""
    marks: tuple[str, ...] = ()
    """Warnings that belong to this very number, such as "collapsed"."""
    arm: int | None = None
    """The arm's place in the study, for its colour, where the cell names an arm."""
    head: bool = False
    """The cell heads its row."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A captioned table."""

    title: str
    """Its caption, one sentence or less."""
    header: tuple[Cell, ...]
    """One cell a column."""
    rows: tuple[tuple[Cell, ...], ...]
    """As many cells a row as the header has."""
    notes: tuple[str, ...] = ()
    """Sentences below it."""
    grouped: bool = False
    """Rows of equal first cell stand together, and are set off from the next."""


def arm_index(results: Mapping[str, Any], arm: str) -> int | None:
    """The place of an arm in the study, or None."""
    names = [entry["name"] for entry in results["arms"]]
    return names.index(arm) if arm in names else None


def collapsed_seeds(results: Mapping[str, Any], arm: str, budget: int) -> list[int]:
    """Seeds of the runs of this arm and budget whose routing collapsed."""
    return [run["seed"] for run in results["runs"] if (run["arm"], run["budget"]) == (arm, budget) and run["collapsed"]]


def main_metric(results: Mapping[str, Any]) -> str:
    """The metric a study is mostly about: that of its first claim, or the final loss."""
    return str(results["claims"][0]["metric"]) if results["claims"] else "val_loss"


def metric_name(results: Mapping[str, Any], metric: str) -> str:
    """A metric in words, with the split it was measured on.

    >>> metric_name({"split": "validation"}, "best_val_loss")
    'best validation loss'
    """
    known = {
        "val_loss": f"{results['split']} loss",
        "best_val_loss": f"best {results['split']} loss",
        "val_bpb": "bits per byte",
    }
    return known.get(metric, metric)


def arms_table(results: Mapping[str, Any]) -> Table:
    """What each arm is, an arm a column: widths, counts, what it was matched to and what is left over."""
    arms = results["arms"]
    rows = [
        (
            "feed-forward layer",
            [{"dense": "dense", "moe": "routed experts"}.get(arm["kind"], arm["kind"]) for arm in arms],
        )
    ]
    for field, label in _WIDTHS.items():
        values = [arm["widths"].get(field) for arm in arms]
        if any(value is not None for value in values):
            rows.append((label, ["–" if value is None else text.whole(value) for value in values]))
    rows += [(label, [text.whole(arm["params"][field]) for arm in arms]) for field, label in COUNTS.items()]
    rows.append(("training FLOPs per token", [text.whole(arm["flops_per_token"]) for arm in arms]))
    if any(arm["match"] for arm in arms):
        matches = [arm["match"] for arm in arms]
        rows.append(("matched to", [f"{m['to']}, on {m['on']}" if m else "–" for m in matches]))
        rows.append(("solved width", [m["adjust"] if m else "–" for m in matches]))
        rows.append(("reached", [text.whole(m["quantity"]) if m else "–" for m in matches]))
        rows.append(("target", [text.whole(m["reference"]) if m else "–" for m in matches]))
        rows.append(("residual", [_residual(m) if m else "–" for m in matches]))
    if any(arm["shared_init"] for arm in arms):
        rows.append(("initial tensors shared", [_shared(arm) for arm in arms]))
    header = (Cell(text=""), *(Cell(text=arm["name"], number=True, arm=index) for index, arm in enumerate(arms)))
    body = tuple(
        (Cell(text=label, head=True), *(Cell(text=value, number=True) for value in values)) for label, values in rows
    )
    notes = (
        "Active: used by one token's forward pass; embeddings, head, attention, norms and routers count in full, "
        "experts top_k of num_experts. FLOPs: training, 3 × forward, attention in full. Residual: reached ÷ target "
        "− 1.",
    )
    return Table(title="Widths, parameters, cost and matching of each arm", header=header, rows=body, notes=notes)


def results_table(results: Mapping[str, Any]) -> Table:
    """Arm × budget in the published form: mean ± sd over seeds, lost runs named, collapsed arms marked at all."""
    entries = {(row["arm"], row["budget"], row["metric"]): row for row in results["table"]}
    rows = []
    for budget in results["budgets"]:
        for index, arm in enumerate(results["arms"]):
            own = {metric: entries.get((arm["name"], budget, metric)) for metric in METRICS}
            first = next((entry for entry in own.values() if entry), None)
            marks = ("collapsed",) if collapsed_seeds(results, arm["name"], budget) else ()
            cells = [Cell(text=text.short(budget), number=True), Cell(text=arm["name"], arm=index, head=True)]
            cells += [Cell(text=_mean_sd(entry), number=True, marks=marks) for entry in own.values()]
            count = f"{first['n']} of {first['expected_n']}" if first else f"0 of {len(results['seeds'])}"
            cells += [Cell(text=count, number=True), Cell(text=_run_notes(results, arm["name"], budget))]
            rows.append(tuple(cells))
    floor = results.get("floor")
    if floor:
        loss = _with_error(floor["loss"], floor.get("loss_se"))
        rows.append(
            (
                Cell(text="any", number=True),
                Cell(text="floor: the grammar's true entropy", head=True),
                *(
                    Cell(text=value, number=True)
                    for value in (loss, loss, _with_error(floor["bpb"], floor.get("bpb_se")))
                ),
                Cell(text="–", number=True),
                Cell(text="± standard error"),
            )
        )
    labels = ("budget", "arm", *METRICS.values(), "seeds", "lost, diverged, collapsed")
    header = tuple(Cell(text=label, number=label in ("budget", "seeds", *METRICS.values())) for label in labels)
    notes = [
        f"Mean ± sd (n − 1) over seeds, on the {results['split']} split. Losses in nats per token: at the end of "
        "training, and at the step where the curve is lowest. Bits per byte of raw text, at the end.",
        _budget_note(results),
    ]
    if any(row["lost"] or row["diverged"] for row in results["table"]):
        notes.append(
            "A mean with fewer seeds than declared is over the runs that finished; the others are named beside it."
        )
    return Table(
        title="Losses by budget and arm, mean ± sd over seeds",
        header=header,
        rows=tuple(rows),
        notes=tuple(note for note in notes if note),
        grouped=True,
    )


def gaps_table(results: Mapping[str, Any]) -> Table:
    """Paired gaps, left − right, with interval and noise floor."""
    rows = []
    for row in results["gaps"]:
        both = (row["left"], row["right"])
        marks = ("collapsed",) if any(collapsed_seeds(results, arm, row["budget"]) for arm in both) else ()
        rows.append(
            (
                Cell(text=f"{row['left']} \u2212 {row['right']}", head=True, arm=arm_index(results, row["left"])),
                Cell(text=text.short(row["budget"]), number=True),
                Cell(text=METRICS.get(row["metric"], row["metric"])),
                Cell(text=_mean_sd(row, signed=True), number=True, marks=marks),
                Cell(text=interval(row), number=True, marks=marks),
                Cell(text=text.loss(row["noise_floor"]), number=True),
                Cell(text=text.whole(row["n"]), number=True),
                Cell(text=lower_arm(row)),
            )
        )
    labels = ("contrast", "budget", "metric", "mean ± sd", "95 % interval", "noise floor", "n", "lower")
    header = tuple(Cell(text=label, number=label in labels[3:7] or label == "budget") for label in labels)
    notes = (
        "Paired: the difference is taken within each seed, whose arms share data order, evaluation windows and the "
        "initial values of equally shaped tensors. Intervals are unadjusted 95 % t intervals. Noise floor: the "
        "smallest mean gap that this spread and this many seeds could support in a one-sided test at "
        f"α = {results['alpha']:g}.",
    )
    return Table(title="Paired gaps, left − right", header=header, rows=tuple(rows), notes=notes, grouped=True)


def interval(row: Mapping[str, Any]) -> str:
    """The interval of a contrast, or n/a for one seed."""
    if not (text.is_number(row["ci_low"]) and text.is_number(row["ci_high"])):
        return MISSING
    return f"{text.gap(row['ci_low'])} to {text.gap(row['ci_high'])}"


def lower_arm(row: Mapping[str, Any]) -> str:
    """Which side's mean is lower."""
    if not text.is_number(row["mean"]):
        return MISSING
    return "equal" if row["mean"] == 0 else str(row["left"] if row["mean"] < 0 else row["right"])


def _mean_sd(entry: Mapping[str, Any] | None, *, signed: bool = False) -> str:
    if entry is None or not text.is_number(entry["mean"]):
        return MISSING
    mean = text.gap(entry["mean"]) if signed else text.loss(entry["mean"])
    return f"{mean} ± {text.loss(entry['sd'])}"


def _with_error(value: float | None, error: float | None) -> str:
    return f"{text.loss(value)} ± {text.loss(error)}" if text.is_number(error) else text.loss(value)


def _residual(match: Mapping[str, Any]) -> str:
    difference = match["quantity"] - match["reference"]
    return f"{'+' if difference > 0 else ''}{text.whole(difference)} ({text.percent(match['residual'])})"


def _shared(arm: Mapping[str, Any]) -> str:
    shared = arm["shared_init"]
    return f"{shared['tensors']} of {shared['of']}, with {shared['with']}" if shared else "–"


def _run_notes(results: Mapping[str, Any], arm: str, budget: int) -> str:
    """Every seed without a number and why; every seed that collapsed."""
    own = {run["seed"]: run for run in results["runs"] if (run["arm"], run["budget"]) == (arm, budget)}
    notes = []
    for seed in results["seeds"]:
        status = own[seed]["status"] if seed in own else "missing"
        if status != "complete":
            notes.append(f"seed {seed}: {status}")
        elif own[seed]["collapsed"]:
            notes.append(f"seed {seed}: collapsed")
    return "; ".join(notes) or "–"


def _budget_note(results: Mapping[str, Any]) -> str:
    parts = []
    for budget in results["budgets"]:
        real = results["tokens_per_budget"].get(str(budget))
        epochs = results["epochs"].get(str(budget))
        if real is not None and epochs is not None:
            parts.append(f"{text.short(budget)} = {text.whole(real)} tokens, {text.decimal(epochs, 2)} epochs")
    return f"Budgets: {'; '.join(parts)}." if parts else ""
