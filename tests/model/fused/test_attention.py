"""Blocked causal attention: torch's scaled_dot_product_attention is the oracle."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise.model.fused import attention as module
from equipoise.model.fused.attention import attend
from equipoise.model.layers import Rope


@pytest.fixture(autouse=True)
def in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """However short the sequence."""
    monkeypatch.setattr(module, "MIN_LENGTH", 1)


SIZES = [  # B, S, N, M, H
    (2, 13, 3, 3, 4),
    (1, 29, 6, 2, 2),
    (3, 1, 4, 1, 10),
    (2, 16, 2, 1, 6),
]


def plain(qkv_BSPH: Tensor, num_kv_heads: int, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Heads cut out and turned one pair at a time, then torch's kernel."""
    M, half = num_kv_heads, qkv_BSPH.shape[-1] // 2
    q, k, v = qkv_BSPH.split((qkv_BSPH.shape[2] - 2 * M, M, M), dim=2)
    cos, sin = rope[0][:, :1, half:], rope[1][:, :1, half:]

    def turned(x: Tensor) -> Tensor:
        first, second = x[..., :half], x[..., half:]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    parts = (part.transpose(1, 2) for part in (turned(q), turned(k), v))
    return F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True).transpose(1, 2)


def rope_of(S: int, N: int, H: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    cos, sin = Rope(N, H, 100.0)(0, S)
    return cos.to(dtype), sin.to(dtype)


@pytest.mark.parametrize("scores", [1, 300, 1 << 18])  # one sequence at a time, one or two, all
@pytest.mark.parametrize("block", [1, 3, 5, 128])
@pytest.mark.parametrize(("B", "S", "N", "M", "H"), SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_the_plain_attention(held_to, draw, monkeypatch, B, S, N, M, H, block, scores, dtype) -> None:
    monkeypatch.setattr(module, "BLOCK", block)
    monkeypatch.setattr(module, "CHUNK_SCORES", scores)
    monkeypatch.setattr(module, "KEPT_SCORES", N * S * S)  # the second of two sequences may make its own again
    rope = rope_of(S, N, H, dtype)
    packed = draw(B, S, N + 2 * M, H, dtype=dtype)
    held_to(lambda qkv: attend(qkv, M, rope), lambda qkv: plain(qkv, M, rope), packed)


def test_gradients(checked, draw, monkeypatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 2)
    rope = rope_of(5, 4, 6, torch.float64)
    checked(lambda qkv: attend(qkv, 2, rope), draw(2, 5, 8, 6))


def test_nothing_sees_what_follows(draw) -> None:
    packed, rope = draw(1, 300, 6, 4).detach(), rope_of(300, 2, 4, torch.float64)
    before = attend(packed, 2, rope)
    packed[:, 130, 2:] = 50.0
    moved = (attend(packed, 2, rope) - before).abs().amax(dim=(0, 2, 3))
    assert float(moved[:130].max()) == 0.0 and float(moved[130:].min()) > 0.0


def test_short_sequences_take_the_plain_version(draw, monkeypatch) -> None:
    monkeypatch.setattr(module, "MIN_LENGTH", 8)
    for S, name in ((7, "ScaledDot"), (8, "_Attend")):
        mixed = attend(draw(1, S, 4, 4), 1, rope_of(S, 2, 4, torch.float64))
        nodes = [mixed.grad_fn]
        names = []
        while nodes:
            node = nodes.pop()
            names.append(node.name())  # type: ignore[union-attr]
            nodes += [following for following, _ in node.next_functions if following]  # type: ignore[union-attr]
        assert any(found.startswith(name) for found in names)
