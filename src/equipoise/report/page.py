"""`report.html`: results in, one page out that needs no network and no second file, and can be read without its script.

Everything that varies is escaped by Jinja's autoescape after `visible` has made unseen characters seen, or stands in a
JSON block. The policy in the page's head forbids everything but the hashed style sheet and scripts, so even an escaping
fault could not run or load anything. Not for: the content of tables and sentences (`tables`, `verdicts`, `statements`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import jinja2
from markupsafe import Markup

from equipoise import figures, text
from equipoise.figures import style
from equipoise.report import (
    crossings,
    curves,
    details,
    embed,
    explorer,
    fairness,
    statements,
    tables,
    values,
    verdicts,
)
from equipoise.report.svg import inline

SCRIPTS: Final = ("curves.js", "explorer.js")
"""The page's own scripts, in `templates/`: each has its hash in the policy, and writes text, never markup."""

LIMIT: Final = 1_950_000
"""Bytes that the page keeps to where it can: 2 MB, less what the estimate of a figure's length may be wrong by."""

_AROUND: Final = 400
"""Bytes of the page around a figure and its caption."""

_USAGE: Final = "Share of the assignments each expert gets. The frame ends at the ceiling, 1/K."
_HEALTH: Final = (
    "State of the router. Entropy is divided by ln E; log Z is the mean logsumexp of the router's outputs. Later "
    "layers are drawn stronger."
)
_SETTLING: Final = (
    "How even and how settled the routing is. Usage entropy is divided by ln E: 1 is even use. Saturation, over the "
    "same validation tokens each time: the share of the choices of the trained model that were made already. Later "
    "layers are drawn stronger."
)


@dataclass(frozen=True, kw_only=True)
class Pane:
    """One of several views of which a reader chooses one."""

    label: str
    figures: tuple[Markup, ...] = ()
    captions: tuple[str, ...] = ()
    """One a figure, where these differ."""
    table: values.Table | None = None
    left_out: bool = False
    """There would be figures, but no room."""
    prompts: tuple[tuple[str, tuple[tuple[str, int, tuple[str, ...], str | None], ...]], ...] = ()
    """Per prompt: arm, its place, the marks of this run, and its text (None: this run has none)."""


def render_html(results: Mapping[str, Any]) -> str:
    """The report of a study as one HTML page (text, to be stored as UTF-8).

    It keeps to `LIMIT` bytes by leaving out, and saying so, what is longest and least: texts of the explorer after the
    first, where the rest alone is too long, and the routing figures there is no room for. Tables are never cut.
    """
    results = values.normalised(results)
    shown = _shown(results)
    whole = explorer.view(results, lambda *run: _run_marks(results, *run))
    bare = _rendered({**shown, "explorer": whole, "routing": _routing_panes(results, {})})
    room = LIMIT - len(bare.encode())
    if room < 0 and whole is not None and len(whole.stories) > 1:
        whole = whole.first()
        bare = _rendered({**shown, "explorer": whole, "routing": _routing_panes(results, {})})
        room = LIMIT - len(bare.encode())
    drawn = _routing_figures(results, room)
    return _rendered({**shown, "explorer": whole, "routing": _routing_panes(results, drawn)}) if drawn else bare


def _rendered(shown: Mapping[str, Any]) -> str:
    """The page with these values."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("equipoise.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals["num_colours"] = len(style.ARMS)
    environment.globals["num_expert_colours"] = len(style.EXPERTS)
    environment.globals["table_number"] = _numbered("Table")
    environment.globals["figure_number"] = _numbered("Figure")
    return environment.get_template("report.html").render(shown)


def _shown(results: Mapping[str, Any]) -> dict[str, Any]:
    """What the page shows, but for the sections whose length depends on the room there is."""
    metric = values.main_metric(results)
    sheet, scripts = stylesheet(), [embed.template(name) for name in SCRIPTS]
    return {
        "results": results,
        "sheet": Markup(sheet),
        "sheet_digest": Markup(embed.digest(sheet)),
        "scripts": [(Markup(script), Markup(embed.digest(script))) for script in scripts],
        "signs": verdicts.SIGNS,
        "cards": [(card, _effect_figure(results, card, index)) for index, card in enumerate(verdicts.cards(results))],
        "arms": tables.arms_table(results),
        "components": details.components_table(results),
        "outcome": tables.results_table(results),
        "gaps": tables.gaps_table(results, metric) if results["gaps"] else None,
        "all_gaps": tables.gaps_table(results) if results["gaps"] else None,
        "gaps_figures": _gaps_figures(results, metric),
        "crossovers": crossings.crossovers_table(results, metric) if results["crossovers"] else None,
        "contracts": fairness.tables(results, metric),
        "runs": details.runs_table(results),
        "plots": _plots(results),
        "curve_data": _curve_data(results),
        "samples": _sample_panes(results),
        "scope": statements.scope(results),
        "provenance": statements.provenance(results),
        "commands": statements.commands(results),
        "splits": statements.splits_table(results),
        "environments": statements.environments_table(results),
        "study": statements.study_text(results),
    }


def stylesheet() -> str:
    """The page's one style sheet: the named colours, light and dark, then the rules."""
    light, dark = (
        "".join(f"--{name}:{value};" for name, value in style.theme(dark=dark).items()) for dark in (False, True)
    )
    rules = embed.template("report.css") + explorer.stylesheet()
    chips = "".join(f".arm-{index}{{--arm:var(--arm-{index})}}" for index in range(len(style.ARMS)))
    return f"\n:root{{{light}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n{chips}\n{rules}"


def _numbered(what: str) -> Callable[[], str]:
    """Tables and figures are numbered in the order in which the page has them."""
    numbers = itertools.count(1)
    return lambda: f"{what} {next(numbers)}."


def _finalize(value: Any) -> Any:
    """Applied to everything a template prints; markup made by this package passes."""
    return value if isinstance(value, Markup) else text.visible(str(value))


def _effect_figure(results: Mapping[str, Any], card: verdicts.Card, index: int) -> Markup | None:
    contrasts = results["claims"][index]["contrasts"]
    if not any(text.is_number(contrast["mean"]) for contrast in contrasts):
        return None
    return inline(
        figures.effects(results, contrasts, margins=card.margins),
        f"effect{index}",
        f"Claim {card.id}: {'; '.join(f'{effect.pair} {effect.mean}, {effect.interval}' for effect in card.effects)}",
    )


def _gaps_figures(results: Mapping[str, Any], metric: str) -> list[Markup]:
    """The gaps of the study's own metric: against the budget where there are several, else one below the other."""
    said = f"Paired gaps in {values.metric_name(results, metric)}, with 95 % intervals"
    pairs = figures.gaps_of(results, metric)
    if len({row["budget"] for rows in pairs.values() for row in rows}) > 1:
        return [
            inline(
                figures.gap_over_budgets(results, left, right, metric),
                f"gap{index}",
                f"{said}, at each budget: {left} \u2212 {right}",
            )
            for index, (left, right) in enumerate(pairs)
        ]
    rows = [row for row in results["gaps"] if row["metric"] == metric and text.is_number(row["mean"])]
    labels = [figures.contrast_label(row, f"{text.short(row['budget'])} tokens", *values.added(row)) for row in rows]
    return [inline(figures.effects(results, rows, labels=labels, width=380), "gaps", said)] if rows else []


def _plots(results: Mapping[str, Any]) -> list[tuple[str, Markup]]:
    """Per budget with a curve its title and the still figure, which the page's script replaces."""
    budgets = [budget for budget in results["budgets"] if any(curve["budget"] == budget for curve in results["curves"])]
    return [
        (
            f"{text.short(budget)} tokens a run",
            inline(
                figures.loss_curves(results, budget, size=(460, 300)),
                f"curve-{budget}",
                f"Loss of every run of {text.short(budget)} tokens against tokens",
            ),
        )
        for budget in budgets
    ]


def _curve_data(results: Mapping[str, Any]) -> Markup | None:
    data = curves.curve_data(results)
    return embed.data_block(data, "curve-data") if data is not None else None


Run = tuple[str, int, int]
"""Arm, budget and seed."""


def _run(row: Mapping[str, Any]) -> Run:
    return row["arm"], row["budget"], row["seed"]


def _routing_rows(results: Mapping[str, Any], arm: str) -> list[Mapping[str, Any]]:
    """The routing of an arm's runs, the largest budget first."""
    own = (row for row in results["routing"] if row["arm"] == arm)
    return sorted(own, key=lambda row: (-row["budget"], row["seed"]))


def _routing_figures(results: Mapping[str, Any], room: int) -> dict[Run, list[tuple[Markup, str]]]:
    """Per run its figures with their captions, as far as they fit into `room` bytes: the first seed of every arm and
    budget, then the second, until one does not fit."""
    ranked = []
    for arm in results["arms"]:
        seen: Counter[int] = Counter()
        for place, row in enumerate(_routing_rows(results, arm["name"])):
            ranked.append((seen[row["budget"]], f"r{values.arm_index(results, arm['name'])}-{place}", row))
            seen[row["budget"]] += 1
    found = {}
    for _, name, row in sorted(ranked, key=lambda entry: entry[0]):
        drawn = _drawn(row, name) if room > 0 else []
        room -= sum(len(str(figure).encode()) + len(caption) + _AROUND for figure, caption in drawn)
        if room <= 0:
            break
        found[_run(row)] = drawn
    return found


def _drawn(row: Mapping[str, Any], name: str) -> list[tuple[Markup, str]]:
    """The figures of a run over its training; `name` is short, since it stands in the page many times."""
    if not row["points"]:
        return []
    who = f"{row['arm']}, {text.short(row['budget'])} tokens, seed {row['seed']}"
    title = f"Share of each expert over training, layer by layer: {who}"
    drawn = [(inline(figures.expert_usage(row), f"{name}-u", title), _USAGE)]
    if figures.has_router_health(row):
        title = f"Router entropy and log Z over training: {who}"
        drawn.append((inline(figures.router_health(row), f"{name}-h", title), _HEALTH))
    if figures.has_saturation(row):
        title = f"Usage entropy and saturation over training: {who}"
        drawn.append((inline(figures.settling(row), f"{name}-s", title), _SETTLING))
    return drawn


def _routing_panes(
    results: Mapping[str, Any], drawn: Mapping[Run, list[tuple[Markup, str]]]
) -> list[tuple[str, int | None, list[Pane]]]:
    """Per routed arm: its name, its place, and a pane a run, the largest budget first, with what is `drawn` of it."""
    found = []
    for arm in results["arms"]:
        panes = []
        for row in _routing_rows(results, arm["name"]):
            label = " · ".join((text.short(row["budget"]), f"seed {row['seed']}", *_run_marks(results, *_run(row))))
            final = details.routing_table(results, [row], one_run=True) if row["final"] else None
            own = drawn.get(_run(row), [])
            made, captions = tuple(figure for figure, _ in own), tuple(caption for _, caption in own)
            left_out = bool(row["points"]) and not own
            panes.append(Pane(label=label, figures=made, captions=captions, table=final, left_out=left_out))
        if panes:
            found.append((arm["name"], values.arm_index(results, arm["name"]), panes))
    return found


def _run_marks(results: Mapping[str, Any], arm: str, budget: int, seed: int) -> tuple[str, ...]:
    """What has to stand at anything one run's final weights did."""
    return tuple(
        mark
        for run in results["runs"]
        if (run["arm"], run["budget"], run["seed"]) == (arm, budget, seed)
        for mark in (*values.added(run), *values.marks(run))
    )


def _sample_panes(results: Mapping[str, Any]) -> list[Pane]:
    """A pane a budget and seed; per prompt the last text of every arm that has one for any prompt of the pane."""
    last: dict[tuple[int, int, str, str], Mapping[str, Any]] = {}
    for sample in results["samples"]:
        key = (sample["budget"], sample["seed"], sample["prompt"], sample["arm"])
        if key not in last or sample["step"] >= last[key]["step"]:
            last[key] = sample
    prompts = list(dict.fromkeys(sample["prompt"] for sample in results["samples"]))
    panes = []
    for budget in sorted({key[0] for key in last}, reverse=True):
        for seed in sorted({key[1] for key in last if key[0] == budget}):
            rows = []
            for prompt in prompts:
                found = [
                    (
                        arm["name"],
                        index,
                        _run_marks(results, arm["name"], budget, seed),
                        last[key]["text"] if (key := (budget, seed, prompt, arm["name"])) in last else None,
                    )
                    for index, arm in enumerate(results["arms"])
                ]
                if any(written is not None for *_, written in found):
                    rows.append((prompt, tuple(found)))
            panes.append(Pane(label=f"{text.short(budget)} · seed {seed}", prompts=tuple(rows)))
    return panes
