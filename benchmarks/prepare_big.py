"""Preparing a corpus that does not fit into memory: speed beside the tokenizers library's own batches, and peak memory.

    python benchmarks/prepare_big.py --gigabytes 1 --folder DIR

Writes that much text of the story grammar into DIR once, every story another, as one file in the form of TinyStories,
with --spelling a nonsense word in every story, one of 343,000 (the grammar alone has 600 different words, real stories
have more than a hundred times as many). Then, in turn, each in a process of its own, round after round: `equipoise`'s
preparation of the whole file, and the library's `encode_batch` and `encode_batch_fast` on the same text, read line by
line, in megabytes, on its own thread pool, the ids thrown away (--part of the text: it is as fast on all of it). Cells
are medians over the rounds; processor seconds are told beside those of the clock, as a busy machine leaves them alone;
memory is the largest sum of resident sets of a process and its children, looked at twenty times a second. The file and
what was prepared are left in DIR for a second call; --clean removes them. Not for: small texts (`data.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Final

from equipoise.data.corpora import open_corpus
from equipoise.data.prepare import prepare
from equipoise.data.progress import STAGES, Progress
from equipoise.data.tokenizer import train_tokenizer
from equipoise.spec.data import MAX_DOCUMENTS, BpeTokenizer, GrammarCorpus, TinyStoriesCorpus

WAYS: Final = ("prepare", "encode_batch", "encode_batch_fast")
BATCH_CHARS: Final = 1 << 20
SAMPLE: Final = 30_000
"""Stories that the library's tokenizer is learnt from."""
LETTERS: Final = ("b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z")


def make(path: Path, num_bytes: int, spelling: bool) -> None:
    """Write the corpus, if it is not there."""
    if path.exists() and path.stat().st_size >= num_bytes:
        return
    draw = random.Random(0)
    written = 0
    with path.open("w", encoding="utf-8") as file:
        for document in open_corpus(GrammarCorpus(num_documents=MAX_DOCUMENTS)).read():
            story = document.text
            if spelling:  # three syllables of a consonant and a vowel
                word = "".join(draw.choice(LETTERS) + draw.choice("aeiou") for _ in range(3))
                story = f"{story} The magic word was {word}."
            written += file.write(f"{story}\n<|endoftext|>\n")
            if written >= num_bytes:
                return


def child(way: str, path: Path, vocab_size: int, part: float) -> dict[str, float]:
    """One measurement: seconds, megabytes a second, and of a preparation the seconds of each stage."""
    if way == "prepare":
        return _prepare(path, vocab_size)
    corpus = TinyStoriesCorpus(path=str(path))
    texts = (document.text for document in open_corpus(corpus).read())
    sample = [text for text, _ in zip(texts, range(SAMPLE), strict=False)]
    tokenizer = train_tokenizer(BpeTokenizer(vocab_size=vocab_size), iter(sample))
    os.putenv("TOKENIZERS_PARALLELISM", "true")  # read by the library at every call
    encode = getattr(tokenizer.library, way)
    batch: list[str] = []
    size = num_bytes = 0
    busy = cpu = 0.0
    limit = part * path.stat().st_size
    for document in open_corpus(corpus).read():
        batch.append(document.text)
        size += len(document.text)
        if size >= BATCH_CHARS:
            num_bytes += sum(len(text.encode()) for text in batch)
            began, began_cpu = time.perf_counter(), time.process_time()
            encode(batch)
            busy += time.perf_counter() - began
            cpu += time.process_time() - began_cpu
            batch, size = [], 0
            if num_bytes > limit:
                break
    return {"seconds": busy, "rate": num_bytes / 1e6 / busy, "cpu_rate": num_bytes / 1e6 / cpu}


def _prepare(path: Path, vocab_size: int) -> dict[str, float]:
    cache = path.parent / "prepared"
    shutil.rmtree(cache, ignore_errors=True)
    began_at: dict[int, float] = {}
    cpu_at: dict[int, float] = {}
    began = time.perf_counter()

    def watch(progress: Progress) -> None:
        began_at.setdefault(progress.stage, time.perf_counter())

    def line(text: str) -> None:
        print(f"  {time.perf_counter() - began:7.1f} s {text}", file=sys.stderr, flush=True)
        if text.endswith("encoding"):
            began_at[2] = time.perf_counter()
            cpu_at[2] = time.process_time()

    dataset = prepare(
        TinyStoriesCorpus(path=str(path)), BpeTokenizer(vocab_size=vocab_size), cache, progress=line, watch=watch
    )
    ended = time.perf_counter()
    cpu, children = time.process_time(), os.times()
    num_bytes = sum(split["bytes"] for split in dataset.info["splits"].values())
    tokens = sum(split["tokens"] for split in dataset.info["splits"].values())
    return {
        "seconds": ended - began,
        "rate": num_bytes / 1e6 / (ended - began_at[2]),
        "cpu_rate": num_bytes / 1e6 / (cpu - cpu_at[2]),
        "whole_rate": num_bytes / 1e6 / (ended - began),
        "whole_cpu": cpu + children.children_user + children.children_system,
        "tokens": tokens,
        "vocab_size": dataset.vocab_size,
        **{f"{STAGES[stage]} began": at - began for stage, at in began_at.items()},
    }


def measure(way: str, path: Path, vocab_size: int, part: float) -> dict[str, float]:
    """A measurement in a process of its own, with the peak of its memory and of its children's."""
    command = [sys.executable, __file__, "--child", way, "--file", str(path), "--vocab", str(vocab_size)]
    command += ["--part", str(part)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8") as process:
        peak = 0
        ended = threading.Event()

        def look() -> None:
            nonlocal peak
            while not ended.wait(0.05):
                peak = max(peak, _resident(process.pid))

        thread = threading.Thread(target=look)
        thread.start()
        out, _ = process.communicate()
        ended.set()
        thread.join()
    if process.returncode:
        raise SystemExit(f"{way}: exit code {process.returncode}")
    found: dict[str, float] = json.loads(out)
    return {**found, "peak": peak}


def _resident(pid: int) -> int:
    """Bytes resident of a process and its children, as Linux tells; 0 elsewhere."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
        own = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")), 0)
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        numbers = [n for task in tasks for n in (task / "children").read_text(encoding="utf-8").split()]
    except OSError:
        return 0
    return own + sum(_resident(int(number)) for number in numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--folder", type=Path, default=Path("build/big"))
    parser.add_argument("--vocab", type=int, default=8348, help="vocabulary asked for")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--spelling", action="store_true", help="add one word of 343,000 to every story")
    parser.add_argument("--part", type=float, default=1.0, help="of the text, for the library's two ways")
    parser.add_argument("--quick", action="store_true", help="20 MB: does it run?")
    parser.add_argument("--clean", action="store_true", help="remove the folder afterwards")
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options.child, options.file, options.vocab, options.part)))
        return
    if options.quick:
        options.gigabytes, options.rounds = 0.02, 1
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / "stories.txt"
    make(path, int(options.gigabytes * 1e9), options.spelling)
    print(f"{path.stat().st_size / 1e9:.2f} GB of stories")
    rounds = []
    for number in range(options.rounds):
        rounds.append({way: measure(way, path, options.vocab, options.part) for way in WAYS})
        print(f"round {number + 1}: {json.dumps(rounds[-1])}", file=sys.stderr, flush=True)
    print(
        "| on the same text | MB/s | ours ÷ it | MB a core second | ours ÷ it | peak MiB |\n|---|---|---|---|---|---|"
    )
    for way in WAYS:
        cells = []
        for key in ("rate", "cpu_rate"):
            rate = statistics.median(found[way][key] for found in rounds)
            share = statistics.median(found["prepare"][key] / found[way][key] for found in rounds)
            cells += [f"{rate:.2f}", f"{share:.2f}"]
        peak = statistics.median(found[way]["peak"] for found in rounds) / 2**20
        name = "preparing: encoding and writing" if way == "prepare" else f"the library's `{way}`"
        print(f"| {name} | {' | '.join(cells)} | {peak:.0f} |")
    whole, cpu = (statistics.median(found["prepare"][key] for found in rounds) for key in ("whole_rate", "whole_cpu"))
    print(f"\npreparing, all three passes: {whole:.2f} MB/s, {cpu:.0f} core seconds")
    if options.clean:
        shutil.rmtree(options.folder)


if __name__ == "__main__":
    main()
