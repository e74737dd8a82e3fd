"""The routing explorer of the page: validation stories token by token, all arms side by side, and what experts get.

What is here is markup for one layer, which is all a reader without scripts sees; `templates/explorer.js` shows the
other layers, the losses, and every number of the token under the pointer. Not for: routing over training (`figures`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

from markupsafe import Markup

from equipoise import figures, text
from equipoise.figures import style
from equipoise.report import embed
from equipoise.report.svg import inline
from equipoise.report.values import Cell, Table, arm_index

SHADES: Final = (0.1, 0.5, 1.0, 2.0, 4.0)
"""Nats from which on a token's loss is drawn one shade darker; `templates/explorer.js` reads them from the page."""


@dataclass(frozen=True, kw_only=True)
class Token:
    """One token as it is first shown; numbers of every layer are in `routes`."""

    text: str
    kind: str
    """Class that colours it: x0 to x7 for an expert, s0 to s5 for a loss, none where there is neither."""
    gloss: str
    """What stands below it: its experts, or its loss."""
    loss: str
    routes: str
    """`2:0.71 0:0.29|…`: experts with their weights, layer by layer; empty without any."""
    title: str
    breaks: bool
    """The text goes on in a new line."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """A story as one arm reads it."""

    arm: str
    index: int | None
    marks: tuple[str, ...]
    mean: str
    """Nats per token over what is shown."""
    tokens: tuple[Token, ...]


@dataclass(frozen=True, kw_only=True)
class ArmUse:
    """What the experts of one arm are used for."""

    arm: str
    index: int | None
    figure: Markup | None
    """The heat map of co-activation; None where it would say nothing: one expert a token, or all of them."""
    wide: bool
    """The heat map fills the page's width."""
    table: Table


@dataclass(frozen=True, kw_only=True)
class View:
    """The whole section."""

    run: str
    """Budget and seed of the runs shown."""
    num_layers: int
    num_experts: int
    """The most of any arm."""
    shades: str
    scale: tuple[str, ...]
    """What each shade of a loss means."""
    stories: tuple[tuple[Column, ...], ...]
    uses: tuple[ArmUse, ...]
    left_out: int = 0
    """Texts that are not shown, for want of room."""

    def first(self) -> View:
        """The same with the first text alone."""
        return replace(self, stories=self.stories[:1], left_out=len(self.stories) - 1)


def view(results: Mapping[str, Any], marks: Callable[[str, int, int], tuple[str, ...]]) -> View | None:
    """What the page shows of `results["explorer"]`; None without it. `marks` are those of
    the run of an arm, budget and seed."""
    found = results.get("explorer")
    if not found:
        return None
    arms = found["arms"]
    num_stories = max(len(arm["stories"]) for arm in arms)
    routed = [arm for arm in arms if arm["layers"]]
    return View(
        run=f"{text.short(found['budget'])} tokens, seed {found['seed']}",
        num_layers=max((len(arm["layers"]) for arm in routed), default=0),
        num_experts=max((arm["num_experts"] for arm in routed), default=0),
        shades=" ".join(map(str, SHADES)),
        scale=_scale(),
        stories=tuple(
            tuple(
                _column(results, arm, arm["stories"][place], marks(arm["arm"], found["budget"], found["seed"]))
                for arm in arms
                if place < len(arm["stories"])
            )
            for place in range(num_stories)
        ),
        uses=tuple(_use(results, arm) for arm in routed),
    )


def stylesheet() -> str:
    """The rules of this section, a colour for each expert among them."""
    chips = "".join(f".x{index}{{--x:var(--expert-{index})}}" for index in range(len(style.EXPERTS)))
    return f"{chips}\n{embed.template('explorer.css')}"


def _scale() -> tuple[str, ...]:
    between = [f"{low:g} to {high:g}" for low, high in pairwise(SHADES)]
    return (f"under {SHADES[0]:g}", *between, f"from {SHADES[-1]:g} on")


# ------------------------------------------------------------------------------------------------ tokens


def _column(
    results: Mapping[str, Any], arm: Mapping[str, Any], story: Mapping[str, Any], marks: tuple[str, ...]
) -> Column:
    losses = list(story["losses"])
    tokens = []
    for place, (token, loss) in enumerate(zip(story["tokens"], losses, strict=True)):
        layers = [
            list(zip(experts[place], weights[place], strict=True))
            for experts, weights in zip(story["experts"], story["weights"], strict=True)
        ]
        tokens.append(_token(token, loss, layers))
    if story["end_loss"] is not None:
        tokens.append(_token("(end)", story["end_loss"], []))
        losses.append(story["end_loss"])
    return Column(
        arm=arm["arm"],
        index=arm_index(results, arm["arm"]),
        marks=marks,
        mean=text.number(sum(losses) / len(losses)) if losses else text.MISSING,
        tokens=tuple(tokens),
    )


def _token(token: str, loss: float, layers: Sequence[Sequence[tuple[int, float]]]) -> Token:
    """A token with its experts and weights in every layer, shown with those of the first layer, else with its loss."""
    shown = token if token.strip() else text.token_label(token)
    hundredths = round(100 * max(0.0, loss))  # shade and tenths follow from what is written, here and in the script
    written = text.number(hundredths / 100, 2)
    said = f"loss {written}"
    if layers:
        said += f"; layer 0: {', '.join(f'expert {e} at {text.number(w, 2)}' for e, w in layers[0])}"
    return Token(
        text=shown.replace("\n", "⏎").replace("\t", "⇥"),
        kind=f"x{layers[0][0][0] % len(style.EXPERTS)}"
        if layers
        else f"s{sum(hundredths >= 100 * least for least in SHADES)}",
        gloss=" ".join(str(expert) for expert, _ in layers[0])
        if layers
        else text.number((hundredths + 5) // 10 / 10, 1),
        loss=written,
        routes="|".join(" ".join(f"{expert}:{text.number(weight, 2)}" for expert, weight in layer) for layer in layers),
        title=said,
        breaks="\n" in token,
    )


# ------------------------------------------------------------------------------------------------ experts


def _use(results: Mapping[str, Any], arm: Mapping[str, Any]) -> ArmUse:
    index = arm_index(results, arm["arm"])
    figure = None
    if 1 < arm["top_k"] < arm["num_experts"]:
        title = f"How often two experts are chosen together, layer by layer: {arm['arm']}"
        figure = inline(figures.coactivation(arm["layers"]), f"coactivation-{index}", title)
    return ArmUse(
        arm=arm["arm"], index=index, figure=figure, wide=len(arm["layers"]) > 2, table=_top_tokens(arm["layers"])
    )


def _top_tokens(layers: Sequence[Mapping[str, Any]]) -> Table:
    rows = [
        (
            Cell(text=str(place), number=True, head=True),
            Cell(text=str(expert), number=True),
            Cell(text=", ".join(_top(one) for one in tokens) or "none", prose=True),
        )
        for place, layer in enumerate(layers)
        for expert, tokens in enumerate(layer["top_tokens"])
    ]
    return Table(
        title="Tokens that each expert attracts most",
        header=(Cell(text="layer", number=True), Cell(text="expert", number=True), Cell(text="tokens")),
        rows=tuple(rows),
        notes=(
            "Over the whole final evaluation: of all times a token was read, how often it went to this expert. Only "
            "tokens that occur at least 10 times and go there more often than tokens do on average; ␣ is a blank. "
            "Experts have no identity across arms or seeds: their numbers are names.",
        ),
        grouped=True,
    )


def _top(found: Mapping[str, Any]) -> str:
    return f"“{text.token_label(str(found['token']))}” {100 * found['share']:.0f} %"
