"""Router, experts and their losses against a double loop over tokens and experts, gradients included."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from equipoise.model.layers import SwiGLU
from equipoise.model.moe import MoE, Routing, load_balance_loss, router_losses, router_z_loss


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.from_numpy(np.random.Generator(np.random.Philox(seed)).standard_normal(shape) * scale)


def make_moe(D: int, F: int, E: int, K: int, renormalize: bool = True, seed: int = 0, fused: bool = False) -> MoE:
    moe = MoE(D, F, E, K, renormalize, fused).double()
    with torch.no_grad():
        for index, parameter in enumerate(moe.parameters()):
            parameter.copy_(random(*parameter.shape, seed=1000 * seed + index, scale=0.7))
    return moe


def top(probs: list[float], K: int) -> list[int]:
    """The K most probable, of equals the lowest index."""
    return sorted(range(len(probs)), key=lambda e: (-probs[e], e))[:K]


def routing_of(logits_TE: Tensor, K: int) -> Routing:
    """The routing that a router with these outputs makes; top K without renormalisation."""
    probs_TE = logits_TE.softmax(-1)
    ids_TK = torch.tensor([top(probs, K) for probs in probs_TE.tolist()])
    return Routing(logits_TE=logits_TE, probs_TE=probs_TE, expert_ids_TK=ids_TK, weights_TK=probs_TE.gather(1, ids_TK))


def oracle(moe: MoE, x_TD: Tensor, num_groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """(output, balance loss, z-loss), one token and one expert at a time; plain enough for autograd to be trusted."""
    w_r, K, experts = moe.router.weight, moe.router.top_k, moe.experts
    (T, _), E = x_TD.shape, len(w_r)
    outputs, all_probs, chosen, z = [], [], [], torch.zeros((), dtype=x_TD.dtype)
    for t in range(T):
        logits = [(w_r[e] * x_TD[t]).sum() for e in range(E)]
        log_sum = torch.log(sum((torch.exp(logit) for logit in logits), torch.zeros((), dtype=x_TD.dtype)))
        probs = [torch.exp(logit - log_sum) for logit in logits]
        best = top([p.item() for p in probs], K)
        divisor = sum(probs[e] for e in best) if moe.router.renormalize else 1.0
        output = torch.zeros_like(x_TD[t])
        for e in best:
            gate, up = experts.w_gate[e] @ x_TD[t], experts.w_up[e] @ x_TD[t]
            output = output + probs[e] / divisor * (experts.w_down[e] @ (gate * torch.sigmoid(gate) * up))
        outputs.append(output)
        all_probs.append(probs)
        chosen.append(best)
        z = z + log_sum**2 / T
    balance, size = torch.zeros((), dtype=x_TD.dtype), T // num_groups
    for g in range(num_groups):
        tokens = range(g * size, (g + 1) * size)
        for e in range(E):
            f = sum(chosen[t].count(e) for t in tokens) / (size * K)
            p = sum((all_probs[t][e] for t in tokens), torch.zeros((), dtype=x_TD.dtype)) / size
            balance = balance + E * f * p / num_groups
    return torch.stack(outputs), balance, z


def gradients(moe: MoE, x_TD: Tensor, output: Tensor, balance: Tensor, z: Tensor) -> dict[str, Tensor]:
    objective = (output * random(*output.shape, seed=9)).sum() + 0.3 * balance + 0.7 * z
    named = {"x": x_TD, **dict(moe.named_parameters())}
    return dict(zip(named, torch.autograd.grad(objective, list(named.values())), strict=True))


SIZES = [
    # T, D, F, E, K, groups; awkward primes
    (13, 11, 7, 5, 1, 1),
    (14, 11, 7, 5, 2, 2),
    (39, 5, 13, 7, 3, 3),
    (13, 11, 7, 3, 3, 1),
    (1, 11, 7, 5, 2, 1),
    (17, 3, 2, 1, 1, 1),
]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("skew", ["none", "one empty", "all on one"])
@pytest.mark.parametrize(("T", "D", "F", "E", "K", "groups"), SIZES)
def test_equals_the_double_loop(
    T: int, D: int, F: int, E: int, K: int, groups: int, skew: str, renormalize: bool, fused: bool
) -> None:
    moe = make_moe(D, F, E, K, renormalize, fused=fused)
    x = random(T, D, seed=5)
    if skew != "none":  # a constant feature turns one router column into a bias
        x[:, 0] = 1.0
        with torch.no_grad():
            moe.router.weight[E - 1, 0] += -30.0 if skew == "one empty" else 30.0
    x.requires_grad_()
    output, routing = moe(x)
    found = (output, load_balance_loss(routing, groups), router_z_loss(routing))
    expected = oracle(moe, x, groups)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    expected_gradients = gradients(moe, x, *expected)
    for name, gradient in gradients(moe, x, *found).items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-11, atol=1e-11, msg=name)
    counts = torch.bincount(routing.expert_ids_TK.flatten(), minlength=E)
    if skew == "one empty" and K < E:
        assert counts[E - 1] == 0
    if skew == "all on one":
        assert counts[E - 1] == T
    assert routing.expert_ids_TK.dtype == torch.int64 and routing.weights_TK.shape == (T, K)


@given(
    T=st.integers(0, 9), E=st.integers(1, 6), K=st.integers(1, 6), seed=st.integers(0, 99), renormalize=st.booleans()
)
@settings(max_examples=25, deadline=None)
def test_equals_the_double_loop_for_any_size(T: int, E: int, K: int, seed: int, renormalize: bool) -> None:
    K = min(K, E)
    moe = make_moe(3, 2, E, K, renormalize, seed)
    x = random(T, 3, seed=seed)
    output, _ = moe(x)
    assert output.shape == (T, 3)
    if T:
        torch.testing.assert_close(output, oracle(moe, x, 1)[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("T", [0, 3])
def test_an_expert_without_tokens_has_gradients_that_are_zero_not_missing(T: int, fused: bool) -> None:
    moe = make_moe(3, 2, 7, 2, fused=fused)
    x = random(1, 3, seed=5).repeat(T, 1)
    output, routing = moe(x)
    output.square().sum().backward()
    idle = sorted(set(range(7)) - set(routing.expert_ids_TK.flatten().tolist()))
    assert len(idle) == (5 if T else 7)
    for parameter in moe.experts.parameters():
        assert parameter.grad is not None and torch.equal(parameter.grad[idle], torch.zeros_like(parameter.grad[idle]))


# -------------------------------------------------------------------------------------------- what it must equal


def dense_twin(moe: MoE, expert: int = 0) -> SwiGLU:
    twin = SwiGLU(moe.experts.w_gate.shape[2], moe.experts.w_gate.shape[1]).double()
    with torch.no_grad():
        for name in ("w_gate", "w_up", "w_down"):
            getattr(twin, name).copy_(getattr(moe.experts, name)[expert])
    return twin


@pytest.mark.parametrize("renormalize", [True, False])
def test_one_expert_is_a_dense_layer(renormalize: bool) -> None:
    moe = make_moe(11, 7, 1, 1, renormalize)
    x = random(13, 11)
    torch.testing.assert_close(moe(x)[0], dense_twin(moe)(x), rtol=0, atol=1e-13)


def test_identical_experts_are_a_dense_layer() -> None:
    moe = make_moe(11, 7, 5, 3)
    with torch.no_grad():
        for parameter in moe.experts.parameters():
            parameter.copy_(parameter[:1].expand_as(parameter))
    x = random(13, 11)
    assert len(set(moe(x)[1].expert_ids_TK.flatten().tolist())) > 3
    torch.testing.assert_close(moe(x)[0], dense_twin(moe)(x), rtol=0, atol=1e-13)


@pytest.mark.parametrize("renormalize", [True, False])
def test_all_experts_are_the_softmax_weighted_sum(renormalize: bool) -> None:
    E = 5
    moe = make_moe(11, 7, E, E, renormalize)
    x = random(13, 11)
    probs = (x @ moe.router.weight.T).softmax(-1)
    expected = sum(probs[:, e : e + 1] * dense_twin(moe, e)(x) for e in range(E))
    torch.testing.assert_close(moe(x)[0], expected, rtol=0, atol=1e-12)


def test_renaming_experts_changes_nothing() -> None:
    E, K = 7, 3
    moe, other = make_moe(11, 5, E, K), make_moe(11, 5, E, K)
    new_order = torch.tensor([3, 0, 6, 1, 5, 2, 4])  # other's expert i is moe's expert new_order[i]
    with torch.no_grad():
        for parameter, source in zip(other.parameters(), moe.parameters(), strict=True):
            parameter.copy_(source[new_order])
    x = random(29, 11)
    (output, routing), (other_output, other_routing) = moe(x), other(x)
    torch.testing.assert_close(other_output, output, rtol=0, atol=1e-13)
    assert torch.equal(new_order[other_routing.expert_ids_TK], routing.expert_ids_TK)
    for loss in (lambda r: load_balance_loss(r, 1), router_z_loss):
        torch.testing.assert_close(loss(other_routing), loss(routing), rtol=1e-14, atol=0)


def test_reordering_tokens_reorders_the_output() -> None:
    moe, x = make_moe(11, 7, 5, 2), random(23, 11)
    shuffled = torch.from_numpy(np.random.Generator(np.random.Philox(3)).permutation(23))
    torch.testing.assert_close(moe(x[shuffled])[0], moe(x)[0][shuffled], rtol=0, atol=1e-13)


# ----------------------------------------------------------------------------------------------------- the router


def test_top_1_reaches_the_router_only_without_renormalisation() -> None:
    largest = {}
    for renormalize, K in ((False, 1), (True, 1), (True, 2)):
        moe = make_moe(11, 7, 5, K, renormalize)
        moe(random(29, 11))[0].square().sum().backward()
        assert moe.router.weight.grad is not None
        largest[renormalize, K] = float(moe.router.weight.grad.abs().max())
    assert largest[False, 1] > 1e-2 and largest[True, 2] > 1e-2
    assert largest[True, 1] < 1e-12


@pytest.mark.parametrize(("E", "K"), [(8, 2), (5, 5), (33, 3), (4, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_of_equals_the_lowest_index_is_taken(E: int, K: int, dtype: torch.dtype) -> None:
    moe = MoE(11, 7, E, K, renormalize=True).to(dtype)
    with torch.no_grad():
        moe.router.weight.zero_()
    routing = moe.router(random(4099, 11).to(dtype))
    assert torch.equal(routing.expert_ids_TK, torch.arange(K).expand(4099, K))
    assert torch.equal(routing.weights_TK, torch.full((4099, K), 1 / K, dtype=dtype))


def test_a_tie_at_the_edge_takes_the_lower_index() -> None:
    moe = MoE(4, 3, 4, 2, renormalize=False).double()
    with torch.no_grad():
        moe.router.weight.copy_(torch.eye(4))
    logits = torch.tensor([[1.0, 2.0, 1.0, 0.0], [0.0, 1.0, 1.0, 1.0], [1.0, 0.0, 2.0, 2.0]], dtype=torch.float64)
    assert moe.router(logits).expert_ids_TK.tolist() == [[1, 0], [1, 2], [2, 3]]


def test_the_router_stays_in_float32_under_autocast() -> None:
    moe, x = make_moe(11, 7, 5, 2).float(), random(29, 11).float()
    plain = moe.router(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, routing = moe(x)
    assert routing.logits_TE.dtype == routing.probs_TE.dtype == routing.weights_TK.dtype == torch.float32
    assert torch.equal(routing.logits_TE, plain.logits_TE)
    assert output.isfinite().all()
    assert moe.router(x.bfloat16()).logits_TE.dtype == torch.float32


# ----------------------------------------------------------------------------------------------------- the losses


@pytest.mark.parametrize(("E", "K"), [(4, 1), (4, 2), (5, 3), (8, 8), (1, 1)])
def test_balance_is_one_when_even_and_e_over_k_when_collapsed(E: int, K: int) -> None:
    even = torch.zeros(E, E, dtype=torch.float64)
    for t in range(E):
        even[t, [(t + k) % E for k in range(K)]] = 50.0
    assert float(load_balance_loss(routing_of(even, K), 1)) == pytest.approx(1.0, abs=1e-12)
    collapsed = torch.zeros(E, E, dtype=torch.float64)
    collapsed[:, :K] = 50.0
    assert float(load_balance_loss(routing_of(collapsed, K), 1)) == pytest.approx(E / K, abs=1e-12)


def test_one_layer_cannot_hide_the_collapse_of_another() -> None:
    first, second = torch.full((8, 4), -20.0), torch.full((8, 4), -20.0)
    first[:, :2], second[:, 2:] = 20.0, 20.0
    layers = [routing_of(first, 2), routing_of(second, 2)]
    balance, _ = router_losses(layers, 1)
    assert float(balance) == pytest.approx(2.0, abs=1e-6)
    pooled = routing_of(torch.cat([first, second]), 2)
    assert float(load_balance_loss(pooled, 1)) == pytest.approx(1.0, abs=1e-6)  # what averaging first would have said


def test_only_the_tokens_given_count() -> None:
    """Every token of a training window is real; were pads part of the routing, they would be counted."""
    real = 20.0 * torch.eye(4)
    pads = torch.zeros(12, 4)
    pads[:, 0] = 20.0
    assert float(load_balance_loss(routing_of(real, 1), 1)) == pytest.approx(1.0, abs=1e-6)
    assert float(load_balance_loss(routing_of(torch.cat([real, pads]), 1), 1)) == pytest.approx(2.6875, abs=1e-6)


def test_balance_is_counted_within_groups() -> None:
    """Two groups, each on one expert of its own: even together, collapsed apart."""
    logits = torch.full((6, 2), -20.0)
    logits[:3, 0], logits[3:, 1] = 20.0, 20.0
    routing = routing_of(logits, 1)
    assert float(load_balance_loss(routing, 1)) == pytest.approx(1.0, abs=1e-6)
    assert float(load_balance_loss(routing, 2)) == pytest.approx(2.0, abs=1e-6)


def test_cutting_a_batch_between_groups_changes_no_loss() -> None:
    whole = routing_of(random(24, 5, scale=2.0), 2)
    losses = []
    for first in (0, 8, 16):
        fields = {f.name: getattr(whole, f.name)[first : first + 8] for f in dataclasses.fields(Routing)}
        losses.append(router_losses([Routing(**fields)], 2))
    balance, z = router_losses([whole], 6)
    assert float(balance) == pytest.approx(sum(float(b) for b, _ in losses) / 3, abs=1e-14)
    assert float(z) == pytest.approx(sum(float(z) for _, z in losses) / 3, abs=1e-13)


def test_usage_carries_no_gradient() -> None:
    """d loss / d probs is E·f/(T·G) of the token's group and nothing else."""
    logits = random(6, 3, scale=2.0).requires_grad_()
    routing = routing_of(logits, 1)
    (gradient,) = torch.autograd.grad(load_balance_loss(routing, 2), routing.probs_TE)
    for t in range(6):
        group = routing.expert_ids_TK[3 * (t // 3) : 3 * (t // 3) + 3, 0].tolist()
        expected = [3 * group.count(e) / 3 / 3 / 2 for e in range(3)]
        assert gradient[t].tolist() == pytest.approx(expected, abs=1e-14)


def test_groups_must_divide_the_tokens() -> None:
    with pytest.raises(ValueError, match=r"^num_groups = 4 is not accepted; expected a divisor of the 6 tokens$"):
        load_balance_loss(routing_of(torch.zeros(6, 3), 1), 4)


def test_z_loss_of_large_and_of_equal_logits() -> None:
    assert float(router_z_loss(routing_of(torch.tensor([[100.0, 0.0]]), 1))) == 10000.0
    assert float(router_z_loss(routing_of(torch.zeros(7, 8), 2))) == pytest.approx(math.log(8) ** 2, rel=1e-6)
    mixed = routing_of(torch.tensor([[100.0, 0.0], [0.0, 0.0]]), 1)
    assert float(router_z_loss(mixed)) == pytest.approx((10000 + math.log(2) ** 2) / 2, rel=1e-6)


# -------------------------------------------------------------------------------------------------- stale memory


@pytest.mark.parametrize("fused", [False, True])
def test_nothing_unwritten_is_ever_read(fused: bool) -> None:
    """Memory full of NaN is handed back just before each pass; an expert with no and one with all tokens are there."""
    moe = make_moe(11, 7, 5, 1, fused=fused).float()
    x = random(64, 11).float()
    x[:, 0] = 1.0
    with torch.no_grad():
        moe.router.weight[4, 0] = 60.0
    optimizer = torch.optim.SGD(moe.parameters(), lr=1e-3)
    for _ in range(3):
        poison = [torch.full(shape, math.nan) for shape in ((64, 11), (64, 7), (5, 7, 11), (64, 5), (64,)) * 8]
        del poison
        output, routing = moe(x)
        loss = output.square().sum() + load_balance_loss(routing, 1) + router_z_loss(routing)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert output.isfinite().all()
        assert all(p.isfinite().all() and p.grad is not None and p.grad.isfinite().all() for p in moe.parameters())
    assert set(moe(x)[1].expert_ids_TK.flatten().tolist()) == {4}
