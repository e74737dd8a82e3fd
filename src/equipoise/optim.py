"""The optimizer: which parameters decay, and AdamW over them.

Not for: the learning rate of a step (`schedule`), clipping (`step`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

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


class AdamW:
    """torch's AdamW update (arXiv 1711.05101) with the parts of its class that training needs.

    The class of that name is left alone because making one loads torch's compiler, a second of every run's start. Bit
    for bit the same weights and moments; `param_groups` and `state` look the same.
    """

    def __init__(self, groups: list[dict[str, Any]], optim: Optim, fused: bool) -> None:
        self.param_groups = [{"lr": optim.lr, **group} for group in groups]
        self.betas, self.eps, self.fused = optim.betas, optim.eps, fused
        self.state: dict[Tensor, dict[str, Tensor]] = {}

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """One update of every parameter that has a gradient, at its group's `lr`."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self._state(parameter) for parameter in parameters]
            first, second, steps = ([s[name] for s in states] for name in ("exp_avg", "exp_avg_sq", "step"))
            adamw(
                parameters,
                [parameter.grad for parameter in parameters],
                first,
                second,
                [],
                steps,
                fused=self.fused,
                foreach=False,
                amsgrad=False,
                beta1=self.betas[0],
                beta2=self.betas[1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=self.eps,
                maximize=False,
            )

    def _state(self, parameter: Tensor) -> dict[str, Tensor]:
        if parameter not in self.state:
            device = parameter.device if self.fused else "cpu"
            self.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=device),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }
        return self.state[parameter]


def make_adamw(model: nn.Module, optim: Optim, fused: bool | None = None) -> AdamW:
    """AdamW at the peak rate over `parameter_groups`; the trainer sets each step's rate.

    `fused` None takes the one-kernel form where torch has it for the parameters' device (CPU and CUDA).
    """
    decayed, undecayed = parameter_groups(model)
    if fused is None:
        fused = all(parameter.device.type in ("cpu", "cuda") for parameter in (*decayed, *undecayed))
    groups = [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": undecayed, "weight_decay": 0.0}]
    return AdamW(groups, optim, fused)
