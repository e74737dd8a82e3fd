"""Forward passes that fit into memory: what an update needs, roughly, and how to cut its batch into smaller pieces.

A batch is cut into micro-batches of whole balance groups; cut smaller it has the same losses and gradients but for
rounding. Not for: noticing that there is no memory (`step`), or trying again (`train`).
"""

from __future__ import annotations

from typing import Final

from equipoise.accounting import count_params
from equipoise.machine import available_memory
from equipoise.spec.model import ModelConfig
from equipoise.spec.recipe import Recipe

PROCESS_BYTES: Final = 300 * 2**20
"""What a process with PyTorch takes on a CPU before it has a model: measured."""
MIB: Final = 2**20


def smaller(recipe: Recipe, rows: int) -> int | None:
    """The largest number of sequences, at most half of `rows`, that a forward pass may hold; None when none is left.

    >>> from equipoise.spec.recipe import Optim
    >>> recipe = Recipe(seq_len=1, batch_tokens=24, balance_group=4, optim=Optim(lr=1.0))
    >>> smaller(recipe, 24), smaller(recipe, 12), smaller(recipe, 4)
    (12, 4, None)
    """
    group = recipe.balance_group
    groups = recipe.num_sequences // group
    fitting = [n * group for n in range(1, groups + 1) if groups % n == 0 and 2 * n * group <= rows]
    return max(fitting, default=None)


def update_bytes(model: ModelConfig, recipe: Recipe, rows: int) -> int:
    """About what a process needs for updates in float32 with `rows` sequences a forward pass.

    Weights, gradients and two moments; of each token and layer ten vectors of the model's width and four of what its
    feed-forward layer computes; logits, which the fused kernels never hold whole. Within 15 % of the measured peaks of
    docs/performance.md.
    """
    ffn = model.ffn
    width = ffn.width * ((ffn.top_k + ffn.num_shared_experts) if ffn.kind == "moe" else 1)
    per_token = model.num_layers * (10 * model.d_model + 4 * width)
    per_token += 0 if recipe.kernels == "fused" else 2 * model.vocab_size
    return PROCESS_BYTES + 16 * count_params(model).total + 4 * rows * recipe.seq_len * per_token


def out_of_memory(model: ModelConfig, recipe: Recipe, rows: int) -> str:
    """What to say when an update found no memory: what it needs, what there is, and what can be done."""
    free = available_memory()
    has = "" if free is None else f", {free // MIB:,} MiB are free on this machine"
    less = smaller(recipe, rows)
    cut = (
        f"recipe.micro_sequences = {less}, --auto-micro-batch" if less else "a smaller recipe.balance_group or seq_len"
    )
    return (
        f"an update with {rows} sequences a forward pass needs about {update_bytes(model, recipe, rows) // MIB:,} MiB"
        f"{has}; expected {cut}, fewer --jobs, or a smaller model"
    )
