"""Token ids on disk: a header that says what they are, then the ids, in the smallest dtype that is safe.

Layout, little-endian: 128 bytes of header (`_HEADER`), then `count` ids as uint16 (V ≤ 65,536) or uint32. Not for:
which ids (`tokenizer`), which split or where the file lies (`dataset`).
"""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from equipoise.errors import DataError

MAGIC: Final = b"EQPTOKEN"
VERSION: Final = 1
HEADER_BYTES: Final = 128
CHECKED_AT_ONCE: Final = 1 << 22
"""Ids compared at once: bounds the memory of it."""
READ_AT_ONCE: Final = 1 << 22
"""Bytes read at once where a file is gone through from its start."""
# magic, version, bytes per id, vocabulary, count, documents, bytes of raw text, tokenizer SHA-256, corpus SHA-256
_HEADER: Final = struct.Struct("<8sIIQQQQ32s32s")


@dataclass(frozen=True, kw_only=True)
class TokenHeader:
    """What the header of a token file says."""

    vocab_size: int
    """V; every id is below it."""
    count: int
    """Ids in the file, end-of-text ids included."""
    num_documents: int
    """Documents, one end-of-text id after each."""
    num_bytes: int
    """UTF-8 bytes of the documents' raw text; end-of-text counts none."""
    tokenizer: str
    """SHA-256 (hex) of the tokenizer that made the ids."""
    corpus: str
    """Fingerprint (SHA-256, hex) of the corpus they were made from."""


def dtype_for(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """The smallest of uint16 and uint32 that holds every id below `vocab_size`; DataError beyond 2³².

    >>> dtype_for(65_536).itemsize, dtype_for(65_537).itemsize
    (2, 4)
    """
    if vocab_size <= 1 << 16:
        return np.dtype("<u2")
    if vocab_size <= 1 << 32:
        return np.dtype("<u4")
    raise DataError(f"vocabulary of {vocab_size} is not accepted; token files hold at most {1 << 32}")


class TokenWriter:
    """Writes a token file as ids come; the header is completed by `close` (mutable: it is a file being written)."""

    def __init__(self, path: Path, vocab_size: int, tokenizer: str, corpus: str) -> None:
        self._path = path
        self._dtype = dtype_for(vocab_size)
        self._header = TokenHeader(
            vocab_size=vocab_size, count=0, num_documents=0, num_bytes=0, tokenizer=tokenizer, corpus=corpus
        )
        self._sha256 = hashlib.sha256()
        path.touch()  # what lies there stays until `close`, for `go_on`
        self._stream = path.open("r+b")
        self._stream.write(bytes(HEADER_BYTES))

    def go_on(self, count: int, num_documents: int, num_bytes: int, sha256: str) -> None:
        """Keep the first `count` ids that the file already holds, as `sync` told them, and append after them.

        Raises DataError when they are not there or not the same. Without this call the file begins anew.
        """
        size = HEADER_BYTES + count * self._dtype.itemsize
        self._stream.flush()
        self._stream.seek(HEADER_BYTES)
        left = count * self._dtype.itemsize
        while left and (data := self._stream.read(min(left, READ_AT_ONCE))):
            self._sha256.update(data)
            left -= len(data)
        if left or self._sha256.hexdigest() != sha256:
            raise DataError(f"{self._path}: does not hold the {count} ids that were written to it")
        self._stream.seek(size)
        self._header = replace(self._header, count=count, num_documents=num_documents, num_bytes=num_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of raw text of what was added so far."""
        return self._header.num_bytes

    def sync(self) -> tuple[TokenHeader, str]:
        """Put on disk what was added so far; the header that it would have, and the SHA-256 (hex) of its ids.

        The file itself keeps a blank header until `close`, so that nobody takes it for whole.
        """
        self._stream.flush()
        os.fsync(self._stream.fileno())
        return self._header, self._sha256.hexdigest()

    def add(self, ids: NDArray[np.integer], num_documents: int, num_bytes: int) -> None:
        """Append ids that end `num_documents` documents of `num_bytes` raw text.

        Every id is compared with the vocabulary before it is narrowed, because NumPy wraps what does not fit without a
        word; raises DataError then.
        """
        header = self._header
        if ids.size and (ids.min() < 0 or ids.max() >= header.vocab_size):
            low, high = int(ids.min()), int(ids.max())
            raise DataError(f"{self._path}: token ids {low} to {high} met; expected 0 to {header.vocab_size - 1}")
        data = ids.astype(self._dtype).tobytes()
        self._stream.write(data)
        self._sha256.update(data)
        self._header = replace(
            header,
            count=header.count + ids.size,
            num_documents=header.num_documents + num_documents,
            num_bytes=header.num_bytes + num_bytes,
        )

    def close(self) -> tuple[TokenHeader, str]:
        """Complete the file and put it on disk; its header, and the SHA-256 (hex) of its ids as stored."""
        self._stream.truncate(HEADER_BYTES + self._header.count * self._dtype.itemsize)  # what a killed process added
        self._stream.seek(0)
        self._stream.write(_pack(self._header))
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        return self._header, self._sha256.hexdigest()

    def abandon(self) -> None:
        """Let go of the file without completing it; harmless after `close`."""
        self._stream.close()


def _pack(header: TokenHeader) -> bytes:
    packed = _HEADER.pack(
        MAGIC,
        VERSION,
        dtype_for(header.vocab_size).itemsize,
        header.vocab_size,
        header.count,
        header.num_documents,
        header.num_bytes,
        bytes.fromhex(header.tokenizer),
        bytes.fromhex(header.corpus),
    )
    return packed.ljust(HEADER_BYTES, b"\0")


def read_header(path: Path) -> TokenHeader:
    """The header of a token file, checked against magic, version, dtype and the file's length; else DataError."""
    try:
        if path.exists() and not path.is_file():
            raise DataError(f"{path}: is no regular file; expected a token file")
        size = path.stat().st_size
        with path.open("rb") as stream:
            data = stream.read(HEADER_BYTES)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); expected a token file") from None
    if len(data) < HEADER_BYTES or not data.startswith(MAGIC):
        raise DataError(
            f"{path}: not a token file; expected {HEADER_BYTES} bytes of header that begin {MAGIC.decode()}"
        )
    _, version, itemsize, vocab_size, count, documents, raw, tokenizer, corpus = _HEADER.unpack_from(data)
    if version != VERSION:
        raise DataError(f"{path}: version {version} of the token file format; expected {VERSION}")
    if vocab_size > 1 << 32 or itemsize != dtype_for(vocab_size).itemsize:
        raise DataError(
            f"{path}: {itemsize} bytes an id for a vocabulary of {vocab_size}; "
            "expected 2 up to a vocabulary of 65,536, else 4"
        )
    if size != HEADER_BYTES + count * itemsize:
        raise DataError(f"{path}: {size} bytes long; expected {HEADER_BYTES + count * itemsize} for its {count} ids")
    return TokenHeader(
        vocab_size=vocab_size,
        count=count,
        num_documents=documents,
        num_bytes=raw,
        tokenizer=tokenizer.hex(),
        corpus=corpus.hex(),
    )


def ids_sha256(path: Path) -> str:
    """SHA-256 (hex) of the ids of a token file as they lie on disk, its header left out."""
    with path.open("rb") as stream:
        stream.seek(HEADER_BYTES)
        return hashlib.file_digest(stream, "sha256").hexdigest()


def check_ids(path: Path, eot_id: int) -> None:
    """Compare the ids themselves with the header; DataError where one is no id, or ends are not one a document.

    An id beyond the vocabulary would be an obscure error within a model, on a GPU one that takes the process along.
    """
    header = read_header(path)
    largest = ends = last = 0
    with path.open("rb") as stream:  # read, not mapped: pages of a mapped file count as this process' memory
        stream.seek(HEADER_BYTES)
        while (block := np.fromfile(stream, dtype_for(header.vocab_size), CHECKED_AT_ONCE)).size:
            largest = max(largest, int(block.max()))
            ends += int(np.count_nonzero(block == eot_id))
            last = int(block[-1])
    if largest >= header.vocab_size:
        raise DataError(f"{path}: token id {largest} met; expected 0 to {header.vocab_size - 1}")
    if ends != header.num_documents or (header.count and last != eot_id):
        raise DataError(f"{path}: {ends} ends of text in {header.num_documents} documents; expected one after each")


def map_tokens(path: Path) -> NDArray[np.unsignedinteger]:
    """[count] ids of a token file, read-only, mapped rather than read; raises DataError as `read_header` does."""
    header = read_header(path)
    if header.count == 0:
        return np.zeros(0, dtype_for(header.vocab_size))
    mapped = np.memmap(path, dtype=dtype_for(header.vocab_size), mode="r", offset=HEADER_BYTES, shape=(header.count,))
    return np.asarray(mapped)
