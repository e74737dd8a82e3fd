"""Seconds of a run's work here, on random tokens: what `plan --probe`, `run --jobs auto` and `equipoise bench` ask for.

A process answers requests, one JSON object a line: several of them asked at once measure what runs cost side by side;
one that holds several models and is asked for them in turn measures what their updates cost against each other.
Not for: when and how often to ask (`probe`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np
import torch

from equipoise.compiled import choose_losses
from equipoise.data.packing import EvalWindows
from equipoise.device import choose_compute, environment, keep_freed_memory, make_repeatable, peak_memory_bytes
from equipoise.model.transformer import Transformer, build, generate
from equipoise.optim import make_adamw
from equipoise.rng import stream
from equipoise.score import FORWARD_TOKENS, evaluate
from equipoise.spec.model import ModelConfig
from equipoise.spec.recipe import Recipe
from equipoise.spec.run import RunConfig
from equipoise.step import train_step

WARM_UPDATES: Final = 2
"""Updates before any is timed: allocators and caches settle."""
WARM_S: Final = 0.5
"""An update slower than this is warm enough after one."""
SAMPLE_TOKENS: Final = 16
GEMM_SIZE: Final = 1024
"""Side of the square float32 product that a machine's rate is read from; larger ones are no faster on a CPU."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, its optimizer and one batch of random tokens, ready to be timed."""

    update: Callable[[], object]
    """One update, of one micro-batch where only that is computed."""
    score: Callable[[], object]
    """Scores FORWARD_TOKENS tokens, in whole windows."""
    sample: Callable[[], object]
    """Writes SAMPLE_TOKENS tokens."""
    micro_batches: int
    """The factor from `update` to a whole update: its micro-batches, or 1."""
    scored_tokens: int
    """Tokens that `score` scores."""
    reason: str
    """Device, dtype and kernels, and why."""
    environment: Mapping[str, Any]
    """Machine, threads and versions, as a run records them."""
    memory: Callable[[], int | None]
    """Peak bytes so far."""


def make_workload(
    config: ModelConfig, recipe: Recipe, device: Literal["auto", "cpu", "cuda"] = "auto", *, whole: bool = False
) -> Workload:
    """A workload as a run has it, after its warm-up updates.

    Of several micro-batches only one is computed, unless `whole`: that is quicker, but counts the optimizer once for
    each, which would be unfair to an arm with more parameters.
    """
    torch.set_num_threads(recipe.threads)
    compute = choose_compute(device, recipe.dtype, recipe.kernels)
    make_repeatable(compute)
    keep_freed_memory()
    rows = recipe.num_sequences if whole else recipe.sequences_per_forward
    micro = recipe if whole else replace(recipe, batch_tokens=rows * recipe.seq_len, micro_sequences=0)
    run = RunConfig(arm="probe", seed=0, budget=micro.batch_tokens, model=config, recipe=micro, data="")
    model = build(config, 0, compute.device, compute.kernels)
    losses, compute = choose_losses(model, micro, compute, lambda _: None)
    optimizer = make_adamw(model, micro.optim)
    tokens = stream(0, "data", "probe").integers(1, config.vocab_size, (2, rows, recipe.seq_len))
    inputs_BS, targets_BS = torch.from_numpy(tokens).to(compute.device)
    windows = _windows(config.vocab_size, recipe.seq_len)

    def update() -> None:
        train_step(model, optimizer, inputs_BS, targets_BS, run, micro.optim.lr, compute.autocast, compute=losses)

    for _ in range(WARM_UPDATES):
        if _timed(update, 0)[1] > WARM_S:
            break
    return Workload(
        update=update,
        score=lambda: evaluate(model, windows, end_of_text=0, autocast=compute.autocast),
        sample=lambda: _write(model, recipe.seq_len),
        micro_batches=recipe.num_sequences // rows,
        scored_tokens=windows.num_targets,
        reason=compute.reason,
        environment=environment(compute, recipe),
        memory=lambda: peak_memory_bytes(compute),
    )


def _windows(vocab_size: int, seq_len: int) -> EvalWindows:
    """Full windows of random tokens, as many as one forward pass of an evaluation takes."""
    rows = max(1, FORWARD_TOKENS // seq_len)
    inputs_WS, targets_WS = stream(0, "data", "probe", "score").integers(1, vocab_size, (2, rows, seq_len))
    num_targets = rows * seq_len
    return EvalWindows(
        inputs_WS=inputs_WS,
        targets_WS=targets_WS,
        unit_WS=np.repeat(np.arange(rows), seq_len).reshape(rows, seq_len),
        num_units=rows,
        unit_tokens_U=np.full(rows, seq_len),
        unit_bytes_U=np.full(rows, seq_len),
        unit_document_U=np.arange(rows),
        num_targets=num_targets,
        num_bytes=num_targets,
        floor=None,
    )


def _write(model: Transformer, context: int) -> None:
    generate(model, [0], SAMPLE_TOKENS, stop_id=None, context=context)


def _timed(work: Callable[[], object], seconds: float) -> tuple[int, float]:
    """(times done, seconds taken): `work` again and again, at least once, until `seconds` are over."""
    began = time.perf_counter()
    done, elapsed = 0, 0.0
    while not done or elapsed < seconds:
        work()
        done, elapsed = done + 1, time.perf_counter() - began
    return done, elapsed


def answer(requests: Iterable[str], load: Callable[[Mapping[str, Any]], Workload]) -> Iterator[str]:
    """One line of JSON for each line of JSON.

    `{"do": "load", …}` makes a workload out of the rest with `load`; `{"do": "update" | "score" | "sample" | "gemm",
    "seconds": s}` does that for `s` seconds and tells the seconds of one whole update, scored token, written token or
    FLOP (of a float32 product on the CPU, with `threads`); `{"do": "memory"}` tells the peak in bytes. Where several
    workloads are to be held at once, each is loaded and asked for under a `name`.
    """
    held: dict[str, Workload] = {}
    left, right = torch.rand(2, GEMM_SIZE, GEMM_SIZE, generator=torch.Generator().manual_seed(0))
    for line in requests:
        request = json.loads(line)
        what, seconds, name = request["do"], request.get("seconds", 0), request.get("name", "")
        workload = held.get(name)
        reply: dict[str, Any] = {}
        if what == "load":
            held.pop(name, None)  # its memory first
            workload = None
            held[name] = workload = load(request)
            reply = {"reason": workload.reason, "environment": dict(workload.environment)}
        elif what == "gemm":
            torch.set_num_threads(request["threads"])
            times, taken = _timed(lambda: torch.mm(left, right), seconds)
            reply = {"s": taken / times / (2 * GEMM_SIZE**3)}
        elif workload is not None and what == "update":
            times, taken = _timed(workload.update, seconds)
            reply = {"s": taken / times * workload.micro_batches}
        elif workload is not None and what == "score":
            times, taken = _timed(workload.score, seconds)
            reply = {"s": taken / times / workload.scored_tokens}
        elif workload is not None and what == "sample":
            times, taken = _timed(workload.sample, seconds)
            reply = {"s": taken / times / SAMPLE_TOKENS}
        elif workload is not None and what == "memory":
            reply = {"bytes": workload.memory()}
        else:
            raise ValueError(f"request {request!r}: nothing is loaded, or nothing is called that")
        yield json.dumps(reply)
