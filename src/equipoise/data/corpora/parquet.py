"""A column of a .parquet file as documents, a batch of rows at a time, through pyarrow (the extra `data`).

Not for: any other column, nor for what the texts mean (`text`, `tinystories`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from equipoise.data.corpora.reading import show
from equipoise.data.corpora.source import Document, Split
from equipoise.errors import DataError
from equipoise.faults import reason

ROWS = 512  # rows made into Python texts at once
BATCH_BYTES = 1 << 26  # about that much text, where rows are so long that it is fewer of them
READ_BYTES = 1 << 20  # read ahead in a column, instead of the whole column of a row group


def is_parquet(file: Path) -> bool:
    """Whether a file is to be read here, by its name."""
    return file.suffix.lower() == ".parquet"


def column_bytes(file: Path, column: str, advice: str = "") -> int:
    """About how many bytes of text a column holds: its uncompressed size, in which repeats may count once.

    Raises DataError for a file or column that cannot be read.
    """
    with _opened(file, column, advice) as parquet:
        return _bytes(parquet.metadata, column)


def _bytes(meta: Any, column: str) -> int:
    paths = [meta.schema.column(index).path for index in range(len(meta.schema))]  # names may recur within others
    index = paths.index(column)
    return sum(meta.row_group(row).column(index).total_uncompressed_size for row in range(meta.num_row_groups))


def read_column(file: Path, column: str, split: Split | None, advice: str = "") -> Iterator[Document]:
    """One document a row, line ends as `\\n`; memory does not grow with the file.

    Raises DataError naming file, and row (from 1) where there is one, for a value that is no text; `advice` says in
    which way another column is named.
    """
    import pyarrow as pa

    with _opened(file, column, advice) as parquet:
        number = 0
        try:
            meta = parquet.metadata
            rows = BATCH_BYTES * meta.num_rows // max(1, _bytes(meta, column))
            for batch in parquet.iter_batches(batch_size=min(ROWS, max(1, rows)), columns=[column], use_threads=False):
                texts = batch.column(0)
                for value in texts:
                    number += 1
                    where = f"{show(file)}:{number}"
                    try:
                        text = value.as_py()
                    except UnicodeDecodeError as error:
                        raise DataError(
                            f"{where}: column {column!r} is not UTF-8 ({error.reason}); expected UTF-8 text"
                        ) from None
                    if text is None:
                        raise DataError(f"{where}: column {column!r} is null; expected a text")
                    yield Document(text=text.replace("\r\n", "\n").replace("\r", "\n"), split=split, where=where)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{show(file)}: cannot be read after row {number} ({reason(error)})") from None


def _opened(file: Path, column: str, advice: str) -> Any:
    """The opened file, whose column exists and holds texts; else DataError."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise DataError(
            f"{show(file)}: .parquet files are read by pyarrow, which is not installed; pip install 'equipoise[data]'"
        ) from None
    try:
        parquet = pq.ParquetFile(file, memory_map=False, buffer_size=READ_BYTES, pre_buffer=False)
        schema = parquet.schema_arrow
        names = schema.names
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the last: a name of a column, if damaged
        raise DataError(f"{show(file)}: cannot be read ({reason(error)}); expected a .parquet file") from None
    if names.count(column) > 1:
        parquet.close()
        raise DataError(f"{show(file)}: {names.count(column)} columns {column!r}; expected one of that name{advice}")
    if column not in names:
        known = ", ".join(repr(name) for name in names[:8]) or "none"
        parquet.close()
        raise DataError(f"{show(file)}: no column {column!r}; columns there: {known}{advice}")
    kind = schema.field(column).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        parquet.close()
        raise DataError(f"{show(file)}: column {column!r} is {kind}; expected texts (a column of strings){advice}")
    return parquet
