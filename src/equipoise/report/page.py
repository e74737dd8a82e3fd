"""`report.html`: results in, one page out that needs no network, no script and no second file.

Everything that varies is escaped by Jinja's autoescape after `visible` has made unseen characters seen. The policy in
the page's head forbids everything but the one hashed style sheet, so even an escaping fault could not run or load
anything. Not for: the content of tables and sentences (`tables`, `verdicts`, `statements`).
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final

import jinja2
from markupsafe import Markup

from equipoise import figures, text
from equipoise.figures import style
from equipoise.report import crossings, details, fairness, statements, tables, values, verdicts
from equipoise.report.svg import inline

_AXES: Final[tuple[tuple[figures.Axis, str], ...]] = (
    ("tokens", "against tokens"),
    ("flops", "against training FLOPs"),
    ("seconds", "against training time"),
)


@dataclass(frozen=True, kw_only=True)
class Pane:
    """One of several views of which a reader chooses one."""

    label: str
    figures: tuple[Markup, ...] = ()
    table: values.Table | None = None
    prompts: tuple[tuple[str, tuple[tuple[str, int, tuple[str, ...], str | None], ...]], ...] = ()
    """Per prompt: arm, its place, the marks of this run, and its text (None: this run has none)."""


def render_html(results: Mapping[str, Any]) -> str:
    """The report of a study as one HTML page (text, to be stored as UTF-8)."""
    results = values.normalised(results)
    sheet = stylesheet()
    digest = base64.b64encode(hashlib.sha256(sheet.encode()).digest()).decode()
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
    return environment.get_template("report.html").render(
        results=results,
        sheet=Markup(sheet),
        sheet_digest=digest,
        signs=verdicts.SIGNS,
        cards=[(card, _effect_figure(results, card, index)) for index, card in enumerate(verdicts.cards(results))],
        arms=tables.arms_table(results),
        components=details.components_table(results),
        outcome=tables.results_table(results),
        gaps=tables.gaps_table(results) if results["gaps"] else None,
        gaps_figure=_gaps_figure(results),
        crossovers=crossings.crossovers_table(results) if results["crossovers"] else None,
        contracts=fairness.tables(results, values.main_metric(results)),
        runs=details.runs_table(results),
        curves=_curve_panes(results),
        routing=_routing_panes(results),
        samples=_sample_panes(results),
        scope=statements.scope(results),
        provenance=statements.provenance(results),
        splits=statements.splits_table(results),
        environments=statements.environments_table(results),
        study=statements.study_text(results),
    )


def stylesheet() -> str:
    """The page's one style sheet: the named colours, light and dark, then the rules."""
    light, dark = (
        "".join(f"--{name}:{value};" for name, value in style.theme(dark=dark).items()) for dark in (False, True)
    )
    rules = files("equipoise.report").joinpath("templates/report.css").read_text(encoding="utf-8")
    chips = "".join(f".arm-{index}{{--arm:var(--arm-{index})}}" for index in range(len(style.ARMS)))
    return f"\n:root{{{light}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n{chips}\n{rules}"


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


def _gaps_figure(results: Mapping[str, Any]) -> Markup | None:
    """The gaps of the study's own metric, one below the other."""
    metric = values.main_metric(results)
    rows = [row for row in results["gaps"] if row["metric"] == metric and text.is_number(row["mean"])]
    if not rows:
        return None
    labels = [figures.contrast_label(row, f"{text.short(row['budget'])} tokens", *values.added(row)) for row in rows]
    figure = figures.effects(results, rows, labels=labels, width=500)
    return inline(figure, "gaps", f"Paired gaps in {values.metric_name(results, metric)}, with 95 % intervals")


def _curve_panes(results: Mapping[str, Any]) -> list[Pane]:
    budgets = [budget for budget in results["budgets"] if any(curve["budget"] == budget for curve in results["curves"])]
    size = (410.0, 290.0) if len(budgets) > 1 else (700.0, 380.0)
    return [
        Pane(
            label=label,
            figures=tuple(
                inline(
                    figures.loss_curves(results, budget, axis, size=size),
                    f"curve-{axis}-{budget}",
                    f"Loss of every run of {text.short(budget)} tokens {label}",
                )
                for budget in budgets
            ),
        )
        for axis, label in _AXES
        if budgets
    ]


def _routing_panes(results: Mapping[str, Any]) -> list[tuple[str, int | None, list[Pane]]]:
    """Per routed arm: its name, its place, and a pane a run, the largest budget first."""
    found = []
    for arm in results["arms"]:
        own = sorted(
            (row for row in results["routing"] if row["arm"] == arm["name"]),
            key=lambda row: (-row["budget"], row["seed"]),
        )
        panes = []
        for row in own:
            name = f"routing-{values.arm_index(results, arm['name'])}-{row['budget']}-{row['seed']}"
            drawn: tuple[Markup, ...] = ()
            if row["points"]:
                who = f"{arm['name']}, {text.short(row['budget'])} tokens, seed {row['seed']}"
                drawn = (
                    inline(
                        figures.expert_usage(row),
                        f"{name}-usage",
                        f"Share of each expert over training, layer by layer: {who}",
                    ),
                )
                if figures.has_router_health(row):
                    title = f"Router entropy and log Z over training: {who}"
                    drawn += (inline(figures.router_health(row), f"{name}-health", title),)
            marks = _run_marks(results, arm["name"], row["budget"], row["seed"])
            label = " · ".join((text.short(row["budget"]), f"seed {row['seed']}", *marks))
            final = details.routing_table(results, [row], one_run=True) if row["final"] else None
            panes.append(Pane(label=label, figures=drawn, table=final))
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
