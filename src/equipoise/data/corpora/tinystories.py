"""The official TinyStories files (Eldan and Li, arXiv 2305.07759): stories separated by a line `<|endoftext|>`, or
.parquet files with a story a row in the column `text`.

Read line by line or by batches of rows, so a file of any size takes little memory. Not for: fetching the files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from equipoise.data.corpora.parquet import column_bytes, is_parquet, read_column
from equipoise.data.corpora.reading import describe, find_files, named_split, read_lines, show
from equipoise.data.corpora.source import Document, Source, Split, fingerprint
from equipoise.errors import DataError
from equipoise.spec.data import TinyStoriesCorpus, fetch_command

SEPARATOR = "<|endoftext|>"
MAX_STORY_CHARS = 1 << 22
"""Some thousand times a story; more than that is another format, and should not fill the memory first."""
EXPECTED_LINE = f"line {SEPARATOR}; expected stories separated by such lines, or corpus.kind = 'text'"
EXPECTED = "a folder of the official TinyStories .txt or .parquet files (*train*, *valid*), or one such file"
COLUMN = "text"


def open_tinystories(spec: TinyStoriesCorpus) -> Source:
    """The stories of a folder or file; raises DataError when the path is unset or cannot be used."""
    if spec.path is None:
        raise DataError(f"corpus.path: not set; expected {EXPECTED}; to get them: {fetch_command(spec.kind)}")
    path = Path(spec.path)
    found, ignored = find_files(path, (".txt", ".parquet"), EXPECTED)
    texts = [(file, name) for file, name in found if not is_parquet(file)]
    if texts:  # a download of everything has the same stories in both formats
        found, ignored = texts, ignored + len(found) - len(texts)
    ending = ".txt" if texts else ".parquet"
    in_folder = path.is_dir()
    files = tuple(describe(file, name, named_split(name) if in_folder else None) for file, name in found)

    def read() -> Iterator[Document]:
        for (file, _), source in zip(found, files, strict=True):
            yield from (_read_stories if texts else _read_rows)(file, source.split)

    notes = [f"{ignored} files that do not end in {ending} were ignored"] if ignored else []
    return Source(
        kind=spec.kind,
        title="TinyStories (Eldan and Li, 2023, arXiv 2305.07759)",
        licence="CDLA-Sharing-1.0",
        files=files,
        fingerprint=fingerprint(spec.kind, files),
        read=read,
        notes=tuple(notes),
        sizes=tuple(column_bytes(file, COLUMN) for file, _ in found if not texts),
    )


def _read_rows(file: Path, split: Split | None) -> Iterator[Document]:
    """Each row without the blank space around it, so that a story is the same document from either format."""
    for document in read_column(file, COLUMN, split):
        if text := document.text.strip():
            yield replace(document, text=text)


def _read_stories(file: Path, split: Split | None) -> Iterator[Document]:
    """Each story without the blank space around it; a file that ends without a separator ends a story.

    Nothing between two separators is no story. A separator inside a line is text. Raises DataError for a file without
    any separator, and for a text between two that is no story by its length.
    """
    lines: list[str] = []
    name = show(file)
    first = 1
    number = size = 0
    for number, line in enumerate(read_lines(file), start=1):
        if line.strip() != SEPARATOR:
            lines.append(line)
            size += len(line) + 1
            if size > MAX_STORY_CHARS:
                raise DataError(f"{name}:{first}: over {MAX_STORY_CHARS:,} characters without a {EXPECTED_LINE}")
            continue
        size = 0
        if text := "\n".join(lines).strip():
            yield Document(text=text, split=split, where=f"{name}:{first}")
        lines.clear()
        first = number + 1
    text = "\n".join(lines).strip()
    if text and first == 1:
        raise DataError(f"{name}: no {EXPECTED_LINE}")
    if text:
        yield Document(text=text, split=split, where=f"{name}:{first}")
