"""Our configuration → Hugging Face's → ours is the identity; what our models do not do is refused by its field."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.errors import ConfigError
from equipoise.export.translate import from_huggingface, to_huggingface
from equipoise.spec.model import BalanceBias, BalanceLoss, DenseFFN, ModelConfig, MoEFFN, NoBalance

positive = st.floats(min_value=1e-9, max_value=1e9)
widths = st.integers(1, 300).map(lambda n: 8 * n)


@st.composite
def experts(draw: st.DrawFn) -> MoEFFN:
    num_experts = draw(st.integers(1, 64))
    if draw(st.booleans()):
        top_k = draw(st.integers(1, num_experts))
        return MoEFFN(num_experts=num_experts, top_k=top_k, d_expert=draw(widths), router="frozen")
    return MoEFFN(
        num_experts=num_experts,
        top_k=draw(st.integers(1, num_experts)),
        d_expert=draw(widths),
        renormalize=draw(st.booleans()),
        allow_no_router_gradient=True,
        balance=draw(
            st.one_of(st.builds(NoBalance), st.builds(BalanceBias), st.builds(BalanceLoss, coef=st.floats(0, 10)))
        ),
        z_coef=draw(st.floats(0, 10)),
    )


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    num_kv_heads, group = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    num_heads = num_kv_heads * group
    return ModelConfig(
        num_layers=draw(st.integers(1, 100)),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        d_model=2 * num_heads * draw(st.integers(1, 64)),
        ffn=draw(st.one_of(st.builds(DenseFFN, d_ff=widths), experts())),
        vocab_size=draw(st.integers(1, 200_000)),
        tie_embeddings=draw(st.booleans()),
        rope_theta=draw(positive),
        norm_eps=draw(positive),
        init_std=draw(positive),
    )


@settings(max_examples=200)
@given(models(), st.integers(1, 10**6), st.integers(0, 10**6))
def test_there_and_back_is_the_identity(model: ModelConfig, seq_len: int, eot_id: int) -> None:
    theirs = json.loads(json.dumps(to_huggingface(model, seq_len=seq_len, eot_id=eot_id), allow_nan=False))
    assert from_huggingface(theirs) == model
    assert theirs["max_position_embeddings"] == seq_len
    assert theirs["bos_token_id"] == theirs["eos_token_id"] == eot_id


def test_every_field_was_thought_of() -> None:
    """A new field of a model changes what is computed, or how it was trained: the export has to carry or refuse it."""
    known = {
        ModelConfig: "num_layers num_heads num_kv_heads d_model ffn vocab_size tie_embeddings rope_theta norm_eps "
        "init_std",
        DenseFFN: "kind d_ff",
        MoEFFN: "kind num_experts top_k d_expert renormalize allow_no_router_gradient balance z_coef "
        "num_shared_experts router",
        BalanceLoss: "kind coef",
        BalanceBias: "kind rate",
        NoBalance: "kind",
    }
    for cls, names in known.items():
        assert [field.name for field in dataclasses.fields(cls)] == names.split(), f"{cls.__name__}: teach the export"


def make(kind: str) -> dict[str, Any]:
    ffn = DenseFFN(d_ff=24) if kind == "llama" else MoEFFN(num_experts=4, top_k=2, d_expert=24)
    if kind == "qwen2_moe":
        ffn = dataclasses.replace(ffn, renormalize=False)
    model = ModelConfig(num_layers=2, num_heads=4, num_kv_heads=2, d_model=32, vocab_size=300, ffn=ffn)
    return json.loads(json.dumps(to_huggingface(model, seq_len=128, eot_id=0)))


def test_the_values_worked_by_hand() -> None:
    theirs = make("mixtral")
    assert theirs["head_dim"] == 8 and theirs["num_local_experts"] == 4 and theirs["num_experts_per_tok"] == 2
    assert theirs["router_aux_loss_coef"] == 0.005  # ours 0.01 is 1 at uniform use, theirs is K = 2 there
    assert theirs["rope_theta"] == theirs["rope_parameters"]["rope_theta"] == 10_000
    assert "experts_implementation" not in theirs
    assert make("qwen2_moe")["norm_topk_prob"] is False
    assert make("qwen2_moe")["moe_intermediate_size"] == 24


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("llama", "hidden_act", "gelu"),
        ("llama", "rope_theta", 500_000.0),  # the two spellings disagree
        ("llama", "rope_parameters", {"rope_type": "yarn", "rope_theta": 10000.0}),
        ("llama", "head_dim", 16),
        ("llama", "attention_bias", True),
        ("llama", "eos_token_id", 2),
        ("llama", "something_new", 1),
        ("mixtral", "sliding_window", 4096),
        ("mixtral", "router_jitter_noise", 0.1),
        ("mixtral", "router_aux_loss_coef", 0.02),
        ("qwen2_moe", "norm_topk_prob", True),
        ("qwen2_moe", "shared_expert_intermediate_size", 64),
        ("qwen2_moe", "qkv_bias", True),
        ("qwen2_moe", "mlp_only_layers", [0]),
    ],
)
def test_what_our_models_do_not_do_is_refused(kind: str, field: str, value: Any) -> None:
    assert from_huggingface(make(kind)).num_layers == 2
    with pytest.raises(ConfigError, match=rf"config\.json: (rope_parameters\.)?{field}.*→"):
        from_huggingface({**make(kind), field: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"router": "hash"},
            "ffn.router: 'hash' cannot be exported; expected 'learned' or 'frozen': Mixtral and Qwen2-MoE choose "
            "experts by router weights",
        ),
        (
            {"router": "random", "renormalize": False, "num_shared_experts": 1},
            "ffn.router: 'random' cannot be exported; expected 'learned' or 'frozen': Mixtral and Qwen2-MoE choose "
            "experts by router weights",
        ),
        (
            {"num_shared_experts": 2, "renormalize": False},
            "ffn.num_shared_experts: 2 cannot be exported; expected 0: Mixtral has no shared expert, and Qwen2-MoE "
            "multiplies its own with a sigmoid gate",
        ),
    ],
)
def test_what_no_family_computes_is_refused(change: dict[str, Any], message: str) -> None:
    ffn = MoEFFN(**{"num_experts": 4, "top_k": 2, "d_expert": 24, **change})
    model = ModelConfig(num_layers=2, num_heads=4, d_model=32, vocab_size=300, ffn=ffn)
    with pytest.raises(ConfigError) as caught:
        to_huggingface(model, seq_len=128, eot_id=0)
    assert str(caught.value) == message


def test_other_refusals_name_the_field() -> None:
    with pytest.raises(ConfigError, match="model_type 'olmoe' is not accepted; expected llama, mixtral, qwen2_moe"):
        from_huggingface({**make("mixtral"), "model_type": "olmoe"})
    with pytest.raises(ConfigError, match="no field 'num_hidden_layers'; expected what `equipoise export` writes"):
        from_huggingface({name: value for name, value in make("llama").items() if name != "num_hidden_layers"})
    with pytest.raises(ConfigError, match="num_kv_heads: 3 is not accepted; expected a divisor"):
        from_huggingface({**make("llama"), "num_key_value_heads": 3})
