"""`verdict` against hand-worked studies of three seeds, intervals, closed forms and the array code of `stats`."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from equipoise import stats
from equipoise.spec.claims import EquivalentClaim, LowerClaim
from equipoise.verdict import Cell, Verdict, judge, table

BUDGET = 1000
THREE = (0, 1, 2)

# The published experiment (best validation loss, three seeds) as three seeds with the published sd of each arm and of
# both paired gaps (sd(a − b)² = sd(a)² + sd(b)² − 2·r·sd(a)·sd(b) fixes r) and means that round to the published ones.
UNIT = np.array([-1.0, 0.0, 1.0])
CROSS = np.array([1.0, -2.0, 1.0]) / math.sqrt(3)


def arm(mean: float, sd: float, gap_sd: float) -> dict[int, float]:
    """Three values with this mean and sd whose difference to the MoE's has `gap_sd`."""
    r = (sd**2 + 0.0020**2 - gap_sd**2) / (2 * sd * 0.0020)
    return dict(enumerate((mean + sd * (r * UNIT + math.sqrt(1 - r * r) * CROSS)).tolist()))


PUBLISHED = {
    "moe": dict(enumerate((1.57876 + 0.0020 * UNIT).tolist())),
    "dense-active": arm(1.65454, 0.0012, 0.0021),
    "dense-total": arm(1.56076, 0.0025, 0.0020),
}


def p_t2(t: float) -> float:
    return 0.5 + t / (2 * math.sqrt(2 + t * t))


def cells(arms: Mapping[str, Mapping[int, float]], **facts: Any) -> dict[tuple[str, int], Cell]:
    """One budget, one metric; `facts` go to the arm "left"."""
    return {
        (name, BUDGET): Cell(values={"val_loss": values}, **(facts if name == "left" else {}))
        for name, values in arms.items()
    }


def differing(*differences: float) -> dict[str, dict[int, float]]:
    """Arms "left" and "right" with these differences, one a seed."""
    right = [2.0 + 0.25 * seed for seed in range(len(differences))]
    return {
        "left": {seed: right[seed] + d for seed, d in enumerate(differences)},
        "right": dict(enumerate(right)),
    }


def lower(id: str = "c", left: str | tuple[str, ...] = "left", right: str = "right", **fields: Any) -> LowerClaim:
    return LowerClaim(id=id, left=left, right=right, **fields)


def equivalent(id: str = "c", left: str | tuple[str, ...] = "left", **fields: Any) -> EquivalentClaim:
    return EquivalentClaim(id=id, left=left, right="right", **fields)


def one(
    claim: LowerClaim | EquivalentClaim,
    runs: Mapping[tuple[str, int], Cell],
    seeds: Sequence[int] = THREE,
    **how: Any,
) -> Verdict:
    (verdict,) = judge([claim], runs, seeds=seeds, budgets=[BUDGET], **how)
    return verdict


# ------------------------------------------------------------------------------------------------ the yardstick


def test_the_published_gaps_are_supported_and_refuted() -> None:
    runs = {(name, BUDGET): Cell(values={"best_val_loss": values}) for name, values in PUBLISHED.items()}
    for name, values in PUBLISHED.items():
        published = {"moe": (1.5788, 0.0020), "dense-active": (1.6545, 0.0012), "dense-total": (1.5608, 0.0025)}
        mean, sd, _ = stats.mean_sd(values.values())
        assert (mean, sd) == (pytest.approx(published[name][0], abs=5e-5), pytest.approx(published[name][1]))
    claims = [
        lower("active", "moe", "dense-active", metric="best_val_loss"),
        lower("total", "moe", "dense-total", metric="best_val_loss"),
    ]
    active, total = judge(claims, runs, seeds=THREE, budgets=[BUDGET])
    contrast = active.contrasts[0].contrast
    assert (contrast.mean, contrast.sd) == (pytest.approx(-0.0758, abs=5e-5), pytest.approx(0.0021))
    assert active.verdict == "supported"
    assert active.p["sup"] == pytest.approx(p_t2(-0.07578 / (0.0021 / math.sqrt(3))))  # 0.000128
    assert active.p_adjusted["sup"] == pytest.approx(2 * active.p["sup"])
    assert active.reason == (
        "moe is lower than dense-active by 0.0758 nats per token (unadjusted 95 % interval of the difference −0.0810 "
        "to −0.0706, n = 3); the one-sided test gives p = 0.000128, Holm-adjusted 0.000256 ≤ 0.05 (over 2 claims)"
    )
    assert (total.contrasts[0].contrast.mean, total.contrasts[0].contrast.sd) == pytest.approx((0.0180, 0.0020))
    assert total.verdict == "refuted"
    assert total.p["ref"] == pytest.approx(p_t2(-0.0180 / (0.0020 / math.sqrt(3))))  # 0.002045
    assert total.reason == (
        "moe is higher than dense-total by 0.0180 nats per token (unadjusted 95 % interval of the difference 0.0130 "
        "to 0.0230, n = 3); the one-sided test of the opposite gives p = 0.00204, Holm-adjusted 0.00409 ≤ 0.05 "
        "(over 2 claims)"
    )


def test_pilot_gap_is_supported_alone_and_inconclusive_among_five() -> None:
    """−0.057 ± 0.027 at n = 3: t = −3.657, p = 0.0337; times 5 it is 0.168."""
    runs = cells(differing(-0.084, -0.057, -0.030))
    alone = one(lower(), runs)
    assert alone.verdict == "supported"
    assert alone.p["sup"] == pytest.approx(p_t2(-0.057 / (0.027 / math.sqrt(3))), rel=1e-6)
    assert alone.reason.endswith("; the one-sided test gives p = 0.0337 ≤ 0.05")
    five = judge([lower(f"c{i}") for i in range(5)], runs, seeds=THREE, budgets=[BUDGET])
    assert {verdict.verdict for verdict in five} == {"inconclusive"}
    assert five[0].p_adjusted["sup"] == pytest.approx(5 * alone.p["sup"])
    assert five[0].reason == (
        "left is lower than right by 0.0570 nats per token (unadjusted 95 % interval of the difference −0.1241 to "
        "0.0101, n = 3); neither the claim (p = 0.0337, Holm-adjusted 0.168) nor its opposite (p = 0.966, "
        "Holm-adjusted 1) reaches 0.05 (over 5 claims); the noise floor of these seeds is 0.0455"
    )


# ------------------------------------------------------------------------------------------------ lower


@settings(max_examples=150)
@given(
    differences=st.lists(st.floats(-0.2, 0.1), min_size=3, max_size=7),
    margin=st.sampled_from([0.0, 0.01, 0.05]),
)
def test_one_lower_claim_is_supported_exactly_when_the_90_percent_interval_lies_below(
    differences: list[float], margin: float
) -> None:
    arms = differing(*differences)
    interval = stats.paired_contrast(arms["left"], arms["right"], 0.90)
    assert interval.ci_low is not None and interval.ci_high is not None
    assume(min(abs(interval.ci_high + margin), abs(interval.ci_low + margin)) > 1e-9)
    verdict = one(lower(margin=margin), cells(arms), range(len(differences)))
    assert (verdict.verdict == "supported") == (interval.ci_high < -margin)
    assert (verdict.verdict == "refuted") == (interval.ci_low > -margin)


def test_margin_of_lower() -> None:
    arms = cells(differing(-0.011, -0.010, -0.009))
    assert one(lower(), arms).verdict == "supported"
    refuted = one(lower(margin=0.02), arms)
    assert refuted.verdict == "refuted"
    assert refuted.p["ref"] == pytest.approx(p_t2(-0.010 / (0.001 / math.sqrt(3))), rel=1e-6)
    assert "the one-sided test of a lead below 0.02 gives p = 0.00166 ≤ 0.05" in refuted.reason
    supported = one(lower(margin=0.005), arms)
    assert "the one-sided test of a lead above 0.005 gives p = " in supported.reason


def test_lower_asks_supported_then_refuted_then_equivalent() -> None:
    clear, level = cells(differing(-0.011, -0.010, -0.009)), cells(differing(-0.011, 0.0, 0.011))
    assert one(lower(equivalence_margin=0.05), clear).verdict == "supported"  # and equivalent, which is asked later
    assert one(lower(margin=0.02, equivalence_margin=0.05), clear).verdict == "refuted"
    both = one(lower(equivalence_margin=0.05), level)
    assert both.verdict == "equivalent"
    assert both.p["eq"] == pytest.approx(p_t2(-0.05 / (0.011 / math.sqrt(3))), rel=1e-6)
    assert both.reason.startswith("left equals right (unadjusted 95 % interval of the difference −0.0273 to 0.0273, ")
    assert both.reason.endswith("; the larger of the two one-sided tests within ±0.05 gives p = 0.00788 ≤ 0.05")
    none = one(lower(equivalence_margin=0.001), level)
    assert none.verdict == "inconclusive"
    assert "nor equivalence within ±0.001 (p = " in none.reason
    assert "eq" not in one(lower(), level).p


# ------------------------------------------------------------------------------------------------ equivalent


def test_equivalent_supported_refuted_and_neither() -> None:
    close = one(equivalent(equivalence_margin=0.02), cells(differing(0.002, 0.003, 0.004)))
    assert close.verdict == "supported"
    assert close.p["sup"] == pytest.approx(p_t2((0.003 - 0.02) / (0.001 / math.sqrt(3))), rel=1e-6)
    assert set(close.p) == {"sup", "ref"}
    assert close.reason.endswith("; the larger of the two one-sided tests within ±0.02 gives p = 0.000576 ≤ 0.05")
    far = one(equivalent(equivalence_margin=0.02), cells(differing(-0.052, -0.050, -0.048)))
    assert far.verdict == "refuted"
    assert far.p["ref"] == pytest.approx(2 * p_t2(-0.03 / (0.002 / math.sqrt(3))), rel=1e-6)
    assert "; twice the smaller of the two one-sided tests beyond ±0.02 gives p = 0.00148 ≤ 0.05" in far.reason
    noisy = one(equivalent(equivalence_margin=0.02), cells(differing(-0.05, 0.01, 0.04)))
    assert noisy.verdict == "inconclusive"
    assert "; neither the claim (p = " in noisy.reason


# ------------------------------------------------------------------------------------------------ lists


def many(*means: float, sd: float = 0.01) -> dict[tuple[str, int], Cell]:
    """Arms a, b, c … with these mean differences to "right"."""
    right = {0: 2.0, 1: 2.5, 2: 1.5}
    arms = {"right": right}
    for name, mean in zip("abcdef", means, strict=False):
        arms[name] = {seed: right[seed] + mean + sd * (seed - 1) for seed in right}
    return cells(arms)


def test_a_list_holds_only_if_every_member_does() -> None:
    verdict = one(lower(left=("a", "b", "c")), many(-0.10, -0.06, -0.20))
    assert verdict.verdict == "supported"
    assert verdict.p["sup"] == pytest.approx(p_t2(-0.06 / (0.01 / math.sqrt(3))), rel=1e-6)  # the largest
    assert [pair.left for pair in verdict.contrasts] == ["a", "b", "c"]
    assert verdict.reason.startswith("of the 3 left arms b decides: b is lower than right by 0.0600 nats per token (")
    assert one(lower(left=("a", "b", "c")), many(-0.10, -0.01, -0.20)).verdict == "inconclusive"


def test_a_list_is_refuted_by_one_member_at_a_price() -> None:
    verdict = one(lower(left=("a", "b", "c")), many(-0.10, 0.06, -0.20))
    assert verdict.verdict == "refuted"
    assert verdict.p["ref"] == pytest.approx(3 * p_t2(-0.06 / (0.01 / math.sqrt(3))), rel=1e-6)
    assert verdict.reason.startswith("of the 3 left arms b decides: b is higher than right by 0.0600")
    assert "; the one-sided test of the opposite, times 3 arms, gives p = 0.0137 ≤ 0.05" in verdict.reason
    alone, listed = 0.020, ("a", "b", "c")  # p = 0.037 alone, 0.112 as one of three
    assert one(lower(left="b"), many(-0.10, alone, -0.20)).verdict == "refuted"
    assert one(lower(left=listed), many(-0.10, alone, -0.20)).verdict == "inconclusive"
    assert one(lower(left=listed), many(-0.1, -0.1, -0.1)).p["ref"] == 1.0  # 3 × 0.998, capped


def test_a_list_of_equivalent_arms() -> None:
    claim = equivalent(left=("a", "b"), equivalence_margin=0.05)
    assert one(claim, many(0.0, 0.01)).verdict == "supported"
    verdict = one(claim, many(0.0, 0.2))
    assert verdict.verdict == "refuted"
    assert verdict.p["ref"] == pytest.approx(2 * 2 * p_t2(-0.15 / (0.01 / math.sqrt(3))), rel=1e-6)
    both = one(lower(left=("a", "b"), equivalence_margin=0.05), many(0.003, -0.003))
    assert both.verdict == "equivalent"
    assert both.p["eq"] == pytest.approx(p_t2((0.003 - 0.05) / (0.01 / math.sqrt(3))), rel=1e-6)


# ------------------------------------------------------------------------------------------------ no spread


def test_without_spread_the_side_decides() -> None:
    assert one(lower(), cells(differing(-0.1, -0.1, -0.1))).verdict == "supported"
    assert one(lower(), cells(differing(0.1, 0.1, 0.1))).verdict == "refuted"
    equal = one(lower(), cells(differing(0.0, 0.0, 0.0)))
    assert equal.verdict == "inconclusive"
    assert equal.p == {"sup": 1.0, "ref": 1.0}
    assert equal.reason == (
        "left equals right (unadjusted 95 % interval of the difference 0.0000 to 0.0000, n = 3); neither the claim "
        "(p = 1) nor its opposite (p = 1) reaches 0.05; the noise floor of these seeds is 0.0000"
    )
    border = one(lower(margin=0.1), cells(differing(-0.1, -0.1, -0.1)))
    assert border.p == {"sup": 1.0, "ref": 1.0}
    assert one(equivalent(equivalence_margin=0.1), cells(differing(0.1, 0.1, 0.1))).p == {"sup": 1.0, "ref": 1.0}
    assert one(equivalent(equivalence_margin=0.1), cells(differing(0.0, 0.0, 0.0))).verdict == "supported"


# ------------------------------------------------------------------------------------------------ texts and form


def test_bits_per_byte_have_their_unit_and_small_gaps_their_digits() -> None:
    runs = {("left", BUDGET): Cell(values={"val_bpb": dict.fromkeys(THREE, 0.5)})}
    runs["right", BUDGET] = Cell(values={"val_bpb": dict.fromkeys(THREE, 0.50002)})
    verdict = one(lower(metric="val_bpb"), runs)
    assert verdict.reason.startswith("left is lower than right by 0.000020 bits per byte (unadjusted 95 % interval of ")


def test_an_end_that_rounds_to_zero_has_no_sign() -> None:
    sd = 0.10003 * math.sqrt(3) / 4.302653  # the lower end is −0.00003
    verdict = one(lower(), cells(differing(0.1 - sd, 0.1, 0.1 + sd)))
    assert "interval of the difference 0.0000 to 0.2000, n = 3)" in verdict.reason


def test_a_p_near_alpha_is_never_rounded_across_it() -> None:
    """sd chosen so that p is 0.050003: three digits would print 0.05, which reads as reached."""
    t = -2.91989  # just short of t(0.05, 2) = −2.919986
    p = p_t2(t)
    assert 0.05 < p < 0.05001
    sd = 0.05 * math.sqrt(3) / -t
    verdict = one(lower(), cells(differing(-0.05 - sd, -0.05, -0.05 + sd)))
    assert verdict.verdict == "inconclusive"
    assert "neither the claim (p = 0.050003)" in verdict.reason


def test_alpha_is_used_everywhere() -> None:
    runs = cells(differing(-0.084, -0.057, -0.030))
    strict = one(lower(), runs, alpha=0.01)
    assert strict.verdict == "inconclusive"
    assert " reaches 0.01; the noise floor of these seeds is 0.1086" in strict.reason  # t(0.99, 2) = 6.9646
    with pytest.raises(ValueError, match=r"^alpha = 1.5 is not accepted; expected between 0 and 1$"):
        one(lower(), runs, alpha=1.5)


def test_table_is_plain_json_of_the_published_form() -> None:
    claim = lower("claim", ("left",), margin=0.01, equivalence_margin=0.5)
    entry = table(one(claim, cells(differing(-0.11, -0.10, -0.09))))
    assert json.loads(json.dumps(entry, allow_nan=False)) == entry
    assert {key: entry[key] for key in ("id", "kind", "left", "right", "metric", "budget", "verdict")} == {
        "id": "claim",
        "kind": "lower",
        "left": ["left"],
        "right": "right",
        "metric": "val_loss",
        "budget": BUDGET,
        "verdict": "supported",
    }
    assert (entry["margin"], entry["equivalence_margin"], entry["post_hoc"], entry["marks"]) == (0.01, 0.5, False, [])
    assert set(entry["p"]) == set(entry["p_adjusted"]) == {"sup", "ref", "eq"}
    (contrast,) = entry["contrasts"]
    assert (contrast["left"], contrast["right"], contrast["budget"], contrast["n"]) == ("left", "right", BUDGET, 3)
    assert contrast["per_seed"] == pytest.approx({"0": -0.11, "1": -0.10, "2": -0.09})
    held = table(one(equivalent(equivalence_margin=0.5), {}))
    assert held["p"] == held["p_adjusted"] == {"sup": None, "ref": None, "eq": None}
    assert (held["margin"], held["contrasts"][0]["mean"]) == (None, None)
    assert json.loads(json.dumps(held, allow_nan=False)) == held


def test_no_claims_no_verdicts() -> None:
    assert judge([], {}, seeds=THREE, budgets=[BUDGET]) == ()


def test_judging_simulated_studies_agrees_with_the_array_code() -> None:
    """What is simulated at scale in the tests of `stats` is what judges: 300 studies of two claims, one by one."""
    differences = np.random.default_rng(7).normal([[0.0], [-0.05]], 0.02, size=(300, 2, 3))
    p = stats.p_below(differences.mean(axis=-1), differences.std(axis=-1, ddof=1), 3, 0.0)
    expected = (stats.holm(p) <= 0.05).tolist()
    assert 0.3 < np.mean(expected) < 0.7
    claims = [lower("a", "a"), lower("b", "b")]
    for study, supported in zip(differences, expected, strict=True):
        arms = {name: dict(enumerate(row.tolist())) for name, row in zip("ab", study, strict=True)}
        verdicts = judge(claims, cells({**arms, "right": dict.fromkeys(THREE, 0.0)}), seeds=THREE, budgets=[BUDGET])
        assert [verdict.verdict == "supported" for verdict in verdicts] == supported


def test_judging_loads_no_torch() -> None:
    code = "import sys, equipoise.verdict; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
