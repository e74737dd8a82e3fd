"""Project Gutenberg books: one .txt file is one document; the licence and header around a book are stripped.

Not for: line wraps, tables of contents, footnotes or `_italics_`, which stay as they are, nor for fetching books
(`fetch.books`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from equipoise.data.corpora.reading import describe, find_files, named_split, show, whole_text
from equipoise.data.corpora.source import Document, Source, fingerprint
from equipoise.errors import DataError
from equipoise.spec.data import GutenbergCorpus, fetch_command

EXPECTED = "a folder of Project Gutenberg books (.txt, UTF-8)"
MAX_STRIPPED = 0.5  # a marker met in the wrong place can take a whole book; its licence is about 19 kB

_THE = r"(?:THE |THIS )?PROJECT GUTENBERG(?:'S|’S|-TM|™)?"
_HEADER_ENDS = (
    # Since about 2003. The title may be wrapped onto a second line; the marker ends with the next asterisks.
    re.compile(rf"^\*\*\* ?START OF {_THE} E-?(?:BOOK|TEXT)[^*]{{0,300}}\*\*\*[^\n]*\n", re.I | re.M),
    # Before: the "small print" stood in front of the book.
    re.compile(r"^\*END[* ]+THE SMALL PRINT!? ?FOR [^\n]{0,80}\*END\*[^\n]*\n", re.I | re.M),
)
_FOOTER_START = re.compile(
    rf"^(?:\*\*\* ?END OF {_THE} E-?(?:BOOK|TEXT)|\**\s?END OF {_THE} (?:E-?(?:BOOK|TEXT)|[A-Z“\"'_]))", re.I | re.M
)
_CREDITS = re.compile(
    r"\s*(?:Produced by|E-?text prepared by|This e-?(?:text|book) was (?:prepared|produced)|Transcribed from)"
    r"(?:[^\n]+\n)+",
    re.I,
)


def open_gutenberg(spec: GutenbergCorpus) -> Source:
    """The books of a folder; raises DataError when the path cannot be used or a strip would take over half a book."""
    if spec.path is None:
        raise DataError(f"corpus.path: not set; expected {EXPECTED}; to get some: {fetch_command(spec.kind)}")
    path = Path(spec.path)
    found, ignored = find_files(path, (".txt",), EXPECTED)
    in_folder = path.is_dir()
    files = tuple(describe(file, name, named_split(name) if in_folder else None) for file, name in found)
    shares = {name: stripped_share(file, whole_text(file))[1] for file, name in found}

    def read() -> Iterator[Document]:
        for (file, _), source in zip(found, files, strict=True):
            body, _share = stripped_share(file, whole_text(file))
            yield Document(text=body, split=source.split, where=show(file))

    return Source(
        kind=spec.kind,
        title="Project Gutenberg books",
        licence="public domain in the United States, as Project Gutenberg states for each book",
        files=files,
        fingerprint=fingerprint(spec.kind, files),
        read=read,
        notes=tuple(_notes(shares, ignored)),
    )


def _notes(shares: dict[str, float], ignored: int) -> list[str]:
    stripped = {name: share for name, share in shares.items() if share > 0}
    notes = [f"{ignored} files that do not end in .txt were ignored"] if ignored else []
    if stripped:
        most = max(stripped, key=lambda name: stripped[name])
        notes.append(
            f"Project Gutenberg boilerplate stripped from {len(stripped)} of {len(shares)} books, "
            f"at most {100 * stripped[most]:.1f} % of a book ({most})"
        )
    return notes


def stripped_share(file: Path, text: str) -> tuple[str, float]:
    """The book without boilerplate, and the share of its UTF-8 bytes that was taken off.

    A book without any marker comes back as it is, with share 0. Raises DataError beyond half of the book.
    """
    body = strip_boilerplate(text)
    size = len(text.encode())
    share = 1 - len(body.encode()) / size if size else 0.0
    if share > MAX_STRIPPED:
        raise DataError(
            f"{show(file)}: stripping the Project Gutenberg boilerplate would take {100 * share:.0f} % of the book; "
            f"expected at most {100 * MAX_STRIPPED:.0f} %: strip it by hand or take the file out"
        )
    return body, share


def is_cut_off(text: str) -> bool:
    """Whether `text` has the end of a header and no start of a footer: the rest of the book did not arrive.

    Of the older header ("small print") this cannot be told, because some of those books have no footer.
    """
    header = _HEADER_ENDS[0].search(text)
    return header is not None and not _FOOTER_START.search(text, header.end())


def strip_boilerplate(text: str) -> str:
    """`text` between the end of the header and the start of the footer; unchanged where there is neither."""
    lower = text.lower()
    if "project gutenberg" not in lower and "small print" not in lower:  # 20 times as fast as looking for the markers
        return text
    begin = 0
    for pattern in _HEADER_ENDS:
        if header := pattern.search(text):
            begin = max(begin, header.end())
    if begin and (credit := _CREDITS.match(text, begin)):
        begin = credit.end()
    footer = _FOOTER_START.search(text, begin)
    if not begin and not footer:
        return text
    return text[begin : footer.start() if footer else len(text)].strip("\n") + "\n"
