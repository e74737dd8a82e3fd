"""RMSNorm with its backward pass written out.

Shapes: T tokens, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, same shape as `x`; can be differentiated once."""
    y_TD: Tensor = _RMSNorm.apply(x.reshape(-1, x.shape[-1]), weight_D, eps)
    return y_TD.view_as(x)


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        norm_T1 = torch.linalg.vector_norm(x_TD, dim=1, keepdim=True)
        scale_T1 = norm_T1.square_().mul_(1.0 / x_TD.shape[1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x_TD, weight_D, scale_T1)
        y_TD: Tensor = x_TD * scale_T1
        return y_TD.mul_(weight_D)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_TD: Tensor) -> tuple[Tensor, Tensor, None]:
        """With n = x · scale: d_weight = Σ_t d_y · n, d_x = scale · (d_y · weight − n · mean(d_y · weight · n))."""
        x_TD, weight_D, scale_T1 = ctx.saved_tensors
        normed_TD = x_TD * scale_T1
        product_TD = d_y_TD * normed_TD
        d_weight_D = product_TD.sum(dim=0)
        mean_T1 = torch.mv(product_TD, weight_D).mul_(-1.0 / x_TD.shape[1]).unsqueeze(1)
        d_x_TD = torch.mul(d_y_TD, weight_D, out=product_TD)
        return d_x_TD.addcmul_(normed_TD, mean_T1).mul_(scale_T1), d_weight_D, None
