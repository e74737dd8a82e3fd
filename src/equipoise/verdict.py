"""Claims × values per seed → verdicts: supported, refuted, equivalent or inconclusive, each with a sentence of reason.

Not for: reading run directories (the caller hands over plain values), for what a claim measures (`measures`), for words
(`reasons`) nor for printing. Here is which runs may carry a claim, and how the claims of a study share one error rate.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from equipoise import reasons, stats
from equipoise.config import dump
from equipoise.measures import ArmContrast, Cell, PValues, cell_of, combined, measure
from equipoise.spec.claims import AnyClaim, FasterClaim, RoutingClaim, TrendClaim, claim_arms, left_arms, right_arm
from equipoise.text import short

Answer = Literal["supported", "refuted", "equivalent", "inconclusive"]

ANSWERS: Final[Mapping[str, Answer]] = {"sup": "supported", "ref": "refuted", "eq": "equivalent"}
"""What each test answers, in the order in which they are asked."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The answer to one claim and all it rests on."""

    claim: AnyClaim
    budgets: tuple[int, ...]
    """Those it was judged at, rising; "largest" is the largest locked one, `trend` and `faster` take all locked."""
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
    """What was judged, one per left arm, of `larger` one per other step."""
    post_hoc_contrasts: tuple[ArmContrast, ...]
    """The same with seeds or a larger budget added after the lock: shown beside, never judged."""
    marks: tuple[str, ...]
    """What must stand beside the verdict: post hoc, lost run, collapsed, bound, repeated data, more than 4 epochs."""

    @property
    def budget(self) -> int | None:
        """The one budget it was judged at; None for several."""
        return self.budgets[0] if len(self.budgets) == 1 else None


def judge(
    claims: Sequence[AnyClaim],
    cells: Mapping[tuple[str, int], Cell],
    *,
    seeds: Sequence[int],
    budgets: Sequence[int],
    alpha: float = 0.05,
    post_hoc: Collection[str] = (),
    locked_seeds: Sequence[int] | None = None,
    locked_budgets: Sequence[int] | None = None,
) -> tuple[Verdict, ...]:
    """A verdict per claim, in the order of the claims.

    `cells` maps (arm, budget) to its runs; a seed of `seeds` without a value there counts as a lost run. Locked claims
    are judged on `locked_seeds` and `locked_budgets` (None: all) and Holm-adjusted among themselves. A claim whose id
    is in `post_hoc`, or whose budget was not locked, is judged on everything, in a family of its own. Raises ValueError
    for an alpha outside (0, 1).
    """
    locked_seeds = seeds if locked_seeds is None else locked_seeds
    locked_budgets = budgets if locked_budgets is None else locked_budgets
    drafts = []
    for claim in claims:
        named = None if isinstance(claim, TrendClaim | FasterClaim) or claim.budget == "largest" else claim.budget
        late = claim.id in post_hoc or (named is not None and named not in locked_budgets)
        whole = _judged_at(claim, budgets)
        at = whole if late else _judged_at(claim, locked_budgets)
        judged = seeds if late else locked_seeds
        draft = _draft(claim, cells, judged, at, alpha, late)
        over_budgets = isinstance(claim, TrendClaim | FasterClaim)
        more = [at] if set(seeds) > set(judged) and not over_budgets else []
        more += [whole] if whole != at or (over_budgets and set(seeds) > set(judged)) else []
        extra = tuple(pair for beside in more for pair in measure(claim, cells, seeds, beside, alpha))
        drafts.append(replace(draft, post_hoc_contrasts=extra))
    families = [_answer([draft for draft in drafts if draft.post_hoc == late], alpha) for late in (False, True)]
    answered = {verdict.claim.id: verdict for family in families for verdict in family}
    return tuple(answered[claim.id] for claim in claims)


def table(verdict: Verdict) -> dict[str, Any]:
    """The verdict as plain JSON values: an entry of "claims" in results.json; a test that was not made is null."""
    claim = verdict.claim

    def contrasts(pairs: Iterable[ArmContrast]) -> list[dict[str, Any]]:
        names = ("left", "right", "than", "budget", "budgets", "statistic", "bounds")
        return [{**{name: dump(getattr(p, name)) for name in names}, **dump(p.contrast)} for p in pairs]

    def own(*names: str) -> dict[str, Any]:
        return {name: dump(getattr(claim, name, None)) for name in names}

    return {
        "id": claim.id,
        "kind": claim.kind,
        "left": list(left_arms(claim)),
        "right": right_arm(claim),
        "metric": claim.metric,
        "budget": verdict.budget,
        "budgets": list(verdict.budgets),
        **own("than", "margin", "equivalence_margin", "direction", "threshold", "layers", "at_frac"),
        "allow_collapsed": isinstance(claim, RoutingClaim) or claim.allow_collapsed,
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


def _judged_at(claim: AnyClaim, budgets: Sequence[int]) -> tuple[int, ...]:
    """The budgets a claim is judged at, of those that may be used."""
    if isinstance(claim, TrendClaim | FasterClaim):
        return tuple(sorted(budgets))
    return (max(budgets) if claim.budget == "largest" else claim.budget,)


def _draft(
    claim: AnyClaim,
    cells: Mapping[tuple[str, int], Cell],
    seeds: Sequence[int],
    budgets: tuple[int, ...],
    alpha: float,
    post_hoc: bool,
) -> Verdict:
    """The claim with its p-values and marks, still inconclusive: the family has to be known first."""
    contrasts = measure(claim, cells, seeds, budgets, alpha)
    lost, collapsed, epochs = [], [], 0.0
    for arm in claim_arms(claim):
        for budget in budgets:
            at = f" at {short(budget)} tokens" if len(budgets) > 1 else ""
            cell = cell_of(cells, arm, budget)
            epochs = max(epochs, cell.epochs)
            lost += reasons.lost(arm, cell, claim, seeds, at)
            fallen = [seed for seed in seeds if seed in cell.collapsed]
            collapsed += [f"routing collapsed in {arm} {reasons.seeds_text(fallen)}{at}"] if fallen else []
    held = lost + ([] if isinstance(claim, RoutingClaim) or claim.allow_collapsed else collapsed)
    held += reasons.too_few(claim, contrasts)
    marks = {
        "post hoc": post_hoc,
        "lost run": bool(lost),
        "collapsed": bool(collapsed),
        "bound": any(pair.bounds for pair in contrasts),
        "repeated data": epochs > 1,
        "more than 4 epochs": epochs > 4,
    }
    return Verdict(
        claim=claim,
        budgets=budgets,
        post_hoc=post_hoc,
        verdict="inconclusive",
        reason="",
        held=tuple(held),
        p={} if held else combined([pair.p for pair in contrasts]),
        p_adjusted={},
        contrasts=contrasts,
        post_hoc_contrasts=(),
        marks=tuple(mark for mark, applies in marks.items() if applies),
    )


# ------------------------------------------------------------------------------------------------ a family of claims


def _answer(family: Sequence[Verdict], alpha: float) -> list[Verdict]:
    """Holm over the family, separately for each test; a test that was not made enters with 1."""
    adjusted = {test: stats.holm([draft.p.get(test, 1.0) for draft in family]) for test in ANSWERS}
    verdicts = []
    for index, draft in enumerate(family):
        p_adjusted = {test: float(adjusted[test][index]) for test in ANSWERS if test in draft.p}
        decided_by = next((test for test in ANSWERS if p_adjusted.get(test, 1.0) <= alpha), None)
        answer = ANSWERS[decided_by] if decided_by else "inconclusive"
        said = reasons.reason(
            draft.claim,
            draft.contrasts,
            decided_by,
            draft.held,
            draft.p,
            p_adjusted,
            family=len(family),
            post_hoc=draft.post_hoc,
            alpha=alpha,
        )
        verdicts.append(replace(draft, p_adjusted=p_adjusted, verdict=answer, reason=said))
    return verdicts
