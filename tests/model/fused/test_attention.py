"""Blocked causal attention: torch's scaled_dot_product_attention is the oracle."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise.model.fused import attention as module
from equipoise.model.fused.attention import attend


@pytest.fixture(autouse=True)
def in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """However short the sequence."""
    monkeypatch.setattr(module, "MIN_LENGTH", 1)


SIZES = [  # B, S, N, M, H
    (2, 13, 3, 3, 4),
    (1, 29, 6, 2, 2),
    (3, 1, 4, 1, 5),
    (2, 16, 2, 1, 3),
]


def plain(q_BSNH: Tensor, k_BSMH: Tensor, v_BSMH: Tensor) -> Tensor:
    parts = (part.transpose(1, 2) for part in (q_BSNH, k_BSMH, v_BSMH))
    return F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True).transpose(1, 2)


def tensors(draw, B: int, S: int, N: int, M: int, H: int, dtype: torch.dtype) -> list[Tensor]:
    return [draw(B, S, heads, H, seed=i, dtype=dtype) for i, heads in enumerate((N, M, M))]


@pytest.mark.parametrize("scores", [1, 300, 1 << 18])  # one sequence at a time, one or two, all
@pytest.mark.parametrize("block", [1, 3, 5, 128])
@pytest.mark.parametrize(("B", "S", "N", "M", "H"), SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_the_plain_attention(held_to, draw, monkeypatch, B, S, N, M, H, block, scores, dtype) -> None:
    monkeypatch.setattr(module, "BLOCK", block)
    monkeypatch.setattr(module, "CHUNK_SCORES", scores)
    held_to(attend, plain, *tensors(draw, B, S, N, M, H, dtype))


def test_gradients(checked, draw, monkeypatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 2)
    checked(attend, *tensors(draw, 2, 5, 4, 2, 3, torch.float64))


def test_views_of_a_packed_buffer_will_do(draw) -> None:
    packed = draw(2, 9, 5, 4)
    q, k, v = packed.split((3, 1, 1), dim=2)
    torch.testing.assert_close(attend(q, k, v), plain(q, k, v), rtol=0, atol=1e-12)


def test_nothing_sees_what_follows(draw) -> None:
    q, k, v = (t.detach() for t in tensors(draw, 1, 300, 2, 2, 4, torch.float64))
    before = attend(q, k, v)
    k[:, 130], v[:, 130] = 50.0, 50.0
    moved = (attend(q, k, v) - before).abs().amax(dim=(0, 2, 3))
    assert float(moved[:130].max()) == 0.0 and float(moved[130:].min()) > 0.0


def test_short_sequences_take_the_plain_version(draw, monkeypatch) -> None:
    monkeypatch.setattr(module, "MIN_LENGTH", 8)
    for S, name in ((7, "ScaledDot"), (8, "_Attend")):
        mixed = attend(*tensors(draw, 1, S, 2, 1, 4, torch.float64))
        nodes = [mixed.grad_fn]
        names = []
        while nodes:
            node = nodes.pop()
            names.append(node.name())  # type: ignore[union-attr]
            nodes += [following for following, _ in node.next_functions if following]  # type: ignore[union-attr]
        assert any(found.startswith(name) for found in names)
