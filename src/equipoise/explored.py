"""What `explorer.json` of a run holds, as it is read back: checked through and through, because a page shows all of it.

Not for: making it (`explore`, `specialisation`), or showing it (`report.explorer`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from equipoise.config import config, dump, load
from equipoise.errors import ConfigError, IntegrityError
from equipoise.files import read_json
from equipoise.spec.model import ModelConfig

ByToken = tuple[tuple[tuple[float, ...], ...], ...]
"""Numbers by layer, token and chosen expert."""


@config
class Story:
    """A text token by token."""

    tokens: tuple[str, ...]
    """As text; bytes that are no characters as escapes."""
    losses: tuple[float, ...]
    """Nats of each token."""
    end_loss: float | None
    """Nats of the end after them; None where the text is cut."""
    experts: tuple[tuple[tuple[int, ...], ...], ...]
    """By layer and token, in the router's order; empty of a dense model."""
    weights: ByToken
    """Of these experts."""

    def __post_init__(self) -> None:
        counts = {"losses": len(self.losses)}
        counts |= {f"experts of layer {layer}": len(row) for layer, row in enumerate(self.experts)}
        counts |= {f"weights of layer {layer}": len(row) for layer, row in enumerate(self.weights)}
        for name, count in counts.items():
            if count != len(self.tokens):
                raise ValueError(f"{name}: {count} is not accepted; expected {len(self.tokens)}, one a token")


@config
class TopToken:
    """A token that an expert attracts."""

    token: str
    """As text."""
    share: float
    """Of its occurrences, those that chose the expert; 0 to 1."""
    count: int
    """Its occurrences."""


@config
class LayerUse:
    """What the experts of a layer are used for, over the final evaluation."""

    coactivation: tuple[tuple[float, ...], ...]
    """[E, E] of the tokens that chose the expert of the row, the share that chose that of the column as well."""
    top_tokens: tuple[tuple[TopToken, ...], ...]
    """Per expert."""


@config
class ExplorerRecord:
    """The whole file."""

    stories: tuple[Story, ...]
    """Beginnings of validation documents."""
    layers: tuple[LayerUse, ...]
    """Of a routed model, one a layer; empty of a dense one."""


def read_explorer(path: Path, model: ModelConfig) -> dict[str, Any]:
    """The content of an `explorer.json` as plain values; IntegrityError when it is not one of a run of `model`."""
    try:
        record = load(ExplorerRecord, read_json(path))
    except ConfigError as error:
        raise IntegrityError(f"{path.name}: {str(error).splitlines()[0]}") from None
    num_layers, num_experts, top_k = (
        (model.num_layers, model.ffn.num_experts, model.ffn.top_k) if model.ffn.kind == "moe" else (0, 0, 0)
    )
    shape = [(len(layer.coactivation), len(layer.top_tokens)) for layer in record.layers]
    square = all(len(row) == num_experts for layer in record.layers for row in layer.coactivation)
    if shape != [(num_experts, num_experts)] * num_layers or not square:
        raise IntegrityError(f"{path.name}: layers: expected {num_layers} of {num_experts} experts")
    for story in record.stories:
        chosen = [token for layer in story.experts for token in layer]
        weighed = [len(token) for layer in story.weights for token in layer]
        fits = len(story.experts) == len(story.weights) == num_layers and {*map(len, chosen), *weighed} <= {top_k}
        if not fits or not all(0 <= expert < num_experts for token in chosen for expert in token):
            raise IntegrityError(
                f"{path.name}: stories: expected {top_k} of {num_experts} experts in {num_layers} layers"
            )
    return dict(dump(record))
