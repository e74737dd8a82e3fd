"""What several processes at one run do: the leader's orders, and the loop in which a follower carries them out.

A follower has the run's model and optimizer and nothing else: no file, no data set, no record. It is given weights when
the run is opened, the batch of every update, and the windows it is to score; what it computes are its share of the
gradients (`step.train_step`), the same update as every other process, and losses of windows.

Not for: how things are sent (`parallel`), or what a run is (`train`).

Shapes: B sequences, S tokens of a sequence, T = B·S, L routed layers, K experts per token.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from equipoise.checkpoint import optimizer_tensors, restore_optimizer
from equipoise.compiled import choose_losses
from equipoise.config import dump, load
from equipoise.device import Compute, choose_compute, make_repeatable
from equipoise.errors import DivergedError, IntegrityError, ResourceError
from equipoise.model.transformer import Transformer, build
from equipoise.optim import AdamW, make_adamw
from equipoise.parallel import Group, any_of, handed_out, hear, received, send, tell
from equipoise.score import Rows, Scored, score_rows
from equipoise.spec.run import RunConfig
from equipoise.step import Losses, train_step

# ------------------------------------------------------------------------------------------------ the leader


def open_followers(group: Group, run: RunConfig, compute: Compute, model: Transformer, optimizer: AdamW) -> None:
    """Have every follower hold the run's model and optimizer as they are here."""
    if group.size > 1:
        moments = optimizer_tensors(model, optimizer)
        shapes = [[name, list(tensor.shape), str(tensor.device.type)] for name, tensor in moments.items()]
        tell(group, {"do": "open", "run": dump(run), "device": compute.device.type, "moments": shapes})
        handed_out(group, [*model.state_dict().values(), *moments.values()])


def order_update(
    group: Group, inputs_BS: torch.Tensor, targets_BS: torch.Tensor, lr: float, step: int, rows: int
) -> None:
    """Have every follower call `train_step` with these arguments, as the leader does next."""
    if group.size > 1:
        tell(group, {"do": "update", "lr": lr, "step": step, "rows": rows})
        handed_out(group, (inputs_BS, targets_BS))


def check_copies(group: Group, model: Transformer, where: str) -> None:
    """IntegrityError, beginning with `where`, unless every follower's weights are the leader's, bit for bit."""
    if group.size > 1:
        tell(group, {"do": "compare"})
        if _differ(group, model):
            text = f"the weights are not the same in all {group.size} processes; is a machine's memory failing?"
            raise IntegrityError(f"{where}: {text} Run again to go on from the last checkpoint")


def give_weights(group: Group, model: Transformer) -> None:
    """Put the weights of `model` into every follower's."""
    if group.size > 1:
        tell(group, {"do": "weights"})
        handed_out(group, model.state_dict().values())


def score_together(
    group: Group, model: Transformer, passes: Sequence[Rows], autocast: torch.dtype | None
) -> list[Scored]:
    """As `score.score_rows`, pass i by process i; at most as many passes as there are processes."""
    ffn = model.config.ffn
    routed = model.config.num_layers if ffn.kind == "moe" else 0
    top_k = ffn.top_k if ffn.kind == "moe" else 0
    if len(passes) > 1:
        tell(group, {"do": "score", "shapes": [list(rows.inputs_BS.shape) for rows in passes]})
        for rank, rows in enumerate(passes[1:], start=1):
            tables = (rows.inputs_BS, rows.targets_BS, rows.units_BS, rows.windows_B[:, None])
            send(torch.from_numpy(np.concatenate(tables, axis=1)), rank)
    scored = score_rows(model, passes[:1], autocast)
    for rank, rows in enumerate(passes[1:], start=1):
        num_real = int((rows.units_BS >= 0).sum())
        numbers = received(torch.empty(rows.units_BS.size + 2 * routed, dtype=torch.float64), rank).numpy()
        ids_LTK = received(torch.empty(routed, num_real, top_k, dtype=torch.int64), rank).numpy() if routed else ()
        losses_T, entropy_L, log_z_L = np.split(numbers, [rows.units_BS.size, rows.units_BS.size + routed])
        scored.append(
            Scored(
                losses_T=losses_T,
                expert_ids_LTK=list(ids_LTK),
                entropy_L=[None if math.isnan(value) else value for value in entropy_L.tolist()],
                log_z_L=[None if math.isnan(value) else value for value in log_z_L.tolist()],
            )
        )
    return scored


# ------------------------------------------------------------------------------------------------ a follower


@dataclass(frozen=True, kw_only=True)
class _Held:
    """The run that a follower works at."""

    run: RunConfig
    compute: Compute
    model: Transformer
    optimizer: AdamW
    losses: Losses


def follow(group: Group) -> None:
    """Carry out the leader's orders until the last one. Raises Lost when the leader, or another follower, is gone."""
    order = hear(group)
    held: _Held | None = None
    while order["do"] != "end":
        if order["do"] == "open":
            held = _open(group, order)
        else:
            assert held is not None  # a run is opened before anything is done with it
            _carry_out(group, held, order)
        order = hear(group)


def _open(group: Group, order: dict[str, Any]) -> _Held:
    run = load(RunConfig, order["run"])
    torch.set_num_threads(run.recipe.threads)
    compute = choose_compute(order["device"], run.recipe.dtype, run.recipe.kernels)
    make_repeatable(compute)
    model = build(run.model, run.seed, compute.device, compute.kernels)
    losses, compute = choose_losses(model, run.recipe, compute, lambda _: None, processes=group.size)
    optimizer = make_adamw(model, run.recipe.optim)
    moments = {name: torch.empty(shape, device=device) for name, shape, device in order["moments"]}
    handed_out(group, [*model.state_dict().values(), *moments.values()])
    restore_optimizer(model, optimizer, moments)
    return _Held(run=run, compute=compute, model=model, optimizer=optimizer, losses=losses)


def _carry_out(group: Group, held: _Held, order: dict[str, Any]) -> None:
    run, model, device = held.run, held.model, held.compute.device
    if order["do"] == "update":
        shape = (run.recipe.num_sequences, run.recipe.seq_len)
        inputs_BS, targets_BS = (torch.empty(shape, dtype=torch.int64, device=device) for _ in range(2))
        handed_out(group, (inputs_BS, targets_BS))
        with contextlib.suppress(DivergedError, ResourceError):  # the leader has met them too, and says what follows
            train_step(
                model,
                held.optimizer,
                inputs_BS,
                targets_BS,
                run,
                order["lr"],
                held.compute.autocast,
                held.losses,
                step=order["step"],
                rows=order["rows"],
                group=group,
            )
    elif order["do"] == "compare":
        _differ(group, model)
    elif order["do"] == "weights":
        handed_out(group, model.state_dict().values())
    elif group.rank < len(order["shapes"]):
        _score(held, *order["shapes"][group.rank])


def _score(held: _Held, B: int, S: int) -> None:
    """Score the windows that the leader sends next, and send it what came of it."""
    table = received(torch.empty(B, 3 * S + 1, dtype=torch.int64), 0).numpy()
    inputs_BS, targets_BS, units_BS, windows_B1 = np.split(table, [S, 2 * S, 3 * S], axis=1)
    rows = Rows(inputs_BS=inputs_BS, targets_BS=targets_BS, units_BS=units_BS, windows_B=windows_B1[:, 0])
    (scored,) = score_rows(held.model, [rows], held.compute.autocast)
    sums = [math.nan if value is None else value for value in (*scored.entropy_L, *scored.log_z_L)]
    send(torch.from_numpy(np.concatenate((scored.losses_T, sums))), 0)
    if scored.expert_ids_LTK:
        send(torch.from_numpy(np.stack(scored.expert_ids_LTK)), 0)


def _differ(group: Group, model: Transformer) -> bool:
    """Whether any process's weights differ from the leader's."""
    differ = False
    for tensor in model.state_dict().values():
        leaders = tensor.clone()
        handed_out(group, [leaders])
        differ = differ or not torch.equal(leaders.view(torch.uint8), tensor.view(torch.uint8))
    return any_of(group, differ)
