"""The grammar's log-probabilities against complete enumeration, against a parser, and against its own frequencies.

The oracles read the rules with a reader of their own and share no code with the sampler.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
from scipy import stats

from equipoise.data.corpora.grammar import open_grammar
from equipoise.data.corpora.rules import Option, Rules, build, tell
from equipoise.data.corpora.source import Document
from equipoise.data.corpora.stories import story_rules
from equipoise.data.tokenizer import train_tokenizer
from equipoise.spec.data import BpeTokenizer, GrammarCorpus

# ------------------------------------------------------------------------------------------------ oracles

Facts = dict[str, tuple[str, Option, str]]  # fact → rule, option, text


@cache
def pieces(template: str) -> tuple[tuple[str, ...], ...]:
    """("say", text), ("choose", fact, rule, other), ("recall", fact, field) or ("end", prob), read anew."""
    found: list[tuple[str, ...]] = []
    for piece in re.split(r"(<[^>]*>|\{[^}]*\}|\[[^\]]*\])", template):
        if piece.startswith("<"):
            fact, rule = piece[1:-1].split("=") if "=" in piece else ("", piece[1:-1])
            rule, _, other = rule.partition("!")
            found.append(("choose", fact, rule, other))
        elif piece.startswith("{"):
            fact, _, field = piece[1:-1].partition(".")
            found.append(("recall", fact, field))
        elif piece.startswith("["):
            found.append(("end", piece[1:-1]))
        elif piece:
            found.append(("say", piece))
    return tuple(found)


@dataclass(frozen=True)
class Derivation:
    text: str
    prob: float
    facts: Facts
    prob_end: float | None = None  # set once the text has ended


def derive(
    rules: Rules, todo: tuple[tuple[str, ...], ...], so_far: Derivation, goal: str | None
) -> Iterator[Derivation]:
    """Every way to say `todo` after `so_far`; with a goal, only those whose text is a beginning of it."""
    if goal is not None and not goal.startswith(so_far.text):
        return
    if not todo or so_far.prob_end is not None:
        yield so_far
        return
    (kind, *rest), later = todo[0], todo[1:]
    if kind == "say":
        yield from derive(rules, later, Derivation(so_far.text + rest[0], so_far.prob, so_far.facts), goal)
    elif kind == "recall":
        _, option, text = so_far.facts[rest[0]]
        said = option.fields[rest[1]] if rest[1] else text
        yield from derive(rules, later, Derivation(so_far.text + said, so_far.prob, so_far.facts), goal)
    elif kind == "end":
        p = float(rest[0])
        yield Derivation(so_far.text, so_far.prob, so_far.facts, p)
        yield from derive(rules, later, Derivation(so_far.text, so_far.prob * (1 - p), so_far.facts), goal)
    else:
        fact, rule, other = rest
        options = [option for option in rules[rule] if not other or option is not so_far.facts[other][1]]
        total = sum(option.weight for option in options)
        for option in options:
            start = Derivation(so_far.text, so_far.prob * option.weight / total, so_far.facts)
            for inner in derive(rules, pieces(option.template), start, goal):
                text = inner.text[len(so_far.text) :]
                facts = {**inner.facts, fact: (rule, option, text)} if fact else inner.facts
                yield from derive(rules, later, Derivation(inner.text, inner.prob, facts), goal)


def documents(rules: Rules, goal: str | None = None) -> list[Derivation]:
    """All derivations of complete texts (of the text `goal`), with the probability of their text."""
    whole = derive(rules, pieces(rules["story"][0].template), Derivation("", 1.0, {}), goal)
    return [found for found in whole if goal is None or found.text == goal]


def confusable(rules: Rules, values: dict[tuple[str, str], list[str]], a: tuple, b: tuple) -> bool:
    """May a text of `a` be the beginning of one of `b`, or the other way round? Says yes when in doubt."""
    if not a or not b or "end" in (a[0][0], b[0][0]):
        return True
    if a[0] == b[0] and a[0][0] == "recall":
        return confusable(rules, values, a[1:], b[1:])
    for x, y in ((a, b), (b, a)):
        if x[0][0] == "recall":
            return any(confusable(rules, values, (("say", v), *x[1:]), y) for v in values[x[0][1], x[0][2]])
        if x[0][0] == "choose":
            return any(confusable(rules, values, (*pieces(o.template), *x[1:]), y) for o in rules[x[0][2]])
    shorter = min(len(a[0][1]), len(b[0][1]))
    if a[0][1][:shorter] != b[0][1][:shorter]:
        return False
    rest = [(("say", x[0][1][shorter:]), *x[1:]) if len(x[0][1]) > shorter else x[1:] for x in (a, b)]
    return confusable(rules, values, rest[0], rest[1])


def confusions(rules: Rules) -> list[tuple[str, str]]:
    """Pairs of options of one rule that a reader might not tell apart by what they say next."""
    values: dict[tuple[str, str], list[str]] = {}
    for option in itertools.chain.from_iterable(rules.values()):
        for kind, *rest in pieces(option.template):
            if kind == "choose" and rest[0]:
                for bound in rules[rest[1]]:
                    values.setdefault((rest[0], ""), []).append(bound.template)
                    for field, value in bound.fields.items():
                        values.setdefault((rest[0], field), []).append(value)
    values = {key: sorted(set(texts)) for key, texts in values.items()}
    return [
        (a.template, b.template)
        for options in rules.values()
        for a, b in itertools.combinations(options, 2)
        if confusable(rules, values, pieces(a.template), pieces(b.template))
    ]


# ------------------------------------------------------------------------------------------------ a miniature

MINIATURE: Rules = {
    "story": [Option(template="<opening>[0.3] <deed=deed>[0.6] {deed} again. Then <x=who!hero> and {x.pet}.")],
    "opening": [
        Option(template="Once <hero=who> met <friend=who!hero>.", weight=2),
        Option(template="There was <hero=who>.", weight=0.5),
        Option(template="One day, <hero=who> had a {hero.pet}.", weight=1),
    ],
    "deed": [Option(template="Go <where>!"), Option(template="Stay!", weight=3)],
    "where": [Option(template="up"), Option(template="down"), Option(template="home")],
    "who": [
        Option(template="Ann", weight=5, fields={"pet": "cat"}),
        Option(template="Bob", weight=2, fields={"pet": "dog"}),
        Option(template="Cy", weight=1, fields={"pet": "cat"}),
    ],
}


def test_miniature_enumerated_completely() -> None:
    assert confusions(MINIATURE) == []
    found = documents(MINIATURE)
    texts = [d.text for d in found]
    assert len(set(texts)) == len(texts) > 100
    total = math.fsum(d.prob * (1 if d.prob_end is None else d.prob_end) for d in found)
    assert total == pytest.approx(1, abs=1e-12)


def test_miniature_sampler_agrees_with_enumeration() -> None:
    """Frequencies (chi-square at a fixed seed), each log-probability, and each end."""
    exact = {d.text: d for d in documents(MINIATURE)}
    grammar = build(MINIATURE)
    draw = np.random.Generator(np.random.Philox(7)).random
    tellings = [tell(grammar, draw) for _ in range(20_000)]
    for telling in tellings[:500]:
        expected = exact[telling.text]
        assert telling.log_prob_text == pytest.approx(math.log(expected.prob), abs=1e-12)
        assert telling.log_prob_end == pytest.approx(math.log(expected.prob_end or 1.0), abs=1e-12)
    counts = Counter(telling.text for telling in tellings)
    assert set(counts) <= set(exact)
    probs = {text: d.prob * (d.prob_end or 1.0) for text, d in exact.items()}
    common = [text for text, prob in probs.items() if prob * len(tellings) >= 5]
    observed = [counts[text] for text in common]
    expected_counts = [probs[text] * len(tellings) for text in common]
    observed.append(len(tellings) - sum(observed))
    expected_counts.append(len(tellings) - sum(expected_counts))
    assert stats.chisquare(observed, expected_counts).pvalue > 1e-3


def test_log_prob_text_is_the_probability_of_beginning_so() -> None:
    """The sum over all texts that begin with a text is exp(log_prob_text): the end is a decision after it."""
    found = documents(MINIATURE)
    probs = [(d.text, d.prob * (d.prob_end or 1.0)) for d in found]
    for d in found[:: len(found) // 40]:
        begins = math.fsum(prob for text, prob in probs if text.startswith(d.text))
        assert begins == pytest.approx(d.prob, rel=1e-12)


def test_leaving_one_out_never_draws_it_even_at_the_edges() -> None:
    rules: Rules = {
        "story": [Option(template="<a=n> <b=n!a>")],
        "n": [Option(template=str(i), weight=w) for i, w in enumerate((0.1, 0.7, 0.2))],
    }
    grammar = build(rules)
    edges = [0.0, np.nextafter(0.1, 0), 0.1, 0.25, 0.5, np.nextafter(0.8, 0), 0.8, np.nextafter(1.0, 0)]
    for first, second in itertools.product(edges, edges):
        telling = tell(grammar, iter([first, second]).__next__)
        a, b = telling.text.split()
        assert a != b
        weights = (0.1, 0.7, 0.2)
        expected = weights[int(a)] * weights[int(b)] / (1 - weights[int(a)])
        assert telling.log_prob_text == pytest.approx(math.log(expected), abs=1e-12)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"story": [Option(template="<nobody>")]}, "rule 'story': <nobody> is no rule"),
        (
            {"story": [Option(template="a", weight=0)]},
            "rule 'story': expected at least one option, every weight above 0",
        ),
        ({"story": [Option(template="a"), Option(template="b")]}, "expected a rule 'story' with one option"),
        (
            {"story": [Option(template="a[1.0]")]},
            "rule 'story': [1.0] is not accepted; expected 0 < p < 1 in the rule 'story'",
        ),
        (
            {"story": [Option(template="<a>")], "a": [Option(template="b[0.5]")]},
            "rule 'a': [0.5] is not accepted; expected 0 < p < 1 in the rule 'story'",
        ),
    ],
)
def test_broken_rules_are_refused(rules: Rules, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        build(rules)
    assert str(caught.value) == message


# ------------------------------------------------------------------------------------------------ the stories


@pytest.fixture(scope="module")
def stories() -> list[Document]:
    return list(open_grammar(GrammarCorpus(num_documents=1500, num_validation=60, num_selection=40)).read())


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_stories_are_sound_in_every_world(seed: int) -> None:
    """No option of any decision begins like another, so that every story has one derivation."""
    assert confusions(story_rules(seed)) == []


def test_confusions_are_found() -> None:
    """The check above can fail: prefixes, equal texts, and facts that may say the same."""

    def mini(*options: str) -> Rules:
        return {
            "story": [Option(template="<a=w> <b=w> <s>")],
            "w": [Option(template="x"), Option(template="y")],
            "s": [Option(template=option) for option in options],
        }

    assert confusions(mini("He ran.", "He ran. So.")) == [("He ran.", "He ran. So.")]
    assert confusions(mini("{a} ran.", "{b} ran."))
    assert confusions(mini("{a} ran.", "x ran."))
    assert confusions(mini("<w> ran.", "y ran."))
    assert confusions(mini("{a} ran.", "{a} sat.", "z ran.", "<w>, no")) == []


def test_parsing_a_story_gives_back_its_probability(stories: list[Document]) -> None:
    """Exactly one derivation, of the same probability, found by walking the rules along the text."""
    rules = story_rules(0)
    for story in [*stories[:12], *stories[-12:]]:
        (found,) = documents(rules, goal=story.text)
        assert math.log(found.prob) == pytest.approx(story.log_prob_text, abs=1e-9)
        assert math.log(found.prob_end or 1.0) == pytest.approx(story.log_prob_end, abs=1e-12)


def test_ends_happen_as_often_as_they_say(stories: list[Document]) -> None:
    ended = Counter(round(math.exp(story.log_prob_end), 6) for story in stories)
    n = len(stories)
    expected = {0.2: 0.2 * n, 0.35: 0.8 * 0.35 * n, 1.0: 0.8 * 0.65 * n}
    assert set(ended) == set(expected)
    assert stats.chisquare([ended[p] for p in expected], list(expected.values())).pvalue > 1e-3


def test_stories_are_small_and_varied(stories: list[Document]) -> None:
    words = np.array([len(story.text.split()) for story in stories])
    assert 70 < words.mean() < 90
    assert words.min() >= 35 and words.max() <= 130
    assert len({story.text for story in stories}) == len(stories)
    assert np.mean([len(story.text.encode()) for story in stories]) < 450
    assert all(story.text == story.text.strip() and "  " not in story.text for story in stories)
    assert not any(mark in story.text for story in stories for mark in "<>{}[]=")


def test_the_world_is_fixed_and_its_facts_hold(stories: list[Document]) -> None:
    """A person's pet, colour and friend are the same in every story, and what is named early comes back later."""
    pets: dict[str, set[str]] = {}
    for story in stories:
        name = re.search(r"there was (\w+),|story of (\w+),|named (\w+)\.|knew (\w+),|called (\w+)\.", story.text)
        assert name is not None
        hero = next(filter(None, name.groups()))
        if found := re.search(r"with a (\w+) called (\w+)\.", story.text):
            pets.setdefault(hero, set()).add(" ".join(found.groups()))
        if found := re.search(r"found the (\w+) (\w+)\.", story.text):
            assert f"{hero} took a {found[1]} {found[2]} to the" in story.text
    assert len(pets) > 20
    assert all(len(known) == 1 for known in pets.values())


def test_splits_are_disjoint_streams_and_the_first_documents_stay() -> None:
    small = list(open_grammar(GrammarCorpus(num_documents=20, num_validation=20, num_selection=20)).read())
    large = list(open_grammar(GrammarCorpus(num_documents=50, num_validation=30, num_selection=20)).read())
    by_split = {split: [d.text for d in small if d.split == split] for split in ("train", "selection", "validation")}
    assert {len(texts) for texts in by_split.values()} == {20}
    assert not set(by_split["train"]) & set(by_split["validation"])
    assert not set(by_split["train"]) & set(by_split["selection"])
    assert by_split["train"] == [d.text for d in large if d.split == "train"][:20]
    assert by_split["validation"] == [d.text for d in large if d.split == "validation"][:20]
    other = list(open_grammar(GrammarCorpus(seed=1, num_documents=20, num_validation=1, num_selection=1)).read())
    assert not {d.text for d in other} & {d.text for d in small}


def test_fingerprint_follows_the_spec() -> None:
    prints = {
        open_grammar(GrammarCorpus(**change)).fingerprint
        for change in ({}, {"seed": 1}, {"num_documents": 5}, {"num_validation": 5}, {"num_selection": 5})
    }
    assert len(prints) == 5
    assert open_grammar(GrammarCorpus()).fingerprint in prints


def test_tokens_of_a_story_do_not_depend_on_what_follows(stories: list[Document]) -> None:
    """So p(text) is also the probability of its tokens, and the floor in bits per byte is exact."""
    tokenizer = train_tokenizer(BpeTokenizer(vocab_size=512), (story.text for story in stories))
    for story in stories[:200]:
        paragraphs = story.text.split("\n")
        for count in range(2, len(paragraphs)):
            whole = tokenizer.encode("\n".join(paragraphs[: count + 1]))
            part = tokenizer.encode("\n".join(paragraphs[:count]))
            assert whole[: len(part)] == part


def test_a_story_fits_a_window_of_256_at_512_ids(stories: list[Document]) -> None:
    """Which the floor needs; the `quick` study relies on it."""
    tokenizer = train_tokenizer(BpeTokenizer(vocab_size=512), (story.text for story in stories))
    assert max(len(ids) + 1 for ids in tokenizer.encode_batch([story.text for story in stories])) <= 256
