"""The sentence under a verdict: what was measured, with its interval and n, and which test decided, in plain words.

Not for: reaching a verdict (`verdict`), nor for laying it out (`report`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from equipoise import stats
from equipoise.measures import MIN_SEEDS, ArmContrast, Cell, PValues, value_key
from equipoise.spec.claims import AnyClaim, EquivalentClaim, LargerClaim, LowerClaim, RoutingClaim, Step, TrendClaim
from equipoise.text import MINUS, short

UNITS: Final = {"val_loss": "nats per token", "best_val_loss": "nats per token", "val_bpb": "bits per byte"}
"""Units of the losses; routing diagnostics are named instead."""

NEEDED_BUDGETS: Final = {"trend": "at least 2 budgets", "faster": "1 budget, or at least 3"}
"""What a claim over budgets needs."""


def lost(arm: str, cell: Cell, claim: AnyClaim, seeds: Sequence[int], at: str) -> list[str]:
    """What keeps an arm from being whole at one budget: one text for all seeds of the same fate."""
    key = value_key(claim)
    values = cell.values.get(key, {})
    name = _what(claim) if isinstance(claim, RoutingClaim) else key
    fates: dict[str, list[int]] = {}
    for seed in seeds:
        if seed in cell.lost or (seed not in values and not isinstance(claim, RoutingClaim)):
            status = cell.lost.get(seed, "missing")
            fates.setdefault("unfinished" if status == "started" else status, []).append(seed)
        elif not math.isfinite(values.get(seed, math.nan)):
            fates.setdefault(f"without a finite {name}", []).append(seed)
    texts = []
    for fate, which in fates.items():
        verb = "" if fate == "diverged" else "is " if len(which) == 1 else "are "
        texts.append(f"{arm} {seeds_text(which)}{at} {verb}{fate}")
    return texts


def too_few(claim: AnyClaim, contrasts: Sequence[ArmContrast]) -> list[str]:
    """Why the contrasts cannot carry a verdict: too few budgets, too few seeds."""
    faults = []
    num_budgets = len(contrasts[0].budgets)
    if claim.kind in NEEDED_BUDGETS and (num_budgets < 2 if isinstance(claim, TrendClaim) else num_budgets == 2):
        verb = "is" if num_budgets == 1 else "are"
        faults.append(f"it needs {NEEDED_BUDGETS[claim.kind]}, here {verb} {num_budgets}")
    fewest = min(pair.contrast.n for pair in contrasts)
    if fewest < MIN_SEEDS:
        arms = "all arms" if isinstance(claim, LargerClaim) else "both arms"
        of = "" if isinstance(claim, RoutingClaim) else f" with {arms}"
        of += " at every budget" if num_budgets > 1 else ""
        faults.append(f"a verdict needs {MIN_SEEDS} seeds{of}, here {'is' if fewest == 1 else 'are'} {fewest}")
    return faults


def reason(
    claim: AnyClaim,
    contrasts: Sequence[ArmContrast],
    decided_by: str | None,
    held: Sequence[str],
    p: PValues,
    p_adjusted: PValues,
    *,
    family: int,
    post_hoc: bool,
    alpha: float,
) -> str:
    """The whole sentence. `decided_by` is the test that gave the answer, None for inconclusive; `family` its size."""
    if held:
        seen = "; ".join(seen_text(claim, pair) for pair in contrasts)
        return f"not judged: {', and '.join(held)}; {seen}"
    # The arm that decides: the weakest where all must hold, the strongest witness where one refutes.
    if decided_by == "ref":
        pair = min(contrasts, key=lambda pair: pair.p["ref"])
    else:
        pair = max(contrasts, key=lambda pair: pair.p["eq" if decided_by == "eq" else "sup"])
    seen = seen_text(claim, pair)
    many = "" if len(contrasts) == 1 else "left arms" if pair.than is None else "other steps"
    if many:
        decides = pair.left if pair.than is None else step_text(pair.than)
        seen = f"of the {len(contrasts)} {many} {decides} decides: {seen}"

    def p_text(test: str) -> str:
        text = f"p = {_p(p[test], alpha)}"
        return text if family == 1 else f"{text}, Holm-adjusted {_p(p_adjusted[test], alpha)}"

    over = "" if family == 1 else f" (over {family} {'post hoc ' if post_hoc else ''}claims)"
    if decided_by is None:
        names = {"sup": "the claim", "ref": "its opposite"}
        if isinstance(claim, LowerClaim):
            names["eq"] = f"equivalence within ±{claim.equivalence_margin}"
        tests = " nor ".join(f"{names[test]} ({p_text(test)})" for test in p)
        floor = _number(pair.contrast.noise_floor or 0.0, pair.contrast)
        what = "" if pair.statistic in ("difference", "curve_gap") else f" ({_floor_of(pair)})"
        return f"{seen}; neither {tests} reaches {alpha:g}{over}; the noise floor of these seeds is {floor}{what}"
    times = f", times {len(contrasts)} {many.split()[-1]}," if many and decided_by == "ref" else ""
    return f"{seen}; {_test_name(claim, decided_by)}{times} gives {p_text(decided_by)} ≤ {alpha:g}{over}"


def _floor_of(pair: ArmContrast) -> str:
    return {
        "lead_difference": "of a difference of leads",
        "slope": "of a slope",
        "log_ratio": "of ln of a ratio",
        "value": "a distance from the threshold",
    }[pair.statistic]


def _test_name(claim: AnyClaim, test: str) -> str:
    if isinstance(claim, EquivalentClaim):
        if test == "sup":
            return f"the larger of the two one-sided tests within ±{claim.equivalence_margin:g}"
        return f"twice the smaller of the two one-sided tests beyond ±{claim.equivalence_margin:g}"
    if isinstance(claim, LowerClaim):
        if test == "eq":
            return f"the larger of the two one-sided tests within ±{claim.equivalence_margin:g}"
        if claim.margin > 0:
            return f"the one-sided test of a lead {'above' if test == 'sup' else 'below'} {claim.margin:g}"
    return "the one-sided test" if test == "sup" else "the one-sided test of the opposite"


# ------------------------------------------------------------------------------------------------ what was seen


def seen_text(claim: AnyClaim, pair: ArmContrast) -> str:
    """What one contrast measured, with its unadjusted interval and n; a lone contrast as a sentence."""
    contrast = pair.contrast
    if contrast.mean is None:
        many = f" at all {len(pair.budgets)} budgets" if len(pair.budgets) > 1 else ""
        all_of = {1: "", 2: "both "}.get(len(pair.arms), "all of ")
        return f"no seed has {all_of}{joined(pair.arms)}{many}"
    text, of = {
        "difference": _difference,
        "lead_difference": _lead_difference,
        "slope": _slope,
        "log_ratio": _ratio,
        "curve_gap": _curve_gap,
        "value": _value,
    }[pair.statistic](claim, pair, contrast.mean)
    if contrast.ci_low is None or contrast.ci_high is None:
        return f"{text} (n = {contrast.n})"
    ends = (contrast.ci_low, contrast.ci_high)
    if pair.statistic == "log_ratio":
        low, high = (_factor(end) for end in ends)
    else:
        low, high = (_number(end, contrast) for end in ends)
    bounds = f"; a bound for {seeds_text(pair.bounds)}: below the target already at the smallest budget"
    tail = bounds if pair.bounds else ""
    confidence = f"unadjusted {100 * contrast.confidence:g} % interval of the {of}"
    return f"{text} ({confidence} {low} to {high}, n = {contrast.n}{tail})"


def _difference(claim: AnyClaim, pair: ArmContrast, mean: float) -> tuple[str, str]:
    metric = claim.metric
    what = f" in {metric} (mean over layers)" if metric not in UNITS else ""
    if abs(mean) <= stats.EQUAL:
        return f"{pair.left} equals {pair.right}{what}", "difference"
    way = "lower" if mean < 0 else "higher"
    unit = what or f" {UNITS[metric]}"
    return f"{pair.left} is {way} than {pair.right} by {_number(abs(mean), pair.contrast)}{unit}", "difference"


def _lead_difference(claim: AnyClaim, pair: ArmContrast, mean: float) -> tuple[str, str]:
    assert pair.than is not None
    lead = f"the lead of {pair.left} over {pair.right}, in {claim.metric},"
    of = "difference of leads"
    if abs(mean) <= stats.EQUAL:
        return f"{lead} equals that of {step_text(pair.than)}", of
    way = "larger" if mean > 0 else "smaller"
    size = f"{_number(abs(mean), pair.contrast)} {UNITS[claim.metric]}"
    return f"{lead} is {way} than that of {step_text(pair.than)} by {size}", of


def _slope(claim: AnyClaim, pair: ArmContrast, mean: float) -> tuple[str, str]:
    unit = f"{UNITS[claim.metric]} per unit of ln tokens"
    over = f"over {len(pair.budgets)} budgets from {short(pair.budgets[0])} to {short(pair.budgets[-1])} tokens"
    lead = f"the lead of {pair.left} over {pair.right}, in {claim.metric},"
    if abs(mean) <= stats.EQUAL:
        return f"{lead} neither grows nor narrows {over}", "slope"
    way = "grows" if mean > 0 else "narrows"
    return f"{lead} {way} by {_number(abs(mean), pair.contrast)} {unit} {over}", "slope"


def _ratio(claim: AnyClaim, pair: ArmContrast, mean: float) -> tuple[str, str]:
    over = f"on loss curves of {len(pair.budgets)} finished budgets"
    text = (
        f"{pair.left} needs {_factor(mean)} times the tokens {pair.right} needs for the same val_loss "
        f"(geometric mean over seeds, {over})"
    )
    return text, "ratio"


def _curve_gap(claim: AnyClaim, pair: ArmContrast, mean: float) -> tuple[str, str]:
    where = "on average along one training with identical schedules (a single budget: a gap, not a speed)"
    if abs(mean) <= stats.EQUAL:
        return f"{pair.left} equals {pair.right} {where}", "gap"
    way = "lower" if mean < 0 else "higher"
    size = f"{_number(abs(mean), pair.contrast)} nats per token"
    return f"{pair.left} is {way} than {pair.right} by {size} {where}", "gap"


def _value(claim: AnyClaim, pair: ArmContrast, mean: float) -> tuple[str, str]:
    assert isinstance(claim, RoutingClaim)
    threshold = f"{claim.threshold:g}".replace("-", MINUS)
    return (
        f"{_what(claim)} of {pair.left} is {_number(mean, pair.contrast)}, held against {threshold}",
        "value",
    )


def _what(claim: RoutingClaim) -> str:
    """A routing diagnostic in words."""
    layers = "mean over layers" if claim.layers == "mean" else "largest of any layer"
    when = "at the end" if claim.at_frac == 1 else f"after {100 * claim.at_frac:g} % of training"
    return f"{claim.metric} ({layers}, {when})"


def step_text(step: Step) -> str:
    """ "top-2 over balanced"."""
    return f"{step.left} over {step.right}"


def joined(names: Sequence[str]) -> str:
    """ "a", "a and b", or "a, b and c"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def seeds_text(seeds: Sequence[int]) -> str:
    """ "seed 1" or "seeds 1, 2"."""
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def _factor(log_ratio: float) -> str:
    """A ratio of budgets, three significant digits."""
    return f"{math.exp(log_ratio):.3g}" if log_ratio < 700 else "above 1e300"


def _number(value: float, contrast: stats.Contrast) -> str:
    """Four decimals as published, or as many as the contrast's mean needs to show two digits; a true minus sign."""
    mean = abs(contrast.mean or 0.0)
    decimals = 4 if mean >= 0.001 or mean <= stats.EQUAL else 1 - math.floor(math.log10(mean))
    return f"{round(value, decimals) + 0.0:.{decimals}f}".replace("-", MINUS)  # + 0.0: a rounded −0 is 0


def _p(p: float, alpha: float) -> str:
    """Three significant digits, more where rounding would put p on the other side of alpha."""
    return next(text for digits in range(3, 18) if (float(text := f"{p:.{digits}g}") <= alpha) == (p <= alpha))
