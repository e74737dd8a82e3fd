"""The built-in stories: a seeded world of people with fixed attributes, and what can happen to them.

What a model can learn here, from easy to hard: the wording; agreement within a story (the thing, colour, place and
weather named early come back later); and the world itself (a person's pet, home, food, fear, colour and best friend
never change between stories, so they can be known only by heart). Not for: drawing (`rules`).

The rules are sound in the sense of `rules`: at every decision the options begin differently. When a line is added,
the tests say whether that still holds. A paragraph ends before every end, so that the tokens of a story never depend
on what would have followed.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from equipoise.data.corpora.rules import Option, Rules
from equipoise.rng import stream

GIRLS: Final = (
    "Lily Mia Anna Sara Emma Lucy Rose Zoe Nora Ella Ivy Kate Jane Molly Amy Dora Bella Tina Polly Wendy".split()
)
BOYS: Final = "Tom Ben Max Sam Tim Jack Leo Finn Noah Owen Paul Rick Hugo Adam Dan Will Fred Gus Toby Peter".split()
PETS: Final = "cat dog goat pony parrot hamster turtle hen lamb donkey kitten puppy".split()
PET_NAMES: Final = (
    "Biscuit Pepper Button Cloud Daisy Fluffy Ginger Honey Jolly Kiki Luna Muffin Nutmeg Oscar Pickle Quincy Rusty Socks "
    "Truffle Velvet Waffle Ziggy Bandit Cocoa Domino Ember Flash Gizmo Hazel Jasper Koko Marble Nibbles Olive Patches "
    "Rocket Shadow Tiger Widget Zorro"
).split()
COLOURS: Final = "red blue green yellow pink purple white black brown golden silver grey".split()
FOODS: Final = (
    "pancakes|tomato soup|apple pie|cheese|honey bread|noodles|carrot cake|rice pudding|plums|roast potatoes|"
    "cherry jam|mushrooms|hot chocolate|waffles|pea soup|strawberries"
).split("|")
HOMES: Final = (
    "tall tower|house by the sea|flat above the bakery|boat on the river|wooden hut|farm on the hill|"
    "mill by the stream|cottage in the woods|green caravan|castle with one room|tent behind the church|lighthouse"
).split("|")
FEARS: Final = (
    "the dark|loud thunder|deep water|big spiders|high ladders|strange noises|wild geese|the old bridge|"
    "empty rooms|snakes"
).split("|")
HOBBIES: Final = (
    "paint pictures|climb trees|sing songs|count stars|collect shells|dance|tell jokes|draw maps|plant flowers|"
    "catch raindrops"
).split("|")
TOYS: Final = {
    "ball": "kicked it", "kite": "let it fly", "drum": "played it", "boat": "let it float", "hat": "tried it on",
    "bell": "rang it", "book": "read it", "doll": "talked to it", "flute": "blew into it", "lamp": "lit it",
    "mirror": "looked into it", "puzzle": "solved it", "rope": "skipped with it", "scarf": "waved it",
    "spade": "dug with it", "trumpet": "practised on it", "wagon": "pulled it along", "whistle": "whistled on it",
}  # fmt: skip
PLACES: Final = (
    "park garden forest beach market lake school meadow river barn library castle harbour playground station cave"
).split()
ANIMALS: Final = {
    "fox": "whispered", "duck": "quacked", "frog": "croaked", "rabbit": "squeaked", "squirrel": "chattered",
    "mouse": "peeped", "crow": "cawed", "bee": "buzzed", "goose": "honked", "hedgehog": "snuffled",
    "sparrow": "chirped", "badger": "grunted", "deer": "breathed", "snail": "murmured", "wolf": "growled",
}  # fmt: skip
SPOTS: Final = (
    "under the bench|behind the gate|beside the well|between two stones|inside a hollow log|next to the fence|"
    "below the bridge|in the tall grass|on top of the wall|near the oak tree|above the door|among the roses"
).split("|")
TRAITS: Final = (
    "kind brave shy clever cheerful curious gentle lazy busy proud quiet funny careful stubborn polite dreamy"
).split()
WEATHERS: Final = {
    "sunny": ("the sun was shining", "a straw hat"), "rainy": ("rain was falling", "rubber boots"),
    "windy": ("the wind was howling", "a tight cap"), "snowy": ("snow lay everywhere", "thick mittens"),
    "foggy": ("nobody could see far", "a bright vest"), "cold": ("the puddles were frozen", "a warm coat"),
    "stormy": ("thunder rolled over the hills", "a long cape"), "hot": ("the stones were burning", "thin sandals"),
}  # fmt: skip
DAYS: Final = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()

ZIPF_SHIFT: Final = 3.0
"""The r-th person, place or thing has weight 1 / (r + shift): some are met often, some seldom, as in real text."""

STORY: Final = "<opening> <a=about> <b=about!a>\n<day> <plot>[0.35]\n<later> <sequel>[0.45]\n<closing>"

# One block a rule: its name, then an option a line.
RULES: Final = """
opening
  Once upon a time, there was <hero=person>, a <trait=trait> {hero.kid}.
  This is the story of <hero=person>, a <trait=trait> little {hero.kid}.
  Far away, behind the mountains, lived a <trait=trait> child named <hero=person>.
  In a small village, everyone knew <hero=person>, the <trait=trait> {hero.kid}.
  There once was a <trait=trait> child. It was called <hero=person>.
about
  {hero.He} lived in a {hero.home} with a {hero.pet} called {hero.petname}.
  {hero.He} liked to {hero.hobby} and to eat {hero.food}.
  {hero.He} was not afraid of anything but {hero.fear}.
  {hero.His} best friend was {hero.friend}, who lived in a {hero.friend_home}.
  {hero.His} favourite colour was {hero.colour}.
  Wherever {hero.he} went, {hero.petname} the {hero.pet} went too.
day
  One <weather=weather> morning,
  On a <weather=weather> <weekday>,
  It was a <weather=weather> day when
  Last <weekday>, when it was <weather=weather>,
plot
  {hero} took a <colour=colour> <toy=toy> to the <place=place>. <wear> <play> <lost> <ask> <found> <glad>
  {hero} found a <colour=colour> <toy=toy> near the <place=place>. <wonder> <owner> <giveback> <reward>
  {hero} and <other=person!hero> had a race to the <place=place>. The prize was a <colour=colour> <toy=toy>. <wear> <run> <win>
  {hero} wanted to surprise {hero.friend}. <buy> <wrap> <carry> <unwrap>
  {hero} could not find {hero.petname} anywhere. <search> <there> <petglad>
  {hero} decided to make a <colour=colour> <toy=toy>. <need> <trouble> <done>
  {hero} had to go through the <place=place> alone. <wear> <scared> <luck> <brave>
wear
  It was so {weather} that {hero.he} wore {weather.wear}.
  {hero.He} put on {weather.wear}, because {weather.sky}.
  Although {weather.sky}, {hero.he} sang all the way.
  {hero.petname} came along, though {weather.sky}.
play
  {hero.He} {toy.used} again and again.
  First {hero.he} {toy.used}, then {hero.he} sat down to rest.
  Everyone stopped to watch when {hero.he} {toy.used}.
lost
  But after a while the {toy} was gone!
  Then a gust of wind blew the {toy} away.
  Suddenly a big dog grabbed the {toy} and ran off.
  When {hero.he} looked again, there was no {toy} anywhere.
  On the way home {hero.he} noticed that the {colour} {toy} was missing.
ask
  "Have you seen my {colour} {toy}?" {hero.he} asked a <animal=animal>.
  A <animal=animal> saw {hero.his} tears and asked what was wrong.
  {hero} met a <animal=animal> and told it about the {toy}.
  Then {hero.he} thought of the wise old <animal=animal> and asked for help.
found
  "Look <spot=spot>," {animal.said} the {animal}. There it was, {spot}!
  The {animal} pointed <spot=spot>, and there {hero} found the {colour} {toy}.
  Together they searched the {place} until the {animal} looked <spot=spot>.
  "I saw it <spot=spot>," {animal.said} the {animal}, and it was true.
glad
  "Thank you!" said {hero} and gave the {animal} some {hero.food}.
  {hero} was so happy that {hero.he} hugged the {animal}.
  From then on {hero} and the {animal} were friends.
  {hero.He} promised to take better care of the {toy}.
wonder
  "Whose is this?" {hero.he} wondered.
  {hero.He} wanted to keep it, but that did not feel right.
  Somebody must be very sad, {hero.he} thought.
  Nobody was there, for {weather.sky}.
owner
  It belonged to <other=person!hero>, who lived in a {other.home}.
  On it was a name: <other=person!hero>.
  A <animal=animal> {animal.said} that <other=person!hero> had lost it.
  Soon <other=person!hero> came by with {other.petname} the {other.pet}, looking for a {toy}.
giveback
  {hero} took the {toy} to the {other.home} at once.
  "Is this your {colour} {toy}?" asked {hero}.
  {other.He} jumped for joy when {other.he} saw the {colour} {toy}.
  The {trait} {hero.kid} gave it back with a smile.
reward
  {other} gave {hero.him} a big plate of {other.food}.
  As a reward {hero} could play with {other.petname}, the {other.pet}.
  "You are very {trait}," said {other}.
  Then they {toy.used} together.
run
  At first {other} was faster.
  Halfway there, {hero} fell over a stone, but {hero.he} got up again.
  They ran past the <past=place!place> and over the bridge.
  {hero.petname} the {hero.pet} ran along and cheered.
win
  In the end {hero} was first, and {other} clapped {other.his} hands.
  At last {other} won, but {other.he} shared the {colour} {toy} with {hero}.
  Both arrived at the same time, so they shared the {toy}.
  Because {other} was afraid of {other.fear}, {hero} won the {colour} {toy}.
buy
  At the <place=place> {hero.he} bought a <colour=colour> <toy=toy>.
  {hero.He} made a <colour=colour> <toy=toy> and hid it in the <place=place>.
  A <animal=animal> from the <place=place> sold {hero.him} a <colour=colour> <toy=toy>.
wrap
  {hero.He} wrapped it in <paper=colour!colour> paper.
  The box was tied with a <paper=colour!colour> ribbon.
  {hero.petname} nearly sat on it.
carry
  Then {hero.he} walked all the way to the {hero.friend_home}.
  It was hard to keep the secret until <weekday>.
  {hero.friend} opened the door of the {hero.friend_home}.
unwrap
  "A {colour} {toy}!" cried {hero.friend}. "Thank you, {hero}!"
  {hero.friend} was so pleased that {hero.friend_he} made {hero.friend_food} for both.
  Right away they {toy.used}.
  "How did you know that I wanted a {toy}?" asked {hero.friend}.
search
  {hero.He} looked in every corner of the {hero.home}.
  {hero.He} called the {hero.pet} and shook a bowl of {hero.food}.
  "Have you seen a {hero.pet}?" {hero.he} asked a <animal=animal>.
  {hero.friend} came to help.
there
  In the <place=place>, <spot=spot>, sat the {hero.pet} with a <colour=colour> <toy=toy>.
  At last {hero.he} heard a noise in the <place=place>. The {hero.pet} was playing with a <colour=colour> <toy=toy>.
  The {hero.pet} had gone to the <place=place> to fetch a <colour=colour> <toy=toy>.
petglad
  "There you are, {hero.petname}!" laughed {hero}.
  {hero} was not angry at all and {toy.used}.
  They went home to the {hero.home} together.
  "You <mood=trait> {hero.pet}," said {hero}.
need
  For that {hero.he} needed wood from the <place=place>.
  {hero.He} went to the <place=place> to look for nails.
  "You will find paint in the <place=place>," said {hero.friend}.
  Everything for it lay <spot=spot> in the <place=place>.
trouble
  But the first {toy} broke at once.
  It took until <weekday>, and {hero.he} forgot to eat {hero.his} {hero.food}.
  {hero.petname} the {hero.pet} carried the glue away.
  <other=person!hero> laughed and said it would never work.
done
  When the {colour} {toy} was ready, {hero} {toy.used}.
  In the end it was the best {toy} in the whole village.
  {hero} was proud and gave the {colour} {toy} to {hero.friend}.
  Now everyone wanted a {colour} {toy} as well.
scared
  {hero.He} was thinking of {hero.fear} and walked faster.
  Something moved <spot=spot>.
  There was nobody there but a <animal=animal>.
  Was that {hero.fear}?
luck
  "Take this <colour=colour> <toy=toy>," said a voice. "It will help you."
  {hero.He} held on to a <colour=colour> <toy=toy> that {hero.friend} had given {hero.him}.
  But then {hero.he} saw a <colour=colour> <toy=toy> in the moonlight.
brave
  {hero} {toy.used}, and the fear was gone.
  After a while {hero.he} began to sing and forgot {hero.fear}.
  With the {colour} {toy} in {hero.his} hand, {hero.he} reached the other side of the {place}.
  "I am a {trait} {hero.kid}," {hero.he} said aloud, and ran.
later
  The next day,
  A week later,
  In the evening,
  On <weekday>,
sequel
  {hero} showed the {colour} {toy} to <pal=person!hero>. <show>
  {hero} went back to the {place}. <back>
  {hero.petname} hid the {toy} <where=spot>. <hid>
  there came a letter from {hero.friend}. <letter>
  {hero} was hungry and cooked {hero.food}. <meal>
  {hero.friend} came to visit. <visit>
show
  "I like {pal.colour} things better," said {pal}.
  "Where did you get it?" asked {pal}. "In the {place}," said {hero}.
  {pal} wanted to buy it for {pal.petname}, {pal.his} {pal.pet}.
  They {toy.used} and ate {pal.food}.
back
  Again {weather.sky}, and {hero.he} wore {weather.wear}.
  This time {hero.he} took {hero.petname} along.
  {hero.He} met <pal=person!hero>, who wanted to {pal.hobby}.
  Nobody there had seen such a {colour} {toy} before.
hid
  It took {hero} a long time to look {where}.
  "You naughty {hero.pet}!" said {hero} when {hero.he} found it {where}.
  The {hero.pet} wanted the {colour} {toy} for itself.
letter
  "Come to the {hero.friend_home}," it said, "and bring the {toy}."
  It was written in {hero.friend_colour} ink.
  {hero.friend} asked if {hero} could come and {hero.friend_hobby}.
  There was a picture of the {colour} {toy} in it.
meal
  {hero.petname} the {hero.pet} got some as well.
  <pal=person!hero> brought {pal.food}, and they had a feast.
  The {toy} lay on the table beside the plate.
visit
  "Is it true about the {colour} {toy}?" {hero.friend_he} asked.
  They went to the {place} to {hero.friend_hobby}.
  {hero.friend} {toy.used} and would not stop.
closing
  That night {hero} dreamed of <dream>.
  When {hero.he} came home, there was {hero.food} for supper.
  And so the {trait} {hero.kid} learned that <moral>.
  Since then the {colour} {toy} has had a place in the {hero.home}.
  {hero} and {hero.friend} still talk about that {weather} day.
dream
  a {colour} {toy} as big as a {hero.home}
  the {place} in the moonlight
  {hero.petname} flying over the {place}
moral
  friends are better than toys
  it is good to share
  nobody is brave all the time
  asking for help is not weak
  the best things cost nothing
  one should never give up
  telling the truth is easier
"""


def story_rules(seed: int) -> Rules:
    """The rules of the stories in the world of `seed`: which person has which attributes, and who is met how often."""
    rng = stream(seed, "grammar", "world")
    words = {
        "person": _people(rng),
        "trait": _zipf(rng, [Option(template=trait) for trait in TRAITS]),
        "weather": _zipf(
            rng,
            [Option(template=name, fields={"sky": sky, "wear": wear}) for name, (sky, wear) in WEATHERS.items()],
        ),
        "colour": _zipf(rng, [Option(template=colour) for colour in COLOURS]),
        "toy": _zipf(rng, [Option(template=toy, fields={"used": used}) for toy, used in TOYS.items()]),
        "place": _zipf(rng, [Option(template=place) for place in PLACES]),
        "animal": _zipf(rng, [Option(template=name, fields={"said": said}) for name, said in ANIMALS.items()]),
        "spot": _zipf(rng, [Option(template=spot) for spot in SPOTS]),
        "weekday": [Option(template=day) for day in DAYS],
    }
    sentences: dict[str, list[Option]] = {}
    for line in RULES.strip().split("\n"):
        if line.startswith("  "):
            options.append(Option(template=line.strip()))
        else:
            options = sentences.setdefault(line, [])
    return {"story": [Option(template=STORY)], **sentences, **words}


def _people(rng: np.random.Generator) -> list[Option]:
    """Everybody, with everything that is always true of them; a friend's attributes are there as `friend_…`."""
    girls = {name: True for name in GIRLS}
    names = [str(name) for name in rng.permutation([*GIRLS, *BOYS])]
    pet_names = [str(name) for name in rng.permutation(PET_NAMES)]
    own: dict[str, dict[str, str]] = {}
    for name, pet_name in zip(names, pet_names, strict=True):
        he, his, him, kid = ("she", "her", "her", "girl") if name in girls else ("he", "his", "him", "boy")
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
