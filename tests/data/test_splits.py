"""Splits against a stupid oracle: sets of texts, one document at a time; and every message about too few documents."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.data.corpora import SPLITS, Document, Source, SourceFile, Split, open_corpus
from equipoise.data.splits import Assignment, normalise, place, read_documents
from equipoise.errors import DataError
from equipoise.spec.data import GrammarCorpus, TinyStoriesCorpus

Given = Sequence[tuple[str, Split | None]]


def source(documents: Given, *, keep: bool = False) -> Source:
    """A corpus of these documents, in a file a named split."""
    files = tuple(
        SourceFile(name=f"{split or 'any'}.txt", num_bytes=0, sha256="", split=split)
        for split in dict.fromkeys(split for _, split in documents)
    )
    return Source(
        kind="text",
        title="",
        licence="",
        files=files,
        fingerprint="",
        read=lambda: (Document(text=text, split=split, where="") for text, split in documents),
        exact_duplicates_kept=keep,
    )


def assign(source: Source) -> Assignment:
    """Read the whole source once and place every document."""
    return place(source, read_documents(source, lambda: None))


def names(assignment: Assignment) -> list[str | None]:
    return [None if code < 0 else SPLITS[code] for code in assignment.split_of]


def numbered(count: int, split: Split | None = None) -> list[tuple[str, Split | None]]:
    return [(f"story number {index}", split) for index in range(count)]


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("A  cat", "a cat"),
        (" a\u2003cat\n", "a cat"),
        ("ﬁne", "fine"),
        ("Stra\u00dfe", "STRASSE"),
        ("e\u0301t\u00e9", "\u00e9te\u0301"),
        ("a\x1ccat", "a cat"),
    ],
)
def test_normalised_texts_agree(a: str, b: str) -> None:
    assert normalise(a) == normalise(b)


def test_normalising_keeps_what_differs() -> None:
    assert len({normalise(text) for text in ("a cat", "a cat.", "acat", "a bat")}) == 4


# ------------------------------------------------------------------------------------------------ by hash


def test_shares_of_many_documents() -> None:
    assigned = names(assign(source(numbered(20_000))))
    assert abs(assigned.count("validation") / 20_000 - 0.05) < 4 * (0.05 * 0.95 / 20_000) ** 0.5
    assert abs(assigned.count("selection") / 20_000 - 0.01) < 4 * (0.01 * 0.99 / 20_000) ** 0.5
    assert assigned.count(None) == 0


def test_a_document_stays_where_it_is_when_others_come_or_move() -> None:
    """From 1,000 documents on; and equal but for case and blanks means the same split."""
    few = dict(zip([t for t, _ in numbered(1500)], names(assign(source(numbered(1500)))), strict=True))
    reordered = [(text.upper() + " ", split) for text, split in reversed(numbered(4000))]
    many = dict(zip([t for t, _ in reordered], names(assign(source(reordered))), strict=True))
    assert {"validation", "selection", "train"} == set(few.values())
    assert all(many[text.upper() + " "] == split for text, split in few.items())


@pytest.mark.parametrize(
    ("count", "selection", "validation"), [(3, 1, 1), (4, 1, 1), (48, 1, 2), (100, 1, 5), (300, 3, 15), (999, 10, 50)]
)
def test_few_documents_are_counted_out_by_hash_order(count: int, selection: int, validation: int) -> None:
    documents = numbered(count)
    assigned = names(assign(source(documents)))
    by_hash = sorted(
        range(count),
        key=lambda i: int.from_bytes(hashlib.sha256(documents[i][0].encode()).digest()[:8], "little"),
    )
    assert sorted(by_hash[:selection]) == [i for i in range(count) if assigned[i] == "selection"]
    assert sorted(by_hash[selection : selection + validation]) == [
        i for i in range(count) if assigned[i] == "validation"
    ]


@pytest.mark.parametrize("count", [999, 1000, 1001, 1200])
def test_no_split_is_ever_empty(count: int) -> None:
    for start in range(5):
        documents: Given = [(f"{start} {index}", None) for index in range(count)]
        assert {"train", "selection", "validation"} == set(names(assign(source(documents))))


def test_duplicates_go_together_when_split_by_hash() -> None:
    assignment = assign(source([(text, None) for i in range(300) for text in (f"Story {i}", f"story  {i}")]))
    assigned = names(assignment)
    assert assigned[::2] == assigned[1::2]
    assert None not in assigned
    assert assignment.exact_duplicates == assignment.normalised_duplicates == {"selection": 0, "train": 0}


# ------------------------------------------------------------------------------------------------ by name


def test_an_official_validation_file_stays_as_it_is() -> None:
    """Duplicates and all; selection is cut from train, and what names no split is train."""
    documents: Given = [
        *numbered(500, "train"),
        *[(f"other {i}", None) for i in range(100)],
        *[("same", "validation")] * 3,
    ]
    assigned = names(assign(source(documents)))
    assert assigned[600:] == ["validation"] * 3
    assert assigned[:600].count("selection") == 6
    assert assigned[:600].count("train") == 594


def test_only_train_files_are_split_like_any() -> None:
    assert names(assign(source(numbered(200, "train")))) == names(assign(source(numbered(200))))


def test_train_files_beside_unnamed_ones_stay_train() -> None:
    documents: Given = [*numbered(200, "train"), *[(f"other {i}", None) for i in range(100)]]
    assigned = names(assign(source(documents)))
    assert assigned[:200] == ["train"] * 200
    assert assigned[200:] == names(assign(source([(f"other {i}", None) for i in range(100)])))


def test_duplicates_across_splits_are_dropped_from_train_then_selection() -> None:
    documents: Given = [
        ("Alpha", "validation"),
        ("ALPHA  ", "validation"),  # inside validation: stays
        ("Alpha", "selection"),  # exact
        ("beta", "selection"),
        ("alpha", "train"),  # normalised
        ("Alpha", "train"),  # exact
        ("beta", "train"),  # exact
        ("BETA", "train"),  # normalised
        ("gamma", "train"),
        ("gamma", "train"),  # inside train: stays
        (" \n", "train"),  # blank
    ]
    assignment = assign(source(documents))
    assert names(assignment) == [
        *["validation", "validation", None, "selection"],
        *[None, None, None, None, "train", "train", None],
    ]
    assert assignment.exact_duplicates == {"selection": 1, "train": 2}
    assert assignment.normalised_duplicates == {"selection": 0, "train": 2}
    assert assignment.num_blank == 1
    assert assignment.duplicates_dropped
    kept = assign(source(documents, keep=True))
    assert names(kept) == [split for _, split in documents[:-1]] + [None]
    assert (kept.exact_duplicates, kept.normalised_duplicates) == (
        assignment.exact_duplicates,
        assignment.normalised_duplicates,
    )
    assert not kept.duplicates_dropped


texts = st.text(alphabet="aAbB \n\u00e9", min_size=1, max_size=3)


@settings(max_examples=150)
@given(st.lists(st.tuples(texts, st.sampled_from([None, "train", "validation"])), min_size=1, max_size=25))
def test_nothing_leaks_and_nothing_is_lost(documents: list[tuple[str, Split | None]]) -> None:
    try:
        assignment = assign(source(documents))
    except DataError as error:
        assert "expected at least" in str(error)
        return
    assigned = names(assignment)
    by_split = {
        split: {normalise(t) for (t, _), s in zip(documents, assigned, strict=True) if s == split} for split in SPLITS
    }
    assert all(by_split.values())
    assert not by_split["train"] & (by_split["selection"] | by_split["validation"])
    assert not by_split["selection"] & by_split["validation"]
    official = [split == "validation" for _, split in documents]
    for (text, split), where, is_official in zip(documents, assigned, official, strict=True):
        if not normalise(text):
            assert where is None
        elif any(official):
            assert (where == "validation") == is_official
        elif where is None:  # dropped: its text is in a split that goes before
            assert split == "train" and normalise(text) in by_split["selection"] | by_split["validation"]
    dropped = sum(assignment.exact_duplicates.values()) + sum(assignment.normalised_duplicates.values())
    assert assigned.count(None) == dropped + assignment.num_blank


# ------------------------------------------------------------------------------------------------ messages


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([], "corpus text: no text in 0 files; expected at least 3 different documents"),
        ([(" ", None), ("\n\t", None)], "corpus text: no text in any.txt; expected at least 3 different documents"),
        (
            [("a", None), ("b", None), (" A", None)],
            "corpus text: 2 different documents in any.txt, too few to cut selection and validation from them; "
            "expected at least 3; a document is a .txt file or a .jsonl line",
        ),
        (
            [("a", "train"), ("b", "validation")],
            "corpus text: 1 different documents in 2 files, too few to cut selection from them; "
            "expected at least 2; a document is a .txt file or a .jsonl line",
        ),
        (
            [("b", "validation")],
            "corpus text: 0 different documents in validation.txt, too few to cut selection from them; "
            "expected at least 2; a document is a .txt file or a .jsonl line",
        ),
        (
            [("a", "train"), ("c", "train"), ("B ", "train"), ("b", "validation"), (" ", "validation")],
            None,
        ),
        (
            [("a", "train"), ("b", "train"), (" ", "validation")],
            "corpus text: the validation split is empty: no text in validation.txt; expected at least one document",
        ),
        (
            [("a", "train"), ("b", "train"), ("A", None), ("B", None)],
            "corpus text: the train split is empty in 2 files (2 documents of it repeat another split's); "
            "expected at least one document in each split",
        ),
    ],
)
def test_too_few_documents(documents: Given, message: str | None) -> None:
    if message is None:
        assign(source(documents))
        return
    with pytest.raises(DataError) as caught:
        assign(source(documents))
    assert str(caught.value) == message


def test_polls_while_reading() -> None:
    calls: list[int] = []
    read_documents(source(numbered(1000)), lambda: calls.append(1))
    assert len(calls) == 4

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read_documents(source(numbered(10)), stop)


# ------------------------------------------------------------------------------------------------ corpora


def test_the_grammar_names_every_split() -> None:
    grammar = open_corpus(GrammarCorpus(num_documents=50, num_validation=7, num_selection=3))
    assigned = names(assign(grammar))
    assert assigned == ["train"] * 50 + ["selection"] * 3 + ["validation"] * 7


def test_real_stories(tinystories: Path) -> None:
    opened = open_corpus(TinyStoriesCorpus(path=str(tinystories)))
    assignment = assign(opened)
    counts = np.bincount(assignment.split_of + 1, minlength=4)
    assert counts[3] == 989
    assert counts[2] == pytest.approx(160, abs=50)
    assert counts.sum() == 15_980 + 989
