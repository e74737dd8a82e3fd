"""Which split every document goes to, and which documents are dropped, from one streaming pass over a corpus.

A document's place depends on its normalised text alone (or on the file it lies in), so it does not move when other
documents come or go, as long as there are 1,000 or more. Not for: reading or encoding.
"""

from __future__ import annotations

import hashlib
import unicodedata
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from equipoise.data.corpora.source import SPLITS, Source
from equipoise.errors import DataError

VALIDATION_SHARE: Final = 0.05
SELECTION_SHARE: Final = 0.01
SMALL: Final = 1000
"""Below this many distinct documents, counts instead of hash thresholds decide, so that no split is empty by chance."""
DROPPED: Final = -1
TRAIN, SELECTION, VALIDATION = range(3)
_UNDECIDED: Final = 3
_CHECK_EVERY: Final = 256  # documents between two looks at should_stop


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


def normalise(text: str) -> str:
    """The text by which documents are told apart: NFKC, case-folded, runs of white space as one blank, ends stripped.

    >>> normalise("  Ｔhe\\n\\tcat ")
    'the cat'
    """
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    return " ".join(text.casefold().split())


def _hash(text: str) -> int:
    """64 bits of SHA-256: two of ten million documents agree by chance with probability 3e-6."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "little")


def assign(source: Source, poll: Callable[[], None] = lambda: None) -> Assignment:
    """Read the whole source once and place every document; `poll` is called now and then and may raise.

    Documents whose corpus names their split keep it. With validation files, all others are train. Without, those that
    name no split are divided by hash (if every document says train, all are). Selection is cut from train by hash when
    the corpus has none. Then duplicates across splits are dropped from train, then from selection, never from
    validation. Raises DataError when there are too few documents or a split is left empty.
    """
    exact_u, normal_u, given_u = _read(source, poll)
    blank_u = given_u == DROPPED
    if blank_u.all():
        raise DataError(f"corpus {source.kind}: no text in {_where(source)}; expected at least 3 different documents")
    split_u = _place(source, normal_u, given_u)
    in_validation = split_u == VALIDATION
    exact: dict[str, int] = {}
    normalised: dict[str, int] = {}
    drop_u = blank_u.copy()
    # Selection first: a train document that repeats a dropped selection document repeats a validation one as well.
    before_u = in_validation
    for name, index in (("selection", SELECTION), ("train", TRAIN)):
        here_u = split_u == index
        same_u = here_u & np.isin(normal_u, normal_u[before_u])
        exact_u_here = here_u & np.isin(exact_u, exact_u[before_u])
        exact[name] = int(exact_u_here.sum())
        normalised[name] = int((same_u & ~exact_u_here).sum())
        if not source.exact_duplicates_kept:
            drop_u |= same_u
        before_u = before_u | here_u
    split_u = np.where(drop_u, DROPPED, split_u).astype(np.int8)
    for index, name in enumerate(SPLITS):
        if not (split_u == index).any():
            raise DataError(
                f"corpus {source.kind}: the {name} split is empty in {_where(source)} "
                f"({exact.get(name, 0) + normalised.get(name, 0)} of its documents repeat another split's); "
                f"expected at least one document in each of {', '.join(SPLITS)}"
            )
    return Assignment(
        split_of=split_u,
        num_blank=int(blank_u.sum()),
        exact_duplicates=exact,
        normalised_duplicates=normalised,
        duplicates_dropped=not source.exact_duplicates_kept,
    )


def _read(source: Source, poll: Callable[[], None]) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.int8]]:
    """Per document: hash of the text, hash of the normalised text, the split given (3 = none, −1 = blank)."""
    exact, normal, given = array("Q"), array("Q"), array("b")
    for index, document in enumerate(source.read()):
        if index % _CHECK_EVERY == 0:
            poll()
        text = normalise(document.text)
        exact.append(_hash(document.text))
        normal.append(_hash(text))
        given.append(DROPPED if not text else _UNDECIDED if document.split is None else SPLITS.index(document.split))
    return np.array(exact, np.uint64), np.array(normal, np.uint64), np.array(given, np.int8)


def _place(source: Source, normal_u: NDArray[np.uint64], given_u: NDArray[np.int8]) -> NDArray[np.int8]:
    """Per document its split before duplicates are looked at; blank documents stay −1."""
    split_u = given_u.copy()
    if (split_u == VALIDATION).any():
        split_u[split_u == _UNDECIDED] = TRAIN
    elif not (split_u == _UNDECIDED).any():
        split_u[split_u == TRAIN] = _UNDECIDED
    wanted = [(SELECTION, SELECTION_SHARE), (VALIDATION, VALIDATION_SHARE)]
    wanted = [(index, share) for index, share in wanted if not (split_u == index).any()]
    # With validation files, selection is all that is cut, and it is cut from train.
    from_u = split_u == (_UNDECIDED if (split_u == _UNDECIDED).any() else TRAIN)
    if wanted:
        split_u = _cut(source, split_u, normal_u, from_u, wanted)
    split_u[split_u == _UNDECIDED] = TRAIN
    return split_u


def _cut(
    source: Source,
    split_u: NDArray[np.int8],
    normal_u: NDArray[np.uint64],
    from_u: NDArray[np.bool_],
    wanted: list[tuple[int, float]],
) -> NDArray[np.int8]:
    """Move shares of the documents `from_u` to the wanted splits by the order of their hashes, equal texts together."""
    distinct = np.unique(normal_u[from_u])  # sorted
    others = bool(((split_u == TRAIN) & ~from_u).any())  # documents that stay train whatever is cut
    need = len(wanted) + (0 if others else 1)
    if len(distinct) < need:
        names = ", ".join(SPLITS[index] for index, _ in wanted)
        raise DataError(
            f"corpus {source.kind}: {len(distinct)} different documents in {_where(source)}, too few to cut {names} "
            f"from them; expected at least {need}: a document is {_document(source)}"
        )
    edges = [0]
    for position, (_, share) in enumerate(wanted):
        left = len(wanted) - position - 1 + (0 if others else 1)  # documents the later splits need at least
        if len(distinct) < SMALL:
            count = max(1, round(share * len(distinct)))
        else:
            below = sum(s for _, s in wanted[: position + 1]) * 2.0**64
            count = max(1, int(np.searchsorted(distinct, np.uint64(int(below)))) - edges[-1])
        edges.append(min(edges[-1] + count, len(distinct) - left))
    split_u = split_u.copy()
    rank_u = np.searchsorted(distinct, normal_u)
    for (index, _), low, high in zip(wanted, edges, edges[1:], strict=False):
        split_u[from_u & (rank_u >= low) & (rank_u < high)] = index
    return split_u


def _where(source: Source) -> str:
    return f"{len(source.files)} files" if len(source.files) != 1 else source.files[0].name


def _document(source: Source) -> str:
    kinds = {"text": "a .txt file or a .jsonl line", "gutenberg": "a whole book", "tinystories": "a story"}
    return kinds.get(source.kind, "a story")
