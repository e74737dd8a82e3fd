"""What only a CUDA card can show; skipped, with the reason, where there is none.

pytest tests/test_cuda.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from equipoise.compiled import choose_losses
from equipoise.device import choose_compute, put
from equipoise.model.grouped import grouped_experts
from equipoise.model.moe import MoE
from equipoise.model.transformer import build
from equipoise.optim import make_adamw
from equipoise.parity import MODELS, RECIPE, V
from equipoise.rng import stream
from equipoise.selftest import run_checks
from equipoise.step import losses
from equipoise.train import train

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible to torch"),
    pytest.mark.filterwarnings("default"),  # drivers and compilers warn; a card is not the place to be strict
]


def test_the_self_test_passes_on_the_card() -> None:
    compute, checks = run_checks("cuda")
    assert compute.device.type == "cuda"
    assert {check.name: check.note for check in checks if check.status == "failed"} == {}
    skipped = {check.name for check in checks if check.status == "skipped"}
    assert skipped <= {"fused-plain", "gpu-bfloat16", "gpu-compiled"}


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_losses_and_gradients_wait_for_nothing(kind: str) -> None:
    """torch itself raises when the host waits for the card."""
    compute = choose_compute("cuda", "auto")
    if kind == "moe" and compute.kernels != "grouped":
        pytest.skip(f"experts are computed in a loop: {compute.reason}")
    config = next(config for config in MODELS if config.ffn.kind == kind)
    model = build(config, 0, compute.device, compute.kernels)
    tokens_BS = put(stream(0, "data", "cuda").integers(V, size=(8, 16)), compute.device)
    model.rope(0, 16)
    optimizer = make_adamw(model, RECIPE.optim)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        torch.stack(losses(model, tokens_BS, tokens_BS, 1, compute.autocast)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(p.isfinite().all() for p in model.parameters())


def test_steps_are_compiled_on_the_card() -> None:
    """Not that they are right (the self-test says that), but that nothing stood in the way."""
    compute = choose_compute("cuda", "auto")
    notes: list[str] = []
    model = build(MODELS[0], 0, compute.device, compute.kernels)
    function, settled = choose_losses(model, RECIPE, compute, notes.append)
    assert function is not losses and settled == compute and not notes


@pytest.mark.parametrize("biased", [-1e3, 0.0, 1e3])
def test_grouped_experts_on_the_card_are_the_loop(biased: float) -> None:
    """Also with an expert that no token, or every token, goes to, and over memory full of NaN."""
    if choose_compute("cuda", "auto").kernels != "grouped":
        pytest.skip("experts are computed in a loop on this card")
    T, D, F, E, K = 203, 64, 40, 5, 2
    draws = stream(0, "data", "grouped")
    moe = MoE(D, F, E, K, True, grouped=True).cuda()
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.copy_(torch.from_numpy(0.3 * draws.standard_normal(tuple(parameter.shape))))
        moe.router.weight[E - 1, 0] += biased
    x_TD = torch.from_numpy(draws.standard_normal((T, D))).float().cuda()
    x_TD[:, 0] = 1.0
    routing = moe.router(x_TD)
    weights = list(moe.experts.parameters())
    for _ in range(3):
        poison = [torch.full((E, F, D), float("nan"), device="cuda", dtype=torch.bfloat16) for _ in range(12)]
        del poison
        results = []
        for grouped in (True, False):
            moe.experts.grouped = grouped
            with torch.autocast("cuda", torch.bfloat16):
                y_TD = moe.experts(x_TD, routing.expert_ids_TK, routing.weights_TK.detach())
            results.append((y_TD, *torch.autograd.grad(y_TD.square().sum(), weights)))
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found, expected.to(found.dtype), rtol=0, atol=0.02 * float(expected.abs().max()))
        if biased < 0:
            assert all(not gradient[E - 1].any() for gradient in results[0][1:])


def test_the_sum_over_experts_adds_in_one_order() -> None:
    if choose_compute("cuda", "auto").kernels != "grouped":
        pytest.skip("experts are computed in a loop on this card")
    draws = stream(0, "data", "order")
    x, weights, gate, up, down = (
        torch.from_numpy(draws.standard_normal(shape)).cuda().bfloat16().requires_grad_()
        for shape in ((4096, 64), (4096, 2), (8, 40, 64), (8, 40, 64), (8, 64, 40))
    )
    ids = torch.from_numpy(draws.random((4096, 8)).argsort(axis=1)[:, :2]).cuda()
    found: list[tuple[Any, ...]] = []
    for _ in range(3):
        y = grouped_experts(x, ids, weights, gate, up, down)
        found.append((y, *torch.autograd.grad(y.float().square().sum(), [x, weights, gate, up, down])))
    for again in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], again, strict=True))


@pytest.mark.parametrize("arm", ["moe", "dense"])
def test_a_run_on_the_card_completes_and_says_what_it_computed_with(tiny: Any, arm: str, tmp_path: Any) -> None:
    run = next(run for run in tiny.runs if run.arm == arm and run.seed == 0)
    lines: list[str] = []
    summary = train(run, tmp_path / "run", tiny.dataset, device="cuda", log=lines.append)
    assert summary["status"] == "complete" and summary["peak_memory_bytes"] > 0
    assert torch.cuda.get_device_name() in lines[0]
