"""Causal attention in blocks of queries, each against the keys up to its last one; probabilities are kept.

Pays for sequences of 512 and more, where most of the scores above the diagonal lie in blocks that are left out; below,
torch's own kernel is as fast and keeps no probabilities.

Shapes: B sequences, S positions, N query heads, M kv heads, H d_head; of a block Q queries, L keys it can see, and for
matrix products C = sequences · M, G = N / M · Q.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from equipoise.model import layers

MIN_LENGTH: Final = 512
"""The shortest sequence that is computed in blocks; shorter ones by the plain version. See docs/performance.md."""
BLOCK: Final = 64
"""Queries of a block; measured against 32, 128 and 256."""
CHUNK_SCORES: Final = 1 << 18
"""Scores of a block and as many sequences as fit, 1 MiB in float32; at least one sequence."""


def attend(q_BSNH: Tensor, k_BSMH: Tensor, v_BSMH: Tensor) -> Tensor:
    """softmax(q · kᵀ / sqrt(H)) · v over positions not after the query, [B, S, N, H]; differentiable once in blocks."""
    if q_BSNH.shape[1] < MIN_LENGTH:
        return layers.attend(q_BSNH, k_BSMH, v_BSMH)
    mixed: Tensor = _Attend.apply(q_BSNH, k_BSMH, v_BSMH)
    return mixed


class _Attend(Function):
    @staticmethod
    def forward(ctx: Any, q_BSNH: Tensor, k_BSMH: Tensor, v_BSMH: Tensor) -> Tensor:
        _, S, N, H = q_BSNH.shape
        M = k_BSMH.shape[2]
        mixed_BSNH = torch.empty_like(q_BSNH, memory_format=torch.contiguous_format)
        probs = []
        for part in _parts(q_BSNH):
            k_CSH, v_CSH = _grouped(k_BSMH[part], M), _grouped(v_BSMH[part], M)
            for low, high in _blocks(S):
                q_CGH = _grouped(q_BSNH[part, low:high], M)
                scores_CGL = q_CGH.new_empty(len(q_CGH), q_CGH.shape[1], high)
                torch.baddbmm(scores_CGL, q_CGH, k_CSH[:, :high].mT, beta=0, alpha=H**-0.5, out=scores_CGL)
                scores_CGL.view(len(q_CGH), N // M, high - low, high)[..., low:].add_(_mask(high - low, scores_CGL))
                probs.append(torch.softmax(scores_CGL, dim=-1, out=scores_CGL))
                _ungrouped(torch.bmm(scores_CGL, v_CSH[:, :high]), mixed_BSNH[part, low:high])
        ctx.save_for_backward(q_BSNH, k_BSMH, v_BSMH, *probs)
        return mixed_BSNH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_mixed_BSNH: Tensor) -> tuple[Tensor, ...]:
        q_BSNH, k_BSMH, v_BSMH, *probs = ctx.saved_tensors
        _, S, _, H = q_BSNH.shape
        M = k_BSMH.shape[2]
        d_q_BSNH, d_k_BSMH, d_v_BSMH = (t.new_empty(t.shape) for t in (q_BSNH, k_BSMH, v_BSMH))
        remaining = iter(probs)
        for part in _parts(q_BSNH):
            k_CSH, v_CSH = _grouped(k_BSMH[part], M), _grouped(v_BSMH[part], M)
            d_k_CSH, d_v_CSH = torch.zeros_like(k_CSH), torch.zeros_like(v_CSH)
            for low, high in _blocks(S):
                p_CGL = next(remaining)
                q_CGH, d_mixed_CGH = _grouped(q_BSNH[part, low:high], M), _grouped(d_mixed_BSNH[part, low:high], M)
                d_scores_CGL = torch.bmm(d_mixed_CGH, v_CSH[:, :high].mT)
                torch._softmax_backward_data(d_scores_CGL, p_CGL, -1, p_CGL.dtype, grad_input=d_scores_CGL)
                d_q_CGH = torch.baddbmm(q_CGH, d_scores_CGL, k_CSH[:, :high], beta=0, alpha=H**-0.5)
                _ungrouped(d_q_CGH, d_q_BSNH[part, low:high])
                d_k_CSH[:, :high].baddbmm_(d_scores_CGL.mT, q_CGH, alpha=H**-0.5)
                d_v_CSH[:, :high].baddbmm_(p_CGL.mT, d_mixed_CGH)
            _ungrouped(d_k_CSH, d_k_BSMH[part])
            _ungrouped(d_v_CSH, d_v_BSMH[part])
        return d_q_BSNH, d_k_BSMH, d_v_BSMH


def _parts(q_BSNH: Tensor) -> list[slice]:
    """The sequences, cut so that the scores of the last block stay in the cache."""
    B, S, N, _ = q_BSNH.shape
    size = max(1, CHUNK_SCORES // (N * min(BLOCK, S) * S))
    return [slice(low, min(low + size, B)) for low in range(0, B, size)]


def _blocks(S: int) -> list[tuple[int, int]]:
    return [(low, min(low + BLOCK, S)) for low in range(0, S, BLOCK)]


def _mask(Q: int, like: Tensor) -> Tensor:
    """-inf above the diagonal, 0 elsewhere, [Q, Q]."""
    return like.new_full((Q, Q), float("-inf")).triu_(1)


def _grouped(x_BQNH: Tensor, M: int) -> Tensor:
    """[B·M, G·Q, H]: the queries that share a key head, one query head after the other (keys and values: G = 1)."""
    B, Q, N, H = x_BQNH.shape
    return x_BQNH.transpose(1, 2).reshape(B * M, N // M * Q, H)


def _ungrouped(x_CGH: Tensor, out_BQNH: Tensor) -> None:
    """The inverse of `_grouped`, written to `out`."""
    B, Q, N, H = out_BQNH.shape
    out_BQNH.transpose(1, 2).copy_(x_CGH.view(B, N, Q, H))
