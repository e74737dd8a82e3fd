"""Counts against hand-worked numbers, and against plain lists of every tensor and every matrix product."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.accounting import count_flops, count_params
from equipoise.spec.model import BalanceBias, DenseFFN, ModelConfig, MoEFFN, WidthRule

WORKED = ModelConfig(
    vocab_size=1000,
    d_model=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    ffn=MoEFFN(num_experts=8, top_k=2, d_expert=96),
)
"""Small enough to be worked by hand; also what a public report of wrong counts uses."""


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    num_kv_heads = draw(st.integers(1, 3))
    num_heads = num_kv_heads * draw(st.integers(1, 3))
    width = 8 * draw(st.integers(1, 9))
    num_experts = draw(st.integers(1, 6))
    moe = MoEFFN(
        num_experts=num_experts,
        top_k=draw(st.integers(1, num_experts)),
        d_expert=width,
        renormalize=False,
        num_shared_experts=draw(st.integers(0, 3)),
        router=draw(st.sampled_from(["learned", "frozen", "hash", "random"])),
    )
    return ModelConfig(
        vocab_size=draw(st.integers(1, 500)),
        d_model=2 * num_heads * draw(st.integers(1, 7)),
        num_layers=draw(st.integers(1, 4)),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        ffn=draw(st.sampled_from([moe, DenseFFN(d_ff=width)])),
        tie_embeddings=draw(st.booleans()),
    )


def shapes(model: ModelConfig, num_experts: int) -> list[tuple[int, ...]]:
    """Every weight of the model, with this many experts in each layer, written out one by one."""
    width, d_head = model.d_model, model.d_model // model.num_heads
    found: list[tuple[int, ...]] = [(model.vocab_size, width)]
    for _ in range(model.num_layers):
        found += [(width,), (width,)]
        found += [(width, d_head)] * (model.num_heads + 2 * model.num_kv_heads)
        found += [(d_head, width)] * model.num_heads
        if isinstance(model.ffn, MoEFFN):
            found += [(model.ffn.num_experts, width)] if model.ffn.router in ("learned", "frozen") else []
            passed = num_experts + model.ffn.num_shared_experts
            found += [(width, model.ffn.width), (width, model.ffn.width), (model.ffn.width, width)] * passed
        else:
            found += [(width, model.ffn.width), (width, model.ffn.width), (model.ffn.width, width)]
    found += [(width,)]
    return found if model.tie_embeddings else [*found, (model.vocab_size, width)]


def products(model: ModelConfig, seq_len: int) -> list[tuple[int, int, int]]:
    """Every matrix product (rows, inner, columns) of one forward pass over one sequence, head by head."""
    width, d_head = model.d_model, model.d_model // model.num_heads
    found = []
    for _ in range(model.num_layers):
        found += [(seq_len, width, d_head)] * (model.num_heads + 2 * model.num_kv_heads)
        found += [(seq_len, d_head, seq_len), (seq_len, seq_len, d_head)] * model.num_heads
        found += [(seq_len, width, width)]
        passes = 1
        if isinstance(model.ffn, MoEFFN):
            found += [(seq_len, width, model.ffn.num_experts)] if model.ffn.router in ("learned", "frozen") else []
            passes = model.ffn.top_k + model.ffn.num_shared_experts
        found += [(seq_len, width, model.ffn.width)] * 2 * passes + [(seq_len, model.ffn.width, width)] * passes
    return [*found, (seq_len, width, model.vocab_size)]


def test_worked_parameters() -> None:
    count = count_params(WORKED)
    assert count.total == 384_832
    assert count.active == 163_648
    assert count.by_component() == {
        "embedding": 1000 * 64,
        "attention": 2 * (64 * 64 + 64 * 32 + 64 * 32 + 64 * 64),
        "router": 2 * 8 * 64,
        "ffn": 0,
        "experts": 2 * 8 * 18_432,
        "norms": 5 * 64,
        "head": 0,
    }
    assert count.total_nonembedding == 384_832 - 64_000
    assert count.active_nonembedding == 163_648 - 64_000


def test_worked_shared_experts_and_control_routers() -> None:
    """One expert of this model is 3 x 64 x 96 = 18,432 parameters, in each of two layers."""
    ffn = MoEFFN(num_experts=8, top_k=2, d_expert=96, num_shared_experts=2, router="hash")
    count, flops = (f(dataclasses.replace(WORKED, ffn=ffn), *a) for f, a in ((count_params, ()), (count_flops, (128,))))
    assert count.total == 384_832 + 2 * 2 * 18_432 - 2 * 8 * 64
    assert count.active == 163_648 + 2 * 2 * 18_432 - 2 * 8 * 64
    assert (count.router, count.ffn, count.experts) == (0, 2 * 2 * 18_432, 2 * 8 * 18_432)
    assert flops.forward == 392_192 + 2 * (2 * 2 * 18_432 - 2 * 8 * 64) and flops.router == 0
    for same in (
        MoEFFN(num_experts=8, top_k=2, d_expert=96, router="frozen"),
        dataclasses.replace(WORKED.ffn, balance=BalanceBias()),
    ):  # type: ignore[type-var]
        assert count_params(dataclasses.replace(WORKED, ffn=same)) == count_params(WORKED)  # type: ignore[arg-type]
        assert count_flops(dataclasses.replace(WORKED, ffn=same), 128) == count_flops(WORKED, 128)  # type: ignore[arg-type]


def test_an_untied_head_counts_once_and_is_no_embedding_twice() -> None:
    count = count_params(dataclasses.replace(WORKED, tie_embeddings=False))
    assert count.total == 448_832
    assert count.active == 163_648 + 64_000
    assert (count.total_nonembedding, count.active_nonembedding) == (320_832, 99_648)


def test_worked_flops() -> None:
    count = count_flops(WORKED, 128)
    assert count.forward == 392_192
    assert count.training == 1_176_576
    assert count.attention_scores == 2 * 4 * 128 * 64
    assert count.forward_causal == 392_192 - 2 * 2 * 128 * 64
    assert count.training_causal == 3 * count.forward_causal


def test_dense_twins_differ_by_the_routers() -> None:
    active = count_params(dataclasses.replace(WORKED, ffn=DenseFFN(d_ff=192)))
    total = count_params(dataclasses.replace(WORKED, ffn=DenseFFN(d_ff=768)))
    assert (active.total, active.active) == (162_624, 162_624)
    assert total.total == 383_808
    assert active.ffn == 2 * 3 * 64 * 192
    assert (active.router, active.experts, active.active_experts) == (0, 0, 0)


def test_published_sizes_of_the_derived_reading() -> None:
    base = ModelConfig(vocab_size=8348, d_model=512, num_layers=4, num_heads=4, ffn=DenseFFN(d_ff=2048))
    moe = count_params(dataclasses.replace(base, ffn=MoEFFN(num_experts=4, top_k=2, d_expert=512)))
    assert (moe.active, moe.total) == (14_772_736, 21_064_192)
    assert count_params(base).total == 21_056_000
    rule = WidthRule(ratio=4, multiple_of=128)
    assert count_params(dataclasses.replace(base, d_model=424, ffn=DenseFFN(d_ff=rule))).total == 14_886_216


@settings(max_examples=60, deadline=None)
@given(models())
def test_parameters_are_the_sum_of_all_shapes(model: ModelConfig) -> None:
    count = count_params(model)
    num_experts, top_k = (model.ffn.num_experts, model.ffn.top_k) if isinstance(model.ffn, MoEFFN) else (0, 0)
    assert count.total == sum(math.prod(shape) for shape in shapes(model, num_experts))
    assert count.active == sum(math.prod(shape) for shape in shapes(model, top_k))
    assert count.total == sum(count.by_component().values())


@settings(max_examples=60, deadline=None)
@given(models(), st.integers(1, 70))
def test_flops_are_the_sum_of_all_products(model: ModelConfig, seq_len: int) -> None:
    count = count_flops(model, seq_len)
    assert seq_len * count.forward == sum(2 * math.prod(product) for product in products(model, seq_len))


@pytest.mark.parametrize(
    ("change", "still_open"),
    [
        ({"vocab_size": 0}, "vocab_size"),
        ({"d_model": 0}, "d_model"),
        ({"ffn": DenseFFN()}, "ffn.d_ff"),
        ({"ffn": MoEFFN(num_experts=2, top_k=2), "vocab_size": 0}, "ffn.d_expert, vocab_size"),
    ],
)
def test_an_open_model_is_refused(change: dict[str, object], still_open: str) -> None:
    model = dataclasses.replace(WORKED, **change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"^{still_open}: still open; resolve the model first$"):
        count_params(model)
    with pytest.raises(ValueError, match="still open"):
        count_flops(model, 8)
