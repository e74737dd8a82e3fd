"""Routing diagnostics of one layer, pure functions of what an evaluation counted or chose, in NumPy.

Not for: routing itself or its losses (`model.moe`); collecting the sums over an evaluation (`score`, `specialisation`).

Shapes: T tokens, E experts, K experts per token.
"""

from __future__ import annotations

import base64
import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

COLLAPSED_SHARE: Final = 0.9
"""A layer has collapsed when its K busiest experts take at least this share of the assignments."""


def diagnose(
    counts_E: NDArray[Any], mean_router_entropy_nats: float | None, mean_log_z: float | None, top_k: int
) -> dict[str, Any]:
    """Diagnostics of one layer over an evaluation, as plain Python numbers.

    With f_e = counts_e / Σ counts: `usage` f_e, `busiest_frac` max f_e (at most 1/K), `usage_variance` population
    variance of f_e, `load_cv` E·sd(f), `max_vio` E·max f − 1, `usage_entropy` H(f)/ln E, `router_entropy` mean token
    entropy of the router / ln E, `log_z` mean logsumexp, `dead` ids of experts without an assignment, `topk_share`
    share of the K busiest, `collapsed` whether that is ≥ 0.9 (never when K = E). With one expert, where ln E = 0, both
    entropies are 1: its use is as even as can be. A router without probabilities (hash, random) has neither a token
    entropy nor a logsumexp: None, and None back. Raises ValueError when there is no assignment.

    >>> diagnose(np.array([3, 1]), 0.5, 2.0, 1)["busiest_frac"]
    0.75
    """
    counts = np.asarray(counts_E, dtype=np.int64)
    total, num_experts = int(counts.sum()), len(counts)
    if total < 1:
        raise ValueError("no assignments: expected the counts of at least one token")
    f_E = counts / total
    entropy = abs(float(sum(f * math.log(f) for f in f_E.tolist() if f > 0)))  # abs: one expert alone gives 0, not -0
    topk_share = float(np.sort(counts)[::-1][:top_k].sum() / total)
    ln_E = math.log(num_experts)
    router_entropy = mean_router_entropy_nats
    if router_entropy is not None:
        router_entropy = float(router_entropy) / ln_E if num_experts > 1 else 1.0
    return {
        "usage": f_E.tolist(),
        "busiest_frac": float(f_E.max()),
        "usage_variance": float(f_E.var()),
        "load_cv": float(num_experts * f_E.std()),
        "max_vio": float(num_experts * f_E.max() - 1),
        "usage_entropy": entropy / ln_E if num_experts > 1 else 1.0,
        "router_entropy": router_entropy,
        "log_z": None if mean_log_z is None else float(mean_log_z),
        "dead": np.flatnonzero(counts == 0).tolist(),
        "topk_share": topk_share,
        "collapsed": top_k < num_experts and topk_share >= COLLAPSED_SHARE,
    }


def chosen(expert_ids_TK: NDArray[Any], num_experts: int) -> NDArray[np.bool_]:
    """[T, E] whether each token chose each expert.

    >>> chosen(np.array([[2, 0]]), 3).tolist()
    [[True, False, True]]
    """
    chosen_TE = np.zeros((len(expert_ids_TK), num_experts), np.bool_)
    np.put_along_axis(chosen_TE, np.asarray(expert_ids_TK), True, axis=1)
    return chosen_TE


def saturation(chosen_TE: NDArray[np.bool_], final_TE: NDArray[np.bool_]) -> float:
    """Share of the final choices that were made already: the mean over tokens of |chosen ∩ final| / K, in [0, 1].

    Both are of the same tokens (OLMoE's "router saturation", arXiv 2409.02060, section 5.1). Choosing by
    chance gives K/E.

    >>> saturation(np.array([[True, True, False]]), np.array([[True, False, True]]))
    0.5
    """
    return float((chosen_TE & final_TE).sum() / final_TE.sum())


def packed(chosen_TE: NDArray[np.bool_]) -> str:
    """Choices as text, eight to a byte; `unpacked` gives them back.

    >>> packed(np.array([[True, False, True]]))
    'oA=='
    """
    return base64.b64encode(np.packbits(chosen_TE).tobytes()).decode()


def unpacked(text: str, num_tokens: int, num_experts: int) -> NDArray[np.bool_]:
    """[T, E] what `packed` was given; ValueError when the text is of another size."""
    raw = np.frombuffer(base64.b64decode(text, validate=True), np.uint8)
    size = num_tokens * num_experts
    if len(raw) != -(-size // 8):
        raise ValueError(f"choices of {len(raw)} bytes; expected {-(-size // 8)} for {num_tokens} × {num_experts}")
    return np.unpackbits(raw, count=size).astype(np.bool_).reshape(num_tokens, num_experts)
