"""Finer experts in one line: what is written is multiplied out before anything is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from equipoise.accounting import count_flops, count_params
from equipoise.config import apply_override, merge, read_toml
from equipoise.errors import ConfigError
from equipoise.matching import resolve_arms
from equipoise.spec.model import MoEFFN
from equipoise.spec.study import StudySpec, parse_study

FFN = "base.model.ffn"
BASE = """
kind = "moe"
num_experts = 4
top_k = 2
d_expert = 96
"""


def parse(tiny_toml: str, *overrides: str, base: str = BASE, arms: str = "") -> StudySpec:
    """The tiny study with a routed base, and arms beside it; claims and the tiny arms aside."""
    table = read_toml(tiny_toml, "tiny")
    del table["claims"]
    written: dict[str, Any] = {"base": {"model": {"ffn": read_toml(base, "base")}}, "arms": {"coarse": {}}}
    table = merge({**table, "arms": {}}, merge(written, read_toml(arms, "arms")))
    for override in overrides:
        table = apply_override(table, override)
    return parse_study(table)


def faults(tiny_toml: str, *overrides: str, **tables: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(tiny_toml, *overrides, **tables)
    return str(caught.value).splitlines()


def test_every_expert_is_cut_into_n(tiny_toml: str) -> None:
    arms = """
    arms.fine.model.ffn.fine_grained = 4
    arms.as-it-was.model.ffn.fine_grained = 1
    arms.over.model.ffn = { fine_grained = 2, num_experts = 8, num_shared_experts = 1 }
    """
    ffns = {name: arm.model.ffn for name, arm in parse(tiny_toml, arms=arms).arms.items()}
    coarse = MoEFFN(num_experts=4, top_k=2, d_expert=96)
    assert ffns == {
        "coarse": coarse,
        "fine": MoEFFN(num_experts=16, top_k=8, d_expert=24),
        "as-it-was": coarse,
        "over": MoEFFN(num_experts=16, top_k=4, d_expert=48, num_shared_experts=2),  # of the values the arm lays over
    }


def test_it_may_stand_in_the_base_and_be_set(tiny_toml: str) -> None:
    arms = "arms.one.model.ffn.fine_grained = 1"
    study = parse(tiny_toml, f"{FFN}.fine_grained=3", arms=arms)
    assert study.arms["coarse"].model.ffn == MoEFFN(num_experts=12, top_k=6, d_expert=32)
    assert study.arms["one"].model.ffn == MoEFFN(num_experts=4, top_k=2, d_expert=96)


@pytest.mark.parametrize("shared", [0, 2])
def test_but_for_the_router_nothing_gets_more(tiny_toml: str, shared: int) -> None:
    study = parse(tiny_toml, f"{FFN}.num_shared_experts={shared}", arms="arms.fine.model.ffn = { fine_grained = 4 }")
    coarse, fine = (arm.model for arm in resolve_arms(study.arms, 512, 256).values())
    one, other = count_params(coarse), count_params(fine)
    assert other.router == 4 * one.router > 0
    assert other.total - other.router == one.total - one.router
    assert other.active - other.router == one.active - one.router
    flops, finer = count_flops(coarse, 256), count_flops(fine, 256)
    assert finer.forward - finer.router == flops.forward - flops.router


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("fine_grained = 0", "0 is not accepted; expected a whole number, 1 or more"),
        ("fine_grained = 2.0", "2.0 is not accepted; expected a whole number, 1 or more"),
        ("fine_grained = true", "true is not accepted; expected a whole number, 1 or more"),
        ('fine_grained = "4"', '"4" is not accepted; expected a whole number, 1 or more'),
        ("fine_grained = 5", "5 is not accepted; expected a number that divides d_expert = 96 into multiples of 8"),
        ("fine_grained = 8", "8 is not accepted; expected a number that divides d_expert = 96 into multiples of 8"),
        (
            "fine_grained = 2, d_expert = { ratio = 1, multiple_of = 8 }",
            "2 is not accepted; expected d_expert beside it as a number: it is divided",
        ),
    ],
)
def test_what_cannot_be_cut(tiny_toml: str, change: str, expected: str) -> None:
    found = faults(tiny_toml, arms=f"arms.fine.model.ffn = {{ {change} }}")
    assert found == [f"arms.fine.model.ffn.fine_grained: {expected}"]


def test_a_solved_width_cannot_be_cut(tiny_toml: str) -> None:
    arms = """
    [arms.fine]
    match = { to = "coarse", on = "active_params", adjust = "ffn.d_expert" }
    model.ffn.fine_grained = 2
    """
    expected = "2 is not accepted; expected d_expert beside it as a number: it is divided"
    assert faults(tiny_toml, arms=arms) == [f"arms.fine.model.ffn.fine_grained: {expected}"]


def test_a_fault_of_the_base_is_said_once(tiny_toml: str) -> None:
    expected = "5 is not accepted; expected a number that divides d_expert = 96 into multiples of 8"
    found = faults(tiny_toml, f"{FFN}.fine_grained=5", arms="arms.other.model.d_model = 32")
    assert found == [f"{FFN}.fine_grained: {expected}"]


def test_a_dense_layer_has_no_experts_to_cut(tiny_toml: str) -> None:
    found = faults(tiny_toml, arms='arms.dense.model.ffn = { kind = "dense", d_ff = 64, fine_grained = 2 }')
    assert found == ["arms.dense.model.ffn.fine_grained: unknown field; known fields: kind, d_ff"]


def test_what_is_missing_is_said_by_its_own_name(tiny_toml: str) -> None:
    found = faults(tiny_toml, base='kind = "moe"\ntop_k = 2\nd_expert = 96\nfine_grained = 2')
    assert found == ["arms.coarse.model.ffn.num_experts: missing; expected a whole number"]


def test_misspelt_fields_are_looked_through_as_they_were_meant() -> None:
    """For finding more faults at once: renamed where a free name is near, else left out, at every depth."""
    from equipoise.faults import as_meant
    from equipoise.spec.study import StudySpec

    claim = {"kind": "lower", "id": "x", "lefd": "a", "right": "b", "zzzzzz": 1}
    arm = {"model": {"num_layer": 1, "ffn": {"kind": "moe", "topk": 2, "top_k": 3}}}
    meant = as_meant(StudySpec, {"sedes": [0], "arms": {"odd name": arm}, "claims": [claim, 7], "name": 3})
    assert meant == {
        "seeds": [0],
        "arms": {"odd name": {"model": {"num_layers": 1, "ffn": {"kind": "moe", "top_k": 3}}}},
        "claims": [{"kind": "lower", "id": "x", "left": "a", "right": "b"}, 7],
        "name": 3,
    }
    assert as_meant(StudySpec, [1]) == [1]
