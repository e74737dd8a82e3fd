"""One update: the objective, its gradients over micro-batches, the clip and the step. Knows no files and no schedule.

The only place where losses are added up: `lm_loss + balance.coef · load_balance + z_coef · z`. No router term ever
enters `lm_loss`.

Shapes: B sequences, S tokens of a sequence.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from equipoise.errors import DivergedError
from equipoise.model.moe import router_losses
from equipoise.model.transformer import Transformer, mean_loss
from equipoise.spec.model import MoEFFN
from equipoise.spec.run import RunConfig


@dataclass(frozen=True, kw_only=True)
class StepStats:
    """What one update measured."""

    lm_loss: float
    """Nats per token over the whole step, no router term."""
    load_balance: float | None
    """Balance loss, averaged over layers and groups; None for a dense model."""
    router_z: float | None
    """Router z-loss, averaged over layers; None for a dense model."""
    grad_norm: float
    """Global gradient norm before clipping."""


def train_step(
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    inputs_BS: torch.Tensor,
    targets_BS: torch.Tensor,
    run: RunConfig,
    lr: float,
    autocast: torch.dtype | None = None,
) -> StepStats:
    """One update: gradients of the mean over all tokens of the step, clipped, then AdamW at rate `lr`.

    Micro-batches are equally large and hold whole balance groups, so cutting the batch differently changes nothing but
    the order of sums. Raises DivergedError before anything is stepped when a loss or a gradient is not finite.
    """
    recipe, ffn = run.recipe, run.model.ffn
    rows = recipe.sequences_per_forward
    num_micro = recipe.num_sequences // rows
    optimizer.zero_grad(set_to_none=True)
    sums = [0.0, 0.0, 0.0]
    for micro in range(num_micro):
        cut = slice(micro * rows, (micro + 1) * rows)
        with torch.autocast(inputs_BS.device.type, dtype=autocast) if autocast else nullcontext():
            output = model(inputs_BS[cut])
            lm_loss = mean_loss(model, output, targets_BS[cut])
        objective = lm_loss
        sums[0] += lm_loss.item()
        if isinstance(ffn, MoEFFN):
            balance, z = router_losses(output.routing, rows // recipe.balance_group)
            if ffn.balance.kind == "loss":
                objective = objective + ffn.balance.coef * balance
            if ffn.z_coef:
                objective = objective + ffn.z_coef * z
            sums[1] += balance.item()
            sums[2] += z.item()
        if not all(math.isfinite(value) for value in sums):
            name = ("lm_loss", "load_balance", "router_z")[[math.isfinite(v) for v in sums].index(False)]
            raise DivergedError(f"{name} is not finite")
        (objective / num_micro).backward()
    parameters = list(model.parameters())
    max_norm = recipe.optim.grad_clip or math.inf
    grad_norm = float(torch.nn.utils.clip_grad_norm_(parameters, max_norm))
    if not math.isfinite(grad_norm):
        names = (n for n, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all())
        raise DivergedError(f"gradient of {next(names, 'all parameters together')} is not finite")
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    moe = isinstance(ffn, MoEFFN)
    return StepStats(
        lm_loss=sums[0] / num_micro,
        load_balance=sums[1] / num_micro if moe else None,
        router_z=sums[2] / num_micro if moe else None,
        grad_norm=grad_norm,
    )
