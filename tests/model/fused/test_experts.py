"""Fused experts: the plain loop of `moe.Experts` is the oracle, itself held to a double loop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from equipoise.model.fused import swiglu as module
from equipoise.model.fused.experts import experts
from equipoise.model.moe import Experts


def plain(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, *stacks: Tensor) -> Tensor:
    E, width, D = stacks[0].shape
    layer = Experts(D, width, E)
    return torch.func.functional_call(
        layer, dict(zip(("w_gate", "w_up", "w_down"), stacks, strict=True)), (x_TD, ids_TK, weights_TK)
    )


def ids(T: int, E: int, K: int, skew: str) -> Tensor:
    """K different experts of each token: spread, or with an expert that gets nothing, or one that gets every token."""
    if skew == "one empty":
        assert K < E
        return torch.stack([torch.arange(K).roll(t) + (t % (E - K)) for t in range(T)])  # never E - 1
    spread = [[(t + 2 * k) % E if E % 2 else (t + k) % E for k in range(K)] for t in range(T)]
    if skew == "all on one":
        spread = [[E - 1, *[(t + k) % (E - 1) for k in range(K - 1)]] for t in range(T)]
    return torch.tensor(spread)


def tensors(draw, T: int, D: int, width: int, E: int, K: int, dtype: torch.dtype) -> list[Tensor]:
    shapes = ((T, D), (T, K), (E, width, D), (E, width, D), (E, D, width))
    return [draw(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("chunk", [1, 3, 1000])
@pytest.mark.parametrize("skew", ["none", "one empty", "all on one"])
@pytest.mark.parametrize(
    ("T", "D", "width", "E", "K"), [(13, 5, 7, 5, 2), (29, 3, 2, 4, 1), (1, 5, 3, 7, 3), (14, 4, 3, 3, 2)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_the_plain_experts(held_to, draw, monkeypatch, T, D, width, E, K, skew, chunk, dtype) -> None:
    monkeypatch.setattr(module, "CHUNK_TOKENS", chunk)
    x, weights, *stacks = tensors(draw, T, D, width, E, K, dtype)
    chosen = ids(T, E, K, skew)
    counts = torch.bincount(chosen.flatten(), minlength=E).tolist()
    assert skew != "one empty" or counts[E - 1] == 0
    assert skew != "all on one" or counts[E - 1] == T
    held_to(experts, plain, x, chosen, weights, *stacks)


@pytest.mark.parametrize("skew", ["none", "one empty", "all on one"])
def test_gradients(checked, draw, monkeypatch, skew) -> None:
    monkeypatch.setattr(module, "CHUNK_TOKENS", 3)
    x, weights, *stacks = tensors(draw, 7, 3, 2, 4, 2, torch.float64)
    checked(experts, x, ids(7, 4, 2, skew), weights, *stacks)


def test_no_tokens(held_to, draw) -> None:
    x, weights, *stacks = tensors(draw, 0, 3, 2, 4, 2, torch.float64)
    held_to(experts, plain, x, torch.empty(0, 2, dtype=torch.int64), weights, *stacks)
