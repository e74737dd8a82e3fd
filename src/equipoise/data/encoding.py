"""Documents to token files: threads encode while this one reads, checks and writes, and records how far it got.

Not for: which documents (`splits`), by which tokenizer (`learning`), or what a token file is (`tokenfile`).
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from equipoise.data.corpora import SPLITS, Document, Source
from equipoise.data.dataset import log_probs_path
from equipoise.data.progress import Meter
from equipoise.data.splits import DROPPED, Assignment
from equipoise.data.tokenfile import TokenHeader, TokenWriter
from equipoise.data.tokenizer import TextTokenizer
from equipoise.data.unfinished import SEGMENT_BYTES, Encoded, Part
from equipoise.errors import DataError

BATCH_BYTES: Final = 1 << 20
"""Bytes of text that are checked and written in one go."""
SKIP_POLL: Final = 256
"""Documents passed over between two looks at whether to stop: a few milliseconds."""
CHANGED: Final = "corpus.path: the files of {} changed while they were read; run it again when nothing writes to them"


@dataclass(frozen=True, kw_only=True)
class Written:
    """The token files of a data set."""

    headers: tuple[TokenHeader, ...]
    """Header of each of SPLITS."""
    sha256: tuple[str, ...]
    """SHA-256 (hex) of the ids of each."""


@dataclass(frozen=True, kw_only=True)
class _Taken:
    """What is kept of a document while its text is encoded."""

    split: int
    num_bytes: int
    where: str


def kept(source: Source, placed: Assignment) -> Iterator[tuple[Document, int]]:
    """The documents that were not dropped, with their splits; DataError when the source is no longer what it was."""
    documents = source.read()
    for split in map(int, placed.split_of):
        document = next(documents, None)
        if document is None:
            raise DataError(CHANGED.format(source.title))
        if split != DROPPED:
            yield document, split


def write_tokens(
    source: Source,
    placed: Assignment,
    tokenizer: TextTokenizer,
    directory: Path,
    *,
    begun: Encoded | None = None,
    keep: Callable[[Encoded], None] = lambda _: None,
    poll: Callable[[], None] = lambda: None,
    meter: Meter | None = None,
) -> Written:
    """Write the token files, and the log-probabilities of a grammar, into `directory`.

    `begun` is how far an earlier process got there; where its files do not hold what it says, everything is encoded
    anew. `keep` is called with how far it got, whenever about SEGMENT_BYTES of text are on disk. The files are the same
    byte for byte wherever it was interrupted, and with any number of threads.
    """
    writers, begun = _writers(source, tokenizer, directory, begun)
    log_probs = [array("d") for _ in SPLITS]
    documents = kept(source, placed)
    taken: deque[_Taken] = deque()

    def note(document: Document, split: int) -> int:
        if source.kind == "grammar":
            log_probs[split].extend((document.log_prob_text, document.log_prob_end))
        return split

    def texts() -> Iterator[str]:
        for document, split in documents:
            note(document, split)
            text = document.text
            num_bytes = len(text) if text.isascii() else len(text.encode())
            taken.append(_Taken(split=split, num_bytes=num_bytes, where=document.where))
            yield text

    with ExitStack() as stack:
        for writer in writers:
            stack.callback(writer.abandon)
        num_done = begun["documents"] if begun else 0
        for index, (document, split) in enumerate(islice(documents, num_done)):
            note(document, split)
            if index % SKIP_POLL == 0:
                poll()
        if meter and begun:
            meter.skip(sum(part["bytes"] for part in begun["splits"].values()))
        batch: list[tuple[_Taken, NDArray[np.int64]]] = []
        size = since = 0
        stream = stack.enter_context(closing(tokenizer.encode_stream(texts())))
        for ids in stream:
            one = taken.popleft()
            batch.append((one, ids))
            size += one.num_bytes
            if size < BATCH_BYTES:
                continue
            poll()
            _add(batch, tokenizer, writers)
            num_done += len(batch)
            since += size
            if meter:
                meter.add(size)
            batch, size = [], 0
            if since >= SEGMENT_BYTES:
                keep(_synced(num_done, writers))
                since = 0
        poll()
        _add(batch, tokenizer, writers)
        if tuple(writer.num_bytes for writer in writers) != placed.kept_bytes:
            raise DataError(CHANGED.format(source.title))
        closed = [writer.close() for writer in writers]
    if source.kind == "grammar":
        for name, values in zip(SPLITS, log_probs, strict=True):
            np.save(log_probs_path(directory, name), np.array(values).reshape(-1, 2).T, allow_pickle=False)
    return Written(headers=tuple(header for header, _ in closed), sha256=tuple(sha256 for _, sha256 in closed))


def _writers(
    source: Source, tokenizer: TextTokenizer, directory: Path, begun: Encoded | None
) -> tuple[list[TokenWriter], Encoded | None]:
    """A writer a split that stands where an earlier process got to, and None instead of `begun` if it does not."""
    writers: list[TokenWriter] = []
    try:
        for split in SPLITS:
            path = directory / f"{split}.tokens"
            writers.append(TokenWriter(path, tokenizer.vocab_size, tokenizer.digest, source.fingerprint))
            if begun:
                part = begun["splits"][split]
                writers[-1].go_on(part["tokens"], part["documents"], part["bytes"], part["sha256"])
    except DataError:
        for writer in writers:
            writer.abandon()
        return _writers(source, tokenizer, directory, None)
    return writers, begun


def _synced(num_documents: int, writers: list[TokenWriter]) -> Encoded:
    splits: dict[str, Part] = {}
    for split, writer in zip(SPLITS, writers, strict=True):
        header, sha256 = writer.sync()
        splits[split] = {
            "tokens": header.count,
            "documents": header.num_documents,
            "bytes": header.num_bytes,
            "sha256": sha256,
        }
    return {"documents": num_documents, "splits": splits}


def _add(batch: list[tuple[_Taken, NDArray[np.int64]]], tokenizer: TextTokenizer, writers: list[TokenWriter]) -> None:
    """Write one batch into the files of its splits, an end-of-text after each document."""
    end = np.array([tokenizer.eot_id])
    for index, writer in enumerate(writers):
        mine = [(one, ids) for one, ids in batch if one.split == index]
        if not mine:
            continue
        ids = np.concatenate([part for _, ids in mine for part in (ids, end)])
        num_bytes = sum(one.num_bytes for one, _ in mine)
        # Bits per byte divides by these bytes, and documents are found again by their end-of-text: both must hold.
        found, ends = int(tokenizer.token_bytes[ids].sum()), int((ids == tokenizer.eot_id).sum())
        if found != num_bytes or ends != len(mine):
            raise DataError(
                f"{mine[0][0].where}: {num_bytes} bytes in {len(mine)} documents became tokens of {found} bytes in "
                f"{ends} documents; the tokenizer is not a byte-level one"
            )
        writer.add(ids, len(mine), num_bytes)
