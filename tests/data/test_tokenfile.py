"""Token files: nothing wraps, nothing is guessed, every damage is named."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest

from equipoise.data.tokenfile import HEADER_BYTES, TokenHeader, TokenWriter, dtype_for, map_tokens, read_header
from equipoise.errors import DataError

TOKENIZER, CORPUS = "ab" * 32, "cd" * 32


def write(path: Path, ids: list[int], vocab_size: int) -> tuple[TokenHeader, str]:
    writer = TokenWriter(path, vocab_size, TOKENIZER, CORPUS)
    writer.add(np.array(ids[:2]), 1, 7)
    writer.add(np.array(ids[2:]), 2, 11)
    return writer.close()


@pytest.mark.parametrize(("vocab_size", "itemsize"), [(257, 2), (65_535, 2), (65_536, 2), (65_537, 4), (1 << 32, 4)])
def test_the_smallest_safe_dtype(vocab_size: int, itemsize: int, tmp_path: Path) -> None:
    assert dtype_for(vocab_size).itemsize == itemsize
    ids = [0, vocab_size - 1, 1, vocab_size - 2]
    header, _ = write(tmp_path / "t", ids, vocab_size)
    tokens = map_tokens(tmp_path / "t")
    assert tokens.tolist() == ids
    assert tokens.dtype == dtype_for(vocab_size)
    assert (tmp_path / "t").stat().st_size == HEADER_BYTES + 4 * itemsize
    assert header == read_header(tmp_path / "t")


def test_ids_beyond_65535_come_back(tmp_path: Path) -> None:
    """NumPy would write 70,000 as 4,464 into uint16 without a word."""
    write(tmp_path / "t", [0, 65_535, 65_536, 70_000], 70_001)
    assert map_tokens(tmp_path / "t").tolist() == [0, 65_535, 65_536, 70_000]


def test_too_large_a_vocabulary() -> None:
    with pytest.raises(DataError) as caught:
        dtype_for((1 << 32) + 1)
    assert str(caught.value) == "vocabulary of 4294967297 is not accepted; token files hold at most 4294967296"


def test_the_header_says_what_the_ids_are(tmp_path: Path) -> None:
    header, digest = write(tmp_path / "t", [5, 6, 7, 8, 9], 300)
    assert header == TokenHeader(
        vocab_size=300, count=5, num_documents=3, num_bytes=18, tokenizer=TOKENIZER, corpus=CORPUS
    )
    assert digest == hashlib.sha256(struct.pack("<5H", 5, 6, 7, 8, 9)).hexdigest()
    content = (tmp_path / "t").read_bytes()
    assert content[:8] == b"EQPTOKEN"
    assert content[HEADER_BYTES:] == struct.pack("<5H", 5, 6, 7, 8, 9)


def test_an_empty_file_of_ids(tmp_path: Path) -> None:
    TokenWriter(tmp_path / "t", 300, TOKENIZER, CORPUS).close()
    assert map_tokens(tmp_path / "t").tolist() == []


@pytest.mark.parametrize("wrong", [-1, 300, 70_000])
def test_an_id_outside_the_vocabulary_is_never_written(tmp_path: Path, wrong: int) -> None:
    writer = TokenWriter(tmp_path / "t", 300, TOKENIZER, CORPUS)
    with pytest.raises(DataError) as caught:
        writer.add(np.array([4, wrong, 5]), 1, 3)
    writer.abandon()
    low, high = min(4, wrong), max(5, wrong)
    assert str(caught.value) == f"{tmp_path / 't'}: token ids {low} to {high} met; expected 0 to 299"


def test_tokens_are_read_only(tmp_path: Path) -> None:
    write(tmp_path / "t", [1, 2, 3], 300)
    with pytest.raises(ValueError, match="read-only"):
        map_tokens(tmp_path / "t")[0] = 1


def patched(content: bytes, offset: int, data: bytes) -> bytes:
    return content[:offset] + data + content[offset + len(data) :]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda c: b"", "not a token file; expected 128 bytes of header that begin EQPTOKEN"),
        (lambda c: c[:100], "not a token file; expected 128 bytes of header that begin EQPTOKEN"),
        (lambda c: b"X" + c[1:], "not a token file; expected 128 bytes of header that begin EQPTOKEN"),
        (lambda c: patched(c, 8, b"\x02"), "version 2 of the token file format; expected 1"),
        (
            lambda c: patched(c, 12, b"\x04"),
            "4 bytes an id for a vocabulary of 300; expected 2 up to a vocabulary of 65,536, else 4",
        ),
        (
            lambda c: patched(c, 16, struct.pack("<Q", 1 << 40)),
            f"2 bytes an id for a vocabulary of {1 << 40}; expected 2 up to a vocabulary of 65,536, else 4",
        ),
        (lambda c: c[:-1], "137 bytes long; expected 138 for its 5 ids"),
        (lambda c: c + b"\0\0", "140 bytes long; expected 138 for its 5 ids"),
        (lambda c: patched(c, 24, b"\x06"), "138 bytes long; expected 140 for its 6 ids"),
    ],
)  # fmt: skip
def test_every_damage_is_named(tmp_path: Path, damage: object, message: str) -> None:
    path = tmp_path / "t"
    write(path, [5, 6, 7, 8, 9], 300)
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    for read in (read_header, map_tokens):
        with pytest.raises(DataError) as caught:
            read(path)
        assert str(caught.value) == f"{path}: {message}"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        read_header(tmp_path / "t")
    assert str(caught.value) == f"{tmp_path / 't'}: cannot be read (No such file or directory); expected a token file"
