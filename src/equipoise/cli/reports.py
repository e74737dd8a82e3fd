"""`equipoise status` and `equipoise report`: what a study directory holds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from equipoise.cli.console import JsonOption, emit_json, out, place, print_table, prose, say, show_table
from equipoise.errors import IntegrityError
from equipoise.report import crossings, fairness, statements, tables, values, verdicts
from equipoise.report.values import Cell, Table
from equipoise.report.verdicts import Effect
from equipoise.text import count, duration, loss, one_line

INDENT: Final = 14
"""Cells in which a verdict stands, before what is said about it."""

DirectoryArgument = Annotated[
    Path, typer.Argument(metavar="DIR", help="A study directory, e.g. runs/quick.", parser=place("DIR"))
]

_WRITERS: Final = {
    "report.html and results.md": "write_report",
    "results.csv, gaps.csv and results.tex": "write_tables",
    "files in figures": "write_figures",
}
"""What is made of the results, and the function of `report.write` that does."""


def status(directory: DirectoryArgument, as_json: JsonOption = False) -> None:
    """List every run of a study and what became of it. Reads only.

    Example: equipoise status runs/quick
    """
    from equipoise.lock import read_lock
    from equipoise.lock import status as read_status
    from equipoise.trunk import checkpoint_steps, trunks_of

    lock = read_lock(directory)
    rows: list[dict[str, Any]] = []
    records = read_status(directory, lock)
    for record in records:
        newest = _newest_row(record.directory) if record.status in ("started", "interrupted") else None
        summary = record.summary or {}
        rows.append(
            {
                "run": record.directory.relative_to(directory).as_posix(),
                "status": record.status,
                "step": summary.get("steps", newest.get("step") if newest else None),
                "val_loss": summary.get("val_loss"),
                "train_s": summary.get("train_s"),
                "message": record.fault or summary.get("message"),
            }
        )
    trunks: list[dict[str, Any]] = []
    for trunk in trunks_of(record.locked for record in records if record.locked):
        place = directory / trunk.folder
        step = (_newest_row(place) or {}).get("step") or max(checkpoint_steps(place), default=0)
        trunks.append({"trunk": trunk.folder, "step": step, "steps": trunk.num_steps, "budgets": list(trunk.budgets)})
    if as_json:
        emit_json({"study": lock.study.name, "runs": rows, "trunks": trunks})
        return
    print_table(
        f"{lock.study.name}: {sum(r['status'] == 'complete' for r in rows)} of {len(rows)} runs complete",
        [("run", False), ("status", False), ("step", True), ("val loss", True), ("time", True), ("note", False)],
        [
            [
                r["run"],
                r["status"],
                count(r["step"]),
                loss(r["val_loss"]),
                duration(r["train_s"]),
                one_line(r["message"] or ""),
            ]
            for r in rows
        ],
    )
    if trunks:
        show_table(
            "Trunks: updates that budgets share",
            ["trunk", "step", "of", "budgets"],
            [
                [t["trunk"], count(t["step"]), count(t["steps"]), ", ".join(count(budget) for budget in t["budgets"])]
                for t in trunks
            ],
        )


def _newest_row(directory: Path) -> dict[str, Any] | None:
    """The last row of a record that may be growing or damaged; what lies there is judged when it is gone on from."""
    from equipoise.record import last_row

    with contextlib.suppress(ValueError, TypeError, OSError, IntegrityError):
        return last_row(directory / "metrics.jsonl")
    return None


def report(directory: DirectoryArgument, as_json: JsonOption = False) -> None:
    """Rebuild everything that is made of a study's run directories.

    results.json, report.html and results.md; results.csv (a row a run), gaps.csv and results.tex; and the folder
    figures, each as SVG and PDF. Exit code 1 when the results are there but something could not be made of them.

    Example: equipoise report runs/quick
    """
    path = write_outputs(directory, emit_json if as_json else show_results)[1]
    if path is None:
        raise typer.Exit(1)
    if not as_json:
        say(f"report: {path}")


def write_outputs(
    directory: Path, show: Callable[[Mapping[str, Any]], None] = lambda _: None
) -> tuple[dict[str, Any], Path | None]:
    """Collect a study, write results.json, `show` the results, and only then make the report of them.

    Returns the results and the path of the report; None when it, the tables or the figures could not be made, which is
    said on stderr in one line and takes nothing from the results. A reader who went away, and so made `show` fail,
    still gets the report.
    """
    from equipoise.results import collect, write_results

    results = collect(directory)
    write_results(directory, results)
    try:
        show(results)
    finally:
        path = _rendered(results, directory)
    return results, path


def _rendered(results: Mapping[str, Any], directory: Path) -> Path | None:
    """Everything written and drawn of the results; the path of the report, None when anything could not be made."""
    made: dict[str, tuple[Path, ...]] = {}
    for what, writer in _WRITERS.items():
        try:
            from equipoise.report import write

            made[what] = getattr(write, writer)(results, directory)
        except Exception as error:  # a font, a full disk, a fault of ours: nothing about a drawing may hide a result
            reason = one_line(f"{type(error).__name__}: {error}")
            say(f"warning: {directory}: no new {what} ({reason}); results.json is complete")
    return made["report.html and results.md"][0] if len(made) == len(_WRITERS) else None


def show_results(results: Mapping[str, Any]) -> None:
    """Arms, results, gaps and verdicts on stdout: the tables of the report, of gaps those in the study's own metric."""
    results = values.normalised(results)
    if results["question"]:
        prose(one_line(results["question"]))
        out().print()
    _show(tables.arms_table(results))
    _show(tables.results_table(results))
    if results["gaps"]:
        _show(tables.gaps_table(results, values.main_metric(results)))
    if results["crossovers"]:
        _show(crossings.crossovers_table(results, values.main_metric(results)))
    for table in fairness.tables(results, values.main_metric(results), narrow=True):
        _show(table)
    for card in verdicts.cards(results):
        marks = f" [{', '.join(card.marks)}]" if card.marks else ""
        prose(f"{card.verdict.upper():<13} {one_line(card.id + marks)}", INDENT)
        for line in (card.sentence, card.reason, *card.matches, *map(_later, card.later)):
            prose(" " * INDENT + one_line(line), INDENT)
    if mixed := statements.mixed(results):
        prose(f"mixed environments: {one_line(mixed)}")
    if results["split"] != "validation":
        out().print(f"scored on the {results['split']} split: for choosing a recipe; no claim is judged")


def tell_verdicts(directory: Path, results: Mapping[str, Any], quiet: bool) -> None:
    """Each claim's verdict on stderr, a line each: what is known already while the rest of the results is made."""
    for card in verdicts.cards(values.normalised(results)):
        marks = f" [{', '.join(card.marks)}]" if card.marks else ""
        effects = "; ".join(f"{e.pair} {e.mean}, 95 % interval {e.interval}, n = {e.seeds}" for e in card.effects)
        say(
            f"{directory}: {card.verdict.upper()} {one_line(card.id + marks)}: {one_line(effects or card.reason)}",
            quiet,
        )


def _show(table: Table) -> None:
    columns = [(_cell(cell), cell.number) for cell in table.header]
    print_table(table.title, columns, [[_cell(cell) for cell in row] for row in table.rows], table.facts)


def _cell(cell: Cell) -> str:
    return one_line(cell.text) + (f" ({', '.join(cell.marks)})" if cell.marks else "")


def _later(effect: Effect) -> str:
    """An effect that is shown beside a verdict and was not judged."""
    marks = f" ({', '.join(effect.marks)})" if effect.marks else ""
    return (
        f"post hoc, not judged: {effect.pair} {effect.budget} {effect.mean}{marks}, 95 % interval "
        f"{effect.interval}, n = {effect.seeds}"
    )
