"""How much a paired gap would move if other validation documents had been drawn: a bootstrap over documents.

A second interval beside the t interval, and of another thing: the runs are held fixed and only documents are resampled,
so it says nothing about other seeds. Not for: verdicts, which rest on seeds alone.

Shapes: U units, D documents, G gaps, R resamples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from equipoise.rng import stream

Array = NDArray[np.float64]
Losses = Mapping[str, NDArray[Any]]
"""The arrays of a run's `val_losses.safetensors`."""

RESAMPLES: Final = 2000
"""Resamples of the documents: the ends of a 95 % interval are then order statistics 50 and 1950."""
HELD: Final = 2_000_000
"""Document counts held at once, 16 MB: resamples are drawn in blocks of so many."""
LOSS_ARRAYS: Final = {"val_loss": "final_loss_U", "best_val_loss": "best_loss_U"}
"""Metric → array. Bits per byte leave the end of a text out, which the losses per unit do not tell apart."""
UNITS: Final = ("unit_tokens_U", "unit_document_U")


def document_interval(
    nats_DG: NDArray[Any], tokens_D: NDArray[Any], confidence: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[Array, Array]:
    """Ends of the percentile interval of Σ nats ÷ Σ tokens, [G] each, over documents drawn with replacement.

    Every gap sees the same draws (stream purpose `bootstrap`). A document counts as many tokens as it has: a ratio of
    sums (Efron & Tibshirani 1993, An Introduction to the Bootstrap, section 13.3). Raises ValueError below two
    documents.
    """
    num = len(tokens_D)
    if num < 2:
        raise ValueError(f"documents: {num} is not accepted; expected 2 or more")
    both = np.column_stack([nats_DG, tokens_D]).astype(np.float64)
    draw = stream(seed, "bootstrap")
    block = max(1, HELD // num)
    ratios = []
    for start in range(0, resamples, block):
        size = min(block, resamples - start)
        picked = draw.integers(0, num, size=(size, num)) + num * np.arange(size)[:, None]
        counts_RD = np.bincount(picked.reshape(-1), minlength=size * num).reshape(size, num)
        sums = counts_RD @ both
        ratios.append(sums[:, :-1] / sums[:, -1:])
    tail = (1 - confidence) / 2
    low, high = np.quantile(np.concatenate(ratios), [tail, 1 - tail], axis=0)
    return low, high


def with_sampling(
    gaps: Sequence[Mapping[str, Any]], losses: Mapping[tuple[str, int, int], Losses], confidence: float
) -> list[dict[str, Any]]:
    """Rows of gaps with `validation_sampling`: the interval over documents of the mean over the row's seeds.

    `losses` maps (arm, budget, seed) to a run's arrays. None for bits per byte, without a seed, below two documents,
    and where two runs of a row were not scored on the same units.
    """
    kinds = {key: own for key, own in losses.items() if {*UNITS, *LOSS_ARRAYS.values()} <= own.keys()}
    units = next(iter(kinds.values()), None)
    usable = {key for key, own in kinds.items() if units and all(np.array_equal(own[u], units[u]) for u in UNITS)}
    places, columns = [], []
    for place, row in enumerate(gaps):
        pairs = [[(row[side], row["budget"], int(seed)) for side in ("left", "right")] for seed in row["per_seed"]]
        if row["metric"] in LOSS_ARRAYS and pairs and all(key in usable for pair in pairs for key in pair):
            name = LOSS_ARRAYS[row["metric"]]
            differences = [kinds[left][name] - kinds[right][name] for left, right in pairs]
            columns.append(np.mean(differences, axis=0))
            places.append(place)
    found: dict[int, dict[str, Any]] = {}
    if units is not None and columns:
        documents, document_U = np.unique(units["unit_document_U"], return_inverse=True)
        tokens_D = np.bincount(document_U, units["unit_tokens_U"])
        nats_DG = np.column_stack([np.bincount(document_U, column) for column in columns])
        if len(documents) > 1:
            low, high = document_interval(nats_DG, tokens_D, confidence)
            facts = {"confidence": confidence, "num_documents": len(documents), "resamples": RESAMPLES}
            found = {
                place: {"ci_low": float(low[column]), "ci_high": float(high[column]), **facts}
                for column, place in enumerate(places)
            }
    return [{**row, "validation_sampling": found.get(place)} for place, row in enumerate(gaps)]
