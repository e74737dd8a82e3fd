"""Memory of an update, against what torch keeps for the backward pass and against numbers worked by hand."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from equipoise.costs import LAUNCHES_A_LAYER
from equipoise.footprint import footprint, token_bytes, traffic_bytes
from equipoise.hardware import HARDWARE
from equipoise.micro import update_bytes
from equipoise.model.transformer import Transformer, build
from equipoise.spec.model import BalanceLoss, DenseFFN, ModelConfig, MoEFFN
from equipoise.spec.recipe import ModelKernels, Optim, Recipe
from equipoise.step import losses

ROWS, S = 2, 160
RECIPE = Recipe(seq_len=128, batch_tokens=1024, balance_group=8, optim=Optim(lr=1e-3))


def sized(kind: str, layers: int = 3) -> ModelConfig:
    routed = MoEFFN(num_experts=5, top_k=2, d_expert=56, num_shared_experts=1, balance=BalanceLoss(coef=0.01))
    ffn = DenseFFN(d_ff=136) if kind == "dense" else routed
    return ModelConfig(num_layers=layers, num_heads=3, d_model=72, vocab_size=331, ffn=ffn)


def kept_bytes(model: Transformer, autocast: torch.dtype | None) -> int:
    """Bytes of all storages that autograd holds between the passes, parameters and tables of positions left out."""
    own = {tensor.untyped_storage().data_ptr() for tensor in model.parameters()}
    own |= {tensor.untyped_storage().data_ptr() for tensor in model.rope(0, S)}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids_BS = torch.arange(ROWS * S).reshape(ROWS, S) % 331
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        losses(model, ids_BS, ids_BS, 1, autocast)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize(
    ("kind", "kernels", "autocast"),
    [
        ("dense", "plain", torch.bfloat16),
        ("moe", "grouped", torch.bfloat16),
        ("dense", "plain", None),
        ("moe", "plain", None),
    ],
)
def test_activations_are_what_torch_keeps(kind: str, kernels: ModelKernels, autocast: torch.dtype | None) -> None:
    config = sized(kind)
    model = build(config, 0, kernels=kernels)
    matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    routers = sum(p.numel() for name, p in model.named_parameters() if "router" in name)
    copies = 2 * (matrices - routers) if autocast else 4 * 3 * 3 * 72 * 72  # in float32 only the packed w_q, w_k, w_v
    unborn = (6 if autocast else 8) * 331  # of the logits what only the peak has: their gradient and a copy
    kept = kept_bytes(model, autocast) - copies
    assert kept == pytest.approx(ROWS * S * (token_bytes(config, half=autocast is not None) - unborn), rel=0.03)


class Operations(TorchDispatchMode):
    """Counts what is computed; views cost nothing."""

    VIEWS = ("view", "t.", "transpose", "expand", "detach", "slice", "split", "unbind", "alias", "squeeze", "permute")

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.number += not any(part in func.__name__ for part in (*self.VIEWS, "select.int", "as_strided"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("kind", "kernels"), [("dense", "plain"), ("moe", "grouped")])
def test_a_layer_starts_so_many_operations(kind: str, kernels: ModelKernels) -> None:
    counted = []
    for layers in (1, 2):
        ffn = DenseFFN(d_ff=136) if kind == "dense" else MoEFFN(num_experts=4, top_k=2, d_expert=56)
        config = ModelConfig(num_layers=layers, num_heads=3, d_model=72, vocab_size=331, ffn=ffn)
        model, ids_BS = build(config, 0, kernels=kernels), torch.arange(2 * 32).reshape(2, 32)
        with Operations() as operations:
            losses(model, ids_BS, ids_BS, 1, torch.bfloat16)[0].backward()
        counted.append(operations.number)
    assert counted[1] - counted[0] == pytest.approx(LAUNCHES_A_LAYER[kind], rel=0.1)


def test_memory_of_a_card_by_hand() -> None:
    """P = 384,832 parameters: 16 P of state, 2 P of copies; 1,024 tokens of two layers of 34·64 + 8·2·96 + 6·2·64 +
    20·8 + 24·2 = 4,688 bytes, 14·64 and 10·1,000 outside them."""
    ffn = MoEFFN(num_experts=8, top_k=2, d_expert=96)
    model = ModelConfig(num_layers=2, num_heads=4, num_kv_heads=2, d_model=64, vocab_size=1000, ffn=ffn)
    found = footprint(model, RECIPE, HARDWARE["h100"], 8)
    assert (found.state, found.copies) == (6_157_312, 769_664)
    assert found.activations == 1024 * (2 * 4_688 + 896 + 10_000) == 20_758_528
    assert found.total == 27_685_504
    # moved: 3 passes of 22 bytes a parameter and 40 once; in float32 20
    assert traffic_bytes(model, 3, "bfloat16") == 384_832 * 106 and traffic_bytes(model, 1, "float32") == 384_832 * 60
    on_cpu = footprint(model, RECIPE, HARDWARE["cpu-2-cores"], 8)
    assert on_cpu.copies == 0 and on_cpu.total == update_bytes(model, RECIPE, 8)
