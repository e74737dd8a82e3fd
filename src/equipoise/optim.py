"""The optimizer: which parameters decay, and AdamW over them.

Not for: the learning rate of a step (`schedule`), clipping (`train`).
"""

from __future__ import annotations

import torch
from torch import nn

from equipoise.spec.recipe import Optim


def parameter_groups(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(decayed, undecayed): every trainable parameter in exactly one, in the order of `model.named_parameters()`.

    Gains and biases do not decay, everything else does, embeddings included. Membership goes by name, a norm being
    whatever is called one, and never by the number of dimensions: gains stacked into a matrix are still gains.
    """
    decayed: list[nn.Parameter] = []
    undecayed: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (undecayed if _is_gain_or_bias(name) else decayed).append(parameter)
    return decayed, undecayed


def _is_gain_or_bias(name: str) -> bool:
    parts = name.split(".")
    return parts[-1].endswith("bias") or any(part.endswith("norm") for part in parts)


def make_adamw(model: nn.Module, optim: Optim, fused: bool | None = None) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101) at the peak rate over `parameter_groups`; the trainer sets each step's rate.

    `fused` None takes the one-kernel form where torch has it for the parameters' device (CPU and CUDA).
    """
    decayed, undecayed = parameter_groups(model)
    if fused is None:
        fused = all(parameter.device.type in ("cpu", "cuda") for parameter in (*decayed, *undecayed))
    groups = [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": undecayed, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=fused)
