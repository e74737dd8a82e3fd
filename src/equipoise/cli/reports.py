"""`equipoise status` and `equipoise report`: what a study directory holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from equipoise.cli.console import (
    JsonOption,
    count,
    duration,
    emit_json,
    number,
    out,
    say,
    scientific,
    show_table,
    signed,
)
from equipoise.cli.plan import ARM_HEADINGS, arm_cells

DirectoryArgument = Annotated[Path, typer.Argument(metavar="DIR", help="A study directory, e.g. runs/quick.")]


def status(directory: DirectoryArgument, as_json: JsonOption = False) -> None:
    """List every run of a study and what became of it. Reads only.

    Example: equipoise status runs/quick
    """
    from equipoise.lock import read_lock
    from equipoise.lock import status as read_status
    from equipoise.record import last_row

    lock = read_lock(directory)
    rows: list[dict[str, Any]] = []
    for record in read_status(directory, lock):
        newest = last_row(record.directory / "metrics.jsonl") if record.status in ("started", "interrupted") else None
        summary = record.summary or {}
        rows.append(
            {
                "run": record.directory.relative_to(directory).as_posix(),
                "status": record.status,
                "step": summary.get("steps", newest["step"] if newest else None),
                "val_loss": summary.get("val_loss"),
                "train_s": summary.get("train_s"),
                "message": record.fault or summary.get("message"),
            }
        )
    if as_json:
        emit_json({"study": lock.study.name, "runs": rows})
        return
    show_table(
        f"{lock.study.name}: {sum(r['status'] == 'complete' for r in rows)} of {len(rows)} runs complete",
        ["run", "status", "step", "loss", "time", "note"],
        [
            [r["run"], r["status"], count(r["step"]), number(r["val_loss"]), duration(r["train_s"]), r["message"] or ""]
            for r in rows
        ],
    )


def report(directory: DirectoryArgument, as_json: JsonOption = False) -> None:
    """Rebuild results.json, results.md and report.html of a study from its run directories.

    Example: equipoise report runs/quick
    """
    results, path = write_outputs(directory)
    if as_json:
        emit_json(results)
    else:
        show_results(results)
        say(f"report: {path}")


def write_outputs(directory: Path) -> tuple[dict[str, Any], Path]:
    """Collect a study and write everything that is made of it; returns the results and the path of the report."""
    from equipoise.report import write_report
    from equipoise.results import collect, write_results

    results = collect(directory)
    write_results(directory, results)
    return results, write_report(results, directory)[0]


def show_results(results: Mapping[str, Any]) -> None:
    """Arms, results, gaps and verdicts as tables on stdout."""
    if results["question"]:
        out().print(f"{results['question']}\n")
    show_table("Arms", ARM_HEADINGS, [arm_cells(arm) for arm in results["arms"]])
    titles = {
        "val_loss": "loss (nats/token)",
        "best_val_loss": "best loss",
        "val_bpb": "bits/byte",
    }
    rows = {(row["arm"], row["budget"], row["metric"]): row for row in results["table"]}
    many = len(results["budgets"]) > 1
    show_table(
        f"Results on the {results['split']} split, mean ± sd over seeds",
        ["arm", *(["budget"] if many else []), *titles.values(), "n", "train FLOPs", "notes"],
        [
            [
                arm["name"],
                *([count(budget)] if many else []),
                *(_mean_sd(rows[arm["name"], budget, metric]) for metric in titles),
                f"{rows[arm['name'], budget, 'val_loss']['n']}/{len(results['seeds'])}",
                scientific(arm["flops_per_token"] * results["tokens_per_budget"][str(budget)]),
                _notes(rows[arm["name"], budget, "val_loss"]),
            ]
            for budget in results["budgets"]
            for arm in results["arms"]
        ]
        + _floor_rows(results, many),
    )
    show_table(
        "Gaps in loss, paired by seed (left − right)",
        ["left − right", *(["budget"] if many else []), "mean ± sd", "95 % interval", "noise floor", "n"],
        [
            [
                " − ".join(
                    f"{gap[s]} (collapsed)" if gap[s] in gap["collapsed"] else gap[s] for s in ("left", "right")
                ),
                *([count(gap["budget"])] if many else []),
                f"{signed(gap['mean'])} ± {number(gap['sd'])}",
                "n/a" if gap["ci_low"] is None else f"{signed(gap['ci_low'])} to {signed(gap['ci_high'])}",
                number(gap["noise_floor"]),
                str(gap["n"]),
            ]
            for gap in results["gaps"]
            if gap["metric"] == "val_loss"
        ],
    )
    for claim in results["claims"]:
        marks = f" [{', '.join(claim['marks'])}]" if claim["marks"] else ""
        out().print(f"{claim['verdict'].upper():<13} {claim['id']}{marks}")
        out().print(f"              {claim['reason']}", soft_wrap=True)
    if results["split"] != "validation":
        out().print("scored on the selection split: for choosing a recipe; no claim is judged")


def _mean_sd(row: Mapping[str, Any]) -> str:
    mark = " (collapsed)" if row["collapsed"] else ""
    return f"{number(row['mean'])} ± {number(row['sd'])}{mark}"


def _notes(row: Mapping[str, Any]) -> str:
    parts = [f"{what} seed {', '.join(map(str, row[what]))}" for what in ("lost", "diverged", "collapsed") if row[what]]
    return "; ".join(parts)


def _floor_rows(results: Mapping[str, Any], many: bool) -> list[list[str]]:
    floor = results["floor"]
    if floor is None:
        return []
    loss, bpb = (f"{number(floor[name])} (se {number(floor[name + '_se'])})" for name in ("loss", "bpb"))
    return [["known floor", *([""] if many else []), loss, loss, bpb, "", "", f"{floor['num_documents']} documents"]]
