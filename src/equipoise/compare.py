"""Two studies side by side: in what they differ, their paired gaps, and how far a gap moved where that can be said.

A gap of one study and a gap of another are put against each other only where both are measured alike: the same data,
the same split and the same schedule. Everything else is shown beside each other and left at that.

Not for: judging (`verdict` does, within a study), or reading run directories (`results`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from equipoise.config import differences
from equipoise.environments import SAME
from equipoise.evidence import METRICS
from equipoise.stats import welch_interval
from equipoise.text import is_number

CONFIDENCE: Final = 0.95
COPIED: Final = (
    "mean",
    "sd",
    "ci_low",
    "ci_high",
    "n",
    "expected_n",
    "dropped",
    "collapsed",
    "post_hoc",
    "noise_floor",
)
"""What a side says of its gap."""


def compare(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    """The results of two studies (as `results.json` holds them) as one table of plain JSON values.

    `differences`: per kind (recipe, schedule, data, arms, design, environment) one line a field, `path: first →
    second`, empty where they agree. `reason`: why no gap is put against the other, None where they are. `gaps`: a row
    per contrast, budget and metric of either study, with `sides` (None where a study does not have it) and `change`,
    the second study's gap less the first's with its interval. `claims`: the verdicts of either study by the claim's id.
    """
    found = _differences(left, right)
    reason = _not_compared(found, left, right)
    return {
        "studies": [
            {
                "name": one["name"],
                "seeds": one["seeds"],
                "budgets": one["budgets"],
                "split": one["split"],
                "complete": sum(run["status"] == "complete" for run in one["runs"]),
                "runs": len(one["runs"]),
                "lock_digest": one["provenance"]["lock_digest"],
            }
            for one in (left, right)
        ],
        "differences": found,
        "reason": reason,
        "confidence": CONFIDENCE,
        "gaps": _gap_rows(left, right, reason),
        "claims": _claim_rows(left, right),
    }


# ------------------------------------------------------------------------------------------------ differences


def _differences(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, list[str]]:
    first, second = (dict(one["provenance"]["study"]) for one in (left, right))
    recipes = [dict(study.get("recipe") or {}) for study in (first, second)]
    schedules = [{"schedule": recipe.pop("schedule", None)} for recipe in recipes]
    data = [
        {"digest": one["provenance"]["data_digest"][:12], **{name: study.get(name) for name in ("corpus", "tokenizer")}}
        for one, study in ((left, first), (right, second))
    ]
    design = [{name: study.get(name) for name in ("seeds", "budgets", "alpha")} for study in (first, second)]
    return {
        "recipe": differences(recipes[0], recipes[1], "recipe"),
        "schedule": differences(schedules[0], schedules[1], "recipe"),
        "data": differences(data[0], data[1], "data"),
        "arms": _arm_differences(left, right, first, second),
        "design": differences(design[0], design[1]),
        "environment": _environment_differences(left, right),
    }


def _arm_differences(
    left: Mapping[str, Any], right: Mapping[str, Any], first: Mapping[str, Any], second: Mapping[str, Any]
) -> list[str]:
    """Arms that only one study has, and what arms of one name differ in: declared fields, and solved widths."""
    widths = [{arm["name"]: arm["widths"] for arm in one["arms"]} for one in (left, right)]
    declared = [dict(study.get("arms") or {}) for study in (first, second)]
    lines = []
    for name in dict.fromkeys((*widths[0], *widths[1])):
        if name not in widths[0] or name not in widths[1]:
            lines.append(f"arms.{name}: only in the {'second' if name not in widths[0] else 'first'}")
            continue
        lines += differences(declared[0].get(name), declared[1].get(name), f"arms.{name}")
        lines += differences(widths[0][name], widths[1][name], f"arms.{name}.widths")
    return lines


def _environment_differences(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[str]:
    """Fields that numbers depend on and that the runs of the two studies do not share."""
    lines = []
    for name in SAME:
        told = [sorted({str(e.get(name)) for e in one["provenance"]["environments"]}) for one in (left, right)]
        if told[0] != told[1]:
            lines.append(f"{name}: {', '.join(told[0]) or 'unknown'} → {', '.join(told[1]) or 'unknown'}")
    return lines


def _not_compared(found: Mapping[str, Sequence[str]], left: Mapping[str, Any], right: Mapping[str, Any]) -> str | None:
    """Why gaps of the two are not put against each other; None where they are."""
    reasons = []
    if found["schedule"]:
        reasons.append("their schedules differ, and gaps are compared only within one schedule")
    if left["provenance"]["data_digest"] != right["provenance"]["data_digest"]:
        reasons.append("their data differ, so that losses are of other text or other tokens")
    if left["split"] != right["split"]:
        reasons.append(f"one is scored on the {left['split']} split, the other on the {right['split']} split")
    return "; ".join(reasons) or None


# ------------------------------------------------------------------------------------------------ rows


def _gap_rows(left: Mapping[str, Any], right: Mapping[str, Any], reason: str | None) -> list[dict[str, Any]]:
    """A row per contrast × budget × metric × (post hoc or not), in the order of the first study, then the second's."""
    first = {_key(gap): gap for gap in left["gaps"]}
    second: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for gap in right["gaps"]:
        turned = _turned(gap)
        second |= {_key(turned): turned} if _key(gap) not in first and _key(turned) in first else {_key(gap): gap}
    rows = []
    for key in dict.fromkeys((*first, *second)):
        sides = [first.get(key), second.get(key)]
        rows.append(
            {
                **dict(zip(("left", "right", "budget", "metric", "post_hoc"), key, strict=True)),
                "sides": [side and {name: side[name] for name in COPIED} for side in sides],
                "change": None if reason else _change(*sides),
            }
        )
    order = {metric: place for place, metric in enumerate(METRICS)}
    return sorted(rows, key=lambda row: order.get(row["metric"], len(order)))


def _key(gap: Mapping[str, Any]) -> tuple[Any, ...]:
    return (gap["left"], gap["right"], gap["budget"], gap["metric"], gap["post_hoc"])


def _turned(gap: Mapping[str, Any]) -> dict[str, Any]:
    """The same gap as right − left."""
    minus = {name: -gap[name] if is_number(gap[name]) else None for name in ("mean", "ci_low", "ci_high")}
    per_seed = {seed: -value for seed, value in gap["per_seed"].items()}
    ends = {"mean": minus["mean"], "ci_low": minus["ci_high"], "ci_high": minus["ci_low"]}
    return {**gap, "left": gap["right"], "right": gap["left"], **ends, "per_seed": per_seed}


def _change(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The second gap less the first, with Welch's interval over seeds taken as independent; None without both."""
    if one is None or other is None or not one["n"] or not other["n"]:
        return None
    mean, low, high = welch_interval(one["per_seed"].values(), other["per_seed"].values(), CONFIDENCE)
    return {"mean": mean, "ci_low": low, "ci_high": high}


_SAID = {
    *("verdict", "reason", "p", "p_adjusted", "contrasts", "post_hoc", "post_hoc_contrasts", "marks", "matches"),
    *("budget", "budgets"),  # the largest of a study is another number, not another claim
}
"""What a claim in the results was found to be, beside what it declares."""


def _claim_rows(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row per claim of either study: what it declares where both say the same, and each verdict with its marks."""
    sides = [{claim["id"]: claim for claim in one["claims"]} for one in (left, right)]
    rows = []
    for name in dict.fromkeys((*sides[0], *sides[1])):
        found = [side.get(name) for side in sides]
        declared = [claim and {key: claim[key] for key in claim if key not in _SAID} for claim in found]
        rows.append(
            {
                "id": name,
                "same_claim": None if None in declared else declared[0] == declared[1],
                "verdicts": [claim and claim["verdict"] for claim in found],
                "marks": [list(claim["marks"]) if claim else None for claim in found],
            }
        )
    return rows
