"""A grammar with memory: texts drawn by explicit decisions, so that each carries its exact log-probability.

A rule is a list of options with weights; an option is a template. In a template

    <rule>              says one option of the rule
    <fact=rule>         the same, and remembers what was said as `fact`
    <fact=rule!other>   the same, never the option remembered as `other`, which is of the same rule; the
                        probabilities of the rest are scaled up
    {fact}              says what is remembered; {fact.field} says a field of the word that is remembered
    [0.4]               ends the text here with probability 0.4 (only in the rule `story`)

A grammar is sound when, of the options open at a decision, no text is the beginning of another. Then a text has one
derivation; its probability is the product of its decisions; and up to the last decision to end, that product is the
probability that a text begins with it: an exact floor for any model of it. Soundness is a property of the rules,
which the tests prove for the shipped ones; nothing here checks it.

Not for: what is said (`stories`), or how many texts make a corpus (`grammar`).
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

START = "story"


@dataclass(frozen=True, kw_only=True)
class Option:
    """One thing that can be said at a decision."""

    template: str
    """What is said, in the notation above."""
    weight: float = 1.0
    """Above 0; the probability of an option is its weight over the sum of its rule's."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """What else is known about a word, for `{fact.field}`."""


Rules = Mapping[str, Sequence[Option]]


@dataclass(frozen=True, kw_only=True)
class Say:
    """Literal text."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Choose:
    """A decision between the options of `rule`, remembered as `fact` ("" = not), except the one that `other` holds."""

    rule: str
    fact: str = ""
    other: str = ""


@dataclass(frozen=True, kw_only=True)
class Recall:
    """A remembered text, or a `field` ("" = the text) of the word remembered."""

    fact: str
    field: str = ""


@dataclass(frozen=True, kw_only=True)
class End:
    """The text ends here with probability `prob`."""

    prob: float


Part = Say | Choose | Recall | End

_PART = re.compile(r"<(?:(\w+)=)?(\w+)(?:!(\w+))?>|\{(\w+)(?:\.(\w+))?\}|\[([0-9.]+)\]")


def parse_template(template: str) -> tuple[Part, ...]:
    """A template as its parts, in order.

    >>> parse_template("A <pet=animal>!")
    (Say(text='A '), Choose(rule='animal', fact='pet', other=''), Say(text='!'))
    """
    parts: list[Part] = []
    position = 0
    for match in _PART.finditer(template):
        if match.start() > position:
            parts.append(Say(text=template[position : match.start()]))
        fact, rule, other, remembered, field_name, prob = match.groups(default="")
        if rule:
            parts.append(Choose(rule=rule, fact=fact, other=other))
        elif remembered:
            parts.append(Recall(fact=remembered, field=field_name))
        else:
            parts.append(End(prob=float(prob)))
        position = match.end()
    if position < len(template):
        parts.append(Say(text=template[position:]))
    return tuple(parts)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule made ready for drawing; index i everywhere is its i-th option."""

    options: tuple[Option, ...]
    parts: tuple[tuple[Part, ...], ...]
    probs: tuple[float, ...]
    cumulative: tuple[float, ...]
    """Running sums of `probs`; the last is exactly 1."""
    log_probs: tuple[float, ...]


Grammar = Mapping[str, Rule]


def build(rules: Rules) -> Grammar:
    """Parse every template. Raises ValueError for a missing rule, a weight that is not above 0, a bad end."""
    grammar: dict[str, Rule] = {}
    for name, options in rules.items():
        if not options or not all(option.weight > 0 for option in options):
            raise ValueError(f"rule {name!r}: expected at least one option, every weight above 0")
        total = math.fsum(option.weight for option in options)
        probs = tuple(option.weight / total for option in options)
        parts = tuple(parse_template(option.template) for option in options)
        cumulative = (*tuple(accumulate(probs))[:-1], 1.0)
        logs = tuple(math.log(prob) for prob in probs)
        grammar[name] = Rule(options=tuple(options), parts=parts, probs=probs, cumulative=cumulative, log_probs=logs)
        for part in (part for option in parts for part in option):
            if isinstance(part, Choose) and part.rule not in rules:
                raise ValueError(f"rule {name!r}: <{part.rule}> is no rule")
            if isinstance(part, End) and (name != START or not 0 < part.prob < 1):
                raise ValueError(
                    f"rule {name!r}: [{part.prob}] is not accepted; expected 0 < p < 1 in the rule {START!r}"
                )
    if len(rules.get(START, ())) != 1:
        raise ValueError(f"expected a rule {START!r} with one option")
    return grammar


@dataclass(frozen=True, kw_only=True)
class Telling:
    """A text drawn from a grammar."""

    text: str
    log_prob_text: float
    """ln of the product of its decisions, but the last one to end: ln p(a text begins with this one)."""
    log_prob_end: float
    """ln p(the text ends here | it begins so); 0 where the grammar has nothing more to say."""


@dataclass(slots=True)
class _State:
    """What a telling has said, decided and remembered so far (mutable: it lives within one call of `tell`)."""

    said: list[str]
    logs: list[float]
    facts: dict[str, tuple[str, int, str]]  # fact → rule, index of the option, text


def tell(grammar: Grammar, uniform: Callable[[], float]) -> Telling:
    """Draw one text; `uniform` gives independent numbers in [0, 1), one a decision."""
    state = _State([], [], {})
    log_end = 0.0
    for part in grammar[START].parts[0]:
        if not isinstance(part, End):
            _say(grammar, (part,), uniform, state)
        elif uniform() < part.prob:
            log_end = math.log(part.prob)
            break
        else:
            state.logs.append(math.log1p(-part.prob))
    return Telling(text="".join(state.said), log_prob_text=math.fsum(state.logs), log_prob_end=log_end)


def _say(grammar: Grammar, parts: tuple[Part, ...], uniform: Callable[[], float], state: _State) -> None:
    """Say the parts of an option (none of them an end), deciding and remembering on the way."""
    said, facts = state.said, state.facts
    for part in parts:
        if isinstance(part, Say):
            said.append(part.text)
        elif isinstance(part, Recall):
            rule_name, index, text = facts[part.fact]
            said.append(grammar[rule_name].options[index].fields[part.field] if part.field else text)
        elif isinstance(part, Choose):
            rule = grammar[part.rule]
            if part.other:
                index, prob = _decide_without(rule, facts[part.other][1], uniform())
                state.logs.append(math.log(prob))
            else:
                index = bisect_right(rule.cumulative, uniform())
                state.logs.append(rule.log_probs[index])
            start = len(said)
            _say(grammar, rule.parts[index], uniform, state)
            if part.fact:
                facts[part.fact] = (part.rule, index, "".join(said[start:]))


def _decide_without(rule: Rule, excluded: int, u: float) -> tuple[int, float]:
    """The option that the uniform number `u` falls on when one is left out, and its probability among the rest."""
    left_out = rule.probs[excluded]
    rest = 1.0 - left_out
    u *= rest
    if u >= rule.cumulative[excluded] - left_out:
        u += left_out
    index = min(bisect_right(rule.cumulative, u), len(rule.probs) - 1)
    if index == excluded:  # u fell on its edge by rounding
        index += 1 if index + 1 < len(rule.probs) else -1
    return index, rule.probs[index] / rest
