"""One training step, ours beside Hugging Face's: forward, loss, backward, clip, AdamW on the same random tokens.

    make bench
    python benchmarks/step_time.py --shapes A,B --threads 2 --out table.md

Every measurement is a process of its own, the models in turn (ours, theirs, ours, …), round after round, because
machines are noisy: a cell is the median over rounds of the median step, and less than some 8 % is not shown by it.
Beside every step a matrix product is timed; MFU is the model's FLOPs, causal attention counted at half, over that rate.
`--clock cpu` counts the seconds of the processor instead of the wall's: with one thread that can be read on a busy
machine. The peers are `transformers` with random weights of the same shape: LlamaForCausalLM, and MixtralForCausalLM
with eager experts and with its default ones (grouped_mm), without its router loss; ours has both of its own.
Skewed routing is fixed by hand: seven tokens in ten go to the first expert (five are even).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from equipoise.accounting import count_flops
from equipoise.model.moe import MoE, Places, Router, Routing
from equipoise.model.transformer import Transformer, build
from equipoise.optim import make_adamw
from equipoise.rng import stream
from equipoise.spec.model import DenseFFN, ModelConfig, MoEFFN
from equipoise.spec.recipe import Kernels, Optim, Recipe
from equipoise.spec.run import RunConfig
from equipoise.step import train_step


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a model and its batch; the dense arm's d_ff is 2 · d_expert, which matches active parameters."""

    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    d_expert: int
    seq_len: int
    sequences: int


SHAPES = {
    "tinystories-cpu": Shape(
        vocab_size=1024, d_model=64, num_layers=4, num_heads=2, d_expert=64, seq_len=128, sequences=8
    ),
    "B": Shape(vocab_size=4096, d_model=128, num_layers=4, num_heads=4, d_expert=256, seq_len=256, sequences=32),
    "B-wide-heads": Shape(
        vocab_size=4096, d_model=128, num_layers=4, num_heads=2, d_expert=256, seq_len=256, sequences=32
    ),
    "A": Shape(vocab_size=4096, d_model=256, num_layers=8, num_heads=8, d_expert=512, seq_len=512, sequences=16),
}
MODELS = {  # name: what it is compared with
    "dense": "HF Llama",
    "HF Llama": "",
    "MoE": "HF Mixtral, eager",
    "HF Mixtral, eager": "",
    "HF Mixtral, grouped_mm": "",
    "MoE, skewed": "",
    "dense, plain": "",
    "MoE, plain": "",
}
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


# ------------------------------------------------------------------------------------------------ one measurement


def model_config(shape: Shape, moe: bool) -> ModelConfig:
    ffn = MoEFFN(num_experts=4, top_k=2, d_expert=shape.d_expert, z_coef=0.001) if moe else None
    return ModelConfig(
        vocab_size=shape.vocab_size,
        d_model=shape.d_model,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        ffn=ffn or DenseFFN(d_ff=2 * shape.d_expert),
    )


def ours(shape: Shape, name: str, inputs_BS: torch.Tensor, targets_BS: torch.Tensor) -> Callable[[], object]:
    kernels: Kernels = "plain" if name.endswith("plain") else "fused"
    config = model_config(shape, moe=name.startswith("MoE"))
    recipe = Recipe(seq_len=shape.seq_len, batch_tokens=inputs_BS.numel(), optim=Optim(lr=1e-3), kernels=kernels)
    run = RunConfig(arm="bench", seed=0, budget=recipe.batch_tokens, model=config, recipe=recipe, data="")
    model = build(config, 0, kernels=kernels)
    if name.endswith("skewed"):
        skew(model, min(inputs_BS.numel(), recipe.sequences_per_forward * shape.seq_len))
    optimizer = make_adamw(model, recipe.optim)
    return lambda: train_step(model, optimizer, inputs_BS, targets_BS, run, recipe.optim.lr)


def skew(model: Transformer, num_tokens: int) -> None:
    """Make every router choose the first expert and another for seven tokens in ten, two others for the rest."""
    draws = stream(0, "data", "bench", "skew")
    ids_TK = torch.from_numpy(draws.random((num_tokens, 3)).argsort(axis=1)[:, :2] + 1)
    ids_TK[torch.arange(num_tokens) % 10 < 7, 0] = 0

    def fixed(router: Router) -> Callable[..., Routing]:
        route = router.forward

        def forward(x_TD: torch.Tensor, places: Places | None = None) -> Routing:
            routing = route(x_TD, places)
            assert routing.probs_TE is not None
            weights_TK = routing.probs_TE.gather(1, ids_TK)
            weights_TK = weights_TK / weights_TK.sum(dim=1, keepdim=True)
            return dataclasses.replace(routing, expert_ids_TK=ids_TK, weights_TK=weights_TK)

        return forward

    for module in model.modules():
        if isinstance(module, MoE):
            module.router.forward = fixed(module.router)  # type: ignore[method-assign]


def theirs(shape: Shape, name: str, inputs_BS: torch.Tensor, targets_BS: torch.Tensor) -> Callable[[], object]:
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM  # ours does without

    shared: dict[str, Any] = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.d_model,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_heads,
        "tie_word_embeddings": True,
        "max_position_embeddings": shape.seq_len,
    }
    model: torch.nn.Module
    if name == "HF Llama":
        model = LlamaForCausalLM(LlamaConfig(**shared, intermediate_size=2 * shape.d_expert))
    else:
        model = MixtralForCausalLM(
            MixtralConfig(
                **shared,
                intermediate_size=shape.d_expert,
                num_local_experts=4,
                num_experts_per_tok=2,
                experts_implementation=name.rpartition(" ")[2],
            )
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        logits = model(input_ids=inputs_BS, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets_BS.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


def measure(shape: Shape, name: str, threads: int, steps: int, clock: Callable[[], float]) -> dict[str, float]:
    """Median seconds of a step, FLOP/s of a matrix product timed before each, and the peak of the process's memory."""
    torch.set_num_threads(threads)
    tokens = stream(0, "data", "bench").integers(0, shape.vocab_size, (2, shape.sequences, shape.seq_len))
    inputs_BS, targets_BS = torch.from_numpy(tokens)
    step = (theirs if name.startswith("HF") else ours)(shape, name, inputs_BS, targets_BS)
    size = 1024
    left, right, product = torch.rand(3, size, size)
    seconds: list[float] = []
    rates: list[float] = []
    for number in range(steps + 1):  # the first one warms up
        began = clock()
        torch.mm(left, right, out=product)
        middle = clock()
        step()
        if number:
            rates.append(2 * size**3 / (middle - began))
            seconds.append(clock() - middle)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": statistics.median(seconds), "gemm": statistics.median(rates), "rss": peak}


# ------------------------------------------------------------------------------------------------ the table


def table(shape_name: str, rounds: list[dict[str, dict[str, float]]]) -> list[str]:
    """Rows of the Markdown table of one shape."""
    shape, rows = SHAPES[shape_name], []
    tokens = shape.sequences * shape.seq_len
    middle = {
        name: {key: statistics.median(one[name][key] for one in rounds) for key in ("seconds", "gemm", "rss")}
        for name in rounds[0]
    }
    gemm = statistics.median(found["gemm"] for found in middle.values())
    for name, found in middle.items():
        flops = count_flops(model_config(shape, moe="MoE" in name or "Mixtral" in name), shape.seq_len).training_causal
        peer = MODELS[name]
        faster = f"{middle[peer]['seconds'] / found['seconds']:.2f}" if peer else ""
        over = f"{found['seconds'] / middle['dense']['seconds']:.2f}" if name == "MoE" else ""
        rss = f"{found['rss'] / 2**20:,.0f}" + (f" ({found['rss'] / middle[peer]['rss']:.2f})" if peer else "")
        mfu = flops * tokens / found["seconds"] / gemm
        rows.append(
            f"| {shape_name} | {name} | {found['seconds'] * 1e3:,.1f} | {tokens / found['seconds']:,.0f} | {mfu:.2f} "
            f"| {faster} | {over} | {rss} |"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="tinystories-cpu,B", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--models", default="", help=f"separated by ';', of: {'; '.join(MODELS)} (default: all)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a process")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument(
        "--quick", action="store_true", help="one round of two steps of the smallest shape: does it run?"
    )
    parser.add_argument("--out", type=Path, help="write the table there, in Markdown")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    clock = CLOCKS[options.clock]
    if options.child:
        print(json.dumps(measure(SHAPES[options.shapes], options.child, options.threads, options.steps, clock)))
        return
    if options.quick:
        options.shapes, options.rounds, options.steps = "tinystories-cpu", 1, 2
    names = [name.strip() for name in options.models.split(";")] if options.models else list(MODELS)
    lines = [
        f"torch {torch.__version__}, {options.threads} thread(s), {options.clock} seconds, median of {options.rounds} "
        f"round(s) of {options.steps} steps",
        "",
        "| shape | model | ms a step | tokens/s | MFU | faster than HF | MoE ÷ dense | peak RSS MiB (÷ HF) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for shape_name in options.shapes.split(","):
        rounds: list[dict[str, dict[str, float]]] = []
        for _ in range(options.rounds):
            rounds.append({})
            for name in names:
                command = [sys.executable, __file__, "--child", name, "--shapes", shape_name, "--clock", options.clock]
                command += ["--threads", str(options.threads), "--steps", str(options.steps)]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, encoding="utf-8")
                rounds[-1][name] = json.loads(done.stdout)
        lines += table(shape_name, rounds)
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
