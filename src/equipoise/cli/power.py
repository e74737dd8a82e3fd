"""`equipoise power`: how many seeds the next study needs, from the spread of a finished one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from equipoise.cli.console import JsonOption, emit_json, out, place, print_table
from equipoise.errors import ConfigError
from equipoise.text import MISSING, count, gap, loss, one_line, short

SEEN: Final = {"difference": "a gap", "lead_difference": "a larger lead", "slope": "a trend"}
"""What seeds are to show, by the statistic of a contrast."""


def power(
    study: Annotated[
        Path, typer.Argument(metavar="DIR", help="A study directory, e.g. runs/quick.", parser=place("DIR"))
    ],
    true_gap: Annotated[
        float | None,
        typer.Option("--gap", metavar="G", help="True lead of left in the metric's unit; none = the measured mean."),
    ] = None,
    alpha: Annotated[
        float | None, typer.Option("--alpha", help="Level shared by the claims; none = the study's.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Seeds needed to see a gap with 80 % power, per claim and paired gap of a study. Reads only.

    From the paired spread over the study's seeds and from its upper 80 % limit, in one-sided tests at α ÷ the number of
    claims. For claims of equivalence: seeds needed to see that the gap lies within the margin.

    Example: equipoise power runs/quick --gap 0.02
    """
    from equipoise.power import plan_seeds
    from equipoise.results import collect

    if true_gap is not None and not math.isfinite(true_gap):
        raise ConfigError(f"--gap {true_gap}: expected a finite number, e.g. 0.02")
    if alpha is not None and not 0 < alpha < 1:
        raise ConfigError(f"--alpha {alpha}: expected between 0 and 1")
    planned = plan_seeds(collect(study), true_gap, alpha)
    if as_json:
        emit_json(planned)
    else:
        show_power(planned)


def show_power(planned: Mapping[str, Any]) -> None:
    """The plan as a table on stdout."""
    headings = ("claim", "contrast", "budget", "assumed", "sd", "α", "seeds", "seeds, sd at its limit", "to see")
    rows = [cells for row in planned["contrasts"] for cells in _rows(row, planned["limit"])]
    if not rows:
        out().print("no claim and no paired gap: nothing to plan for")
        return
    columns = [(heading, heading not in ("claim", "contrast", "to see")) for heading in headings]
    assumed = "the measured mean"
    if planned["gap"] is not None:
        assumed = f"a lead of left of {planned['gap']:g}, for losses"
        larger = any(row["than"] for row in planned["contrasts"])
        assumed += ", or of one lead over another by as much" if larger else ""
    facts = (
        f"Seeds for a power of {100 * planned['power']:.0f} % in t tests over paired seeds, if the truth is what is "
        f"assumed: {assumed}. α: the study's level ÷ the number of claims.",
        f"Limit of the sd: its upper {100 * planned['sd_confidence']:.0f} % limit, because few seeds know their spread "
        "badly.",
    )
    print_table(f"Seeds needed: {one_line(planned['name'])}", columns, rows, facts)


def _rows(row: Mapping[str, Any], limit: int) -> list[list[str]]:
    """One line a question: on which side of the tested value, and, where a margin is declared, whether within it."""
    step = row["than"]
    if step:
        pair = f"lead of {row['left']} over {row['right']} \u2212 lead of {step['left']} over {step['right']}"
    else:
        pair = row["left"] if row["right"] is None else f"{row['left']} \u2212 {row['right']}"
    head = [
        one_line(row["claim"] or "–"),
        one_line(pair),
        "several" if row["budget"] is None else short(row["budget"]),
        gap(row["assumed"]),
        loss(row["sd"]),
        f"{row['alpha']:.3g}",
    ]
    asked = []
    if row["kind"] != "equivalent":
        asked.append(("seeds", "seeds_upper", SEEN.get(row["statistic"], "it")))
    if row["equivalence_margin"] is not None:
        asked.append(("seeds_equivalence", "seeds_equivalence_upper", f"within ±{row['equivalence_margin']:g}"))
    return [[*head, _seeds(row, a, limit), _seeds(row, b, limit), what] for a, b, what in asked]


def _seeds(row: Mapping[str, Any], name: str, limit: int) -> str:
    """A number of seeds, or why there is none."""
    if row["sd"] is None or row["assumed"] is None:
        return MISSING
    if row[name] is not None:
        return count(row[name])
    margin = row["equivalence_margin"]
    never = abs(row["assumed"]) >= margin if "equivalence" in name else row["assumed"] == row["tested"]
    return "none will do" if never else f"more than {count(limit)}"
