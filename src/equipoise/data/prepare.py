"""Make a data set: documents → splits → tokenizer → token files, written aside and renamed into the cache.

The corpus is streamed three times (to place documents, to train the tokenizer, to encode), so memory does not grow
with it. A lock a key lets two processes prepare at once: the second waits and opens what the first made. Not for:
opening a data set (`dataset`).
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from filelock import FileLock, Timeout

from equipoise.config import dump
from equipoise.data.corpora import SPLITS, Document, Source, open_corpus
from equipoise.data.dataset import (
    SCHEMA_VERSION,
    Dataset,
    content_digest,
    dataset_key,
    log_probs_path,
    open_dataset,
    usable,
)
from equipoise.data.splits import DROPPED, SELECTION_SHARE, TRAIN, VALIDATION_SHARE, Assignment, assign
from equipoise.data.tokenfile import TokenHeader, TokenWriter
from equipoise.data.tokenizer import TextTokenizer, train_tokenizer
from equipoise.errors import DataError, Interrupted, ResourceError
from equipoise.files import file_sha256, sync_folder, write_bytes, write_json
from equipoise.spec.data import Corpus, GrammarCorpus, Tokenizer, requested_vocab_size

BATCH_CHARS: Final = 1 << 20
"""Characters encoded in one call; one document on top of it bounds the memory of preparing."""
SAMPLE_CHARS: Final = 1 << 20
"""What `estimate` reads, of one document at most a 64th: a single book's names would pass for the corpus'."""
POLL_S: Final = 0.2
"""How often a process that waits for another one's lock looks at `should_stop`."""
POLL_DOCUMENTS: Final = 256
"""Documents between two looks at `should_stop` while the tokenizer reads: a few milliseconds."""
CHANGED: Final = "corpus.path: the files of {} changed while they were read; run it again when nothing writes to them"
PROGRESS_S: Final = 5.0
"""Seconds between two progress lines of one stage."""


def never() -> bool:
    """The `should_stop` of a caller that never stops."""
    return False


def quiet(line: str) -> None:
    """The `progress` of a caller that does not want any."""


def prepare(
    corpus: Corpus,
    tokenizer: Tokenizer,
    cache: Path,
    *,
    progress: Callable[[str], None] | None = None,
    should_stop: Callable[[], bool] = never,
) -> Dataset:
    """The data set of a corpus and a tokenizer, made if `cache` does not hold it yet.

    `progress` gets a line now and then. `should_stop` is looked at between batches; when it says so, Interrupted is
    raised and nothing is left half-written. Raises DataError for a corpus that cannot be used, ResourceError when the
    disk is full.
    """
    say = progress or quiet

    def poll() -> None:
        if should_stop():
            raise Interrupted("preparing the data was interrupted; nothing was kept")

    source = open_corpus(corpus)
    key = dataset_key(source, tokenizer)
    directory = cache / key
    if found := usable(directory):
        return found
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f"{key}.lock", say, poll):
            if found := usable(directory):
                return found
            for left in cache.glob(f".{key}.*"):  # of a process that was killed: the lock says it is gone
                shutil.rmtree(left, ignore_errors=True)
            built = cache / f".{key}.{os.getpid()}"
            built.mkdir()
            try:
                _build(source, tokenizer, built, say, poll)
                if open_corpus(corpus).fingerprint != source.fingerprint:
                    raise DataError(CHANGED.format(source.title))
                if directory.exists():  # one that does not open
                    shutil.rmtree(directory)
                built.replace(directory)
                sync_folder(cache)
            finally:
                shutil.rmtree(built, ignore_errors=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise ResourceError(f"{cache}: no space left while preparing the data ({error.strerror})") from None
        raise DataError(f"{cache}: the data cache cannot be written ({error.strerror or error})") from None
    return open_dataset(directory)


@contextmanager
def _locked(path: Path, say: Callable[[str], None], poll: Callable[[], None]) -> Iterator[None]:
    """Hold the lock; while another process does, wait, say so once and keep polling."""
    lock = FileLock(path)
    waiting = False
    while True:
        try:
            lock.acquire(timeout=POLL_S)
            break
        except Timeout:
            if not waiting:
                say("data: another process is preparing it; waiting")
            waiting = True
            poll()
    try:
        yield
    finally:
        lock.release()


def _build(
    source: Source, spec: Tokenizer, directory: Path, say: Callable[[str], None], poll: Callable[[], None]
) -> None:
    """Write every file of the data set into `directory`."""
    say(f"data: reading {source.title}")
    placed = assign(source, poll)
    say(f"data: {int((placed.split_of == TRAIN).sum()):,} training documents; training the tokenizer")
    tokenizer = train_tokenizer(spec, _training_texts(source, placed, poll), poll)
    say(f"data: vocabulary {tokenizer.vocab_size:,}; encoding")
    headers, hashes = _encode(source, placed, tokenizer, directory, say, poll)
    write_bytes(directory / "tokenizer.json", tokenizer.to_json().encode())
    info = _describe(source, placed, spec, tokenizer, headers, hashes)
    if source.kind == "grammar":
        for split in SPLITS:
            info["splits"][split]["log_probs"] = file_sha256(log_probs_path(directory, split))
    write_json(directory / "dataset.json", info)


def _kept(source: Source, placed: Assignment) -> Iterator[tuple[Document, int]]:
    """The documents that were not dropped, with their splits; DataError when the source is no longer what it was."""
    documents = source.read()
    for split in placed.split_of.tolist():
        document = next(documents, None)
        if document is None:
            raise DataError(CHANGED.format(source.title))
        if split != DROPPED:
            yield document, split


def _training_texts(source: Source, placed: Assignment, poll: Callable[[], None]) -> Iterator[str]:
    """The texts of the train split: the tokenizer sees no other."""
    for index, (document, split) in enumerate(_kept(source, placed)):
        if index % POLL_DOCUMENTS == 0:
            poll()
        if split == TRAIN:
            yield document.text


def _encode(
    source: Source,
    placed: Assignment,
    tokenizer: TextTokenizer,
    directory: Path,
    say: Callable[[str], None],
    poll: Callable[[], None],
) -> tuple[list[TokenHeader], list[str]]:
    """Write the token files, and the log-probabilities of a grammar; per split the header and the hash of the ids."""
    writers = [
        TokenWriter(directory / f"{split}.tokens", tokenizer.vocab_size, tokenizer.digest, source.fingerprint)
        for split in SPLITS
    ]
    log_probs = [array("d") for _ in SPLITS]
    started = said_at = time.monotonic()
    done = 0
    try:
        for documents, splits in _batches(source, placed):
            poll()
            done += _add(documents, splits, tokenizer, writers)
            for document, split in zip(documents, splits, strict=True):
                log_probs[split].extend((document.log_prob_text, document.log_prob_end))
            if time.monotonic() - said_at > PROGRESS_S:
                said_at = time.monotonic()
                say(f"data: {done / 1e6:,.0f} MB encoded, {done / 1e6 / (said_at - started):.1f} MB/s")
        closed = [writer.close() for writer in writers]
    finally:
        for writer in writers:
            writer.abandon()
    if source.kind == "grammar":
        for name, values in zip(SPLITS, log_probs, strict=True):
            np.save(log_probs_path(directory, name), np.array(values).reshape(-1, 2).T, allow_pickle=False)
    return [header for header, _ in closed], [sha256 for _, sha256 in closed]


def _batches(source: Source, placed: Assignment) -> Iterator[tuple[list[Document], list[int]]]:
    """Documents that were not dropped and their splits, about BATCH_CHARS characters at a time."""
    documents: list[Document] = []
    splits: list[int] = []
    size = 0
    for document, split in _kept(source, placed):
        documents.append(document)
        splits.append(split)
        size += len(document.text)
        if size >= BATCH_CHARS:
            yield documents, splits
            documents, splits, size = [], [], 0
    if documents:
        yield documents, splits


def _add(documents: list[Document], splits: list[int], tokenizer: TextTokenizer, writers: list[TokenWriter]) -> int:
    """Encode one batch into the files of its splits; returns its bytes of raw text."""
    rows = tokenizer.encode_arrays([document.text for document in documents])
    end = np.array([tokenizer.eot_id])
    total = 0
    for index, writer in enumerate(writers):
        mine = [number for number, split in enumerate(splits) if split == index]
        if not mine:
            continue
        ids = np.concatenate([part for number in mine for part in (rows[number], end)])
        num_bytes = sum(len(documents[number].text.encode()) for number in mine)
        # Bits per byte divides by these bytes, and documents are found again by their end-of-text: both must hold.
        found, ends = int(tokenizer.token_bytes[ids].sum()), int((ids == tokenizer.eot_id).sum())
        if found != num_bytes or ends != len(mine):
            raise DataError(
                f"{documents[mine[0]].where}: {num_bytes} bytes in {len(mine)} documents became tokens of "
                f"{found} bytes in {ends} documents; the tokenizer is not a byte-level one"
            )
        writer.add(ids, len(mine), num_bytes)
        total += num_bytes
    return total


def _describe(
    source: Source,
    placed: Assignment,
    spec: Tokenizer,
    tokenizer: TextTokenizer,
    headers: list[TokenHeader],
    hashes: list[str],
) -> dict[str, Any]:
    """`dataset.json`."""
    sha256 = dict(zip(SPLITS, hashes, strict=True))
    return {
        "schema_version": SCHEMA_VERSION,
        "digest": content_digest(sha256, tokenizer.vocab_size, tokenizer.digest),
        "kind": source.kind,
        "title": source.title,
        "licence": source.licence,
        "corpus": source.fingerprint,
        "files": [asdict(file) for file in source.files],
        "notes": list(source.notes),
        "vocab_size": tokenizer.vocab_size,
        "eot_id": tokenizer.eot_id,
        "tokenizer": {**dump(spec), "digest": tokenizer.digest},
        "splits": {
            split: {
                "documents": header.num_documents,
                "tokens": header.count,
                "bytes": header.num_bytes,
                "sha256": sha256[split],
            }
            for split, header in zip(SPLITS, headers, strict=True)
        },
        "blank_documents": placed.num_blank,
        "duplicates": {
            "dropped": placed.duplicates_dropped,
            "exact": placed.exact_duplicates,
            "normalised": placed.normalised_duplicates,
        },
    }


# ------------------------------------------------------------------------------------------------ before preparing


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What can be said of a corpus that was not prepared."""

    train_tokens: int
    """Tokens of the train split, end-of-text included: tokens per byte of a sample × bytes of the corpus."""
    validation_tokens: int
    """Tokens of the validation split, likewise."""
    selection_tokens: int
    """Tokens of the selection split, likewise."""
    vocab_size: int
    """V as the sample reached it when it was the whole corpus, else as asked for."""


def estimate(corpus: Corpus, tokenizer: Tokenizer) -> Estimate:
    """Tokens and vocabulary from about a megabyte of the text that may become training text; writes nothing.

    Raises DataError for a corpus that cannot be used. Off by a few per cent: the sample's merges are not the corpus',
    and duplicates are not looked for; for .jsonl the bytes around the text count as well.
    """
    source = open_corpus(corpus)
    sample: list[str] = []
    size = 0
    complete = True
    for document in source.read():
        if document.split in ("validation", "selection") or not document.text.strip():
            continue
        sample.append(document.text[: SAMPLE_CHARS // 64])
        size += len(sample[-1])
        complete = complete and len(sample[-1]) == len(document.text)
        if size >= SAMPLE_CHARS:
            complete = False
            break
    if not sample:
        raise DataError(f"corpus {source.kind}: no training text found; expected at least 3 documents")
    trained = train_tokenizer(tokenizer, iter(sample))
    num_tokens = sum(len(ids) + 1 for ids in trained.encode_arrays(sample))
    num_bytes = sum(len(text.encode()) for text in sample)
    tokens = [
        round(size * num_tokens / num_bytes) for size in _split_bytes(corpus, source, num_bytes, len(sample), complete)
    ]
    return Estimate(
        train_tokens=tokens[0],
        selection_tokens=tokens[1],
        validation_tokens=tokens[2],
        vocab_size=trained.vocab_size if complete else requested_vocab_size(tokenizer),
    )


def _split_bytes(
    corpus: Corpus, source: Source, sample_bytes: int, sample_documents: int, complete: bool
) -> tuple[float, float, float]:
    """Bytes that train, selection and validation will have, as far as the sample and the sizes of the files tell."""
    if isinstance(corpus, GrammarCorpus):
        each = sample_bytes / sample_documents
        return corpus.num_documents * each, corpus.num_selection * each, corpus.num_validation * each
    official = sum(file.num_bytes for file in source.files if file.split == "validation")
    rest = sample_bytes if complete else sum(file.num_bytes for file in source.files if file.split != "validation")
    validation = official or VALIDATION_SHARE * rest
    share = 1 - SELECTION_SHARE - (0 if official else VALIDATION_SHARE)
    return share * rest, SELECTION_SHARE * rest, validation
