"""Windows over token arrays: training batches as a pure function of (seed, step), and evaluation windows.

Not for: making or opening token files (`dataset`). Letters: B sequences of a batch, W windows, S positions of a
window, U units of an evaluation.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from equipoise.data.corpora.source import Split
from equipoise.data.dataset import Dataset
from equipoise.data.tokenfile import CHECKED_AT_ONCE
from equipoise.errors import DataError
from equipoise.rng import stream

PADDING = -1
"""In `EvalWindows.unit_WS`: a position that is no target."""


# ------------------------------------------------------------------------------------------------ training


def num_windows(num_tokens: int, seq_len: int) -> int:
    """Non-overlapping training windows in a token array; a window needs one token more than it has inputs.

    >>> num_windows(9, 4), num_windows(8, 4)
    (2, 1)
    """
    return max(0, (num_tokens - 1) // seq_len)


def epochs(budget_tokens: int, num_tokens: int, seq_len: int) -> float:
    """How often a run of `budget_tokens` sees the training windows, at least one of which must exist."""
    return budget_tokens / (num_windows(num_tokens, seq_len) * seq_len)


def check_windows(dataset: Dataset, seq_len: int) -> None:
    """Raises DataError when the train split does not fill one window or an evaluation split holds nothing."""
    count = len(dataset.tokens("train"))
    if num_windows(count, seq_len) < 1:
        raise DataError(
            f"{dataset.directory}: {count} training tokens; expected at least {seq_len + 1}, one window of "
            f"recipe.seq_len = {seq_len} and its last target"
        )
    splits: tuple[Split, ...] = ("selection", "validation")
    for split in splits:
        if not len(dataset.tokens(split)):
            raise DataError(f"{dataset.directory}: the {split} split is empty; expected at least one document")


@lru_cache(maxsize=4)  # a memo of a pure function: a run walks through an epoch, and two at its border
def _order(num: int, seed: int, epoch: int) -> NDArray[np.int64]:
    order = stream(seed, "data", epoch).permutation(num)
    order.setflags(write=False)
    return order


def batch(
    tokens: NDArray[np.unsignedinteger], seq_len: int, num_sequences: int, seed: int, step: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The batch of update `step` (from 0): inputs_BS and targets_BS, int64; a pure function of its arguments.

    Window i of the array has inputs `tokens[i*S : i*S + S]` and the targets one further. An epoch is a seeded
    permutation of all windows; sequence j of step t is number t·B + j of the epochs laid end to end, so a batch may run
    across the border. Raises DataError when the array holds no window.
    """
    num = num_windows(len(tokens), seq_len)
    if num < 1:
        raise DataError(f"{len(tokens)} tokens; expected at least {seq_len + 1} for a window of {seq_len}")
    numbers_B = np.arange(step * num_sequences, (step + 1) * num_sequences)
    epochs_B, places_B = np.divmod(numbers_B, num)
    windows_B = np.empty(num_sequences, np.int64)
    for epoch in range(int(epochs_B[0]), int(epochs_B[-1]) + 1):
        here_B = epochs_B == epoch
        windows_B[here_B] = _order(num, seed, epoch)[places_B[here_B]]
    positions = windows_B[:, None] * seq_len + np.arange(seq_len + 1)
    window = tokens[positions].astype(np.int64)
    return np.ascontiguousarray(window[:, :-1]), np.ascontiguousarray(window[:, 1:])


# ------------------------------------------------------------------------------------------------ evaluation


@dataclass(frozen=True, kw_only=True)
class Floor:
    """The best reachable loss on the documents of some evaluation windows, known because a grammar wrote them."""

    loss: float
    """nats/token: −Σ (ln p(text) + ln p(end | text)) over all targets, end-of-text included."""
    bpb: float
    """Bits per byte of raw text: −Σ ln p(text) / ln 2 over all bytes; the end counts on neither side."""
    loss_se: float | None
    """Standard error of `loss` over documents (of a ratio, by the delta method); None for a single document."""
    bpb_se: float | None
    """Standard error of `bpb`, likewise."""
    num_documents: int
    """Documents it is over."""


@dataclass(frozen=True, kw_only=True)
class EvalWindows:
    """Windows in which every token of the chosen documents is a target exactly once."""

    inputs_WS: NDArray[np.int64]
    """Inputs; each row begins with end-of-text."""
    targets_WS: NDArray[np.int64]
    """Targets; end-of-text where padded."""
    unit_WS: NDArray[np.int64]
    """Unit each target belongs to, or −1 for padding: those positions count for nothing."""
    num_units: int
    """U. A unit is a document, or one window of a document longer than a window."""
    unit_tokens_U: NDArray[np.int64]
    """Targets of each unit; a document's end-of-text is one of them."""
    unit_bytes_U: NDArray[np.int64]
    """Bytes of raw text of each unit; end-of-text counts none."""
    unit_document_U: NDArray[np.int64]
    """Index of each unit's document in the split; rising."""
    num_targets: int
    """Sum of `unit_tokens_U`."""
    num_bytes: int
    """Sum of `unit_bytes_U`."""
    floor: Floor | None
    """Best reachable loss, when a grammar wrote the split and each of its documents fits a window."""


def eval_windows(dataset: Dataset, split: Split, seq_len: int, max_targets: int, seed: int) -> EvalWindows:
    """The windows that evaluate `split`: units chosen by seed until `max_targets` (0 = all) would be passed.

    At least one unit is chosen. A document of up to S targets stays whole; a longer one is cut into consecutive units
    of S and a rest. Units are packed into windows tightly, the longest first; each is preceded by end-of-text, the
    input of the window's first position or the last target of the unit before it. The result depends on the arguments
    and the data alone.
    """
    tokens = dataset.tokens(split)
    ends_N = _ends(tokens, dataset.eot_id)
    starts_N = np.concatenate(([0], ends_N[:-1]))
    starts_U, lengths_U, documents_U = _cut(starts_N, ends_N, seq_len)
    if max_targets:
        chosen = _choose(lengths_U, max_targets, seed)
        starts_U, lengths_U, documents_U = starts_U[chosen], lengths_U[chosen], documents_U[chosen]
    inputs_WS, targets_WS, unit_WS = _fill(tokens, starts_U, lengths_U, seq_len, dataset.eot_id)
    is_target_WS = unit_WS != PADDING
    unit_bytes_U = np.zeros(len(starts_U), np.int64)
    np.add.at(unit_bytes_U, unit_WS[is_target_WS], dataset.token_bytes[targets_WS[is_target_WS]])
    floor = None
    log_probs = dataset.floor_log_probs(split)
    if log_probs is not None and int((ends_N - starts_N).max()) <= seq_len:
        text_N, end_N = log_probs
        floor = _floor(text_N[documents_U], end_N[documents_U], lengths_U, unit_bytes_U)
    return EvalWindows(
        inputs_WS=inputs_WS,
        targets_WS=targets_WS,
        unit_WS=unit_WS,
        num_units=len(starts_U),
        unit_tokens_U=lengths_U,
        unit_bytes_U=unit_bytes_U,
        unit_document_U=documents_U,
        num_targets=int(lengths_U.sum()),
        num_bytes=int(unit_bytes_U.sum()),
        floor=floor,
    )


def _ends(tokens: NDArray[np.unsignedinteger], eot_id: int) -> NDArray[np.int64]:
    """One past each document's end-of-text; only some of a large split is looked at, and in memory, at a time."""
    blocks = range(0, len(tokens), CHECKED_AT_ONCE)
    ends = [np.flatnonzero(tokens[start : start + CHECKED_AT_ONCE] == eot_id) + (start + 1) for start in blocks]
    return np.concatenate(ends) if ends else np.zeros(0, np.int64)


def _cut(
    starts_N: NDArray[np.int64], ends_N: NDArray[np.int64], seq_len: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Start, length and document of every unit, in reading order."""
    lengths_N = ends_N - starts_N
    pieces_N = -(-lengths_N // seq_len)
    documents_U = np.repeat(np.arange(len(starts_N)), pieces_N)
    first_N = np.cumsum(pieces_N) - pieces_N
    piece_U = np.arange(len(documents_U)) - first_N[documents_U]
    starts_U = starts_N[documents_U] + piece_U * seq_len
    lengths_U = np.minimum(ends_N[documents_U] - starts_U, seq_len)
    return starts_U, lengths_U, documents_U


def _choose(lengths_U: NDArray[np.int64], max_targets: int, seed: int) -> NDArray[np.int64]:
    """Indices, rising, of the first units of a seeded order that together hold at most `max_targets`; at least one."""
    order = stream(seed, "eval").permutation(len(lengths_U))
    count = int(np.searchsorted(np.cumsum(lengths_U[order]), max_targets, side="right"))
    return np.sort(order[: max(1, count)])


def _fill(
    tokens: NDArray[np.unsignedinteger],
    starts_U: NDArray[np.int64],
    lengths_U: NDArray[np.int64],
    seq_len: int,
    eot_id: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """inputs_WS, targets_WS, unit_WS: best-fit packing, the longest unit first, equal lengths in reading order."""
    window_U = np.empty(len(starts_U), np.int64)
    offset_U = np.empty(len(starts_U), np.int64)
    with_room: list[deque[int]] = [deque() for _ in range(seq_len + 1)]  # windows by the positions still free in them
    num = 0
    for unit in np.argsort(-lengths_U, kind="stable").tolist():
        length = int(lengths_U[unit])
        room = next((free for free in range(length, seq_len) if with_room[free]), seq_len)
        if room < seq_len:
            window = with_room[room].popleft()
        else:
            window, num = num, num + 1
        window_U[unit], offset_U[unit] = window, seq_len - room
        with_room[room - length].append(window)
    targets_WS = np.full((num, seq_len), eot_id, np.int64)
    unit_WS = np.full((num, seq_len), PADDING, np.int64)
    total = int(lengths_U.sum())
    unit_T = np.repeat(np.arange(len(starts_U)), lengths_U)
    inside_T = np.arange(total) - (np.cumsum(lengths_U) - lengths_U)[unit_T]
    row_T, column_T = window_U[unit_T], offset_U[unit_T] + inside_T
    targets_WS[row_T, column_T] = tokens[starts_U[unit_T] + inside_T]
    unit_WS[row_T, column_T] = unit_T
    inputs_WS = np.full_like(targets_WS, eot_id)
    inputs_WS[:, 1:] = targets_WS[:, :-1]
    return inputs_WS, targets_WS, unit_WS


def _floor(
    log_text_U: NDArray[np.float64],
    log_end_U: NDArray[np.float64],
    tokens_U: NDArray[np.int64],
    bytes_U: NDArray[np.int64],
) -> Floor:
    loss, loss_se = _ratio(-(log_text_U + log_end_U), tokens_U)
    bpb, bpb_se = _ratio(-log_text_U / math.log(2), bytes_U)
    return Floor(loss=loss, bpb=bpb, loss_se=loss_se, bpb_se=bpb_se, num_documents=len(tokens_U))


def _ratio(above_U: NDArray[np.float64], below_U: NDArray[np.int64]) -> tuple[float, float | None]:
    """Σ above ÷ Σ below, and its standard error √(n/(n−1) · Σ (above − ratio·below)²) ÷ Σ below over n documents."""
    below = float(below_U.sum())
    ratio = math.fsum(above_U) / below
    n = len(above_U)
    if n < 2:
        return ratio, None
    spread = math.fsum((above_U - ratio * below_U) ** 2)
    return ratio, math.sqrt(n / (n - 1) * spread) / below
