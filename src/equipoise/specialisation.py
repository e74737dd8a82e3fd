"""What experts are used for: which are chosen together, and for which tokens; sums over one evaluation, in NumPy.

Not for: how evenly they are used (`routing.diagnose`), or the routing of single tokens (`explore`).

Shapes: T tokens, L layers, E experts, K experts per token, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from equipoise.routing import chosen, packed

FOLLOWED_TOKENS: Final = 512
"""Validation tokens whose choices are kept at every point of a curve: a saturation of 0.5 is then known to ± 0.02."""
TOP_TOKENS: Final = 8
"""Tokens that are named for each expert."""
MIN_OCCURRENCES: Final = 10
"""A rarer token says nothing about an expert: ten that all go one way by chance are one case in 1,024 at K/E = 1/2."""


@dataclass(kw_only=True)
class Followed:
    """The choices for the first tokens that an evaluation scores: the same tokens at every evaluation of a curve."""

    num_experts: int
    """E; of a dense model anything."""
    ids: list[list[NDArray[Any]]]
    """Per batch and layer the chosen experts, [T, K]."""
    num_tokens: int = 0
    """Tokens kept so far."""

    def add(self, inputs_T: NDArray[Any], expert_ids_LTK: Sequence[NDArray[Any]]) -> None:
        """Keep what is still wanted of a batch; what `score.evaluate` calls."""
        wanted = min(FOLLOWED_TOKENS - self.num_tokens, len(inputs_T))
        if wanted > 0:
            self.ids.append([ids_TK[:wanted] for ids_TK in expert_ids_LTK])
            self.num_tokens += wanted

    def row(self) -> dict[str, Any]:
        """What a row of the record keeps: the number of tokens, and per layer their choices, packed."""
        layers = [packed(chosen(np.concatenate(layer), self.num_experts)) for layer in zip(*self.ids, strict=True)]
        return {"tokens": self.num_tokens, "layers": layers}


@dataclass(kw_only=True)
class Uses:
    """Running sums over the tokens of an evaluation."""

    together_LEE: NDArray[np.int64]
    """Tokens that chose both experts; on the diagonal, tokens that chose the expert."""
    tokens_LEV: NDArray[np.int32]
    """Of each token of the vocabulary, how often it went to the expert when it was read."""
    seen_V: NDArray[np.int64]
    """How often each token was read."""

    def add(self, inputs_T: NDArray[Any], expert_ids_LTK: Sequence[NDArray[Any]]) -> None:
        """Count a batch; what `score.evaluate` calls."""
        self.seen_V += np.bincount(inputs_T, minlength=len(self.seen_V))
        num_experts, vocab_size = self.tokens_LEV.shape[1:]
        for layer, ids_TK in enumerate(expert_ids_LTK):
            chosen_TE = chosen(ids_TK, num_experts).astype(np.float32)  # counts of a batch are exact below 2^24
            self.together_LEE[layer] += (chosen_TE.T @ chosen_TE).astype(np.int64)
            pairs_A = (ids_TK.astype(np.int64) * vocab_size + inputs_T[:, None]).ravel()
            np.add.at(self.tokens_LEV[layer].reshape(-1), pairs_A, 1)

    def tables(self, name: Callable[[int], str]) -> list[dict[str, Any]]:
        """Per layer `coactivation` and `top_tokens`, as plain values; `name` writes a token id."""
        return [
            {
                "coactivation": [[round(value, 4) for value in row] for row in coactivation(together_EE).tolist()],
                "top_tokens": [
                    [{"token": name(index), "share": round(share, 4), "count": count} for index, share, count in expert]
                    for expert in top_tokens(tokens_EV, self.seen_V)
                ],
            }
            for together_EE, tokens_EV in zip(self.together_LEE, self.tokens_LEV, strict=True)
        ]


def new_uses(num_layers: int, num_experts: int, vocab_size: int) -> Uses:
    """Sums over nothing."""
    return Uses(
        together_LEE=np.zeros((num_layers, num_experts, num_experts), np.int64),
        tokens_LEV=np.zeros((num_layers, num_experts, vocab_size), np.int32),
        seen_V=np.zeros(vocab_size, np.int64),
    )


def coactivation(together_EE: NDArray[Any]) -> NDArray[np.float64]:
    """[E, E] of the tokens that chose the expert of the row, the share that chose that of the column as well.

    The diagonal is 1; the row of an expert that no token chose is 0 (OLMoE, arXiv 2409.02060, section 5.2). Choosing
    by chance gives (K − 1)/(E − 1) beside the diagonal.

    >>> coactivation(np.array([[4, 1], [1, 2]])).tolist()
    [[1.0, 0.25], [0.5, 1.0]]
    """
    shares_EE: NDArray[np.float64] = together_EE / np.maximum(1, np.diagonal(together_EE))[:, None]
    return shares_EE


def top_tokens(tokens_EV: NDArray[Any], seen_V: NDArray[Any]) -> list[list[tuple[int, float, int]]]:
    """Per expert at most 8 of the tokens it attracts most: (id, share of its occurrences that chose it, occurrences).

    Only tokens that occur at least 10 times and go to the expert more often than a token does on average; the highest
    share first, of equals the more frequent token, then the lower id (the idea: OLMoE, section 5.4, "vocabulary
    specialization").
    """
    rows = []
    common_C = np.flatnonzero(seen_V >= MIN_OCCURRENCES)
    for tokens_V in tokens_EV:
        share_C = tokens_V[common_C] / seen_V[common_C]
        order_C = np.lexsort((common_C, -seen_V[common_C], -share_C))
        over = share_C > tokens_V.sum() / max(1, seen_V.sum())
        picked = [place for place in order_C.tolist() if over[place]][:TOP_TOKENS]
        rows.append([(int(common_C[p]), float(share_C[p]), int(seen_V[common_C[p]])) for p in picked])
    return rows
