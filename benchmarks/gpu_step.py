"""One training step on a CUDA card, ours beside Hugging Face's: at the published size and at d 768 x 12 layers.

    python benchmarks/gpu_step.py
    python benchmarks/gpu_step.py --peak 989 --rounds 5 --out table.md     # of an H200, dense bfloat16 TFLOP/s

Every measurement is a process of its own, the models in turn, round after round; a cell is the median over rounds of
the median step. Both compute in bfloat16 over float32 weights, by autocast, with the same micro-batches, clipping and
fused AdamW; ours compiled as `equipoise train` compiles it, theirs as it comes ("compiled": under torch.compile). The
peers are LlamaForCausalLM and MixtralForCausalLM with random weights of the same shape, without its router loss; ours
has both of its own. MFU is the model's FLOPs, causal attention counted at half, over `--peak`, or over a matrix product
of 8192 x 8192 timed on the card when that is not given. Without a card nothing is run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from equipoise.accounting import count_flops
from equipoise.compiled import choose_losses
from equipoise.device import choose_compute, make_repeatable
from equipoise.model.transformer import build
from equipoise.optim import make_adamw
from equipoise.rng import stream
from equipoise.spec.model import DenseFFN, ModelConfig, MoEFFN
from equipoise.spec.recipe import Optim, Recipe
from equipoise.spec.run import RunConfig
from equipoise.step import train_step


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a model and its batch; d_ff of the dense model is 2 · d_expert, which matches active parameters."""

    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    d_expert: int
    seq_len: int
    batch_tokens: int
    micro_sequences: int
    """Sequences a forward pass holds: chosen for a card, not the 8,192 tokens that bound a laptop's memory."""


SHAPES = {
    "tinystories": Shape(
        vocab_size=8348,
        d_model=512,
        num_layers=4,
        num_heads=4,
        d_expert=512,
        seq_len=512,
        batch_tokens=65_536,
        micro_sequences=128,
    ),
    "d768-L12": Shape(
        vocab_size=32_768,
        d_model=768,
        num_layers=12,
        num_heads=12,
        d_expert=1536,
        seq_len=1024,
        batch_tokens=65_536,
        micro_sequences=32,
    ),
}
MODELS = {  # name: what it is compared with
    "dense": "HF Llama, compiled",
    "HF Llama": "",
    "HF Llama, compiled": "",
    "MoE": "HF Mixtral, grouped_mm",
    "HF Mixtral, grouped_mm": "",
    "HF Mixtral, eager": "",
}
GEMM = 8192
HALF = torch.bfloat16


def model_config(shape: Shape, moe: bool) -> ModelConfig:
    ffn = MoEFFN(num_experts=4, top_k=2, d_expert=shape.d_expert, z_coef=0.001) if moe else None
    return ModelConfig(
        vocab_size=shape.vocab_size,
        d_model=shape.d_model,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        ffn=ffn or DenseFFN(d_ff=2 * shape.d_expert),
    )


def ours(
    shape: Shape, moe: bool, inputs_BS: torch.Tensor, targets_BS: torch.Tensor
) -> tuple[Callable[[], object], str]:
    """(a step, what it computes with)."""
    config = model_config(shape, moe)
    recipe = Recipe(
        seq_len=shape.seq_len,
        batch_tokens=shape.batch_tokens,
        micro_sequences=shape.micro_sequences,
        optim=Optim(lr=1e-3),
    )
    run = RunConfig(arm="bench", seed=0, budget=recipe.batch_tokens, model=config, recipe=recipe, data="")
    compute = choose_compute("cuda", "bfloat16")
    make_repeatable(compute)  # as training does, also where that costs time
    model = build(config, 0, compute.device, compute.kernels)
    losses, compute = choose_losses(model, recipe, compute, lambda line: print(line, file=sys.stderr))
    optimizer = make_adamw(model, recipe.optim)
    step = lambda: train_step(model, optimizer, inputs_BS, targets_BS, run, 1e-3, compute.autocast, losses)  # noqa: E731
    return step, compute.reason


def theirs(shape: Shape, name: str, inputs_BS: torch.Tensor, targets_BS: torch.Tensor) -> Callable[[], object]:
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
    if name.startswith("HF Llama"):
        model = LlamaForCausalLM(LlamaConfig(**shared, intermediate_size=2 * shape.d_expert)).cuda()
    else:
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": name.split()[-1]}
        model = MixtralForCausalLM(MixtralConfig(**shared, **experts, intermediate_size=shape.d_expert)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    rows = shape.micro_sequences

    def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", HALF):
            logits = model(input_ids=inputs, use_cache=False).logits
            return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    compute = torch.compile(loss_of, dynamic=False) if name.endswith("compiled") else loss_of

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        found = []
        for micro in range(len(inputs_BS) // rows):
            cut = slice(micro * rows, (micro + 1) * rows)
            loss = compute(inputs_BS[cut], targets_BS[cut])
            (loss * rows / len(inputs_BS)).backward()
            found.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(torch.stack(found).mean())

    return step


def measure(shape: Shape, name: str, steps: int) -> dict[str, Any]:
    """Median seconds of a step, FLOP/s of a matrix product timed afterwards, peak bytes, and what was computed with."""
    sequences = shape.batch_tokens // shape.seq_len
    tokens = stream(0, "data", "bench").integers(0, shape.vocab_size, (2, sequences, shape.seq_len))
    inputs_BS, targets_BS = torch.from_numpy(tokens).cuda()
    reason = "transformers, bfloat16 autocast"
    if name.startswith("HF"):
        step = theirs(shape, name, inputs_BS, targets_BS)
    else:
        step, reason = ours(shape, name == "MoE", inputs_BS, targets_BS)
    for _ in range(5):  # compilers, allocators and clocks settle
        step()
    torch.cuda.reset_peak_memory_stats()
    seconds = [timed(step) for _ in range(steps)]
    peak = torch.cuda.max_memory_allocated()
    left, right = torch.randn(2, GEMM, GEMM, device="cuda", dtype=HALF)
    product = torch.empty_like(left)
    rates = [2 * GEMM**3 / timed(lambda: torch.mm(left, right, out=product)) for _ in range(20)]
    return {
        "seconds": statistics.median(seconds),
        "gemm": statistics.median(rates[5:]),
        "memory": peak,
        "reason": reason,
    }


def timed(call: Callable[[], object]) -> float:
    """Seconds from an idle card to an idle card."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def table(shape_name: str, rounds: list[dict[str, dict[str, Any]]], peak: float | None) -> list[str]:
    """Rows of the Markdown table of one shape."""
    shape, rows = SHAPES[shape_name], []
    middle = {
        name: {key: statistics.median(one[name][key] for one in rounds) for key in ("seconds", "gemm", "memory")}
        for name in rounds[0]
    }
    rate = peak or statistics.median(found["gemm"] for found in middle.values())
    for name, found in middle.items():
        flops = count_flops(model_config(shape, name == "MoE" or "Mixtral" in name), shape.seq_len).training_causal
        peer = MODELS[name]
        faster = f"{middle[peer]['seconds'] / found['seconds']:.2f}" if peer in middle else ""
        over = f"{found['seconds'] / middle['dense']['seconds']:.2f}" if name == "MoE" and "dense" in middle else ""
        rows.append(
            f"| {shape_name} | {name} | {found['seconds'] * 1e3:,.1f} | {shape.batch_tokens / found['seconds']:,.0f} "
            f"| {flops * shape.batch_tokens / found['seconds'] / rate:.3f} | {faster} | {over} "
            f"| {found['memory'] / 2**20:,.0f} |"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="tinystories,d768-L12", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--models", default="", help=f"separated by ';', of: {'; '.join(MODELS)} (default: all)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="timed steps of a process")
    parser.add_argument("--peak", type=float, help="TFLOP/s that MFU is over (default: a matrix product on the card)")
    parser.add_argument("--out", type=Path, help="write the table there, in Markdown")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_step.py: not run: no CUDA device is visible to torch")
        return
    if options.child:
        print(json.dumps(measure(SHAPES[options.shapes], options.child, options.steps)))
        return
    names = [name.strip() for name in options.models.split(";")] if options.models else list(MODELS)
    over = f"{options.peak:g} TFLOP/s" if options.peak else f"a {GEMM} x {GEMM} product in the same run"
    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, median of {options.rounds} round(s) of "
        f"{options.steps} steps, MFU over {over}",
        "",
        "| shape | model | ms a step | tokens/s | MFU | faster than HF | MoE ÷ dense | peak MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    reasons: dict[str, None] = {}
    for shape_name in options.shapes.split(","):
        rounds: list[dict[str, dict[str, Any]]] = []
        for _ in range(options.rounds):
            rounds.append({})
            for name in names:
                command = [sys.executable, __file__, "--child", name, "--shapes", shape_name]
                command += ["--steps", str(options.steps)]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, encoding="utf-8")
                rounds[-1][name] = json.loads(done.stdout)
                reasons[f"{name}: {rounds[-1][name]['reason']}"] = None
        lines += table(shape_name, rounds, options.peak and options.peak * 1e12)
    text = "\n".join([*lines, "", *reasons]) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
