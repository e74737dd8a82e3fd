"""Token by token: losses and routing against a plain loop that reads one token at a time, nothing batched."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from equipoise.data.packing import eval_windows
from equipoise.data.tokenizer import TextTokenizer, train_tokenizer
from equipoise.errors import DivergedError
from equipoise.explore import EXPLORED_TOKENS, explore, explore_stories, token_name
from equipoise.model.layers import KVCache
from equipoise.model.transformer import Transformer, build
from equipoise.score import evaluate, score_text
from equipoise.spec.data import BpeTokenizer
from equipoise.spec.model import DenseFFN, ModelConfig, MoEFFN

TEXT = "Once upon a time, Zoë said “yes” to 猫 🦙.\n"


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return train_tokenizer(BpeTokenizer(vocab_size=275), iter([TEXT] * 4))


def make(kind: str, vocab_size: int, kernels: Any = "plain") -> Transformer:
    router: Any = kind if kind in ("frozen", "hash", "random") else "learned"
    ffn = DenseFFN(d_ff=24) if kind == "dense" else MoEFFN(num_experts=5, top_k=2, d_expert=16, router=router)
    sizes: dict[str, Any] = {"num_layers": 3, "num_heads": 2, "d_model": 24, "init_std": 0.3}
    return build(ModelConfig(**sizes, vocab_size=vocab_size, ffn=ffn), 5, "cpu", kernels)


@torch.no_grad()
def one_at_a_time(model: Transformer, ids: list[int], context: int) -> tuple[list[float], float, list[Any], list[Any]]:
    """Oracle: (losses, loss of the end, experts [T][L][K], weights [T][L][K]); a cached step a token."""
    losses: list[float] = []
    experts: list[Any] = []
    weights: list[Any] = []

    def nats(logits_V: torch.Tensor, target: int) -> float:
        values = logits_V.double().tolist()
        return math.log(math.fsum(math.exp(v - max(values)) for v in values)) + max(values) - values[target]

    caches: list[KVCache] = []
    logits_V = torch.zeros(0)
    for place, token in enumerate(ids):
        if place % (context - 1) == 0:
            caches = [KVCache() for _ in model.blocks]
            logits_V = model.logits(model(torch.tensor([[0]]), caches).hidden_TD)[-1]
        losses.append(nats(logits_V, token))
        output = model(torch.tensor([[token]]), caches)
        logits_V = model.logits(output.hidden_TD)[-1]
        experts.append([routing.expert_ids_TK[0].tolist() for routing in output.routing])
        weights.append([routing.weights_TK[0].tolist() for routing in output.routing])
    return losses, nats(logits_V, 0), experts, weights


@pytest.mark.parametrize("kind", ["dense", "learned", "frozen", "hash", "random"])
@pytest.mark.parametrize("context", [7, 64])
def test_against_one_token_at_a_time(tokenizer: TextTokenizer, kind: str, context: int) -> None:
    model, ids = make(kind, tokenizer.vocab_size), tokenizer.encode(TEXT)
    assert context > 8 or len(ids) > 2 * context
    found = explore(model, ids, end_of_text=0, context=context)
    losses, end_loss, experts, weights = one_at_a_time(model, ids, context)
    assert found.losses_T.tolist() == pytest.approx(losses, abs=1e-5)
    assert found.end_loss == pytest.approx(end_loss, abs=1e-5)
    assert found.expert_ids_LTK.transpose(1, 0, 2).tolist() == experts
    assert (
        found.weights_LTK.shape
        == found.expert_ids_LTK.shape
        == (0 if kind == "dense" else 3, len(ids), found.weights_LTK.shape[2])
    )
    np.testing.assert_allclose(
        found.weights_LTK.transpose(1, 0, 2),
        np.array(weights).reshape(found.weights_LTK.transpose(1, 0, 2).shape),
        atol=1e-5,
    )


@pytest.mark.parametrize("kernels", ["plain", "fused"])
def test_the_mean_is_what_evaluate_says_of_the_text(tokenizer: TextTokenizer, kernels: str) -> None:
    model, ids = make("learned", tokenizer.vocab_size, kernels), tokenizer.encode(TEXT)
    found = explore(model, ids, end_of_text=0, context=64)
    score = score_text(model, tokenizer, [TEXT], context=64)
    assert (found.losses_T.sum() + found.end_loss) / (len(ids) + 1) == pytest.approx(score.loss, abs=1e-6)


def test_a_loss_that_is_not_finite_is_refused(tokenizer: TextTokenizer) -> None:
    model = make("dense", tokenizer.vocab_size)
    with torch.no_grad():
        model.final_norm.weight.fill_(math.nan)
    with pytest.raises(DivergedError, match=r"^exploring: the loss is not finite$"):
        explore(model, [1, 2], end_of_text=0, context=8)


# ------------------------------------------------------------------------------------------------ stories


def test_stories_are_whole_validation_documents_up_to_the_limit(tiny: Any) -> None:
    tokenizer = tiny.dataset.tokenizer()
    windows = eval_windows(tiny.dataset, "validation", 256, EXPLORED_TOKENS, 0)
    stories = explore_stories(make("learned", tiny.dataset.vocab_size), windows, tokenizer, 256)
    assert json.loads(json.dumps(stories)) == stories
    assert 0 < sum(len(story["tokens"]) for story in stories) <= EXPLORED_TOKENS
    everything = tokenizer.decode(tiny.dataset.tokens("validation"))
    for story in stories:
        assert "".join(story["tokens"]) in everything
        assert (story["end_loss"] is not None) == ("".join(story["tokens"]) + "<|endoftext|>" in everything)
        assert len(story["losses"]) == len(story["tokens"])
        assert [len(layer) for layer in story["experts"]] == [len(story["tokens"])] * 3
    dense = explore_stories(make("dense", tiny.dataset.vocab_size), windows, tokenizer, 256)
    assert [story["tokens"] for story in dense] == [story["tokens"] for story in stories]
    assert all(story["experts"] == story["weights"] == [] for story in dense)


def test_a_long_unit_is_cut_within_the_context(tiny: Any) -> None:
    windows = eval_windows(tiny.dataset, "validation", 16, EXPLORED_TOKENS, 0)
    stories = explore_stories(make("dense", tiny.dataset.vocab_size), windows, tiny.dataset.tokenizer(), 16)
    assert max(len(story["tokens"]) for story in stories) == 15
    assert sum(len(story["tokens"]) for story in stories) <= EXPLORED_TOKENS
    assert any(story["end_loss"] is None for story in stories)


def test_tokens_are_named_byte_for_byte(tokenizer: TextTokenizer) -> None:
    ids = tokenizer.encode("a 猫")
    assert b"".join(tokenizer.spell(ids)) == "a 猫".encode()
    assert "".join(token_name(tokenizer, index) for index in [*ids, 0]).endswith("<|endoftext|>")
    single = tokenizer.encode("\u00e9")  # never trained on: its two bytes are two tokens
    assert [token_name(tokenizer, index) for index in single] == ["\\xc3", "\\xa9"]


# ------------------------------------------------------------------------------------------------ watching


def test_an_evaluation_shows_every_real_token_once(tiny: Any) -> None:
    model = make("learned", tiny.dataset.vocab_size)
    windows = eval_windows(tiny.dataset, "validation", 256, 0, 0)
    seen: list[int] = []
    counts_LE = np.zeros((3, 5), np.int64)

    def watch(inputs_T: Any, ids_LTK: Any) -> None:
        seen.extend(inputs_T.tolist())
        for layer, ids_TK in enumerate(ids_LTK):
            assert len(ids_TK) == len(inputs_T)
            for expert in ids_TK.ravel().tolist():
                counts_LE[layer, expert] += 1

    found = evaluate(model, windows, end_of_text=0, watch=watch)
    assert sorted(seen) == sorted(windows.inputs_WS[windows.unit_WS >= 0].tolist())
    for layer, row in enumerate(found.routing):
        assert row["usage"] == pytest.approx((counts_LE[layer] / counts_LE[layer].sum()).tolist())
