"""Claims × values per seed → verdicts: supported, refuted, equivalent or inconclusive, each with a sentence of reason.

Not for: reading run directories (the caller hands over plain values) nor for printing. The arithmetic is in `stats`;
here is only what a claim means, which runs may carry it, and how the claims of a study share one error rate.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from equipoise import stats
from equipoise.config import dump
from equipoise.spec.claims import EquivalentClaim, LowerClaim, left_arms

AnyClaim = LowerClaim | EquivalentClaim
Answer = Literal["supported", "refuted", "equivalent", "inconclusive"]
Lost = Literal["missing", "started", "interrupted", "diverged", "broken"]
PValues = Mapping[str, float]
"""p by test: "sup" for the claim, "ref" against it, "eq" for equivalence; a test that was not made is absent."""

MIN_SEEDS: Final = 3
"""Fewer paired seeds give no verdict: at two, t has one degree of freedom and must exceed 6.3 for p ≤ 0.05."""

ANSWERS: Final[Mapping[str, Answer]] = {"sup": "supported", "ref": "refuted", "eq": "equivalent"}
"""What each test answers, in the order in which they are asked."""

UNITS: Final = {"val_loss": "nats per token", "best_val_loss": "nats per token", "val_bpb": "bits per byte"}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What is known of the runs of one arm at one budget."""

    values: Mapping[str, Mapping[int, float]]
    """Metric → seed → value."""
    lost: Mapping[int, Lost] = field(default_factory=dict)
    """Seeds whose run is not complete, and why; values they may have are ignored."""
    collapsed: Collection[int] = ()
    """Seeds whose routing collapsed."""


@dataclass(frozen=True, kw_only=True)
class ArmContrast:
    """A contrast, the two arms it is between, and its own tests."""

    left: str
    right: str
    budget: int
    contrast: stats.Contrast
    p: PValues
    """The claim's tests for this left arm alone, unadjusted; empty below MIN_SEEDS."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The answer to one claim and all it rests on."""

    claim: AnyClaim
    budget: int
    """The budget it was judged at; "largest" is the largest locked one."""
    post_hoc: bool
    """Made after the first finished run: judged in a family of its own."""
    verdict: Answer
    reason: str
    """One sentence for a reader."""
    held: tuple[str, ...]
    """Why it was not judged, which makes it inconclusive; empty when it was."""
    p: PValues
    """Over all left arms; empty when held."""
    p_adjusted: PValues
    """Holm-adjusted over the claims of the family."""
    contrasts: tuple[ArmContrast, ...]
    """What was judged, one per left arm."""
    post_hoc_contrasts: tuple[ArmContrast, ...]
    """The same with seeds or a larger budget added after the lock: shown beside, never judged."""
    marks: tuple[str, ...]
    """What must stand beside the verdict: post hoc, lost run, collapsed, repeated data, more than 4 epochs."""


def judge(
    claims: Sequence[AnyClaim],
    cells: Mapping[tuple[str, int], Cell],
    *,
    seeds: Sequence[int],
    budgets: Sequence[int],
    alpha: float = 0.05,
    epochs: Mapping[int, float] | None = None,
    post_hoc: Collection[str] = (),
    locked_seeds: Sequence[int] | None = None,
    locked_budgets: Sequence[int] | None = None,
) -> tuple[Verdict, ...]:
    """A verdict per claim, in the order of the claims.

    `cells` maps (arm, budget) to its runs; a seed of `seeds` without a value there counts as a lost run. `epochs` maps
    a budget to its passes over the training data. Locked claims are judged on `locked_seeds` and `locked_budgets`
    (None: all) and Holm-adjusted among themselves. A claim whose id is in `post_hoc`, or whose budget was not locked,
    is judged on everything, in a family of its own. Raises ValueError for an alpha outside (0, 1).
    """
    locked_seeds = seeds if locked_seeds is None else locked_seeds
    locked_budgets = budgets if locked_budgets is None else locked_budgets
    drafts = []
    for claim in claims:
        late = claim.id in post_hoc or (claim.budget != "largest" and claim.budget not in locked_budgets)
        last = max(budgets) if claim.budget == "largest" else claim.budget
        budget = last if late or claim.budget != "largest" else max(locked_budgets)
        judged = seeds if late else locked_seeds
        beside = [at for at, new in ((budget, set(seeds) > set(judged)), (last, last != budget)) if new]
        draft = _draft(claim, cells, judged, budget, alpha, late, (epochs or {}).get(budget, 0.0))
        extra = tuple(pair for at in beside for pair in _contrasts(claim, cells, seeds, at, alpha))
        drafts.append(replace(draft, post_hoc_contrasts=extra))
    families = [_answer([draft for draft in drafts if draft.post_hoc == late], alpha) for late in (False, True)]
    answered = {verdict.claim.id: verdict for family in families for verdict in family}
    return tuple(answered[claim.id] for claim in claims)


def table(verdict: Verdict) -> dict[str, Any]:
    """The verdict as plain JSON values: an entry of "claims" in results.json; a test that was not made is null."""
    claim = verdict.claim

    def contrasts(pairs: Iterable[ArmContrast]) -> list[dict[str, Any]]:
        return [{"left": p.left, "right": p.right, "budget": p.budget, **dump(p.contrast)} for p in pairs]

    return {
        "id": claim.id,
        "kind": claim.kind,
        "left": list(left_arms(claim)),
        "right": claim.right,
        "metric": claim.metric,
        "budget": verdict.budget,
        "margin": claim.margin if isinstance(claim, LowerClaim) else None,
        "equivalence_margin": claim.equivalence_margin,
        "allow_collapsed": claim.allow_collapsed,
        "post_hoc": verdict.post_hoc,
        "verdict": verdict.verdict,
        "reason": verdict.reason,
        "p": {test: verdict.p.get(test) for test in ANSWERS},
        "p_adjusted": {test: verdict.p_adjusted.get(test) for test in ANSWERS},
        "contrasts": contrasts(verdict.contrasts),
        "post_hoc_contrasts": contrasts(verdict.post_hoc_contrasts),
        "marks": list(verdict.marks),
    }


# ------------------------------------------------------------------------------------------------ one claim


def _draft(
    claim: AnyClaim,
    cells: Mapping[tuple[str, int], Cell],
    seeds: Sequence[int],
    budget: int,
    alpha: float,
    post_hoc: bool,
    epochs: float,
) -> Verdict:
    """The claim with its p-values and marks, still inconclusive: the family has to be known first."""
    contrasts = _contrasts(claim, cells, seeds, budget, alpha)
    lost, collapsed = [], []
    for arm in (*left_arms(claim), claim.right):
        cell = _cell(cells, arm, budget)
        lost += _lost(arm, cell, claim.metric, seeds)
        fallen = [seed for seed in seeds if seed in cell.collapsed]
        collapsed += [f"routing collapsed in {arm} {_seeds(fallen)}"] if fallen else []
    held = lost + ([] if claim.allow_collapsed else collapsed)
    fewest = min(pair.contrast.n for pair in contrasts)
    if fewest < MIN_SEEDS:
        held.append(f"a verdict needs {MIN_SEEDS} seeds with both arms, here {'is' if fewest == 1 else 'are'} {fewest}")
    marks = {
        "post hoc": post_hoc,
        "lost run": bool(lost),
        "collapsed": bool(collapsed),
        "repeated data": epochs > 1,
        "more than 4 epochs": epochs > 4,
    }
    return Verdict(
        claim=claim,
        budget=budget,
        post_hoc=post_hoc,
        verdict="inconclusive",
        reason="",
        held=tuple(held),
        p={} if held else _combined([pair.p for pair in contrasts]),
        p_adjusted={},
        contrasts=contrasts,
        post_hoc_contrasts=(),
        marks=tuple(mark for mark, applies in marks.items() if applies),
    )


def _cell(cells: Mapping[tuple[str, int], Cell], arm: str, budget: int) -> Cell:
    return cells.get((arm, budget), Cell(values={}))


def _contrasts(
    claim: AnyClaim, cells: Mapping[tuple[str, int], Cell], seeds: Iterable[int], budget: int, alpha: float
) -> tuple[ArmContrast, ...]:
    """One contrast per left arm, over those of the seeds whose runs are complete in both arms."""

    def usable(arm: str) -> dict[int, float]:
        cell = _cell(cells, arm, budget)
        values = cell.values.get(claim.metric, {})
        return {s: values[s] for s in seeds if s in values and s not in cell.lost and math.isfinite(values[s])}

    pairs = []
    for arm in left_arms(claim):
        contrast = stats.paired_contrast(usable(arm), usable(claim.right), alpha=alpha)
        p = _tests(claim, contrast) if contrast.n >= MIN_SEEDS else {}
        pairs.append(ArmContrast(left=arm, right=claim.right, budget=budget, contrast=contrast, p=p))
    return tuple(pairs)


def _lost(arm: str, cell: Cell, metric: str, seeds: Iterable[int]) -> list[str]:
    """What keeps the arm from being whole: one text for all seeds of the same fate."""
    values = cell.values.get(metric, {})
    fates: dict[str, list[int]] = {}
    for seed in seeds:
        if seed in cell.lost or seed not in values:
            status = cell.lost.get(seed, "missing")
            fates.setdefault("unfinished" if status == "started" else status, []).append(seed)
        elif not math.isfinite(values[seed]):
            fates.setdefault(f"without a finite {metric}", []).append(seed)
    texts = []
    for fate, which in fates.items():
        verb = "" if fate == "diverged" else "is " if len(which) == 1 else "are "
        texts.append(f"{arm} {_seeds(which)} {verb}{fate}")
    return texts


def _tests(claim: AnyClaim, contrast: stats.Contrast) -> PValues:
    """The tests of one left arm."""
    mean, sd, n = contrast.mean, contrast.sd, contrast.n
    assert mean is not None and sd is not None
    if isinstance(claim, EquivalentClaim):
        within, outside = (test(mean, sd, n, claim.equivalence_margin) for test in (stats.p_within, stats.p_outside))
        p = {"sup": within, "ref": outside}
    else:
        p = {"sup": stats.p_below(mean, sd, n, -claim.margin), "ref": stats.p_above(mean, sd, n, -claim.margin)}
        if claim.equivalence_margin is not None:
            p["eq"] = stats.p_within(mean, sd, n, claim.equivalence_margin)
    return {test: float(value) for test, value in p.items()}


def _combined(members: Sequence[PValues]) -> PValues:
    """The claim holds only if every member does, and fails if any one does (Bonferroni over the members)."""
    largest = {test: max(member[test] for member in members) for test in members[0]}
    return largest | {"ref": min(1.0, len(members) * min(member["ref"] for member in members))}


# ------------------------------------------------------------------------------------------------ a family of claims


def _answer(family: Sequence[Verdict], alpha: float) -> list[Verdict]:
    """Holm over the family, separately for each test; a test that was not made enters with 1."""
    adjusted = {test: stats.holm([draft.p.get(test, 1.0) for draft in family]) for test in ANSWERS}
    verdicts = []
    for index, draft in enumerate(family):
        p_adjusted = {test: float(adjusted[test][index]) for test in ANSWERS if test in draft.p}
        answers = (answer for test, answer in ANSWERS.items() if p_adjusted.get(test, 1.0) <= alpha)
        verdict = replace(draft, p_adjusted=p_adjusted, verdict=next(answers, "inconclusive"))
        verdicts.append(replace(verdict, reason=_reason(verdict, len(family), alpha)))
    return verdicts


# ------------------------------------------------------------------------------------------------ in words


def _reason(verdict: Verdict, family: int, alpha: float) -> str:
    claim, contrasts = verdict.claim, verdict.contrasts
    if verdict.held:
        seen = "; ".join(_difference(pair, claim.metric) for pair in contrasts)
        return f"not judged: {', and '.join(verdict.held)}; {seen}"
    # The arm that decides: the weakest where all must hold, the strongest witness where one refutes.
    if verdict.verdict == "refuted":
        pair = min(contrasts, key=lambda pair: pair.p["ref"])
    else:
        pair = max(contrasts, key=lambda pair: pair.p["eq" if verdict.verdict == "equivalent" else "sup"])
    seen = _difference(pair, claim.metric)
    if len(contrasts) > 1:
        seen = f"of the {len(contrasts)} left arms {pair.left} decides: {seen}"

    def p_text(test: str) -> str:
        text = f"p = {_p(verdict.p[test], alpha)}"
        return text if family == 1 else f"{text}, Holm-adjusted {_p(verdict.p_adjusted[test], alpha)}"

    over = "" if family == 1 else f" (over {family} {'post hoc ' if verdict.post_hoc else ''}claims)"
    if verdict.verdict == "inconclusive":
        names = {"sup": "the claim", "ref": "its opposite", "eq": f"equivalence within ±{claim.equivalence_margin}"}
        tests = " nor ".join(f"{names[test]} ({p_text(test)})" for test in verdict.p)
        floor = _number(pair.contrast.noise_floor or 0.0, pair.contrast)
        return f"{seen}; neither {tests} reaches {alpha:g}{over}; the noise floor of these seeds is {floor}"
    test = next(test for test, answer in ANSWERS.items() if answer == verdict.verdict)
    times = f", times {len(contrasts)} arms," if len(contrasts) > 1 and test == "ref" else ""
    return f"{seen}; {_test_name(claim, test)}{times} gives {p_text(test)} ≤ {alpha:g}{over}"


def _test_name(claim: AnyClaim, test: str) -> str:
    if test == "eq" or (test == "sup" and isinstance(claim, EquivalentClaim)):
        return f"the larger of the two one-sided tests within ±{claim.equivalence_margin:g}"
    if isinstance(claim, EquivalentClaim):
        return f"twice the smaller of the two one-sided tests beyond ±{claim.equivalence_margin:g}"
    if claim.margin > 0:
        return f"the one-sided test of a lead {'above' if test == 'sup' else 'below'} {claim.margin:g}"
    return "the one-sided test" if test == "sup" else "the one-sided test of the opposite"


def _difference(pair: ArmContrast, metric: str) -> str:
    contrast = pair.contrast
    if contrast.mean is None:
        return f"no seed has both {pair.left} and {pair.right}"
    if abs(contrast.mean) <= stats.EQUAL:
        text = f"{pair.left} equals {pair.right}"
    else:
        way = "lower" if contrast.mean < 0 else "higher"
        text = f"{pair.left} is {way} than {pair.right} by {_number(abs(contrast.mean), contrast)} {UNITS[metric]}"
    if contrast.ci_low is None or contrast.ci_high is None:
        return f"{text} (n = {contrast.n})"
    interval = f"{_number(contrast.ci_low, contrast)} to {_number(contrast.ci_high, contrast)}"
    confidence = f"unadjusted {100 * contrast.confidence:g} % interval of the difference"
    return f"{text} ({confidence} {interval}, n = {contrast.n})"


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def _number(value: float, contrast: stats.Contrast) -> str:
    """Four decimals as published, or as many as the contrast's mean needs to show two digits; a true minus sign."""
    mean = abs(contrast.mean or 0.0)
    decimals = 4 if mean >= 0.001 or mean <= stats.EQUAL else 1 - math.floor(math.log10(mean))
    return f"{round(value, decimals) + 0.0:.{decimals}f}".replace("-", "−")  # + 0.0: a rounded −0 is 0


def _p(p: float, alpha: float) -> str:
    """Three significant digits, more where rounding would put p on the other side of alpha."""
    return next(text for digits in range(3, 18) if (float(text := f"{p:.{digits}g}") <= alpha) == (p <= alpha))
