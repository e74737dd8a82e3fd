"""The tables every rendering begins with: what the arms are, their losses, and their paired gaps.

Not for: any number that is not in the results; nothing is computed here but differences of whole counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from equipoise import text
from equipoise.report import published
from equipoise.report.values import METRICS, Cell, Table, added, arm_index, is_post_hoc, marks, metric_name, seed_count
from equipoise.spec.sweep import lr_text
from equipoise.text import MISSING

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
    "num_shared_experts": "shared experts",
    "d_expert": "d_expert",
}


def arms_table(results: Mapping[str, Any]) -> Table:
    """What each arm is, an arm a column: widths, counts, what it was matched to and what is left over."""
    arms = results["arms"]
    rows = [
        (
            "feed-forward layer",
            [arm["ffn"] for arm in arms],
        )
    ]
    for field, label in _WIDTHS.items():
        values = [arm["widths"].get(field) for arm in arms]
        if any(value is not None for value in values):
            rows.append((label, ["–" if value is None else text.count(value) for value in values]))
    rows += [(label, [text.count(arm["params"][field]) for arm in arms]) for field, label in COUNTS.items()]
    rows.append(("training FLOPs per token", [text.count(arm["flops_per_token"]) for arm in arms]))
    if len({arm["lr"] for arm in arms}) > 1:
        rows.append(("peak learning rate", [lr_text(arm["lr"]) for arm in arms]))
    if any(arm["match"] for arm in arms):
        matches = [arm["match"] for arm in arms]
        rows.append(("matched to", [f"{m['to']}, on {m['on']}" if m else "–" for m in matches]))
        rows.append(("solved width", [m["adjust"] if m else "–" for m in matches]))
        rows.append(("reached", [text.count(m["quantity"]) if m else "–" for m in matches]))
        rows.append(("target", [text.count(m["reference"]) if m else "–" for m in matches]))
        rows.append(("residual", [_residual(m) if m else "–" for m in matches]))
        without = [m["residual_nonembedding"] if m else None for m in matches]
        rows.append(("residual without embeddings", ["–" if one is None else text.percent(one) for one in without]))
    for budget in results["budgets"]:
        seen = [arm["tokens_per_expert"].get(str(budget)) for arm in arms]
        rows.append((f"tokens per expert at {text.short(budget)}", [text.count(value) for value in seen]))
    if any(arm["shared_init"] for arm in arms):
        rows.append(("initial tensors shared", [_shared(arm) for arm in arms]))
    header = (Cell(text=""), *arm_headings(results))
    body = tuple(
        (Cell(text=label, head=True), *(Cell(text=value, number=True) for value in values)) for label, values in rows
    )
    notes = (
        "Active: used by one token's forward pass; embeddings, head, attention, norms and routers count in full, "
        "experts top_k of num_experts. FLOPs: training, 3 × forward, attention in full. Residual: reached ÷ target "
        "− 1; without embeddings, of the same parameters less embedding and head. Tokens per expert: tokens trained × "
        "top_k ÷ num_experts, on average; a dense layer sees every token.",
    )
    return Table(title="Widths, parameters, cost and matching of each arm", header=header, rows=body, notes=notes)


def arm_headings(results: Mapping[str, Any]) -> tuple[Cell, ...]:
    """A heading per arm, for a table with an arm a column; marked when the arm was added late."""
    return tuple(
        Cell(
            text=arm["name"],
            number=True,
            arm=index,
            marks=added({"post_hoc": is_post_hoc(results, arm=arm["name"])}),
        )
        for index, arm in enumerate(results["arms"])
    )


def results_table(results: Mapping[str, Any]) -> Table:
    """Arm × budget in the published form: mean ± sd over seeds, lost runs named, collapsed arms marked at all.

    Rows of what was declared come without late seeds; what was added late has rows of its own, marked.
    """
    entries: dict[tuple[int, str, bool], dict[str, Mapping[str, Any]]] = {}
    for row in results["table"]:
        entries.setdefault((row["budget"], row["arm"], row["post_hoc"]), {})[row["metric"]] = row
    beside = published.has_published(results, gaps=False)
    rows = []
    for (budget, arm, _), own in entries.items():
        one = own["val_loss"]
        cells = [
            Cell(text=text.short(budget), number=True),
            Cell(text=arm, arm=arm_index(results, arm), head=True, marks=added(one)),
        ]
        cells += [Cell(text=_mean_sd(own[metric]), number=True, marks=marks(own[metric])) for metric in METRICS]
        cells += [published.arm_cell(results, arm, budget)] if beside else []
        cells.append(Cell(text=f"{one['n']} of {one['expected_n']}", number=True))
        rows.append((*cells, Cell(text=_run_notes(results, arm, budget, one["seeds"]), prose=True)))
    rows += _floor_rows(results, beside)
    labels = ("budget", "arm", *(metric_name(results, metric) for metric in METRICS))
    labels += (*[published.HEADING] * beside, "seeds", "notes")
    header = tuple(Cell(text=label, number=label not in ("arm", "notes")) for label in labels)
    facts = [_scored(results), _budget_note(results), *_schedule_notes(results)]
    facts += published.sources(results) if beside else []
    if results["floor"]:
        facts.append(
            f"Known floor: what the grammar that wrote the text scores on the same {results['floor']['num_documents']} "
            "documents, ± standard error; on average over its texts no model does better."
        )
    if any(row["lost"] or row["diverged"] for row in results["table"]):
        facts.append(
            "A mean with fewer seeds than declared is over the runs that finished; the others are named beside it."
        )
    if any(row["post_hoc"] for row in results["table"]):
        facts.append("Post hoc: with what was added after the first finished run; it enters no other row.")
    notes = (
        f"Mean ± sd (n − 1) over seeds, on the {results['split']} split. Losses in nats per token: at the end of "
        "training, and at the step where the curve is lowest. Bits per byte of raw text, at the end.",
    )
    return Table(
        title="Losses by budget and arm, mean ± sd over seeds",
        header=header,
        rows=tuple(rows),
        facts=tuple(fact for fact in facts if fact),
        notes=notes,
        grouped=True,
    )


def gaps_table(results: Mapping[str, Any], metric: str | None = None) -> Table:
    """Paired gaps, left − right, with interval and noise floor: of one metric, or of all (None)."""
    beside = published.has_published(results, gaps=True)
    rows = []
    for row in results["gaps"]:
        if metric not in (None, row["metric"]):
            continue
        rows.append(
            (
                Cell(
                    text=f"{row['left']} \u2212 {row['right']}",
                    head=True,
                    arm=arm_index(results, row["left"]),
                    marks=added(row),
                ),
                Cell(text=text.short(row["budget"]), number=True),
                *([] if metric else [Cell(text=metric_name(results, row["metric"]))]),
                Cell(text=_mean_sd(row, signed=True), number=True, marks=marks(row)),
                Cell(text=interval(row), number=True, marks=marks(row)),
                Cell(text=text.loss(row["noise_floor"]), number=True),
                *([] if metric else [Cell(text=_sampling(row), number=True)]),
                Cell(text=seed_count(row), prose=True),
                Cell(text=lower_arm(row)),
                *([published.gap_cell(results, *_place(row))] if beside else []),
            )
        )
    labels = ["contrast", "budget", "metric", "mean ± sd", "95 % interval", "noise floor", "validation sampling"]
    labels += ["seeds", "lower", *[published.HEADING] * beside]
    facts = []
    if metric:  # narrow enough for a terminal and a page: the second interval stands below
        labels = [label for label in labels if label not in ("metric", "validation sampling")]
        sampled = [row for row in results["gaps"] if row["metric"] == metric and row["validation_sampling"]]
        facts = [f"Validation sampling (same runs, other documents), 95 %: {_sampled(sampled)}."] if sampled else []
    facts += _own_budgets(results, [row for row in results["gaps"] if metric in (None, row["metric"])])
    facts += published.sources(results) if beside else []
    header = tuple(Cell(text=label, number=label not in ("contrast", "metric", "seeds", "lower")) for label in labels)
    notes = (
        "Paired: the difference is taken within each seed, whose arms share data order, evaluation windows and the "
        "initial values of equally shaped tensors. Intervals are unadjusted 95 % t intervals. Noise floor: the "
        "smallest mean gap that this spread and this many seeds could support in a one-sided test at "
        f"α = {results['alpha']:g}. Validation sampling: the runs held fixed, the 95 % interval had other validation "
        "documents been drawn (bootstrap over documents); it knows nothing of other seeds, and no verdict rests on it.",
    )
    of = f" in {metric_name(results, metric)}" if metric else ""
    title = f"Paired gaps{of}, left − right"
    return Table(title=title, header=header, rows=tuple(rows), facts=tuple(facts), notes=notes, grouped=True)


def _place(row: Mapping[str, Any]) -> tuple[str, str, int, str]:
    return row["left"], row["right"], row["budget"], row["metric"]


def _sampled(rows: Sequence[Mapping[str, Any]]) -> str:
    """Every interval over validation documents, with the contrast it is of."""
    return "; ".join(
        f"{row['left']} \u2212 {row['right']} at {text.short(row['budget'])}"
        f"{' (post hoc)' if row['post_hoc'] else ''} {_sampling(row)}"
        for row in rows
    )


def _sampling(row: Mapping[str, Any]) -> str:
    """The interval over validation documents, or n/a where it does not exist."""
    return interval(row["validation_sampling"]) if row["validation_sampling"] else MISSING


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
    return f"{'+' if difference > 0 else ''}{text.count(difference)} ({text.percent(match['residual'])})"


def _shared(arm: Mapping[str, Any]) -> str:
    shared = arm["shared_init"]
    return f"{shared['tensors']} of {shared['of']}, with {shared['with']}" if shared else "–"


def _run_notes(results: Mapping[str, Any], arm: str, budget: int, seeds: Sequence[int]) -> str:
    """Every seed without a number and why; every seed that collapsed; every seed that was added late."""
    own = {run["seed"]: run for run in results["runs"] if (run["arm"], run["budget"]) == (arm, budget)}
    notes = [f"own budget: {note}" for note in [own_tokens(results, arm, budget)] if note]
    for seed in seeds:
        run = own[seed]
        what = [run["status"]] if run["status"] != "complete" else []
        if run["collapsed"]:
            what.append("collapsed")
        elif run["best_collapsed"]:
            what.append("collapsed at its best step")
        if is_post_hoc(results, seed=seed):
            what.append("added later")
        notes += [f"seed {seed}: {', '.join(what)}"] if what else []
    return "; ".join(notes) or "–"


def own_tokens(results: Mapping[str, Any], arm: str, budget: int) -> str:
    """Tokens and epochs of an arm that has a budget of its own at this budget of the study; empty for others."""
    found = [
        own for one in results["arms"] if one["name"] == arm for own in one["own_budgets"] if own["budget"] == budget
    ]
    if not found:
        return ""
    epochs = found[0]["epochs"]
    return f"{text.count(found[0]['tokens'])} tokens" + ("" if epochs is None else f", {text.number(epochs, 2)} epochs")


def _own_budgets(results: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What must be known of the arms of these contrasts: who was trained on other tokens than the budget says."""
    said = {
        f"{arm} at {text.short(row['budget'])}: {note}"
        for row in rows
        for arm in (row["left"], row["right"])
        if (note := own_tokens(results, arm, row["budget"]))
    }
    return [f"Own budgets: {'; '.join(sorted(said))}."] if said else []


def _floor_rows(results: Mapping[str, Any], beside: bool) -> list[tuple[Cell, ...]]:
    """The grammar's own score as a row, or why there is none; nothing for other text."""
    floor, reason = results["floor"], results["floor_reason"]
    if not floor and not reason:
        return []
    values = [MISSING] * len(METRICS)
    if floor:
        loss = _with_error(floor["loss"], floor["loss_se"])
        values = [loss, loss, _with_error(floor["bpb"], floor["bpb_se"])]
    return [
        (
            Cell(text="any", number=True),
            Cell(text="known floor", head=True),
            *(Cell(text=value, number=True) for value in values),
            *[Cell(text="–", number=True)] * beside,
            Cell(text="–", number=True),
            Cell(text="± standard error" if floor else str(reason), prose=True),
        )
    ]


def _scored(results: Mapping[str, Any]) -> str:
    """How much of the split the losses are over."""
    scored, total = results["val_targets"], results["val_targets_total"]
    if scored is None or total is None:
        return ""
    return f"Scored over {text.count(scored)} of {text.count(total)} {results['split']} tokens."


def _schedule_notes(results: Mapping[str, Any]) -> list[str]:
    """What a comparison across budgets rests on: their schedule, and whether they share updates."""
    if len(results["budgets"]) < 2 or "schedule" not in results:
        return []
    name = {"wsd": "WSD (warm-up, stable, decay)", "cosine": "cosine"}[results["schedule"]["kind"]]
    notes = [f"Every budget is the end of its own {name} schedule; budgets are compared within that schedule alone."]
    flops = results["training_flops"]
    if flops["trunks"]:
        spent, alone = text.scientific(flops["spent"]), text.scientific(flops["alone"])
        notes.append(
            "Budgets of one arm and seed branch from a shared trunk, each bit for bit the run trained alone: "
            f"{spent} training FLOPs were spent instead of {alone}; FLOPs of a run are those of the run alone."
        )
    return notes


def _budget_note(results: Mapping[str, Any]) -> str:
    parts = []
    for budget in results["budgets"]:
        real = results["tokens_per_budget"].get(str(budget))
        epochs = results["epochs"].get(str(budget))
        if real is not None and epochs is not None:
            parts.append(f"{text.short(budget)} = {text.count(real)} tokens, {text.number(epochs, 2)} epochs")
    return f"Budgets: {'; '.join(parts)}." if parts else ""
