"""One update: the objective, its gradients over micro-batches and processes, the clip and the step. Knows no files.

The only place where losses are added up: `lm_loss + balance.coef · load_balance + z_coef · z`. No router term ever
enters `lm_loss`.

Shapes: B sequences, S tokens of a sequence, L layers, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.errors import DivergedError, ResourceError
from equipoise.machine import is_out_of_memory
from equipoise.micro import fitting
from equipoise.model.moe import assignments, move_biases, router_losses
from equipoise.model.transformer import Transformer, mean_loss
from equipoise.nonfinite import first_nonfinite
from equipoise.optim import AdamW
from equipoise.parallel import ALONE, Group, any_of, cut_up, flat, gathered, summed
from equipoise.spec.model import DenseFFN, MoEFFN
from equipoise.spec.run import RunConfig


@dataclass(frozen=True, kw_only=True)
class StepStats:
    """What one update measured."""

    lm_loss: float
    """Nats per token over the whole step, no router term."""
    load_balance: float | None
    """Balance loss, averaged over layers and groups; None without router weights (dense, hash, random)."""
    router_z: float | None
    """Router z-loss, averaged over layers; None likewise."""
    grad_norm: float
    """Global gradient norm before clipping."""


Losses = Callable[[Transformer, Tensor, Tensor, int, torch.dtype | None, Tensor | None], tuple[Tensor, ...]]
"""What `losses` is: the same function, or the same function compiled."""


def losses(
    model: Transformer,
    inputs_BS: Tensor,
    targets_BS: Tensor,
    num_groups: int,
    autocast: torch.dtype | None,
    windows_B: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """(lm_loss, balance loss, z-loss) of one forward pass, float32 scalars; lm_loss alone without router weights.

    Last, where routers are balanced by a bias, the assignments that each expert received, [L, E] int64. `num_groups` is
    that of the balance loss; `autocast` is the compute dtype of the forward pass (None: float32); `windows_B` as
    `Transformer.forward` takes it.
    """
    with torch.autocast(inputs_BS.device.type, dtype=autocast) if autocast else nullcontext():
        output = model(inputs_BS, windows_B=windows_B)
        lm_loss = mean_loss(model, output, targets_BS)
    weighed = _weighed(model.config.ffn)
    if weighed is None:
        return (lm_loss,)
    loads = (assignments(output.routing, weighed.num_experts),) if weighed.balance.kind == "bias" else ()
    return (lm_loss, *router_losses(output.routing, num_groups), *loads)


def _weighed(ffn: DenseFFN | MoEFFN) -> MoEFFN | None:
    """`ffn` if it has routers with weights: only they have losses and biases."""
    return ffn if isinstance(ffn, MoEFFN) and ffn.router_has_weights else None


def train_step(
    model: Transformer,
    optimizer: AdamW,
    inputs_BS: Tensor,
    targets_BS: Tensor,
    run: RunConfig,
    lr: float,
    autocast: torch.dtype | None = None,
    compute: Losses = losses,
    *,
    step: int = 0,
    rows: int | None = None,
    group: Group = ALONE,
) -> StepStats:
    """One update: gradients of the mean over all tokens of the step, clipped, then AdamW at rate `lr`.

    Micro-batches are equally large and hold whole balance groups, so cutting the batch differently changes nothing but
    the order of sums. They hold at most `rows` sequences (None: as the recipe says). Each process of `group` is given
    the whole batch and computes its share of the micro-batches; all of them end with the same weights and stats, or
    raise at the same place. `step` counts updates from 0: sequence j of step t is window t·B + j to a random router.
    Where routers are balanced by a bias, it moves last, by the loads of all micro-batches. The device is waited for
    once, when all gradients are there. Raises, before anything is stepped, DivergedError when a loss or a gradient is
    not finite, ResourceError when there was no memory for the gradients, which then hold none any more, and Lost when
    another process is.
    """
    recipe, weighed = run.recipe, _weighed(run.model.ffn)
    rows = fitting(recipe, rows or recipe.sequences_per_forward, group.size)
    num_micro = recipe.num_sequences // rows
    windows_B = step * recipe.num_sequences + torch.arange(recipe.num_sequences, device=inputs_BS.device)
    optimizer.zero_grad()
    measured: list[Tensor] = []
    loads: list[Tensor] = []
    cuts = [slice(micro * rows, (micro + 1) * rows) for micro in range(num_micro)]
    out_of_memory = ""
    try:
        for cut in cuts[group.share(num_micro)]:
            num_groups = rows // recipe.balance_group
            lm_loss, *router = compute(model, inputs_BS[cut], targets_BS[cut], num_groups, autocast, windows_B[cut])
            objective = lm_loss
            if weighed:
                balance, z, *counts = router
                loads += counts
                if weighed.balance.kind == "loss":
                    objective = objective + weighed.balance.coef * balance
                if weighed.z_coef:
                    objective = objective + weighed.z_coef * z
            measured += [loss.detach() for loss in (lm_loss, *router[:2])]
            (objective / num_micro).backward()
        parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
        vector = flat([p.grad for p in parameters if p.grad is not None]) if group.size > 1 else None
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        out_of_memory = str(error).partition("\n")[0] or "no memory"
    # Not where it was caught: an error that is being handled holds on to what the pass had computed.
    if any_of(group, bool(out_of_memory)):
        optimizer.zero_grad()
        raise ResourceError(f"out of memory ({out_of_memory or 'in another process'})")
    if vector is not None:
        cut_up(summed(group, vector), parameters)
    counts_LE = summed(group, torch.stack(loads).sum(dim=0)) if loads else None
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    *values, grad_norm = torch.cat([gathered(group, torch.stack(measured)), norm.unsqueeze(0)]).tolist()
    names = ("lm_loss", "load_balance", "router_z") if weighed else ("lm_loss",)
    sums = dict.fromkeys(names, 0.0)
    for name, value in zip(names * num_micro, values, strict=True):
        sums[name] += value
        if not math.isfinite(sums[name]):
            places = (first_nonfinite(model, inputs_BS[cut], windows_B[cut], autocast) for cut in cuts)
            place = next(filter(None, places), None)
            raise DivergedError(f"{name} is not finite" + (f", first {place}" if place else ""))
    if not math.isfinite(grad_norm):
        # The last one: the backward pass came to it first, and carried it to those before.
        broken = [n for n, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
        raise DivergedError(f"gradient of {broken[-1] if broken else 'all parameters together'} is not finite")
    torch.nn.utils.clip_grads_with_norm_(parameters, recipe.optim.grad_clip or math.inf, norm)
    for weights in optimizer.param_groups:
        weights["lr"] = lr
    optimizer.step()
    if counts_LE is not None and weighed and weighed.balance.kind == "bias":
        move_biases(model, counts_LE, weighed.balance.rate)
    means = {name: total / num_micro for name, total in sums.items()}
    return StepStats(
        lm_loss=means["lm_loss"],
        load_balance=means.get("load_balance"),
        router_z=means.get("router_z"),
        grad_norm=grad_norm,
    )
