"""One update under every router: biases move by the loads of the whole step, and only there; places are passed on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from equipoise.errors import DivergedError
from equipoise.model.transformer import Transformer, build, mean_loss
from equipoise.optim import make_adamw
from equipoise.spec.model import Balance, BalanceBias, BalanceLoss, ModelConfig, MoEFFN, NoBalance
from equipoise.spec.recipe import Optim, Recipe
from equipoise.spec.run import RunConfig
from equipoise.step import train_step

B, S, V, E, L = 6, 8, 31, 5, 2
BIAS = BalanceBias(rate=0.01)


def make_run(micro: int = 2, balance: Balance = BIAS, **ffn: Any) -> RunConfig:
    routed = MoEFFN(**{"num_experts": E, "top_k": 2, "d_expert": 16, "balance": balance, **ffn})
    model = ModelConfig(num_layers=L, num_heads=2, d_model=16, vocab_size=V, ffn=routed, init_std=0.3)
    recipe = Recipe(
        seq_len=S, batch_tokens=B * S, balance_group=1, micro_sequences=micro, optim=Optim(lr=1e-3, grad_clip=0.0)
    )
    return RunConfig(arm="arm", seed=0, budget=4 * B * S, model=model, recipe=recipe, data="")


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    windows = torch.from_numpy(np.random.Generator(np.random.Philox(step)).integers(0, V, (B, S + 1)))
    return windows[:, :-1], windows[:, 1:]


def trained(run: RunConfig, steps: int = 3, kernels: Any = "plain") -> Transformer:
    model = build(run.model, run.seed, kernels=kernels)
    optimizer = make_adamw(model, run.recipe.optim)
    for step in range(steps):
        train_step(model, optimizer, *batch_of(step), run, 1e-2, step=step)
    return model


def biases(model: Transformer) -> list[list[float]]:
    return [model.state_dict()[f"blocks.{layer}.ffn.router.bias"].tolist() for layer in range(L)]


@pytest.mark.parametrize("kernels", ["plain", "fused"])
@pytest.mark.parametrize(("top_k", "renormalize"), [(1, False), (2, True), (2, False), (E, True)])
@pytest.mark.parametrize("micro", [1, 2, 6])
def test_biases_move_by_the_loads_of_the_whole_step(micro: int, top_k: int, renormalize: bool, kernels: Any) -> None:
    """Oracle: after each update, loads counted token by token over all sequences at the weights before it."""
    run = make_run(micro, top_k=top_k, renormalize=renormalize)
    model = build(run.model, run.seed, kernels=kernels)
    optimizer, expected = make_adamw(model, run.recipe.optim), np.zeros((L, E))
    for step in range(4):
        inputs_BS, targets_BS = batch_of(step)
        loads = [[0] * E for _ in range(L)]
        for row in inputs_BS:
            with torch.no_grad():
                for layer, routing in enumerate(model(row.unsqueeze(0)).routing):
                    for chosen in routing.expert_ids_TK.tolist():
                        for e in chosen:
                            loads[layer][e] += 1
        train_step(model, optimizer, inputs_BS, targets_BS, run, 1e-2, step=step)
        for layer in range(L):
            mean = sum(loads[layer]) / E
            for e in range(E):
                expected[layer, e] += 0.01 * (1 if loads[layer][e] < mean else -1 if loads[layer][e] > mean else 0)
        np.testing.assert_allclose(biases(model), expected, rtol=0, atol=1e-7)
    assert np.any(expected) == (top_k < E)  # every expert on every token: nothing to even out


def test_the_bias_is_no_part_of_any_gradient() -> None:
    """The first update is made before a bias has moved: whatever the rate, the weights are those without balancing."""
    states = [
        trained(make_run(balance=balance), steps=1).state_dict()
        for balance in (NoBalance(), BalanceBias(rate=1e-9), BalanceBias(rate=10.0))
    ]
    for name, tensor in states[0].items():
        assert torch.equal(states[1][name], tensor) and torch.equal(states[2][name], tensor), name
    assert not torch.equal(states[1]["blocks.0.ffn.router.bias"], states[2]["blocks.0.ffn.router.bias"])


def test_a_bias_evens_out_what_a_router_prefers() -> None:
    """The same tokens again and again at rate 0 of the weights: only the bias can spread them."""
    run = make_run(balance=BalanceBias(rate=0.02))
    model = build(run.model, run.seed)
    optimizer = make_adamw(model, run.recipe.optim)
    inputs_BS, targets_BS = batch_of(0)

    def worst() -> int:
        with torch.no_grad():
            routings = model(inputs_BS).routing
        return max(int(torch.bincount(r.expert_ids_TK.flatten(), minlength=E).max()) for r in routings)

    before = worst()
    for _ in range(60):
        train_step(model, optimizer, inputs_BS, targets_BS, run, 0.0)
    even = B * S * 2 / E
    assert before > 1.5 * even and worst() < 1.35 * even


def test_reading_moves_no_bias() -> None:
    model = trained(make_run())
    before = biases(model)
    assert np.any(before)
    for mode in (model.train, model.eval):
        mode()
        output = model(batch_of(0)[0])
        mean_loss(model, output, batch_of(0)[1]).backward()
    assert biases(model) == before


def test_a_diverged_step_moves_no_bias() -> None:
    run = make_run()
    model = trained(run)
    before = biases(model)
    with torch.no_grad():
        model.embed.weight[:] = float("inf")
    with pytest.raises(DivergedError, match="lm_loss is not finite"):
        train_step(model, make_adamw(model, run.recipe.optim), *batch_of(0), run, 1e-2)
    assert biases(model) == before


@pytest.mark.parametrize("kernels", ["plain", "fused"])
def test_a_frozen_router_keeps_its_weights_and_trains_the_rest(kernels: Any) -> None:
    run = make_run(balance=NoBalance(), router="frozen")
    before, after = build(run.model, run.seed).state_dict(), trained(run, kernels=kernels).state_dict()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor) is name.endswith("router.weight"), name


def test_what_is_measured_of_each_router() -> None:
    for router, balance in (("learned", BalanceLoss(coef=0.1)), ("learned", BalanceBias()), ("frozen", NoBalance())):
        run = make_run(balance=balance, router=router)
        stats = train_step(
            build(run.model, 0), make_adamw(build(run.model, 0), run.recipe.optim), *batch_of(0), run, 0.0
        )
        assert stats.load_balance is not None and stats.router_z is not None
    for router in ("hash", "random"):
        run = make_run(balance=NoBalance(), router=router)
        model = build(run.model, 0)
        stats = train_step(model, make_adamw(model, run.recipe.optim), *batch_of(0), run, 0.0)
        assert stats.load_balance is None and stats.router_z is None and stats.lm_loss > 0


@pytest.mark.parametrize("micro", [1, 3, 6])
def test_sequence_j_of_update_t_is_window_t_times_b_plus_j(micro: int) -> None:
    run = make_run(micro, balance=NoBalance(), router="random")
    model = build(run.model, 0)
    inputs_BS, targets_BS = batch_of(0)
    losses = {}
    for step in (0, 3):
        with torch.no_grad():
            output = model(inputs_BS, windows_B=torch.arange(step * B, step * B + B))
            losses[step] = float(mean_loss(model, output, targets_BS))
        stats = train_step(model, make_adamw(model, run.recipe.optim), inputs_BS, targets_BS, run, 0.0, step=step)
        assert stats.lm_loss == pytest.approx(losses[step], rel=1e-6)
    assert losses[0] != pytest.approx(losses[3], rel=1e-4)


@pytest.mark.parametrize("router", ["learned", "frozen", "hash", "random"])
def test_cutting_the_batch_differently_changes_nothing(router: Any) -> None:
    balance = BalanceBias() if router == "learned" else NoBalance()
    models = [trained(make_run(n, balance=balance, router=router, num_shared_experts=1), steps=1) for n in (6, 3, 1)]
    whole, *cut = [{name: p.grad for name, p in model.named_parameters() if p.grad is not None} for model in models]
    assert any("shared" in name for name in whole)
    for other in cut:
        assert other.keys() == whole.keys()
        for name, gradient in whole.items():
            torch.testing.assert_close(other[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    if router == "learned":
        assert biases(models[0]) == biases(models[1]) == biases(models[2])


@pytest.mark.parametrize("router", ["learned", "frozen", "hash", "random"])
@pytest.mark.parametrize("top_k", [1, E])
def test_fused_and_plain_kernels_agree(router: Any, top_k: int) -> None:
    balance = BalanceBias() if router == "learned" else NoBalance()
    run = make_run(balance=balance, router=router, num_shared_experts=2, top_k=top_k, renormalize=False)
    losses = []
    for kernels in ("plain", "fused"):
        model = trained(run, kernels=kernels)
        with torch.no_grad():
            losses.append(float(mean_loss(model, model(batch_of(9)[0]), batch_of(9)[1])))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
