"""Tokenizers: exact round trips, exact byte counts, special text that stays text, and safety beside `fork`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.data.tokenizer import (
    END_OF_TEXT,
    EOT_ID,
    TextTokenizer,
    byte_alphabet,
    load_tokenizer,
    split_text,
    train_tokenizer,
)
from equipoise.errors import DataError
from equipoise.spec.data import BpeTokenizer, ByteTokenizer

CORPUS = [
    "Once upon a time, there was a little dog. It's the dog's ball, they'll play; we've seen 12 dogs!",
    "Der Hund läuft. \u4e2d\u6587 \u4e2d\u6587 \u4e2d\u6587 — 👩‍👧 👍🏽 e\u0301.\r\n\tand\u00a0so\u2028on.\n\n\n  end",
    f"{END_OF_TEXT} is text. {END_OF_TEXT}",
] * 3

# Characters chosen to meet every branch of the pre-tokenizer's pattern, mixed with anything at all.
anything = st.text(
    st.one_of(
        st.sampled_from([*" \n\t\r'sStdmlrve12é中.,!<|>", *"\u00a0\u2028\u0085\x1c\x00\ufeff\u200d👍🏽"]),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=60,
)


@pytest.fixture(scope="module")
def bpe() -> TextTokenizer:
    return train_tokenizer(BpeTokenizer(vocab_size=320), iter(CORPUS))


@pytest.fixture(scope="module")
def byte() -> TextTokenizer:
    return train_tokenizer(ByteTokenizer(), iter(()))


@settings(max_examples=200)
@given(text=anything)
def test_any_text_comes_back_and_every_byte_is_counted(bpe: TextTokenizer, byte: TextTokenizer, text: str) -> None:
    for tokenizer in (bpe, byte):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert EOT_ID not in ids
        assert int(tokenizer.token_bytes[ids].sum()) == len(text.encode())


@settings(max_examples=200)
@given(text=anything, size=st.integers(1, 12))
def test_encoding_in_pieces_gives_the_tokens_of_the_whole(bpe: TextTokenizer, text: str, size: int) -> None:
    pieces = split_text(text, size)
    assert "".join(pieces) == text
    whole = bpe.library.encode(text, add_special_tokens=False).ids
    assert [i for piece in pieces for i in bpe.library.encode(piece, add_special_tokens=False).ids] == whole


def test_pieces_are_cut_after_what_is_no_white_space() -> None:
    assert split_text("ab cd  ef\n\ngh", 1) == ["ab", " cd", "  ef", "\n\ngh"]
    assert split_text("ab cd  ef\n\ngh", 3) == ["ab cd", "  ef", "\n\ngh"]
    assert split_text("ab cd", 5) == ["ab cd"]
    assert split_text("x" * 50 + "\u00a0" * 9, 5) == ["x" * 50 + "\u00a0" * 9]
    assert split_text("", 5) == [""]


def test_bytes_have_ids_in_order(byte: TextTokenizer) -> None:
    assert byte.vocab_size == 257
    assert byte.encode("aé\0") == [1 + 0x61, 1 + 0xC3, 1 + 0xA9, 1]
    assert byte.token_bytes.tolist() == [0] + [1] * 256
    assert train_tokenizer(BpeTokenizer(vocab_size=257), iter(CORPUS)).vocab_size == 257


@settings(max_examples=100)
@given(text=anything)
def test_the_table_of_bytes_agrees_with_the_library(byte: TextTokenizer, text: str) -> None:
    assert byte.encode(text) == byte.library.encode(text, add_special_tokens=False).ids


def test_partial_characters_count_their_own_bytes(byte: TextTokenizer, bpe: TextTokenizer) -> None:
    """'é' is two tokens of one byte each; decoding them singly would give three bytes each (U+FFFD)."""
    ids = byte.encode("é")
    assert byte.token_bytes[ids].tolist() == [1, 1]
    assert [len(byte.decode([i]).encode()) for i in ids] == [3, 3]
    by_decoding = {i: bpe.decode([i]) for i in range(1, bpe.vocab_size)}
    whole = {i: text for i, text in by_decoding.items() if "\ufffd" not in text}
    assert len(whole) > 150
    assert all(bpe.token_bytes[i] == len(text.encode()) for i, text in whole.items())


def test_text_that_looks_special_stays_text(bpe: TextTokenizer, byte: TextTokenizer, tmp_path: Path) -> None:
    for tokenizer in (bpe, byte):
        (tmp_path / "t.json").write_text(tokenizer.to_json(), encoding="utf-8")
        for one in (tokenizer, load_tokenizer(tmp_path / "t.json")):
            assert one.library.token_to_id(END_OF_TEXT) == EOT_ID == one.eot_id
            ids = one.encode(f"a{END_OF_TEXT}b")
            assert EOT_ID not in ids
            assert one.decode([*ids, EOT_ID]) == f"a{END_OF_TEXT}b{END_OF_TEXT}"


def test_the_vocabulary_is_what_was_reached() -> None:
    small = train_tokenizer(BpeTokenizer(vocab_size=4096), iter(["banana"] * 5))
    assert 257 < small.vocab_size < 270
    assert len(small.token_bytes) == small.vocab_size
    assert train_tokenizer(BpeTokenizer(vocab_size=4096), iter([])).vocab_size == 257
    assert small.decode(small.encode("Ünseen 中")) == "Ünseen 中"


def test_training_is_deterministic_and_does_not_see_the_order() -> None:
    first = train_tokenizer(BpeTokenizer(vocab_size=300), iter(CORPUS))
    again = train_tokenizer(BpeTokenizer(vocab_size=300), iter(CORPUS[::-1]))
    assert first.to_json() == again.to_json()
    assert first.digest == again.digest != train_tokenizer(BpeTokenizer(vocab_size=301), iter(CORPUS)).digest


def test_the_file_gives_back_the_tokenizer(bpe: TextTokenizer, byte: TextTokenizer, tmp_path: Path) -> None:
    for tokenizer in (bpe, byte):
        path = tmp_path / "tokenizer.json"
        path.write_text(tokenizer.to_json(), encoding="utf-8")
        loaded = load_tokenizer(path)
        assert loaded.digest == tokenizer.digest
        assert loaded.encode_batch(CORPUS) == tokenizer.encode_batch(CORPUS)
        assert np.array_equal(loaded.token_bytes, tokenizer.token_bytes)


def test_batches_are_the_single_encodings(bpe: TextTokenizer) -> None:
    texts = ["", "a", " ".join(CORPUS) * 30, "", "b c"]
    assert bpe.encode_batch(texts) == [bpe.library.encode(text, add_special_tokens=False).ids for text in texts]
    assert bpe.encode_batch([]) == []


def test_lone_surrogates_are_refused(bpe: TextTokenizer, byte: TextTokenizer) -> None:
    for tokenizer in (bpe, byte):
        with pytest.raises(DataError) as caught:
            tokenizer.encode_batch(["fine", "ab\ud83d"])
        assert str(caught.value) == "text holds a lone surrogate U+D83D at character 2; expected Unicode text"


@pytest.mark.parametrize("wrong", [-1, 320])
def test_ids_outside_the_vocabulary_are_refused(bpe: TextTokenizer, wrong: int) -> None:
    with pytest.raises(DataError) as caught:
        bpe.decode(np.array([5, wrong]))
    assert str(caught.value) == f"token id {wrong} is not accepted; expected 0 to 319"


def test_broken_tokenizer_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(DataError, match=r"tokenizer\.json: not a readable tokenizer file \("):
        load_tokenizer(path)
    for content in ("", "{", '{"model": {"vocab": {"a": 0}}}'):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(DataError, match=r"tokenizer\.json: not a readable tokenizer file \([^\n]*\)$"):
            load_tokenizer(path)
    for content, reason in (
        ('{"version": "1.0"}', "model: missing"),
        ("null", "all of it: null is not accepted; expected a valid dictionary"),
        ('{"model": {"vocab": {"a": 0.5}}}', "model.vocab.a: 0.5 is not accepted; expected a valid integer"),
    ):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(DataError) as caught:
            load_tokenizer(path)
        assert str(caught.value) == f"{path}: {reason}; expected a tokenizer of this project"
    other = train_tokenizer(ByteTokenizer(), iter(())).to_json().replace(END_OF_TEXT, "<other>")
    path.write_text(other, encoding="utf-8")
    with pytest.raises(DataError) as caught:
        load_tokenizer(path)
    assert str(caught.value) == (
        f"{path}: not a byte-level tokenizer of this project; expected 256 bytes and {END_OF_TEXT} as id 0"
    )


@pytest.mark.parametrize(
    ("vocab", "found"),
    [
        ({"a": 0, "b": 2**32 - 1}, "2 tokens with ids from 0 to 4294967295"),  # the library would try every id between
        ({"a": -1, "b": 0}, "2 tokens with ids from -1 to 0"),
        ({"a": 1, "b": 1}, "2 tokens with ids from 1 to 1"),
        ({}, "no tokens"),
    ],
)
def test_ids_with_a_gap_are_refused_before_the_library_sees_them(
    tmp_path: Path, vocab: dict[str, int], found: str
) -> None:
    path = tmp_path / "tokenizer.json"
    table = json.loads(train_tokenizer(ByteTokenizer(), iter(())).to_json())
    path.write_text(json.dumps({**table, "model": {**table["model"], "vocab": vocab}}), encoding="utf-8")
    with pytest.raises(DataError) as caught:
        load_tokenizer(path)
    assert str(caught.value) == f"{path}: {found}; expected ids from 0 without a gap, at most 1048576 of them"


def test_the_byte_alphabet_is_the_library_s() -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    assert sorted(byte_alphabet()) == sorted(ByteLevel.alphabet())
    (shown, _), *_ = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str("\x00\u00ad\u00ff ~")
    assert shown == "".join(byte_alphabet()[byte] for byte in "\x00\u00ad\u00ff ~".encode())


def test_beside_fork_nothing_hangs_and_nothing_is_printed() -> None:
    """The library's thread pool, asked for here, would dead-lock in the child: the parent has used it."""
    code = """
import os
from equipoise.data.tokenizer import train_tokenizer
from equipoise.spec.data import BpeTokenizer
texts = ["some words to train on, again and again"] * 500
tokenizer = train_tokenizer(BpeTokenizer(vocab_size=280), iter(texts))
ids = tokenizer.encode_batch(texts)
child = os.fork()
if child == 0:
    os._exit(0 if tokenizer.encode_batch(texts) == ids else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "true"}
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=30, check=False, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")
