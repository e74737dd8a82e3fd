"""The table of docs/concepts.md that converts other libraries' balance coefficients, row by row, against what each
library multiplies: Hugging Face's own functions where they are installed, the other formulas written out as loops."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from equipoise.model.moe import Routing, router_losses

PAGE = Path(__file__).resolve().parents[2] / "docs" / "concepts.md"
L, SEQUENCES, TOKENS, E = 3, 2, 11, 5
"""Routed layers, sequences of a batch, tokens of a sequence, experts."""
MIXTRAL_FAMILY = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
Loss = Callable[[Sequence[Tensor], int], Tensor]
"""Logits [T, E] of every layer, K → what the objective gets at c = 1."""


def layers(*, alike: bool) -> list[Tensor]:
    """Router outputs in float64, far from even; with `alike` all layers the same."""
    rng = np.random.Generator(np.random.Philox(7))
    drawn = [torch.from_numpy(rng.standard_normal((SEQUENCES * TOKENS, E)) + np.linspace(0, 2, E)) for _ in range(L)]
    return [(drawn[0] if alike else logits).clone().requires_grad_() for logits in drawn]


def ours(logits: Sequence[Tensor], K: int, num_groups: int) -> Tensor:
    routings = []
    for logits_TE in logits:
        probs_TE = logits_TE.softmax(-1)
        weights_TK, ids_TK = probs_TE.topk(K, dim=-1)
        routings.append(Routing(logits_TE=logits_TE, probs_TE=probs_TE, expert_ids_TK=ids_TK, weights_TK=weights_TK))
    return router_losses(routings, num_groups)[0]


def one_layer(logits_TE: Tensor, K: int) -> Tensor:
    """E · Σ f_e · p_e of one layer and one group, one token and one expert at a time."""
    probs = logits_TE.softmax(-1)
    counts = [0] * E
    for row in probs.tolist():
        for e in sorted(range(E), key=lambda e: -row[e])[:K]:
            counts[e] += 1
    total = torch.zeros((), dtype=logits_TE.dtype)
    for e in range(E):
        p = sum((probs[t, e] for t in range(len(probs))), torch.zeros((), dtype=probs.dtype)) / len(probs)
        total = total + counts[e] / (len(probs) * K) * p
    return E * total


def added_up(logits: Sequence[Tensor], K: int) -> Tensor:
    return torch.stack([one_layer(layer, K) for layer in logits]).sum()


def added_up_by_sequence(logits: Sequence[Tensor], K: int) -> Tensor:
    """A sequence a group: the mean over sequences of each layer, then the sum over layers."""
    each = [torch.stack([one_layer(s, K) for s in layer.split(TOKENS)]).mean() for layer in logits]
    return torch.stack(each).sum()


def megablocks(logits: Sequence[Tensor], K: int) -> Tensor:
    """One dot product over layers and experts: tokens · mean scores, times E ÷ (L · tokens · K)."""
    total = torch.zeros((), dtype=logits[0].dtype)
    for layer in logits:
        probs = layer.softmax(-1)
        for row in probs.tolist():
            for e in sorted(range(E), key=lambda e: -row[e])[:K]:
                total = total + probs[:, e].mean()
    return total * E / (len(logits) * len(logits[0]) * K)


def mixtral(logits: Sequence[Tensor], K: int, family: str = "mixtral") -> Tensor:
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    loss: Tensor = module.load_balancing_loss_func(tuple(logits), E, K)
    return loss


def hugging_face_switch(logits: Sequence[Tensor], K: int) -> Tensor:
    """As its model does: layers one after another along the tokens of each sequence."""
    module = importlib.import_module("transformers.models.switch_transformers.modeling_switch_transformers")
    stacked = torch.cat([layer.view(SEQUENCES, TOKENS, E) for layer in logits], dim=1)
    probs = stacked.softmax(-1)
    assert K == 1
    loss: Tensor = module.load_balancing_loss_func(probs, probs.argmax(-1))
    return loss


ROWS: dict[str, tuple[Loss, int, int, bool]] = {
    "Hugging Face `router_aux_loss_coef`: Mixtral": (mixtral, 2, 1, True),
    "Hugging Face `router_aux_loss_coef`: SwitchTransformers": (hugging_face_switch, 1, SEQUENCES, True),
    "Switch Transformer, the paper's α": (added_up, 1, 1, False),
    "Megatron-Core `moe_aux_loss_coeff`": (added_up, 2, 1, False),
    "DeepSeek-V2 `aux_loss_alpha`": (added_up_by_sequence, 3, SEQUENCES, False),
    "MegaBlocks `moe_loss_weight`": (megablocks, 2, 1, False),
}
"""Begin of a row of the table → (what it multiplies, K, groups of a batch, whether layers have to be used alike)."""


def table() -> dict[str, str]:
    """First cell → formula of the last, of every row of the table of conversions."""
    text = PAGE.read_text(encoding="utf-8").partition("| whose coefficient c |")[2].partition("\n\n")[0]
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines()[2:]]
    return {cells[0].strip(): cells[-1].strip().strip("`") for cells in rows}


def test_every_row_of_the_table_is_checked_here() -> None:
    assert len(table()) == len(ROWS)
    for begin in ROWS:
        assert sum(name.startswith(begin) for name in table()) == 1, begin


@pytest.mark.parametrize("begin", ROWS, ids=lambda begin: begin.split("`")[0].strip())
def test_the_converted_coefficient_gives_the_same_term_and_gradient(begin: str) -> None:
    theirs, K, num_groups, alike = ROWS[begin]
    if begin.startswith("Hugging Face"):
        pytest.importorskip("transformers", reason="the function needs the extra: pip install 'equipoise[hf]'")
    (formula,) = [formula for name, formula in table().items() if name.startswith(begin)]
    c = 0.013
    coef = {"K * c": K * c, "L * c": L * c, "c": c}[formula]
    mine, other = layers(alike=alike), layers(alike=alike)
    term, expected = coef * ours(mine, K, num_groups), c * theirs(other, K)
    term.backward()
    expected.backward()
    assert term.item() == pytest.approx(expected.item(), rel=1e-6)
    for left, right in zip(mine, other, strict=True):
        assert left.grad is not None
        assert right.grad is not None
        assert right.grad.abs().max() > 1e-6
        torch.testing.assert_close(left.grad, right.grad, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("family", MIXTRAL_FAMILY)
def test_the_families_of_the_first_row_share_mixtrals_loss(family: str) -> None:
    pytest.importorskip("transformers", reason="the functions need the extra: pip install 'equipoise[hf]'")
    drawn = layers(alike=False)
    assert mixtral(drawn, 2, family).item() == pytest.approx(mixtral(drawn, 2).item(), rel=1e-6)
    one = drawn[:1]
    assert mixtral(one, 2, family).item() == pytest.approx(2 * ours(one, 2, 1).item(), rel=1e-6)


def test_pooling_forgives_layers_that_collapse_in_opposite_ways() -> None:
    pytest.importorskip("transformers", reason="the function needs the extra: pip install 'equipoise[hf]'")
    high = torch.tensor([[9.0, 9.0, -9.0, -9.0]] * 6, dtype=torch.float64)
    opposite = [high, high.flip(1)]
    module = importlib.import_module("transformers.models.mixtral.modeling_mixtral")
    assert module.load_balancing_loss_func(tuple(opposite), 4, 2).item() / 2 == pytest.approx(1.0, abs=1e-6)
    assert ours(opposite, 2, 1).item() == pytest.approx(2.0, abs=1e-6)


def test_the_worked_conversions() -> None:
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert "Mixtral's default of 0.001 with top-2 is `coef = 0.002`" in text
    config = pytest.importorskip("transformers", reason="the default is in the extra 'equipoise[hf]'").MixtralConfig()
    assert config.router_aux_loss_coef == 0.001
    assert config.num_experts_per_tok == 2
