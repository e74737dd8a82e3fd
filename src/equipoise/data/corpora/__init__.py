"""One file a kind of corpus; each turns a spec into a `Source`: provenance, and a restartable stream of documents."""

from __future__ import annotations

from equipoise.data.corpora.grammar import open_grammar
from equipoise.data.corpora.gutenberg import open_gutenberg
from equipoise.data.corpora.source import SPLITS, Document, Source, SourceFile, Split
from equipoise.data.corpora.text import open_text
from equipoise.data.corpora.tinystories import open_tinystories
from equipoise.spec.data import Corpus, GrammarCorpus, GutenbergCorpus, TextCorpus

__all__ = ["SPLITS", "Document", "Source", "SourceFile", "Split", "open_corpus"]


def open_corpus(spec: Corpus) -> Source:
    """Open a corpus of any kind: find and hash its files. Raises DataError when it cannot be used."""
    if isinstance(spec, GrammarCorpus):
        return open_grammar(spec)
    if isinstance(spec, TextCorpus):
        return open_text(spec)
    if isinstance(spec, GutenbergCorpus):
        return open_gutenberg(spec)
    return open_tinystories(spec)
