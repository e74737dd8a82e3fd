"""What data costs: tokenising against the tokenizers library's own batches, and a training batch against its update.

    python benchmarks/data.py [FOLDER-OF-TINYSTORIES]

Without a folder the built-in story grammar is tokenised. Every measurement is a process of its own, in turn (ours, the
library's, ours, …), round after round; cells are medians. Ours is what preparing does: documents to arrays of ids, a
megabyte at a time. The library's is its `encode_batch` and `encode_batch_fast` on the same megabytes with its own
thread pool on, the results thrown away.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from equipoise.data.corpora import open_corpus
from equipoise.data.packing import batch
from equipoise.data.tokenizer import train_tokenizer
from equipoise.model.transformer import build
from equipoise.optim import make_adamw
from equipoise.rng import stream
from equipoise.spec.data import BpeTokenizer, GrammarCorpus, TinyStoriesCorpus
from equipoise.spec.model import DenseFFN, ModelConfig
from equipoise.spec.recipe import Optim, Recipe
from equipoise.spec.run import RunConfig
from equipoise.step import train_step

BATCH_CHARS = 1 << 20
"""Characters of a batch of documents."""

WAYS = ("ours", "encode_batch", "encode_batch_fast")
VOCAB_SIZE = 4096


def batches(folder: str, megabytes: int) -> list[list[str]]:
    """Documents, about a megabyte a batch."""
    corpus = TinyStoriesCorpus(path=folder) if folder else GrammarCorpus(num_documents=4000 * megabytes)
    found: list[list[str]] = [[]]
    size = 0
    for document in open_corpus(corpus).read():
        found[-1].append(document.text)
        size += len(document.text)
        if size >= BATCH_CHARS:
            if len(found) == megabytes:
                break
            found.append([])
            size = 0
    return found


def measure(way: str, folder: str, megabytes: int, times: int) -> float:
    """Megabytes a second, the best of `times` passes after one that warms the library's cache."""
    data = batches(folder, megabytes)
    tokenizer = train_tokenizer(
        BpeTokenizer(vocab_size=VOCAB_SIZE), islice((text for part in data for text in part), 3000)
    )
    if way != "ours":
        os.putenv("TOKENIZERS_PARALLELISM", "true")  # read by the library at every call
    encode: Callable[[list[str]], object] = (
        tokenizer.encode_arrays if way == "ours" else getattr(tokenizer.library, way)
    )
    num_bytes = sum(len(text.encode()) for part in data for text in part)
    seconds = []
    for number in range(times + 1):
        began = time.perf_counter()
        for part in data:
            encode(part)
        if number:
            seconds.append(time.perf_counter() - began)
    return num_bytes / 1e6 / min(seconds)


def batch_share(steps: int) -> tuple[float, float]:
    """Median processor seconds of a training batch and of the update it feeds, at the shape of tinystories-cpu."""
    torch.set_num_threads(1)
    model_config = ModelConfig(vocab_size=1024, d_model=64, num_layers=4, num_heads=2, ffn=DenseFFN(d_ff=128))
    recipe = Recipe(seq_len=128, batch_tokens=1024, optim=Optim(lr=1e-3))
    run = RunConfig(arm="bench", seed=0, budget=recipe.batch_tokens, model=model_config, recipe=recipe, data="")
    model = build(model_config, 0, kernels="fused")
    optimizer = make_adamw(model, recipe.optim)
    tokens = stream(0, "data", "bench").integers(1, 1024, 4_000_000).astype(np.uint16)
    seconds: list[tuple[float, float]] = []
    for step in range(steps + 3):
        began = time.process_time()
        inputs_BS, targets_BS = batch(tokens, recipe.seq_len, recipe.num_sequences, 0, step)
        middle = time.process_time()
        train_step(model, optimizer, torch.from_numpy(inputs_BS), torch.from_numpy(targets_BS), run, recipe.optim.lr)
        if step >= 3:
            seconds.append((middle - began, time.process_time() - middle))
    return statistics.median(s for s, _ in seconds), statistics.median(s for _, s in seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default="", help="a folder of TinyStories (default: the built-in grammar)")
    parser.add_argument("--megabytes", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round of a megabyte: does it run?")
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.child, options.folder, options.megabytes, 3)))
        return
    if options.quick:
        options.megabytes, options.rounds = 1, 1
    rounds: list[dict[str, float]] = []
    for _ in range(options.rounds):
        rounds.append({})
        for way in WAYS:
            command = [sys.executable, str(Path(__file__)), "--child", way, "--megabytes", str(options.megabytes)]
            done = subprocess.run([*command, options.folder], check=True, stdout=subprocess.PIPE, encoding="utf-8")
            rounds[-1][way] = json.loads(done.stdout)
    print("| tokenising | MB/s | ours ÷ it |\n|---|---|---|")
    for way in WAYS:
        share = statistics.median(found["ours"] / found[way] for found in rounds)
        print(f"| {way} | {statistics.median(found[way] for found in rounds):.2f} | {share:.2f} |")
    one, update = batch_share(5 if options.quick else 200)
    print(f"\na batch: {one * 1e6:.0f} us, {100 * one / update:.2f} % of an update ({update * 1e3:.1f} ms)")


if __name__ == "__main__":
    main()
