"""Each claim in words, with its verdict, effect and p values, as a value both renderings use.

Not for: reaching a verdict (`verdict` does).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from equipoise import text
from equipoise.report.tables import interval, lower_arm
from equipoise.report.values import marks, metric_name, seed_count

SIGNS: Final = {"supported": "✓", "refuted": "✕", "equivalent": "≈", "inconclusive": "?"}
"""A sign beside the word, so that no verdict is told by colour alone."""

_P_NAMES: Final = {"sup": "for the claim", "ref": "against it", "eq": "for equivalence"}


@dataclass(frozen=True, kw_only=True)
class Effect:
    """One contrast of a claim, formatted."""

    pair: str
    budget: str
    mean: str
    interval: str
    sd: str
    seeds: str
    """How many seeds it is over, and which are left out."""
    lower: str
    marks: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Card:
    """One claim as it is shown."""

    id: str
    sentence: str
    verdict: str
    marks: tuple[str, ...]
    effects: tuple[Effect, ...]
    later: tuple[Effect, ...]
    """The same with what was added after the lock: shown beside, never judged."""
    p_values: tuple[tuple[str, str, str], ...]
    """Name, adjusted p, unadjusted p."""
    reason: str
    margins: dict[str, float]
    """Text → value of what the effect is judged against, zero excepted."""


def cards(results: Mapping[str, Any]) -> tuple[Card, ...]:
    """One card a claim, in the order of the study."""
    return tuple(_card(results, claim) for claim in results["claims"])


def sentence(results: Mapping[str, Any], claim: Mapping[str, Any]) -> str:
    """What is claimed, in words."""
    left, right = _joined(claim["left"]), claim["right"]
    many = len(claim["left"]) > 1
    at = f"at {text.short(claim['budget'])} tokens"
    metric = metric_name(results, claim["metric"])
    if claim["kind"] == "lower":
        by = f", by more than {claim['margin']:g}" if claim["margin"] else ""
        return f"{left} {'each reach' if many else 'reaches'} a lower {metric} than {right} {at}{by}"
    if claim["kind"] == "equivalent":
        end = f"by less than {claim['equivalence_margin']:g} in {metric} {at}"
        return f"{left} each differ from {right} {end}" if many else f"{left} and {right} differ {end}"
    return f"{claim['kind']}: {left} against {right}, {metric} {at}"


def _card(results: Mapping[str, Any], claim: Mapping[str, Any]) -> Card:
    margins: dict[str, float] = {}
    if claim["margin"]:
        margins["\u2212δ"] = -claim["margin"]
    if claim["equivalence_margin"]:
        margins |= {"\u2212ε": -claim["equivalence_margin"], "+ε": claim["equivalence_margin"]}
    adjusted = claim["p_adjusted"]
    return Card(
        id=claim["id"],
        sentence=sentence(results, claim),
        verdict=claim["verdict"],
        marks=tuple(claim["marks"]),
        effects=tuple(_effect(contrast) for contrast in claim["contrasts"]),
        later=tuple(_effect(contrast) for contrast in claim["post_hoc_contrasts"]),
        p_values=tuple(
            (name, text.probability(adjusted.get(key)), text.probability(claim["p"].get(key)))
            for key, name in _P_NAMES.items()
            if claim["p"].get(key) is not None or adjusted.get(key) is not None
        ),
        reason=claim["reason"],
        margins=margins,
    )


def _effect(contrast: Mapping[str, Any]) -> Effect:
    return Effect(
        pair=f"{contrast['left']} \u2212 {contrast['right']}",
        budget=text.short(contrast["budget"]),
        mean=text.gap(contrast["mean"]),
        interval=interval(contrast),
        sd=text.loss(contrast["sd"]),
        seeds=seed_count(contrast),
        lower=lower_arm(contrast),
        marks=marks(contrast),
    )


def _joined(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
