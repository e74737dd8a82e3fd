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

_PAIRS: Final = {
    "difference": "{left} \u2212 {right}",
    "lead_difference": "lead of {left} over {right} \u2212 lead of {than[left]} over {than[right]}",
    "slope": "lead of {left} over {right}, slope on ln tokens",
    "log_ratio": "ln(tokens of {left} ÷ tokens of {right})",
    "curve_gap": "{left} \u2212 {right}, mean along training",
    "value": "{left}",
}
"""What an effect is of, by the statistic of its contrast."""

_P_NAMES: Final = {"sup": "for the claim", "ref": "against it", "eq": "for equivalence"}


@dataclass(frozen=True, kw_only=True)
class Effect:
    """One contrast of a claim, formatted."""

    pair: str
    named: bool
    """What it is of is not plain from the claim: not its left − right."""
    budget: str
    """ "at 40.5M tokens", or "from 40.5M to 426.3M tokens"."""
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
    matches: tuple[str, ...]
    """Per matched pair, what is left over with and without embeddings, and whether the match holds without them."""
    margins: dict[str, float]
    """Text → value of what the effect is judged against, zero excepted."""


def cards(results: Mapping[str, Any]) -> tuple[Card, ...]:
    """One card a claim, in the order of the study."""
    return tuple(_card(results, claim) for claim in results["claims"])


def sentence(results: Mapping[str, Any], claim: Mapping[str, Any]) -> str:
    """What is claimed, in words."""
    left, right = _joined(claim["left"]), claim["right"]
    many = len(claim["left"]) > 1
    at = _budgets(claim)
    if claim["kind"] == "routing":
        layers = "mean over layers" if claim["layers"] == "mean" else "largest of any layer"
        when = "at the end" if claim["at_frac"] == 1 else f"after {100 * claim['at_frac']:g} % of training"
        threshold = f"{claim['threshold']:g}".replace("-", text.MINUS)
        return f"{claim['metric']} of {left} ({layers}, {when}) lies {claim['direction']} {threshold} {at}"
    metric = metric_name(results, claim["metric"])
    if claim["kind"] == "larger":
        others = _joined([f"that of {step['left']} over {step['right']}" for step in claim["than"]])
        return f"the lead of {left} over {right} in {metric} is larger than {others} {at}"
    if claim["kind"] == "trend":
        return f"the lead of {left} over {right} in {metric} {claim['direction']} {at}"
    if claim["kind"] == "faster":
        how = (
            "reaches the same loss with fewer tokens than" if claim["budget"] is None else "runs ahead, on average, of"
        )
        where = at if claim["budget"] is None else f"along one training of {text.short(claim['budget'])} tokens"
        return f"{left} {how} {right} {where}"
    if claim["kind"] == "lower":
        by = f", by more than {claim['margin']:g}" if claim["margin"] else ""
        return f"{left} {'each reach' if many else 'reaches'} a lower {metric} than {right} {at}{by}"
    if claim["kind"] == "equivalent":
        end = f"by less than {claim['equivalence_margin']:g} in {metric} {at}"
        return f"{left} each differ from {right} {end}" if many else f"{left} and {right} differ {end}"
    return f"{claim['kind']}: {left} against {right}, {metric} {at}"


def _budgets(row: Mapping[str, Any]) -> str:
    """At which budget, or from which to which."""
    first, last = (text.short(budget) for budget in (row["budgets"][0], row["budgets"][-1]))
    return f"at {first} tokens" if row["budget"] is not None else f"from {first} to {last} tokens"


def _card(results: Mapping[str, Any], claim: Mapping[str, Any]) -> Card:
    margins: dict[str, float] = {}
    if claim["threshold"]:
        margins["threshold"] = claim["threshold"]
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
        matches=tuple(_match(match) for match in claim["matches"]),
        margins=margins,
    )


def _effect(contrast: Mapping[str, Any]) -> Effect:
    return Effect(
        pair=_PAIRS[contrast["statistic"]].format(**contrast),
        named=contrast["statistic"] != "difference",
        budget=_budgets(contrast),
        mean=text.gap(contrast["mean"]),
        interval=interval(contrast),
        sd=text.loss(contrast["sd"]),
        seeds=seed_count(contrast),
        lower=lower_arm(contrast) if contrast["statistic"] in ("difference", "curve_gap") else "–",
        marks=marks(contrast),
    )


def _match(match: Mapping[str, Any]) -> str:
    """What is left over of a match, counted with embeddings and without them."""
    said = f"{match['arm']} is matched to {match['to']} on {match['on']}: residual {text.percent(match['residual'])}"
    if match["residual_nonembedding"] is None:
        return f"{said}; no parameters are matched, with embeddings or without"
    holds = "still a match" if match["holds_nonembedding"] else "no match"
    without = text.percent(match["residual_nonembedding"])
    return f"{said}; with embeddings not counted {without}, {holds} within {100 * match['rtol']:g} %"


def _joined(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
