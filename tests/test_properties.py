"""Properties of random configurations: counts against built models, and values that read back the same everywhere.

Matching against brute force is in test_matching, schedules in test_schedule, windows and tokenizers in data/.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from equipoise.accounting import count_flops, count_params
from equipoise.config import canonical, differences, digest, dump, load
from equipoise.model.transformer import Transformer, build, token_losses
from equipoise.record import read_config, start_run
from equipoise.spec.model import BalanceLoss, DenseFFN, ModelConfig, MoEFFN, NoBalance, WidthRule
from equipoise.spec.recipe import WSD, Cosine, Optim, Recipe, Samples
from equipoise.spec.run import RunConfig

positive = st.floats(1e-9, 1e6, allow_subnormal=False)
fractions = st.floats(0, 1)


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    """Any resolved model of at most some thousand parameters."""
    num_kv_heads = draw(st.integers(1, 3))
    num_heads = num_kv_heads * draw(st.integers(1, 3))
    num_experts = draw(st.integers(1, 5))
    top_k = draw(st.integers(1, num_experts))
    width = draw(
        st.one_of(st.sampled_from([8, 16, 24]), st.builds(WidthRule, ratio=st.floats(0.1, 3), multiple_of=st.just(8)))
    )
    moe = MoEFFN(
        num_experts=num_experts,
        top_k=top_k,
        d_expert=width,
        renormalize=draw(st.booleans()) and (top_k > 1 or num_experts == 1),
        balance=draw(st.one_of(st.builds(BalanceLoss, coef=st.floats(0, 10)), st.just(NoBalance()))),
        z_coef=draw(st.floats(0, 1)),
    )
    return ModelConfig(
        num_layers=draw(st.integers(1, 3)),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        d_model=2 * num_heads * draw(st.integers(1, 3)),
        vocab_size=draw(st.integers(2, 60)),
        ffn=draw(st.sampled_from([moe, DenseFFN(d_ff=width)])),
        tie_embeddings=draw(st.booleans()),
        rope_theta=draw(st.floats(10, 1e6)),
        norm_eps=draw(st.floats(1e-8, 1e-3)),
        init_std=draw(st.floats(0.01, 0.5)),
    )


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    """Any recipe."""
    seq_len, group, groups = draw(st.integers(1, 4096)), draw(st.integers(1, 8)), draw(st.integers(1, 6))
    micro = draw(st.sampled_from([0, *(group * n for n in range(1, groups + 1) if groups % n == 0)]))
    cosine = st.builds(Cosine, warmup_frac=st.floats(0, 1, exclude_max=True), final_frac=fractions)
    wsd = st.builds(WSD, warmup_tokens=st.integers(0, 2**40), decay_frac=fractions, final_frac=fractions)
    betas = st.tuples(*[st.floats(0, 1, exclude_max=True)] * 2)
    return Recipe(
        seq_len=seq_len,
        batch_tokens=seq_len * group * groups,
        balance_group=group,
        micro_sequences=micro,
        optim=draw(st.builds(Optim, lr=positive, weight_decay=st.floats(0, 1), betas=betas, eps=positive)),
        schedule=draw(st.one_of(cosine, wsd)),
        dtype=draw(st.sampled_from(["auto", "float32", "bfloat16"])),
        threads=draw(st.integers(1, 64)),
        num_evals=draw(st.integers(1, 100)),
        eval_tokens=draw(st.integers(0, 2**40)),
        eval_split=draw(st.sampled_from(["validation", "selection"])),
        samples=draw(st.builds(Samples, prompts=st.lists(texts, max_size=3).map(tuple), num_tokens=st.integers(1, 99))),
    )


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
runs = st.builds(
    RunConfig,
    arm=texts.filter(bool),
    seed=st.integers(0, 2**63),
    budget=st.integers(1, 2**50),
    model=models(),
    recipe=recipes(),
    data=st.text("0123456789abcdef", min_size=64, max_size=64),
)


# ------------------------------------------------------------------------------------------------ counts


def stored(model: Transformer) -> int:
    """Elements of unique storages."""
    return sum({p.untyped_storage().data_ptr(): p.numel() for p in model.parameters()}.values())


def idle(model: Transformer, token: int) -> int:
    """Elements of single experts that may be NaN while the token's logits stay finite."""
    inputs, found = torch.tensor([[token]]), 0
    for name, parameter in model.named_parameters():
        for expert in parameter if ".experts." in name else ():
            kept = expert.clone()
            expert.fill_(math.nan)
            found += expert.numel() * int(model.logits(model(inputs).hidden_TD).isfinite().all())
            expert.copy_(kept)
    return found


@settings(max_examples=25)
@given(config=models(), token=st.integers(0, 1))
def test_counts_are_those_of_the_built_model(config: ModelConfig, token: int) -> None:
    model, count = build(config, seed=0), count_params(config)
    assert stored(model) == count.total
    with torch.no_grad():
        assert stored(model) - idle(model, token) == count.active


@settings(max_examples=15)
@given(config=models(), B=st.integers(1, 3), S=st.integers(1, 9))
def test_flops_are_those_torch_counts(config: ModelConfig, B: int, S: int) -> None:
    model, count = build(config, seed=0), count_flops(config, S)
    inputs = torch.arange(B * S).view(B, S) % config.vocab_size
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loss = token_losses(model, model(inputs), inputs).sum()
        assert counter.get_total_flops() == B * S * count.forward
        loss.backward()
    assert counter.get_total_flops() == B * S * count.training


# ------------------------------------------------------------------------------------------------ values


def through_text(value: Any, **options: Any) -> Any:
    return json.loads(json.dumps(dump(value), **options))


@settings(max_examples=60)
@given(run=runs)
def test_a_run_reads_back_equal_with_an_equal_digest(run: RunConfig) -> None:
    for options in ({}, {"ensure_ascii": False}, {"sort_keys": True, "indent": 3}):
        again = load(RunConfig, through_text(run, **options))
        assert again == run and hash(again) == hash(run)
        assert digest(again) == digest(run) and canonical(again) == canonical(run)
        assert differences(dump(again), dump(run)) == []


@settings(max_examples=20)
@given(run=runs)
def test_a_run_directory_gives_back_its_run(run: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("run")
    start_run(directory, run, "{}")
    assert read_config(directory) == run


def leaves(value: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Every number, text and flag of a dumped value with its path through tables."""
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in leaves(item, (*path, key))]
    return [(path, value)]


@settings(max_examples=60)
@given(run=runs, data=st.data())
def test_every_field_is_part_of_the_digest(run: RunConfig, data: st.DataObject) -> None:
    table = through_text(run)
    path, value = data.draw(st.sampled_from(leaves(table)))
    holder = table
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = not value if isinstance(value, bool) else [value] if isinstance(value, str) else str(value)
    assert digest(table) != digest(run)
    assert [line.partition(":")[0] for line in differences(dump(run), table)] == [".".join(path)]


@settings(max_examples=30)
@given(run=runs)
def test_whole_numbers_are_the_same_however_they_are_written(run: RunConfig) -> None:
    """A TOML file may say 1 for a float; nobody's run becomes another by it."""
    table = through_text(run)
    table["recipe"]["optim"] |= {"lr": 2, "weight_decay": 1, "grad_clip": 0}
    whole = load(RunConfig, table)
    table["recipe"]["optim"] |= {"lr": 2.0, "weight_decay": 1.0, "grad_clip": 0.0}
    assert load(RunConfig, table) == whole
    assert digest(load(RunConfig, table)) == digest(whole) == digest(table)
