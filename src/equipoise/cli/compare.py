"""`equipoise compare`: two studies side by side."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from equipoise.cli.console import JsonOption, emit_json, out, place, print_table
from equipoise.errors import IntegrityError
from equipoise.report.tables import interval
from equipoise.report.values import METRICS, main_metric, metric_name, seed_count
from equipoise.text import MISSING, gap, is_number, one_line, short

_KINDS = {
    "recipe": "recipe",
    "schedule": "schedule",
    "data": "data",
    "arms": "arms",
    "design": "seeds and budgets",
    "environment": "machine and versions",
}


def compare(
    first: Annotated[
        Path, typer.Argument(metavar="STUDY", help="A study directory, or its results.json.", parser=place("STUDY"))
    ],
    second: Annotated[Path, typer.Argument(metavar="STUDY", help="Another one.", parser=place("STUDY"))],
    as_json: JsonOption = False,
) -> None:
    """Set two studies' contrasts side by side, with intervals and n, and say in what the studies differ. Reads only.

    Gaps are put against each other only where data, split and schedule are the same.

    Example: equipoise compare runs/quick runs/quick-long
    """
    from equipoise.compare import compare as compared
    from equipoise.loading import read_results

    results = [read_results(path).results for path in (first, second)]
    try:
        table = compared(results[0], results[1])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        said = f"{type(error).__name__}: {error}"
        raise IntegrityError(f"{first}, {second}: not the whole results of two studies ({said})") from None
    for study, path in zip(table["studies"], (first, second), strict=True):
        study["directory"] = str(path)
    if as_json:
        emit_json(table)
    else:
        show_comparison(table, {main_metric(one): metric_name(one, main_metric(one)) for one in results})


def show_comparison(table: Mapping[str, Any], metrics: Mapping[str, str]) -> None:
    """Differences, gaps in these metrics (by name: in words), and verdicts on stdout."""
    titles = _titles(table["studies"])
    for title, study in zip(titles, table["studies"], strict=True):
        runs = f"{study['complete']} of {study['runs']} runs complete"
        out().print(f"{title}: {one_line(study['directory'])}, {runs}", soft_wrap=True)
    out().print()
    same = [_KINDS[kind] for kind, lines in table["differences"].items() if not lines]
    for kind, lines in table["differences"].items():
        if lines:
            out().print(f"different {_KINDS[kind]} ({titles[0]} → {titles[1]})", soft_wrap=True)
            for line in lines:
                out().print(f"  {one_line(line)}", soft_wrap=True)
    out().print(f"the same: {', '.join(same) or 'nothing'}\n", soft_wrap=True)
    for metric in METRICS:
        rows = [row for row in table["gaps"] if row["metric"] == metric]
        if metric in metrics and rows:
            _show_gaps(table, metrics[metric], rows, titles)
    if table["claims"]:
        print_table(
            "Verdicts, each by its own study",
            [("claim", False), (titles[0], False), (titles[1], False), ("", False)],
            [
                [
                    one_line(row["id"]),
                    *(_verdict(verdict, marks) for verdict, marks in zip(row["verdicts"], row["marks"], strict=True)),
                    "another claim by this name" if row["same_claim"] is False else "",
                ]
                for row in table["claims"]
            ],
        )


def _show_gaps(table: Mapping[str, Any], metric: str, rows: list[dict[str, Any]], titles: list[str]) -> None:
    columns = [("contrast", False), ("budget", True)]
    for title in titles:
        columns += [(f"{title}: mean", True), ("95 % interval", True), ("seeds", False)]
    if not table["reason"]:
        columns += [("change", True), ("95 % interval", True)]
    body = []
    for row in rows:
        pair = f"{row['left']} \u2212 {row['right']}" + (" (post hoc)" if row["post_hoc"] else "")
        cells = [one_line(pair), short(row["budget"])]
        for side in row["sides"]:
            cells += ["–", "–", "–"] if side is None else [_mean(side), interval(side), seed_count(side)]
        if not table["reason"]:
            change = row["change"]
            cells += ["–", "–"] if change is None else [gap(change["mean"]), interval(change)]
        body.append(cells)
    facts = (
        [f"Not put against each other: {table['reason']}."]
        if table["reason"]
        else [
            f"Change: the gap of {titles[1]} less that of {titles[0]}, with Welch's interval, seeds of the two studies "
            "taken as independent. It is tested by no claim."
        ]
    )
    print_table(f"Paired gaps in {metric}, left \u2212 right", columns, body, facts)


def _titles(studies: list[dict[str, Any]]) -> list[str]:
    """The studies' names; numbered where they are the same."""
    names = [one_line(study["name"]) for study in studies]
    return names if names[0] != names[1] else [f"{name} ({number})" for number, name in enumerate(names, start=1)]


def _mean(side: Mapping[str, Any]) -> str:
    if not is_number(side["mean"]):
        return MISSING
    return gap(side["mean"]) + (" (collapsed)" if side["collapsed"] else "")


def _verdict(verdict: str | None, marks: list[str] | None) -> str:
    if verdict is None:
        return "–"
    return one_line(verdict + (f" ({', '.join(marks)})" if marks else ""))
