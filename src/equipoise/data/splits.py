"""Which split every document goes to, and which documents are dropped, from one streaming pass over a corpus.

A document's place depends on its normalised text alone (or on the file it lies in), so it does not move when other
documents come or go, as long as there are 1,000 or more. Not for: reading or encoding.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from equipoise.data.corpora.source import SPLITS, Source
from equipoise.data.progress import Meter
from equipoise.errors import DataError
from equipoise.faults import printable

VALIDATION_SHARE: Final = 0.05
SELECTION_SHARE: Final = 0.01
SMALL: Final = 1000
"""Below this many distinct documents, counts instead of hash thresholds decide, so that no split is empty by chance."""
DROPPED: Final = -1
TRAIN, SELECTION, VALIDATION = range(3)
_UNDECIDED: Final = 3
_CHECK_EVERY: Final = 256  # documents between two looks at should_stop
DOCUMENT: Final = np.dtype([("exact", "<u8"), ("normal", "<u8"), ("bytes", "<u8"), ("given", "i1")])
"""What is kept of a document: hashes of its text and of its normalised text, its UTF-8 bytes, and the split its corpus
names (an index into SPLITS, 3 = none, −1 = blank). 25 bytes: the one thing that grows with a corpus."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Where each document of a source goes, in reading order."""

    split_of: NDArray[np.int8]
    """Per document: index into SPLITS (train, selection, validation), or −1 = dropped."""
    num_blank: int
    """Documents without any text, dropped."""
    exact_duplicates: dict[str, int]
    """Per split: documents whose exact text is also in a split that goes before it (validation, then selection)."""
    normalised_duplicates: dict[str, int]
    """Per split: further documents that agree with one of those only after normalising."""
    duplicates_dropped: bool
    """Whether those documents were dropped; false for the grammar, where they are only counted."""
    kept_bytes: tuple[int, ...]
    """UTF-8 bytes of the documents of each of SPLITS, those that were dropped left out."""


def normalise(text: str) -> str:
    """The text by which documents are told apart: NFKC, case-folded, runs of white space as one blank, ends stripped.

    >>> normalise("  Ｔhe\\n\\tcat ")
    'the cat'
    """
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    return " ".join(text.casefold().split())


def _hash(data: bytes) -> int:
    """64 bits of SHA-256: two of ten million documents agree by chance with probability 3e-6."""
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little")


def read_documents(
    source: Source,
    poll: Callable[[], None],
    *,
    before: Sequence[NDArray[Any]] = (),
    keep: Callable[[NDArray[Any]], None] = lambda _: None,
    segment_bytes: int = 1 << 26,
    meter: Meter | None = None,
) -> NDArray[Any]:
    """What `place` needs to know of every document, one row of DOCUMENT each, in reading order.

    `before` are the segments an earlier process read; their documents are passed over. `keep` gets the rows of every
    further segment of about `segment_bytes` of text as soon as it is read, the last one whatever its size. `poll` is
    called now and then and may raise.
    """
    segments = list(before)
    skipped = sum(len(rows) for rows in segments)
    rows: list[tuple[int, int, int, int]] = []
    size = untold = 0
    documents = source.read()
    for index, _ in enumerate(islice(documents, skipped)):
        if index % _CHECK_EVERY == 0:
            poll()
    if meter:
        meter.skip(sum(int(part["bytes"].sum()) for part in segments))
    for index, document in enumerate(documents):
        if index % _CHECK_EVERY == 0:
            poll()
            if meter:
                meter.add(untold)
            untold = 0
        data = document.text.encode("utf-8", "surrogatepass")
        text = normalise(document.text)
        given = DROPPED if not text else _UNDECIDED if document.split is None else SPLITS.index(document.split)
        rows.append((_hash(data), _hash(text.encode("utf-8", "surrogatepass")), len(data), given))
        size += len(data)
        untold += len(data)
        if size >= segment_bytes:
            segments.append(np.array(rows, DOCUMENT))
            keep(segments[-1])
            rows, size = [], 0
    segments.append(np.array(rows, DOCUMENT))
    keep(segments[-1])
    return np.concatenate(segments)


def place(source: Source, rows_N: NDArray[Any]) -> Assignment:
    """Place every document, of which `read_documents` gave the rows.

    Documents whose corpus names their split keep it. With validation files, all others are train, and selection is cut
    from those by hash. Without, the documents that name no split are divided by hash; if every one says train, all are.
    Then duplicates across splits are dropped from train, then from selection, never from validation. Raises DataError
    when there are too few documents or a split is left empty.
    """
    exact_N, normal_N, given_N = (np.ascontiguousarray(rows_N[name]) for name in ("exact", "normal", "given"))
    blank_N = given_N == DROPPED
    if blank_N.all():
        raise DataError(f"corpus {source.kind}: no text in {_where(source)}; expected at least 3 different documents")
    official = [file.name for file in source.files if file.split == "validation"]
    if official and not (given_N == VALIDATION).any():
        raise DataError(
            f"corpus {source.kind}: the validation split is empty: no text in {', '.join(official)}; "
            "expected at least one document"
        )
    split_N = _place(source, normal_N, given_N)
    exact: dict[str, int] = {}
    normalised: dict[str, int] = {}
    drop_N = blank_N
    before_N = split_N == VALIDATION
    # What is dropped from selection still counts as there: it is in validation, so train loses it all the same.
    for name, index in (("selection", SELECTION), ("train", TRAIN)):
        here_N = split_N == index
        same_N = here_N & np.isin(normal_N, normal_N[before_N])
        same_text_N = here_N & np.isin(exact_N, exact_N[before_N])
        exact[name] = int(same_text_N.sum())
        normalised[name] = int((same_N & ~same_text_N).sum())
        if not source.exact_duplicates_kept:
            drop_N = drop_N | same_N
        before_N = before_N | here_N
    split_N = np.where(drop_N, DROPPED, split_N).astype(np.int8)
    for index, split in enumerate(SPLITS):
        if not (split_N == index).any():
            repeats = exact.get(split, 0) + normalised.get(split, 0)
            raise DataError(
                f"corpus {source.kind}: the {split} split is empty in {_where(source)} ({repeats} documents of it "
                "repeat another split's); expected at least one document in each split"
            )
    return Assignment(
        split_of=split_N,
        num_blank=int(blank_N.sum()),
        exact_duplicates=exact,
        normalised_duplicates=normalised,
        duplicates_dropped=not source.exact_duplicates_kept,
        kept_bytes=tuple(int(rows_N["bytes"][split_N == index].sum()) for index in range(3)),
    )


def _place(source: Source, normal_N: NDArray[np.uint64], given_N: NDArray[np.int8]) -> NDArray[np.int8]:
    """Per document its split before duplicates are dropped; blank documents stay −1."""
    split_N = given_N.copy()
    wanted = [(SELECTION, SELECTION_SHARE), (VALIDATION, VALIDATION_SHARE)]
    wanted = [(index, share) for index, share in wanted if not (split_N == index).any()]
    validation_N = split_N == VALIDATION
    if validation_N.any():
        split_N[split_N == _UNDECIDED] = TRAIN
        from_N = (split_N == TRAIN) & ~np.isin(normal_N, normal_N[validation_N])
        train_waits = False
    else:
        if not (split_N == _UNDECIDED).any():
            split_N[split_N == TRAIN] = _UNDECIDED
        from_N = split_N == _UNDECIDED
        train_waits = bool((split_N == TRAIN).any())  # documents that are train whatever is cut
    if wanted:
        split_N = _cut(source, split_N, normal_N, from_N, wanted, 0 if train_waits else 1)
    split_N[split_N == _UNDECIDED] = TRAIN
    return split_N


def _cut(
    source: Source,
    split_N: NDArray[np.int8],
    normal_N: NDArray[np.uint64],
    from_N: NDArray[np.bool_],
    wanted: list[tuple[int, float]],
    leave: int,
) -> NDArray[np.int8]:
    """Move shares of the documents `from_N` to the wanted splits by the order of their hashes, equal texts together.

    Each wanted split gets at least one text and `leave` texts at least stay; the shares are small enough for that when
    there is a text for each. Raises DataError when there is not.
    """
    texts = np.unique(normal_N[from_N])  # sorted
    need = len(wanted) + leave
    if len(texts) < need:
        names = " and ".join(SPLITS[index] for index, _ in wanted)
        raise DataError(
            f"corpus {source.kind}: {len(texts)} different documents in {_where(source)}, too few to cut {names} from "
            f"them; expected at least {need}; a document is {_document(source)}"
        )
    split_N = split_N.copy()
    rank_N = np.searchsorted(texts, normal_N)
    start, share_so_far = 0, 0.0
    for index, share in wanted:
        share_so_far += share
        if len(texts) < SMALL:
            end = start + max(1, round(share * len(texts)))
        else:
            end = max(start + 1, int(np.searchsorted(texts, np.uint64(share_so_far * 2.0**64))))
        split_N[from_N & (rank_N >= start) & (rank_N < end)] = index
        start = end
    return split_N


def _where(source: Source) -> str:
    return f"{len(source.files)} files" if len(source.files) != 1 else printable(source.files[0].name)


def _document(source: Source) -> str:
    kinds = {"text": "a .txt file or a .jsonl line", "gutenberg": "a whole book", "tinystories": "a story"}
    return kinds.get(source.kind, "a story")
