"""Stripping Project Gutenberg's boilerplate: new, old and absent markers, and the refusal to strip a book away."""

from __future__ import annotations

from pathlib import Path

import pytest

from equipoise.data.corpora import open_corpus
from equipoise.data.corpora.gutenberg import strip_boilerplate
from equipoise.errors import DataError
from equipoise.spec.data import GutenbergCorpus

BOOK = "CHAPTER I.\n\nIt was a dark night.\n\n*** a line of stars ***\n\nThe end of the story came.\n" * 20
HEADER = "The Project Gutenberg EBook of A Book, by Somebody\n\nThis eBook is for the use of anyone anywhere.\n\n"
LICENCE = "\n\nUpdated editions will replace the previous one.\n*** START: FULL LICENSE ***\nTerms of use.\n"


MARKERS = [
    (
        "*** START OF THIS PROJECT GUTENBERG EBOOK A BOOK ***\n",
        "*** END OF THIS PROJECT GUTENBERG EBOOK A BOOK ***\n",
    ),
    (
        "*** START OF THE PROJECT GUTENBERG EBOOK A VERY LONG\nTITLE INDEED ***\n",
        "*** END OF THE PROJECT GUTENBERG EBOOK A VERY LONG\nTITLE INDEED ***\n",
    ),
    (
        "***START OF THE PROJECT GUTENBERG E-TEXT A BOOK***\n",
        "***END OF THE PROJECT GUTENBERG E-TEXT A BOOK***\n",
    ),
    (
        "*** START OF THIS PROJECT GUTENBERG EBOOK A BOOK ***\n\n\n\nProduced by Some One and\nthe Team\n",
        "End of the Project Gutenberg EBook of A Book, by Somebody\n\n*** END OF THIS PROJECT GUTENBERG EBOOK ***\n",
    ),
    (
        "*END*THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.29.93*END*\n",
        "End of Project Gutenberg's A Book, by Somebody\n",
    ),
    (
        "*END THE SMALL PRINT! FOR PUBLIC DOMAIN EBOOKS*Ver.02/11/02*END*\n",
        "End of The Project Gutenberg Etext of A Book\n",
    ),
]


@pytest.mark.parametrize(("start", "end"), MARKERS)
def test_markers_of_every_age(start: str, end: str) -> None:
    assert strip_boilerplate(HEADER + start + "\n\n" + BOOK + "\n\n" + end + LICENCE) == BOOK


def test_a_header_or_a_footer_alone() -> None:
    assert strip_boilerplate(HEADER + "*** START OF THE PROJECT GUTENBERG EBOOK X ***\n" + BOOK) == BOOK
    assert strip_boilerplate(BOOK + "*** END OF THE PROJECT GUTENBERG EBOOK X ***\n" + LICENCE) == BOOK


@pytest.mark.parametrize("text", [BOOK, "\n  " + BOOK + "\n\n", "In praise of Project Gutenberg.\n" + BOOK, ""])
def test_a_clean_book_is_left_as_it_is(text: str) -> None:
    assert strip_boilerplate(text) == text


def test_credits_are_left_where_no_header_was() -> None:
    text = "Produced by hand in 1850.\n" + BOOK
    assert strip_boilerplate(text) == text


def test_a_strip_of_over_half_a_book_is_refused(tmp_path: Path) -> None:
    (tmp_path / "fine.txt").write_text(BOOK, encoding="utf-8")
    file = tmp_path / "lost.txt"
    kept = "x" * 490
    cut = "*** END OF THE PROJECT GUTENBERG EBOOK X ***\n".ljust(509, "y")
    file.write_text(kept + "\n" + cut, encoding="utf-8")
    with pytest.raises(DataError) as caught:
        open_corpus(GutenbergCorpus(path=str(tmp_path)))
    assert str(caught.value) == (
        f"{file}: stripping the Project Gutenberg boilerplate would take 51 % of the book; expected at most 50 %: "
        "strip it by hand or take the file out"
    )
    file.write_text(kept + "x" * 20 + "\n" + cut[:-20], encoding="utf-8")  # 49 %
    open_corpus(GutenbergCorpus(path=str(tmp_path)))


def test_what_was_stripped_is_noted(tmp_path: Path) -> None:
    header = HEADER + "*** START OF THE PROJECT GUTENBERG EBOOK X ***\n"
    (tmp_path / "a.txt").write_text(header + BOOK, encoding="utf-8")
    (tmp_path / "b.txt").write_text(BOOK, encoding="utf-8")
    (tmp_path / "c.epub").touch()
    source = open_corpus(GutenbergCorpus(path=str(tmp_path)))
    share = 100 * len(header) / len(header + BOOK)
    assert source.notes == (
        "1 files that do not end in .txt were ignored",
        f"Project Gutenberg boilerplate stripped from 1 of 2 books, at most {share:.1f} % of a book (a.txt)",
    )
    assert [d.text for d in source.read()] == [BOOK, BOOK]


def test_unset_path_is_explained() -> None:
    with pytest.raises(DataError, match=r"^corpus.path: not set; .*: equipoise data fetch gutenberg 11 84 "):
        open_corpus(GutenbergCorpus())


def test_real_books_pass_untouched(gutenberg: Path) -> None:
    source = open_corpus(GutenbergCorpus(path=str(gutenberg)))
    assert len(source.files) == 48
    assert source.notes == ()
    assert sum(len(d.text.encode()) for d in source.read()) == sum(file.num_bytes for file in source.files)
