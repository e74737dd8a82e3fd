"""The name table: Hugging Face itself saves the same file; nothing is dropped without a word."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from equipoise.errors import ConfigError, IntegrityError
from equipoise.export.names import their_tensors
from equipoise.model.transformer import build
from equipoise.spec.model import BalanceBias, MoEFFN

from .conftest import CASES, case_id


def arrays(model: Any) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_transformers_saves_what_we_write(case: Any, exported: Any, tmp_path: Path) -> None:
    """Loaded and saved again by transformers in its default format: the same names, and bit for bit the same values."""
    transformers = pytest.importorskip("transformers", reason="needs the extra: pip install 'equipoise[hf]'")
    transformers.AutoModelForCausalLM.from_pretrained(exported[case].directory).save_pretrained(tmp_path)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (exported[case].directory, tmp_path))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype == np.float32 and np.array_equal(tensor, theirs[name]), name


def test_which_expert_is_which(exported: Any) -> None:
    """w1 gates, w3 goes up, w2 goes down: Mixtral's names, by hand, for one expert of one layer."""
    case = ("top-2", "gqa", True)
    theirs = load_file(exported[case].directory / "model.safetensors")
    ours = arrays(exported[case].model)
    for name, w in (("w1", "w_gate"), ("w3", "w_up"), ("w2", "w_down")):
        expert = theirs[f"model.layers.1.block_sparse_moe.experts.3.{name}.weight"]
        assert np.array_equal(expert, ours[f"blocks.1.ffn.experts.{w}"][3])
    assert len(theirs) == 2 + 2 * (
        2 + 4 + 1 + 3 * 5
    )  # embedding, last norm; per layer norms, attention, router, experts
    with safe_open(exported[case].directory / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}


def test_the_shared_expert_of_qwen2_moe_is_zero(exported: Any) -> None:
    theirs = load_file(exported["top-2-as-is", "gqa", True].directory / "model.safetensors")
    shared = [tensor for name, tensor in theirs.items() if "shared_expert" in name]
    assert len(shared) == 2 * 4 and not any(tensor.any() for tensor in shared)


def test_a_tensor_without_a_place_is_refused(make_model: Any) -> None:
    model = make_model("dense", "gqa", True)
    whole = arrays(model)
    with pytest.raises(IntegrityError, match=r"model\.safetensors: blocks\.0\.ffn\.w_up is missing; expected the 20"):
        their_tensors(model.config, {name: t for name, t in whole.items() if name != "blocks.0.ffn.w_up"})
    with pytest.raises(IntegrityError, match=r"blocks\.0\.ffn\.router\.bias has no place in llama"):
        their_tensors(model.config, {**whole, "blocks.0.ffn.router.bias": np.zeros(4, np.float32)})


def test_biases_that_moved_have_no_place_in_any_family(make_model: Any) -> None:
    ffn = MoEFFN(num_experts=5, top_k=2, d_expert=24, balance=BalanceBias(rate=0.25))
    model = dataclasses.replace(make_model("top-2", "gqa", True).config, ffn=ffn)
    whole = arrays(build(model, seed=1))
    assert not whole["blocks.1.ffn.router.bias"].any()
    theirs = their_tensors(model, whole)  # never trained: it chooses as a Mixtral does
    assert not any("bias" in name for name in theirs) and len(theirs) == 2 + 2 * (2 + 4 + 1 + 3 * 5)
    moved = {**whole, "blocks.1.ffn.router.bias": np.array([0.25, 0, -0.5, 0, 0.25], np.float32)}
    with pytest.raises(ConfigError) as caught:
        their_tensors(model, moved)
    assert str(caught.value) == (
        "blocks.1.ffn.router.bias: largest value 0.5 cannot be exported; expected zeros: balance.kind = 'bias' has "
        "moved the choice of experts, and mixtral has no such bias"
    )
