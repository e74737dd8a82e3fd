"""One training step, ours beside Hugging Face's, on the same random tokens: forward, loss, backward, clip, AdamW.

    make bench

Measurements alternate (ours, theirs, ours, …) in one process on one thread, after a warm-up of each, because machines
are noisy: read the ratio of medians, and take less than some 8 % as not shown. The peer is `transformers` with random
weights of the same shape: LlamaForCausalLM for the dense arm, MixtralForCausalLM with eager experts for the MoE arm.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from equipoise.model.transformer import build
from equipoise.optim import make_adamw
from equipoise.rng import stream
from equipoise.spec.model import DenseFFN, ModelConfig, MoEFFN
from equipoise.spec.recipe import Optim, Recipe
from equipoise.spec.study import RunConfig
from equipoise.step import train_step

ROUNDS = 7
SHAPES = {  # name: vocabulary, d_model, layers, heads, d_expert, sequence length, sequences
    "tinystories-cpu": (1024, 64, 4, 2, 64, 128, 8),
    "B": (4096, 128, 4, 4, 256, 256, 8),
}


def ours(
    model_config: ModelConfig, recipe: Recipe, inputs_BS: torch.Tensor, targets_BS: torch.Tensor
) -> Callable[[], object]:
    run = RunConfig(arm="bench", seed=0, budget=recipe.batch_tokens, model=model_config, recipe=recipe, data="")
    model = build(model_config, 0)
    optimizer = make_adamw(model, recipe.optim)
    return lambda: train_step(model, optimizer, inputs_BS, targets_BS, run, recipe.optim.lr)


def theirs(
    model: torch.nn.Module, recipe: Recipe, inputs_BS: torch.Tensor, targets_BS: torch.Tensor
) -> Callable[[], object]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.optim.lr, betas=recipe.optim.betas, weight_decay=0.1)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        logits = model(input_ids=inputs_BS).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets_BS.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


def seconds(step: Callable[[], object]) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def main() -> None:
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, 1 thread, median of {ROUNDS} alternating rounds\n")
    print(f"{'shape':<16} {'arm':<6} {'ours ms':>8} {'HF ms':>8} {'HF ÷ ours':>10} {'ours tok/s':>11}")
    for name, (vocab, d_model, layers, heads, d_expert, seq_len, rows) in SHAPES.items():
        recipe = Recipe(seq_len=seq_len, batch_tokens=seq_len * rows, optim=Optim(lr=1e-3))
        tokens = stream(0, "data", "bench").integers(0, vocab, (2, rows, seq_len))
        inputs_BS, targets_BS = torch.from_numpy(tokens)
        shared = {
            "vocab_size": vocab, "hidden_size": d_model, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": heads, "tie_word_embeddings": True, "max_position_embeddings": seq_len,
        }  # fmt: skip
        moe = MoEFFN(num_experts=4, top_k=2, d_expert=d_expert, z_coef=0.001)
        pairs = {
            "dense": (
                DenseFFN(d_ff=2 * d_expert),
                LlamaForCausalLM(LlamaConfig(**shared, intermediate_size=2 * d_expert)),
            ),
            "moe": (
                moe,
                MixtralForCausalLM(
                    MixtralConfig(
                        **shared, intermediate_size=d_expert, num_local_experts=4, num_experts_per_tok=2,
                        experts_implementation="eager",
                    )
                ),
            ),
        }  # fmt: skip
        for arm, (ffn, peer) in pairs.items():
            config = ModelConfig(num_layers=layers, num_heads=heads, d_model=d_model, ffn=ffn, vocab_size=vocab)
            steps = (ours(config, recipe, inputs_BS, targets_BS), theirs(peer, recipe, inputs_BS, targets_BS))
            times: tuple[list[float], list[float]] = ([], [])
            for round_number in range(ROUNDS + 2):
                for step, kept in zip(steps, times, strict=True):
                    value = seconds(step)
                    if round_number >= 2:
                        kept.append(value)
            mine, peers = (statistics.median(kept) for kept in times)
            speed = recipe.batch_tokens / mine
            print(f"{name:<16} {arm:<6} {mine * 1e3:>8.1f} {peers * 1e3:>8.1f} {peers / mine:>10.2f} {speed:>11,.0f}")


if __name__ == "__main__":
    main()
