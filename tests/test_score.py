"""Any text is scored exactly: each token a target once, raw bytes below, nothing outside a document in its loss."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import equipoise.score as scoring
from equipoise.data.tokenizer import TextTokenizer, train_tokenizer
from equipoise.errors import DataError, DivergedError
from equipoise.model.transformer import Transformer, build
from equipoise.score import score_text
from equipoise.spec.data import BpeTokenizer, ByteTokenizer
from equipoise.spec.model import DenseFFN, ModelConfig, MoEFFN

TEXTS = ["Once upon a time, Zoë said “yes” to 猫 🦙.\n", "the cat and the dog and the hat", "a", "\n \n", "é", "x" * 90]


@pytest.fixture(scope="module")
def byte_tokenizer() -> TextTokenizer:
    return train_tokenizer(ByteTokenizer(), iter(()))


@pytest.fixture(scope="module")
def bpe_tokenizer() -> TextTokenizer:
    return train_tokenizer(BpeTokenizer(vocab_size=275), iter(TEXTS * 4))


def make(kind: str, vocab_size: int, **fields: Any) -> Transformer:
    router: Any = kind if kind in ("frozen", "hash", "random") else "learned"
    ffn = DenseFFN(d_ff=24) if kind == "dense" else MoEFFN(num_experts=3, top_k=2, d_expert=16, router=router)
    sizes = {"num_layers": 2, "num_heads": 2, "d_model": 24, "init_std": 0.2}
    return build(ModelConfig(**{**sizes, "vocab_size": vocab_size, "ffn": ffn, **fields}), seed=5)  # type: ignore[arg-type]


def rolling(model: Transformer, tokenizer: TextTokenizer, texts: list[str], context: int) -> tuple[float, float]:
    """Oracle: one forward pass per target over what precedes it in its window, nothing batched, nothing padded."""
    text_nats, end_nats = [], []
    for text in texts:
        ids = tokenizer.library.encode(text, add_special_tokens=False).ids
        window = [0]
        for place, target in enumerate([*ids, 0]):
            if place and place % context == 0:
                window = [0]
            with torch.no_grad():
                logits_V = model.logits(model(torch.tensor([window])).hidden_TD)[-1].double().numpy()
            nats = float(np.log(np.exp(logits_V - logits_V.max()).sum()) + logits_V.max() - logits_V[target])
            (text_nats if place < len(ids) else end_nats).append(nats)
            window.append(target)
    num_tokens, num_bytes = len(text_nats) + len(end_nats), sum(len(text.encode()) for text in texts)
    return math.fsum(text_nats + end_nats) / num_tokens, math.fsum(text_nats) / math.log(2) / num_bytes


@pytest.mark.parametrize("kind", ["dense", "moe", "hash", "random"])
@pytest.mark.parametrize("context", [7, 64])
def test_the_rolling_oracle(bpe_tokenizer: TextTokenizer, kind: str, context: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(scoring, "FORWARD_TOKENS", 50)  # several passes, rows of different lengths in one
    model = make(kind, bpe_tokenizer.vocab_size)
    found = score_text(model, bpe_tokenizer, TEXTS, context=context)
    loss, bpb = rolling(model, bpe_tokenizer, TEXTS, context)
    assert found.loss == pytest.approx(loss, rel=2e-6) and found.bpb == pytest.approx(bpb, rel=2e-6)
    assert found.num_documents == len(TEXTS)
    assert found.num_tokens == sum(len(bpe_tokenizer.encode(text)) + 1 for text in TEXTS)
    assert found.num_bytes == sum(len(text.encode()) for text in TEXTS)


def test_bytes_are_those_of_the_text_not_of_decoded_tokens(byte_tokenizer: TextTokenizer) -> None:
    """A uniform model over 257 ids pays log2 257 = 8.0056 bits a byte whatever the characters: é is 2 bytes, not 6."""
    model = make("dense", 257, tie_embeddings=False)
    with torch.no_grad():
        model.head.weight.zero_()  # type: ignore[union-attr]
    for text, num_bytes in (("é", 2), ("🦙", 4), ("abc", 3), (TEXTS[0], len(TEXTS[0].encode()))):
        found = score_text(model, byte_tokenizer, [text], context=16)
        assert (found.num_bytes, found.num_tokens) == (num_bytes, num_bytes + 1)
        assert found.bpb == pytest.approx(math.log2(257), rel=1e-6)
        assert found.loss == pytest.approx(math.log(257), rel=1e-6)


def test_bytes_of_tokens_add_up_to_those_of_the_text(bpe_tokenizer: TextTokenizer) -> None:
    for text in TEXTS:
        assert int(bpe_tokenizer.token_bytes[bpe_tokenizer.encode(text)].sum()) == len(text.encode())


def test_a_document_is_scored_alone(bpe_tokenizer: TextTokenizer) -> None:
    """Together, in any order, or one by one: the same nats."""
    model = make("moe", bpe_tokenizer.vocab_size)
    together = score_text(model, bpe_tokenizer, TEXTS, context=16)
    backwards = score_text(model, bpe_tokenizer, TEXTS[::-1], context=16)
    alone = [score_text(model, bpe_tokenizer, [text], context=16) for text in TEXTS]
    total = sum(one.loss * one.num_tokens for one in alone)
    assert together.loss * together.num_tokens == pytest.approx(total, rel=1e-6)
    assert backwards.loss == pytest.approx(together.loss, rel=1e-6)
    bits = sum(one.bpb * one.num_bytes for one in alone)
    assert backwards.bpb * together.num_bytes == pytest.approx(bits, rel=1e-6)


def test_empty_texts_are_passed_over(byte_tokenizer: TextTokenizer) -> None:
    model = make("dense", 257)
    assert score_text(model, byte_tokenizer, ["", "ab", ""], context=4) == score_text(
        model, byte_tokenizer, ["ab"], context=4
    )
    with pytest.raises(DataError, match="no text; expected at least one document that is not empty"):
        score_text(model, byte_tokenizer, ["", ""], context=4)


def test_progress_counts_targets(byte_tokenizer: TextTokenizer, monkeypatch: Any) -> None:
    monkeypatch.setattr(scoring, "FORWARD_TOKENS", 8)
    told: list[int] = []
    score_text(make("dense", 257), byte_tokenizer, ["abcdefghijk", "abcdef"], context=4, on_progress=told.append)
    assert told == [8, 16]  # rows of 4 and 4, of 4 and 4, and the rest, of 3


def test_a_loss_that_is_no_number(byte_tokenizer: TextTokenizer) -> None:
    model = make("dense", 257)
    with torch.no_grad():
        model.embed.weight[5] = math.nan
    with pytest.raises(DivergedError, match="scoring: the loss is not finite"):
        score_text(model, byte_tokenizer, ["abc"], context=4)
