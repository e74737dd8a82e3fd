"""What an update needs of a device's memory, and how many bytes of weights it moves: counted from the spec alone.

Where the numbers come from, and how far they are from what was measured: docs/scale.md. Not for: noticing on a CPU that
there is no memory (`micro`), or the time an update takes (`costs`).

Symbols: D d_model, F width of the FFN or of one expert, E experts, K top-k, V vocabulary, L layers, P parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from equipoise.accounting import count_params
from equipoise.hardware import Hardware
from equipoise.micro import update_bytes
from equipoise.spec.model import DenseFFN, ModelConfig
from equipoise.spec.recipe import Recipe

Precision = Literal["bfloat16", "float32"]
STATE_BYTES: Final = 16
"""A parameter's weight, gradient and two moments of AdamW, each float32, whatever is computed in."""
CHECKPOINT_BYTES: Final = 12
"""A parameter in a checkpoint: weight and two moments in float32."""
PASS_TRAFFIC: Final = {"bfloat16": 22, "float32": 20}
"""Bytes moved for a parameter in a forward and backward pass. bfloat16: read and copied (4 + 2), read forward and
backward (2 + 2), its gradient written and read (2 + 2) and added up in float32 (4 + 4). float32: read forward and
backward (4 + 4), its gradient written (4) and added up (4 + 4)."""
UPDATE_TRAFFIC: Final = 40
"""Bytes moved for a parameter once an update: its gradient for the norm and the clip (4 + 4 + 4), weight, gradient and
moments read (16), weight and moments written (12)."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes of memory that one process of a run needs at the peak of an update."""

    state: int
    """Weights, gradients and moments of all parameters, of the experts no token chooses too."""
    copies: int
    """Weights in the dtype of the products."""
    activations: int
    """What a forward pass keeps for the backward pass, with the logits and, on a CPU, the process itself."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.state + self.copies + self.activations


def precision(recipe: Recipe, hardware: Hardware) -> Precision:
    """What products are computed in there, as `recipe.dtype` says: `auto` is bfloat16 on a GPU."""
    wants_half = recipe.dtype == "bfloat16" or (recipe.dtype == "auto" and hardware.bfloat16_flops is not None)
    return "bfloat16" if wants_half else "float32"


def footprint(model: ModelConfig, recipe: Recipe, hardware: Hardware, rows: int) -> Footprint:
    """Memory of one process with `rows` sequences a forward pass; on a CPU that of `micro.update_bytes`."""
    params = count_params(model)
    state = STATE_BYTES * params.total
    if hardware.cores is not None:
        return Footprint(state=state, copies=0, activations=update_bytes(model, recipe, rows) - state)
    half = precision(recipe, hardware) == "bfloat16"
    tokens = rows * recipe.seq_len
    return Footprint(
        state=state,
        copies=2 * params.total if half else 4 * params.attention,
        activations=tokens * token_bytes(model, half=half),
    )


def token_bytes(model: ModelConfig, *, half: bool) -> int:
    """What the plain kernels keep of a token of a forward pass until its backward pass, in bytes.

    Per layer, in bfloat16: the inputs and results of two norms in float32 (16·D), nine vectors of the model's width in
    bfloat16 (18·D), four of the FFN's (8·F a dense layer, 8·F of each of K experts and of the shared ones); of a routed
    layer the gathered inputs (2·K·D) and outputs (4·K·D), the input of shared experts (2·D), and the numbers of the
    choice (20·E + 24·K). In float32: 48·D, 16·F and 8·K·D. Outside the layers 14·D or 16·D; the logits, with their
    gradient, 10·V or 12·V at the peak.

    >>> dense = ModelConfig(num_layers=2, num_heads=1, d_model=8, vocab_size=100, ffn=DenseFFN(d_ff=16))
    >>> token_bytes(dense, half=True)
    1912
    """
    ffn, D = model.ffn, model.d_model
    if isinstance(ffn, DenseFFN):
        used, chosen, router = 1, 0, 0
    else:
        used, chosen = ffn.top_k + ffn.num_shared_experts, ffn.top_k
        router = 20 * ffn.num_experts + 24 * chosen + (2 * D if half and ffn.num_shared_experts else 0)
    if half:
        layer = 34 * D + 8 * used * ffn.width + 6 * chosen * D + router
        return model.num_layers * layer + 14 * D + 10 * model.vocab_size
    layer = 48 * D + 16 * used * ffn.width + 8 * chosen * D + router
    return model.num_layers * layer + 16 * D + 12 * model.vocab_size


def traffic_bytes(model: ModelConfig, num_passes: int, dtype: Precision) -> int:
    """Bytes of weights, gradients and moments that an update of so many forward and backward passes moves at least.

    Of all parameters: as soon as some token of a pass chooses it, an expert's weights are read for it.
    """
    return count_params(model).total * (num_passes * PASS_TRAFFIC[dtype] + UPDATE_TRAFFIC)
