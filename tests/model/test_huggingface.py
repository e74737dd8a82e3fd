"""Loss and gradients equal those of Hugging Face's Llama, Mixtral and Qwen2-MoE holding the same weights.

Weights go there through the export's name table, and gradients come back through Hugging Face's own saving. Logits,
greedy text and files are compared in tests/export.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor

from equipoise.export.names import their_tensors
from equipoise.export.translate import to_huggingface
from equipoise.model.transformer import Transformer, build, mean_loss

transformers = pytest.importorskip("transformers", reason="parity needs the extra: pip install 'equipoise[hf]'")

ARMS = [
    pytest.param("dense", {"num_kv_heads": 4}, id="llama-mha-tied"),
    pytest.param("dense", {"num_kv_heads": 2, "tie_embeddings": False}, id="llama-gqa-untied"),
    pytest.param("moe", {"num_kv_heads": 4, "tie_embeddings": False}, id="mixtral-mha-untied"),
    pytest.param("moe", {"num_kv_heads": 2}, id="mixtral-gqa-tied"),
    pytest.param("moe", {"num_kv_heads": 1, "num_experts": 8, "top_k": 3, "rope_theta": 500.0}, id="mixtral-mqa-top-3"),
    pytest.param("moe", {"top_k": 1, "renormalize": False}, id="qwen2-moe-top-1"),
]


def their_model(model: Transformer, folder: Path) -> Any:
    theirs = their_tensors(model.config, {name: tensor.numpy() for name, tensor in model.state_dict().items()})
    save_file(theirs, folder / "model.safetensors", metadata={"format": "pt"})
    config = to_huggingface(model.config, seq_len=128, eot_id=0)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def pair(config: Any, folder: Path, kernels: Any) -> tuple[Transformer, Any]:
    """Our model, far enough from its initialisation that loads and gradients are uneven, and theirs."""
    model = build(config, seed=1, kernels=kernels)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                noise = np.random.Generator(np.random.Philox(len(name))).uniform(0.5, 1.5, parameter.shape)
                parameter.copy_(torch.from_numpy(noise))
            if name.endswith("router.weight"):
                parameter.mul_(3)
    return model, their_model(model, folder)


def windows(B: int, S: int) -> Tensor:
    return torch.from_numpy(np.random.Generator(np.random.Philox(4)).integers(53, size=(B, S + 1)))


@pytest.mark.parametrize("kernels", ["plain", "fused"])
@pytest.mark.parametrize(("kind", "fields"), ARMS)
def test_loss_and_gradients(make_config, tmp_path: Path, kind, fields, kernels) -> None:
    model, theirs = pair(make_config(kind, init_std=0.1, **fields), tmp_path, kernels)
    batch = windows(2, 41)
    loss = mean_loss(model, model(batch[:, :-1]), batch[:, 1:])
    targets = batch[:, 1:].contiguous()
    their_loss = theirs(batch[:, :-1], labels=targets, shift_labels=targets).loss
    assert loss.item() == pytest.approx(their_loss.item(), abs=1e-6)
    loss.backward()
    their_loss.backward()
    ours = their_tensors(model.config, {name: p.grad.numpy() for name, p in model.named_parameters()})  # type: ignore[union-attr]
    for parameter in theirs.parameters():
        parameter.data = parameter.grad  # gradients take the place of weights, and are saved under the weights' names
    theirs.save_pretrained(tmp_path / "gradients")
    saved = load_file(tmp_path / "gradients" / "model.safetensors")
    assert ours.keys() == saved.keys()
    for name, gradient in ours.items():
        scale = float(np.abs(saved[name]).max())
        assert "shared_expert" in name or scale > 0, name
        np.testing.assert_allclose(gradient, saved[name], rtol=0, atol=1e-5 * max(scale, 1e-3), err_msg=name)
