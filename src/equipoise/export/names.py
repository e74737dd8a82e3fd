"""The single name table: under which name Hugging Face keeps each of our tensors on disk, and in which family.

Not for: configuration fields (`translate`) or files (`write`). The names are the per-expert ones that transformers 4
and 5, vLLM and llama.cpp's converters all read; transformers 5 packs them in memory when it loads them.
"""

from __future__ import annotations

from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from equipoise.errors import ConfigError, IntegrityError
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
    whose `norm_topk_prob` says so (OLMoE and Qwen3-MoE have the flag too, but also norms on queries and keys). A frozen
    router is a router there. Raises ConfigError for what none of them computes: hash and random routers, shared experts
    without a gate.
    """
    ffn = model.ffn
    if isinstance(ffn, DenseFFN):
        return "llama"
    if not ffn.router_has_weights:
        raise ConfigError(
            f"ffn.router: {ffn.router!r} cannot be exported; expected 'learned' or 'frozen': Mixtral and Qwen2-MoE "
            "choose experts by router weights"
        )
    if ffn.num_shared_experts:
        raise ConfigError(
            f"ffn.num_shared_experts: {ffn.num_shared_experts} cannot be exported; expected 0: Mixtral has no shared "
            "expert, and Qwen2-MoE multiplies its own with a sigmoid gate"
        )
    return "mixtral" if ffn.renormalize else "qwen2_moe"


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
    """Our tensors by name → theirs, one per expert, contiguous; values and layouts are the same.

    The biases of a router balanced by them have no place in any family: zeros are left out. Raises ConfigError when one
    is not zero, IntegrityError when `ours` lacks a tensor of the model or holds one that has no place in the family.
    """
    table = places(model)
    if not isinstance(model.ffn, DenseFFN) and model.ffn.balance.kind == "bias":
        biases = [f"blocks.{layer}.ffn.router.bias" for layer in range(model.num_layers)]
        for name in biases:
            if name in ours and ours[name].any():
                raise ConfigError(
                    f"{name}: largest value {float(np.abs(ours[name]).max()):g} cannot be exported; expected zeros: "
                    f"balance.kind = 'bias' has moved the choice of experts, and {family(model)} has no such bias"
                )
        ours = {name: tensor for name, tensor in ours.items() if name not in biases}
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
