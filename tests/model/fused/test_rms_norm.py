"""RMSNorm by hand: torch's own is the oracle."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from equipoise.model.fused.rms_norm import rms_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("T", "D"), [(13, 5), (1, 7), (17, 1), (64, 64)])
@pytest.mark.parametrize("eps", [1e-5, 0.5])
def test_equals_the_plain_norm(held_to, draw, T, D, eps, dtype) -> None:
    held_to(
        lambda x, weight: rms_norm(x, weight, eps),
        lambda x, weight: F.rms_norm(x, (D,), weight, eps),
        draw(T, D, dtype=dtype),
        draw(D, seed=1, dtype=dtype),
    )


def test_any_leading_dimensions(held_to, draw) -> None:
    held_to(
        lambda x, weight: rms_norm(x, weight, 1e-5),
        lambda x, weight: F.rms_norm(x, (5,), weight, 1e-5),
        draw(5, 3, 2).transpose(0, 2),
        draw(5, seed=1),
    )


def test_gradients(checked, draw) -> None:
    checked(lambda x, weight: rms_norm(x, weight, 0.1), draw(7, 5), draw(5, seed=1))


def test_a_row_of_zeros_has_a_finite_gradient() -> None:
    x = torch.zeros(2, 3, requires_grad=True)
    y = rms_norm(x, torch.ones(3), 0.25)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(y, torch.zeros(2, 3)) and torch.equal(gradient, torch.full((2, 3), 2.0))  # 1 / sqrt(eps)
