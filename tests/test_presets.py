"""Every shipped study loads, resolves with the vocabulary it asks for, and arrives at the sizes it speaks of."""

from __future__ import annotations

import itertools

import pytest

from equipoise.matching import ResolvedArm, resolve_arms
from equipoise.spec.claims import EquivalentClaim, left_arms
from equipoise.spec.data import requested_vocab_size
from equipoise.spec.model import MoEFFN, open_fields
from equipoise.spec.run import num_steps
from equipoise.spec.study import StudySpec, load_study_table, parse_study, preset_names

NAMES = ["gutenberg", "gutenberg-cpu", "quick", "tinystories", "tinystories-cpu"]
SIZES = {
    "quick": {
        "moe": (64, 64, 115_520, 164_672),
        "dense-active": (64, 128, 115_008, 115_008),
        "dense-total": (64, 256, 164_160, 164_160),
    },
    "tinystories": {
        "moe": (512, 512, 14_772_736, 21_064_192),
        "dense-active": (424, 1_664, 14_886_216, 14_886_216),
        "dense-total": (512, 2_048, 21_056_000, 21_056_000),
        "dense-active-ffn": (512, 1_024, 14_764_544, 14_764_544),
    },
    "tinystories-cpu": {
        "moe": (64, 64, 230_976, 329_280),
        "dense-active": (64, 128, 229_952, 229_952),
        "dense-total": (64, 256, 328_256, 328_256),
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
}


def study(name: str) -> StudySpec:
    return parse_study(load_study_table(name)[0])


def arms(name: str) -> dict[str, ResolvedArm]:
    spec = study(name)
    return resolve_arms(spec.arms, requested_vocab_size(spec.tokenizer), spec.recipe.seq_len)


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
    assert f"equipoise run {name}" in text
    needs_path = spec.corpus.kind != "grammar"
    assert ("""--set 'corpus.path="FOLDER"'""" in text) == needs_path
    assert all(number in text for number in ("424", "14,886,216", "21,056,000")) == (name == "tinystories")


@pytest.mark.parametrize("name", NAMES)
def test_matched_widths_are_solved_not_written(name: str) -> None:
    matched = [(arm, arm.match.adjust) for arm in study(name).arms.values() if arm.match]
    assert matched
    for arm, adjust in matched:
        assert [field for field in open_fields(arm.model) if field != "vocab_size"] == [adjust]


def test_both_scales_of_tinystories_claim_what_was_published() -> None:
    for name in ("tinystories", "tinystories-cpu"):
        claims = study(name).claims
        assert [(left_arms(claim), claim.right, claim.kind) for claim in claims] == [
            (("moe",), "dense-active", "lower"),
            (("dense-total",), "moe", "lower"),
        ]
        assert {claim.metric for claim in claims} == {"best_val_loss"}
    assert study("tinystories").budgets == (40_500_000, 426_300_000)


@pytest.mark.parametrize("name", ["gutenberg", "gutenberg-cpu"])
def test_finer_experts_differ_from_the_four_by_their_routers_alone(name: str) -> None:
    resolved = arms(name)
    finer = [resolved[arm] for arm in ("moe", "experts-8", "experts-16", "experts-32")]
    for left, right in itertools.pairwise(finer):
        assert isinstance(left.model.ffn, MoEFFN)
        assert isinstance(right.model.ffn, MoEFFN)
        assert right.model.ffn.num_experts == 2 * left.model.ffn.num_experts
        assert right.model.ffn.top_k == 2 * left.model.ffn.top_k
        assert left.params.active - left.params.router == right.params.active - right.params.router
        assert left.params.total - left.params.router == right.params.total - right.params.router
        assert not left.model.ffn.renormalize
    claim = study(name).claims[1]
    assert isinstance(claim, EquivalentClaim)
    assert (left_arms(claim), claim.right, claim.equivalence_margin) == (
        ("experts-8", "experts-16", "experts-32"),
        "moe",
        0.02,
    )


def test_gutenberg_trains_exactly_the_published_tokens() -> None:
    spec = study("gutenberg")
    assert num_steps(768_000, spec.recipe) * spec.recipe.batch_tokens == 768_000
    assert (spec.recipe.seq_len, arms("gutenberg")["moe"].model.num_layers) == (256, 12)


@pytest.mark.parametrize("name", ["quick", "tinystories-cpu", "gutenberg-cpu"])
def test_recipes_for_two_cores_leave_a_core_to_each_run(name: str) -> None:
    assert study(name).recipe.threads == 1
