"""Every shipped study loads, resolves with the vocabulary it asks for, and arrives at the sizes it speaks of."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from equipoise.budgets import arm_budgets, updates_of
from equipoise.config import dump
from equipoise.estimate import affordable_curve_tokens, curve_share
from equipoise.matching import ResolvedArm, resolve_arms
from equipoise.schedule import branch_step, warmup_steps
from equipoise.spec.claims import EquivalentClaim, LargerClaim, claim_pairs, left_arms, right_arm
from equipoise.spec.data import requested_vocab_size
from equipoise.spec.model import MoEFFN, describe_ffn, open_fields
from equipoise.spec.recipe import WSD
from equipoise.spec.run import num_steps
from equipoise.spec.study import StudySpec, load_study_table, parse_study, preset_names
from equipoise.spec.sweep import families, family

PAIRS = [
    "balance-methods",
    "budgets",
    "controls",
    "experts-at-top1",
    "granularity",
    "gutenberg",
    "ladder",
    "lr-fairness",
    "shared-experts",
    "tinystories",
]
NAMES = sorted(["quick", *PAIRS, *(f"{name}-cpu" for name in PAIRS)])
CPU = ["quick", *(f"{name}-cpu" for name in PAIRS)]
FULL_MOE, FULL_ACTIVE, FULL_TOTAL = (14_772_736, 21_064_192), (14_764_544,) * 2, (21_056_000,) * 2
CPU_MOE, CPU_ACTIVE, CPU_TOTAL = (230_976, 329_280), (229_952,) * 2, (328_256,) * 2
FULL_RATES, CPU_RATES = ("5e-4", "1e-3", "2e-3"), ("2.25e-3", "4.5e-3", "9e-3")
WIDE_ACTIVE = (424, 1_664, 14_886_216, 14_886_216)
SIZES = {
    "quick": {
        "moe": (64, 64, 115_520, 164_672),
        "dense-active": (64, 128, 115_008, 115_008),
        "dense-total": (64, 256, 164_160, 164_160),
    },
    "tinystories": {
        "moe": (512, 512, *FULL_MOE),
        "dense-active": WIDE_ACTIVE,
        "dense-total": (512, 2_048, *FULL_TOTAL),
        "dense-active-ffn": (512, 1_024, *FULL_ACTIVE),
    },
    "tinystories-cpu": {
        "moe": (64, 64, *CPU_MOE),
        "dense-active": (64, 128, *CPU_ACTIVE),
        "dense-total": (64, 256, *CPU_TOTAL),
    },
    "budgets": {
        "moe": (512, 512, *FULL_MOE),
        "dense-active": WIDE_ACTIVE,
        "dense-total": (512, 2_048, *FULL_TOTAL),
    },
    "budgets-cpu": {
        "moe": (64, 64, *CPU_MOE),
        "dense-active": (64, 128, *CPU_ACTIVE),
        "dense-total": (64, 256, *CPU_TOTAL),
    },
    "ladder": {
        **dict.fromkeys(("naive-renormalized", "naive-raw", "balanced"), (512, 512, 11_627_008, 21_064_192)),
        **dict.fromkeys(("top-2", "top-2-z"), (512, 512, *FULL_MOE)),
    },
    "ladder-cpu": {
        **dict.fromkeys(("naive-renormalized", "naive-raw", "balanced"), (64, 64, 181_824, 329_280)),
        **dict.fromkeys(("top-2", "top-2-z"), (64, 64, *CPU_MOE)),
    },
    "granularity": {
        "moe": (512, 512, *FULL_MOE),
        "finer-2": (512, 256, 14_780_928, 21_072_384),
        "finer-4": (512, 128, 14_797_312, 21_088_768),
        "finer-8": (512, 64, 14_830_080, 21_121_536),
        "dense-active": (512, 1_024, *FULL_ACTIVE),
    },
    "granularity-cpu": {
        "moe": (64, 64, *CPU_MOE),
        "finer-2": (64, 32, 232_000, 330_304),
        "finer-4": (64, 16, 234_048, 332_352),
        "finer-8": (64, 8, 238_144, 336_448),
        "dense-active": (64, 128, *CPU_ACTIVE),
    },
    "balance-methods": dict.fromkeys(("loss", "bias", "none"), (512, 512, *FULL_MOE)),
    "balance-methods-cpu": dict.fromkeys(("loss", "bias", "none"), (64, 64, *CPU_MOE)),
    "controls": {
        **dict.fromkeys(("learned", "frozen"), (512, 512, *FULL_MOE)),
        **dict.fromkeys(("hash", "random"), (512, 512, 14_764_544, 21_056_000)),
        "dense-active": (512, 1_024, *FULL_ACTIVE),
        "dense-total": (512, 2_048, *FULL_TOTAL),
    },
    "controls-cpu": {
        **dict.fromkeys(("learned", "frozen"), (64, 64, *CPU_MOE)),
        **dict.fromkeys(("hash", "random"), (64, 64, 229_952, 328_256)),
        "dense-active": (64, 128, *CPU_ACTIVE),
        "dense-total": (64, 256, *CPU_TOTAL),
    },
    "shared-experts": {
        "no-shared": (512, 256, 14_780_928, 21_072_384),
        "one-shared": (512, 256, 14_778_880, 21_070_336),
        "dense-active": (512, 1_024, *FULL_ACTIVE),
    },
    "shared-experts-cpu": {
        "no-shared": (64, 32, 232_000, 330_304),
        "one-shared": (64, 32, 231_744, 330_048),
        "dense-active": (64, 128, *CPU_ACTIVE),
    },
    "experts-at-top1": {
        "experts-2": (512, 1_024, 14_768_640, 21_060_096),
        "experts-4": (512, 1_024, 14_772_736, 33_647_104),
        "experts-8": (512, 1_024, 14_780_928, 58_821_120),
        **dict.fromkeys(("experts-16", "experts-16-fed"), (512, 1_024, 14_797_312, 109_169_152)),
    },
    "experts-at-top1-cpu": {
        "experts-2": (64, 128, 230_464, 328_768),
        "experts-4": (64, 128, 230_976, 525_888),
        "experts-8": (64, 128, 232_000, 920_128),
        **dict.fromkeys(("experts-16", "experts-16-fed"), (64, 128, 234_048, 1_708_608)),
    },
    "lr-fairness": {
        **dict.fromkeys((f"moe@lr={rate}" for rate in FULL_RATES), (512, 512, *FULL_MOE)),
        **dict.fromkeys((f"dense-active@lr={rate}" for rate in FULL_RATES), WIDE_ACTIVE),
        **dict.fromkeys((f"dense-total@lr={rate}" for rate in FULL_RATES), (512, 2_048, *FULL_TOTAL)),
    },
    "lr-fairness-cpu": {
        **dict.fromkeys((f"moe@lr={rate}" for rate in CPU_RATES), (64, 64, *CPU_MOE)),
        **dict.fromkeys((f"dense-active@lr={rate}" for rate in CPU_RATES), (64, 128, *CPU_ACTIVE)),
        **dict.fromkeys((f"dense-total@lr={rate}" for rate in CPU_RATES), (64, 256, *CPU_TOTAL)),
    },
    "gutenberg": {
        "moe": (768, 2_048, 91_282_176, 261_151_488),
        "moe-unbalanced": (768, 2_048, 91_282_176, 261_151_488),
        "experts-8": (768, 1_024, 91_319_040, 261_188_352),
        "experts-16": (768, 512, 91_392_768, 261_262_080),
        "experts-32": (768, 256, 91_540_224, 261_409_536),
        "dense-active": (768, 2_048, 91_245_312, 91_245_312),
    },
    "gutenberg-cpu": {
        "moe": (64, 128, 230_976, 525_888),
        "moe-unbalanced": (64, 128, 230_976, 525_888),
        "experts-8": (64, 64, 232_000, 526_912),
        "experts-16": (64, 32, 234_048, 528_960),
        "experts-32": (64, 16, 238_144, 533_056),
        "dense-active": (64, 128, 229_952, 229_952),
    },
}
"""d_model, hidden width, active and total parameters of every arm."""
RESIDUALS = {
    ("tinystories", "dense-active"): "+0.77%",
    ("tinystories", "dense-total"): "-0.04%",
    ("tinystories", "dense-active-ffn"): "-0.06%",
    ("tinystories-cpu", "dense-active"): "-0.44%",
    ("tinystories-cpu", "dense-total"): "-0.31%",
    ("shared-experts", "one-shared"): "-0.01%",
    ("shared-experts-cpu", "one-shared"): "-0.11%",
}
START_S, SCORING_S = 4.0, 24e-6
"""Of a process, and of a scored token, on a laptop's core; tinystories-cpu took about 10 s a run for both."""
VALIDATION_TOKENS, SELECTION_TOKENS = 250_000, 45_000
"""Of the TinyStories files that tinystories-cpu was run on."""


def update_ms(arm: ResolvedArm) -> float:
    """Of 1,024 tokens at the size of tinystories-cpu, on one core: generously above what was measured on one (46 ms for
    its MoE, 101 ms for 32 experts)."""
    ffn = arm.model.ffn
    return 55 + (2 * ffn.num_experts if isinstance(ffn, MoEFFN) else 0)


def study(name: str) -> StudySpec:
    return parse_study(load_study_table(name)[0])


def arms(name: str) -> dict[str, ResolvedArm]:
    spec = study(name)
    return resolve_arms(spec.arms, requested_vocab_size(spec.tokenizer), spec.recipe.seq_len)


def ffns(name: str) -> dict[str, MoEFFN]:
    return {arm: found.model.ffn for arm, found in arms(name).items() if isinstance(found.model.ffn, MoEFFN)}


def test_the_shipped_names() -> None:
    assert preset_names() == NAMES == sorted(SIZES)


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_arrives_at_its_sizes(name: str) -> None:
    found = {
        arm.name: (arm.model.d_model, arm.model.ffn.width, arm.params.active, arm.params.total)
        for arm in arms(name).values()
    }
    assert found == SIZES[name]


@pytest.mark.parametrize(("name", "arm"), RESIDUALS)
def test_a_preset_arrives_with_its_residuals(name: str, arm: str) -> None:
    assert f"{arms(name)[arm].residual:+.2%}" == RESIDUALS[name, arm]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_matched_agrees_within_one_percent(name: str) -> None:
    residuals = [arm.residual for arm in arms(name).values() if arm.match]
    assert all(residual is not None and abs(residual) <= 0.01 for residual in residuals)
    assert all(arm.match.rtol == 0.01 for arm in study(name).arms.values() if arm.match)
    assert residuals or name.removesuffix("-cpu") in ("ladder", "balance-methods", "experts-at-top1")  # written out


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_is_a_study_to_start_from(name: str) -> None:
    spec, text = study(name), load_study_table(name)[1]
    assert spec.name == name
    assert spec.question.endswith("?")
    assert len(spec.seeds) >= 3
    assert spec.recipe.num_evals >= 20
    assert all(num_steps(budget, spec.recipe) >= 100 for budget in spec.budgets)
    lines = text.splitlines()
    assert all(len(line) <= 120 and line == line.rstrip() for line in lines)
    assert lines[0].startswith(f"# {name}: ")
    assert sum(line.startswith("#") for line in lines) >= 10
    assert f"equipoise plan {name}" in text and f"equipoise run {name}" in text
    needs_path = spec.corpus.kind != "grammar"
    assert ("""--set 'corpus.path="FOLDER"'""" in text) == needs_path
    assert all(number in text for number in ("424", "14,886,216", "21,056,000")) == (name == "tinystories")


@pytest.mark.parametrize("name", NAMES)
def test_matched_widths_are_solved_not_written(name: str) -> None:
    for arm in study(name).arms.values():
        if arm.match:
            assert [field for field in open_fields(arm.model) if field != "vocab_size"] == [arm.match.adjust]


@pytest.mark.parametrize("name", NAMES)
def test_no_curve_costs_more_than_a_twentieth_of_the_training(name: str) -> None:
    spec = study(name)
    for budget in spec.budgets:
        steps = num_steps(budget, spec.recipe)
        assert curve_share(spec.recipe, steps) <= 0.05, affordable_curve_tokens(spec.recipe, steps)


# ------------------------------------------------------------------------------------------ two sizes of a question


def arm_shapes(name: str) -> list[tuple[Any, ...]]:
    """What each arm is, its scale and its rate aside; an arm of a sweep under the name of its family."""
    spec = study(name)
    return [
        (
            family(arm) or arm,
            describe_ffn(value.model.ffn),
            [getattr(value.model.ffn, field, None) for field in ("renormalize", "balance", "z_coef")],
            value.match and (value.match.to, value.match.on),
            value.budget,
            value.lr is not None,
        )
        for arm, value in spec.arms.items()
        if arm != "dense-active-ffn"  # in tinystories alone: about a width that the small models leave as it is
    ]


def claim_shape(claim: Any) -> dict[str, Any]:
    """What a claim says, its margins aside."""
    return {key: value for key, value in dump(claim).items() if key not in ("margin", "equivalence_margin")}


@pytest.mark.parametrize("name", PAIRS)
def test_both_sizes_ask_the_same(name: str) -> None:
    full, small = study(name), study(f"{name}-cpu")
    assert arm_shapes(name) == arm_shapes(f"{name}-cpu")
    assert list(map(claim_shape, full.claims)) == list(map(claim_shape, small.claims)) != []
    assert len(full.budgets) == len(small.budgets) or name == "tinystories"


@pytest.mark.parametrize("name", [name for name in PAIRS if name not in ("gutenberg", "tinystories")])
def test_recipes_are_those_of_tinystories(name: str) -> None:
    for suffix in ("", "-cpu"):
        own, shared = dump(study(name + suffix).recipe), dump(study("tinystories" + suffix).recipe)
        departs = {key for key in own if own[key] != shared[key]}
        own_ones = {"budgets": {"schedule"}, "lr-fairness": {"eval_tokens"} if suffix else set()}
        assert departs <= {"curve_tokens"} | own_ones.get(name, set())
        assert study(name + suffix).tokenizer == study("tinystories" + suffix).tokenizer


@pytest.mark.parametrize("name", CPU)
def test_two_cores_need_a_quarter_of_an_hour_at_most(name: str) -> None:
    """By arithmetic, two runs at a time, each with a core to itself; a trunk once, then what branches off."""
    spec, seconds = study(name), 0.0
    recipe = spec.recipe
    assert recipe.threads == 1 and recipe.batch_tokens == 1_024
    resolved = arms(name)
    scored = min(recipe.eval_tokens or VALIDATION_TOKENS, VALIDATION_TOKENS) + SELECTION_TOKENS
    updates = updates_of(spec, arm_budgets(spec, {arm: found.model for arm, found in resolved.items()}))
    for arm, steps in updates.items():
        shares = [branch_step(count, recipe.batch_tokens, recipe.schedule) for count in steps]
        work = [max(shares), *(count - share for count, share in zip(steps, shares, strict=True))]
        processes = sum(count > 0 for count in work)
        seconds += len(spec.seeds) * (
            processes * (START_S + SCORING_S * scored) + sum(work) * update_ms(resolved[arm]) / 1000
        )
    assert seconds / 2 <= 60 * (90 if name == "budgets-cpu" else 15)


# ------------------------------------------------------------------------------------------ one study after the other


def test_both_scales_of_tinystories_claim_what_was_published() -> None:
    for name in ("tinystories", "tinystories-cpu"):
        claims = study(name).claims
        assert [(left_arms(claim), right_arm(claim), claim.kind) for claim in claims] == [
            (("moe",), "dense-active", "lower"),
            (("dense-total",), "moe", "lower"),
        ]
        assert {claim.metric for claim in claims} == {"best_val_loss"}
    assert study("tinystories").budgets == (40_500_000, 426_300_000)


@pytest.mark.parametrize("name", ["ladder", "ladder-cpu"])
def test_the_ladder_adds_one_thing_after_the_other(name: str) -> None:
    rungs = ffns(name)
    assert [(arm, ffn.top_k, ffn.renormalize, ffn.balance.kind, ffn.z_coef > 0) for arm, ffn in rungs.items()] == [
        ("naive-renormalized", 1, True, "none", False),
        ("naive-raw", 1, False, "none", False),
        ("balanced", 1, False, "loss", False),
        ("top-2", 2, True, "loss", False),
        ("top-2-z", 2, True, "loss", True),
    ]
    moe = ffns(name.replace("ladder", "tinystories"))["moe"]
    assert rungs["top-2-z"] == moe
    assert len({(ffn.num_experts, ffn.d_expert) for ffn in rungs.values()}) == 1
    assert all(dump(claim)["allow_collapsed"] for claim in study(name).claims if claim.kind != "routing")
    (main,) = [claim for claim in study(name).claims if isinstance(claim, LargerClaim)]
    assert claim_pairs(main) == (("top-2", "balanced"), ("balanced", "naive-raw"), ("top-2-z", "top-2"))
    early = [dump(claim) for claim in study(name).claims if claim.kind == "routing"][:2]
    assert all((claim["at_frac"], claim["layers"], claim["threshold"]) == (0.05, "max", 0.9) for claim in early)


@pytest.mark.parametrize("name", ["budgets", "budgets-cpu"])
def test_budgets_share_one_schedule_and_lie_close_enough_to_read_between(name: str) -> None:
    spec = study(name)
    schedule = spec.recipe.schedule
    assert isinstance(schedule, WSD) and schedule.decay_frac == 0.2
    steps = [num_steps(budget, spec.recipe) for budget in spec.budgets]
    assert all(right / left <= 2.2 for left, right in itertools.pairwise(steps))
    warmups = {warmup_steps(count, spec.recipe.batch_tokens, schedule) for count in steps}
    assert len(warmups) == 1 and max(warmups) < 0.15 * min(steps)
    assert [(left_arms(claim), right_arm(claim), dump(claim)["direction"]) for claim in spec.claims] == [
        (("moe",), "dense-active", "grows"),
        (("dense-total",), "moe", "narrows"),
    ]


def test_budgets_are_the_published_ones_and_their_small_likeness() -> None:
    full, small = study("budgets"), study("budgets-cpu")
    assert (full.budgets[0], full.budgets[-1]) == study("tinystories").budgets
    assert [budget % small.recipe.batch_tokens for budget in small.budgets] == [0] * 4
    assert [budget // small.budgets[0] for budget in small.budgets] == [1, 2, 4, 8]
    per_parameter = [spec.budgets[-1] / SIZES[spec.name]["moe"][2] for spec in (full, small)]
    assert per_parameter == pytest.approx([29, 29], abs=0.2)


@pytest.mark.parametrize(
    ("name", "members"),
    [
        (name + suffix, members)
        for name, members in (
            ("gutenberg", ("moe", "experts-8", "experts-16", "experts-32")),
            ("granularity", ("moe", "finer-2", "finer-4", "finer-8")),
        )
        for suffix in ("", "-cpu")
    ],
)
def test_finer_experts_differ_from_the_four_by_their_routers_alone(name: str, members: tuple[str, ...]) -> None:
    resolved, experts = arms(name), ffns(name)
    for coarse, fine in itertools.pairwise(members):
        assert experts[fine].num_experts == 2 * experts[coarse].num_experts
        assert experts[fine].top_k == 2 * experts[coarse].top_k
        left, right = resolved[coarse].params, resolved[fine].params
        assert left.active - left.router == right.active - right.router
        assert left.total - left.router == right.total - right.router
        assert experts[fine].renormalize == name.startswith("granularity")
    claim = study(name).claims[-1]
    assert isinstance(claim, EquivalentClaim)
    assert (left_arms(claim), claim.right, claim.equivalence_margin) == (members[1:], members[0], 0.02)


@pytest.mark.parametrize("name", ["controls", "controls-cpu"])
def test_controls_store_what_the_learned_router_stores(name: str) -> None:
    experts = ffns(name)
    assert [ffn.router for ffn in experts.values()] == list(experts) == ["learned", "frozen", "hash", "random"]
    assert len({(ffn.num_experts, ffn.top_k, ffn.width) for ffn in experts.values()}) == 1
    assert experts["learned"] == ffns(name.replace("controls", "tinystories"))["moe"]


@pytest.mark.parametrize("name", ["shared-experts", "shared-experts-cpu"])
def test_a_shared_expert_replaces_a_routed_one(name: str) -> None:
    experts = ffns(name)
    assert {arm: (ffn.num_experts, ffn.top_k, ffn.num_shared_experts) for arm, ffn in experts.items()} == {
        "no-shared": (8, 4, 0),
        "one-shared": (7, 3, 1),
    }
    none, one = (arms(name)[arm].params for arm in experts)
    assert none.total - none.router == one.total - one.router and none.active - none.router == one.active - one.router


@pytest.mark.parametrize("name", ["experts-at-top1", "experts-at-top1-cpu"])
def test_fed_experts_see_as_many_tokens_as_four_do(name: str) -> None:
    spec, resolved = study(name), arms(name)
    found = arm_budgets(spec, {arm: value.model for arm, value in resolved.items()})
    per_expert = {arm: found[arm, spec.budgets[0]].tokens / ffn.num_experts for arm, ffn in ffns(name).items()}
    assert per_expert["experts-16-fed"] == per_expert["experts-4"] == 4 * per_expert["experts-16"]
    active = [value.params.active - value.params.router for value in resolved.values()]
    assert len(set(active)) == 1 and all(ffn.top_k == 1 and not ffn.renormalize for ffn in ffns(name).values())


@pytest.mark.parametrize(("name", "rates"), [("lr-fairness", FULL_RATES), ("lr-fairness-cpu", CPU_RATES)])
def test_each_arm_is_swept_around_the_rate_of_tinystories(name: str, rates: tuple[str, ...]) -> None:
    spec, middle = study(name), study(name.replace("lr-fairness", "tinystories")).recipe.optim.lr
    assert families(spec.arms) == {
        arm: tuple(f"{arm}@lr={rate}" for rate in rates) for arm in ("moe", "dense-active", "dense-total")
    }
    assert [float(rate) / middle for rate in rates] == pytest.approx([0.5, 1, 2])
    smaller, larger = spec.budgets  # close enough to read arms of unequal cost between them, which the charge needs
    cost = [arms(name)[f"{arm}@lr={rates[0]}"].flops.training for arm in ("moe", "dense-total")]
    assert cost[1] / cost[0] <= larger / smaller <= 2.2
    assert [(left_arms(claim), right_arm(claim)) for claim in spec.claims] == [
        (("moe",), "dense-active"),
        (("dense-total",), "moe"),
    ]


@pytest.mark.parametrize("name", ["gutenberg", "gutenberg-cpu"])
def test_gutenberg_asks_its_three_hypotheses(name: str) -> None:
    faster, unbalanced, balanced, finer = (dump(claim) for claim in study(name).claims)
    assert (faster["kind"], faster["left"], faster["right"]) == ("faster", "moe", "dense-active")
    assert len(study(name).budgets) == 1
    for claim, arm, direction in ((unbalanced, "moe-unbalanced", "above"), (balanced, "moe", "below")):
        assert (claim["arm"], claim["metric"], claim["direction"]) == (arm, "busiest_frac", direction)
        assert 0.25 < claim["threshold"] < 0.7
    assert finer["kind"] == "equivalent"
    assert {ffn.balance.kind for arm, ffn in ffns(name).items() if arm != "moe-unbalanced"} == {"loss"}
    assert ffns(name)["moe"].top_k == 1 and ffns(name)["moe-unbalanced"].balance.kind == "none"


def test_gutenberg_trains_exactly_the_published_tokens() -> None:
    spec = study("gutenberg")
    assert num_steps(768_000, spec.recipe) * spec.recipe.batch_tokens == 768_000
    assert (spec.recipe.seq_len, arms("gutenberg")["moe"].model.num_layers) == (256, 12)
