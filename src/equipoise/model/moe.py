"""Mixture of experts as three contracts: router, stack of experts, and losses that are pure functions of the routing.

Not for: adding router losses to an objective (`step` does, and nothing else), diagnostics (`routing`).

Shapes: T tokens, D d_model, F expert width, E experts, K experts per token, G groups of the balance loss, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.model.fused.experts import experts as fused_experts
from equipoise.model.layers import at_least_float32, swiglu


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Everything one layer's router computed for T tokens."""

    logits_TE: Tensor
    """Router outputs, float32."""
    probs_TE: Tensor
    """Softmax of the logits over all experts."""
    expert_ids_TK: Tensor
    """The K most probable experts of each token, most probable first, int64; of equals the lowest index first."""
    weights_TK: Tensor
    """What their outputs are multiplied with: the K probabilities, divided by their sum if `renormalize`."""


class Router(nn.Module):
    """Softmax over all experts, then the top K (Mixtral, arXiv 2401.04088; Switch, arXiv 2101.03961)."""

    def __init__(self, d_model: int, num_experts: int, top_k: int, renormalize: bool) -> None:
        super().__init__()
        self.top_k, self.renormalize = top_k, renormalize
        self.weight = nn.Parameter(torch.empty(num_experts, d_model))

    def forward(self, x_TD: Tensor) -> Routing:
        """The routing of each token; in float32 also under autocast, because rounding logits changes the choice."""
        with torch.autocast(x_TD.device.type, enabled=False):
            logits_TE = F.linear(at_least_float32(x_TD), at_least_float32(self.weight))
            probs_TE = logits_TE.softmax(dim=-1)
            # A stable sort has one answer for ties on every device; topk has none.
            sorted_TE, ids_TE = probs_TE.sort(dim=-1, descending=True, stable=True)
            weights_TK = sorted_TE[:, : self.top_k]
            if self.renormalize:
                weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        return Routing(
            logits_TE=logits_TE, probs_TE=probs_TE, expert_ids_TK=ids_TE[:, : self.top_k], weights_TK=weights_TK
        )


class Experts(nn.Module):
    """E SwiGLU experts with stacked weights; every token reaches all of its K experts (no capacity, none dropped)."""

    def __init__(self, d_model: int, d_expert: int, num_experts: int, fused: bool = False) -> None:
        super().__init__()
        self.fused = fused
        self.w_gate = nn.Parameter(torch.empty(num_experts, d_expert, d_model))
        self.w_up = nn.Parameter(torch.empty(num_experts, d_expert, d_model))
        self.w_down = nn.Parameter(torch.empty(num_experts, d_model, d_expert))

    def forward(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Σ_k weights[t, k] · expert_{ids[t, k]}(x[t]), [T, D].

        Assignments are sorted by expert, each expert multiplies its rows, and each token gathers and sums its K rows:
        the same order of additions every time, forward and backward.
        """
        if self.fused:
            return fused_experts(x_TD, expert_ids_TK, weights_TK, self.w_gate, self.w_up, self.w_down)
        (T, K), (E, _, D) = expert_ids_TK.shape, self.w_gate.shape
        flat_ids = expert_ids_TK.flatten()
        order = flat_ids.argsort(stable=True)
        counts: list[int] = torch.bincount(flat_ids, minlength=E).tolist()
        place = torch.empty_like(order)
        place[order] = torch.arange(T * K, device=order.device)
        # Repeat, then permute: no row is read twice, so the gathers' backward passes add nothing in a race on a GPU.
        rows = x_TD.unsqueeze(1).expand(T, K, D).reshape(T * K, D).index_select(0, order)
        outputs = [
            swiglu(rows_e, *weights)
            for rows_e, *weights in zip(
                torch.split(rows, counts), self.w_gate.unbind(), self.w_up.unbind(), self.w_down.unbind(), strict=True
            )
        ]
        outputs_TKD = torch.cat(outputs).index_select(0, place).view(T, K, D)
        return (outputs_TKD * weights_TK.unsqueeze(-1)).sum(dim=1)


class MoE(nn.Module):
    """Router and experts in place of one feed-forward layer."""

    def __init__(
        self, d_model: int, d_expert: int, num_experts: int, top_k: int, renormalize: bool, fused: bool = False
    ) -> None:
        super().__init__()
        self.router = Router(d_model, num_experts, top_k, renormalize)
        self.experts = Experts(d_model, d_expert, num_experts, fused)

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Routing]:
        """(output [T, D], the routing)."""
        routing: Routing = self.router(x_TD)
        output_TD: Tensor = self.experts(x_TD, routing.expert_ids_TK, routing.weights_TK)
        return output_TD, routing


def load_balance_loss(routing: Routing, num_groups: int) -> Tensor:
    """Switch balance loss of one layer, mean over `num_groups` equal runs of consecutive tokens; a scalar.

    Per group E · Σ_e f_e · p_e (arXiv 2101.03961 eq. 4, with top-K): f_e is the fraction of the T·K assignments sent to
    expert e and carries no gradient, p_e the mean probability of e. It is 1 at uniform use for every K and E/K when K
    experts take everything. Every token counts: training windows are packed and hold no padding. Raises ValueError when
    the tokens do not divide into the groups.
    """
    T, E = routing.probs_TE.shape
    if T % num_groups:
        raise ValueError(f"num_groups = {num_groups} is not accepted; expected a divisor of the {T} tokens")
    ids_GA = routing.expert_ids_TK.reshape(num_groups, -1)
    groups_G1 = torch.arange(num_groups, device=ids_GA.device).unsqueeze(1)
    counts_GE = torch.bincount((ids_GA + E * groups_G1).flatten(), minlength=num_groups * E).view(num_groups, E)
    p_GE = routing.probs_TE.view(num_groups, -1, E).mean(dim=1)
    f_GE = counts_GE.to(p_GE.dtype) / ids_GA.shape[1]
    return E * (f_GE * p_GE).sum() / num_groups


def router_z_loss(routing: Routing) -> Tensor:
    """Mean over tokens of logsumexp(logits)² of one layer (ST-MoE, arXiv 2202.08906 eq. 5); a scalar."""
    return routing.logits_TE.logsumexp(dim=-1).square().mean()


def router_losses(routings: Sequence[Routing], num_groups: int) -> tuple[Tensor, Tensor]:
    """(load balance, z) of a model: each layer's loss by itself, then the mean over layers."""
    balance = torch.stack([load_balance_loss(routing, num_groups) for routing in routings]).mean()
    z = torch.stack([router_z_loss(routing) for routing in routings]).mean()
    return balance, z
