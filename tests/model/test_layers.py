"""The plain layers against formulas written out in NumPy: one number at a time, float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise.model.layers import Attention, KVCache, RMSNorm, Rope, SwiGLU, rotate

Array = NDArray[np.float64]


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.from_numpy(np.random.Generator(np.random.Philox(seed)).standard_normal(shape) * scale)


def fill(module: torch.nn.Module, scale: float = 0.5) -> None:
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            parameter.copy_(random(*parameter.shape, seed=100 + index, scale=scale))


def turned(x_H: Array, position: int, theta: float) -> Array:
    """One head of one token: each pair (i, i + H/2) is a complex number, turned by position · theta^(−2i/H)."""
    half = len(x_H) // 2
    z = x_H[:half] + 1j * x_H[half:]
    z = z * np.exp(1j * position * theta ** (-np.arange(half) / half))
    return np.concatenate([z.real, z.imag])


def test_rms_norm_divides_by_the_root_mean_square() -> None:
    norm = RMSNorm(3, eps=0.5).double()
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 2.0, -1.0]))
    x = torch.tensor([[1.0, 2.0, 2.5], [0.0, 0.0, 0.0]], dtype=torch.float64)
    root = math.sqrt((1 + 4 + 6.25) / 3 + 0.5)
    expected = [[1 / root, 4 / root, -2.5 / root], [0.0, 0.0, 0.0]]
    torch.testing.assert_close(norm(x), torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=0)


def test_rms_norm_starts_as_a_pure_division() -> None:
    assert torch.equal(RMSNorm(7, eps=1e-5).weight, torch.ones(7))


@pytest.mark.parametrize("theta", [10_000.0, 50.0])
def test_rotation_turns_half_split_pairs(theta: float) -> None:
    N, H, S = 3, 10, 17
    x = random(2, S, N, H)
    found = rotate(x, Rope(N, H, theta).double()(0, S))
    for b, s, n in np.ndindex(2, S, N):
        expected = torch.from_numpy(turned(x[b, s, n].numpy(), s, theta))
        torch.testing.assert_close(found[b, s, n], expected, rtol=0, atol=3e-6)  # angles are float32


def test_rotation_depends_on_the_distance_alone() -> None:
    q, k = random(1, 1, 1, 8, seed=1), random(1, 1, 1, 8, seed=2)
    rope = Rope(1, 8, 10_000.0).double()
    scores = [float((rotate(q, rope(m + 5, 1)) * rotate(k, rope(m, 1))).sum()) for m in (0, 3, 40)]
    assert scores == pytest.approx([scores[0]] * 3, abs=1e-5)
    assert scores[0] != pytest.approx(float((rotate(q, rope(6, 1)) * rotate(k, rope(0, 1))).sum()), abs=1e-2)


def test_rope_tables_grow_without_changing_a_row_or_the_state_dict() -> None:
    at_once, bit_by_bit = Rope(2, 6, 10_000.0), Rope(2, 6, 10_000.0)
    whole = at_once(0, 777)
    for length in (1, 3, 100, 777):
        rows = bit_by_bit(0, length)
        assert torch.equal(rows[0], whole[0][:length]) and torch.equal(rows[1], whole[1][:length])
    start = bit_by_bit(700, 77)
    assert torch.equal(start[0], whole[0][700:])
    assert not bit_by_bit.state_dict()


def attention_oracle(x_BSD: Array, layer: Attention, theta: float) -> Array:
    """Softmax attention with loops over batch, head, query and key; nothing after the query is looked at."""
    w_q, w_k, w_v, w_o = (w.detach().numpy() for w in (layer.w_q, layer.w_k, layer.w_v, layer.w_o))
    N, M, H = layer.num_heads, layer.num_kv_heads, layer.d_head
    B, S, _ = x_BSD.shape
    mixed = np.zeros((B, S, N * H))
    for b, n, s in np.ndindex(B, N, S):
        m = n * M // N
        query = turned(w_q[n * H : (n + 1) * H] @ x_BSD[b, s], s, theta)
        scores, values = [], []
        for t in range(s + 1):
            key = turned(w_k[m * H : (m + 1) * H] @ x_BSD[b, t], t, theta)
            scores.append(math.exp(query @ key / math.sqrt(H)))
            values.append(w_v[m * H : (m + 1) * H] @ x_BSD[b, t])
        mixed[b, s, n * H : (n + 1) * H] = sum(e * v for e, v in zip(scores, values, strict=True)) / sum(scores)
    return mixed @ w_o.T


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (3, 3), (6, 3), (6, 2), (6, 1)])
def test_attention_equals_loops(num_heads: int, num_kv_heads: int) -> None:
    d_head, B, S, theta = 6, 2, 11, 100.0
    d_model = num_heads * d_head
    layer = Attention(d_model, num_heads, num_kv_heads).double()
    fill(layer, scale=d_model**-0.5)
    rope = Rope(num_heads, d_head, theta).double()
    x = random(B, S, d_model)
    found = layer(x, rope(0, S))
    expected = torch.from_numpy(attention_oracle(x.numpy(), layer, theta))
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
    cache = KVCache()
    parts = [layer(x[:, :4], rope(0, 4), cache)] + [layer(x[:, s : s + 1], rope(s, 1), cache) for s in range(4, S)]
    assert cache.length == S
    torch.testing.assert_close(torch.cat(parts, dim=1), found, rtol=0, atol=1e-12)


def test_swiglu_equals_its_formula() -> None:
    layer = SwiGLU(5, 7).double()
    fill(layer)
    x = random(3, 5)
    w_gate, w_up, w_down = (w.detach().numpy() for w in (layer.w_gate, layer.w_up, layer.w_down))
    for t in range(3):
        gate, up = w_gate @ x[t].numpy(), w_up @ x[t].numpy()
        expected = w_down @ (gate / (1 + np.exp(-gate)) * up)
        torch.testing.assert_close(layer(x)[t], torch.from_numpy(expected), rtol=0, atol=1e-13)
