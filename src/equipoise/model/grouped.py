"""Routed SwiGLU experts in three grouped matrix products, for a GPU: nothing here waits for the device.

Where each expert's rows end stays on the device, so the shapes are those of T·K assignments whatever the router chose;
a compiler sees one graph. Not for: choosing when this pays (`device`), the definition (`moe`, which it is held to).

Shapes: T tokens, D d_model, F expert width, E experts, K experts per token, A = T·K assignments.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

ALIGNMENT: Final = 8
"""D and F have to be multiples of this: rows of bfloat16 that begin at multiples of 16 bytes, as the kernel asks."""


def grouped_experts(
    x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor, w_gate_EFD: Tensor, w_up_EFD: Tensor, w_down_EDF: Tensor
) -> Tensor:
    """Σ_k weights[t, k] · expert_{ids[t, k]}(x[t]), [T, D] in the dtype of the weights [T, K].

    Products are formed in the dtype of autocast, which does not know grouped products and is obeyed by hand; the sum
    over K in that of `weights_TK`. The order of additions is fixed, forward and backward.
    """
    (T, K), D, E = expert_ids_TK.shape, x_TD.shape[1], len(w_gate_EFD)
    sorted_A, order_A = expert_ids_TK.flatten().sort(stable=True)
    experts_E = torch.arange(E, device=sorted_A.device)
    ends_E = torch.searchsorted(sorted_A, experts_E, right=True, out_int32=True)
    place_A = torch.empty_like(order_A).scatter_(0, order_A, torch.arange(T * K, device=order_A.device))
    x_TD, w_gate_EFD, w_up_EFD, w_down_EDF = (_cast(tensor) for tensor in (x_TD, w_gate_EFD, w_up_EFD, w_down_EDF))
    # Repeat, then permute: no row is read twice, so nothing is added in a race on the way back.
    rows_AD = _Permute.apply(x_TD.unsqueeze(1).expand(T, K, D).reshape(T * K, D), order_A, place_A)
    gate_AF = F.grouped_mm(rows_AD, w_gate_EFD.mT, offs=ends_E)
    up_AF = F.grouped_mm(rows_AD, w_up_EFD.mT, offs=ends_E)
    outputs_AD = F.grouped_mm(F.silu(gate_AF) * up_AF, w_down_EDF.mT, offs=ends_E)
    outputs_TKD = _Permute.apply(outputs_AD, place_A, order_A).view(T, K, D)
    y_TD: Tensor = (outputs_TKD.to(weights_TK.dtype) * weights_TK.unsqueeze(-1)).sum(dim=1)
    return y_TD


class _Permute(Function):
    """Rows in another order; gradients in the inverse one, where autograd would add them up atomically."""

    @staticmethod
    def forward(ctx: Any, rows_AD: Tensor, order_A: Tensor, inverse_A: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_A)
        return rows_AD.index_select(0, order_A)

    @staticmethod
    def backward(ctx: Any, d_rows_AD: Tensor) -> tuple[Tensor, None, None]:
        (inverse_A,) = ctx.saved_tensors
        return d_rows_AD.index_select(0, inverse_A), None, None


def _cast(tensor: Tensor) -> Tensor:
    device = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else tensor
