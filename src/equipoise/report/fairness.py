"""Tables of fairness beyond parameters: the contract matrix, arms' own budgets, sweeps of the learning rate.

Not for: computing anything (`equipoise.fairness` and `equipoise.sweeps` do).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from equipoise import text
from equipoise.report.tables import interval
from equipoise.report.values import Cell, Table, added, arm_index, marks, metric_name
from equipoise.spec.sweep import lr_text

CONTRACTS: Final = {"tokens": "equal tokens", "train_flops": "equal training FLOPs", "seconds": "equal seconds"}
QUANTITIES: Final = {
    "active_params": "active parameters",
    "total_params": "total parameters",
    "flops_per_token": "FLOPs per token",
    "train_flops": "training FLOPs",
    "tokens_per_expert": "tokens per expert",
}


def tables(results: Mapping[str, Any], metric: str, *, narrow: bool = False) -> list[Table]:
    """All tables of this file that the study has something for, in one metric; `narrow`: for a terminal."""
    contracts = contracts_list if narrow else contracts_table
    matrix = contracts(results, metric) if results["contracts"]["rows"] else None
    found = (matrix, budgets_table(results), choices_table(results), sweep_table(results, metric))
    return [table for table in found if table is not None]


def contracts_table(results: Mapping[str, Any], metric: str) -> Table:
    """A row per pair and budget, a column per contract: mean difference, interval and n, or that it is not measured."""
    rows, facts = [], []
    times = results["contracts"]["step_time"]
    busy = times is not None and times["idle"] is False
    for row in results["contracts"]["rows"]:
        if row["metric"] != metric:
            continue
        pair, budget = f"{row['left']} \u2212 {row['right']}", text.short(row["budget"])
        head = Cell(text=pair, head=True, arm=arm_index(results, row["left"]), marks=added(row))
        rows.append(
            (
                head,
                Cell(text=_agreement(row["agreement"]), prose=True),
                Cell(text=budget, number=True),
                *(Cell(text=_gap(row[name]), number=True, marks=_marks(row, name, busy)) for name in CONTRACTS),
                Cell(text=_flips(row["flips"]), prose=True),
            )
        )
        facts += [(_fact(row, name), f"{pair} at {budget}, {said}") for name, said in CONTRACTS.items()]
    labels = ("contrast", "arms agree on", "budget", *CONTRACTS.values(), "winner flips")
    prose = ("contrast", "arms agree on", "winner flips")
    notes = (
        "Mean of the paired difference left \u2212 right with its unadjusted 95 % t interval over seeds; below zero, "
        "the left arm is lower. Equal tokens: the runs themselves. Equal training FLOPs or seconds: one arm at its run "
        "and the other read, per seed, between two of its own runs no more than 2.2 times apart, linearly in the "
        "logarithm of tokens; outside what was run nothing is measured. Leave-one-out error: how far such a reading "
        "missed a run that was left out. Arms agree: within 1 %, or as matched. A flip is clear when both intervals "
        "exclude zero.",
    )
    header = tuple(Cell(text=label, number=label not in prose) for label in labels)
    return Table(
        title=f"Contracts: gaps in {metric_name(results, metric)} under three meanings of equal",
        header=header,
        rows=tuple(rows),
        facts=(*_gathered(facts), *_step_times(results["contracts"])),
        notes=notes,
        grouped=True,
    )


def contracts_list(results: Mapping[str, Any], metric: str) -> Table:
    """The same in columns narrow enough for a terminal: a row per pair, budget and contract; the rest in sentences."""
    wide = contracts_table(results, metric)
    times = results["contracts"]["step_time"]
    busy = times is not None and times["idle"] is False
    agreements, flips = [], []
    rows: list[tuple[Cell, ...]] = []
    for row in (row for row in results["contracts"]["rows"] if row["metric"] == metric):
        pair, budget = f"{row['left']} \u2212 {row['right']}", text.short(row["budget"])
        head = Cell(text=pair, head=True, arm=arm_index(results, row["left"]), marks=added(row))
        agreements.append((_agreement(row["agreement"]), pair))
        flips += [(_flips(row["flips"]), f"{pair} at {budget}")] if row["flips"] else []
        for name, said in CONTRACTS.items():
            cell = row[name]
            measured = text.is_number(cell["mean"])
            rows.append(
                (
                    head,
                    Cell(text=budget, number=True),
                    Cell(text=said.removeprefix("equal ")),
                    Cell(text=text.gap(cell["mean"]) if measured else "", number=True),
                    Cell(text=interval(cell) if measured else "not measured", number=True),
                    Cell(text=f"{cell['n']} of {cell['expected_n']}" if measured else "", number=True),
                    Cell(text=", ".join(_marks(row, name, busy))),
                )
            )
    labels: tuple[str, ...] = ("contrast", "budget", "equal", "mean", "95 % interval", "seeds", "marks")
    numbers = ("budget", "mean", "95 % interval", "seeds")
    if not any(row[-1].text for row in rows):
        labels, rows = labels[:-1], [row[:-1] for row in rows]
    agreed = (
        f"Arms agree on {fact}" for fact in _gathered([(what, where) for what, where in dict.fromkeys(agreements)])
    )
    return Table(
        title=wide.title,
        header=tuple(Cell(text=label, number=label in numbers) for label in labels),
        rows=tuple(rows),
        facts=(*agreed, *(f"The winner flips: {fact}" for fact in _gathered(flips)), *wide.facts),
        notes=wide.notes,
        grouped=True,
    )


def budgets_table(results: Mapping[str, Any]) -> Table | None:
    """Tokens and epochs of the arms that have budgets of their own; None where no arm has."""
    rows = [
        (
            Cell(text=arm["name"], head=True, arm=index),
            Cell(text=f"{QUANTITIES[own['on']]} of {own['to']}"),
            Cell(text=text.count(own["budget"]), number=True),
            Cell(text=text.count(own["tokens"]), number=True),
            Cell(text=text.count(own["steps"]), number=True),
            Cell(text=text.number(own["epochs"], 2), number=True),
            Cell(text=text.percent(own["residual"]), number=True),
        )
        for index, arm in enumerate(results["arms"])
        for own in arm["own_budgets"]
    ]
    if not rows:
        return None
    labels = ("arm", "agrees on", "study budget", "own tokens", "steps", "epochs", "residual")
    return Table(
        title="Arms with budgets of their own",
        header=tuple(Cell(text=label, number=label not in ("arm", "agrees on")) for label in labels),
        rows=tuple(rows),
        notes=("Compared at the study's budget. Residual: what rounding to whole updates leaves.",),
        grouped=True,
    )


def choices_table(results: Mapping[str, Any]) -> Table | None:
    """Selection loss of every member of a sweep and which was chosen; None where nothing was swept."""
    sweep = results["lr_sweep"]
    if sweep is None:
        return None
    rates = {member["arm"]: member["lr"] for family in sweep["families"] for member in family["members"]}
    rows, facts = [], []
    for choice in sweep["choices"]:
        for arm, loss in choice["selection_loss"].items():
            chosen = arm == choice["arm"]
            rows.append(
                (
                    Cell(text=choice["family"], head=True, arm=arm_index(results, arm)),
                    Cell(text=text.short(choice["budget"]), number=True),
                    Cell(text=lr_text(rates[arm]), number=True),
                    Cell(text=text.loss(loss), number=True),
                    Cell(
                        text="chosen" if chosen else "", marks=("edge of the sweep",) * (chosen and choice["at_edge"])
                    ),
                )
            )
        if choice["reason"]:
            facts.append(f"{choice['family']} at {text.short(choice['budget'])}: no rate chosen, {choice['reason']}.")
    labels = ("arm", "budget", "learning rate", "selection loss", "choice")
    return Table(
        title="Sweeps of the learning rate: mean loss on the selection split",
        header=tuple(Cell(text=label, number=label not in ("arm", "choice")) for label in labels),
        rows=tuple(rows),
        facts=tuple(facts),
        notes=(
            "Chosen: the lowest mean over the declared seeds, by a split that no other number of this report is "
            "measured on. At the edge of the sweep a better rate may lie beyond it.",
        ),
        grouped=True,
    )


def sweep_table(results: Mapping[str, Any], metric: str) -> Table | None:
    """Each gap at the rates both arms had, at each arm's best, and with the sweep paid for; None without a sweep."""
    sweep = results["lr_sweep"]
    if sweep is None:
        return None
    rows, facts = [], []
    for row in sweep["gaps"]:
        if row["metric"] != metric:
            continue
        pair, budget = f"{row['left']} \u2212 {row['right']}", text.short(row["budget"])
        factors = " and ".join(f"{factor} ×" for factor in row["charged"]["cost_factor"])
        best = [lr_text(lr) if lr is not None else text.MISSING for lr in row["best"]["lr"]]
        listed = [(f"learning rate {lr_text(cell['lr'])} in both", cell) for cell in row["shared"]]
        listed.append((f"best of each: {best[0]} and {best[1]}", row["best"]))
        listed.append((f"best of each, sweep charged: {factors}", row["charged"]))
        for said, cell in listed:
            rows.append(
                (
                    Cell(text=pair, head=True, arm=arm_index(results, row["left"]), marks=added(row)),
                    Cell(text=budget, number=True),
                    Cell(text=said, prose=True),
                    Cell(
                        text=_gap(cell).replace("\n", " "),
                        number=True,
                        marks=("interpolated",) if cell["interpolated"] else (),
                    ),
                )
            )
        facts.append((_reason(row["charged"]), f"{pair} at {budget}, sweep charged"))
        facts.append((_reason(row["best"]), f"{pair} at {budget}, best of each"))
    labels = ("contrast", "budget", "learning rates", "mean difference, 95 % interval, n")
    return Table(
        title=f"The gap in {metric_name(results, metric)} and the learning rate",
        header=tuple(Cell(text=label, number=label in ("budget", labels[3])) for label in labels),
        rows=tuple(rows),
        facts=_gathered(facts),
        notes=(
            "Sweep charged: compared at equal training FLOPs with every member of a sweep counted; n × is what finding "
            "its rate cost the arm, in runs of the chosen one.",
        ),
        grouped=True,
    )


def _gap(cell: Mapping[str, Any]) -> str:
    if not text.is_number(cell["mean"]):
        return "not measured"
    bounds = interval(cell)
    return f"{text.gap(cell['mean'])}\n[{bounds}],\nn = {cell['n']} of {cell['expected_n']}"


def _marks(row: Mapping[str, Any], contract: str, busy: bool) -> tuple[str, ...]:
    cell = row[contract]
    doubtful = busy and contract == "seconds" and text.is_number(cell["mean"])
    how = (("interpolated", bool(cell["interpolated"])), ("busy machine", doubtful))
    return (*marks(cell), *(mark for mark, applies in how if applies))


def _agreement(agreement: Mapping[str, Any]) -> str:
    named = [f"{QUANTITIES[name]} ({text.percent(agreement[name])})" for name in agreement["on"]]
    return ", ".join(named) or "nothing"


def _flips(flips: Sequence[Mapping[str, Any]]) -> str:
    return (
        "; ".join(
            f"{' / '.join(CONTRACTS[name].removeprefix('equal ') for name in flip['between'])}"
            f"{'' if flip['clear'] else ' (not clear)'}"
            for flip in flips
        )
        or "–"
    )


def _fact(row: Mapping[str, Any], contract: str) -> str:
    """What has to be said of a cell: why it is not measured, how it was read, or what rounding left; else nothing."""
    cell = row[contract]
    residual = cell["residual"]
    if text.is_number(residual) and abs(residual) > 1e-9:
        return f"the runs themselves, {text.percent(residual)} apart"
    return _reason(cell)


def _reason(cell: Mapping[str, Any]) -> str:
    if cell["reason"]:
        return f"not measured: {cell['reason']}"
    if cell["interpolated"]:
        low, high = (text.count(tokens) for tokens in cell["between"])
        error = (
            f"leave-one-out error {text.loss(cell['loo_error'])}"
            if text.is_number(cell["loo_error"])
            else "leave-one-out error not known, that takes three budgets"
        )
        return f"{cell['interpolated']} read between its runs of {low} and {high} tokens; {error}"
    return ""


def _gathered(facts: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """One sentence per thing to be said, with all it is said of."""
    places: dict[str, list[str]] = {}
    for said, where in facts:
        if said:
            places.setdefault(said, []).append(where)
    return tuple(f"{'; '.join(where)}: {said}." for said, where in places.items())


def _step_times(contracts: Mapping[str, Any]) -> tuple[str, ...]:
    times = contracts["step_time"]
    if times is None:
        return ()
    where = times["environment"]
    machine = ", ".join(str(where[name]) for name in ("cpu", "device", "torch") if where.get(name))
    updates = ", ".join(
        f"{arm} {1e3 * seconds:.1f} ms (spread {100 * times['spread'][arm]:.0f} %)"
        for arm, seconds in times["step_s"].items()
    )
    busy = (
        "" if times["idle"] is None else ", idle" if times["idle"] else ", on a busy machine (other work was going on)"
    )
    return (
        f"Seconds of an update, arms in turn, {times['measured']}{busy}: {updates}. Machine: {machine}, threads "
        f"{where.get('threads', text.MISSING)}.",
    )
