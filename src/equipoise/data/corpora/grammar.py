"""The built-in corpus: endless small stories about a seeded world, each with its exact log-probability.

The three splits are three independent streams of the same grammar, so a story met in two of them is a draw met twice:
such duplicates are counted and kept. Not for: the notation (`rules`) or the stories (`stories`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import numpy as np

from equipoise.config import canonical
from equipoise.data.corpora.rules import build, tell
from equipoise.data.corpora.source import Document, Source, Split
from equipoise.data.corpora.stories import story_rules
from equipoise.rng import stream
from equipoise.spec.data import GrammarCorpus

STORY_BYTES = 385  # of a story, the mean over 50,000
UNIFORMS_AT_ONCE = 8192  # drawn in one NumPy call: 64 KiB, enough to make the call's own cost vanish


def open_grammar(spec: GrammarCorpus) -> Source:
    """The stories of `spec`: `num_documents` for train and the other two splits' numbers, from disjoint seeds.

    The first n documents of a split are the same for every number of documents.
    """
    rules = story_rules(spec.seed)
    grammar = build(rules)
    counts: tuple[tuple[Split, int], ...] = (
        ("train", spec.num_documents),
        ("selection", spec.num_selection),
        ("validation", spec.num_validation),
    )

    def read() -> Iterator[Document]:
        for split, count in counts:
            uniform = _uniforms(stream(spec.seed, "grammar", split))
            for index in range(count):
                telling = tell(grammar, uniform)
                yield Document(
                    text=telling.text,
                    split=split,
                    where=f"grammar:{split}:{index}",
                    log_prob_text=telling.log_prob_text,
                    log_prob_end=telling.log_prob_end,
                )

    content = {"rules": rules, "seed": spec.seed, "counts": counts}
    return Source(
        kind=spec.kind,
        title=f"story grammar, world {spec.seed}",
        licence="generated; no licence needed",
        files=(),
        fingerprint=hashlib.sha256(canonical(content).encode()).hexdigest(),
        read=read,
        sizes=(STORY_BYTES * sum(count for _, count in counts),),
        exact_duplicates_kept=True,
    )


def _uniforms(generator: np.random.Generator) -> Callable[[], float]:
    """Independent numbers in [0, 1), drawn many at a time."""

    def numbers() -> Iterator[float]:
        while True:
            yield from generator.random(UNIFORMS_AT_ONCE).tolist()

    return numbers().__next__
