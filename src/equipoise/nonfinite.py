"""Where the first number comes from that is not finite: found by computing again what gave it, a module at a time.

Not for: noticing it, which costs nothing (`step`, `score`, `session`), or stopping because of it (`train`).

Shapes: B sequences, S tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.model.moe import Routing
from equipoise.model.transformer import Transformer


@torch.no_grad()
def first_nonfinite(
    model: Transformer, inputs_BS: Tensor, windows_B: Tensor | None = None, autocast: torch.dtype | None = None
) -> str | None:
    """Name of the first weight that is not finite, else of the first output of a module; None when all are finite.

    Outputs come in the order of computation, innermost first: `the output of blocks.0.ffn.router`. Arguments are as
    `Transformer.forward` takes them.
    """
    for name, weight in model.state_dict().items():
        if not is_finite(weight):
            return f"weight {name}"
    found: list[str] = []

    def look(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            if not found and not all(map(is_finite, _tensors(output))):
                found.append(name)

        return hook

    hooks = [module.register_forward_hook(look(name)) for name, module in model.named_modules() if name]
    try:
        with torch.autocast(inputs_BS.device.type, dtype=autocast) if autocast else nullcontext():
            model(inputs_BS, windows_B=windows_B)
    finally:
        for hook in hooks:
            hook.remove()
    return f"output of {found[0]}" if found else None


def _tensors(output: Any) -> list[Tensor]:
    """The tensors of what a module returned."""
    parts = output if isinstance(output, tuple) else (output,)
    routings = [part for part in parts if isinstance(part, Routing)]
    parts = (*parts, *(tensor for routing in routings for tensor in (routing.logits_TE, routing.weights_TK)))
    return [part for part in parts if isinstance(part, Tensor)]


def is_finite(tensor: Tensor) -> bool:
    """Whether no element is infinite or no number: seen by their sum, unless that overflows."""
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())
