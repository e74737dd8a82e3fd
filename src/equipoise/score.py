"""What a model makes of text: loss and routing on validation windows, loss of any text, samples. Never trains.

Not for: deciding when to evaluate (`train`) or what a loss means for a claim (`verdict`).

Shapes: W windows, B and S rows and positions, T = tokens of one forward pass, E experts, K top-k, U units.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch

from equipoise.data.packing import EvalWindows
from equipoise.data.tokenizer import TextTokenizer
from equipoise.errors import DataError, DivergedError
from equipoise.model.moe import Routing
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


@dataclass
class _LayerSums:
    """Running sums of one layer's routing over real tokens."""

    counts_E: np.ndarray
    top_k: int
    entropy: float | None = 0.0
    """None, as `log_z`, of a router without probabilities."""
    log_z: float | None = 0.0
    num_tokens: int = 0
    newest_TK: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    """Choices of the tokens added last."""

    def add(self, routing: Routing, real_T: torch.Tensor) -> None:
        self.newest_TK = routing.expert_ids_TK[real_T].cpu().numpy()
        self.counts_E += np.bincount(self.newest_TK.ravel(), minlength=len(self.counts_E))
        self.num_tokens += len(self.newest_TK)
        if routing.probs_TE is None or routing.logits_TE is None or self.entropy is None or self.log_z is None:
            self.entropy = self.log_z = None
            return
        self.entropy += float(torch.special.entr(routing.probs_TE[real_T].double()).sum())
        self.log_z += float(torch.logsumexp(routing.logits_TE[real_T].double(), dim=-1).sum())

    def diagnosed(self) -> dict[str, Any]:
        entropy, log_z = (None if v is None else v / self.num_tokens for v in (self.entropy, self.log_z))
        return diagnose(self.counts_E, entropy, log_z, self.top_k)


Watch = Callable[[np.ndarray, Sequence[np.ndarray]], None]
"""Told of every batch: the input ids [T] of its real tokens, and per routed layer the experts they chose, [T, K]."""


def watch_nothing(inputs_T: np.ndarray, expert_ids_LTK: Sequence[np.ndarray]) -> None:
    """The watch of an evaluation that nobody follows."""


@torch.no_grad()
def evaluate(
    model: Transformer,
    windows: EvalWindows,
    *,
    end_of_text: int,
    autocast: torch.dtype | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    watch: Watch = watch_nothing,
) -> Evaluation:
    """Score every window once, without dropping a token; padding counts nowhere, and no bias moves.

    Windows of like length go together and are cut where the longest of them ends, so that padding costs little.
    `autocast` is the compute dtype of the forward pass (None: float32); `watch` sees the same tokens in the same order
    for the same windows. Raises `Stopped` between batches when `should_stop()` is true, and DivergedError when a loss
    is not finite.
    """
    device = next(model.parameters()).device
    num_windows, seq_len = windows.inputs_WS.shape
    rows = max(1, FORWARD_TOKENS // seq_len)
    unit_losses_U = np.zeros(windows.num_units)
    text_loss = 0.0
    ffn = model.config.ffn
    num_experts, top_k = (ffn.num_experts, ffn.top_k) if ffn.kind == "moe" else (0, 0)
    sums: list[_LayerSums] = []
    lengths_W = seq_len - np.argmax(windows.unit_WS[:, ::-1] >= 0, axis=1)
    by_length_W = np.argsort(-lengths_W, kind="stable")
    for start in range(0, num_windows, rows):
        if should_stop():
            raise Stopped
        batch_B = by_length_W[start : start + rows]
        inputs, targets, units = (
            table[batch_B, : lengths_W[batch_B[0]]]
            for table in (windows.inputs_WS, windows.targets_WS, windows.unit_WS)
        )
        targets_BS = torch.from_numpy(targets).to(device)
        units_T = units.reshape(-1)
        with torch.autocast(device.type, dtype=autocast) if autocast else nullcontext():
            inputs_BS = torch.from_numpy(inputs).to(device)
            output = model(inputs_BS, windows_B=torch.from_numpy(batch_B).to(device))
            losses_T = token_losses(model, output, targets_BS).double().cpu().numpy()
        real_T = units_T >= 0
        np.add.at(unit_losses_U, units_T[real_T], losses_T[real_T])
        text_loss += float(losses_T[real_T & (targets.reshape(-1) != end_of_text)].sum())
        if output.routing and not sums:
            sums = [_LayerSums(counts_E=np.zeros(num_experts, dtype=np.int64), top_k=top_k) for _ in output.routing]
        on_device_T = torch.from_numpy(real_T).to(device)
        for layer, routing in zip(sums, output.routing, strict=True):
            layer.add(routing, on_device_T)
        watch(inputs.reshape(-1)[real_T], [layer.newest_TK for layer in sums])
    total = float(unit_losses_U.sum())
    if not math.isfinite(total):
        raise DivergedError("evaluation: the loss is not finite")
    return Evaluation(
        unit_losses_U=unit_losses_U,
        loss=total / windows.num_targets,
        bpb=text_loss / math.log(2) / windows.num_bytes,
        routing=[layer.diagnosed() for layer in sums],
    )


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
