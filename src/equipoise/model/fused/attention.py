"""Rotated causal attention in blocks of queries, each against the keys up to its last one; most probabilities are kept.

Queries, keys and values of a few sequences at a time are laid out head by head and rotated while they are in the cache.
Pays for sequences of 256 and more, where most of the scores above the diagonal lie in blocks that are left out; below,
torch's own kernel is as fast and keeps no probabilities.

Shapes: B sequences, S positions, N query heads, M kv heads, P = N + 2·M heads of a packed buffer, H d_head; C = (some
sequences) · M, G = N / M; of a block Q queries, L keys it can see.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from equipoise.model import layers

MIN_LENGTH: Final = 256
"""The shortest sequence that is computed in blocks; shorter ones by the plain version. See docs/performance.md."""
BLOCK: Final = 64
"""Queries of a block; measured against 32, 128 and 256."""
CHUNK_SCORES: Final = 1 << 18
"""Scores that a thread works on, 1 MiB in float32: a block of as many sequences as fit, at least one."""
KEPT_SCORES: Final = 45 << 18
"""Probabilities that a call keeps at most, 45 MiB in float32, in whole sequences; those of the others are made twice.
Memory against time: at shape A six sequences in ten are kept, at B all (docs/performance.md)."""


def attend(qkv_BSPH: Tensor, num_kv_heads: int, rope: tuple[Tensor, Tensor]) -> Tensor:
    """softmax(q · kᵀ / sqrt(H)) · v over positions not after the query, [B, S, N, H]; differentiable once in blocks.

    `qkv` holds N queries, M keys and M values, not yet rotated; `rope` is (cos, sin) as `layers.Rope` makes them.
    """
    if qkv_BSPH.shape[1] < MIN_LENGTH:
        return layers.attend(qkv_BSPH, num_kv_heads, rope)
    mixed: Tensor = _Attend.apply(qkv_BSPH, num_kv_heads, rope[0][:, 0], rope[1][:, 0])
    return mixed


class _Attend(Function):
    @staticmethod
    def forward(ctx: Any, qkv_BSPH: Tensor, M: int, cos_SH: Tensor, sin_SH: Tensor) -> Tensor:
        B, S, P, H = qkv_BSPH.shape
        N = P - 2 * M
        mixed_BSNH, num_kept = qkv_BSPH.new_empty(B, S, N, H), _num_kept(S, N)
        kept: list[Tensor] = []
        for part in _parts(B, S, N):
            q_CGSH, k_CSH, v_CSH = _by_head(qkv_BSPH[part], M)
            _rotate(q_CGSH, cos_SH, sin_SH)
            _rotate(k_CSH, cos_SH, sin_SH)
            mixed_CGSH = torch.empty_like(q_CGSH)
            kept += (q_CGSH, k_CSH, v_CSH)
            for low, high in _blocks(S):
                p_CQL = _probabilities(q_CGSH[:, :, low:high], k_CSH[:, :high])
                if part.start < num_kept:
                    kept.append(p_CQL)
                mixed_CGSH[:, :, low:high] = torch.bmm(p_CQL, v_CSH[:, :high]).view(len(k_CSH), -1, high - low, H)
            mixed_BSNH[part] = mixed_CGSH.view(-1, N, S, H).transpose(1, 2)
        ctx.save_for_backward(cos_SH, sin_SH, *kept)
        ctx.num_kv_heads, ctx.shape = M, qkv_BSPH.shape
        return mixed_BSNH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_mixed_BSNH: Tensor) -> tuple[Tensor, None, None, None]:
        cos_SH, sin_SH, *kept = ctx.saved_tensors
        M, (B, S, P, H) = ctx.num_kv_heads, ctx.shape
        N, remaining = P - 2 * M, iter(kept)
        num_kept = _num_kept(S, N)
        d_qkv_BSPH = d_mixed_BSNH.new_empty(B, S, P, H)
        for part in _parts(B, S, N):
            q_CGSH, k_CSH, v_CSH = next(remaining), next(remaining), next(remaining)
            d_mixed_CGSH = d_mixed_BSNH[part].transpose(1, 2).reshape(q_CGSH.shape)
            d_q_CGSH, d_k_CSH, d_v_CSH = torch.empty_like(q_CGSH), torch.zeros_like(k_CSH), torch.zeros_like(v_CSH)
            for low, high in _blocks(S):
                kept_here = part.start < num_kept
                p_CQL = next(remaining) if kept_here else _probabilities(q_CGSH[:, :, low:high], k_CSH[:, :high])
                q_CQH, d_mixed_CQH = (x[:, :, low:high].flatten(1, 2) for x in (q_CGSH, d_mixed_CGSH))
                d_scores_CQL = torch.bmm(d_mixed_CQH, v_CSH[:, :high].mT)
                torch._softmax_backward_data(d_scores_CQL, p_CQL, -1, p_CQL.dtype, grad_input=d_scores_CQL)
                d_q_CGSH[:, :, low:high] = torch.bmm(d_scores_CQL, k_CSH[:, :high]).view(len(k_CSH), -1, high - low, H)
                # A sum into part of a buffer would be one small matrix product per head.
                d_k_CSH[:, :high] += torch.bmm(d_scores_CQL.mT, q_CQH)
                d_v_CSH[:, :high] += torch.bmm(p_CQL.mT, d_mixed_CQH)
            for d_CGSH in (d_q_CGSH, d_k_CSH):
                _rotate(d_CGSH.mul_(H**-0.5), cos_SH, -sin_SH)
            first = 0
            for d_CGSH in (d_q_CGSH, d_k_CSH, d_v_CSH):
                d_BNSH = d_CGSH.view(part.stop - part.start, -1, S, H)
                d_qkv_BSPH[part, :, first : first + d_BNSH.shape[1]] = d_BNSH.transpose(1, 2)
                first += d_BNSH.shape[1]
        return d_qkv_BSPH, None, None, None


def _probabilities(q_CGQH: Tensor, k_CLH: Tensor) -> Tensor:
    """softmax(q · kᵀ / sqrt(H)) of queries that are the last of the L positions, [C, G·Q, L]."""
    (C, G, Q, H), L = q_CGQH.shape, k_CLH.shape[1]
    p_CQL = q_CGQH.new_empty(C, G * Q, L)
    torch.baddbmm(p_CQL, q_CGQH.flatten(1, 2), k_CLH.mT, beta=0, alpha=H**-0.5, out=p_CQL)
    p_CQL.view(C, G, Q, L)[..., L - Q :].add_(p_CQL.new_full((Q, Q), float("-inf")).triu_(1))
    return torch.softmax(p_CQL, dim=-1, out=p_CQL)


def _num_kept(S: int, N: int) -> int:
    """Of how many sequences the probabilities are kept."""
    return KEPT_SCORES // (N * sum((high - low) * high for low, high in _blocks(S)))


def _parts(B: int, S: int, N: int) -> list[slice]:
    """The sequences, cut so that the scores of the last block stay in the caches of the threads."""
    size = max(1, torch.get_num_threads() * CHUNK_SCORES // (N * min(BLOCK, S) * S))
    return [slice(low, min(low + size, B)) for low in range(0, B, size)]


def _blocks(S: int) -> list[tuple[int, int]]:
    return [(low, min(low + BLOCK, S)) for low in range(0, S, BLOCK)]


def _by_head(qkv_BSPH: Tensor, M: int) -> tuple[Tensor, Tensor, Tensor]:
    """New tensors q [C, G, S, H], k and v [C, S, H]: the heads that share keys together, positions in a row."""
    B, S, P, H = qkv_BSPH.shape
    N = P - 2 * M
    q_CGSH, k_CSH, v_CSH = (qkv_BSPH.new_empty(B * M, *rest, S, H) for rest in ((N // M,), (), ()))
    for x_CSH, packed_BSNH in zip((q_CGSH, k_CSH, v_CSH), qkv_BSPH.split((N, M, M), dim=2), strict=True):
        x_CSH.view(B, -1, S, H).copy_(packed_BSNH.transpose(1, 2))
    return q_CGSH, k_CSH, v_CSH


def _rotate(x: Tensor, cos_SH: Tensor, sin_SH: Tensor) -> None:
    """Turn every pair (i, i + H/2) of the last dimension in place; −sin turns it back. `sin` as in `layers.rotate`."""
    turned = x.roll(x.shape[-1] // 2, -1)
    x.mul_(cos_SH).addcmul_(turned, sin_SH)
