"""Cross entropy of a linear map, a chunk of tokens at a time: logits never exist for more than one chunk.

For training the gradients are made in the forward pass, while a chunk's probabilities are in the cache; the backward
pass only scales them. Not for: losses of single tokens that are to be differentiated.

Shapes: T tokens, D d_model, V vocabulary, C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from equipoise.model.fused.products import ROWS, times, times_transposed

CHUNK_LOGITS: Final = 1 << 21
"""Logits of a chunk at most, 8 MiB in float32: fewer than that and adding up the weight's gradient takes longer."""


def mean_cross_entropy(x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor) -> Tensor:
    """Mean over tokens of -log softmax(x · weightᵀ)[target] in nats; a scalar that can be differentiated once."""
    loss: Tensor = _MeanCrossEntropy.apply(x_TD, weight_VD, targets_T)
    return loss


@torch.no_grad()
def token_cross_entropy(x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor) -> Tensor:
    """The same per token, [T]; without gradients."""
    losses_T = torch.empty(len(x_TD), dtype=x_TD.dtype)
    for rows, logits_CV in _logits(x_TD, weight_VD):
        target_C = _of_targets(logits_CV, targets_T[rows])
        torch.sub(_softmax(logits_CV), target_C, out=losses_T[rows])
    return losses_T


class _MeanCrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor) -> Tensor:
        """With p the probabilities, d loss / d logits = (p - onehot(target)) / T; the division is left to the end."""
        losses_T = torch.empty(len(x_TD), dtype=x_TD.dtype)
        d_x_TD, d_weight_VD = torch.empty_like(x_TD), torch.zeros_like(weight_VD)
        for rows, logits_CV in _logits(x_TD, weight_VD):
            targets_C = targets_T[rows]
            target_C = _of_targets(logits_CV, targets_C)
            torch.sub(_softmax(logits_CV), target_C, out=losses_T[rows])
            d_logits_CV = logits_CV
            d_logits_CV.scatter_add_(1, targets_C.unsqueeze(1), x_TD.new_full((), -1.0).expand(len(targets_C), 1))
            d_x_TD[rows] = times(d_logits_CV, weight_VD)
            d_weight_VD.addmm_(d_logits_CV.t(), x_TD[rows])
        ctx.save_for_backward(d_x_TD, d_weight_VD)
        return losses_T.mean()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor, Tensor, None]:
        d_x_TD, d_weight_VD = ctx.saved_tensors
        scale = d_loss / len(d_x_TD)
        return d_x_TD * scale, d_weight_VD * scale, None


def _logits(x_TD: Tensor, weight_VD: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Rows and logits [C, V] of one chunk after the other; the caller may overwrite them."""
    (T, _), V = x_TD.shape, len(weight_VD)
    size = max(1, CHUNK_LOGITS // V)
    size -= size % ROWS if size > ROWS else 0
    for start in range(0, T, size):
        rows = slice(start, min(T, start + size))
        yield rows, times_transposed(x_TD[rows], weight_VD)


def _softmax(logits_CV: Tensor) -> Tensor:
    """Turn logits into probabilities in place; returns the logarithm of their sum of exponentials, [C].

    It is that of the largest: logit - log p. A target's own p may be too small to have one.
    """
    largest_C = logits_CV.amax(dim=1)
    return largest_C.sub_(torch.softmax(logits_CV, dim=1, out=logits_CV).amax(dim=1).log_())


def _of_targets(logits_CV: Tensor, targets_C: Tensor) -> Tensor:
    return logits_CV.gather(1, targets_C.unsqueeze(1)).squeeze(1)
