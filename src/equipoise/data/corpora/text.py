"""Plain text: a .txt file, a line of a .jsonl file or a row of a .parquet file is one document; a folder holds any.

Text is taken as it stands, blank space included. Not for: books with a licence around them (`gutenberg`) or several
stories in a file (`tinystories`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from equipoise.data.corpora.parquet import column_bytes, is_parquet, read_column
from equipoise.data.corpora.reading import describe, find_files, named_split, read_lines, show, whole_text
from equipoise.data.corpora.source import Document, Source, Split, fingerprint
from equipoise.errors import DataError
from equipoise.spec.data import TextCorpus

SUFFIXES = (".txt", ".jsonl", ".parquet")
EXPECTED = "a .txt, .jsonl or .parquet file, or a folder of them"
ADVICE = "; name the right one with corpus.field"


def open_text(spec: TextCorpus) -> Source:
    """The documents of a file or folder; raises DataError when the path or a file cannot be used."""
    path = Path(spec.path)
    found, ignored = find_files(path, SUFFIXES, EXPECTED)
    in_folder = path.is_dir()
    files = tuple(describe(file, name, named_split(name) if in_folder else None) for file, name in found)

    def read() -> Iterator[Document]:
        for (file, _), source in zip(found, files, strict=True):
            if file.suffix.lower() == ".jsonl":
                yield from _read_jsonl(file, spec.field, source.split)
            elif is_parquet(file):
                yield from read_column(file, spec.field, source.split, ADVICE)
            else:
                yield Document(text=whole_text(file), split=source.split, where=show(file))

    notes = [f"{ignored} files that end in none of .txt, .jsonl and .parquet were ignored"] if ignored else []
    return Source(
        kind=spec.kind,
        title="plain text",
        licence="not stated; the user's own files",
        files=files,
        fingerprint=fingerprint(spec.kind, files, field=spec.field),
        read=read,
        notes=tuple(notes),
        sizes=tuple(
            column_bytes(file, spec.field, ADVICE) if is_parquet(file) else source.num_bytes
            for (file, _), source in zip(found, files, strict=True)
        ),
    )


def _read_jsonl(file: Path, field: str, split: Split | None) -> Iterator[Document]:
    """One document a line; blank lines are passed over. Raises DataError naming the line."""
    for number, line in enumerate(read_lines(file), start=1):
        if not line.strip():
            continue
        where = f"{show(file)}:{number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", None) or "nested too deeply or a number too long"
            column = f", column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
            raise DataError(f"{where}: not valid JSON ({reason}{column}); expected one JSON object a line") from None
        if not isinstance(value, dict):
            raise DataError(f"{where}: {_name(value)}; expected a JSON object with the field {field!r}")
        if field not in value:
            known = ", ".join(repr(key) for key in list(value)[:8]) or "none"
            raise DataError(f"{where}: no field {field!r}; fields there: {known}{ADVICE}")
        text = value[field]
        if not isinstance(text, str):
            raise DataError(f"{where}: field {field!r} is {_name(text)}; expected a text")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{where}: field {field!r} holds a lone surrogate \\u{ord(text[error.start]):04x} at character "
                f"{error.start}; expected Unicode text"
            ) from None
        yield Document(text=text.replace("\r\n", "\n").replace("\r", "\n"), split=split, where=where)


def _name(value: object) -> str:
    """The kind of a JSON value, in words."""
    names = {dict: "an object", list: "a list", bool: "a boolean", type(None): "null", str: "a text"}
    return names.get(type(value), "a number")
