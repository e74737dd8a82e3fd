"""Preparing data: what comes out holds exactly the corpus, once; whatever goes wrong leaves nothing half-written."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

from equipoise.data import encoding
from equipoise.data import prepare as module
from equipoise.data import tokenizer as tokenizer_module
from equipoise.data.corpora import SPLITS, open_corpus
from equipoise.data.dataset import Dataset, cached, dataset_key, open_dataset
from equipoise.data.learning import Learnt
from equipoise.data.prepare import estimate, prepare
from equipoise.data.splits import place, read_documents
from equipoise.data.tokenizer import TextTokenizer
from equipoise.errors import DataError, Interrupted, ResourceError
from equipoise.spec.data import (
    BpeTokenizer,
    ByteTokenizer,
    Corpus,
    GrammarCorpus,
    GutenbergCorpus,
    TextCorpus,
    TinyStoriesCorpus,
)

BPE = BpeTokenizer(vocab_size=300)
SMALL = GrammarCorpus(num_documents=60, num_validation=9, num_selection=5)
PINNED_GRAMMAR = "d1e7f95535474166399a2343693022cf5100ab25fe9a7bd0254659caf135088a"
PINNED_LINES = "78e0c9eab335bd2a2271c7d10d51c957fab1939d363ec4c01da55f77399fbe88"
PINNED_BYTES = "a12c3faab1dd7b2186983a987f517a1356d16c2e80cc47e65c6ac29961503aeb"


def write_lines(file: Path, count: int, words: str = "the cat sat on a mat, café 中文 <|endoftext|>") -> TextCorpus:
    lines = [json.dumps({"text": f"Story {index}: {words}\n{'again ' * (index % 7)}"}) for index in range(count)]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return TextCorpus(path=str(file))


@pytest.fixture
def corpus(tmp_path: Path) -> TextCorpus:
    return write_lines(tmp_path / "stories.jsonl", 150)


def same_files(left: Path, right: Path) -> bool:
    """Whether two folders hold the same files, byte for byte."""
    names = [sorted(path.name for path in folder.iterdir()) for folder in (left, right)]
    return names[0] == names[1] and all((left / n).read_bytes() == (right / n).read_bytes() for n in names[0])


def left_in(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock") if cache.exists() else []


# ------------------------------------------------------------------------------------------------ what comes out


@pytest.mark.parametrize("tokenizer", [BPE, ByteTokenizer()])
def test_the_token_files_hold_exactly_the_corpus(
    corpus: TextCorpus, tokenizer: BpeTokenizer | ByteTokenizer, tmp_path: Path
) -> None:
    dataset = prepare(corpus, tokenizer, tmp_path / "cache")
    source = open_corpus(corpus)
    split_of = place(source, read_documents(source, lambda: None)).split_of
    for index, split in enumerate(SPLITS):
        expected = [document.text for document, code in zip(source.read(), split_of, strict=True) if code == index]
        ids = dataset.tokens(split).tolist()
        assert ids[-1] == 0
        found: list[list[int]] = [[]]
        for i in ids[:-1]:
            if i == dataset.eot_id:
                found.append([])
            else:
                found[-1].append(i)
        assert [dataset.tokenizer().decode(document) for document in found] == expected
        assert dataset.info["splits"][split]["documents"] == len(expected)
        assert dataset.info["splits"][split]["tokens"] == len(ids)
        assert dataset.info["splits"][split]["bytes"] == sum(len(text.encode()) for text in expected)
        assert dataset.floor_log_probs(split) is None
    assert (tmp_path / "cache" / dataset_key(source, tokenizer)) == dataset.directory


def test_what_the_data_set_says_of_itself(corpus: TextCorpus, tmp_path: Path) -> None:
    dataset = prepare(corpus, BPE, tmp_path / "cache")
    info = dataset.info
    assert info == json.loads((dataset.directory / "dataset.json").read_text(encoding="utf-8"))
    assert (info["kind"], info["title"], info["notes"]) == ("text", "plain text", [])
    (file,) = info["files"]
    assert file["name"] == "stories.jsonl" and file["num_bytes"] == Path(corpus.path).stat().st_size
    assert info["tokenizer"] == {"kind": "bpe", "vocab_size": 300, "digest": dataset.tokenizer().digest}
    assert (dataset.vocab_size, info["vocab_size"], dataset.eot_id) == (300, 300, 0)
    assert sum(split["documents"] for split in info["splits"].values()) == 150
    assert info["duplicates"] == {
        "dropped": True,
        "exact": {"selection": 0, "train": 0},
        "normalised": {"selection": 0, "train": 0},
    }
    assert info["blank_documents"] == 0
    assert str(tmp_path) not in json.dumps(info)


def test_the_digest_is_of_content_alone(corpus: TextCorpus, tmp_path: Path) -> None:
    first = prepare(corpus, BPE, tmp_path / "one").digest
    moved = tmp_path / "elsewhere" / "other-name.jsonl"
    moved.parent.mkdir()
    moved.write_bytes(Path(corpus.path).read_bytes())
    assert prepare(TextCorpus(path=str(moved)), BPE, tmp_path / "two").digest == first
    others = {
        prepare(corpus, BpeTokenizer(vocab_size=301), tmp_path / "one").digest,
        prepare(write_lines(tmp_path / "longer.jsonl", 151), BPE, tmp_path / "one").digest,
    }
    assert len({first, *others}) == 3


def test_the_grammar_keeps_its_log_probabilities(tmp_path: Path) -> None:
    dataset = prepare(SMALL, BPE, tmp_path)
    documents = list(open_corpus(SMALL).read())
    for split in SPLITS:
        log_probs = dataset.floor_log_probs(split)
        assert log_probs is not None
        expected = [(d.log_prob_text, d.log_prob_end) for d in documents if d.split == split]
        assert np.array(log_probs).T.tolist() == [list(pair) for pair in expected]
    assert dataset.info["duplicates"]["dropped"] is False


def test_the_tokenizer_sees_train_only(corpus: TextCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def learn(spec: BpeTokenizer, texts: object, poll: Callable[[], None]) -> Learnt:
        seen.extend(texts)  # type: ignore[call-overload]
        return module_learn(spec, iter(seen), poll)

    module_learn = module.learn
    monkeypatch.setattr(module, "learn", learn)
    prepare(corpus, BPE, tmp_path / "cache")
    source = open_corpus(corpus)
    split_of = place(source, read_documents(source, lambda: None)).split_of
    assert seen == [document.text for document, code in zip(source.read(), split_of, strict=True) if code == 0]


def test_a_data_set_of_an_earlier_version_is_made_again_byte_for_byte(tmp_path: Path) -> None:
    """What studies have locked: the digests that the first version gave these corpora."""
    assert prepare(SMALL, BPE, tmp_path).digest == PINNED_GRAMMAR
    corpus = write_lines(tmp_path / "stories.jsonl", 150)
    assert prepare(corpus, BPE, tmp_path).digest == PINNED_LINES
    assert prepare(corpus, ByteTokenizer(), tmp_path).digest == PINNED_BYTES


@pytest.mark.parametrize(("batch", "group", "threads"), [(100, 50, 1), (100, 50, 3), (1 << 20, 700, 8)])
def test_batches_and_threads_change_nothing(
    corpus: TextCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int, group: int, threads: int
) -> None:
    whole = prepare(corpus, BPE, tmp_path / "one")
    monkeypatch.setattr(encoding, "BATCH_BYTES", batch)
    monkeypatch.setattr(tokenizer_module, "CHARS_AT_ONCE", group)
    monkeypatch.setattr(tokenizer_module, "usable_cores", lambda: threads)
    assert same_files(prepare(corpus, BPE, tmp_path / "two").directory, whole.directory)


# ------------------------------------------------------------------------------------------------ once


def test_nothing_is_tokenised_twice(corpus: TextCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []
    encode = TextTokenizer.encode_stream

    def count(self: TextTokenizer, texts: Iterator[str]) -> Generator[np.ndarray]:
        for ids in encode(self, texts):
            encoded.append(1)
            yield ids

    monkeypatch.setattr(TextTokenizer, "encode_stream", count)
    cache = tmp_path / "cache"
    assert cached(corpus, BPE, cache) is None
    assert not cache.exists()
    first = prepare(corpus, BPE, cache)
    assert sum(encoded) == 150
    lines: list[str] = []
    again = prepare(corpus, BPE, cache, progress=lines.append)
    found = cached(corpus, BPE, cache)
    assert found is not None
    assert first.digest == again.digest == found.digest
    assert (sum(encoded), lines) == (150, [])
    assert cached(corpus, BpeTokenizer(vocab_size=299), cache) is None


def test_two_processes_at_once(corpus: TextCorpus, tmp_path: Path) -> None:
    """Both succeed with the same data; one of them encodes, the other waits and opens."""
    code = f"""
import time
from pathlib import Path
from equipoise.data.learning import Learnt
from equipoise.data.prepare import prepare
from equipoise.spec.data import BpeTokenizer, TextCorpus
while not Path({str(tmp_path / "go")!r}).exists(): time.sleep(0.005)
lines = []
corpus, cache = TextCorpus(path={corpus.path!r}), Path({str(tmp_path / "cache")!r})
dataset = prepare(corpus, BpeTokenizer(vocab_size=300), cache, progress=lines.append)
print(sum("encoding" in line for line in lines), dataset.digest)
"""
    children = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8")
        for _ in range(2)
    ]
    (tmp_path / "go").touch()
    outputs = [child.communicate(timeout=60) for child in children]
    assert [child.returncode for child in children] == [0, 0], outputs
    counts, digests = zip(*(out.split() for out, _ in outputs), strict=True)
    assert sorted(counts) == ["0", "1"]
    assert len(set(digests)) == 1
    assert len(left_in(tmp_path / "cache")) == 1


def test_a_broken_entry_is_made_again(corpus: TextCorpus, tmp_path: Path) -> None:
    first = prepare(corpus, BPE, tmp_path / "cache")
    file = first.directory / "train.tokens"
    file.write_bytes(file.read_bytes()[:-2])
    assert cached(corpus, BPE, tmp_path / "cache") is None
    again = prepare(corpus, BPE, tmp_path / "cache")
    assert again.digest == first.digest
    open_dataset(again.directory)


def test_what_a_killed_process_left_is_removed(corpus: TextCorpus, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    key = dataset_key(open_corpus(corpus), BPE)
    (cache / f".{key}.12345").mkdir(parents=True)
    (cache / f".{key}.12345" / "train.tokens").write_bytes(b"half")
    other = cache / ".other-key.1"
    other.mkdir()
    prepare(corpus, BPE, cache)
    assert left_in(cache) == sorted([key, other.name])


# ------------------------------------------------------------------------------------------------ stopping, failing


def test_stopping_anywhere_and_going_on(corpus: TextCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every look at `should_stop` in turn, again and again until it is done: always the same bytes."""
    whole = prepare(corpus, BPE, tmp_path / "whole")
    monkeypatch.setattr(encoding, "BATCH_BYTES", 500)
    monkeypatch.setattr(tokenizer_module, "CHARS_AT_ONCE", 200)
    for name in (module, encoding):
        monkeypatch.setattr(name, "SEGMENT_BYTES", 2000)
    for allowed in range(1, 12):
        cache = tmp_path / f"cache-{allowed}"
        for attempt in range(1000):
            asked = 0

            def should_stop() -> bool:
                nonlocal asked
                asked += 1
                return asked > allowed + attempt  # noqa: B023

            try:
                dataset = prepare(corpus, BPE, cache, should_stop=should_stop)
            except Interrupted as stop:
                assert str(stop) == (
                    "preparing the data was interrupted; what is finished was kept: run it again to go on"
                )
                assert cached(corpus, BPE, cache) is None
                assert left_in(cache) == [f".{whole.directory.name}.unfinished"]
            else:
                break
        assert attempt >= 1
        assert left_in(cache) == [dataset.directory.name]
        assert same_files(dataset.directory, whole.directory)


def test_stopping_while_another_process_prepares(corpus: TextCorpus, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    lines: list[str] = []
    with FileLock(cache / f"{dataset_key(open_corpus(corpus), BPE)}.lock"), pytest.raises(Interrupted):
        prepare(corpus, BPE, cache, progress=lines.append, should_stop=lambda: bool(lines))
    assert lines == ["data: another process is preparing it; waiting"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_said_and_leaves_nothing(
    corpus: TextCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def full(*args: object) -> None:
        raise OSError(number, "No space left on device")

    cache = tmp_path / "cache"
    for where, name in ((encoding, "_add"), (module, "write_segment"), (module, "write_json")):
        with monkeypatch.context() as patched:
            patched.setattr(where, name, full)
            with pytest.raises(ResourceError) as caught:
                prepare(corpus, BPE, cache)
        assert str(caught.value) == f"{cache}: no space left while preparing the data (No space left on device)"
        assert left_in(cache) == []


def test_a_cache_that_cannot_be_written(corpus: TextCorpus, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = tmp_path / "file" / "cache"
    with pytest.raises(DataError) as caught:
        prepare(corpus, BPE, cache)
    assert str(caught.value) == f"{cache}: the data cache cannot be written (Not a directory)"


@pytest.mark.parametrize("change", ["longer", "shorter", "other text"])
@pytest.mark.parametrize("stage", ["place", "learn", "write_tokens"])
def test_files_that_change_while_read(
    corpus: TextCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, stage: str
) -> None:
    """After any stage: the cache is addressed by content, so the content has to be what was hashed."""
    original: Callable[..., object] = getattr(module, stage)
    file = Path(corpus.path)

    def and_change(*args: object, **named: object) -> object:
        result = original(*args, **named)
        if change == "other text":
            file.write_text(file.read_text(encoding="utf-8").replace("mat", "rug"), encoding="utf-8")
        else:
            write_lines(file, 160 if change == "longer" else 20)
        return result

    monkeypatch.setattr(module, stage, and_change)
    with pytest.raises(DataError) as caught:
        prepare(corpus, BPE, tmp_path / "cache")
    assert str(caught.value) == (
        "corpus.path: the files of plain text changed while they were read; run it again when nothing writes to them"
    )
    assert left_in(tmp_path / "cache") == []


def test_a_tokenizer_that_loses_text_is_noticed(
    corpus: TextCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "learn", lambda spec, texts, poll: Learnt(tokenizer=_Lossy(), note=None))  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"the tokenizer is not a byte-level one$"):
        prepare(corpus, BPE, tmp_path / "cache")


class _Lossy:
    vocab_size, eot_id, digest = 257, 0, "00" * 32
    token_bytes = np.array([0] + [1] * 256)

    def to_json(self) -> str:
        return ""

    def encode_stream(self, texts: Iterator[str]) -> Generator[np.ndarray]:
        for text in texts:
            yield np.frombuffer(text.encode("ascii", "ignore"), np.uint8).astype(np.int64) + 1


def test_a_corpus_that_cannot_be_used_is_an_error_everywhere(tmp_path: Path) -> None:
    missing = TextCorpus(path=str(tmp_path / "none"))
    for action in (
        lambda: prepare(missing, BPE, tmp_path / "cache"),
        lambda: cached(missing, BPE, tmp_path / "cache"),
        lambda: estimate(missing, BPE),
    ):
        with pytest.raises(DataError, match=r"^corpus.path: .*none does not exist; expected "):
            action()
    assert not (tmp_path / "cache").exists()


# ------------------------------------------------------------------------------------------------ estimating


@pytest.mark.parametrize("tokenizer", [BPE, ByteTokenizer()])
def test_estimates_of_a_small_corpus_are_close(
    corpus: TextCorpus, tokenizer: BpeTokenizer | ByteTokenizer, tmp_path: Path
) -> None:
    guess = estimate(corpus, tokenizer)
    dataset = prepare(corpus, tokenizer, tmp_path / "cache")
    assert guess.vocab_size == dataset.vocab_size
    assert guess.train_tokens == pytest.approx(len(dataset.tokens("train")), rel=0.05)


def test_estimates_write_nothing_and_read_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stories-valid.txt").write_text("Never counted.\n<|endoftext|>\n" * 50, encoding="utf-8")
    stories = [f"One small story about dog number {index}.\n<|endoftext|>\n" for index in range(3000)]
    (tmp_path / "stories-train.txt").write_text("".join(stories), encoding="utf-8")
    monkeypatch.setattr(module, "SAMPLE_CHARS", 2000)
    guess = estimate(TinyStoriesCorpus(path=str(tmp_path)), BpeTokenizer(vocab_size=400))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stories-train.txt", "stories-valid.txt"]
    assert guess.vocab_size == 400  # not what 2,000 characters reach
    full = prepare(TinyStoriesCorpus(path=str(tmp_path)), BpeTokenizer(vocab_size=400), tmp_path / "cache")
    assert guess.train_tokens == pytest.approx(len(full.tokens("train")), rel=0.5)


def test_estimates_of_the_grammar(tmp_path: Path) -> None:
    guess = estimate(GrammarCorpus(num_documents=3000), BPE)
    part = prepare(GrammarCorpus(num_documents=1000, num_validation=1, num_selection=1), BPE, tmp_path)
    assert guess.train_tokens == pytest.approx(3 * len(part.tokens("train")), rel=0.03)


def test_nothing_to_estimate_from(tmp_path: Path) -> None:
    (tmp_path / "a-valid.txt").write_text("x\n<|endoftext|>\n", encoding="utf-8")
    with pytest.raises(DataError) as caught:
        estimate(TinyStoriesCorpus(path=str(tmp_path)), BPE)
    assert str(caught.value) == "corpus tinystories: no training text found; expected at least 3 documents"


# ------------------------------------------------------------------------------------------------ real text


def _consistent(dataset: Dataset) -> None:
    for split in SPLITS:
        said, tokens = dataset.info["splits"][split], dataset.tokens(split)
        assert int((tokens == dataset.eot_id).sum()) == said["documents"]
        assert int(dataset.token_bytes[tokens].sum()) == said["bytes"]
        assert int(tokens.max()) < dataset.vocab_size


def test_real_stories(tinystories: Path, tmp_path: Path) -> None:
    folder = tmp_path / "stories"
    folder.mkdir()
    for name in ("train-sample-3k.txt", "valid.txt"):  # a sixth of it: seconds
        (folder / name).symlink_to(tinystories / name)
    corpus: Corpus = TinyStoriesCorpus(path=str(folder))
    guess = estimate(corpus, BpeTokenizer(vocab_size=1024))
    dataset = prepare(corpus, BpeTokenizer(vocab_size=1024), tmp_path / "cache")
    _consistent(dataset)
    assert dataset.vocab_size == 1024
    assert guess.train_tokens == pytest.approx(len(dataset.tokens("train")), rel=0.03)
    assert dataset.info["splits"]["validation"]["documents"] == 989
    tokenizer = dataset.tokenizer()
    first = dataset.tokens("validation")[: int(np.flatnonzero(dataset.tokens("validation") == 0)[0])]
    assert tokenizer.decode(first) == next(d.text for d in open_corpus(corpus).read() if d.split == "validation")


def test_real_books(gutenberg: Path, tmp_path: Path) -> None:
    guess = estimate(GutenbergCorpus(path=str(gutenberg)), BpeTokenizer(vocab_size=4096))
    assert guess.train_tokens == pytest.approx(7_334_041, rel=0.04)  # what preparing at this size gives; it takes 20 s
    dataset = prepare(GutenbergCorpus(path=str(gutenberg)), ByteTokenizer(), tmp_path)
    _consistent(dataset)
    assert [dataset.info["splits"][split]["documents"] for split in SPLITS] == [45, 1, 2]
