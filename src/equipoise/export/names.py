"""The single name table: under which name Hugging Face keeps each of our tensors on disk, and in which family.

Not for: configuration fields (`translate`) or files (`write`). The names are the per-expert ones that transformers 4
and 5, vLLM and llama.cpp's converters all read; transformers 5 packs them in memory when it loads them.
"""

from __future__ import annotations

from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from equipoise.errors import IntegrityError
from equipoise.spec.model import DenseFFN, ModelConfig

Family = Literal["llama", "mixtral", "qwen2_moe"]
"""`model_type` in a config.json."""

SHARED_WIDTH: Final = 8
"""Width of the shared expert that Qwen2-MoE has and we do not, written as zeros: it adds exactly 0. A width of 0 loads
as well, but transformers 5 warns of it; kernels want a multiple of 8."""

_MODEL: Final = {
    "embed.weight": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
}
_UNTIED: Final = {"head.weight": "lm_head.weight"}
_BLOCK: Final = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.w_q": "self_attn.q_proj.weight",
    "attention.w_k": "self_attn.k_proj.weight",
    "attention.w_v": "self_attn.v_proj.weight",
    "attention.w_o": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
_FFN: Final[dict[Family, dict[str, str]]] = {
    "llama": {
        "ffn.w_gate": "mlp.gate_proj.weight",
        "ffn.w_up": "mlp.up_proj.weight",
        "ffn.w_down": "mlp.down_proj.weight",
    },
    "mixtral": {
        "ffn.router.weight": "block_sparse_moe.gate.weight",
        "ffn.experts.w_gate": "block_sparse_moe.experts.{e}.w1.weight",
        "ffn.experts.w_up": "block_sparse_moe.experts.{e}.w3.weight",
        "ffn.experts.w_down": "block_sparse_moe.experts.{e}.w2.weight",
    },
    "qwen2_moe": {
        "ffn.router.weight": "mlp.gate.weight",
        "ffn.experts.w_gate": "mlp.experts.{e}.gate_proj.weight",
        "ffn.experts.w_up": "mlp.experts.{e}.up_proj.weight",
        "ffn.experts.w_down": "mlp.experts.{e}.down_proj.weight",
    },
}


def family(model: ModelConfig) -> Family:
    """The family that computes what the model computes.

    Llama when dense. Mixtral divides the K weights by their sum, always; routers that do not are carried by Qwen2-MoE,
    whose `norm_topk_prob` says so (OLMoE and Qwen3-MoE have the flag too, but also norms on queries and keys).
    """
    if isinstance(model.ffn, DenseFFN):
        return "llama"
    return "mixtral" if model.ffn.renormalize else "qwen2_moe"


def places(model: ModelConfig) -> dict[str, str]:
    """Our parameter name → theirs, in the order of the model; `{e}` stands for the expert in a stacked tensor.

    >>> model = ModelConfig(num_layers=1, num_heads=1, d_model=2, vocab_size=5, ffn=DenseFFN(d_ff=8))
    >>> places(model)["blocks.0.ffn.w_up"]
    'model.layers.0.mlp.up_proj.weight'
    """
    table = dict(_MODEL)
    for layer in range(model.num_layers):
        for ours, theirs in (_BLOCK | _FFN[family(model)]).items():
            table[f"blocks.{layer}.{ours}"] = f"model.layers.{layer}.{theirs}"
    return table if model.tie_embeddings else table | _UNTIED


def their_tensors(model: ModelConfig, ours: dict[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
    """Our tensors by parameter name → theirs, one per expert, contiguous; values and layouts are the same.

    Raises IntegrityError when `ours` lacks a tensor of the model or holds one that has no place in the family.
    """
    table = places(model)
    missing, homeless = sorted(table.keys() - ours.keys()), sorted(ours.keys() - table.keys())
    if missing or homeless:
        fault = f"{missing[0]} is missing" if missing else f"{homeless[0]} has no place in {family(model)}"
        raise IntegrityError(f"model.safetensors: {fault}; expected the {len(table)} tensors of the run's model")
    theirs: dict[str, NDArray[np.float32]] = {}
    for name, place in table.items():
        if "{e}" in place:
            theirs |= {place.format(e=e): np.ascontiguousarray(expert) for e, expert in enumerate(ours[name])}
        else:
            theirs[place] = np.ascontiguousarray(ours[name])
    return theirs | (_zeros(model) if family(model) == "qwen2_moe" else {})


def _zeros(model: ModelConfig) -> dict[str, NDArray[np.float32]]:
    """What Qwen2-MoE has beyond our model, per block: a shared expert, and the gate its output is multiplied with."""
    D, F = model.d_model, SHARED_WIDTH
    shapes = {
        "shared_expert.gate_proj": (F, D),
        "shared_expert.up_proj": (F, D),
        "shared_expert.down_proj": (D, F),
        "shared_expert_gate": (1, D),
    }
    return {
        f"model.layers.{layer}.mlp.{name}.weight": np.zeros(shape, np.float32)
        for layer in range(model.num_layers)
        for name, shape in shapes.items()
    }
