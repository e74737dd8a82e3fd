"""Models as nouns: ranges, width rules, what is still open."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from equipoise.config import dump, load
from equipoise.errors import ConfigError
from equipoise.spec.model import (
    BalanceBias,
    BalanceLoss,
    DenseFFN,
    ModelConfig,
    MoEFFN,
    NoBalance,
    WidthRule,
    describe_ffn,
    ffn_width,
    open_fields,
    with_widths,
)

MODEL: dict[str, Any] = {"num_layers": 2, "num_heads": 4, "d_model": 64, "ffn": {"kind": "dense", "d_ff": 128}}
MOE: dict[str, Any] = {"kind": "moe", "num_experts": 4, "top_k": 2, "d_expert": 64}


def fault(table: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(ModelConfig, table)
    return str(caught.value).splitlines()


def test_defaults() -> None:
    model = load(ModelConfig, {**MODEL, "ffn": MOE})
    assert model.num_kv_heads == 4
    assert (model.d_head, model.tie_embeddings, model.rope_theta, model.norm_eps) == (16, True, 10_000.0, 1e-5)
    assert (model.init_std, model.vocab_size) == (0.02, 0)
    assert model.ffn == MoEFFN(num_experts=4, top_k=2, d_expert=64, balance=BalanceLoss(coef=0.01), z_coef=0.0)
    assert load(ModelConfig, {**MODEL, "ffn": {**MOE, "balance": {"kind": "none"}}}).ffn.balance == NoBalance()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"num_layers": 0}, ["num_layers: 0 is not accepted; expected at least 1"]),
        ({"num_heads": 0}, ["num_heads: 0 is not accepted; expected at least 1"]),
        ({"num_heads": 3}, ["d_model: 64 is not accepted; expected a multiple of 2 x num_heads = 6"]),
        ({"d_model": -64}, ["d_model: -64 is not accepted; expected a multiple of 2 x num_heads = 8"]),
        ({"num_kv_heads": 3}, ["num_kv_heads: 3 is not accepted; expected a divisor of num_heads = 4"]),
        ({"num_kv_heads": -2}, ["num_kv_heads: -2 is not accepted; expected a divisor of num_heads = 4"]),
        ({"num_kv_heads": 8}, ["num_kv_heads: 8 is not accepted; expected a divisor of num_heads = 4"]),
        ({"rope_theta": 0}, ["rope_theta: 0.0 is not accepted; expected above 0"]),
        ({"norm_eps": 0}, ["norm_eps: 0.0 is not accepted; expected above 0"]),
        ({"init_std": -0.5}, ["init_std: -0.5 is not accepted; expected above 0"]),
        ({"vocab_size": -1}, ["vocab_size: -1 is not accepted; expected 0 or more"]),
        (
            {"num_layers": 0, "d_model": 60},
            [
                "num_layers: 0 is not accepted; expected at least 1",
                "d_model: 60 is not accepted; expected a multiple of 2 x num_heads = 8",
            ],
        ),
        (
            {"ffn": {"kind": "dense", "d_ff": 100}},
            ["ffn.d_ff: 100 is not accepted; expected a multiple of 8 (grouped kernels need rows of 16 bytes)"],
        ),
        (
            {"ffn": {**MOE, "d_expert": -8}},
            ["ffn.d_expert: -8 is not accepted; expected a multiple of 8 (grouped kernels need rows of 16 bytes)"],
        ),
        ({"ffn": {**MOE, "num_experts": 0}}, ["ffn.num_experts: 0 is not accepted; expected at least 1"]),
        ({"ffn": {**MOE, "top_k": 5}}, ["ffn.top_k: 5 is not accepted; expected 1 to num_experts = 4"]),
        ({"ffn": {**MOE, "top_k": 0}}, ["ffn.top_k: 0 is not accepted; expected 1 to num_experts = 4"]),
        ({"ffn": {**MOE, "z_coef": -1}}, ["ffn.z_coef: -1.0 is not accepted; expected 0 or more"]),
        (
            {"ffn": {**MOE, "balance": {"kind": "loss", "coef": -1}}},
            ["ffn.balance.coef: -1.0 is not accepted; expected 0 or more"],
        ),
        (
            {"ffn": {**MOE, "balance": {"kind": "bias", "rate": 0}}},
            ["ffn.balance.rate: 0.0 is not accepted; expected above 0"],
        ),
        (
            {"ffn": {**MOE, "balance": {"kind": "bais"}}},
            [
                "ffn.balance.kind: \"bais\" is not accepted; expected one of 'loss', 'bias', 'none'; "
                "did you mean 'bias'?"
            ],
        ),
        (
            {"ffn": {**MOE, "balance": None}},
            ["ffn.balance: null is not accepted; expected a table with kind = one of 'loss', 'bias', 'none'"],
        ),
        (
            {"ffn": {**MOE, "num_shared_experts": -1}},
            ["ffn.num_shared_experts: -1 is not accepted; expected 0 or more"],
        ),
        (
            {"ffn": {**MOE, "router": "hashed"}},
            [
                "ffn.router: \"hashed\" is not accepted; expected one of 'learned', 'frozen', 'hash', 'random'; "
                "did you mean 'hash'?"
            ],
        ),
        (
            {"ffn": {**MOE, "router": "hash", "balance": {"kind": "loss", "coef": 0.1}, "z_coef": 0.5}},
            [
                'ffn.balance: {"kind": "loss", "coef": 0.1} is not accepted; expected kind = \'none\', or nothing, '
                "beside router = 'hash', which has no router losses",
                "ffn.z_coef: 0.5 is not accepted; expected 0 beside router = 'hash', which has no router losses",
            ],
        ),
        (
            {"ffn": {**MOE, "router": "frozen", "balance": {"kind": "bias", "rate": 0.5}}},
            [
                'ffn.balance: {"kind": "bias", "rate": 0.5} is not accepted; expected kind = \'none\', or nothing, '
                "beside router = 'frozen', which has no router losses",
            ],
        ),
        (
            {"ffn": {**MOE, "router": "random", "z_coef": -1}},
            ["ffn.z_coef: -1.0 is not accepted; expected 0 or more"],
        ),
        (
            {"ffn": {**MOE, "top_k": 1}},
            [
                "ffn.renormalize: true is not accepted; expected false beside top_k = 1: divided by itself, "
                "a weight gives the router no language-model gradient "
                "(to study that, set allow_no_router_gradient = true)"
            ],
        ),
        (
            {"ffn": {"kind": "dense", "d_ff": {"ratio": 0, "multiple_of": 12}}},
            [
                "ffn.d_ff.ratio: 0.0 is not accepted; expected above 0",
                "ffn.d_ff.multiple_of: 12 is not accepted; expected a multiple of 8",
            ],
        ),
        (
            {"ffn": {"kind": "dense", "d_ff": {"ratio": 4, "multiple_of": 0}}},
            ["ffn.d_ff.multiple_of: 0 is not accepted; expected a multiple of 8"],
        ),
    ],
)
def test_faults(change: dict[str, Any], expected: list[str]) -> None:
    assert fault({**MODEL, **change}) == expected


@pytest.mark.parametrize(
    "change",
    [
        {"top_k": 1, "renormalize": False},
        {"top_k": 1, "allow_no_router_gradient": True},
        {"top_k": 1, "num_experts": 1},
        {"top_k": 1, "router": "frozen"},
        {"top_k": 1, "router": "hash"},
        {"top_k": 1, "router": "random"},
        {"top_k": 4},
    ],
)
def test_top_1_where_it_is_meant(change: dict[str, Any]) -> None:
    assert load(ModelConfig, {**MODEL, "ffn": {**MOE, **change}})


def test_the_balance_that_is_left_out_is_the_one_the_router_can_have() -> None:
    for router, balance in (("learned", BalanceLoss(coef=0.01)), ("frozen", NoBalance()), ("hash", NoBalance())):
        ffn = load(MoEFFN, {**MOE, "router": router})
        assert ffn.balance == balance
        assert load(MoEFFN, dump(ffn)) == ffn == MoEFFN(num_experts=4, top_k=2, d_expert=64, router=router)  # type: ignore[arg-type]
    assert load(MoEFFN, {**MOE, "balance": {"kind": "bias"}}).balance == BalanceBias(rate=0.001)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "4 experts, top-2"),
        ({"num_experts": 1, "top_k": 1}, "1 expert, top-1"),
        ({"balance": {"kind": "none"}}, "4 experts, top-2, not balanced"),
        ({"balance": {"kind": "bias"}, "num_shared_experts": 2}, "4 experts, top-2, 2 shared, balanced by bias"),
        ({"router": "frozen"}, "4 experts, top-2, frozen router"),
        ({"router": "random", "num_shared_experts": 1}, "4 experts, top-2, 1 shared, random router"),
    ],
)
def test_a_layer_in_a_few_words(change: dict[str, Any], expected: str) -> None:
    assert describe_ffn(load(MoEFFN, {**MOE, **change})) == expected
    assert describe_ffn(DenseFFN(d_ff=8)) == "dense"


@pytest.mark.parametrize(
    ("ratio", "multiple_of", "d_model", "expected"),
    [
        (4, 128, 424, 1664),  # 13.25 multiples
        (4, 128, 512, 2048),
        (4, 128, 432, 1792),  # 13.5, halves up
        (1, 8, 12, 16),  # 1.5, halves up
        (2.3, 8, 40, 96),  # 92 = 11.5 multiples as written; the nearest float to 2.3 lies below and would give 88
        (0.01, 64, 64, 64),  # never below one multiple
        (8 / 3, 64, 768, 2048),
    ],
)
def test_a_width_rule_rounds_to_the_nearest_multiple(
    ratio: float, multiple_of: int, d_model: int, expected: int
) -> None:
    assert WidthRule(ratio=ratio, multiple_of=multiple_of).width(d_model) == expected


def test_rules_become_numbers() -> None:
    rule = WidthRule(ratio=4, multiple_of=128)
    dense = load(ModelConfig, {**MODEL, "ffn": {"kind": "dense", "d_ff": {"ratio": 4, "multiple_of": 128}}})
    assert dense.ffn == DenseFFN(d_ff=rule)
    assert with_widths(dense).ffn == DenseFFN(d_ff=256)
    routed = dataclasses.replace(dense, ffn=MoEFFN(num_experts=2, top_k=2, d_expert=rule))
    assert with_widths(routed).ffn.width == 256
    written = load(ModelConfig, MODEL)
    assert with_widths(written) is written


def test_what_is_open() -> None:
    assert open_fields(load(ModelConfig, MODEL)) == ["vocab_size"]
    bare = ModelConfig(num_layers=1, num_heads=1, ffn=DenseFFN())
    assert open_fields(bare) == ["d_model", "ffn.d_ff", "vocab_size"]
    rule = WidthRule(ratio=1, multiple_of=8)
    assert open_fields(dataclasses.replace(bare, ffn=DenseFFN(d_ff=rule))) == ["d_model", "vocab_size"]
    assert ffn_width(MoEFFN(num_experts=2, top_k=2, d_expert=24)) == ("d_expert", 24)


@pytest.mark.parametrize("ffn", [DenseFFN(), DenseFFN(d_ff=WidthRule(ratio=1, multiple_of=8))])
def test_an_open_width_is_no_number(ffn: DenseFFN) -> None:
    with pytest.raises(ValueError, match=r"^d_ff: still open; resolve the model first$"):
        _ = ffn.width
    with pytest.raises(ValueError, match=r"^d_expert: still open; resolve the model first$"):
        _ = MoEFFN(num_experts=2, top_k=2, d_expert=ffn.d_ff).width
