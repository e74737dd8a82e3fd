"""What each hand-written pass gains: a training step with all of them, and with one at a time replaced by plain layers.

    python benchmarks/kernels.py --shapes B --models moe

All variants live in one process and alternate, round after round; a cell is the median. The clock counts the
seconds of the processor and there is one thread, so that the table can be made on a busy machine; less than some 8 % is
not shown by it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

import equipoise.model.transformer as transformer
from equipoise.model.fused import products
from equipoise.model.fused.attention import MIN_LENGTH
from equipoise.model.fused.cross_entropy import mean_cross_entropy
from equipoise.model.layers import Attention, RMSNorm, SwiGLU, attend, rms_norm, swiglu
from equipoise.model.moe import Experts
from equipoise.model.transformer import build
from equipoise.optim import make_adamw
from equipoise.rng import stream
from equipoise.spec.model import DenseFFN, ModelConfig, MoEFFN
from equipoise.spec.recipe import Kernels, Optim, Recipe
from equipoise.spec.run import RunConfig
from equipoise.step import train_step

SHAPES = {  # vocabulary, d_model, layers, heads, d_expert, sequence length, sequences
    "tinystories-cpu": (1024, 64, 4, 2, 64, 128, 8),
    "B": (4096, 128, 4, 4, 256, 256, 32),
    "A": (4096, 256, 8, 8, 512, 512, 16),
}


def plain_loss(x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor) -> Tensor:
    return F.cross_entropy(x_TD @ weight_VD.T, targets_T)


LEFT_OUT = ("cross_entropy", "rms_norm", "swiglu", "attention", "experts", "products")


def stepper(shape: str, moe: bool, name: str) -> Callable[[], object]:
    """A step of the model with all hand-written passes, without the one named, or ('plain') with none."""
    vocab_size, d_model, num_layers, num_heads, d_expert, seq_len, sequences = SHAPES[shape]
    kernels: Kernels = "plain" if name == "plain" else "fused"
    ffn = MoEFFN(num_experts=4, top_k=2, d_expert=d_expert, z_coef=0.001) if moe else DenseFFN(d_ff=2 * d_expert)
    config = ModelConfig(vocab_size=vocab_size, d_model=d_model, num_layers=num_layers, num_heads=num_heads, ffn=ffn)
    recipe = Recipe(seq_len=seq_len, batch_tokens=seq_len * sequences, optim=Optim(lr=1e-3), kernels=kernels)
    run = RunConfig(arm="bench", seed=0, budget=recipe.batch_tokens, model=config, recipe=recipe, data="")
    model = build(config, 0, kernels=kernels)
    for module in model.modules():
        if isinstance(module, Experts) and name == "experts":
            module.fused = False
        for kind, plain in ((RMSNorm, rms_norm), (SwiGLU, swiglu), (Attention, attend)):
            if isinstance(module, kind) and name in (plain.__name__, kind.__name__.lower()):
                module.compute = plain
    optimizer = make_adamw(model, recipe.optim)
    tokens = stream(0, "data", "bench").integers(0, vocab_size, (2, sequences, seq_len))
    inputs_BS, targets_BS = torch.from_numpy(tokens)

    def step() -> None:
        loss = plain_loss if name == "cross_entropy" else mean_cross_entropy
        onednn = products.ONEDNN and name != "products"
        with mock.patch.object(transformer, "mean_cross_entropy", loss), mock.patch.object(products, "ONEDNN", onednn):
            train_step(model, optimizer, inputs_BS, targets_BS, run, recipe.optim.lr)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="tinystories-cpu")
    parser.add_argument("--models", default="dense,moe")
    parser.add_argument("--left-out", default=",".join([*LEFT_OUT, "plain"]), help="passes to leave out, one at a time")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, 1 thread, CPU seconds, median of {options.rounds} alternating rounds\n")
    print("| shape | model | left out | ms a step | ÷ all of them |\n|---|---|---|---|---|")
    for shape in options.shapes.split(","):
        for kind in options.models.split(","):
            unused = {"experts"} if kind == "dense" else {"swiglu"}
            unused |= set() if SHAPES[shape][5] >= MIN_LENGTH else {"attention"}
            unused |= set() if products.ONEDNN and SHAPES[shape][1] >= products.MIN_WIDTH else {"products"}
            names = ["nothing", *(name for name in options.left_out.split(",") if name not in unused)]
            steps = {name: stepper(shape, kind == "moe", name) for name in names}
            seconds: dict[str, list[float]] = {name: [] for name in names}
            for number in range(options.rounds + 1):
                for name, step in steps.items():
                    began = time.process_time()
                    step()
                    if number:
                        seconds[name].append(time.process_time() - began)
            for name, kept in seconds.items():
                ratio = statistics.median(a / b for a, b in zip(kept, seconds["nothing"], strict=True))
                left_out = 'all of them (`kernels = "plain"`)' if name == "plain" else name
                print(
                    f"| {shape} | {kind} | {left_out} | {statistics.median(kept) * 1e3:,.1f} | {ratio:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
