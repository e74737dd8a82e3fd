"""What can happen in the built-in stories, as rules.

What a model can learn here, from easy to hard: the wording; agreement within a story (the thing, colour, place and
weather named early come back later); and the world itself (a person's pet, home, food, fear, colour and best friend
never change between stories, so they can be known only by heart). Not for: who and what there is (`world`), nor
drawing (`rules`).

The rules are sound in the sense of `rules`: at every decision the options begin differently. When a line is added,
the tests say whether that still holds. Only whole paragraphs come before an end, so that the tokens of a story never
depend on what would have followed.
"""

from __future__ import annotations

from typing import Final

from equipoise.data.corpora.rules import START, Option, Rules
from equipoise.data.corpora.world import world_words

STORY: Final = "<opening> <about>\n<day> <plot>[0.2]\n<later> <sequel>[0.35]\n<closing>"

# One block a rule: its name, then an option a line.
RULES: Final = """
opening
  Once upon a time, there was <hero=person>, a <trait=trait> {hero.kid}.
  This is the story of <hero=person>, a <trait=trait> {hero.kid}.
  Far away lived a <trait=trait> child named <hero=person>.
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
  {hero} took a <colour=colour> <toy=toy> to the <place=place>. <play> <lost> <ask> <found>
  {hero} found a <colour=colour> <toy=toy> near the <place=place>. <wonder> <owner> <giveback> <reward>
  {hero} and <other=person!hero> raced to the <place=place> to win a <colour=colour> <toy=toy>. <play> <run> <win>
  {hero} wanted to surprise {hero.friend}. <buy> <wrap> <unwrap>
  {hero} could not find {hero.petname}. <search> <there> <petglad>
  {hero} decided to make a <colour=colour> <toy=toy>. <need> <trouble> <done>
  {hero} had to go through the <place=place> alone. <scared> <luck> <brave>
play
  It was so {weather} that {hero.he} wore {weather.wear}.
  {hero.He} put on {weather.wear}, because {weather.sky}.
  Although {weather.sky}, {hero.he} sang all the way.
  {hero.petname} came along, though {weather.sky}.
  First {hero.he} had some {hero.food}.
lost
  But after a while the {toy} was gone!
  Then the wind blew the {toy} away.
  Suddenly a big dog took the {toy} and ran off.
  When {hero.he} looked again, there was no {toy} anywhere.
  On the way home {hero.he} lost the {colour} {toy}.
ask
  "Have you seen my {colour} {toy}?" {hero.he} asked a <animal=animal>.
  A <animal=animal> saw {hero.him} cry and asked what was wrong.
  {hero} met a <animal=animal> and told it about the {toy}.
  Then {hero.he} asked a wise old <animal=animal> for help.
found
  "Look <spot=spot>," {animal.said} the {animal}. There it was, {spot}!
  The {animal} looked <spot=spot>, and there {hero} found the {colour} {toy}.
  Together they searched the {place} and found it <spot=spot>.
  "I saw it <spot=spot>," {animal.said} the {animal}, and it was true.
wonder
  "Whose is this?" {hero.he} wondered.
  {hero.He} wanted to keep it, but that did not feel right.
  Somebody must be very sad, {hero.he} thought.
  Nobody was there, for {weather.sky}.
owner
  It belonged to <other=person!hero>, who lived in a {other.home}.
  On it was a name: <other=person!hero>.
  A <animal=animal> {animal.said} that <other=person!hero> had lost it.
  Soon <other=person!hero> came by with {other.petname} the {other.pet}.
giveback
  {hero} took the {toy} to the {other.home} at once.
  "Is this your {colour} {toy}?" asked {hero}.
  {other.He} jumped for joy when {other.he} saw the {colour} {toy}.
  The {trait} {hero.kid} gave it back with a smile.
reward
  {other} gave {hero.him} some {other.food}.
  Then {hero} could play with {other.petname} the {other.pet}.
  "You are very {trait}," said {other}.
  Together they {toy.used}.
run
  At first {other} was faster.
  Halfway there, {hero} fell, but {hero.he} got up again.
  They ran past the <past=place!place> and over the bridge.
  {hero.petname} the {hero.pet} ran along.
win
  In the end {hero} was first and {toy.used}.
  At last {other} won, but {other.he} shared the {colour} {toy} with {hero}.
  Both won, so they shared the {toy}.
  Because {other} was afraid of {other.fear}, {hero} won the {colour} {toy}.
buy
  At the <place=place> {hero.he} bought a <colour=colour> <toy=toy>.
  {hero.He} made a <colour=colour> <toy=toy> and hid it in the <place=place>.
  A <animal=animal> from the <place=place> gave {hero.him} a <colour=colour> <toy=toy>.
wrap
  {hero.He} put it in a <paper=colour!colour> box.
  {hero.petname} nearly sat on it.
  Then {hero.he} walked all the way to the {hero.friend_home}.
  It was hard to wait until <weekday>.
unwrap
  "A {colour} {toy}!" cried {hero.friend}. "Thank you, {hero}!"
  {hero.friend} was so happy that {hero.friend_he} made {hero.friend_food} for both.
  At once they {toy.used} together.
  "How did you know that I wanted a {toy}?" asked {hero.friend}.
search
  {hero.He} looked in every corner of the {hero.home}.
  {hero.He} called the {hero.pet} and put out some {hero.food}.
  "Have you seen a {hero.pet}?" {hero.he} asked a <animal=animal>.
  {hero.friend} came to help.
there
  In the <place=place>, <spot=spot>, sat the {hero.pet} with a <colour=colour> <toy=toy>.
  But the {hero.pet} was in the <place=place> and had found a <colour=colour> <toy=toy>.
  The {hero.pet} had gone to the <place=place> to get a <colour=colour> <toy=toy>.
petglad
  "There you are, {hero.petname}!" said {hero}.
  {hero} was not angry at all and {toy.used}.
  They went home to the {hero.home} together.
  "You <mood=trait> {hero.pet}," said {hero}.
need
  For that {hero.he} needed wood from the <place=place>.
  {hero.He} went to the <place=place> to look for nails.
  "You will find paint in the <place=place>," said {hero.friend}.
  Everything for it was in the <place=place>, <spot=spot>.
trouble
  But the first {toy} broke at once.
  It took until <weekday>, and {hero.he} forgot to eat {hero.his} {hero.food}.
  {hero.petname} the {hero.pet} ran away with the glue.
  <other=person!hero> said it would never work.
done
  When the {colour} {toy} was ready, {hero} {toy.used}.
  In the end it was the best {toy} in the village.
  {hero} was proud and gave the {colour} {toy} to {hero.friend}.
  Now everyone wanted a {colour} {toy} as well.
scared
  {hero.He} thought of {hero.fear} and walked faster.
  Something moved <spot=spot>.
  There was nobody there but a <animal=animal>.
  It was so {weather} that {hero.he} wore {weather.wear}.
luck
  "Take this <colour=colour> <toy=toy>," said a voice.
  {hero.He} held on to a <colour=colour> <toy=toy> that {hero.friend} had given {hero.him}.
  But then {hero.he} saw a <colour=colour> <toy=toy> on the ground.
brave
  {hero} {toy.used}, and the fear was gone.
  After a while {hero.he} began to sing and forgot {hero.fear}.
  With the {colour} {toy} {hero.he} came to the end of the {place}.
  "I am a {trait} {hero.kid}," {hero.he} said, and ran.
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
  {hero} was hungry and made some {hero.food}. <meal>
  {hero.friend} came to visit. <visit>
show
  "I like {pal.colour} things better," said {pal}.
  "Where did you get it?" asked {pal}. "In the {place}," said {hero}.
  {pal} wanted it for {pal.petname}, {pal.his} {pal.pet}.
  They {toy.used} and ate {pal.food}.
back
  Again {weather.sky}, and {hero.he} wore {weather.wear}.
  This time {hero.he} took {hero.petname} along.
  {hero.He} met <pal=person!hero>, who wanted to {pal.hobby}.
  Nobody there had seen such a {colour} {toy} before.
hid
  After a long time {hero} found it {where}.
  "You <mood=trait> {hero.pet}!" said {hero}.
  The {hero.pet} wanted the {colour} {toy} for itself.
letter
  "Come to the {hero.friend_home}," it said, "and bring the {toy}."
  It was written in {hero.friend_colour} ink.
  {hero.friend} asked if {hero} could come and {hero.friend_hobby}.
meal
  {hero.petname} the {hero.pet} got some as well.
  <pal=person!hero> brought {pal.food}.
  The {toy} was on the table.
visit
  "Is it true about the {colour} {toy}?" {hero.friend_he} asked.
  They went to the {place} to {hero.friend_hobby}.
  {hero.friend} {toy.used} and would not stop.
closing
  That night {hero} dreamed of <dream>.
  When {hero.he} came home, {hero.he} ate some {hero.food}.
  And so the {trait} {hero.kid} learned that <moral>.
  Since then the {colour} {toy} has been in the {hero.home}.
  {hero} and {hero.friend} still talk about that {weather} day.
dream
  a {colour} {toy} as big as a {hero.home}
  the {place} in the moonlight
  {hero.petname} flying over the {place}
moral
  friends are better than toys
  it is good to share
  nobody is always {trait}
  help is never far
  the best things are free
"""


def story_rules(seed: int) -> Rules:
    """The rules of the stories in the world of `seed`."""
    rules: dict[str, list[Option]] = {START: [Option(template=STORY)], **world_words(seed)}
    name = ""
    for line in RULES.strip().split("\n"):
        if line.startswith("  "):
            rules[name].append(Option(template=line.strip()))
        else:
            name = line
            rules[name] = []
    return rules
