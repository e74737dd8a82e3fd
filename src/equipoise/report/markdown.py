"""`results.md`: verdicts first, then the tables of the report, as GitHub-flavoured Markdown.

Not for: figures and samples, which the page has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from equipoise import text
from equipoise.report import crossings, details, fairness, statements, tables, verdicts
from equipoise.report.values import Cell, Table, main_metric, normalised


def render_markdown(results: Mapping[str, Any]) -> str:
    """Verdicts, arms, results, gaps, runs, routing, scope and provenance as Markdown (text, to be stored as UTF-8)."""
    results = normalised(results)
    parts = [
        f"# Results of {escaped(results['name'])}",
        f"**Question.** {escaped(results['question'] or 'None was written down.')}",
    ]
    if results["split"] != "validation":
        parts.append(
            f"**Note.** All losses are of the {escaped(results['split'])} split: for choosing, not for reporting."
        )
    parts += ["## Verdicts", *_verdicts(results)]
    parts += [_table(tables.arms_table(results)), _table(tables.results_table(results))]
    if results["gaps"]:
        parts.append(_table(tables.gaps_table(results)))
    if results["crossovers"]:
        parts.append(_table(crossings.crossovers_table(results)))
    parts += [_table(table) for table in fairness.tables(results, main_metric(results))]
    parts.append(_table(details.runs_table(results)))
    finals = [row for row in results["routing"] if row["final"]]
    if finals:
        parts.append(_table(details.routing_table(results, finals)))
    parts += ["## Scope", *(f"- **{escaped(topic)}.** {escaped(said)}" for topic, said in statements.scope(results))]
    parts += [f"- {escaped(said)}" for said in results["scope"]]
    parts += [
        "## Provenance",
        *(f"- {escaped(name)}: {escaped(value)}" for name, value in statements.provenance(results)),
    ]
    parts += [f"- to repeat it: {code(command)}" for command in statements.commands(results)]
    environments = statements.environments_table(results)
    parts += [_table(environments)] if environments.rows else []
    joined = "\n\n".join(parts) + "\n"
    return re.sub(r"(?m)^(- .*)\n\n(?=- )", r"\1\n", joined)


def escaped(value: str) -> str:
    r"""Text as one literal line of Markdown: no table, code, emphasis, link, mathematics or HTML begins in it.

    >>> escaped("a|b\n`_c_`")
    'a\\|b \\`\\_c\\_\\`'
    """
    line = re.sub(r"([\\`*_\[\]|~$#])", r"\\\1", text.one_line(value))
    return line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _verdicts(results: Mapping[str, Any]) -> list[str]:
    if not results["claims"]:
        why = (
            "was declared"
            if results["split"] == "validation"
            else f"is judged on the {escaped(results['split'])} split"
        )
        return [f"No claim {why}; the numbers below describe and decide nothing."]
    lines = []
    for card in verdicts.cards(results):
        marks = f" [{escaped(', '.join(card.marks))}]" if card.marks else ""
        p_values = "; ".join(f"adjusted p {name}: {adjusted}" for name, adjusted, _ in card.p_values)
        effects = "; ".join(
            f"{effect.pair}: {effect.mean}{''.join(f' ({mark})' for mark in effect.marks)}, "
            f"95 % interval {effect.interval}, sd {effect.sd}, n = {effect.seeds}"
            for effect in card.effects
        )
        later = "; ".join(
            f"with what was added after the lock (shown, not judged): {effect.pair} {effect.budget} "
            f"{effect.mean}{''.join(f' ({mark})' for mark in effect.marks)}, 95 % interval {effect.interval}, "
            f"n = {effect.seeds}"
            for effect in card.later
        )
        lines.append(f"- **{escaped(card.verdict)}**{marks} – {escaped(card.sentence)} ({escaped(card.id)})")
        lines += [f"  - {escaped(part)}" for part in (effects, p_values, card.reason, *card.matches, later) if part]
    return ["\n".join(lines)]


def _table(table: Table) -> str:
    head = "| " + " | ".join(_cell(cell) for cell in table.header) + " |"
    rule = "|" + "|".join("---:" if cell.number else "---" for cell in table.header) + "|"
    rows = ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in table.rows]
    notes = [f"\n{escaped(note)}" for note in (*table.facts, *table.notes)]
    return "\n".join([f"## {escaped(table.title)}\n", head, rule, *rows, *notes])


def code(command: str) -> str:
    """A code span that shows `command` as it is, one line: fenced by more backticks than it holds in a row."""
    shown = text.one_line(command)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", shown)), default=0))
    pad = " " if "`" in shown else ""
    return f"{fence}{pad}{shown}{pad}{fence}"


def _cell(cell: Cell) -> str:
    marks = f" ({escaped(', '.join(cell.marks))})" if cell.marks else ""
    return escaped(cell.text) + marks
