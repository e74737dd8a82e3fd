"""Streams are pure functions of their names, distinct from each other, and the same everywhere."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pytest

from equipoise.rng import PURPOSES, stream

RAW = {
    (0, "init", "layers.0.w_gate"): 13647649257999782758,
    (0, "data", 3): 11354763070822067510,
    (7, "bootstrap"): 7304046649817107254,
}
"""First 64 bits of three streams: they must never change, or no earlier run could be repeated."""


@pytest.mark.parametrize(("name", "bits"), RAW.items(), ids=str)
def test_streams_never_change(name: tuple[int, str], bits: int) -> None:
    assert stream(*name).bit_generator.random_raw() == bits  # type: ignore[attr-defined]


def test_the_key_is_the_hash_of_the_arguments() -> None:
    """Written a second time: Philox keyed by the first 16 bytes of SHA-256, little-endian."""
    key = int.from_bytes(hashlib.sha256(b"(3, 'eval', 'a', 1)").digest()[:16], "little")
    expected = np.random.Generator(np.random.Philox(key=key))
    assert np.array_equal(stream(3, "eval", "a", 1).integers(0, 1 << 30, 8), expected.integers(0, 1 << 30, 8))


def test_different_names_give_different_streams() -> None:
    names = [
        *itertools.product((0, 1), PURPOSES),
        (0, "init", "a"),
        (0, "init", "a", "b"),
        (0, "init", "ab"),
        (0, "init", "a, b"),
        (0, "init", "a', 'b"),
        (0, "data", 1),
        (0, "data", "1"),
        (0, "data", 1, 1),
        (0, "data", 11),
    ]
    drawn = {stream(*name).integers(0, 1 << 62) for name in names}  # type: ignore[arg-type]
    assert len(drawn) == len(names)


def test_drawing_from_one_stream_moves_no_other() -> None:
    before = stream(0, "data", 1).random(3)
    stream(0, "init").random(1000)
    np.testing.assert_array_equal(stream(0, "data", 1).random(3), before)


def test_numpy_integers_are_the_same_keys() -> None:
    assert stream(np.int64(5), "data", np.int32(2)).random() == stream(5, "data", 2).random()  # type: ignore[arg-type]


def test_an_unknown_purpose_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^random stream 'luck': expected one of init, data, sample, bootstrap, .*$"):
        stream(0, "luck")
