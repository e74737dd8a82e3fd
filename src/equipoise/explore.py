"""What a model makes of single tokens: the loss of each, and in each routed layer its experts and their weights.

Not for: losses of many texts (`score`), or what experts are used for over a whole evaluation (`specialisation`).

Shapes: T tokens of a text, S positions of a window, L routed layers, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from equipoise.data.packing import EvalWindows
from equipoise.data.tokenizer import END_OF_TEXT, TextTokenizer
from equipoise.errors import DivergedError
from equipoise.model.transformer import Transformer, token_losses
from equipoise.text import piece

EXPLORED_TOKENS: Final = 320
"""Tokens of validation text that a run keeps for its report: two stories or three, and some 50 KB in a page."""


@dataclass(frozen=True, kw_only=True)
class Explored:
    """A text, token by token."""

    losses_T: NDArray[np.float64]
    """Nats of each token, given those before it."""
    end_loss: float
    """Nats of the end of the text after them."""
    expert_ids_LTK: NDArray[np.int64]
    """The experts that each token was sent to when it was read, in the router's order; [0, T, 0] of a dense model."""
    weights_LTK: NDArray[np.float64]
    """What the outputs of these experts were multiplied with."""


@torch.no_grad()
def explore(model: Transformer, ids: Sequence[int] | NDArray[Any], *, end_of_text: int, context: int) -> Explored:
    """Losses and routing of the tokens `ids` (at least one, without an end), in float32, the text by itself.

    A token's loss is that of predicting it, its experts are those chosen once it is read. The text begins with
    end-of-text as input; one of more than `context` − 1 tokens is read in windows of so many, each beginning that way,
    so that every token is both predicted and read. Up to there losses are those of `score.score_text`. Raises
    DivergedError when a loss is not finite.
    """
    ids_T = np.asarray(ids, np.int64)
    device = next(model.parameters()).device
    parts = np.split(ids_T, range(max(1, context - 1), len(ids_T), max(1, context - 1)))
    losses: list[NDArray[np.float64]] = []
    experts: list[list[NDArray[Any]]] = []
    weights: list[list[NDArray[Any]]] = []
    for part_S in parts:
        inputs_BS = torch.from_numpy(np.concatenate(([end_of_text], part_S)))[None].to(device)
        targets_BS = torch.from_numpy(np.concatenate((part_S, [end_of_text])))[None].to(device)
        output = model(inputs_BS)
        losses.append(token_losses(model, output, targets_BS).double().cpu().numpy())
        experts.append([routing.expert_ids_TK[1:].cpu().numpy() for routing in output.routing])
        weights.append([routing.weights_TK[1:].double().cpu().numpy() for routing in output.routing])
    losses_T = np.concatenate([part[:-1] for part in losses])
    end_loss = float(losses[-1][-1])
    if not np.isfinite(losses_T).all() or not np.isfinite(end_loss):
        raise DivergedError("exploring: the loss is not finite")
    nothing = np.zeros((0, len(ids_T), 0))
    return Explored(
        losses_T=losses_T,
        end_loss=end_loss,
        expert_ids_LTK=np.concatenate([np.stack(part) for part in experts], axis=1)
        if experts[0]
        else nothing.astype(np.int64),
        weights_LTK=np.concatenate([np.stack(part) for part in weights], axis=1) if weights[0] else nothing,
    )


# ------------------------------------------------------------------------------------------------ for the record


def explore_stories(
    model: Transformer, windows: EvalWindows, tokenizer: TextTokenizer, context: int
) -> list[dict[str, Any]]:
    """The first 320 tokens of some evaluation windows, unit by unit as `told` writes them; the same for every model."""
    rows, left = [], EXPLORED_TOKENS
    for unit in range(windows.num_units):
        ids = windows.targets_WS[windows.unit_WS == unit]  # a unit lies within one window, in order
        ends = bool(ids[-1] == tokenizer.eot_id)
        text = ids[:-1] if ends else ids
        if left > 0 and len(text):
            kept = text[: min(left, max(1, context - 1))]
            explored = explore(model, kept, end_of_text=tokenizer.eot_id, context=context)
            rows.append(told(explored, kept, tokenizer, ends=ends and len(kept) == len(text)))
            left -= len(kept)
    return rows


def told(
    explored: Explored, ids: Sequence[int] | NDArray[Any], tokenizer: TextTokenizer, *, ends: bool
) -> dict[str, Any]:
    """An explored text as plain values, rounded as it is shown: `tokens`, `losses`, `end_loss` (None where the text
    does not end here), and by layer and token `experts` and `weights`.
    """
    return {
        "tokens": [piece(raw) for raw in tokenizer.spell(ids)],
        "losses": [round(value, 4) for value in explored.losses_T.tolist()],
        "end_loss": round(explored.end_loss, 4) if ends else None,
        "experts": explored.expert_ids_LTK.tolist(),
        "weights": [[[round(w, 3) for w in token] for token in layer] for layer in explored.weights_LTK.tolist()],
    }


def token_name(tokenizer: TextTokenizer, index: int) -> str:
    """A token as text; the end of a text by its name."""
    return END_OF_TEXT if index == tokenizer.eot_id else piece(tokenizer.spell([index])[0])
