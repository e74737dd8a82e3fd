"""Which parameters decay, and AdamW against its update written out."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from equipoise.model.layers import RMSNorm
from equipoise.model.transformer import Transformer, build
from equipoise.optim import make_adamw, parameter_groups
from equipoise.spec.model import ModelConfig, MoEFFN
from equipoise.spec.recipe import Optim

OPTIM = Optim(lr=0.01, weight_decay=0.1)


def small_model(tie_embeddings: bool = True) -> Transformer:
    ffn = MoEFFN(num_experts=3, top_k=2, d_expert=8)
    config = ModelConfig(num_layers=2, num_heads=2, d_model=12, vocab_size=17, ffn=ffn, tie_embeddings=tie_embeddings)
    return build(config, seed=0)


class StackedGains(nn.Module):
    """A gain per expert, stacked into a matrix, and a bias: neither is told apart by its dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.expert_norm = RMSNorm(5, eps=1e-5)
        self.expert_norm.weight = nn.Parameter(torch.ones(3, 5))
        self.linear = nn.Linear(5, 7, bias=True)
        self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_each_parameter_is_in_one_group(tie_embeddings: bool) -> None:
    model = small_model(tie_embeddings)
    decayed, undecayed = parameter_groups(model)
    assert sorted(map(id, [*decayed, *undecayed])) == sorted(map(id, model.parameters()))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert [names[id(parameter)] for parameter in undecayed] == [
        *(f"blocks.{layer}.{norm}.weight" for layer in (0, 1) for norm in ("attention_norm", "ffn_norm")),
        "final_norm.weight",
    ]


def test_gains_are_known_by_name_not_by_shape() -> None:
    module = StackedGains()
    decayed, undecayed = parameter_groups(module)
    assert [id(p) for p in undecayed] == [id(module.expert_norm.weight), id(module.linear.bias)]
    assert [id(p) for p in decayed] == [id(module.linear.weight)]


@pytest.mark.parametrize("make", [small_model, StackedGains])
def test_without_gradients_only_matrices_shrink(make) -> None:
    module = make()
    optimizer = make_adamw(module, OPTIM)
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    for _ in range(10):
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        optimizer.step()
    for name, parameter in module.named_parameters():
        still = "norm" in name or name.endswith("bias") or not parameter.requires_grad
        factor = 1.0 if still else (1 - 0.01 * 0.1) ** 10
        torch.testing.assert_close(parameter.detach(), before[name] * factor, rtol=0 if still else 1e-5, atol=0)


@pytest.mark.parametrize("fused", [None, True, False])
def test_steps_follow_the_published_update(fused: bool | None) -> None:
    linear = nn.Linear(3, 2, bias=False)
    optim = Optim(lr=0.05, weight_decay=0.2, betas=(0.8, 0.9), eps=1e-3)
    optimizer = make_adamw(linear, optim, fused=fused)
    assert optimizer.fused is (fused is not False)
    w = linear.weight.detach().double().numpy()
    m, v = np.zeros_like(w), np.zeros_like(w)
    generator = np.random.Generator(np.random.Philox(1))
    for step in range(1, 6):
        gradient, lr = generator.standard_normal(w.shape), 0.05 / step
        linear.weight.grad = torch.from_numpy(gradient).float()
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        m, v = 0.8 * m + 0.2 * gradient, 0.9 * v + 0.1 * gradient**2
        w = w - lr * 0.2 * w - lr * (m / (1 - 0.8**step)) / (np.sqrt(v / (1 - 0.9**step)) + 1e-3)
    assert not math.isclose(float(m[0, 0]), 0)
    np.testing.assert_allclose(linear.weight.detach().numpy(), w, rtol=0, atol=1e-6)


def test_the_same_bits_as_torchs_class() -> None:
    ours, theirs = small_model(), small_model()
    decayed, undecayed = parameter_groups(theirs)
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": undecayed, "weight_decay": 0.0}]
    steppers = (
        make_adamw(ours, OPTIM),
        torch.optim.AdamW(groups, lr=0.01, betas=OPTIM.betas, eps=OPTIM.eps, fused=True),
    )
    tokens = torch.arange(10).view(2, 5)
    for number in range(4):
        for model, optimizer in zip((ours, theirs), steppers, strict=True):
            optimizer.zero_grad()
            model.logits(model(tokens).hidden_TD).logsumexp(dim=-1).square().mean().backward()
            if number == 2:  # a parameter without a gradient keeps its moments and its count
                model.final_norm.weight.grad = None
            for group in optimizer.param_groups:
                group["lr"] = 0.01 / (1 + number)
            optimizer.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)
        mine, torchs = steppers[0].state[one], steppers[1].state[other]
        assert mine.keys() == torchs.keys() and all(torch.equal(mine[name], torchs[name]) for name in mine)


def test_training_loads_no_compiler() -> None:
    program = """
import sys, torch
from equipoise.model.transformer import build, mean_loss
from equipoise.optim import make_adamw
from equipoise.spec.model import ModelConfig, MoEFFN
from equipoise.spec.recipe import Optim
ffn = MoEFFN(num_experts=2, top_k=1, d_expert=8, renormalize=False)
config = ModelConfig(num_layers=1, num_heads=1, d_model=4, vocab_size=5, ffn=ffn, tie_embeddings=False)
model = build(config, 0, kernels="fused")
optimizer = make_adamw(model, Optim(lr=0.1))
tokens = torch.zeros(1, 3, dtype=torch.int64)
mean_loss(model, model(tokens), tokens).backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, encoding="utf-8")
    assert done.stdout.strip() == "[]"
