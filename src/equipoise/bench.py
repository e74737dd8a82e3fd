"""Seconds of one update of a model on this machine, on random tokens: what `plan --probe` estimates time from.

Not for: claims about speed between arms; those need an idle machine and interleaved measurements.
"""

from __future__ import annotations

import statistics
import time
from typing import Final

import torch

from equipoise.device import choose_compute
from equipoise.model.transformer import build
from equipoise.optim import make_adamw
from equipoise.rng import stream
from equipoise.spec.model import ModelConfig
from equipoise.spec.recipe import Recipe
from equipoise.spec.run import RunConfig
from equipoise.step import train_step

WARM_STEPS: Final = 2
MAX_STEPS: Final = 12
MAX_S: Final = 4.0


def step_seconds(model_config: ModelConfig, recipe: Recipe) -> float:
    """Median seconds of one update after two warm-up ones, over at most 12 updates or 4 seconds."""
    torch.set_num_threads(recipe.threads)
    compute = choose_compute("auto", recipe.dtype, recipe.kernels)
    run = RunConfig(arm="probe", seed=0, budget=recipe.batch_tokens, model=model_config, recipe=recipe, data="")
    model = build(model_config, 0, compute.device, compute.kernels)
    optimizer = make_adamw(model, recipe.optim)
    tokens = stream(0, "data", "probe").integers(0, model_config.vocab_size, (2, recipe.num_sequences, recipe.seq_len))
    inputs_BS, targets_BS = torch.from_numpy(tokens).to(compute.device)
    seconds: list[float] = []
    began = time.perf_counter()
    for step in range(WARM_STEPS + MAX_STEPS):
        started = time.perf_counter()
        train_step(model, optimizer, inputs_BS, targets_BS, run, recipe.optim.lr, compute.autocast)
        if step >= WARM_STEPS:
            seconds.append(time.perf_counter() - started)
        if seconds and time.perf_counter() - began > MAX_S:
            break
    return statistics.median(seconds)
