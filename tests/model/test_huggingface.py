"""Logits, greedy text and gradients equal those of Hugging Face's Llama and Mixtral holding the same weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from equipoise.model.transformer import Transformer, build, generate, token_losses
from equipoise.spec.model import MoEFFN

transformers = pytest.importorskip("transformers", reason="parity needs the extra: pip install 'equipoise[hf]'")

ARMS = [
    pytest.param("dense", {"num_kv_heads": 4}, id="llama-mha-tied"),
    pytest.param("dense", {"num_kv_heads": 2, "tie_embeddings": False}, id="llama-gqa-untied"),
    pytest.param("moe", {"num_kv_heads": 4, "tie_embeddings": False}, id="mixtral-mha-untied"),
    pytest.param("moe", {"num_kv_heads": 2}, id="mixtral-gqa-tied"),
    pytest.param("moe", {"num_kv_heads": 1, "num_experts": 8, "top_k": 3, "rope_theta": 500.0}, id="mixtral-mqa-top-3"),
]


def their_state(model: Transformer) -> dict[str, Tensor]:
    """Our weights under the names transformers 5 holds in memory: experts packed, gate rows before up rows."""
    ours = model.state_dict()
    theirs = {
        "model.embed_tokens.weight": ours["embed.weight"],
        "model.norm.weight": ours["final_norm.weight"],
        "lm_head.weight": ours.get("head.weight", ours["embed.weight"]),
    }
    for layer in range(model.config.num_layers):
        block, their_block = f"blocks.{layer}.", f"model.layers.{layer}."
        theirs[their_block + "input_layernorm.weight"] = ours[block + "attention_norm.weight"]
        theirs[their_block + "post_attention_layernorm.weight"] = ours[block + "ffn_norm.weight"]
        for letter in "qkvo":
            theirs[f"{their_block}self_attn.{letter}_proj.weight"] = ours[f"{block}attention.w_{letter}"]
        if isinstance(model.config.ffn, MoEFFN):
            w_gate, w_up, w_down = (ours[f"{block}ffn.experts.{w}"] for w in ("w_gate", "w_up", "w_down"))
            theirs[their_block + "mlp.gate.weight"] = ours[block + "ffn.router.weight"]
            theirs[their_block + "mlp.experts.gate_up_proj"] = torch.cat([w_gate, w_up], dim=1)
            theirs[their_block + "mlp.experts.down_proj"] = w_down
        else:
            for w in ("gate", "up", "down"):
                theirs[f"{their_block}mlp.{w}_proj.weight"] = ours[f"{block}ffn.w_{w}"]
    return theirs


def their_model(model: Transformer) -> Any:
    config = model.config
    fields = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.ffn.width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "max_position_embeddings": 128,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if isinstance(config.ffn, MoEFFN):
        fields |= {"num_local_experts": config.ffn.num_experts, "num_experts_per_tok": config.ffn.top_k}
        theirs = transformers.MixtralForCausalLM(transformers.MixtralConfig(**fields))
    else:
        theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields))
    theirs.load_state_dict(their_state(model), strict=True)
    return theirs.eval()


def pair(config: Any) -> tuple[Transformer, Any]:
    """Our model, far enough from its initialisation that logits and loads are uneven, and theirs."""
    model = build(config, seed=1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                noise = np.random.Generator(np.random.Philox(len(name))).uniform(0.5, 1.5, parameter.shape)
                parameter.copy_(torch.from_numpy(noise))
            if name.endswith("router.weight"):
                parameter.mul_(3)
    return model, their_model(model)


def windows(B: int, S: int) -> Tensor:
    return torch.from_numpy(np.random.Generator(np.random.Philox(4)).integers(53, size=(B, S + 1)))


@pytest.mark.parametrize(("kind", "fields"), ARMS)
def test_logits_at_every_position(make_config, kind, fields) -> None:
    model, theirs = pair(make_config(kind, init_std=0.1, **fields))
    inputs = windows(3, 67)[:, :-1]
    with torch.no_grad():
        output = model(inputs)
        ours, expected = model.logits(output.hidden_TD).view(3, 67, -1), theirs(inputs).logits
    worst_S = (ours - expected).abs().amax(dim=(0, 2))
    assert float(worst_S.max()) <= 1e-5, f"position {int(worst_S.argmax())}"
    assert float(expected.std()) > 0.3, "logits too flat to tell models apart"
    for routing in output.routing:
        loads = torch.bincount(routing.expert_ids_TK.flatten(), minlength=model.config.ffn.num_experts)
        assert int(loads.max()) > 1.1 * int(loads.min()), "loads too even to show a mistake in the dispatch"


@pytest.mark.parametrize(("kind", "fields"), ARMS)
def test_greedy_continuation(make_config, kind, fields) -> None:
    model, theirs = pair(make_config(kind, init_std=0.1, **fields))
    prompt = [9, 2, 31]
    expected = theirs.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, 3), max_new_tokens=30, do_sample=False
    )
    assert generate(model, prompt, 30, stop_id=None) == expected[0, 3:].tolist()


@pytest.mark.parametrize(("kind", "fields"), ARMS)
def test_loss_and_gradients(make_config, kind, fields) -> None:
    model, theirs = pair(make_config(kind, init_std=0.1, **fields))
    batch = windows(2, 41)
    loss = token_losses(model, model(batch[:, :-1]), batch[:, 1:]).mean()
    targets = batch[:, 1:].contiguous()
    their_loss = theirs(batch[:, :-1], labels=targets, shift_labels=targets).loss
    assert loss.item() == pytest.approx(their_loss.item(), abs=1e-6)
    loss.backward()
    their_loss.backward()
    theirs_now = dict(theirs.named_parameters())
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad  # gradients take the place of weights, so that one name table serves for both
    compared = 0
    for name, ours in their_state(model).items():
        if name not in theirs_now:  # the tied head
            continue
        theirs_grad = theirs_now[name].grad
        scale = float(theirs_grad.abs().max())
        torch.testing.assert_close(ours, theirs_grad, rtol=0, atol=1e-5 * max(scale, 1e-3), msg=name)
        compared += 1
    assert compared == len(theirs_now)
