"""Matrix products of tokens and weights, by the faster of torch's two libraries.

torch multiplies float32 matrices with MKL, which is Intel's; on AMD processors oneDNN, which torch brings along too,
takes 10 to 20 % less time for products with a weight. Products that sum over tokens stay with MKL.

Shapes: T tokens, I and O widths in and out.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from equipoise.device import ONEDNN

MIN_WIDTH: Final = 128
"""Narrower products gain nothing by oneDNN."""
ROWS: Final = 256
"""oneDNN compiles a product for every shape and keeps it: only numbers of tokens that come again, multiples of this."""


def times_transposed(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """x · weightᵀ, [T, O]; without gradients."""
    if _by_onednn(x_TI, weight_OI):
        return _onednn(x_TI, weight_OI)
    return torch.mm(x_TI, weight_OI.t())


def times(x_TO: Tensor, weight_OI: Tensor) -> Tensor:
    """x · weight, [T, I]; without gradients."""
    if _by_onednn(x_TO, weight_OI):
        return _onednn(x_TO, weight_OI.t())
    return torch.mm(x_TO, weight_OI)


def linear(x: Tensor, weight_OI: Tensor) -> Tensor:
    """x · weightᵀ over the last dimension of `x`; can be differentiated once."""
    y_TO: Tensor = _Linear.apply(x.reshape(-1, x.shape[-1]), weight_OI)
    return y_TO.view(*x.shape[:-1], -1)


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(x_TI, weight_OI)
        return times_transposed(x_TI, weight_OI)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_TO: Tensor) -> tuple[Tensor, Tensor]:
        x_TI, weight_OI = ctx.saved_tensors
        return times(d_y_TO, weight_OI), torch.mm(d_y_TO.t(), x_TI)


def _by_onednn(x: Tensor, weight_OI: Tensor) -> bool:
    fits = len(x) > 0 and len(x) % ROWS == 0 and min(weight_OI.shape) >= MIN_WIDTH
    return ONEDNN and fits and x.dtype == torch.float32


def _onednn(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, weight_OI, None, "none", [], None)
    return product
