"""Forward passes that fit into memory: what an update needs, roughly, and how to cut its batch into smaller pieces.

A batch is cut into micro-batches of whole balance groups, over several processes too; cut otherwise it has the same
losses and gradients but for rounding. Not for: noticing that there is no memory (`step`), or trying again (`train`).
"""

from __future__ import annotations

from typing import Final

from equipoise.accounting import count_params
from equipoise.errors import ConfigError
from equipoise.machine import available_memory
from equipoise.spec.model import ModelConfig
from equipoise.spec.recipe import Recipe

PROCESS_BYTES: Final = 300 * 2**20
"""What a process with PyTorch takes on a CPU before it has a model: measured."""
MIB: Final = 2**20


def check_processes(recipe: Recipe, processes: int) -> None:
    """ConfigError unless the balance groups of a batch can be shared out evenly among `processes`."""
    groups = recipe.num_sequences // recipe.balance_group
    if groups % processes:
        divisors = ", ".join(str(n) for n in range(1, groups + 1) if groups % n == 0)
        raise ConfigError(
            f"{processes} processes: the {recipe.num_sequences} sequences of a batch are {groups} whole balance "
            f"group(s), recipe.balance_group = {recipe.balance_group}, of which each process takes as many; expected "
            f"{divisors}, or a smaller recipe.balance_group"
        )


def fitting(recipe: Recipe, rows: int, processes: int = 1) -> int:
    """The most sequences, up to `rows` or else one balance group, of a forward pass when `processes` share a batch.

    >>> from equipoise.spec.recipe import Optim
    >>> recipe = Recipe(seq_len=1, batch_tokens=24, balance_group=2, optim=Optim(lr=1.0))
    >>> fitting(recipe, 24), fitting(recipe, 24, 2), fitting(recipe, 8, 2), fitting(recipe, 1)
    (24, 12, 6, 2)
    """
    group = recipe.balance_group
    groups = recipe.num_sequences // group // processes
    return max((n * group for n in range(1, min(groups, rows // group) + 1) if groups % n == 0), default=group)


def smaller(recipe: Recipe, rows: int, processes: int = 1) -> int | None:
    """The largest number of sequences, at most half of `rows`, that a forward pass may hold; None when none is left.

    >>> from equipoise.spec.recipe import Optim
    >>> recipe = Recipe(seq_len=1, batch_tokens=24, balance_group=4, optim=Optim(lr=1.0))
    >>> smaller(recipe, 24), smaller(recipe, 12), smaller(recipe, 4)
    (12, 4, None)
    """
    return fitting(recipe, rows // 2, processes) if rows >= 2 * recipe.balance_group else None


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


def out_of_memory(model: ModelConfig, recipe: Recipe, rows: int, processes: int = 1) -> str:
    """What to say when an update found no memory: what a process needs, what there is, and what can be done."""
    free = available_memory()
    has = "" if free is None else f", {free // MIB:,} MiB are free on this machine"
    less = smaller(recipe, rows, processes)
    cut = (
        f"recipe.micro_sequences = {less}, --auto-micro-batch" if less else "a smaller recipe.balance_group or seq_len"
    )
    return (
        f"an update with {rows} sequences a forward pass needs about {update_bytes(model, recipe, rows) // MIB:,} MiB"
        f"{has}; expected {cut}, fewer --jobs, or a smaller model"
    )
