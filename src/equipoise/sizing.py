"""What a machine can do: its matrix products, an update of every arm of some studies, and how long those would take.

Not for: measuring in this process (`bench` does, in children), or a study's own estimate (`plan --probe`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final

from equipoise.accounting import count_flops
from equipoise.budgets import arm_budgets, updates_of
from equipoise.estimate import Rates
from equipoise.matching import ResolvedArm, resolve_arms
from equipoise.probe import Probes, default_jobs, load_request, probing
from equipoise.spec.recipe import Recipe
from equipoise.spec.study import StudySpec
from equipoise.study import DataFacts, study_time

HOUR_S: Final = 3600.0
WARM_AND_ONE: Final = 3
"""Updates an arm takes at least when it is measured: two to warm up and one that counts."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How long measuring may take."""

    arm_s: float
    """Seconds of an arm's updates; scoring and sampling take a fifth of it each."""
    longest_s: float
    """An arm whose measurement would take longer is not measured but calculated from its FLOPs."""


FULL: Final = Effort(arm_s=1.0, longest_s=8.0)
QUICK: Final = Effort(arm_s=0.05, longest_s=0.3)


@dataclass(frozen=True, kw_only=True)
class ArmSpeed:
    """One arm of a study on this machine."""

    study: str
    arm: str
    update_s: float
    """Seconds of an update."""
    tokens_per_s: float
    """Trained tokens a second of one run."""
    gemm_share: float | None
    """FLOP/s of an update, causal attention at half, ÷ those of the matrix product; None where it is not on the CPU."""
    measured: bool
    """False: calculated from the FLOPs, at the best rate that was measured."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What was found."""

    compute: str
    """Device, dtype and kernels, and why."""
    gemm_flops: float
    """FLOP/s of a float32 matrix product in one process, others beside it."""
    jobs: int
    """Processes that were measured side by side."""
    arms: tuple[ArmSpeed, ...]
    """In the order they were measured: the smallest first."""
    studies: tuple[dict[str, Any], ...]
    """Per study: `name`, `num_runs`, `threads`, `jobs`, `study_s`, `measured`, `fits_in_an_hour`, `final_scoring`."""


def size_machine(
    studies: Mapping[str, tuple[StudySpec, DataFacts]],
    *,
    effort: Effort = FULL,
    device: str = "auto",
    should_stop: Callable[[], bool] = lambda: False,
    say: Callable[[str], None] = lambda _: None,
) -> Machine:
    """Measure the arms of `studies`, small ones first, and estimate each study with one run per `threads` cores.

    Raises ConfigError when an arm cannot be matched, otherwise as `Probes.ask` does.
    """
    resolved = {
        name: resolve_arms(spec.arms, facts.vocab_size, spec.recipe.seq_len) for name, (spec, facts) in studies.items()
    }
    jobs = {name: default_jobs(spec.recipe.threads, device).number for name, (spec, _) in studies.items()}
    order = sorted(
        ((name, arm) for name, arms in resolved.items() for arm in arms.values()),
        key=lambda item: _forward_pass_flops(item[1], studies[item[0]][0].recipe),
    )
    rates: dict[str, dict[str, Rates]] = {name: {} for name in studies}
    speeds: list[ArmSpeed] = []
    known: dict[tuple[Hashable, ...], Rates] = {}
    best: tuple[ResolvedArm, Recipe, Rates] | None = None
    compute = "nothing was measured"
    with probing(max(jobs.values()), device, should_stop) as probes:
        replies = probes.ask({"do": "gemm", "threads": 1, "seconds": effort.arm_s})
        gemm = 1 / fmean(reply["s"] for reply in replies)
        for name, arm in order:
            recipe = studies[name][0].recipe
            tokens = recipe.batch_tokens
            work = _work(arm, recipe, jobs[name])
            measured = work in known or best is None or _expected_s(arm, recipe, *best) <= effort.longest_s
            if work in known:  # many studies have an arm in common
                found = known[work]
            elif measured:
                say(f"bench: {name}, {arm.name}")
                found, compute = _measure(probes, arm, recipe, jobs[name], effort)
                known[work] = found
                if best is None or _flops_per_s(arm, recipe, found) > _flops_per_s(*best):
                    best = (arm, recipe, found)
            else:
                assert best is not None
                found = _scaled(arm, recipe, *best)
            rates[name][arm.name] = found
            share = arm.flops.training_causal * tokens / found.update_s / gemm if compute.startswith("CPU") else None
            speeds.append(
                ArmSpeed(
                    study=name,
                    arm=arm.name,
                    update_s=found.update_s,
                    tokens_per_s=tokens / found.update_s,
                    gemm_share=share,
                    measured=measured,
                )
            )
    rows = []
    for name, (spec, facts) in studies.items():
        models = {arm.name: arm.model for arm in resolved[name].values()}
        steps = updates_of(spec, arm_budgets(spec, models))
        time_of = study_time(spec, steps, facts, rates[name], jobs[name])
        rows.append(
            {
                "name": name,
                "num_runs": len(spec.arms) * len(spec.seeds) * len(spec.budgets),
                "threads": spec.recipe.threads,
                "jobs": jobs[name],
                "study_s": time_of["study_s"],
                "measured": all(speed.measured for speed in speeds if speed.study == name),
                "fits_in_an_hour": time_of["study_s"] <= HOUR_S,
                "final_scoring": facts.eval_tokens is not None or spec.recipe.eval_tokens > 0,
            }
        )
    return Machine(compute=compute, gemm_flops=gemm, jobs=max(jobs.values()), arms=tuple(speeds), studies=tuple(rows))


def _work(arm: ResolvedArm, recipe: Recipe, num_jobs: int) -> tuple[Hashable, ...]:
    """What the rates of an arm depend on: studies whose arms agree in it need one measurement."""
    shape = (recipe.seq_len, recipe.batch_tokens, recipe.balance_group, recipe.sequences_per_forward)
    return (arm.model, *shape, recipe.dtype, recipe.kernels, recipe.threads, num_jobs)


def _measure(probes: Probes, arm: ResolvedArm, recipe: Recipe, num_jobs: int, effort: Effort) -> tuple[Rates, str]:
    """Rates of an arm in `num_jobs` children at a time, and what they computed with."""
    began = time.monotonic()
    loaded = probes.ask(load_request(arm.model, recipe), num_jobs)
    load_s = time.monotonic() - began
    update, score, sample = (
        fmean(reply["s"] for reply in probes.ask({"do": what, "seconds": seconds}, num_jobs))
        for what, seconds in (("update", effort.arm_s), ("score", effort.arm_s / 5), ("sample", effort.arm_s / 5))
    )
    start_s = probes.start_s + load_s
    rates = Rates(start_s=start_s, update_s=update, score_token_s=score, sample_token_s=sample)
    return rates, str(loaded[0]["reason"])


def _forward_pass_flops(arm: ResolvedArm, recipe: Recipe) -> int:
    """Training FLOPs of one micro-batch: what a probe computes at a time."""
    return count_flops(arm.model, recipe.seq_len).training * recipe.sequences_per_forward * recipe.seq_len


def _expected_s(arm: ResolvedArm, recipe: Recipe, known: ResolvedArm, its: Recipe, rates: Rates) -> float:
    """Seconds that measuring `arm` would take, at the rate of an arm that was measured."""
    return WARM_AND_ONE * _forward_pass_flops(arm, recipe) / _flops_per_s(known, its, rates)


def _flops_per_s(arm: ResolvedArm, recipe: Recipe, rates: Rates) -> float:
    return arm.flops.training * recipe.batch_tokens / rates.update_s


def _scaled(arm: ResolvedArm, recipe: Recipe, known: ResolvedArm, its: Recipe, rates: Rates) -> Rates:
    """Rates of `arm` as its FLOPs stand to those of an arm that was measured."""
    per_token = arm.flops.training / known.flops.training
    return Rates(
        start_s=rates.start_s,
        update_s=rates.update_s * per_token * recipe.batch_tokens / its.batch_tokens,
        score_token_s=rates.score_token_s * per_token,
        sample_token_s=rates.sample_token_s * per_token,
    )
