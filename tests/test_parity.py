"""The comparison of two ways to compute sees what it must; on a CPU, with bfloat16 that is slow but the same."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import equipoise.parity as parity
from equipoise.device import Compute, choose_compute
from equipoise.model.layers import RMSNorm
from equipoise.model.moe import Router
from equipoise.model.transformer import build
from equipoise.optim import make_adamw
from equipoise.parity import GPU_CHECKS, MODELS, Skipped, apart, compiled_apart, loss_and_gradients
from equipoise.step import losses

CPU = torch.device("cpu")
FLOAT32 = choose_compute("cpu", "float32", "plain")


def half(kernels: Any = "grouped", compile: bool = False) -> Compute:
    return Compute(device=CPU, autocast=torch.bfloat16, kernels=kernels, compile=compile, reason="")


@pytest.mark.parametrize("kernels", ["plain", "grouped"])
def test_bfloat16_is_within_tolerance_and_not_float32(kernels: Any) -> None:
    assert 1e-3 < apart(half(kernels), FLOAT32) < 2e-2 / 2


def test_a_way_agrees_with_itself_and_not_with_a_wrong_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert apart(FLOAT32, FLOAT32) == 0.0
    built: list[int] = []

    def perturbed(*arguments: Any) -> Any:
        model = build(*arguments)
        with torch.no_grad():
            model.final_norm.weight[7] += (math.nan if len(built) >= 4 else 0.1) * (len(built) % 2)
        built.append(0)
        return model

    monkeypatch.setattr(parity, "build", perturbed)
    assert apart(FLOAT32, FLOAT32) > 2e-2
    assert math.isnan(apart(FLOAT32, FLOAT32))


def test_compiled_losses_are_compared_or_it_is_said_why_not() -> None:
    assert compiled_apart(half(compile=True), "eager") == 0.0
    with pytest.raises(Skipped, match=r"^steps are not compiled here$"):
        compiled_apart(half(), "eager")
    with pytest.raises(Skipped, match=r"^warning: steps are not compiled: "):
        compiled_apart(half(compile=True), "no such backend")


def test_without_a_gpu_the_checks_are_skipped() -> None:
    note = "--device cpu was asked for" if torch.cuda.is_available() else "no CUDA device is visible to torch"
    for *_, measure in GPU_CHECKS:
        with pytest.raises(Skipped, match=f"^{note}$"):
            measure(CPU)


# ------------------------------------------------------------------------------------------- what stays in float32


@pytest.mark.parametrize("config", MODELS, ids=["dense", "moe"])
def test_weights_router_norms_losses_and_moments_are_float32(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(config, 0, CPU, "grouped")
    seen: dict[str, set[torch.dtype]] = {"norm": set(), "router": set(), "projection": set()}

    def note(kind: str) -> Any:
        return lambda module, args, output: seen[kind].update(
            value.dtype
            for value in (*args, *(vars(output).values() if kind == "router" else (output,)))
            if isinstance(value, Tensor)
        )

    for module in model.modules():
        if isinstance(module, RMSNorm | Router):
            module.register_forward_hook(note("norm" if isinstance(module, RMSNorm) else "router"))
        if type(module).__name__ == "Attention":
            module.register_forward_hook(lambda module, args, output: seen["projection"].add(output.dtype))
    tokens_BS = torch.arange(32).view(2, 16)
    found = losses(model, tokens_BS, tokens_BS, 1, torch.bfloat16)
    torch.stack(found).sum().backward()
    make_adamw(model, parity.RECIPE.optim).step()
    assert seen["norm"] == {torch.float32} and seen["projection"] == {torch.bfloat16}
    assert seen["router"] <= {torch.float32, torch.int64}
    assert {loss.dtype for loss in found} == {torch.float32}
    assert {t.dtype for p in model.parameters() for t in (p, p.grad) if isinstance(t, Tensor)} == {torch.float32}


def test_gradients_are_of_the_sum_of_losses() -> None:
    """By a difference quotient of one weight, in float32."""
    config = MODELS[1]
    model = build(config, 0)
    found, gradients_P = loss_and_gradients(model, FLOAT32)
    assert found.shape == (3,) and len(gradients_P) == sum(p.numel() for p in model.parameters())
    start, step = 0, 1e-2
    for name, parameter in model.named_parameters():
        if name == "final_norm.weight":
            break
        start += parameter.numel()
    with torch.no_grad():
        parameter[3] += step
    moved, _ = loss_and_gradients(model, FLOAT32)
    assert float((moved - found).sum()) / step == pytest.approx(float(gradients_P[start + 3]), rel=0.05)
