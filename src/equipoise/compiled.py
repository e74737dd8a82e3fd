"""The losses of a training step compiled into one graph, where that is chosen and works; else the function as it is.

Compiling is tried once before a run's first update, forward and backward, because it needs what the core does not (a
compiler, on a GPU Triton): whatever it raises is said, and the run goes on without. Weights keep their names, since the
model itself is not wrapped. Not for: choosing whether to compile (`device`), evaluation, generation.

Shapes: B sequences, S tokens of a sequence.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any, Final

import torch

from equipoise.device import Compute
from equipoise.micro import fitting
from equipoise.model.moe import MoE
from equipoise.model.transformer import Transformer
from equipoise.spec.recipe import Recipe
from equipoise.step import Losses, losses

INDUCTOR: Final = "inductor"
"""torch's own compiler. It is told to measure no kernels against each other, so that two processes make the same ones.
"""


def choose_losses(
    model: Transformer,
    recipe: Recipe,
    compute: Compute,
    log: Callable[[str], None],
    backend: str = INDUCTOR,
    processes: int = 1,
) -> tuple[Losses, Compute]:
    """(the function that computes a step's losses, `compute` with a reason that says so if compiling failed).

    `processes` is how many share a batch: it is compiled for the forward passes that they make.

    Eager where `compute` does not ask for it, and for routed models whose experts are computed in a loop: how many rows
    an expert has is no part of a graph. Changes no weight and no gradient.
    """
    if not compute.compile or not is_one_graph(model, compute):
        return losses, compute
    torch.compiler.reset()  # what a process compiled before is of another model, and counts towards a limit
    options: dict[str, Any] = {"options": {"deterministic": True}} if backend == INDUCTOR else {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a compiler about its own insides
            compiled: Losses = torch.compile(losses, fullgraph=True, dynamic=False, backend=backend, **options)
            _try(compiled, model, recipe, compute, fitting(recipe, recipe.sequences_per_forward, processes))
    except Exception as error:  # torch, Triton and compilers share no base class
        cause = getattr(error, "inner_exception", error)  # torch wraps what a compiler raised
        log(f"warning: steps are not compiled: {type(cause).__name__}: {str(cause).partition(chr(10))[0]}")
        reason = f"{compute.reason}; not compiled after all ({type(cause).__name__})"
        return losses, dataclasses.replace(compute, compile=False, reason=reason)
    return compiled, compute


def is_one_graph(model: Transformer, compute: Compute) -> bool:
    """Whether no shape in a training step depends on what a router chose."""
    experts = [module.experts for module in model.modules() if isinstance(module, MoE)]
    return not experts or (compute.autocast is not None and all(part.grouped for part in experts))


def _try(compiled: Losses, model: Transformer, recipe: Recipe, compute: Compute, rows: int) -> None:
    tokens_BS = torch.zeros(rows, recipe.seq_len, dtype=torch.int64, device=compute.device)
    model.rope(0, recipe.seq_len)  # its tables grow outside of the graph
    # Inputs and targets as two tensors: one in both places would be compiled as a case of its own.
    windows_B = torch.arange(rows, device=compute.device)
    found = compiled(model, tokens_BS, tokens_BS.clone(), rows // recipe.balance_group, compute.autocast, windows_B)
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    torch.autograd.grad(torch.stack(found[:3]).sum(), weights, allow_unused=True)
    if compute.device.type == "cuda":
        torch.cuda.synchronize()
