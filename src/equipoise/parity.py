"""What a GPU computes, in bfloat16 and compiled, against float32 on a CPU: losses and gradients of two small models.

Not for: identities of models (`selftest`, which shows these lines among its own), speed (benchmarks/gpu_step.py).

Shapes: B sequences, S tokens of a sequence, P parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from equipoise.compiled import choose_losses
from equipoise.device import Compute, choose_compute
from equipoise.model.transformer import Transformer, build
from equipoise.rng import stream
from equipoise.spec.model import DenseFFN, ModelConfig, MoEFFN
from equipoise.spec.recipe import Optim, Recipe
from equipoise.step import Losses, losses

B: Final = 8
S: Final = 16
V: Final = 97
# The usual init_std: of wider weights, roundings of bfloat16 choose other experts, and gradients differ by more.
MODELS: Final = tuple(
    ModelConfig(num_layers=2, num_heads=4, num_kv_heads=2, d_model=48, vocab_size=V, ffn=ffn)
    for ffn in (DenseFFN(d_ff=40), MoEFFN(num_experts=5, top_k=2, d_expert=40))
)
RECIPE: Final = Recipe(seq_len=S, batch_tokens=B * S, balance_group=B, optim=Optim(lr=1e-3))


class Skipped(Exception):
    """Raised by a check that this machine cannot make; says why."""


def loss_and_gradients(model: Transformer, compute: Compute, function: Losses = losses) -> tuple[Tensor, Tensor]:
    """(losses, gradient_P of their sum) on the CPU, of fixed random tokens; `function` computes the losses."""
    windows = torch.from_numpy(stream(0, "data", "parity").integers(V, size=(B, S + 1))).to(compute.device)
    inputs_BS, targets_BS = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
    found = torch.stack(function(model, inputs_BS, targets_BS, 1, compute.autocast, None))
    gradients = torch.autograd.grad(found.sum(), list(model.parameters()))
    return found.detach().cpu(), torch.cat([gradient.flatten().cpu() for gradient in gradients])


def apart(compute: Compute, other: Compute) -> float:
    """Largest difference of losses and of gradients, relative to the largest number of `other`'s; NaN when one is."""
    ways = (compute, other)
    return _apart([[loss_and_gradients(build_for(config, way), way) for way in ways] for config in MODELS])


def build_for(config: ModelConfig, compute: Compute) -> Transformer:
    """The model as a run that computes so would build it."""
    return build(config, 0, compute.device, compute.kernels)


def compiled_apart(compute: Compute, backend: str) -> float:
    """The same of compiled losses against those that are not; raises Skipped when nothing was compiled, saying why."""
    pairs = []
    notes: list[str] = []
    for config in MODELS:
        model = build_for(config, compute)
        function, _ = choose_losses(model, RECIPE, compute, notes.append, backend)
        if function is not losses:
            pairs.append([loss_and_gradients(model, compute, which) for which in (function, losses)])
    if not pairs:
        raise Skipped(notes[0] if notes else "steps are not compiled here")
    return _apart(pairs)


def _apart(pairs: list[list[tuple[Tensor, Tensor]]]) -> float:
    values = [
        float((found - expected).abs().max() / expected.abs().max())
        for both in pairs
        for found, expected in zip(*both, strict=True)
    ]
    return math.nan if any(math.isnan(value) for value in values) else max(values)


def _bfloat16(device: torch.device) -> float:
    _needs_gpu(device)
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        raise Skipped("the card has no native bfloat16")
    return apart(choose_compute("cuda", "bfloat16"), choose_compute("cpu", "float32", "plain"))


def _compiled(device: torch.device) -> float:
    _needs_gpu(device)
    return compiled_apart(choose_compute("cuda", "auto"), "inductor")


def _needs_gpu(device: torch.device) -> None:
    if device.type == "cpu":
        seen = torch.cuda.is_available()
        raise Skipped("--device cpu was asked for" if seen else "no CUDA device is visible to torch")


GPU_CHECKS: Final[tuple[tuple[str, str, float, Callable[[torch.device], float]], ...]] = (
    ("gpu-bfloat16", "GPU in bfloat16 against CPU in float32 (dense, top 2): losses, gradients", 2e-2, _bfloat16),
    ("gpu-compiled", "GPU compiled against not compiled (dense, top 2): losses, gradients", 2e-2, _compiled),
)
"""Lines of the self-test: name, what is compared, tolerance, and the function that measures. On a CPU bfloat16 moves
gradients by 0.7 % of the largest."""
