"""Our model configuration as a Hugging Face config.json, and back: the only place where both vocabularies meet.

Not for: tensor names (`names`). Fields that only training reads and Hugging Face has no word for (`z_coef`, the kind of
balancing, `allow_no_router_gradient`, whether the router is frozen) travel in a table `equipoise` of the config.json;
readers keep it unread.
"""

from __future__ import annotations

from typing import Any, Final

from equipoise.config import differences, dump, load
from equipoise.errors import ConfigError
from equipoise.export.names import SHARED_WIDTH, Family, family
from equipoise.spec.model import ModelConfig, MoEFFN

ARCHITECTURES: Final[dict[Family, str]] = {
    "llama": "LlamaForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
}
_TRAINING_ONLY: Final = ("allow_no_router_gradient", "balance", "router", "z_coef")
_NUM_EXPERTS: Final = {"mixtral": "num_local_experts", "qwen2_moe": "num_experts"}
_D_EXPERT: Final = {"mixtral": "intermediate_size", "qwen2_moe": "moe_intermediate_size"}


def to_huggingface(model: ModelConfig, *, seq_len: int, eot_id: int) -> dict[str, Any]:
    """The config.json of a resolved model that was trained on windows of `seq_len` tokens.

    Both spellings of the RoPE base are there: transformers 4 does not know `rope_parameters`, and 5 prefers it.
    End-of-text begins and ends a text. There is no `pad_token_id`: an embedding row named so gets no gradient there.
    Raises ConfigError for a model that no family carries (see `family`).
    """
    kind, rope_theta = family(model), float(model.rope_theta)
    theirs: dict[str, Any] = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": model.vocab_size,
        "hidden_size": model.d_model,
        "intermediate_size": model.ffn.width,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.d_head,
        "hidden_act": "silu",
        "max_position_embeddings": seq_len,
        "initializer_range": float(model.init_std),
        "rms_norm_eps": float(model.norm_eps),
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        "rope_theta": rope_theta,
        "tie_word_embeddings": model.tie_embeddings,
        "attention_dropout": 0.0,
        "use_cache": True,
        "bos_token_id": eot_id,
        "eos_token_id": eot_id,
        "pad_token_id": None,
        "dtype": "float32",
        "torch_dtype": "float32",
    }
    return theirs | (_of_experts(model, model.ffn) if isinstance(model.ffn, MoEFFN) else _OF_LLAMA)


_OF_LLAMA: Final = {"attention_bias": False, "mlp_bias": False}


def _of_experts(model: ModelConfig, ffn: MoEFFN) -> dict[str, Any]:
    """Fields of the two routed families. Hugging Face's balance loss is K at uniform use, ours is 1."""
    kind = family(model)
    coef = ffn.balance.coef if ffn.balance.kind == "loss" else 0.0
    theirs = {
        _NUM_EXPERTS[kind]: ffn.num_experts,
        "num_experts_per_tok": ffn.top_k,
        "output_router_logits": False,
        "router_aux_loss_coef": coef / ffn.top_k,
        "equipoise": {name: dump(getattr(ffn, name)) for name in _TRAINING_ONLY},
    }
    if kind == "mixtral":
        theirs |= {"router_jitter_noise": 0.0, "sliding_window": None}
    else:
        theirs |= {
            "moe_intermediate_size": ffn.width,
            "shared_expert_intermediate_size": SHARED_WIDTH,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "qkv_bias": False,
            "use_sliding_window": False,
        }
    if model.d_model % 8:  # the grouped kernels of transformers 5 want rows of 16 bytes, in bfloat16 too
        theirs["experts_implementation"] = "eager"
    return theirs


def from_huggingface(theirs: dict[str, Any]) -> ModelConfig:
    """The model that `to_huggingface` made this config.json of: its exact inverse.

    Raises ConfigError naming every field that is missing, unknown, or says what our models do not do: the result is
    translated again, and whatever differs is such a field.
    """
    try:
        model = load(ModelConfig, _fields(theirs))
        again = to_huggingface(model, seq_len=theirs["max_position_embeddings"], eot_id=theirs["bos_token_id"])
    except KeyError as error:
        raise ConfigError(f"config.json: no field {error}; expected what `equipoise export` writes") from None
    lines = differences(theirs, again)
    if lines:
        raise ConfigError("\n".join(f"config.json: {line} (there → expected)" for line in lines))
    return model


def _fields(theirs: dict[str, Any]) -> dict[str, Any]:
    kind = theirs["model_type"]
    if kind not in ARCHITECTURES:
        raise ConfigError(f"config.json: model_type {kind!r} is not accepted; expected {', '.join(ARCHITECTURES)}")
    ffn = {"kind": "dense", "d_ff": theirs["intermediate_size"]}
    if kind != "llama":
        ffn = {
            "kind": "moe",
            "num_experts": theirs[_NUM_EXPERTS[kind]],
            "top_k": theirs["num_experts_per_tok"],
            "d_expert": theirs[_D_EXPERT[kind]],
            "renormalize": kind == "mixtral",
            **{name: theirs["equipoise"][name] for name in _TRAINING_ONLY},
        }
    return {
        "num_layers": theirs["num_hidden_layers"],
        "num_heads": theirs["num_attention_heads"],
        "num_kv_heads": theirs["num_key_value_heads"],
        "d_model": theirs["hidden_size"],
        "ffn": ffn,
        "vocab_size": theirs["vocab_size"],
        "tie_embeddings": theirs["tie_word_embeddings"],
        "rope_theta": theirs["rope_theta"],
        "norm_eps": theirs["rms_norm_eps"],
        "init_std": theirs["initializer_range"],
    }
