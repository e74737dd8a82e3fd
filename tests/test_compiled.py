"""Compiled losses are the same losses; where compiling fails a run goes on without it, and says so."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from equipoise.compiled import choose_losses, is_one_graph
from equipoise.data.packing import batch
from equipoise.device import Compute
from equipoise.model.transformer import build
from equipoise.optim import make_adamw
from equipoise.spec.model import BalanceBias
from equipoise.step import losses, train_step

HALF = torch.bfloat16


def asking(autocast: torch.dtype | None = HALF, kernels: Any = "grouped", compile: bool = True) -> Compute:
    return Compute(device=torch.device("cpu"), autocast=autocast, kernels=kernels, compile=compile, reason="asked")


def run_of(tiny: Any, arm: str) -> Any:
    """Two updates' worth of micro-batches: one sequence of a batch of two at a time."""
    run = next(run for run in tiny.runs if run.arm == arm and run.seed == 0)
    return dataclasses.replace(run, recipe=dataclasses.replace(run.recipe, micro_sequences=1))


def tokens(tiny: Any) -> list[torch.Tensor]:
    return [torch.from_numpy(array) for array in batch(tiny.dataset.tokens("train"), 256, 2, 0, 0)]


@pytest.mark.parametrize(
    ("arm", "autocast", "backend"), [("dense", None, "eager"), ("dense", HALF, "eager"), ("moe", HALF, "aot_eager")]
)
def test_a_step_is_one_graph_that_computes_the_same(tiny: Any, arm: str, autocast: Any, backend: str) -> None:
    run, compute = run_of(tiny, arm), asking(autocast)
    notes: list[str] = []
    found = []
    for wanted in (compute, dataclasses.replace(compute, compile=False)):
        model = build(run.model, 0, kernels="grouped")
        names, before = list(model.state_dict()), [p.clone() for p in model.parameters()]
        function, settled = choose_losses(model, run.recipe, wanted, notes.append, backend)
        assert not notes and settled == wanted and (function is losses) is (not wanted.compile)
        assert all(p.grad is None and torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
        optimizer = make_adamw(model, run.recipe.optim)
        with torch._dynamo.config.patch(error_on_recompile=True):  # what was tried is what is used
            stats = [train_step(model, optimizer, *tokens(tiny), run, 1e-3, autocast, function) for _ in range(2)]
        assert list(model.state_dict()) == names
        found.append((stats, list(model.parameters())))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(one, other) for one, other in zip(found[0][1], found[1][1], strict=True))


def test_a_loop_over_experts_is_no_graph(tiny: Any) -> None:
    run = run_of(tiny, "moe")
    for kernels, autocast in (("plain", HALF), ("grouped", None)):
        model, compute = build(run.model, 0, kernels=kernels), asking(autocast, kernels)
        assert not is_one_graph(model, compute)
        assert choose_losses(model, run.recipe, compute, pytest.fail, "eager") == (losses, compute)


def test_compiling_that_fails_is_said_and_done_without(tiny: Any) -> None:
    def broken(*_: Any) -> Any:
        raise FileNotFoundError("no compiler\nand a long story")

    run, notes = run_of(tiny, "dense"), []
    model = build(run.model, 0)
    function, compute = choose_losses(model, run.recipe, asking(), notes.append, broken)  # type: ignore[arg-type]
    assert function is losses
    assert compute == dataclasses.replace(
        asking(), compile=False, reason="asked; not compiled after all (FileNotFoundError)"
    )
    assert notes == ["warning: steps are not compiled: FileNotFoundError: no compiler"]
    assert all(p.grad is None for p in model.parameters())


# --------------------------------------------------------------------------------------- what waits for the device

WAITS = ("_local_scalar_dense", "bincount", "nonzero", "unique", "masked_select", "equal.", "is_nonzero")
"""Operators whose result, or whose shape, the host has to fetch from a GPU."""


class Operators(TorchDispatchMode):
    """Every operator that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(("arm", "bias"), [("dense", False), ("moe", False), ("moe", True)])
def test_a_step_waits_once(tiny: Any, arm: str, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses and gradients of two micro-batches without a look at a number, then all numbers at once."""
    run = run_of(tiny, arm)
    if bias:
        ffn = dataclasses.replace(run.model.ffn, balance=BalanceBias(rate=0.001))
        run = dataclasses.replace(run, model=dataclasses.replace(run.model, ffn=ffn))
    model = build(run.model, 0, kernels="grouped")
    optimizer = make_adamw(model, run.recipe.optim)
    looks: list[int] = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: (looks.append(self.numel()), tolist(self))[1])
    with Operators() as operators:
        train_step(model, optimizer, *tokens(tiny), run, 1e-3, HALF)
    assert looks == [2 * (3 if arm == "moe" else 1) + 1]
    assert not [name for name in operators.seen if any(part in name for part in WAITS)]
    assert any("_grouped_mm" in name for name in operators.seen) is (arm == "moe")


def test_waiting_would_be_noticed(tiny: Any) -> None:
    run = run_of(tiny, "moe")
    with Operators() as operators:
        train_step(build(run.model, 0), make_adamw(build(run.model, 0), run.recipe.optim), *tokens(tiny), run, 1e-3)
    assert any("bincount" in name for name in operators.seen)
