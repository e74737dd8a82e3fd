"""Chunked cross entropy: torch's own on whole logits is the oracle."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import equipoise.model.fused.cross_entropy as fused
from equipoise.model.fused.cross_entropy import mean_cross_entropy, token_cross_entropy

SIZES = [(13, 5, 7), (1, 3, 11), (29, 2, 1), (64, 8, 16)]  # T, D, V


def targets(T: int, V: int) -> Tensor:
    return (torch.arange(T) * 5 + 2) % V


def plain(x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor) -> Tensor:
    return F.cross_entropy(x_TD @ weight_VD.T, targets_T)


@pytest.mark.parametrize("chunk", [1, 3, 5, 1000])
@pytest.mark.parametrize(("T", "D", "V"), SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_the_plain_loss(held_to, draw, monkeypatch, T, D, V, chunk, dtype) -> None:
    monkeypatch.setattr(fused, "CHUNK_LOGITS", chunk * V)
    x, weight = draw(T, D, dtype=dtype), draw(V, D, seed=1, dtype=dtype)
    held_to(mean_cross_entropy, plain, x, weight, targets(T, V))
    losses = token_cross_entropy(x, weight, targets(T, V))
    assert not losses.requires_grad and losses.dtype == dtype
    expected = F.cross_entropy(x @ weight.T, targets(T, V), reduction="none").detach()
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-12 if dtype == torch.float64 else 5e-6)


def test_gradients(checked, draw, monkeypatch) -> None:
    monkeypatch.setattr(fused, "CHUNK_LOGITS", 3 * 7)
    checked(mean_cross_entropy, draw(13, 5), draw(7, 5, seed=1), targets(13, 7))


def test_losses_beyond_what_a_probability_can_hold() -> None:
    """A target at e^-200 of the rest costs 200 nats, not infinitely many; the best one costs nothing."""
    x = torch.tensor([[100.0]]).requires_grad_()
    weight = torch.tensor([[1.0], [-1.0]])
    for target, expected in ((1, 200.0), (0, 0.0)):
        loss = mean_cross_entropy(x, weight, torch.tensor([target]))
        assert loss.item() == token_cross_entropy(x, weight, torch.tensor([target])).item() == expected
        (gradient,) = torch.autograd.grad(loss, x)
        assert gradient.item() == (2.0 if target == 1 else 0.0)


def test_what_is_no_number_stays_none() -> None:
    x = torch.tensor([[1.0], [math.nan]])
    assert math.isnan(mean_cross_entropy(x, torch.ones(2, 1), torch.tensor([0, 1])).item())


def test_logits_exist_for_one_chunk_only(draw, monkeypatch) -> None:
    """The largest tensor that any operation returns is a chunk of logits or a gradient, never [T, V]."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                self.elements = max(self.elements, result.untyped_storage().nbytes() // result.element_size())
            return result

    T, D, V = 64, 2, 50
    monkeypatch.setattr(fused, "CHUNK_LOGITS", 4 * V)
    x, weight = draw(T, D), draw(V, D, seed=1)
    for function in (mean_cross_entropy, token_cross_entropy):
        with Largest() as seen:
            function(x, weight, targets(T, V))
        assert seen.elements == 4 * V
    with Largest() as seen:
        plain(x, weight, targets(T, V))
    assert seen.elements == T * V
