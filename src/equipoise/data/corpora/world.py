"""The world of the built-in stories: its people with their fixed attributes, and the words for everything else.

A seed decides who has which pet, home, food, fear, colour, hobby and friend, and who and what is met how often. Not
for: what happens (`stories`).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from equipoise.data.corpora.rules import Option
from equipoise.rng import stream

GIRLS: Final = (
    "Lily",
    "Mia",
    "Anna",
    "Sara",
    "Emma",
    "Lucy",
    "Rose",
    "Zoe",
    "Nora",
    "Ella",
    "Ivy",
    "Kate",
    "Amy",
    "Dora",
)
BOYS: Final = ("Tom", "Ben", "Max", "Sam", "Tim", "Jack", "Leo", "Finn", "Paul", "Hugo", "Adam", "Dan", "Will", "Gus")
PETS: Final = ("cat", "dog", "goat", "pony", "hen", "lamb", "duck", "mouse", "fish", "crow")
PET_NAMES: Final = (
    "Bit", "Pip", "Dot", "Fizz", "Gogo", "Hop", "Jin", "Kiki", "Lulu", "Momo", "Nox", "Oto", "Puck", "Rag",
    "Sox", "Tiki", "Uno", "Vivi", "Wag", "Yap", "Zip", "Bubu", "Cleo", "Dash", "Echo", "Fia", "Gigi", "Huck",
)  # fmt: skip
COLOURS: Final = ("red", "blue", "green", "yellow", "pink", "white", "black", "brown", "golden", "silver")
FOODS: Final = (
    "soup",
    "apple pie",
    "cheese",
    "bread",
    "noodles",
    "cake",
    "rice",
    "plums",
    "jam",
    "nuts",
    "honey",
    "beans",
)
HOMES: Final = (
    "tall tower", "house by the sea", "flat in the town", "boat on the river", "wooden hut", "farm on the hill",
    "mill by the lake", "hut in the woods", "small castle", "big tent",
)  # fmt: skip
FEARS: Final = (
    "the dark",
    "thunder",
    "deep water",
    "spiders",
    "ladders",
    "strange noises",
    "the wind",
    "big dogs",
    "snakes",
)
HOBBIES: Final = ("paint", "climb trees", "sing", "count stars", "dance", "tell jokes", "draw", "plant trees", "swim")
TOYS: Final = {
    "ball": "kicked it", "kite": "let it fly", "drum": "played on it", "boat": "let it float", "hat": "put it on",
    "bell": "rang it", "book": "read it", "doll": "talked to it", "flute": "played it", "lamp": "lit it",
    "mirror": "looked into it", "rope": "jumped over it", "spade": "dug with it", "cart": "pulled it along",
}  # fmt: skip
PLACES: Final = (
    "park", "garden", "forest", "beach", "market", "lake", "school", "river", "barn", "castle", "cave", "mill",
)  # fmt: skip
ANIMALS: Final = {
    "fox": "whispered", "frog": "croaked", "bee": "buzzed", "goose": "honked", "rabbit": "squeaked", "snail": "sighed",
    "deer": "breathed", "wolf": "growled", "bear": "grunted", "bird": "sang",
}  # fmt: skip
SPOTS: Final = (
    "under the bench", "behind the gate", "by the well", "between two stones", "in a hollow log", "next to the wall",
    "below the bridge", "in the tall grass", "on the roof", "near the oak tree",
)  # fmt: skip
TRAITS: Final = (
    "kind",
    "brave",
    "shy",
    "clever",
    "gentle",
    "lazy",
    "busy",
    "proud",
    "quiet",
    "funny",
    "polite",
    "sleepy",
)
WEATHERS: Final = {
    "sunny": ("the sun was shining", "a straw hat"), "rainy": ("rain was falling", "big boots"),
    "windy": ("the wind was strong", "a tight cap"), "snowy": ("snow was falling", "warm gloves"),
    "foggy": ("the fog was thick", "a bright scarf"), "cold": ("the lake was frozen", "a warm coat"),
    "hot": ("the stones were hot", "thin shoes"),
}  # fmt: skip
DAYS: Final = ("Monday", "Tuesday", "Thursday", "Friday", "Sunday")

ZIPF_SHIFT: Final = 3.0
"""The r-th person, place or thing has weight 1 / (r + shift): some are met often, some seldom, as in real text."""


def world_words(seed: int) -> dict[str, list[Option]]:
    """The rules that name people and things, one option a word, in the world of `seed`."""
    rng = stream(seed, "grammar", "world")
    weathers = [Option(template=name, fields={"sky": sky, "wear": wear}) for name, (sky, wear) in WEATHERS.items()]
    return {
        "person": _people(rng),
        "trait": _zipf(rng, [Option(template=trait) for trait in TRAITS]),
        "weather": _zipf(rng, weathers),
        "colour": _zipf(rng, [Option(template=colour) for colour in COLOURS]),
        "toy": _zipf(rng, [Option(template=toy, fields={"used": used}) for toy, used in TOYS.items()]),
        "place": _zipf(rng, [Option(template=place) for place in PLACES]),
        "animal": _zipf(rng, [Option(template=name, fields={"said": said}) for name, said in ANIMALS.items()]),
        "spot": _zipf(rng, [Option(template=spot) for spot in SPOTS]),
        "weekday": [Option(template=day) for day in DAYS],
    }


def _people(rng: np.random.Generator) -> list[Option]:
    """Everybody, with everything that is always true of them; a friend's attributes are there as `friend_…`."""
    names = [str(name) for name in rng.permutation([*GIRLS, *BOYS])]
    pet_names = [str(name) for name in rng.permutation(PET_NAMES)]
    own: dict[str, dict[str, str]] = {}
    for name, pet_name in zip(names, pet_names, strict=True):
        he, his, him, kid = ("she", "her", "her", "girl") if name in GIRLS else ("he", "his", "him", "boy")
        fields = {
            "he": he,
            "He": he.title(),
            "his": his,
            "His": his.title(),
            "him": him,
            "kid": kid,
            "petname": pet_name,
        }
        for field, values in (
            ("pet", PETS), ("colour", COLOURS), ("food", FOODS), ("home", HOMES), ("fear", FEARS), ("hobby", HOBBIES),
        ):  # fmt: skip
            fields[field] = str(values[int(rng.integers(len(values)))])
        own[name] = fields
    people = []
    for index, name in enumerate(names):
        friend = names[(index + 1 + int(rng.integers(len(names) - 1))) % len(names)]  # anybody else
        theirs = {f"friend_{field}": value for field, value in own[friend].items()}
        people.append(
            Option(template=name, weight=1 / (index + 1 + ZIPF_SHIFT), fields={**own[name], "friend": friend, **theirs})
        )
    return people


def _zipf(rng: np.random.Generator, options: list[Option]) -> list[Option]:
    """The options in an order of the world's own, each less likely than the one before."""
    order = rng.permutation(len(options))
    return [
        Option(template=options[place].template, weight=1 / (rank + 1 + ZIPF_SHIFT), fields=options[place].fields)
        for rank, place in enumerate(order.tolist())
    ]
