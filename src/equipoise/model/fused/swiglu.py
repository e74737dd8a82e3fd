"""SwiGLU feed-forward, a chunk of tokens at a time, so that what lies between its matrix products stays in the cache.

The two projections are kept for the backward pass; everything else is computed again.

Shapes: T tokens, D d_model, F width, C tokens of a chunk.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from equipoise.model.fused.products import times, times_transposed

CHUNK_TOKENS: Final = 1024
"""Tokens of a chunk: matrix products reach their full speed, and a chunk of F = 512 is 2 MiB in float32."""


def swiglu(x_TD: Tensor, w_gate_FD: Tensor, w_up_FD: Tensor, w_down_DF: Tensor) -> Tensor:
    """w_down · (silu(w_gate · x) ⊙ (w_up · x)), [T, D]; can be differentiated once."""
    y_TD: Tensor = _SwiGLU.apply(x_TD, w_gate_FD, w_up_FD, w_down_DF)
    return y_TD


def activation_gradients(gate_CF: Tensor, up_CF: Tensor, silu_CF: Tensor, d_act_CF: Tensor) -> tuple[Tensor, Tensor]:
    """(d_gate, d_up) of silu(gate) ⊙ up, given silu(gate) and d_act, whose memory is used up."""
    d_up_CF = silu_CF.mul_(d_act_CF)
    d_gate_CF: Tensor = torch.ops.aten.silu_backward(d_act_CF.mul_(up_CF), gate_CF)
    return d_gate_CF, d_up_CF


def chunks(start: int, stop: int) -> list[slice]:
    """The rows from `start` to `stop` in chunks."""
    return [slice(low, min(low + CHUNK_TOKENS, stop)) for low in range(start, stop, CHUNK_TOKENS)]


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, w_gate_FD: Tensor, w_up_FD: Tensor, w_down_DF: Tensor) -> Tensor:
        y_TD = torch.empty_like(x_TD)
        kept: list[Tensor] = []
        for rows in chunks(0, len(x_TD)):
            gate_CF, up_CF = (times_transposed(x_TD[rows], weight) for weight in (w_gate_FD, w_up_FD))
            y_TD[rows] = times_transposed(F.silu(gate_CF).mul_(up_CF), w_down_DF)
            kept += (gate_CF, up_CF)
        ctx.save_for_backward(x_TD, w_gate_FD, w_up_FD, w_down_DF, *kept)
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_TD: Tensor) -> tuple[Tensor, ...]:
        x_TD, w_gate_FD, w_up_FD, w_down_DF, *kept = ctx.saved_tensors
        d_x_TD = torch.empty_like(x_TD)
        d_w_gate, d_w_up, d_w_down = (torch.zeros_like(w) for w in (w_gate_FD, w_up_FD, w_down_DF))
        for rows, gate_CF, up_CF in zip(chunks(0, len(x_TD)), kept[::2], kept[1::2], strict=True):
            silu_CF = F.silu(gate_CF)
            d_w_down.addmm_(d_y_TD[rows].t(), silu_CF * up_CF)
            d_act_CF = times(d_y_TD[rows], w_down_DF)
            d_gate_CF, d_up_CF = activation_gradients(gate_CF, up_CF, silu_CF, d_act_CF)
            torch.add(times(d_gate_CF, w_gate_FD), times(d_up_CF, w_up_FD), out=d_x_TD[rows])
            d_w_gate.addmm_(d_gate_CF.t(), x_TD[rows])
            d_w_up.addmm_(d_up_CF.t(), x_TD[rows])
        return d_x_TD, d_w_gate, d_w_up, d_w_down
