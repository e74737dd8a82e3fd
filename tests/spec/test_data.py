"""Corpora and tokenizers as nouns: defaults, ranges, the vocabulary a study plans with."""

from __future__ import annotations

from typing import Any

import pytest

from equipoise.config import load
from equipoise.errors import ConfigError
from equipoise.spec.data import (
    BpeTokenizer,
    ByteTokenizer,
    Corpus,
    GrammarCorpus,
    GutenbergCorpus,
    TextCorpus,
    TinyStoriesCorpus,
    Tokenizer,
    requested_vocab_size,
)


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"kind": "grammar"}, GrammarCorpus(seed=0)),
        ({"kind": "text", "path": "a.jsonl", "field": "story"}, TextCorpus(path="a.jsonl", field="story")),
        ({"kind": "tinystories"}, TinyStoriesCorpus(path=None)),
        ({"kind": "gutenberg", "path": "books"}, GutenbergCorpus(path="books")),
    ],
)
def test_every_kind_of_corpus_loads(table: dict[str, Any], expected: Corpus) -> None:
    assert load(Corpus, table) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"kind": "grammar", "seed": -1}, "seed: -1 is not accepted; expected 0 or more"),
        ({"kind": "grammar", "num_documents": 0}, "num_documents: 0 is not accepted; expected at least 1"),
        ({"kind": "grammar", "num_validation": 0}, "num_validation: 0 is not accepted; expected at least 1"),
        ({"kind": "grammar", "num_selection": 0}, "num_selection: 0 is not accepted; expected at least 1"),
        (
            {"kind": "grammar", "path": "x"},
            "path: unknown field; known fields: kind, seed, num_documents, num_validation,",
        ),
        ({"kind": "text"}, "path: missing; expected a text"),
        ({"kind": "tinystories", "path": 3}, "path: 3 is not accepted; expected a text"),
    ],
)
def test_corpus_faults(table: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(Corpus, table)  # type: ignore[arg-type]
    assert str(caught.value).startswith(expected)


def test_vocabularies() -> None:
    assert requested_vocab_size(BpeTokenizer(vocab_size=1024)) == 1024
    assert requested_vocab_size(ByteTokenizer()) == 257
    assert load(Tokenizer, {"kind": "bpe", "vocab_size": 257}) == BpeTokenizer(vocab_size=257)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as caught:
        load(Tokenizer, {"kind": "bpe", "vocab_size": 256})  # type: ignore[arg-type]
    assert str(caught.value) == "vocab_size: 256 is not accepted; expected at least 257 (256 bytes and the end-of-text)"
