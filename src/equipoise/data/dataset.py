"""A corpus made ready for training, once: split, tokenised, written under a content-addressed cache, and opened again.

`<cache>/<key>/` holds `train.tokens`, `selection.tokens`, `validation.tokens`, `tokenizer.json`, for a grammar
`<split>.log_probs.npy`, and `dataset.json`, which says what all of it is. The key is a hash of the corpus' contents
and of the tokenizer asked for, so nothing is tokenised twice. The directory is built aside and renamed when complete,
under a lock, so two processes preparing at once do no harm. Not for: windows and batches (`packing`).
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from equipoise.config import canonical, digest, dump
from equipoise.data.corpora import SPLITS, Document, Source, Split, open_corpus
from equipoise.data.splits import TRAIN, Assignment, assign
from equipoise.data.tokenfile import TokenHeader, map_tokens, read_header, write_tokens
from equipoise.data.tokenizer import TextTokenizer, load_tokenizer, train_tokenizer
from equipoise.errors import DataError, Interrupted, ResourceError
from equipoise.spec.data import Corpus, GrammarCorpus, Tokenizer, requested_vocab_size

FORMAT: Final = 1
"""Part of the cache key: raised whenever the same corpus and tokenizer would be written otherwise."""
BATCH_CHARS: Final = 1 << 20
"""Characters encoded in one call; with one document on top it bounds the memory of preparing."""
SAMPLE_CHARS: Final = 1 << 20
"""What `estimate` reads: bytes per token settle within about 1 % well before."""
PROGRESS_S: Final = 5.0


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """An opened data set; the arrays are mapped when asked for."""

    directory: Path
    """Where it lies."""
    info: dict[str, Any]
    """`dataset.json`; not to be changed."""

    @property
    def digest(self) -> str:
        """SHA-256 over token ids, their splits and the tokenizer: equal content, equal digest, on every machine."""
        return str(self.info["digest"])

    @property
    def vocab_size(self) -> int:
        """V of the tokenizer as trained."""
        return int(self.info["vocab_size"])

    @property
    def eot_id(self) -> int:
        """Id of end-of-text; it stands after every document."""
        return int(self.info["eot_id"])

    def tokens(self, split: Split) -> NDArray[np.unsignedinteger]:
        """Ids of a split, uint16 or uint32, read-only, mapped from disk."""
        return map_tokens(self.directory / f"{split}.tokens")

    def tokenizer(self) -> TextTokenizer:
        """The tokenizer."""
        return load_tokenizer(self.directory / "tokenizer.json")

    @cached_property
    def token_bytes(self) -> NDArray[np.int64]:
        """[V] bytes of raw text of each id; 0 for end-of-text."""
        return self.tokenizer().token_bytes

    def floor_log_probs(self, split: Split) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
        """Per document of a split ln p(text) and ln p(end | text), or None when no grammar wrote it."""
        path = self.directory / f"{split}.log_probs.npy"
        if not path.exists():
            return None
        both = np.load(path, allow_pickle=False)
        return both[0], both[1]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What `plan` can say of a corpus that was not prepared yet."""

    train_tokens: int
    """Training tokens, from the tokens per byte of a sample and the size of the files."""
    vocab_size: int
    """V: what the sample reached when it was the whole corpus, else what was asked for."""


def dataset_key(source: Source, tokenizer: Tokenizer) -> str:
    """Name of the cache entry: SHA-256 (hex) of the corpus' fingerprint, the tokenizer asked for and the format."""
    return digest({"format": FORMAT, "corpus": source.fingerprint, "tokenizer": dump(tokenizer)})


def cached(corpus: Corpus, tokenizer: Tokenizer, cache: Path) -> Dataset | None:
    """The prepared data set if it is in the cache, else None. Never writes; raises DataError for an unusable corpus."""
    return _existing(cache / dataset_key(open_corpus(corpus), tokenizer))


def _existing(directory: Path) -> Dataset | None:
    """The data set there if it can be opened; one that cannot is as good as none, because it can be made again."""
    if not directory.is_dir():
        return None
    try:
        return open_dataset(directory)
    except DataError:
        return None
