"""Writes docs/results.md, and the results in README.md, from the studies in results/.

    python docs/results_page.py           # or: make results

What the papers claim, and which locked claims answer, stands in docs/claims.toml; verdicts, numbers and figures are
those of `results/<study>/results.json`. Of a study that is not there yet the page says so. A test compares both pages
with what this file makes. Not for: computing anything, or the reports (`equipoise report` makes those).
"""

from __future__ import annotations

import json
import re
import textwrap
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from equipoise.costs import outlook
from equipoise.hardware import DEFAULT_UTILISATION, HARDWARE, Setting
from equipoise.report.markdown import escaped
from equipoise.report.tables import interval
from equipoise.report.verdicts import Card, cards
from equipoise.spec.data import requested_vocab_size
from equipoise.spec.study import load_study_table, parse_study
from equipoise.study import DataFacts, plan
from equipoise.text import count, gap, short

ROOT: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = ROOT / "results"
PAGE: Final = ROOT / "docs" / "results.md"
README: Final = ROOT / "README.md"
MARKED: Final = re.compile(r"(<!-- results -->\n).*?(<!-- end of results -->\n)", re.S)
PAPERS: Final = {
    "P": "(P) Dense against sparse pretraining at tiny scale, arXiv 2605.13769",
    "G": "(G) Does a sparse MoE beat its dense counterpart at the same active parameters?",
}
NOT_RUN: Final = "no records yet"
SETTING: Final = Setting(hardware=HARDWARE["h100"], of_arm={})
"""Where the presets of published size are predicted."""
PARAMETERS: Final = {
    "moe": "14.77M active, 21.06M total (one summary prints 14.89M active: a slip)",
    "dense-active": "14.89M",
    "dense-total": "21.06M",
}
"""Of (P), by the arm of the preset tinystories."""
CONTRACTS: Final = ("tinystories-cpu", "budgets-cpu")
"""Studies of (P) whose gaps are also shown at equal FLOPs and seconds."""
FULL_SIZE: Final = ("tinystories", "budgets", "lr-fairness", "ladder", "controls", "gutenberg", "granularity")

HEAD: Final = """\
# Results

<!-- Written by docs/results_page.py from results/ and docs/claims.toml. Change those, then: make results -->

What the two published experiments claim, and what our studies on two CPU cores found. Every verdict is that of a claim
which was locked before the first run of its study (where a study had been run before, its note says so); all numbers
come from `results/`, where the records of every run lie without their weights. Levels of loss compare with nothing
published: not enough is known of the papers' models and vocabulary. What compares is order, sign and verdict.

Differences of loss are in nats per token, left − right, so negative where the left is better. *n* is the number of
seeds; intervals are two-sided 95 % t intervals over seeds, not adjusted, and those of a share may reach beyond what a
share can be. Verdicts use one-sided tests at 0.05 with Holm's adjustment over the claims of a study: one can be
*supported* whose interval just reaches zero, and *inconclusive* whose interval does not. *As published* is *yes* or
*no* where ours decides, and *open* where these seeds cannot tell.
"""

READING: Final = (
    "Differences are left − right with a 95 % interval over n seeds, of loss in nats per token. Verdicts are those of "
    "claims locked before the runs, by one-sided tests adjusted for the number of claims, so an interval may reach "
    "zero where a claim is supported, and miss it where none is. *Open*: these seeds cannot tell."
)
"""How the table of README is read."""

LIMITS: Final = """\
## What two cores cannot show

Our models have 0.2 to 0.5 million parameters and see at most a few million tokens. Those of (P) have 14.8 million
active parameters and see 40 to 426 million tokens; those of (G), 12 layers of width 768, see 0.77 million. At our size
the spread between seeds is several times the one that (P) publishes, so that gaps as small as some of the published
ones cannot be told from chance by a handful of seeds: such claims stay *open*. And whatever is decided here is decided
for models of this size alone; it may turn around at another.

The presets without `-cpu` have the published sizes. They are planned and tested, and not yet run in full. What they
would cost on one NVIDIA H100 is what `equipoise plan PRESET --device h100` predicts, at an assumed {utilisation:.0%} of
its peak ([scale.md](scale.md)). Nothing of it was measured, and models this small will reach less.
"""


def studies(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Name → results of every study there."""
    paths = sorted(folder.glob("*/results.json"))
    return {path.parent.name: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def page(found: Mapping[str, Mapping[str, Any]]) -> str:
    """The whole of docs/results.md."""
    declared = tomllib.loads((ROOT / "docs" / "claims.toml").read_text(encoding="utf-8"))
    order = [study["name"] for study in declared["studies"]]
    parts = [HEAD, *_answer(declared, found)]
    for paper, title in PAPERS.items():
        claims = [claim for claim in declared["claims"] if claim["paper"] == paper]
        parts += [f"## {title}\n", _claims_table(claims, found), *_reasons(claims, found)]
        parts += [_parameters(), *_contracts(found)] if paper == "P" else []
    answered = {answer for claim in declared["claims"] for answer in claim["answers"]}
    parts += _beyond({name: found[name] for name in order if name in found}, answered)
    parts.append("## The studies\n")
    parts += [_study(study, found.get(study["name"])) for study in declared["studies"]]
    limits = LIMITS.format(utilisation=DEFAULT_UTILISATION)
    return "\n".join([*parts, limits, _costs()])


def front(found: Mapping[str, Mapping[str, Any]]) -> str:
    """What README shows between its marks: the answer, a table and a figure; nothing before there are results.

    Of each claim there are all answers of the first study that was run, and a link to what a reader has to know of it.
    """
    declared = tomllib.loads((ROOT / "docs" / "claims.toml").read_text(encoding="utf-8"))
    if not found:
        return ""
    noted = {study["name"] for study in declared["studies"] if "note" in study}
    rows = [
        f"| {claim['paper']} | {escaped(_said(claim)) if index == 0 else '″'} | *{escaped(card.sentence)}*"
        f"<br>{_effects(card)} | {_verdict(card)}"
        + (f" ([but: note](docs/results.md#{name}))" if name in noted else "")
        + f" | {_agreement(claim, card)} |"
        for claim in declared["claims"]
        for index, (name, card) in enumerate(_first(found, claim["answers"]))
    ]
    names = f"What two published experiments claim ({'; '.join(f'{k}: {v[4:]}' for k, v in PAPERS.items())})"
    table = [
        *_answer(declared, found),
        textwrap.fill(f"{names}, and what the first studies found, at a laptop's size. {READING}", 118) + "\n",
        "| | published | claimed here, and measured | verdict | as published |",
        "|---|---|---|---|---|",
        *rows,
    ]
    shown = [(study["name"], figure) for study in declared["studies"] for figure in _drawn(study)]
    shown.sort(key=lambda pair: pair[0] != "budgets-cpu")  # how gaps change with the budget says most in one picture
    name, figure = next(((n, f) for n, f in shown if n in found), ("", ""))
    picture = f"\n{_image(name, figure, found[name], 'results')}\n" if name else ""
    return "\n".join([*table, picture, "All claims, numbers and intervals: [docs/results.md](docs/results.md).\n"])


# ------------------------------------------------------------------------------------------------ claims


def _answer(declared: Mapping[str, Any], found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The short answer, with what was measured; none while a verdict is another than it was written for."""
    answer = declared.get("answer", {"verdicts": {}, "text": ""})
    given = {name: _card(found, name) for name in answer["verdicts"]}
    of_card = {name: card for name, card in given.items() if card and card.verdict == answer["verdicts"][name]}
    if not answer["text"] or of_card.keys() != given.keys():
        return []
    told = re.sub(r"\{(.+?)\}", lambda mark: _effects(of_card[mark[1]]), answer["text"].strip())
    lines = [textwrap.fill(line, 118, subsequent_indent="  ", break_on_hyphens=False) for line in told.splitlines()]
    return ["\n".join(lines) + "\n"]


def _claims_table(claims: Sequence[Mapping[str, Any]], found: Mapping[str, Mapping[str, Any]]) -> str:
    lines = ["| published | study, claim | ours | verdict | as published |", "|---|---|---|---|---|"]
    for claim in claims:
        for index, answer in enumerate(claim["answers"]):
            published = escaped(claim["published"]) if index == 0 else "″"
            lines.append(f"| {published} | {_answer_row(found, answer, claim)} |")
    return "\n".join(lines) + "\n"


def _answer_row(found: Mapping[str, Mapping[str, Any]], answer: str, claim: Mapping[str, Any]) -> str:
    name, _, claim_id = answer.partition("/")
    card = _card(found, answer)
    cells = [_link(name, found), _ours(found.get(name), card), _verdict(card), _agreement(claim, card)]
    cells[0] += f": {escaped(claim_id)}" + (f"<br>{escaped(card.sentence)}" if card else "")
    return " | ".join(cells)


def _card(found: Mapping[str, Mapping[str, Any]], answer: str) -> Card | None:
    """The card of STUDY/CLAIM; None for a study that was not run. KeyError for a claim that the study does not have."""
    name, _, claim_id = answer.partition("/")
    if name not in found:
        _check_claim(name, claim_id)
        return None
    by_id = {card.id: card for card in cards(found[name])}
    return by_id[claim_id]


def _first(found: Mapping[str, Mapping[str, Any]], answers: Sequence[str]) -> list[tuple[str, Card]]:
    """The first study that was run, with the card of each answer it gives; none when none was."""
    named = [(answer.partition("/")[0], _card(found, answer)) for answer in answers]
    given = [(name, card) for name, card in named if card is not None]
    return [(name, card) for name, card in given if name == given[0][0]]


def _check_claim(name: str, claim_id: str) -> None:
    ids = [claim.id for claim in parse_study(load_study_table(name)[0]).claims]
    if claim_id not in ids:
        raise KeyError(f"{name}/{claim_id}")


def _ours(results: Mapping[str, Any] | None, card: Card | None) -> str:
    """Mean, interval and n of every effect of a claim, and at which scale."""
    if results is None or card is None:
        return "–"
    at = card.effects[0].budget if card.effects else ""
    return "<br>".join(filter(None, (_effects(card), f"{_size(results)}, {at}")))


def _effects(card: Card) -> str:
    """Mean, interval and n of every effect of a claim."""
    return "<br>".join(
        f"{escaped(effect.pair)} = {effect.mean} ({effect.interval}), n = {escaped(effect.seeds)}"
        for effect in card.effects
    )


def _verdict(card: Card | None) -> str:
    if card is None:
        return NOT_RUN
    return f"**{card.verdict}**" + (f" ({escaped(', '.join(card.marks))})" if card.marks else "")


def _agreement(claim: Mapping[str, Any], card: Card | None) -> str:
    if card is None:
        return "–"
    return "yes" if card.verdict in claim["agrees"] else "open" if card.verdict == "inconclusive" else "no"


def _reasons(claims: Iterable[Mapping[str, Any]], found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Of claims that come out otherwise or stay open: the sentences of our verdicts, and what is known of why."""
    lines = []
    for claim in claims:
        differing = [
            (answer, card)
            for answer in claim["answers"]
            if (card := _card(found, answer)) is not None and _agreement(claim, card) != "yes"
        ]
        lines += [f"- *{escaped(answer)}*: {escaped(card.reason)}." for answer, card in differing]
        if differing and "why" in claim:
            lines.append(f"  - {claim['why']}")
    return ["Where ours differs, or cannot tell:\n", "\n".join(lines) + "\n"] if lines else []


def _parameters() -> str:
    """The published parameter counts beside those of the preset that reads them."""
    spec = parse_study(load_study_table("tinystories")[0])
    facts = DataFacts(vocab_size=requested_vocab_size(spec.tokenizer), train_tokens=None, certain=False)
    params = {arm["name"]: arm["params"] for arm in plan(spec, facts)["arms"]}
    rows = [
        f"| {arm} | {published} | {count(params[arm]['active'])} | {count(params[arm]['total'])} |"
        for arm, published in PARAMETERS.items()
    ]
    head = ["| arm | published | active, preset `tinystories` | total |", "|---|---|---:|---:|"]
    return (
        "Parameters. Vocabulary, widths and depth were not published; the preset is one reading that meets all counts "
        "(*derived*).\n\n" + "\n".join([*head, *rows]) + "\n"
    )


def _contracts(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The gaps of the routed arm at equal tokens, FLOPs and seconds, where a study has them."""
    rows = [
        f"| {_link(name, found)} | {row['left']} − {row['right']} | {short(row['budget'])} | "
        + " | ".join(_contract(row[what]) for what in ("tokens", "train_flops", "seconds"))
        + " |"
        for name in CONTRACTS
        for row in found.get(name, {"contracts": {"rows": []}})["contracts"]["rows"]
        if (row["left"], row["metric"], row["post_hoc"]) == ("moe", "best_val_loss", False)
    ]
    if not rows:
        return []
    times = {name: found[name]["contracts"]["step_time"] for name in CONTRACTS if name in found}
    busy = [name for name, time in times.items() if time is not None and not time["idle"]]
    head = [
        "| study | gap | tokens | at equal tokens | at equal training FLOPs | at equal seconds |",
        "|---|---|---|---|---|---|",
    ]
    return [
        "The paper claims no wall-clock win. The same gaps in best validation loss under three meanings of fair, "
        "negative where the MoE is ahead. Seconds are those of our machine"
        + (f", in {' and '.join(busy)} measured while it was not idle" if busy else "")
        + "; what lies between two budgets is interpolated.\n",
        "\n".join([*head, *rows]) + "\n",
    ]


def _contract(cell: Mapping[str, Any]) -> str:
    if cell["mean"] is None:
        return "not measured"
    how = ", interpolated" if cell["interpolated"] else ""
    return f"{gap(cell['mean'])} ({interval(cell)}), n = {cell['n']}{how}"


def _said(claim: Mapping[str, Any]) -> str:
    """What was published, without the numbers that follow a colon."""
    text: str = claim["published"]
    return text if claim["paper"] == "G" else text.partition(":")[0]


def _beyond(found: Mapping[str, Mapping[str, Any]], answered: set[str]) -> list[str]:
    """Locked claims that answer nothing published."""
    rows = [
        f"| {_link(name, found)} | {escaped(card.sentence)} | {_ours(results, card)} | {_verdict(card)} |"
        for name, results in found.items()
        for card in cards(results)
        if f"{name}/{card.id}" not in answered
    ]
    head = ["| study | claim | ours | verdict |", "|---|---|---|---|"]
    return ["## What neither paper asks\n", "\n".join([*head, *rows]) + "\n"] if rows else []


# ------------------------------------------------------------------------------------------------ studies


def _study(study: Mapping[str, Any], results: Mapping[str, Any] | None) -> str:
    name = study["name"]
    if results is None:
        return f"### {name}\n\nNo records in `results/` yet: `equipoise run {name} --set 'corpus.path=\"FOLDER\"'`.\n"
    complete = sum(run["status"] == "complete" for run in results["runs"])
    budgets = ", ".join(short(budget) for budget in results["budgets"])
    spent = results["training_flops"]["spent"]
    late = results["post_hoc"]["seeds"]
    origin = results["provenance"]
    title = results["data"].get("title", results["data"].get("kind", "its corpus"))
    facts = [
        f"{escaped(results['question'])}\n",
        f"{_size(results)}; {budgets} tokens; seeds {', '.join(map(str, results['seeds']))}"
        + (f" ({', '.join(map(str, late))} post hoc)" if late else "")
        + f"; {complete} of {len(results['runs'])} runs complete; {spent:.2e} training FLOPs. {escaped(title)}, data "
        f"digest `{origin['data_digest'][:12]}`; locked {origin['created'][:10]}, lock `{origin['lock_digest'][:12]}`. "
        + _machine(origin["environments"])
        + f" [Report](../results/{name}/report.html), [tables](../results/{name}/results.md).\n",
        "```sh\n" + "\n".join(origin["commands"]) + "\n```\n",
    ]
    facts += [f"{study['note'].strip()}\n"] if "note" in study else []
    images = [_image(name, figure, results, "../results") for figure in _drawn(study)]
    return "\n".join([f"### {name}\n", *facts, *images, ""])


def _drawn(study: Mapping[str, Any]) -> list[str]:
    """The figures of a study that are there: an unfinished one lacks those of what is not judged yet."""
    return [name for name in study["figures"] if (RESULTS / study["name"] / "figures" / f"{name}.svg").exists()]


def _image(name: str, figure: str, results: Mapping[str, Any], root: str) -> str:
    return f"![{escaped(results['name'])}: {figure.replace('-', ' ')}]({root}/{name}/figures/{figure}.svg)"


def _size(results: Mapping[str, Any]) -> str:
    actives = sorted({arm["params"]["active"] for arm in results["arms"]})
    low, high = short(actives[0]), short(actives[-1])
    return f"{low if low == high else f'{low} to {high}'} active parameters"


def _machine(environments: Sequence[Mapping[str, Any]]) -> str:
    said = [f"{one['cpu']}, {one['cores']} cores, torch {one['torch']}" for one in environments]
    return "; ".join(dict.fromkeys(said)) + "."


def _link(name: str, found: Mapping[str, Mapping[str, Any]]) -> str:
    return f"[{name}](#{name})" if name in found else name


def _costs() -> str:
    """Predicted cost of every preset of published size."""
    lines = ["| preset | runs | training FLOPs | hours on one H100 |", "|---|---:|---:|---:|"]
    for name in FULL_SIZE:
        spec = parse_study(load_study_table(name)[0])
        facts = DataFacts(vocab_size=requested_vocab_size(spec.tokenizer), train_tokens=None, certain=False)
        planned = plan(spec, facts)
        hours = outlook(spec, facts, SETTING)["study_s"] / 3600
        lines.append(f"| {name} | {count(planned['num_runs'])} | {planned['train_flops']:.2e} | {hours:.2g} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    results = studies()
    PAGE.write_text(page(results), encoding="utf-8")
    text = README.read_text(encoding="utf-8")
    README.write_text(MARKED.sub(lambda mark: mark[1] + front(results) + mark[2], text), encoding="utf-8")
    print(f"{PAGE.name} written, and the results in {README.name}: {len(results)} studies")
