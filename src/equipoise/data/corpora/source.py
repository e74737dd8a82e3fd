"""What every corpus looks like from outside: where it comes from, and its documents as a restartable stream.

Not for: deciding which split a document belongs to (`splits`), nor reading files (`reading`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from equipoise.config import canonical

Split = Literal["train", "selection", "validation"]
SPLITS: tuple[Split, ...] = ("train", "selection", "validation")


@dataclass(frozen=True, kw_only=True)
class Document:
    """One document of a corpus."""

    text: str
    """The text, line ends as `\\n`; may be blank (then it is skipped and counted by `splits.assign`)."""
    split: Split | None
    """The split the corpus itself says it belongs to; None: to be decided by the hash of its text."""
    where: str
    """`file` or `file:line`, for messages."""
    log_prob_text: float = math.nan
    """Grammar only: ln p(a story begins with this text)."""
    log_prob_end: float = math.nan
    """Grammar only: ln p(the story ends here | it begins with this text)."""


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One file a corpus was read from."""

    name: str
    """Path relative to the corpus folder, with forward slashes."""
    num_bytes: int
    """Size on disk."""
    sha256: str
    """Hash of the bytes on disk."""
    split: Split | None
    """The split its name gives its documents; None: by hash."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """An opened corpus: its provenance, and a function that streams its documents from the start."""

    kind: str
    """`grammar`, `text`, `tinystories` or `gutenberg`."""
    title: str
    """What it is, for the report."""
    licence: str
    """Licence of the text, or who has to know it."""
    files: tuple[SourceFile, ...]
    """The files behind it, in reading order; empty for the grammar."""
    fingerprint: str
    """SHA-256 over the contents, and over all that the spec says besides the path: equal means the same documents."""
    read: Callable[[], Iterator[Document]]
    """Streams every document, always in the same order; each call starts again. Raises DataError on broken text."""
    notes: tuple[str, ...] = ()
    """What was stripped, ignored or assumed, a sentence each."""
    sizes: tuple[int, ...] = ()
    """About how many bytes of text there are, a number a file, where sizes on disk do not say it; empty: they do."""
    exact_duplicates_kept: bool = False
    """True for the grammar: its documents are draws, so duplicates across splits are counted and stay."""

    @property
    def text_sizes(self) -> tuple[int, ...]:
        """About how many bytes of text there are, in each file (of the grammar, which has none, one number)."""
        return self.sizes or tuple(file.num_bytes for file in self.files)


def fingerprint(kind: str, files: Sequence[SourceFile], **settings: object) -> str:
    """SHA-256 (hex) of the kind, the settings and, per file in order, its name, split and content hash."""
    named = [[file.name, file.split, file.sha256] for file in files]
    return hashlib.sha256(canonical({"kind": kind, "files": named, "settings": settings}).encode()).hexdigest()
