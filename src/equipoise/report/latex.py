r"""`results.tex`: losses, gaps, verdicts and arms as LaTeX tables, to be taken into a paper by `\input{results.tex}`.

It needs the package booktabs and any engine since 2020; every text is escaped, so that none can be a command, and what
an old engine has no letter for is written as its code point. Not for: the content of the tables (`tables`, `verdicts`).
"""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from equipoise import text
from equipoise.report import crossings, tables, verdicts
from equipoise.report.values import Cell, Table, main_metric, normalised

_COMMANDS: Final = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\char36{}", "&": r"\&", "#": r"\#", "%": r"\%",
    "_": r"\_", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "`": "{`}", '"': r"\char34{}",
    "<": "$<$", ">": "$>$", "|": "$|$", "[": "{[}", "]": "{]}", "*": "{*}",  # after \\ the last three would be read
    "\u2212": "$-$", "±": r"$\pm$", "×": r"$\times$", "÷": r"$\div$", "≤": r"$\leq$", "≥": r"$\geq$", "≈": r"$\approx$",
    "→": r"$\to$", "·": r"$\cdot$", "α": r"$\alpha$", "ε": r"$\varepsilon$", "δ": r"$\delta$", "ℓ": r"$\ell$",
    "∞": r"$\infty$", "°": r"$^{\circ}$", "²": "$^2$", "³": "$^3$", "…": r"\ldots{}", "–": "--", "—": "---",
    "\u00a0": "~", "\u202f": "~", "“": "``", "”": "''", "‘": "`", "’": "'",
}  # fmt: skip
_LETTERS: Final = frozenset("ÀÁÂÃÄÅÆÇÈÉÊËÌÍÎÏÑÒÓÔÕÖØÙÚÛÜÝßàáâãäåæçèéêëìíîïñòóôõöøùúûüýÿ")
"""Letters beyond ASCII that every LaTeX can set without another package."""

EMPTY: Final = frozenset({"--", ""})
"""What a column is left out for, when it holds nothing else."""
_P_NAMES: Final = {"for the claim": "p for", "against it": "p against", "for equivalence": "p equal"}
SHORT: Final = 12
"""Letters up to which words stay in their cell; longer ones become a note below the table."""


def render_latex(results: Mapping[str, Any]) -> str:
    """The study's tables as LaTeX (text, to be stored as UTF-8), for a document that loads booktabs."""
    results = normalised(results)
    metric = main_metric(results)
    made = [("losses", tables.results_table(results))]
    made += [("gaps", _without(tables.gaps_table(results, metric), "lower"))] if results["gaps"] else []
    made += [("crossovers", crossings.crossovers_table(results, metric))] if results["crossovers"] else []
    made += [("verdicts", _verdicts(results))] if results["claims"] else []
    made.append(("arms", tables.arms_table(results)))
    head = (
        f"% Results of the study {text.one_line(results['name'])}, written by Equipoise.\n"
        "% In the preamble: \\usepackage{booktabs}. Then \\input{results.tex}, or copy what you need.\n"
    )
    prefix = re.sub("[^a-z0-9]+", "-", results["name"].lower()).strip("-") or "study"
    return head + "".join(f"\n{_table(table, f'tab:{prefix}-{name}')}" for name, table in made if table.rows)


def escaped(value: str) -> str:
    r"""Text as one literal line of LaTeX: no command, mathematics, comment or ligature begins in it.

    >>> escaped("50 % of a_b\n-- {x}")
    '50 \\% of a\\_b -{}- \\{x\\}'
    """
    line = re.sub(r"([-'?!,])(?=[-'`,])", "\\1\x00", text.one_line(value))  # no dash, quote or ?` out of two letters
    return "".join(_letter(letter) for letter in line)


def _letter(letter: str) -> str:
    if letter == "\x00":
        return "{}"
    if letter in _COMMANDS:
        return _COMMANDS[letter]
    return letter if letter.isascii() or letter in _LETTERS else f"U+{ord(letter):04X}"


def _verdicts(results: Mapping[str, Any]) -> Table:
    """A row per contrast of a claim; verdict and p values stand in the first row of each."""
    rows: list[tuple[Cell, ...]] = []
    for card in verdicts.cards(results):
        p_values = {name: adjusted for name, adjusted, _ in card.p_values}
        for index, effect in enumerate(card.effects):
            first, named = index == 0, len(card.effects) > 1 or effect.named
            rows.append(
                (
                    Cell(text=card.id if first else "", head=True, marks=(effect.pair,) if named else ()),
                    Cell(text=card.verdict if first else "", marks=card.marks if first else ()),
                    Cell(text=effect.mean, number=True, marks=effect.marks),
                    Cell(text=effect.interval, number=True),
                    Cell(text=effect.seeds, prose=True),
                    *(Cell(text=p_values.get(name, "") if first else "", number=True) for name in _P_NAMES),
                )
            )
    labels = ("claim", "verdict", "mean", "95 % interval", "n", *_P_NAMES.values())
    return Table(
        title="Verdicts on the claims",
        header=tuple(Cell(text=label, number=label not in ("claim", "verdict", "n")) for label in labels),
        rows=tuple(rows),
        notes=(
            "Means and intervals of the paired difference over seeds, left \u2212 right unless said; intervals are "
            "two-sided and unadjusted. p: one-sided t tests, Holm-adjusted over the claims locked before the first "
            "run; post hoc claims were added later and form a family of their own.",
        ),
    )


def _without(table: Table, label: str) -> Table:
    """A table less one column: a page of a paper is narrow."""
    kept = [index for index, cell in enumerate(table.header) if cell.text != label]
    pick = operator.itemgetter(*kept)
    return dataclasses.replace(table, header=pick(table.header), rows=tuple(pick(row) for row in table.rows))


def _table(table: Table, label: str) -> str:
    letters: dict[str, str] = {}
    written = [_cells(row, letters) for row in table.rows]
    kept = [index for index, cells in enumerate(zip(*written, strict=True)) if not {*cells} <= EMPTY]
    shape = "".join("r" if table.header[index].number else "l" for index in kept)
    lines = [
        r"\begin{table}",
        r"  \centering\footnotesize\setlength{\tabcolsep}{4pt}",
        f"  \\caption{{{escaped(table.title)}.}}",
        f"  \\label{{{label}}}",
        f"  \\begin{{tabular}}{{@{{}}{shape}@{{}}}}",
        r"    \toprule",
        f"    {_row([escaped(table.header[index].text) for index in kept])}",
        r"    \midrule",
    ]
    above = None
    for row, cells in zip(table.rows, written, strict=True):
        if table.grouped and above not in (None, row[0].text):
            lines.append(r"    \addlinespace")
        above = row[0].text
        lines.append(f"    {_row([cells[index] for index in kept])}")
    lines += [r"    \bottomrule", r"  \end{tabular}"]
    notes = [f"$^{{{letter}}}$ {escaped(note)}." for note, letter in letters.items()]
    notes += [escaped(note) for note in (*table.facts, *table.notes)]
    if notes:
        lines += [r"  \par\smallskip\parbox{\linewidth}{\footnotesize", *(f"    {note}" for note in notes), "  }"]
    return "\n".join([*lines, r"\end{table}", ""])


def _cells(row: Sequence[Cell], letters: dict[str, str]) -> list[str]:
    """The cells of a row as they are written; marks and long words become notes, each with a letter of its own.

    A long cell's note stands at the head of its row; of "2 of 3, without seed 1" the count stays where it is.
    """
    texts, moved = [], []
    for cell in row:
        count = re.match(r"\d+ of \d+(?=, )", cell.text)
        long = cell.prose and len(cell.text) > SHORT
        texts.append(count[0] if long and count else "" if long else cell.text)
        moved += [cell.text[count.end() + 2 :] if count else cell.text] if long else []
    written = []
    for cell, said in zip(row, texts, strict=True):
        notes = [*cell.marks, *(moved if cell.head else ())]
        for note in notes:
            letters.setdefault(note, _nth_letter(len(letters)))
        raised = f"$^{{{','.join(letters[note] for note in notes)}}}$" if notes else ""
        written.append(escaped(said) + raised)
    return written


def _nth_letter(index: int) -> str:
    """a … z, aa, ab …"""
    return (_nth_letter(index // 26 - 1) if index >= 26 else "") + chr(ord("a") + index % 26)


def _row(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"
