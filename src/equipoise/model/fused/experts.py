"""Routed SwiGLU experts: assignments sorted by expert, matrix products per expert, gather and sum.

A token's weight is folded into the activation, so that outputs of experts need not be kept for its gradient. Sums are
formed in a fixed order: the same bits every time.

Shapes: T tokens, D d_model, F expert width, E experts, K experts per token, A = T·K assignments, C rows of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from equipoise.model.fused.products import times, times_transposed
from equipoise.model.fused.swiglu import activation_gradients, chunks


def experts(
    x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor, w_gate_EFD: Tensor, w_up_EFD: Tensor, w_down_EDF: Tensor
) -> Tensor:
    """Σ_k weights[t, k] · expert_{ids[t, k]}(x[t]), [T, D]; can be differentiated once."""
    y_TD: Tensor = _Experts.apply(x_TD, expert_ids_TK, weights_TK, w_gate_EFD, w_up_EFD, w_down_EDF)
    return y_TD


class _Experts(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        expert_ids_TK: Tensor,
        weights_TK: Tensor,
        w_gate_EFD: Tensor,
        w_up_EFD: Tensor,
        w_down_EDF: Tensor,
    ) -> Tensor:
        (T, K), E = expert_ids_TK.shape, len(w_gate_EFD)
        order_A = expert_ids_TK.flatten().argsort(stable=True)
        counts: list[int] = torch.bincount(expert_ids_TK.flatten(), minlength=E).tolist()
        tokens_A = order_A.div(K, rounding_mode="floor")
        weights_A1 = weights_TK.reshape(T * K, 1).index_select(0, order_A)
        place_A = torch.empty_like(order_A)
        place_A[order_A] = torch.arange(T * K)
        y_AD = x_TD.new_empty(T * K, x_TD.shape[1])
        kept: list[Tensor] = []
        for e, rows in _expert_rows(counts):
            x_CD = x_TD.index_select(0, tokens_A[rows])
            gate_CF, up_CF = (times_transposed(x_CD, weights[e]) for weights in (w_gate_EFD, w_up_EFD))
            act_CF = F.silu(gate_CF).mul_(up_CF).mul_(weights_A1[rows])
            y_AD[rows] = times_transposed(act_CF, w_down_EDF[e])
            kept += (gate_CF, up_CF)
        ctx.save_for_backward(x_TD, w_gate_EFD, w_up_EFD, w_down_EDF, weights_A1, order_A, tokens_A, place_A, *kept)
        ctx.counts, ctx.top_k = counts, K
        return _gather_sum(y_AD, place_A, K)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, w_gate_EFD, w_up_EFD, w_down_EDF, weights_A1, order_A, tokens_A, place_A, *kept = ctx.saved_tensors
        d_x_AD, d_weights_A = x_TD.new_empty(len(order_A), x_TD.shape[1]), torch.empty_like(weights_A1[:, 0])
        d_w_gate, d_w_up, d_w_down = (torch.zeros_like(w) for w in (w_gate_EFD, w_up_EFD, w_down_EDF))
        for (e, rows), gate_CF, up_CF in zip(_expert_rows(ctx.counts), kept[::2], kept[1::2], strict=True):
            d_y_CD, x_CD = d_y_TD.index_select(0, tokens_A[rows]), x_TD.index_select(0, tokens_A[rows])
            silu_CF = F.silu(gate_CF)
            act_CF, d_act_CF = silu_CF * up_CF, times(d_y_CD, w_down_EDF[e])
            d_weights_A[rows] = torch.linalg.vecdot(d_act_CF, act_CF)
            d_w_down[e].addmm_(d_y_CD.t(), act_CF.mul_(weights_A1[rows]))
            d_gate_CF, d_up_CF = activation_gradients(gate_CF, up_CF, silu_CF, d_act_CF.mul_(weights_A1[rows]))
            torch.add(times(d_gate_CF, w_gate_EFD[e]), times(d_up_CF, w_up_EFD[e]), out=d_x_AD[rows])
            d_w_gate[e].addmm_(d_gate_CF.t(), x_CD)
            d_w_up[e].addmm_(d_up_CF.t(), x_CD)
        d_weights_TK = d_weights_A.index_select(0, place_A).view(-1, ctx.top_k)
        return _gather_sum(d_x_AD, place_A, ctx.top_k), None, d_weights_TK, d_w_gate, d_w_up, d_w_down


def _expert_rows(counts: list[int]) -> list[tuple[int, slice]]:
    """(expert, its sorted assignments or the next chunk of them), in order; an expert without tokens is left out."""
    stops = torch.tensor(counts).cumsum(0).tolist()
    return [
        (e, rows)
        for e, (count, stop) in enumerate(zip(counts, stops, strict=True))
        for rows in chunks(stop - count, stop)
    ]


def _gather_sum(rows_AD: Tensor, place_A: Tensor, top_k: int) -> Tensor:
    """Each token's K rows, summed, [T, D]; `place` holds where a token's rows lie."""
    if top_k == 1:
        return rows_AD.index_select(0, place_A)
    return F.embedding_bag(place_A.view(-1, top_k), rows_AD, mode="sum")
