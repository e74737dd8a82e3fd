"""What the study can and cannot say, and what it takes to repeat it: the Scope box and the provenance.

Not for: results; a sentence here would be the same whatever came out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from equipoise import text
from equipoise.report.values import Cell, Table, main_metric, metric_name

NOTHING: Final = "–"
"""What stands where there is nothing to be said."""

PACKAGES: Final = ("torch", "numpy", "tokenizers")
"""What numbers depend on beside Equipoise itself."""

DIGESTS: Final = {"sha256": "SHA-256 of its tokens", "log_probs": "SHA-256 of its known log-probabilities"}
"""Fields of a split that are digests, in words."""


def scope(results: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """(topic, sentence) pairs: how large, on what, and what so many seeds can tell."""
    title = next((value for name, value in _flat(results["data"]) if name.split(": ")[-1] == "title"), "one corpus")
    return (
        ("Scale", _scale(results)),
        ("Corpus", f"{title}, as {text.count(results['vocab_size'])} different tokens."),
        ("Seeds", _seeds(results)),
    )


def provenance(results: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """(name, value) pairs of what identifies the study: versions, digests, data."""
    origin = results["provenance"]
    facts = [
        ("Equipoise", str(origin["equipoise"])),
        ("locked", str(origin["created"])),
        ("first finished run", str(origin["first_finished"] or "none yet")),
        *(("amended", _amendment(amendment)) for amendment in origin["amendments"]),
        ("lock digest", str(origin["lock_digest"])),
        ("data digest", str(origin["data_digest"])),
    ]
    if said := mixed(results):
        facts.append(("mixed environments", said))
    rest = {key: value for key, value in results["data"].items() if key not in ("schema_version", "digest", "splits")}
    return (*facts, *((f"data: {name}", value) for name, value in _flat(rest) if value != NOTHING))


def commands(results: Mapping[str, Any]) -> tuple[str, ...]:
    """What to type to repeat the study: the versions its runs had, where all had the same ones, and its command."""
    environments = results["provenance"]["environments"]
    versions = [str(environments[0].get(name, "")).partition("+")[0] for name in PACKAGES] if environments else []
    known = len(environments) == 1 and all(re.fullmatch(r"[0-9][\w.]*", version) for version in versions)
    pins = [f"{name}=={version}" for name, version in zip(PACKAGES, versions, strict=True)] if known else []
    return (*([f"pip install {' '.join(pins)}"] if known else []), *results["provenance"]["commands"])


def mixed(results: Mapping[str, Any]) -> str:
    """In what the environments of the complete runs differ, and which runs went on elsewhere; empty: in nothing."""
    found = results["provenance"]["mixed"]
    if not found:
        return ""
    parts = [f"the complete runs differ in {', '.join(found['fields'])}"] if found["fields"] else []
    for run in found["resumed"]:
        steps = ", ".join(text.count(step) for step in run["steps"])
        parts.append(f"{_run_name(run)} went on under another environment after step {steps}")
    return "; ".join(parts)


def environments_table(results: Mapping[str, Any]) -> Table:
    """Machine, versions and number formats, a column per distinct environment the runs were made in."""
    flat = [dict(_flat(environment)) for environment in results["provenance"]["environments"]]
    names = list(dict.fromkeys(name for one in flat for name in one))
    title = "The machine and its software" if len(flat) == 1 else f"{len(flat)} different environments made these runs"
    used = [
        "; ".join(_run_name(run) for run in results["runs"] if index in run["environments"])
        for index in range(len(flat))
    ]
    runs = ((Cell(text="runs", head=True), *(Cell(text=said, prose=True) for said in used)),) if len(flat) > 1 else ()
    return Table(
        title=title,
        header=(
            Cell(text=""),
            *(Cell(text="value" if len(flat) == 1 else f"environment {index + 1}") for index in range(len(flat))),
        ),
        rows=(
            *runs,
            *((Cell(text=name, head=True), *(Cell(text=one.get(name, "–")) for one in flat)) for name in names),
        ),
    )


def splits_table(results: Mapping[str, Any]) -> Table:
    """Documents, tokens and bytes of each split."""
    splits = results["data"].get("splits") or {}
    order = [name for name in ("train", "selection", "validation") if name in splits]
    order += sorted(set(splits) - set(order))
    fields = list(dict.fromkeys(field for name in order for field in splits[name]))
    return Table(
        title="The splits",
        header=(
            Cell(text="split"),
            *(
                Cell(text=DIGESTS.get(field) or field.replace("_", " "), number=field not in DIGESTS)
                for field in fields
            ),
        ),
        rows=tuple(
            (Cell(text=name, head=True), *(_of_split(splits[name], field) for field in fields)) for name in order
        ),
    )


def _of_split(split: Mapping[str, Any], field: str) -> Cell:
    digest = field in DIGESTS
    return Cell(text=_value(split.get(field)), number=not digest, prose=digest)


def study_text(results: Mapping[str, Any]) -> str:
    """The whole study as locked, every default written out."""
    return json.dumps(results["provenance"]["study"], indent=2, ensure_ascii=False)


def _amendment(amendment: Mapping[str, Any]) -> str:
    added = "; ".join(f"{kind} {_value(items)}" for kind, items in amendment["added"].items() if items)
    when = "after" if amendment["after_first_run"] else "before"
    return f"{amendment['date']}, {when} the first finished run: added {added}"


def _run_name(run: Mapping[str, Any]) -> str:
    return f"{run['arm']} {text.short(run['budget'])} seed {run['seed']}"


def _scale(results: Mapping[str, Any]) -> str:
    totals = [arm["params"]["total"] for arm in results["arms"]]
    low, high = text.short(min(totals)), text.short(max(totals))
    size = f"{low} parameters" if low == high else f"{low} to {high} parameters"
    budgets = [text.short(budget) for budget in sorted(results["budgets"])]
    tokens = budgets[0] if len(budgets) == 1 else f"{', '.join(budgets[:-1])} and {budgets[-1]}"
    return f"Models of {size}, trained on {tokens} tokens. What holds here may turn around at another scale."


def _seeds(results: Mapping[str, Any]) -> str:
    late = results["post_hoc"]["seeds"]
    n = len(results["seeds"]) - len(late)
    later = f" {len(late)} more came after the first finished run; no declared number rests on them." if late else ""
    if n < 3:
        count = "1 seed" if n == 1 else f"{n} seeds"
        return f"{count} per arm and budget: too few to support anything; every verdict is inconclusive.{later}"
    metric = main_metric(results)
    floors = [
        row["noise_floor"]
        for row in results["gaps"]
        if row["metric"] == metric and not row["post_hoc"] and text.is_number(row["noise_floor"])
    ]
    opening = f"{n} seeds per arm and budget, paired."
    if not floors:
        return f"{opening} A gap smaller than its noise floor cannot be told from chance.{later}"
    low, high = text.loss(min(floors)), text.loss(max(floors))
    reach = low if low == high else f"between {low} and {high}, contrast by contrast"
    return f"{opening} The smallest mean gap in {metric_name(results, metric)} they could support is {reach}.{later}"


def _flat(value: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """A nest of mappings as (path in words, value) pairs; a list of mappings is a pair each."""
    pairs: list[tuple[str, str]] = []
    for key, item in value.items():
        name = f"{prefix}{str(key).replace('_', ' ')}"
        if isinstance(item, dict):
            pairs += _flat(item, f"{name}: ")
        elif isinstance(item, list) and item and all(isinstance(part, dict) for part in item):
            pairs += [(name, ", ".join(f"{inner} {said}" for inner, said in _flat(part))) for part in item]
        else:
            pairs.append((name, _value(item)))
    return pairs


def _value(item: Any) -> str:
    if isinstance(item, bool):
        return "yes" if item else "no"
    if item is None:
        return NOTHING
    if isinstance(item, int):
        return text.count(item)
    if isinstance(item, list):
        return ", ".join(_value(part) for part in item) or NOTHING
    return str(item)
