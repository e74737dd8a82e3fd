"""Experts in grouped products against one token and one expert at a time, gradients included; when they are used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise.model.grouped import grouped_experts
from equipoise.model.moe import MoE


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.Generator(np.random.Philox(seed)).standard_normal(shape)).float()


def one_at_a_time(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, *w: Tensor) -> Tensor:
    rows = []
    for t, ids in enumerate(ids_TK.tolist()):
        row = torch.zeros_like(x_TD[t])
        for k, e in enumerate(ids):
            gate, up = w[0][e] @ x_TD[t], w[1][e] @ x_TD[t]
            row = row + weights_TK[t, k] * (w[2][e] @ (gate * torch.sigmoid(gate) * up))
        rows.append(row)
    return torch.stack(rows)


def inputs(T: int, D: int, F: int, E: int, K: int, skew: str) -> tuple[Tensor, ...]:
    """Experts: no two of a token equal. 'one empty': the last is never chosen; 'all on one': always the first."""
    scores_TE = random(T, E, seed=7)
    if skew != "none":
        scores_TE[:, E - 1] += -1e3 if skew == "one empty" else 1e3
    ids_TK = scores_TE.argsort(dim=1, descending=True)[:, :K]
    floats = (random(T, D), random(T, K, seed=1), random(E, F, D, seed=2), random(E, F, D, seed=3))
    x, weights, gate, up = (tensor.requires_grad_() for tensor in floats)
    return x, ids_TK, weights, gate, up, random(E, D, F, seed=4).requires_grad_()


@pytest.mark.parametrize("skew", ["none", "one empty", "all on one"])
@pytest.mark.parametrize(
    ("T", "D", "F", "E", "K"), [(13, 12, 20, 5, 1), (14, 12, 20, 5, 2), (37, 4, 12, 7, 3), (1, 12, 4, 3, 2)]
)
def test_equals_one_token_and_expert_at_a_time(T: int, D: int, F: int, E: int, K: int, skew: str) -> None:
    tensors = inputs(T, D, F, E, K, skew)
    with_respect_to = [tensor for tensor in tensors if tensor.requires_grad]
    found, expected = grouped_experts(*tensors), one_at_a_time(*tensors)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    direction = random(T, D, seed=9)
    gradients = [torch.autograd.grad((y * direction).sum(), with_respect_to) for y in (found, expected)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)
    if skew == "one empty" and K < E:
        assert not gradients[0][2][E - 1].any()


def make_moe(D: int, F: int, grouped: bool = True) -> MoE:
    moe = MoE(D, F, 5, 2, True, grouped=grouped)
    with torch.no_grad():
        for index, parameter in enumerate(moe.parameters()):
            parameter.copy_(0.7 * random(*parameter.shape, seed=index))
    return moe


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[set[torch.dtype]]:
    """The dtypes of every grouped product."""
    seen: list[set[torch.dtype]] = []
    grouped_mm = F.grouped_mm

    def spied(a: Tensor, b: Tensor, **options: Any) -> Tensor:
        seen.append({a.dtype, b.dtype})
        return grouped_mm(a, b, **options)

    monkeypatch.setattr("equipoise.model.grouped.F.grouped_mm", spied)
    return seen


def test_products_are_bfloat16_and_sums_float32_under_autocast(products: list[set[torch.dtype]]) -> None:
    moe, loop, x = make_moe(24, 16), make_moe(24, 16, grouped=False), random(33, 24)
    outputs, gradients = [], []
    for one in (moe, loop):
        with torch.autocast("cpu", torch.bfloat16):
            outputs.append(one(x)[0])
        gradients.append(torch.autograd.grad(outputs[-1].square().sum(), list(one.experts.parameters())))
    assert products == [{torch.bfloat16}] * 3
    assert outputs[0].dtype == torch.float32 and {g.dtype for g in gradients[0]} == {torch.float32}
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=0.01 * float(outputs[1].detach().abs().max()))
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0.02 * float(expected.abs().max()))


@pytest.mark.parametrize(("D", "F", "half"), [(24, 16, False), (20, 16, True), (24, 12, True)])
def test_float32_and_rows_out_of_line_are_left_to_the_loop(
    D: int, F: int, half: bool, products: list[set[torch.dtype]]
) -> None:
    moe, loop, x = make_moe(D, F), make_moe(D, F, grouped=False), random(33, D)
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        assert torch.equal(moe(x)[0], loop(x)[0])
    assert not products
