"""What a model makes of text: loss and routing on validation windows, loss of any text, samples. Never trains.

Not for: deciding when to evaluate (`train`) or what a loss means for a claim (`verdict`).

Shapes: W windows, B and S rows and positions, T = tokens of one forward pass, E experts, K top-k, U units.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from equipoise.data.packing import EvalWindows
from equipoise.data.tokenizer import TextTokenizer
from equipoise.errors import DataError, DivergedError
from equipoise.model.transformer import Transformer, generate, token_losses
from equipoise.routing import diagnose

FORWARD_TOKENS: Final = 2_048
"""Tokens of one evaluation forward pass: few enough that windows in it are of like length, and padding is left out."""


class Stopped(Exception):
    """Raised out of an evaluation when `should_stop` says so; nothing was written."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Losses of one pass over evaluation windows."""

    unit_losses_U: np.ndarray
    """Sum of token losses per unit, float64 nats."""
    loss: float
    """Nats per target token, over all targets (a mean of tokens, never of means)."""
    bpb: float
    """Bits per byte of raw text: losses of text tokens only, end-of-text left out of numerator and denominator."""
    routing: list[dict[str, Any]]
    """Diagnostics per layer (see `equipoise.routing`); empty for a dense model."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Evaluation windows of one forward pass, cut where the longest of them ends."""

    inputs_BS: np.ndarray
    """Token ids, int64; as the two below cut from the tables of `EvalWindows`."""
    targets_BS: np.ndarray
    """The ids that follow, int64."""
    units_BS: np.ndarray
    """Unit that each target belongs to, int64; −1 where padded."""
    windows_B: np.ndarray
    """Their numbers."""


@dataclass(frozen=True, kw_only=True)
class Scored:
    """What one forward pass over `Rows` gives."""

    losses_T: np.ndarray
    """Nats of every target, padding included, float64."""
    expert_ids_LTK: list[np.ndarray]
    """Per routed layer the experts of its real tokens, [real tokens, K]."""
    entropy_L: list[float | None]
    """Summed over real tokens; None, as `log_z_L`, of routers without probabilities."""
    log_z_L: list[float | None]


Scorer = Callable[[Transformer, Sequence[Rows], torch.dtype | None], list[Scored]]
"""Scores some passes, in their order; the dtype is that of autocast."""


@dataclass
class _LayerSums:
    """Running sums of one layer's routing over real tokens."""

    counts_E: np.ndarray
    top_k: int
    entropy: float | None = 0.0
    """None, as `log_z`, of a router without probabilities."""
    log_z: float | None = 0.0
    num_tokens: int = 0

    def add(self, ids_TK: np.ndarray, entropy: float | None, log_z: float | None) -> None:
        self.counts_E += np.bincount(ids_TK.ravel(), minlength=len(self.counts_E))
        self.num_tokens += len(ids_TK)
        if entropy is None or log_z is None or self.entropy is None or self.log_z is None:
            self.entropy = self.log_z = None
            return
        self.entropy += entropy
        self.log_z += log_z

    def diagnosed(self) -> dict[str, Any]:
        entropy, log_z = (None if v is None else v / self.num_tokens for v in (self.entropy, self.log_z))
        return diagnose(self.counts_E, entropy, log_z, self.top_k)


Watch = Callable[[np.ndarray, Sequence[np.ndarray]], None]
"""Told of every batch: the input ids [T] of its real tokens, and per routed layer the experts they chose, [T, K]."""


def watch_nothing(inputs_T: np.ndarray, expert_ids_LTK: Sequence[np.ndarray]) -> None:
    """The watch of an evaluation that nobody follows."""


def evaluate(
    model: Transformer,
    windows: EvalWindows,
    *,
    end_of_text: int,
    autocast: torch.dtype | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    watch: Watch = watch_nothing,
    scorer: Scorer | None = None,
    at_once: int = 1,
) -> Evaluation:
    """Score every window once, without dropping a token; padding counts nowhere, and no bias moves.

    Windows of like length go together and are cut where the longest of them ends, so that padding costs little.
    `autocast` is the compute dtype of the forward pass (None: float32); `watch` sees the same tokens in the same order
    for the same windows. `scorer` (None: `score_rows`) computes `at_once` passes at a time; how many changes no number.
    Raises `Stopped` between them when `should_stop()` is true, and DivergedError when a loss is not finite.
    """
    unit_losses_U = np.zeros(windows.num_units)
    text_loss = 0.0
    ffn = model.config.ffn
    num_experts, top_k = (ffn.num_experts, ffn.top_k) if ffn.kind == "moe" else (0, 0)
    sums: list[_LayerSums] = []
    num_windows, seq_len = windows.inputs_WS.shape
    num = max(1, FORWARD_TOKENS // seq_len)
    lengths_W = seq_len - np.argmax(windows.unit_WS[:, ::-1] >= 0, axis=1)
    by_length_W = np.argsort(-lengths_W, kind="stable")
    batches = [by_length_W[start : start + num] for start in range(0, num_windows, num)]
    for start in range(0, len(batches), at_once):
        if should_stop():
            raise Stopped
        together = [_rows(windows, batch_B, lengths_W[batch_B[0]]) for batch_B in batches[start : start + at_once]]
        for rows, scored in zip(together, (scorer or score_rows)(model, together, autocast), strict=True):
            units_T = rows.units_BS.reshape(-1)
            real_T = units_T >= 0
            np.add.at(unit_losses_U, units_T[real_T], scored.losses_T[real_T])
            text_loss += float(scored.losses_T[real_T & (rows.targets_BS.reshape(-1) != end_of_text)].sum())
            if not sums:
                new = (np.zeros(num_experts, dtype=np.int64) for _ in scored.expert_ids_LTK)
                sums = [_LayerSums(counts_E=counts_E, top_k=top_k) for counts_E in new]
            layers = zip(sums, scored.expert_ids_LTK, scored.entropy_L, scored.log_z_L, strict=True)
            for layer, ids_TK, entropy, log_z in layers:
                layer.add(ids_TK, entropy, log_z)
            watch(rows.inputs_BS.reshape(-1)[real_T], scored.expert_ids_LTK)
    total = float(unit_losses_U.sum())
    if not math.isfinite(total):
        raise DivergedError("evaluation: the loss is not finite")
    return Evaluation(
        unit_losses_U=unit_losses_U,
        loss=total / windows.num_targets,
        bpb=text_loss / math.log(2) / windows.num_bytes,
        routing=[layer.diagnosed() for layer in sums],
    )


def _rows(windows: EvalWindows, batch_B: np.ndarray, length: int) -> Rows:
    tables = (windows.inputs_WS, windows.targets_WS, windows.unit_WS)
    inputs, targets, units = (table[batch_B, :length] for table in tables)
    return Rows(inputs_BS=inputs, targets_BS=targets, units_BS=units, windows_B=batch_B)


@torch.no_grad()
def score_rows(model: Transformer, passes: Sequence[Rows], autocast: torch.dtype | None) -> list[Scored]:
    """Each of some passes, one after the other."""
    device = next(model.parameters()).device
    scored = []
    for rows in passes:
        targets_BS = torch.from_numpy(rows.targets_BS).to(device)
        with torch.autocast(device.type, dtype=autocast) if autocast else nullcontext():
            inputs_BS = torch.from_numpy(rows.inputs_BS).to(device)
            output = model(inputs_BS, windows_B=torch.from_numpy(rows.windows_B).to(device))
            losses_T = token_losses(model, output, targets_BS).double().cpu().numpy()
        real_T = torch.from_numpy(rows.units_BS.reshape(-1) >= 0).to(device)
        scored.append(
            Scored(
                losses_T=losses_T,
                expert_ids_LTK=[routing.expert_ids_TK[real_T].cpu().numpy() for routing in output.routing],
                entropy_L=[_summed(routing.probs_TE, real_T, torch.special.entr) for routing in output.routing],
                log_z_L=[_summed(routing.logits_TE, real_T, _logsumexp) for routing in output.routing],
            )
        )
    return scored


def _summed(
    table_TE: torch.Tensor | None, real_T: torch.Tensor, of: Callable[[torch.Tensor], torch.Tensor]
) -> float | None:
    """The sum of a function of a table's real rows, in float64; None without a table."""
    return None if table_TE is None else float(of(table_TE[real_T].double()).sum())


def _logsumexp(logits_TE: torch.Tensor) -> torch.Tensor:
    return torch.logsumexp(logits_TE, dim=-1)


@dataclass(frozen=True, kw_only=True)
class TextScore:
    """Losses of documents, each scored by itself."""

    num_documents: int
    """Documents with at least one character."""
    num_tokens: int
    """Targets: every token once, and one end-of-text per document."""
    num_bytes: int
    """UTF-8 bytes of the documents as they were read."""
    loss: float
    """Nats per target, ends included."""
    bpb: float
    """Bits per byte of raw text: losses of text tokens only, ends left out of numerator and denominator."""


@torch.no_grad()
def score_text(
    model: Transformer,
    tokenizer: TextTokenizer,
    texts: Iterable[str],
    *,
    context: int,
    on_progress: Callable[[int], None] = lambda _: None,
) -> TextScore:
    """Score documents in float32: a document's loss depends on the model and its own text, on nothing beside it.

    A window begins with end-of-text as input and holds one document or, of one longer than the `context` tokens the
    model was trained on, the next `context` targets. (`evaluate` packs several documents into a window, as training
    does; what stands before a document there moves its loss a little.) Empty texts are passed over; `on_progress` is
    told the targets scored so far. Raises DataError when there is no text, DivergedError when a loss is not finite.
    """
    num_documents = num_tokens = num_bytes = width = 0
    nats = np.zeros(2)
    rows: list[np.ndarray] = []
    for text in filter(None, texts):
        ids = np.append(tokenizer.encode_arrays([text])[0], tokenizer.eot_id)
        num_documents, num_bytes = num_documents + 1, num_bytes + len(text.encode())
        for unit in np.split(ids, range(context, len(ids), context)):
            width = max(width, len(unit))
            if rows and (len(rows) + 1) * width > FORWARD_TOKENS:
                nats += _nats(model, rows, tokenizer.eot_id)
                on_progress(num_tokens)
                rows, width = [], len(unit)
            rows.append(unit)
            num_tokens += len(unit)
    if not rows:
        raise DataError("no text; expected at least one document that is not empty")
    nats += _nats(model, rows, tokenizer.eot_id)
    text_nats, end_nats = nats.tolist()
    if not math.isfinite(text_nats + end_nats):
        raise DivergedError("scoring: the loss is not finite")
    return TextScore(
        num_documents=num_documents,
        num_tokens=num_tokens,
        num_bytes=num_bytes,
        loss=(text_nats + end_nats) / num_tokens,
        bpb=text_nats / math.log(2) / num_bytes,
    )


def _nats(model: Transformer, rows: list[np.ndarray], end_of_text: int) -> np.ndarray:
    """Summed losses of targets, one row of ids a window: [text tokens, ends], float64."""
    targets_BS = np.full((len(rows), max(len(row) for row in rows)), end_of_text, np.int64)
    real_BS = np.zeros(targets_BS.shape, bool)
    for place, row in enumerate(rows):
        targets_BS[place, : len(row)] = row
        real_BS[place, : len(row)] = True
    inputs_BS = np.full_like(targets_BS, end_of_text)
    inputs_BS[:, 1:] = targets_BS[:, :-1]
    device = next(model.parameters()).device
    output = model(torch.from_numpy(inputs_BS).to(device))
    losses_BS = token_losses(model, output, torch.from_numpy(targets_BS).to(device)).double().cpu().numpy()
    losses_BS = losses_BS.reshape(targets_BS.shape)
    text_BS = targets_BS != end_of_text
    return np.array([losses_BS[real_BS & text_BS].sum(), losses_BS[real_BS & ~text_BS].sum()])


def sample(
    model: Transformer,
    tokenizer: TextTokenizer,
    prompt: str,
    num_tokens: int,
    *,
    context: int,
    temperature: float = 0.0,
    generator: np.random.Generator | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> str:
    """`prompt` continued by at most `num_tokens` tokens, up to the end of the text; greedy at temperature 0.

    The context begins with the end-of-text id, as every training document does, and never grows beyond the `context`
    tokens the model was trained on. Raises `Stopped` when `should_stop()` is true between tokens.
    """
    prompt_ids = [tokenizer.eot_id, *tokenizer.encode(prompt)]
    stopped = False

    def stop() -> bool:
        nonlocal stopped
        stopped = stopped or should_stop()
        return stopped

    written = generate(
        model,
        prompt_ids,
        num_tokens,
        stop_id=tokenizer.eot_id,
        context=context,
        temperature=temperature,
        generator=generator,
        should_stop=stop,
    )
    if stopped:
        raise Stopped
    return prompt + tokenizer.decode(written)
