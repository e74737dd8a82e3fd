"""Chunked SwiGLU: `layers.swiglu` is the oracle."""

from __future__ import annotations

import pytest
import torch

import equipoise.model.layers as layers
from equipoise.model.fused import swiglu as module
from equipoise.model.fused.swiglu import chunks, swiglu


@pytest.mark.parametrize("chunk", [1, 3, 5, 1000])
@pytest.mark.parametrize(("T", "D", "width"), [(13, 5, 7), (1, 3, 11), (29, 2, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_the_plain_layer(held_to, draw, monkeypatch, T, D, width, chunk, dtype) -> None:
    monkeypatch.setattr(module, "CHUNK_TOKENS", chunk)
    shapes = ((T, D), (width, D), (width, D), (D, width))
    held_to(swiglu, layers.swiglu, *(draw(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)))


def test_gradients(checked, draw, monkeypatch) -> None:
    monkeypatch.setattr(module, "CHUNK_TOKENS", 3)
    checked(swiglu, draw(7, 5), draw(3, 5, seed=1), draw(3, 5, seed=2), draw(5, 3, seed=3))


def test_chunks_cover_every_row_once(monkeypatch) -> None:
    monkeypatch.setattr(module, "CHUNK_TOKENS", 4)
    assert chunks(3, 13) == [slice(3, 7), slice(7, 11), slice(11, 13)]
    assert chunks(3, 7) == [slice(3, 7)] and chunks(3, 3) == []
