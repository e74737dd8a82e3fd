"""Token ids on disk: a header that says what they are, then the ids, in the smallest dtype that is safe.

Layout, little-endian: 128 bytes of header (`_HEADER`), then `count` ids as uint16 (V ≤ 65,536) or uint32. Not for:
which ids (`tokenizer`), which split or where the file lies (`dataset`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from equipoise.errors import DataError

MAGIC: Final = b"EQPTOKEN"
VERSION: Final = 1
HEADER_BYTES: Final = 128
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


def write_tokens(path: Path, chunks: Iterable[tuple[NDArray[np.int64], int, int]], header: TokenHeader) -> TokenHeader:
    """Write ids as they come; `chunks` gives (ids, documents, bytes of raw text). Returns the header with true counts.

    `header` supplies vocabulary, tokenizer and corpus; its counts are ignored. Every id is compared with the
    vocabulary before it is narrowed, because NumPy wraps what does not fit without a word; raises DataError then.
    """
    dtype = dtype_for(header.vocab_size)
    count = documents = raw = 0
    with path.open("wb") as stream:
        stream.write(bytes(HEADER_BYTES))
        for ids, num_documents, num_bytes in chunks:
            if ids.size and not (0 <= int(ids.min()) and int(ids.max()) < header.vocab_size):
                raise DataError(
                    f"{path.name}: token ids {int(ids.min())} to {int(ids.max())} met; "
                    f"expected 0 to {header.vocab_size - 1}"
                )
            stream.write(ids.astype(dtype).tobytes())
            count += ids.size
            documents += num_documents
            raw += num_bytes
        written = TokenHeader(
            vocab_size=header.vocab_size,
            count=count,
            num_documents=documents,
            num_bytes=raw,
            tokenizer=header.tokenizer,
            corpus=header.corpus,
        )
        stream.seek(0)
        stream.write(_pack(written))
    return written


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
        size = path.stat().st_size
        with path.open("rb") as stream:
            data = stream.read(HEADER_BYTES)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); expected a token file") from None
    if len(data) < HEADER_BYTES or not data.startswith(MAGIC):
        raise DataError(f"{path}: not a token file; expected {HEADER_BYTES} bytes of header that begin {MAGIC.decode()}")
    _, version, itemsize, vocab_size, count, documents, raw, tokenizer, corpus = _HEADER.unpack_from(data)
    if version != VERSION:
        raise DataError(f"{path}: version {version} of the token file format; expected {VERSION}")
    if vocab_size > 1 << 32 or itemsize != dtype_for(vocab_size).itemsize:
        raise DataError(f"{path}: {itemsize} bytes an id for a vocabulary of {vocab_size}; expected 2 up to 65,536, else 4")
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


def map_tokens(path: Path) -> NDArray[np.unsignedinteger]:
    """[count] ids of a token file, read-only, mapped rather than read; raises DataError as `read_header` does."""
    header = read_header(path)
    if header.count == 0:
        return np.zeros(0, dtype_for(header.vocab_size))
    mapped = np.memmap(path, dtype=dtype_for(header.vocab_size), mode="r", offset=HEADER_BYTES, shape=(header.count,))
    return np.asarray(mapped)
