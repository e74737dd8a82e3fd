"""Beyond what fits: token files over 4 GiB, vocabularies over 65,536, and texts that are not held in memory."""

from __future__ import annotations

import random
import string
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from equipoise.data import tokenizer as tokenizer_module
from equipoise.data.dataset import Dataset
from equipoise.data.packing import batch, epochs, num_windows
from equipoise.data.prepare import prepare
from equipoise.data.tokenfile import (
    HEADER_BYTES,
    TokenHeader,
    _pack,
    dtype_for,
    map_tokens,
    read_header,
)
from equipoise.data.tokenizer import train_tokenizer
from equipoise.errors import DataError
from equipoise.spec.data import BpeTokenizer, TextCorpus
from equipoise.spec.model import DenseFFN, ModelConfig
from equipoise.spec.recipe import Optim, Recipe
from equipoise.spec.run import RunConfig


@pytest.fixture(params=[60_000, 100_000], ids=["2 bytes an id", "4 bytes an id"])
def sparse(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, int, dict[int, int]]:
    """A token file of 5 GiB of which next to nothing is on the disk, its number of ids, and those that are not 0."""
    if sys.platform == "darwin":
        pytest.skip("this file system may not leave holes")
    vocab_size = int(request.param)
    itemsize = dtype_for(vocab_size).itemsize
    count = 5 * 2**30 // itemsize + 3
    beyond = (2**32 - HEADER_BYTES) // itemsize  # the first id that begins at a byte over 4 GiB
    planted = {0: 1, beyond - 1: 11, beyond: 12, beyond + 1: 13, 2**31 // itemsize: 14, count - 2: 15, count - 1: 16}
    path = tmp_path / "train.tokens"
    header = TokenHeader(
        vocab_size=vocab_size,
        count=count,
        num_documents=1,
        num_bytes=9 * count,
        tokenizer="ab" * 32,
        corpus="cd" * 32,
    )
    with path.open("wb") as file:
        file.write(_pack(header))
        file.truncate(HEADER_BYTES + count * itemsize)
        for place, value in planted.items():
            file.seek(HEADER_BYTES + place * itemsize)
            file.write(np.array([value], dtype_for(vocab_size)).tobytes())
    assert read_header(path) == header
    assert path.stat().st_blocks * 512 < 2**20
    return path, count, planted


def test_ids_beyond_4_gib_are_where_they_were_put(sparse: tuple[Path, int, dict[int, int]]) -> None:
    path, count, planted = sparse
    tokens = map_tokens(path)
    assert len(tokens) == count
    assert {place: int(tokens[place]) for place in planted} == planted
    for place in planted:
        around = [i for i in range(place - 2, place + 3) if 0 <= i < count]
        assert tokens[np.array(around)].tolist() == [planted.get(i, 0) for i in around]


def test_batches_reach_windows_beyond_4_gib(sparse: tuple[Path, int, dict[int, int]]) -> None:
    """Every planted id within the windows is met as input at its place; the places are computed in Python's numbers."""
    path, count, planted = sparse
    tokens = map_tokens(path)
    seq_len = 2**18 - 1
    num = num_windows(count, seq_len)
    assert num == (count - 1) // seq_len > 5000
    assert epochs(2 * num * seq_len, count, seq_len) == 2.0
    order = np.random.default_rng(0).permutation(num)  # what the windows are is not this test's question
    wanted = {place // seq_len: (place, value) for place, value in planted.items() if place < num * seq_len}
    found: dict[int, int] = {}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("equipoise.data.packing._order", lambda *args: order)
        for step in np.flatnonzero(np.isin(order, list(wanted))).tolist():
            inputs_BS, targets_BS = batch(tokens, seq_len, 1, 0, step)
            start = int(order[step]) * seq_len
            for place in np.flatnonzero(inputs_BS[0]).tolist():
                found[start + place] = int(inputs_BS[0, place])
            assert targets_BS[0, :-1].tolist() == inputs_BS[0, 1:].tolist()
    assert found == {place: value for place, value in planted.items() if place < num * seq_len}
    assert HEADER_BYTES + max(found) * tokens.itemsize > 2**32


def test_a_cut_file_over_4_gib_is_noticed(sparse: tuple[Path, int, dict[int, int]]) -> None:
    path, count, _ = sparse
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size - 2**32)  # equal in 32 bits
    with pytest.raises(DataError) as caught:
        map_tokens(path)
    assert str(caught.value) == f"{path}: {size - 2**32} bytes long; expected {size} for its {count} ids"


def test_a_header_counts_beyond_32_bits(tmp_path: Path) -> None:
    header = TokenHeader(
        vocab_size=1 << 20,
        count=2**33 + 5,
        num_documents=2**32 + 7,
        num_bytes=2**40,
        tokenizer="ab" * 32,
        corpus="cd" * 32,
    )
    (tmp_path / "t").write_bytes(_pack(header))
    with (tmp_path / "t").open("r+b") as file:
        file.truncate(HEADER_BYTES + 4 * header.count)
    assert read_header(tmp_path / "t") == header


# ------------------------------------------------------------------------------------------------ the vocabulary


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """A data set whose tokenizer really learnt more than 65,536 tokens: 36,000 words that were made up, twice each."""
    folder = tmp_path_factory.mktemp("large")
    draw = random.Random(0)
    words = ["".join(draw.choices(string.ascii_lowercase, k=7)) for _ in range(36_000)]
    lines = [" ".join(words[start : start + 60]) for start in range(0, len(words), 60)]
    text = "".join(f'{{"text": "{line} {line}"}}\n' for line in lines)
    (folder / "words.jsonl").write_text(text, encoding="utf-8")
    return prepare(TextCorpus(path=str(folder / "words.jsonl")), BpeTokenizer(vocab_size=80_000), folder / "cache")


def test_a_vocabulary_over_65536_takes_four_bytes_an_id(large: Dataset) -> None:
    assert 65_536 < large.vocab_size <= 80_000
    tokens = large.tokens("train")
    assert tokens.dtype == np.uint32
    assert int(tokens.max()) > 65_536  # and not what 16 bits would have made of it
    first = tokens[: int(np.flatnonzero(tokens == large.eot_id)[0])]
    text = large.tokenizer().decode(first)
    half = len(text) // 2
    assert text[:half] == text[half + 1 :] and len(text[:half].split()) == 60
    assert large.tokenizer().encode(text) == first.tolist()


def test_two_updates_over_such_a_vocabulary(large: Dataset, tmp_path: Path) -> None:
    """Through `train` itself: embeddings, targets and the evaluation meet ids beyond 16 bits."""
    from equipoise.train import train

    model = ModelConfig(vocab_size=large.vocab_size, d_model=8, num_layers=1, num_heads=1, ffn=DenseFFN(d_ff=8))
    recipe = Recipe(
        seq_len=64, batch_tokens=256, balance_group=4, eval_tokens=256, curve_tokens=128, optim=Optim(lr=1e-3)
    )
    run: Any = RunConfig(arm="a", seed=0, budget=512, model=model, recipe=recipe, data=large.digest)
    summary = train(run, tmp_path / "run", large)
    assert (summary["status"], summary["tokens"]) == ("complete", 512)
    assert summary["val_loss"] == pytest.approx(np.log(large.vocab_size), rel=0.05)  # as good as uniform after two


# ------------------------------------------------------------------------------------------------ the text


def test_encoding_reads_no_more_than_its_threads_are_about_to_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """2,000 texts of 100 characters, ten a group, for three threads: two groups for each, and two beside."""
    monkeypatch.setattr(tokenizer_module, "usable_cores", lambda: 3)
    monkeypatch.setattr(tokenizer_module, "CHARS_AT_ONCE", 1000)
    tokenizer = train_tokenizer(BpeTokenizer(vocab_size=260), iter(["ab ab"]))
    read = 0

    def texts() -> Iterator[str]:
        nonlocal read
        for index in range(2000):
            read += 1
            yield f"{index:0100d}"

    for num_done, ids in enumerate(tokenizer.encode_stream(texts())):
        assert len(ids) == 100 and read - num_done <= 10 * (2 * 3 + 2)
    assert (num_done, read) == (1999, 2000)


PREPARING = """
import resource, sys
from pathlib import Path
from equipoise.data.prepare import prepare
from equipoise.spec.data import ByteTokenizer, TinyStoriesCorpus
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
def made(name):
    return prepare(TinyStoriesCorpus(path=name), ByteTokenizer(), Path("cache")).info["splits"]["train"]["bytes"]
made("small.txt")
before = peak()
print(made("large.txt"), peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of its memory as Linux counts it")
def test_the_memory_of_preparing_does_not_grow_with_the_text(tmp_path: Path) -> None:
    """From 4 MB of text to 49: held in memory once, the text alone would be five times what is allowed."""
    story = "A cat sat on a mat. " * 1600
    for name, count in (("small.txt", 128), ("large.txt", 1536)):
        with (tmp_path / name).open("w", encoding="utf-8") as file:
            for index in range(count):
                file.write(f"{index} {story}\n<|endoftext|>\n")
    done = subprocess.run(
        [sys.executable, "-c", PREPARING], cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    num_bytes, grown = map(int, done.stdout.split())
    assert num_bytes > 45 * 10**6 and grown < 9 * 2**20
