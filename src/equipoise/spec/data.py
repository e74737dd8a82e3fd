"""Nouns of the data: which documents, and how they become tokens. Reading them is `equipoise.data`'s work."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from equipoise.config import TAG, at_most, check, config
from equipoise.spec.model import MAX_VOCAB

MAX_DOCUMENTS: Final = 10**8
"""Stories of a grammar: 40 GB of text."""

PATH: Final = "a file or folder; the current folder is written ."


STARTING_BOOKS: Final = (11, 84, 98, 145, 345, 1260, 1342, 1400, 1661, 2701)
"""Ten well-known novels of Project Gutenberg, 8.5 MB in all: more than the published budget of 768 thousand tokens."""


def fetch_command(kind: str) -> str:
    """What to type to get the text of a corpus that needs a path.

    >>> fetch_command("tinystories"), fetch_command("gutenberg")[:35]
    ('equipoise data fetch tinystories', 'equipoise data fetch gutenberg 11 8')
    """
    numbers = STARTING_BOOKS if kind == "gutenberg" else ()
    return " ".join(["equipoise data fetch", kind, *map(str, numbers)])


def can_be_path(text: str) -> bool:
    """Whether `text` can name a file or folder: an empty one would silently be the current folder."""
    return text != "" and "\0" not in text


@config
class GrammarCorpus:
    """The built-in story grammar: endless documents of exactly known probability (no path, no download)."""

    kind: Literal["grammar"] = "grammar"
    seed: int = 0
    """Seed of the world (names, attributes, places); documents of the three splits come from disjoint seeds."""
    num_documents: int = 20_000
    """Training documents to write, at least 1; about 80 words each."""
    num_validation: int = 1_000
    """Validation documents, at least 1."""
    num_selection: int = 200
    """Selection documents, at least 1: read only by what chooses hyper-parameters."""

    def __post_init__(self) -> None:
        check(
            self,
            ("seed", self.seed >= 0, "0 or more"),
            ("num_documents", self.num_documents >= 1, "at least 1"),
            ("num_validation", self.num_validation >= 1, "at least 1"),
            ("num_selection", self.num_selection >= 1, "at least 1"),
            *at_most(self, num_documents=MAX_DOCUMENTS, num_validation=MAX_DOCUMENTS, num_selection=MAX_DOCUMENTS),
        )


@config
class TextCorpus:
    """Plain text: .txt (one document a file), .jsonl (one a line) or .parquet (one a row), or a folder of them."""

    kind: Literal["text"] = "text"
    path: str
    """File or folder; relative to the working directory."""
    field: str = "text"
    """The field of a .jsonl line, or the column of a .parquet file, that holds the document."""

    def __post_init__(self) -> None:
        check(self, ("path", can_be_path(self.path), PATH))


@config
class TinyStoriesCorpus:
    """A folder of the official TinyStories files: stories separated by a line `<|endoftext|>`, or .parquet."""

    kind: Literal["tinystories"] = "tinystories"
    path: str | None = None
    """Folder (files matching `*valid*` are validation, `*train*` train) or one file; unset: only `plan` works.
    `equipoise data fetch tinystories` gets the files.
    """

    def __post_init__(self) -> None:
        check(self, ("path", self.path is None or can_be_path(self.path), PATH))


@config
class GutenbergCorpus:
    """A folder of Project Gutenberg books (.txt, one book a file); licence boilerplate is stripped."""

    kind: Literal["gutenberg"] = "gutenberg"
    path: str | None = None
    """Folder of books; unset: only `plan` works. `equipoise data fetch gutenberg` gets books by number."""

    def __post_init__(self) -> None:
        check(self, ("path", self.path is None or can_be_path(self.path), PATH))


Corpus = Annotated[GrammarCorpus | TextCorpus | TinyStoriesCorpus | GutenbergCorpus, TAG]


@config
class BpeTokenizer:
    """Byte-level BPE trained on the train split only."""

    kind: Literal["bpe"] = "bpe"
    vocab_size: int
    """Requested size, at least 257 (256 bytes + end-of-text); the model takes the size really reached."""

    def __post_init__(self) -> None:
        check(
            self,
            ("vocab_size", self.vocab_size >= 257, "at least 257 (256 bytes and the end-of-text)"),
            *at_most(self, vocab_size=MAX_VOCAB),
        )


@config
class ByteTokenizer:
    """Plain bytes: 256 ids and one end-of-text id, vocabulary 257."""

    kind: Literal["byte"] = "byte"


Tokenizer = Annotated[BpeTokenizer | ByteTokenizer, TAG]


def requested_vocab_size(tokenizer: BpeTokenizer | ByteTokenizer) -> int:
    """The vocabulary a study plans with before its corpus was seen."""
    return tokenizer.vocab_size if isinstance(tokenizer, BpeTokenizer) else 257
