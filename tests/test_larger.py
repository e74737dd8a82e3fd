"""`larger`: one lead held against other leads, by hand, against SciPy's paired t test, and in everything shown."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from scipy import stats as scipy_stats

from equipoise import reasons
from equipoise.cli.plan import claim_text
from equipoise.cli.power import show_power
from equipoise.comparisons import contrast_pairs
from equipoise.config import dump, read_toml
from equipoise.figures.effects import contrast_label
from equipoise.power import plan_seeds
from equipoise.report import verdicts
from equipoise.spec.claims import LargerClaim, Step, claim_arms, claim_pairs
from equipoise.spec.study import parse_study
from equipoise.verdict import Cell, Verdict, judge, table

THREE = (0, 1, 2)
BUDGET = 1000
# A ladder a → b → c → d: c leads b by 0.30, 0.32, 0.28; b leads a by 0.10, 0.08, 0.12; d leads c by 0.01, −0.01, 0.03.
LADDER = {
    "a": (3.40, 3.50, 3.30),
    "b": (3.30, 3.42, 3.18),
    "c": (3.00, 3.10, 2.90),
    "d": (2.99, 3.11, 2.87),
}


def larger(*than: tuple[str, str], left: str = "c", right: str = "b", **fields: Any) -> LargerClaim:
    steps = tuple(Step(left=one, right=other) for one, other in than or (("b", "a"), ("d", "c")))
    return LargerClaim(id="main", left=left, right=right, than=steps, **fields)


def cells(arms: Any = LADDER, **facts: dict[str, Any]) -> dict[tuple[str, int], Cell]:
    return {
        (name, BUDGET): Cell(values={"val_loss": dict(enumerate(values))}, **facts.get(name, {}))
        for name, values in arms.items()
    }


def one(claim: LargerClaim, runs: dict[tuple[str, int], Cell] | None = None, **how: Any) -> Verdict:
    (verdict,) = judge([claim], cells() if runs is None else runs, **{"seeds": THREE, "budgets": [BUDGET], **how})
    return verdict


def p_t2(t: float) -> float:
    """P(T ≤ t) of Student's t with two degrees of freedom."""
    return 0.5 + t / (2 * math.sqrt(2 + t * t))


# ------------------------------------------------------------------------------------------------ verdicts


def test_two_leads_by_hand() -> None:
    """0.30 − 0.10, 0.32 − 0.08, 0.28 − 0.12: mean 0.20, sd 0.04."""
    verdict = one(larger(("b", "a")))
    (pair,) = verdict.contrasts
    assert list(pair.contrast.per_seed.values()) == pytest.approx([0.20, 0.24, 0.16])
    assert (pair.contrast.mean, pair.contrast.sd) == (pytest.approx(0.2), pytest.approx(0.04))
    assert verdict.p["sup"] == pytest.approx(p_t2(-0.2 / (0.04 / math.sqrt(3))))
    assert verdict.p["ref"] == pytest.approx(1 - verdict.p["sup"]) and "eq" not in verdict.p
    assert (verdict.verdict, pair.statistic, pair.than) == ("supported", "lead_difference", Step(left="b", right="a"))
    assert verdict.reason == (
        "the lead of c over b, in val_loss, is larger than that of b over a by 0.2000 nats per token (unadjusted 95 % "
        "interval of the difference of leads 0.1006 to 0.2994, n = 3); the one-sided test gives p = 0.00654 ≤ 0.05"
    )


def test_it_is_scipys_paired_t_test_of_the_two_leads() -> None:
    for than in (("b", "a"), ("d", "c"), ("d", "a")):
        leads = [
            [right - left for left, right in zip(LADDER[step[0]], LADDER[step[1]], strict=True)]
            for step in (("c", "b"), than)
        ]
        verdict = one(larger(than))
        assert verdict.p["sup"] == pytest.approx(scipy_stats.ttest_rel(*leads, alternative="greater").pvalue)
        assert verdict.p["ref"] == pytest.approx(scipy_stats.ttest_rel(*leads, alternative="less").pvalue)


def test_it_holds_only_if_the_lead_is_larger_than_every_other() -> None:
    """Intersection–union: the largest p, no price; the opposite is paid for once a step."""
    alone = {than: one(larger(than)).p for than in (("b", "a"), ("d", "c"))}
    both = one(larger())
    assert both.p["sup"] == max(p["sup"] for p in alone.values())
    assert both.p["ref"] == min(1.0, 2 * min(p["ref"] for p in alone.values()))
    assert both.verdict == "supported"
    assert both.reason.startswith("of the 2 other steps b over a decides: the lead of c over b, in val_loss, is larger")
    # the lead of d over a, 0.41 ± 0.02, is larger than that of c over b: one such step is enough to refute
    refuted = one(larger(("d", "c"), ("d", "a")))
    assert refuted.verdict == "refuted"
    assert refuted.p["ref"] == pytest.approx(2 * one(larger(("d", "a"))).p["ref"])
    assert "of the 2 other steps d over a decides: the lead of c over b, in val_loss, is smaller" in refuted.reason
    assert "the one-sided test of the opposite, times 2 steps, gives p = " in refuted.reason


def test_equal_leads_support_nothing() -> None:
    """Every seed's leads are 0.1, up to rounding: neither side."""
    steady = {"a": (3.3, 3.1, 2.7), "b": (3.2, 3.0, 2.6), "c": (3.1, 2.9, 2.5)}
    verdict = one(larger(("b", "a")), cells(steady))
    assert verdict.p == {"sup": 1.0, "ref": 1.0} and verdict.verdict == "inconclusive"
    assert "the lead of c over b, in val_loss, equals that of b over a (" in verdict.reason
    assert verdict.reason.endswith("the noise floor of these seeds is 0.0000 (of a difference of leads)")


def test_an_arm_of_another_step_holds_it_too() -> None:
    lost = one(larger(), cells(d={"lost": {1: "diverged"}}))
    assert lost.held == ("d seed 1 diverged", "a verdict needs 3 seeds with all arms, here are 2")
    assert [pair.contrast.n for pair in lost.contrasts] == [3, 2] and lost.marks == ("lost run",)
    fallen = one(larger(), cells(a={"collapsed": [2], "epochs": 1.5}))
    assert fallen.held == ("routing collapsed in a seed 2",) and fallen.marks == ("collapsed", "repeated data")
    allowed = one(larger(allow_collapsed=True), cells(a={"collapsed": [2]}))
    assert (allowed.verdict, allowed.marks) == ("supported", ("collapsed",))
    nothing = one(larger(("b", "a")), {})
    assert nothing.reason.endswith("no seed has all of c, b and a")


def test_what_is_added_later_is_shown_beside_it() -> None:
    more = {name: (*values, 3.0 - 0.2 * place) for place, (name, values) in enumerate(LADDER.items())}
    verdict = one(larger(), cells(more), seeds=(0, 1, 2, 3), locked_seeds=THREE)
    assert [pair.contrast.n for pair in (*verdict.contrasts, *verdict.post_hoc_contrasts)] == [3, 3, 4, 4]
    assert [pair.than for pair in verdict.post_hoc_contrasts] == [pair.than for pair in verdict.contrasts]
    late = one(larger(), post_hoc=["main"])
    assert late.post_hoc and late.marks == ("post hoc",)


# ------------------------------------------------------------------------------------------------ around it


def test_arms_and_pairs_of_it_are_named_once() -> None:
    claim = larger()
    assert claim_arms(claim) == ("c", "b", "a", "d")
    assert claim_pairs(claim) == (("c", "b"), ("b", "a"), ("d", "c"))


def test_it_is_plain_json_and_said_alike_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    entry = table(one(larger()))
    assert json.loads(json.dumps(entry, allow_nan=False)) == entry
    assert entry["than"] == [{"left": "b", "right": "a"}, {"left": "d", "right": "c"}]
    assert [contrast["than"] for contrast in entry["contrasts"]] == entry["than"]
    results = {"split": "validation", "arms": [{"name": name} for name in LADDER]}
    assert verdicts.sentence(results, entry) == (
        "the lead of c over b in validation loss is larger than that of b over a and that of d over c at 1k tokens"
    )
    for contrast in entry["contrasts"]:
        contrast |= {"dropped": [], "expected_n": 3, "collapsed": ["a"] if contrast["than"]["right"] == "a" else []}
    (card,) = verdicts.cards({**results, "claims": [{**entry, "matches": []}]})
    assert card.effects[0].pair == "lead of c over b − lead of b over a" and card.effects[0].named
    assert (card.effects[0].mean, card.effects[0].lower) == ("+0.2000", "–")
    assert contrast_label(entry["contrasts"][0]) == "c over b − b over a, collapsed"
    assert contrast_label(entry["contrasts"][1]) == "c over b − d over c"
    assert claim_text(dump(larger())) == "lead of c over b on val_loss larger than that of b over a, d over c"
    planned = plan_seeds({"name": "s", "alpha": 0.05, "claims": [entry], "gaps": []}, gap=0.05)
    assert [row["assumed"] for row in planned["contrasts"]] == [0.05, 0.05]
    assert [row["than"] for row in planned["contrasts"]] == entry["than"]
    show_power(planned)
    shown = " ".join(capsys.readouterr().out.split())
    assert "lead of c over b − lead of b over a" in shown and "a larger lead" in shown


def test_seeds_needed_are_those_of_scipys_noncentral_t() -> None:
    row = plan_seeds({"name": "s", "alpha": 0.05, "claims": [table(one(larger(("b", "a"))))], "gaps": []}, gap=0.05)
    (found,) = row["contrasts"]
    oracle = next(
        n
        for n in range(3, 99)
        if scipy_stats.nct.sf(scipy_stats.t.ppf(0.95, n - 1), n - 1, 0.05 / 0.04 * math.sqrt(n)) >= 0.8
    )
    assert found["seeds"] == oracle and found["tested"] == 0
    unassumed = plan_seeds({"name": "s", "alpha": 0.05, "claims": [table(one(larger(("b", "a"))))], "gaps": []})
    assert unassumed["contrasts"][0]["assumed"] == pytest.approx(0.2)


def test_names_in_sentences() -> None:
    assert [reasons.joined(names) for names in (("a",), ("a", "b"), ("a", "b", "c"))] == ["a", "a and b", "a, b and c"]


def test_its_steps_are_pairs_of_the_study(tiny_toml: str) -> None:
    toml = tiny_toml.replace("[[claims]]", '[arms.plain]\nmodel.ffn = { kind = "dense", d_ff = 32 }\n[[claims]]')
    start = toml.index("[[claims]]")
    claim = """
[[claims]]
id = "main"
kind = "larger"
left = "dense"
right = "plain"
than = [{ left = "moe", right = "dense" }]
"""
    spec = parse_study(read_toml(toml[:start] + claim, "x"))
    assert contrast_pairs(spec) == [("moe", "dense"), ("dense", "plain")]
