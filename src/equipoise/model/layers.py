"""The plain layers of a LLaMA-style decoder: RMSNorm, RoPE, causal grouped-query attention, SwiGLU.

A module holds parameters and is given the function that computes with them: the one below, or its fused counterpart.

Not for: routed experts (`moe`), the order of layers (`transformer`), hand-written kernels (`fused`, held to these).

Shapes: B batch, S sequence, T = B·S tokens, D d_model, N query heads, M kv heads, H d_head, F FFN width, P positions
or, of a packed buffer, the N + 2·M heads of queries, keys and values.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def at_least_float32(x: Tensor) -> Tensor:
    """`x` itself in float32 or float64, half precisions widened to float32."""
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension (arXiv 1910.07467), same shape and dtype as `x`."""
    return F.rms_norm(x, weight_D.shape, weight_D, eps)


class Embedding(nn.Module):
    """Weight [V, D] of the token embeddings, or of the map from hidden states to logits; uninitialised.

    torch's own modules draw numbers for it that nothing reads, and on no device at all that loads torch's compiler.
    """

    def __init__(self, vocab_size: int, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model))

    def forward(self, ids_BS: Tensor) -> Tensor:
        return F.embedding(ids_BS, self.weight)


class RMSNorm(nn.Module):
    """`rms_norm` with the weight it holds."""

    def __init__(self, width: int, eps: float, compute: Callable[[Tensor, Tensor, float], Tensor] = rms_norm) -> None:
        super().__init__()
        self.eps, self.compute = eps, compute
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x, self.weight, self.eps)


class Rope(nn.Module):
    """Tables of rotary position embedding (arXiv 2104.09864) in Hugging Face's half-split layout: i pairs with i + H/2.

    Angles are float32 products of float32 frequencies, exactly as Hugging Face forms them, so that an exported model
    sees the same rotation at every position; their cosines are taken in float64, which makes a row independent of how
    long the table was when it was made. The tables are buffers outside the state dict and grow on demand.
    """

    cos_PNH: Tensor
    sin_PNH: Tensor

    def __init__(self, num_heads: int, d_head: int, theta: float) -> None:
        super().__init__()
        self.num_heads, self.d_head, self.theta = num_heads, d_head, theta
        # Repeated for every head: a product of equal shapes is twice as fast on a CPU as one that broadcasts.
        self.register_buffer("cos_PNH", torch.empty(0, num_heads, d_head), persistent=False)
        self.register_buffer("sin_PNH", torch.empty(0, num_heads, d_head), persistent=False)

    def forward(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        """(cos, sin) of positions start to start + length − 1, each [length, N, H]; sin negated in its first half."""
        if start + length > self.cos_PNH.shape[0]:
            self._grow(max(start + length, 2 * self.cos_PNH.shape[0]))
        return self.cos_PNH[start : start + length], self.sin_PNH[start : start + length]

    def _grow(self, num_positions: int) -> None:
        exponents = torch.arange(0, self.d_head, 2, dtype=torch.int64).float() / self.d_head
        frequencies = 1.0 / (self.theta**exponents)
        angles = torch.outer(torch.arange(num_positions).float(), frequencies).double().unsqueeze(1)
        cos, sin = angles.cos(), angles.sin()
        self.cos_PNH = torch.cat((cos, cos), dim=-1).repeat(1, self.num_heads, 1).to(self.cos_PNH)
        self.sin_PNH = torch.cat((-sin, sin), dim=-1).repeat(1, self.num_heads, 1).to(self.sin_PNH)


def rotate(x_BSMH: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """`x` with every pair (i, i + H/2) turned by its position's angle; `rope` as `Rope` returns it, M at most its N."""
    M, H = x_BSMH.shape[-2:]
    cos, sin = rope
    return torch.addcmul(x_BSMH * cos[:, :M], x_BSMH.roll(H // 2, -1), sin[:, :M])


class KVCache:
    """Keys and values of one attention layer for the `length` positions seen so far."""

    def __init__(self) -> None:
        self.length = 0
        self.k_BPMH: Tensor | None = None
        self.v_BPMH: Tensor | None = None

    def append(self, k_BSMH: Tensor, v_BSMH: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values so far, the given ones last."""
        if self.k_BPMH is not None and self.v_BPMH is not None:
            k_BSMH = torch.cat((self.k_BPMH, k_BSMH), dim=1)
            v_BSMH = torch.cat((self.v_BPMH, v_BSMH), dim=1)
        self.k_BPMH, self.v_BPMH, self.length = k_BSMH, v_BSMH, k_BSMH.shape[1]
        return k_BSMH, v_BSMH


def heads(qkv_BSPH: Tensor, num_kv_heads: int, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [B, S, N, H], keys and values [B, S, M, H] of a packed buffer, P = N + 2·M; queries and keys rotated."""
    M = num_kv_heads
    q_BSNH, k_BSMH, v_BSMH = qkv_BSPH.split((qkv_BSPH.shape[2] - 2 * M, M, M), dim=2)
    return rotate(q_BSNH, rope), rotate(k_BSMH, rope), v_BSMH


def mix(q_BSNH: Tensor, k_BPMH: Tensor, v_BPMH: Tensor) -> Tensor:
    """softmax(q · kᵀ / sqrt(H)) · v, [B, S, N, H]: causal for S = P positions; a single query sees every key."""
    q, k, v = q_BSNH.transpose(1, 2), k_BPMH.transpose(1, 2), v_BPMH.transpose(1, 2)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=k.shape[1] < q.shape[1])
    return mixed.transpose(1, 2)


def attend(qkv_BSPH: Tensor, num_kv_heads: int, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Causal attention over the queries, keys and values of a packed buffer, [B, S, N, H]; see `heads` and `mix`."""
    return mix(*heads(qkv_BSPH, num_kv_heads, rope))


class Attention(nn.Module):
    """Causal attention with N query heads in groups sharing M key and value heads (GQA, arXiv 2305.13245)."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_kv_heads: int,
        compute: Callable[[Tensor, int, tuple[Tensor, Tensor]], Tensor] = attend,
        linear: Callable[[Tensor, Tensor], Tensor] = F.linear,
    ) -> None:
        super().__init__()
        self.compute, self.linear = compute, linear
        self.num_heads, self.num_kv_heads, self.d_head = num_heads, num_kv_heads, d_model // num_heads
        self.w_q = nn.Parameter(torch.empty(num_heads * self.d_head, d_model))
        self.w_k = nn.Parameter(torch.empty(num_kv_heads * self.d_head, d_model))
        self.w_v = nn.Parameter(torch.empty(num_kv_heads * self.d_head, d_model))
        self.w_o = nn.Parameter(torch.empty(d_model, num_heads * self.d_head))

    def forward(self, x_BSD: Tensor, rope: tuple[Tensor, Tensor], cache: KVCache | None = None) -> Tensor:
        """[B, S, D]; with a filled `cache` S must be 1: the new token sees all before it."""
        B, S, _ = x_BSD.shape
        packed = torch.cat(
            (self.w_q, self.w_k, self.w_v)
        )  # one matrix product, and one gradient of x, instead of three
        qkv_BSPH = self.linear(x_BSD, packed).view(B, S, -1, self.d_head)
        if cache is None:
            mixed_BSNH = self.compute(qkv_BSPH, self.num_kv_heads, rope)
        else:
            q, k, v = heads(qkv_BSPH, self.num_kv_heads, rope)
            mixed_BSNH = mix(q, *cache.append(k, v))
        return self.linear(mixed_BSNH.reshape(B, S, -1), self.w_o)


def swiglu(x_TD: Tensor, w_gate_FD: Tensor, w_up_FD: Tensor, w_down_DF: Tensor) -> Tensor:
    """w_down · (silu(w_gate · x) ⊙ (w_up · x)) (arXiv 2002.05202), [T, D]."""
    return F.linear(F.silu(F.linear(x_TD, w_gate_FD)) * F.linear(x_TD, w_up_FD), w_down_DF)


class SwiGLU(nn.Module):
    """`swiglu` with the weights it holds."""

    def __init__(
        self, d_model: int, d_ff: int, compute: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = swiglu
    ) -> None:
        super().__init__()
        self.compute = compute
        self.w_gate = nn.Parameter(torch.empty(d_ff, d_model))
        self.w_up = nn.Parameter(torch.empty(d_ff, d_model))
        self.w_down = nn.Parameter(torch.empty(d_model, d_ff))

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.compute(x_TD, self.w_gate, self.w_up, self.w_down)
