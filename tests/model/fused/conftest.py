"""How every hand-written pass is held to its plain version: values and gradients, finite differences, no second one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

Function = Callable[..., Tensor | tuple[Tensor, ...]]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6}


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal numbers that ask for a gradient."""
    numbers = np.random.Generator(np.random.Philox(seed)).standard_normal(shape)
    return torch.from_numpy(numbers).to(dtype).requires_grad_()


@pytest.fixture(name="draw")
def draw_fixture() -> Callable[..., Tensor]:
    return draw


@pytest.fixture
def held_to() -> Callable[..., None]:
    """`held_to(fused, plain, *inputs)`: the same values, gradients, and memory of the inputs untouched."""

    def check(fused: Function, plain: Function, *inputs: Tensor) -> None:
        before = [tensor.detach().clone() for tensor in inputs]
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        found: list[list[Tensor]] = []
        for function in (fused, plain):
            results = function(*inputs)
            outputs = list(results) if isinstance(results, tuple) else [results]
            weights = [draw(*output.shape, seed=77 + i, dtype=output.dtype) for i, output in enumerate(outputs)]
            total = torch.stack([(o * w.detach()).sum() for o, w in zip(outputs, weights, strict=True)]).sum()
            found.append([*(output.detach() for output in outputs), *torch.autograd.grad(total, wanted)])
        tolerance = TOLERANCE[inputs[0].dtype]
        for one, other in zip(*found, strict=True):
            scale = max(1.0, float(other.abs().max())) if other.numel() else 1.0
            torch.testing.assert_close(one, other, rtol=0, atol=tolerance * scale)
        assert all(torch.equal(tensor, old) for tensor, old in zip(inputs, before, strict=True))

    return check


@pytest.fixture
def checked() -> Callable[..., None]:
    """`checked(fused, *inputs)`: gradients by finite differences, the same bits again, and no second derivative."""

    def check(function: Function, *inputs: Tensor) -> None:
        assert torch.autograd.gradcheck(function, inputs, nondet_tol=0.0)
        results = function(*inputs)
        first = results[0] if isinstance(results, tuple) else results
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        gradient = torch.autograd.grad(first.square().sum(), wanted, create_graph=True, allow_unused=True)[0]
        with pytest.raises(RuntimeError, match="marked with @once_differentiable"):
            gradient.sum().backward()

    return check
