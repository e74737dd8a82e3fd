"""What `accounting` counts from the spec, held to built models: storages, poisoned experts, torch's FLOP counter."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from equipoise.accounting import count_flops, count_params
from equipoise.model.transformer import Transformer, build, token_losses
from equipoise.spec.model import ModelConfig, MoEFFN

WORKED = ModelConfig(
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    d_model=64,
    vocab_size=1000,
    ffn=MoEFFN(num_experts=8, top_k=2, d_expert=96),
)

SHAPES = [
    ("dense", {}),
    ("dense", {"tie_embeddings": False, "num_kv_heads": 1, "num_layers": 1}),
    ("moe", {}),
    ("moe", {"tie_embeddings": False, "num_experts": 3, "top_k": 3, "num_kv_heads": 4}),
    ("moe", {"num_experts": 7, "top_k": 1, "renormalize": False, "num_layers": 2}),
    ("moe", {"num_shared_experts": 2}),
    ("moe", {"num_shared_experts": 1, "top_k": 5, "router": "random"}),
    ("moe", {"num_experts": 4, "top_k": 1, "router": "hash"}),
    ("moe", {"router": "frozen", "top_k": 1, "num_shared_experts": 3}),
]


def stored(model: Transformer) -> int:
    """Elements of unique storages: a tied head counts once."""
    return sum({p.untyped_storage().data_ptr(): p.numel() for p in model.parameters()}.values())


def idle_elements(model: Transformer, token: int) -> int:
    """Elements of expert parameters that may be NaN without moving one token's logits, found one by one."""
    inputs = torch.tensor([[token]])
    idle = 0
    with torch.no_grad():
        before = model.logits(model(inputs).hidden_TD)
        for name, parameter in model.named_parameters():
            if ".experts." not in name:
                continue
            for expert in parameter:
                kept = expert.clone()
                expert.fill_(math.nan)
                idle += expert.numel() * int(torch.equal(model.logits(model(inputs).hidden_TD), before))
                expert.copy_(kept)
    return idle


@pytest.mark.parametrize(("kind", "fields"), SHAPES)
def test_parameters(make_config, kind, fields) -> None:
    config = make_config(kind, **fields)
    model, count = build(config, seed=0), count_params(config)
    assert stored(model) == count.total
    for token in (0, 11, 52):
        assert stored(model) - idle_elements(model, token) == count.active


def test_the_worked_model() -> None:
    model = build(WORKED, seed=0)
    assert stored(model) == 384_832
    assert stored(model) - idle_elements(model, token=1) == 163_648
    assert measured_flops(model, 1, 128) == (392_192 * 128, 1_176_576 * 128)


def measured_flops(model: Transformer, B: int, S: int) -> tuple[int, int]:
    """(forward, forward and backward) of a batch on the plain path, as torch counts matrix products."""
    windows = torch.from_numpy(np.random.Generator(np.random.Philox(0)).integers(53, size=(B, S + 1)))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loss = token_losses(model, model(windows[:, :-1]), windows[:, 1:]).sum()
        forward = counter.get_total_flops()
        loss.backward()
        return forward, counter.get_total_flops()


@pytest.mark.parametrize(("kind", "fields"), SHAPES)
def test_flops(make_config, kind, fields) -> None:
    config = make_config(kind, **fields)
    count = count_flops(config, 19)
    not_made = count.router if fields.get("router") == "frozen" else 0  # the gradient of weights that get none
    assert measured_flops(build(config, seed=0), 3, 19) == (count.forward * 57, (count.training - not_made) * 57)
