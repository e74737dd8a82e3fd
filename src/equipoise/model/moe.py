"""Mixture of experts as three contracts: router, stack of experts, and losses that are pure functions of the routing.

Not for: adding router losses to an objective or moving biases (`step` does, and nothing else), diagnostics (`routing`).

Shapes: T tokens, D d_model, F expert width, E experts, K experts per token, G groups of the balance loss, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.model.fused.experts import experts as fused_experts
from equipoise.model.fused.swiglu import swiglu as fused_swiglu
from equipoise.model.grouped import ALIGNMENT, grouped_experts
from equipoise.model.layers import SwiGLU, at_least_float32, swiglu
from equipoise.spec.model import RouterKind


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Everything one layer's router computed for T tokens."""

    logits_TE: Tensor | None
    """Router outputs, float32; None of a router without weights (hash, random)."""
    probs_TE: Tensor | None
    """Softmax of the logits over all experts; None likewise."""
    expert_ids_TK: Tensor
    """The K chosen experts of each token, int64: the most probable (with a bias: those of the highest biased
    probability), highest first; of equals the lowest index first."""
    weights_TK: Tensor
    """What their outputs are multiplied with: the K probabilities, divided by their sum if `renormalize`; or 1/K."""


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where T tokens stand: what a router that does not look at hidden states chooses by."""

    token_ids_T: Tensor
    """Input token ids, int64."""
    windows_T: Tensor
    """Number of each token's window, int64."""
    positions_T: Tensor
    """Position in the window, from 0, int64."""


class Router(nn.Module):
    """Softmax over all experts, then the top K (Mixtral, arXiv 2401.04088; Switch, arXiv 2101.03961).

    With `bias` (arXiv 2408.15664 eq. 3) the K highest of probability + bias are chosen; the weights are the bare
    probabilities, so that no gradient knows of it. The paper adds it to sigmoid scores; here it is the softmax
    probabilities, which are what the other arms' routers choose by. `frozen` weights are never trained.
    """

    bias: Tensor | None

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        top_k: int,
        renormalize: bool,
        *,
        bias: bool = False,
        frozen: bool = False,
    ) -> None:
        super().__init__()
        self.top_k, self.renormalize = top_k, renormalize
        self.weight = nn.Parameter(torch.empty(num_experts, d_model), requires_grad=not frozen)
        self.register_buffer("bias", torch.zeros(num_experts) if bias else None)

    def forward(self, x_TD: Tensor, _: Places | None = None) -> Routing:
        """The routing of each token; in float32 also under autocast, because rounding logits changes the choice."""
        with torch.autocast(x_TD.device.type, enabled=False):
            logits_TE = F.linear(at_least_float32(x_TD), at_least_float32(self.weight))
            probs_TE = logits_TE.softmax(dim=-1)
            # A stable sort has one answer for ties on every device; topk has none.
            if self.bias is None:
                sorted_TE, ids_TE = probs_TE.sort(dim=-1, descending=True, stable=True)
                ids_TK, weights_TK = ids_TE[:, : self.top_k], sorted_TE[:, : self.top_k]
            else:
                scores_TE = probs_TE.detach() + self.bias
                ids_TK = scores_TE.sort(dim=-1, descending=True, stable=True).indices[:, : self.top_k]
                weights_TK = probs_TE.gather(1, ids_TK)
            if self.renormalize:
                weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        return Routing(logits_TE=logits_TE, probs_TE=probs_TE, expert_ids_TK=ids_TK, weights_TK=weights_TK)


class DrawnRouter(nn.Module):
    """A control without weights: K different experts by hash of the token id, or by place alone; weights 1/K.

    Every choice is a pure function of `key` (drawn from seed and layer) and of the token's id, or of its window and
    position: the same at every evaluation and after a resume. Over ids or places all sets of K experts are equally
    likely. (Hash routing: arXiv 2106.04426, which sends a token to one expert; here to K.)
    """

    def __init__(self, kind: RouterKind, num_experts: int, top_k: int, key: int) -> None:
        super().__init__()
        self.by_token, self.num_experts, self.top_k, self.key = kind == "hash", num_experts, top_k, key

    def forward(self, x_TD: Tensor, places: Places) -> Routing:
        """The routing of each token; nothing of the hidden states but their number and dtype enters it."""
        if self.by_token:
            drawn_T = mixed(places.token_ids_T ^ self.key)
        else:
            drawn_T = mixed(mixed(places.windows_T ^ self.key) ^ places.positions_T)
        # Different experts get different numbers, `mixed` being one to one: no ties.
        numbers_TE = mixed(drawn_T.unsqueeze(1) + GOLDEN * torch.arange(self.num_experts, device=drawn_T.device))
        ids_TK = numbers_TE.argsort(dim=-1)[:, : self.top_k]
        weights_TK = at_least_float32(x_TD).new_full(ids_TK.shape, 1 / self.top_k)
        return Routing(logits_TE=None, probs_TE=None, expert_ids_TK=ids_TK, weights_TK=weights_TK)


GOLDEN: Final = 0x9E3779B9
"""2^32 ÷ the golden ratio, odd: its multiples lie far apart (Knuth, TAOCP 3, section 6.4)."""
_LOW_32: Final = 0xFFFFFFFF


def mixed(x: Tensor) -> Tensor:
    """A one-to-one scramble of the low 32 bits of int64 numbers, in which every input bit moves half of the output.

    Two multiply-and-shift rounds with constants found by search (github.com/skeeto/hash-prospector); both are below
    2^31, so that no product leaves int64, and every device computes the same.
    """
    x = x & _LOW_32
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _LOW_32
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _LOW_32
    return x ^ (x >> 15)


class Experts(nn.Module):
    """E SwiGLU experts with stacked weights; every token reaches all of its K experts (no capacity, none dropped)."""

    def __init__(
        self, d_model: int, d_expert: int, num_experts: int, fused: bool = False, grouped: bool = False
    ) -> None:
        super().__init__()
        self.fused = fused
        self.grouped = grouped and d_model % ALIGNMENT == 0 and d_expert % ALIGNMENT == 0
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
        if self.grouped and torch.is_autocast_enabled(x_TD.device.type):  # a GPU's grouped kernel is for half precision
            return grouped_experts(x_TD, expert_ids_TK, weights_TK, self.w_gate, self.w_up, self.w_down)
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
    """Router and experts in place of one feed-forward layer, and the experts that every token shares."""

    def __init__(
        self,
        d_model: int,
        d_expert: int,
        num_experts: int,
        top_k: int,
        renormalize: bool,
        fused: bool = False,
        grouped: bool = False,
        *,
        router: RouterKind = "learned",
        bias: bool = False,
        key: int = 0,
        num_shared: int = 0,
    ) -> None:
        super().__init__()
        self.router = (
            DrawnRouter(router, num_experts, top_k, key)
            if router in ("hash", "random")
            else Router(d_model, num_experts, top_k, renormalize, bias=bias, frozen=router == "frozen")
        )
        self.experts = Experts(d_model, d_expert, num_experts, fused, grouped)
        # The sum of n SwiGLUs is one that is n times as wide.
        compute = fused_swiglu if fused else swiglu
        self.shared = SwiGLU(d_model, num_shared * d_expert, compute) if num_shared else None

    def forward(self, x_TD: Tensor, places: Places | None = None) -> tuple[Tensor, Routing]:
        """(routed + shared output [T, D], the routing); hash and random routers need the tokens' `places`."""
        routing: Routing = self.router(x_TD, places)
        output_TD: Tensor = self.experts(x_TD, routing.expert_ids_TK, routing.weights_TK)
        return output_TD if self.shared is None else output_TD + self.shared(x_TD), routing


def load_balance_loss(routing: Routing, num_groups: int) -> Tensor:
    """Switch balance loss of one layer, mean over `num_groups` equal runs of consecutive tokens; a scalar.

    Per group E · Σ_e f_e · p_e (arXiv 2101.03961 eq. 4, with top-K): f_e is the fraction of the T·K assignments sent to
    expert e and carries no gradient, p_e the mean probability of e. It is 1 at uniform use for every K and E/K when K
    experts take everything. Every token counts: training windows are packed and hold no padding. Raises ValueError when
    the tokens do not divide into the groups, or the router has no probabilities.
    """
    _, probs_TE = _computed(routing)
    T, E = probs_TE.shape
    if T % num_groups:
        raise ValueError(f"num_groups = {num_groups} is not accepted; expected a divisor of the {T} tokens")
    ids_GA = routing.expert_ids_TK.reshape(num_groups, -1)
    groups_G1 = torch.arange(num_groups, device=ids_GA.device).unsqueeze(1)
    cells_A = (ids_GA + E * groups_G1).flatten()
    # Adding ones counts as bincount does, without waiting for a GPU to say which cell is the last.
    counts_GE = cells_A.new_zeros(num_groups * E).scatter_add_(0, cells_A, torch.ones_like(cells_A)).view(num_groups, E)
    p_GE = probs_TE.view(num_groups, -1, E).mean(dim=1)
    f_GE = counts_GE.to(p_GE.dtype) / ids_GA.shape[1]
    return E * (f_GE * p_GE).sum() / num_groups


def router_z_loss(routing: Routing) -> Tensor:
    """Mean over tokens of logsumexp(logits)² of one layer (ST-MoE, arXiv 2202.08906 eq. 5); a scalar."""
    logits_TE, _ = _computed(routing)
    return logits_TE.logsumexp(dim=-1).square().mean()


def router_losses(routings: Sequence[Routing], num_groups: int) -> tuple[Tensor, Tensor]:
    """(load balance, z) of a model: each layer's loss by itself, then the mean over layers."""
    balance = torch.stack([load_balance_loss(routing, num_groups) for routing in routings]).mean()
    z = torch.stack([router_z_loss(routing) for routing in routings]).mean()
    return balance, z


def _computed(routing: Routing) -> tuple[Tensor, Tensor]:
    if routing.logits_TE is None or routing.probs_TE is None:
        raise ValueError("a router without weights (hash, random) has no losses; expected a learned or frozen one")
    return routing.logits_TE, routing.probs_TE


# ------------------------------------------------------------------------------------------------ balancing by a bias


def assignments(routings: Sequence[Routing], num_experts: int) -> Tensor:
    """How many assignments each expert of each layer got, [L, E] int64."""
    ids_LA = torch.stack([routing.expert_ids_TK.flatten() for routing in routings])
    # As in `load_balance_loss`: bincount would wait for a GPU.
    return ids_LA.new_zeros(len(routings), num_experts).scatter_add_(1, ids_LA, torch.ones_like(ids_LA))


def moved_bias(bias_E: Tensor, counts_E: Tensor, rate: float) -> Tensor:
    """bias_e + rate · sign(mean load − load_e), [E]: up for an expert with too few assignments, down for one with too
    many (arXiv 2408.15664, algorithm 1). `counts_E` are the assignments of a whole update, int64.

    >>> moved_bias(torch.zeros(3), torch.tensor([4, 1, 4]), 0.5).tolist()
    [-0.5, 0.5, -0.5]
    """
    sign_E = torch.sign(counts_E.sum() - len(counts_E) * counts_E)  # of whole numbers: an even load is exactly even
    return bias_E + rate * sign_E.to(bias_E.dtype)


@torch.no_grad()
def move_biases(model: nn.Module, counts_LE: Tensor, rate: float) -> None:
    """Move the bias of every router of `model` that has one, layer by layer, in place."""
    biases = [module.bias for module in model.modules() if isinstance(module, Router) and module.bias is not None]
    for bias_E, counts_E in zip(biases, counts_LE, strict=True):
        bias_E.copy_(moved_bias(bias_E, counts_E, rate))
