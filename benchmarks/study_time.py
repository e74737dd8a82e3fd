"""Time to verdict: a study of 3 arms × 3 seeds × 4 budgets by `equipoise run`, and by a plain loop around Hugging Face.

    python benchmarks/study_time.py [FOLDER-OF-TINYSTORIES] --scale 1

The shape is B of step_time.py: vocabulary 4,096 (which the story grammar, the text without a folder, does not reach),
d_model 128, 4 layers, batches of 8,192 tokens. The loop is what one would write without Equipoise: tokenise
once, then train LlamaForCausalLM and MixtralForCausalLM (eager experts, the faster on a CPU, with its router loss) of
the same shapes, batches, steps and rates, evaluate as often on as many tokens and score the validation set at the end.
It runs as one process of two threads and as two of one thread, the runs in order; the better of the two counts. Ours
prepares, locks, trains, scores and judges; the clock stops where it tells the verdict (what comes after, step times of
the arms and the drawn report, is told beside it), once with a schedule per budget as the loop has it, and once with
WSD, where budgets share a trunk. `--scale` multiplies the budgets. Ctrl-C ends it.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from equipoise.data.corpora import open_corpus
from equipoise.rng import stream
from equipoise.spec.data import GrammarCorpus, TinyStoriesCorpus

VOCAB_SIZE, D_MODEL, LAYERS, HEADS, D_EXPERT = 4096, 128, 4, 4, 256
SEQ_LEN, BATCH_TOKENS, CURVE_TOKENS, NUM_EVALS, EVAL_TOKENS = 256, 8192, 2048, 8, 16_384
ARMS = {"moe": 0, "dense-active": 2 * D_EXPERT, "dense-total": 4 * D_EXPERT}  # d_ff
SEEDS = (0, 1, 2)
UPDATES = (4, 8, 16, 32)
"""Of the four budgets, at `--scale 1`."""
LR = 2e-3
CLAIM = "moe-beats-dense-at-equal-active"

STUDY = f"""
name = "study-time"
[tokenizer]
kind = "bpe"
vocab_size = {VOCAB_SIZE}
[recipe]
seq_len = {SEQ_LEN}
batch_tokens = {BATCH_TOKENS}
num_evals = {NUM_EVALS}
eval_tokens = {EVAL_TOKENS}
optim = {{ lr = {LR} }}
schedule = {{ SCHEDULE }}
samples = {{ prompts = [] }}
[base.model]
num_layers = {LAYERS}
num_heads = {HEADS}
d_model = {D_MODEL}
[arms.moe.model.ffn]
kind = "moe"
num_experts = 4
top_k = 2
d_expert = {D_EXPERT}
balance = {{ kind = "loss", coef = 0.01 }}
z_coef = 0.001
[arms.dense-active]
match = {{ to = "moe", on = "active_params", adjust = "ffn.d_ff" }}
model.ffn = {{ kind = "dense" }}
[arms.dense-total]
match = {{ to = "moe", on = "total_params", adjust = "ffn.d_ff" }}
model.ffn = {{ kind = "dense" }}
[[claims]]
id = "{CLAIM}"
kind = "lower"
left = "moe"
right = "dense-active"
"""


def corpus_of(folder: str, scale: float) -> GrammarCorpus | TinyStoriesCorpus:
    if folder:
        return TinyStoriesCorpus(path=str(Path(folder).resolve()))
    return GrammarCorpus(num_documents=max(100, round(6000 * scale)), num_validation=300, num_selection=50)


# ------------------------------------------------------------------------------------------------ the plain loop


def tokenise(folder: str, scale: float, work: Path) -> None:
    """Train the tokenizer and write the two arrays that the loop reads: once, by the library alone."""
    texts = read_texts(folder, scale)
    library = Tokenizer(BPE())
    library.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(texts["train"], trainer)
    arrays = {}
    for split, documents in texts.items():
        ids = [index for one in library.encode_batch_fast(documents) for index in [*one.ids, 0]]
        arrays[split] = torch.tensor(ids, dtype=torch.int64)
    torch.save(arrays, work / "tokens.pt")


def read_texts(folder: str, scale: float) -> dict[str, list[str]]:
    """The stories of each split."""
    if not folder:
        source = open_corpus(corpus_of(folder, scale))
        texts: dict[str, list[str]] = {"train": [], "validation": [], "selection": []}
        for document in source.read():
            texts[document.split or "train"].append(document.text)
        return texts
    found: dict[str, list[str]] = {"train": [], "validation": []}
    for path in sorted(Path(folder).glob("*.txt")):
        split = "validation" if "valid" in path.name else "train"
        found[split] += path.read_text(encoding="utf-8").split("<|endoftext|>")
    return found


def model_of(arm: str, vocab_size: int) -> torch.nn.Module:
    shared: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": D_MODEL,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "tie_word_embeddings": True,
        "max_position_embeddings": SEQ_LEN,
    }
    if ARMS[arm]:
        return LlamaForCausalLM(LlamaConfig(**shared, intermediate_size=ARMS[arm]))  # type: ignore[no-any-return]
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
    router = {"output_router_logits": True, "router_aux_loss_coef": 0.02}
    return MixtralForCausalLM(  # type: ignore[no-any-return]
        MixtralConfig(**shared, **experts, **router, intermediate_size=D_EXPERT)
    )


def train(arm: str, seed: int, steps: int, arrays: dict[str, torch.Tensor]) -> float:
    """One run; returns its validation loss."""
    model = model_of(arm, int(arrays["train"].max()) + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    num = (len(arrays["train"]) - 1) // SEQ_LEN
    order = torch.from_numpy(stream(seed, "data", "study-time").permutation(num))
    offsets = torch.arange(SEQ_LEN + 1)
    rows = BATCH_TOKENS // SEQ_LEN
    num_points = min(NUM_EVALS, steps)
    points = {round(steps * point / num_points) for point in range(num_points)}
    for step in range(steps):
        if step in points:
            score(model, arrays["validation"], CURVE_TOKENS)
        places = order[(torch.arange(rows) + step * rows) % num]
        window = arrays["train"][places[:, None] * SEQ_LEN + offsets]
        warm = min(1.0, (step + 1) / max(1, steps // 20))
        for group in optimizer.param_groups:
            group["lr"] = LR * warm * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        optimizer.zero_grad(set_to_none=True)
        output = model(input_ids=window[:, :-1], use_cache=False)
        loss = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), window[:, 1:].flatten())
        if getattr(output, "router_logits", None):
            loss = loss + 0.02 * router_loss(output.router_logits)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    score(model, arrays["validation"], CURVE_TOKENS)
    return score(model, arrays["validation"], EVAL_TOKENS)


def router_loss(logits: tuple[torch.Tensor, ...]) -> torch.Tensor:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    found = load_balancing_loss_func(logits, 4, 2)
    assert isinstance(found, torch.Tensor)
    return found


@torch.no_grad()
def score(model: torch.nn.Module, tokens: torch.Tensor, limit: int) -> float:
    num = min(limit, len(tokens) - 1) // SEQ_LEN
    windows = tokens[torch.arange(num)[:, None] * SEQ_LEN + torch.arange(SEQ_LEN + 1)]
    total = 0.0
    for window in windows.split(64):
        logits = model(input_ids=window[:, :-1], use_cache=False).logits
        total += torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), window[:, 1:].flatten(), reduction="sum"
        ).item()
    return total / (num * SEQ_LEN)


def steps_of(scale: float) -> list[int]:
    return [round(updates * scale) for updates in UPDATES] if scale else [2]


def seeds_of(scale: float) -> tuple[int, ...]:
    return SEEDS if scale else SEEDS[:1]


def worker(part: int, parts: int, threads: int, scale: float, work: Path) -> None:
    """Every `parts`-th run, from `part`."""
    torch.set_num_threads(threads)
    arrays = torch.load(work / "tokens.pt", weights_only=True)
    runs = [(arm, seed, steps) for steps in steps_of(scale) for seed in seeds_of(scale) for arm in ARMS]
    for arm, seed, steps in runs[part::parts]:
        print(json.dumps([arm, seed, steps, train(arm, seed, steps, arrays)]), flush=True)


# ------------------------------------------------------------------------------------------------ both, timed


def time_loop(folder: str, scale: float, parts: int, threads: int) -> float:
    """Seconds of the plain loop with `parts` processes."""
    with tempfile.TemporaryDirectory() as name:
        began = time.monotonic()
        command = [sys.executable, __file__, *([folder] if folder else []), "--scale", str(scale), "--work", name]
        subprocess.run([*command, "--child", "tokenise"], check=True)
        children = [
            subprocess.Popen(
                [*command, "--child", f"{part},{parts},{threads}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            for part in range(parts)
        ]
        try:
            codes = [child.wait() for child in children]
        finally:
            for child in children:
                child.kill()
        if any(codes):
            raise SystemExit(f"the loop failed: exit codes {codes}")
        return time.monotonic() - began


def time_ours(folder: str, scale: float, jobs: str, schedule: str) -> tuple[float, float]:
    """Seconds of `equipoise run` from nothing to the verdict, and to its end: step times, tables, the report."""
    with tempfile.TemporaryDirectory() as name:
        corpus = corpus_of(folder, scale)
        budgets = [steps * BATCH_TOKENS for steps in steps_of(scale)]
        head = f"budgets = {budgets}\nseeds = {list(seeds_of(scale))}\n[corpus]\nkind = {json.dumps(corpus.kind)}\n"
        if isinstance(corpus, TinyStoriesCorpus):
            head += f"path = {json.dumps(corpus.path)}\n"
        else:
            head += f"num_documents = {corpus.num_documents}\nnum_validation = 300\nnum_selection = 50\n"
        study = Path(name) / "study.toml"
        warm = max(1, steps_of(scale)[0] // 5) * BATCH_TOKENS
        schedules = {"cosine": 'kind = "cosine"', "wsd": f'kind = "wsd", warmup_tokens = {warm}'}
        body = STUDY.replace("[recipe]", f"[recipe]\ncurve_tokens = {CURVE_TOKENS}")
        body = body.replace("SCHEDULE", schedules[schedule])
        study.write_text(body.replace("[tokenizer]", head + "[tokenizer]", 1), encoding="utf-8")
        command = [sys.executable, "-m", "equipoise", "run", str(study), "--jobs", jobs]
        command += ["--cache", f"{name}/cache", "--out", f"{name}/runs"]
        began, verdict_s = time.monotonic(), math.nan
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, encoding="utf-8") as child:
            assert child.stderr is not None
            for line in child.stderr:
                if f" {CLAIM}: " in line or f" {CLAIM} [" in line:
                    verdict_s = time.monotonic() - began
        if child.returncode or math.isnan(verdict_s):
            raise SystemExit(
                f"equipoise run ended with {child.returncode}, told a verdict: {not math.isnan(verdict_s)}"
            )
        return verdict_s, time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default="")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the budgets")
    parser.add_argument("--jobs", default="auto", help="of `equipoise run`")
    parser.add_argument("--quick", action="store_true", help="one short run of each arm: does it run?")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child == "tokenise":
        tokenise(options.folder, options.scale, options.work)
        return
    if options.child:
        part, parts, threads = map(int, options.child.split(","))
        worker(part, parts, threads, options.scale, options.work)
        return
    scale = 0.0 if options.quick else options.scale
    print(f"{len(ARMS)} arms × {len(seeds_of(scale))} seed(s), budgets of {steps_of(scale)} updates", flush=True)
    loops = {}
    for parts, threads in ((2, 1), (1, 2)):
        loops[parts] = time_loop(options.folder, scale, parts, threads)
        print(f"plain loop, {parts} process(es) × {threads} thread(s): {loops[parts]:.1f} s", flush=True)
    for schedule in ("cosine", "wsd"):
        ours, whole = time_ours(options.folder, scale, options.jobs, schedule)
        trunks = ", budgets sharing trunks" if schedule == "wsd" else ""
        print(
            f"equipoise run, --jobs {options.jobs}, {schedule}{trunks}: {ours:.1f} s ({whole:.1f} s with report)",
            flush=True,
        )
        print(f"time to verdict: {min(loops.values()) / ours:.2f} times faster than the better loop", flush=True)


if __name__ == "__main__":
    main()
