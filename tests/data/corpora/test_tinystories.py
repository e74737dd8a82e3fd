"""The official TinyStories format: separators, blank space, streaming, and the real files."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from equipoise.data.corpora import open_corpus
from equipoise.errors import DataError
from equipoise.spec.data import TinyStoriesCorpus


def stories(path: Path) -> list[tuple[str, str | None, str]]:
    return [(d.text, d.split, d.where) for d in open_corpus(TinyStoriesCorpus(path=str(path))).read()]


def test_stories_are_cut_at_separator_lines(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(
        b"\xef\xbb\xbf\n\nOne.\r\nTwo.  \n\n<|endoftext|>\n<|endoftext|>\n   \n  <|endoftext|>  \r\n"
        b"\x0cA <|endoftext|> inside.\xe2\x80\xa8Same line.\n<|endoftext|>\nLast, without a separator"
    )
    assert stories(file) == [
        ("One.\nTwo.", None, f"{file}:1"),
        ("A <|endoftext|> inside.\u2028Same line.", None, f"{file}:10"),
        ("Last, without a separator", None, f"{file}:12"),
    ]


def test_official_names_give_the_splits(tmp_path: Path) -> None:
    for name in ("TinyStoriesV2-GPT4-train.txt", "TinyStoriesV2-GPT4-valid.txt", "extra.txt"):
        (tmp_path / name).write_text(f"{name}\n<|endoftext|>\n", encoding="utf-8")
    source = open_corpus(TinyStoriesCorpus(path=str(tmp_path)))
    assert [(d.text, d.split) for d in source.read()] == [
        ("TinyStoriesV2-GPT4-train.txt", "train"),
        ("TinyStoriesV2-GPT4-valid.txt", "validation"),
        ("extra.txt", None),
    ]
    assert source.licence == "CDLA-Sharing-1.0"


def test_a_large_file_takes_the_memory_of_one_story(tmp_path: Path) -> None:
    file = tmp_path / "train.txt"
    file.write_text("A story of some length, again and again.\n<|endoftext|>\n" * 20_000, encoding="utf-8")  # 1.1 MB
    source = open_corpus(TinyStoriesCorpus(path=str(file)))
    tracemalloc.start()
    try:
        count = sum(1 for _ in source.read())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == 20_000
    assert peak < 200_000


def test_unset_path_is_explained() -> None:
    with pytest.raises(DataError) as caught:
        open_corpus(TinyStoriesCorpus())
    assert str(caught.value) == (
        "corpus.path: not set; expected a folder of the official TinyStories .txt or .parquet files (*train*, "
        "*valid*), or one such file; to get them: equipoise data fetch tinystories"
    )


def test_real_stories(tinystories: Path) -> None:
    """Counts as the files' own documentation gives them."""
    source = open_corpus(TinyStoriesCorpus(path=str(tinystories)))
    counts: dict[str | None, int] = {}
    for document in source.read():
        counts[document.split] = counts.get(document.split, 0) + 1
        assert document.text == document.text.strip() and "<|endoftext|>" not in document.text
    assert counts == {"train": 15_980, "validation": 989}
