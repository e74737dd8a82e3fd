"""A corpus made ready for training: what lies in a data set's directory, and how it is opened and looked up.

`<cache>/<key>/` holds `train.tokens`, `selection.tokens`, `validation.tokens`, `tokenizer.json`, for a grammar
`<split>.log_probs.npy`, and `dataset.json`, which says what all of it is. The key is a hash of the corpus' contents
and of the tokenizer asked for, so nothing is tokenised twice. Not for: making one (`prepare`), or windows and batches
(`packing`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypedDict

from equipoise.config import digest, dump, misfit
from equipoise.data.corpora import SPLITS, Source, Split, open_corpus
from equipoise.data.tokenfile import check_ids, ids_sha256, map_tokens, read_header
from equipoise.data.tokenizer import TextTokenizer, load_tokenizer
from equipoise.errors import DataError
from equipoise.faults import cut, printable, reason, show
from equipoise.files import check_regular, file_sha256, parse_json, regular_bytes
from equipoise.spec.data import Corpus, Tokenizer

SCHEMA_VERSION: Final = 1
"""Of `dataset.json`, and part of the cache key: raised whenever the same corpus would be written otherwise."""


class _Split(TypedDict):
    documents: int
    tokens: int
    bytes: int
    sha256: str


class Described(TypedDict):
    """What `dataset.json` says, as far as anyone computes with it or shows it."""

    kind: str
    title: str
    licence: str
    digest: str
    corpus: str
    vocab_size: int
    eot_id: int
    files: list[dict[str, Any]]
    notes: list[str]
    tokenizer: dict[str, Any]
    splits: dict[str, _Split]
    blank_documents: int
    duplicates: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """An opened data set; the arrays are mapped when asked for."""

    directory: Path
    """Where it lies."""
    info: dict[str, Any]
    """`dataset.json`; not to be changed."""

    @property
    def digest(self) -> str:
        """SHA-256 (hex) over the ids of every split and the tokenizer: equal content, equal digest, everywhere."""
        return str(self.info["digest"])

    @property
    def vocab_size(self) -> int:
        """V of the tokenizer as trained."""
        return int(self.info["vocab_size"])

    @property
    def eot_id(self) -> int:
        """Id of end-of-text; one stands after every document, and nowhere else."""
        return int(self.info["eot_id"])

    def tokens(self, split: Split) -> NDArray[np.unsignedinteger]:
        """Ids of a split, uint16 or uint32, read-only, mapped from disk."""
        return map_tokens(self.directory / f"{split}.tokens")

    def tokenizer(self) -> TextTokenizer:
        """The tokenizer, read once."""
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> TextTokenizer:
        return load_tokenizer(self.directory / "tokenizer.json")

    @cached_property
    def token_bytes(self) -> NDArray[np.int64]:
        """[V] bytes of raw text that each id stands for; 0 for end-of-text."""
        return self.tokenizer().token_bytes

    def floor_log_probs(self, split: Split) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
        """Per document of a split ln p(text) and ln p(end | text); None unless a grammar wrote the corpus."""
        path = log_probs_path(self.directory, split)
        if not path.exists():
            return None
        both = np.load(path, allow_pickle=False)
        return both[0], both[1]


def log_probs_path(directory: Path, split: Split) -> Path:
    """The file of a grammar's log-probabilities, float64 [2, documents]."""
    return directory / f"{split}.log_probs.npy"


def dataset_key(source: Source, tokenizer: Tokenizer) -> str:
    """Name of the cache entry: SHA-256 (hex) of the corpus' fingerprint, the tokenizer asked for and the format."""
    return digest({"schema": SCHEMA_VERSION, "corpus": source.fingerprint, "tokenizer": dump(tokenizer)})


def content_digest(sha256_of_ids: Mapping[Split, str], vocab_size: int, tokenizer: str) -> str:
    """The digest of a data set: over the hashes of the ids of each split, the vocabulary and the tokenizer."""
    return digest({"ids": dict(sha256_of_ids), "vocab_size": vocab_size, "tokenizer": tokenizer})


def cached(corpus: Corpus, tokenizer: Tokenizer, cache: Path) -> Dataset | None:
    """The prepared data set if it is in the cache, else None. Never writes; raises DataError for an unusable corpus."""
    return usable(cache / dataset_key(open_corpus(corpus), tokenizer))


def usable(directory: Path) -> Dataset | None:
    """The data set there, or None if there is none that opens: one that does not can be made again."""
    if not directory.is_dir():
        return None
    try:
        return open_dataset(directory)
    except DataError:
        return None


def open_dataset(directory: Path) -> Dataset:
    """Open a prepared data set, checking that its files belong together; raises DataError naming the file."""
    path = directory / "dataset.json"
    try:
        info = parse_json(regular_bytes(path))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}); expected a prepared data set") from None
    except ValueError as error:
        raise DataError(f"{path}: not valid JSON ({error}); delete the directory to prepare it again") from None
    if not isinstance(info, dict) or info.get("schema_version") != SCHEMA_VERSION:
        found = info.get("schema_version") if isinstance(info, dict) else None
        raise DataError(f"{path}: schema_version {show(found)}; expected {SCHEMA_VERSION}")
    if fault := misfit(Described, info):
        raise DataError(f"{path}: {fault}; delete the directory to prepare it again")
    try:
        _check_files(directory, info)
    except (KeyError, TypeError) as error:
        raise DataError(
            f"{path}: {error} is missing or of the wrong kind; delete the directory to prepare it again"
        ) from None
    return Dataset(directory=directory, info=info)


def _check_files(directory: Path, info: dict[str, Any]) -> None:
    """Compare every file with `dataset.json`, content included: an altered id would be trained on without a word."""
    tokenizer_path = directory / "tokenizer.json"
    tokenizer = load_tokenizer(tokenizer_path)
    if tokenizer.digest != info["tokenizer"]["digest"]:
        wanted = _said(info["tokenizer"]["digest"])
        raise DataError(f"{tokenizer_path}: SHA-256 {tokenizer.digest}; expected {wanted}")
    for split in SPLITS:
        path = directory / f"{split}.tokens"
        header, said = read_header(path), info["splits"][split]
        for name, found, expected in (
            ("vocabulary", header.vocab_size, info["vocab_size"]),
            ("tokenizer", header.tokenizer, info["tokenizer"]["digest"]),
            ("corpus", header.corpus, info["corpus"]),
            ("number of ids", header.count, said["tokens"]),
            ("number of documents", header.num_documents, said["documents"]),
            ("bytes of text", header.num_bytes, said["bytes"]),
            ("SHA-256 of the ids", ids_sha256(path), said["sha256"]),
        ):
            if found != expected:
                raise DataError(f"{path}: {name} {found}; expected {_said(expected)} as dataset.json says")
        check_ids(path, tokenizer.eot_id)
        log_probs = log_probs_path(directory, split)
        if info["kind"] == "grammar" or log_probs.exists():
            _check_log_probs(log_probs, header.num_documents, said["log_probs"])
    hashes = {split: info["splits"][split]["sha256"] for split in SPLITS}
    for name, found, expected in (
        ("vocab_size", info["vocab_size"], tokenizer.vocab_size),
        ("eot_id", info["eot_id"], tokenizer.eot_id),
        ("digest", info["digest"], content_digest(hashes, tokenizer.vocab_size, tokenizer.digest)),
    ):
        if found != expected:
            raise DataError(f"{directory / 'dataset.json'}: {name} {show(found)}; expected {show(expected)}")


def _said(value: object) -> str:
    return cut(printable(str(value)))


def _check_log_probs(path: Path, num_documents: int, sha256: str) -> None:
    try:
        check_regular(path)
        # Mapped, so that a header which asks for more than the file holds takes no memory; a .npz has no shape.
        mapped = np.load(path, allow_pickle=False, mmap_mode="r")
        shape = mapped.shape if isinstance(mapped, np.ndarray) and mapped.dtype == np.float64 else None
        found = file_sha256(path)
    except Exception as error:  # NumPy's reader of headers also raises whatever Python's own parser does
        raise DataError(f"{path}: cannot be read ({reason(error)}); expected a NumPy file") from None
    if shape != (2, num_documents):
        raise DataError(f"{path}: shape {shape}; expected (2, {num_documents})")
    if found != sha256:
        raise DataError(f"{path}: SHA-256 {found}; expected {_said(sha256)} as dataset.json says")
    if not (mapped <= 0).all() or np.isinf(mapped).any():
        raise DataError(f"{path}: holds what is no log-probability; expected finite numbers up to 0")
