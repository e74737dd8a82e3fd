"""The world of the built-in stories and what can be said about it."""

from __future__ import annotations

from equipoise.data.corpora.rules import Option, Rules
from equipoise.rng import stream


def story_rules(seed: int) -> Rules:
    """First version."""
    names = ["Lily", "Tom", "Mia", "Ben", "Sara", "Max"]
    pets = ["cat", "dog", "goat"]
    rng = stream(seed, "grammar", "world")
    who = [Option(template=name, fields={"pet": pets[int(rng.integers(3))]}) for name in names]
    word = lambda *words: [Option(template=w) for w in words]  # noqa: E731
    return {
        "story": word(
            "Once upon a time, there was a <trait=trait> child named <hero=who>. {hero} had a {hero.pet} and a"
            " <colour=colour> <toy=toy>.\n<lost> <found>[0.4]\nThe next day, <again>"
        ),
        "who": who,
        "trait": word("kind", "brave", "shy", "clever", "happy"),
        "colour": word("red", "blue", "green", "white"),
        "toy": word("ball", "kite", "drum", "boat", "hat"),
        "place": word("park", "garden", "forest", "market"),
        "lost": word(
            "One day, {hero} took the {toy} to the <place=place> and lost it there.",
            "In the <place=place>, the {toy} was suddenly gone.",
        ),
        "found": word(
            "{hero} looked and looked. At last the {hero.pet} found the {colour} {toy} in the {place}.",
            "A friend, <other=who!hero>, found the {colour} {toy} and gave it back to {hero} in the {place}.",
        ),
        "again": word(
            "{hero} went to the {place} again and was very {trait}.",
            "the {hero.pet} played with the {colour} {toy}.",
        ),
    }
