"""Files into text, strictly: which files a path means, their hashes, and UTF-8 with line ends as `\\n`.

Every fault is one line that names the file, the byte or line, and what would be accepted. CRLF and CR become `\\n`
(the one change made to text, so bytes are counted after it) and a leading byte-order mark is removed; form feeds, NUL
and U+2028 stay text.

Not for: what the text means (`text`, `tinystories`, `gutenberg`).
"""

from __future__ import annotations

import codecs
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from equipoise.data.corpora.source import SourceFile, Split
from equipoise.errors import DataError
from equipoise.faults import printable
from equipoise.files import file_sha256

CHUNK_BYTES = 1 << 20  # read size while looking for a bad byte: bounds memory, large enough to be quick
SNIFF_BYTES = 4096  # a page is enough to tell UTF-16 from text

MANIFEST = "manifest.json"
"""What the files of a folder are and where they are from, beside files that were fetched (`fetch.manifest`)."""


def show(path: Path | str) -> str:
    """A path for a one-line message: characters that cannot be printed are escaped."""
    return printable(str(path))


def find_files(path: Path, suffixes: Sequence[str], expected: str) -> tuple[list[tuple[Path, str]], int]:
    """The files `path` means, as (file, name relative to it) in order of name, and how many others were ignored.

    A file stands for itself; a folder for every file below it with one of the lower-case `suffixes`, except hidden
    ones; a manifest of fetched files is not counted either; symbolic links to folders are not followed. Raises
    DataError when the path is missing, special, of another suffix, or holds no such file; `expected` says what was
    wanted.
    """
    mode = _mode(path, expected)
    if stat.S_ISREG(mode):
        if path.suffix.lower() not in suffixes:
            raise DataError(f"corpus.path: {show(path)} ends in {path.suffix!r}; expected {expected}")
        return [(path, path.name)], 0
    if not stat.S_ISDIR(mode):
        raise DataError(f"corpus.path: {show(path)} is neither a file nor a folder; expected {expected}")
    found: list[tuple[Path, str]] = []
    ignored = 0
    for folder, folders, names in os.walk(path, onerror=_cannot_list):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            file = Path(folder) / name
            if name.startswith(".") or name == MANIFEST:
                continue
            if file.suffix.lower() not in suffixes:
                ignored += 1
                continue
            if not stat.S_ISREG(_mode(file, expected)):
                raise DataError(f"{show(file)} is a special file; expected a regular file")
            found.append((file, file.relative_to(path).as_posix()))
    if not found:
        raise DataError(
            f"corpus.path: {show(path)} holds no file ending in {' or '.join(suffixes)}; expected {expected}"
        )
    return sorted(found, key=lambda item: item[1]), ignored


def _mode(path: Path, expected: str) -> int:
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        raise DataError(f"corpus.path: {show(path)} does not exist; expected {expected}") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise DataError(f"corpus.path: {show(path)} cannot be read ({_reason(error)}); expected {expected}") from None


def _cannot_list(error: OSError) -> None:
    raise DataError(f"{show(error.filename)}: folder cannot be read ({_reason(error)})") from None


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def named_split(name: str) -> Split | None:
    """The split that a relative file name states: the last part of the path holding `valid` or `train` decides.

    >>> named_split("TinyStoriesV2-GPT4-valid.txt"), named_split("train/0001.txt"), named_split("notes.txt")
    ('validation', 'train', None)
    """
    for part in reversed(name.casefold().split("/")):
        if "valid" in part:
            return "validation"
        if "train" in part:
            return "train"
    return None


def describe(file: Path, name: str, split: Split | None) -> SourceFile:
    """Size and SHA-256 of a file; raises DataError when it cannot be read.

    Bytes of a name that are not UTF-8 are recorded as their escapes.
    """
    name = os.fsencode(name).decode("utf-8", "backslashreplace")
    try:
        return SourceFile(name=name, num_bytes=file.stat().st_size, sha256=file_sha256(file), split=split)
    except OSError as error:
        raise DataError(f"{show(file)}: cannot be read ({_reason(error)})") from None


def read_lines(file: Path) -> Iterator[str]:
    """The lines of a UTF-8 file without their line end, streaming; only LF, CRLF and CR end a line.

    Raises DataError naming line and byte of the first byte that is not UTF-8, or saying that the file is UTF-16.
    """
    _refuse_other_encodings(file)
    try:
        with file.open(encoding="utf-8-sig", newline=None) as stream:
            for line in stream:
                yield line.removesuffix("\n")
    except UnicodeDecodeError:
        raise DataError(_bad_byte(file)) from None
    except OSError as error:
        raise DataError(f"{show(file)}: cannot be read ({_reason(error)})") from None


def whole_text(file: Path) -> str:
    """A whole UTF-8 file as text, line ends as `\\n`; raises DataError as `read_lines` does."""
    _refuse_other_encodings(file)
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(_bad_byte(file)) from None
    except OSError as error:
        raise DataError(f"{show(file)}: cannot be read ({_reason(error)})") from None


def _refuse_other_encodings(file: Path) -> None:
    """UTF-16 and UTF-32 decode as UTF-8 only by accident (every other byte NUL), gzip never: say what it really is."""
    try:
        with file.open("rb") as stream:
            head = stream.read(SNIFF_BYTES)
    except OSError as error:
        raise DataError(f"{show(file)}: cannot be read ({_reason(error)})") from None
    found = ""
    if head.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        found = "UTF-32 (by its byte-order mark)"
    elif head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        found = "UTF-16 (by its byte-order mark)"
    elif head.startswith(b"\x1f\x8b"):
        found = "gzip-compressed"
    elif len(head) >= 4:
        # Western text in UTF-16 without a mark has a NUL in nearly every second byte, and none in the others.
        shares = [head[start::2].count(0) / len(head[start::2]) for start in (0, 1)]
        if max(shares) > 0.5 and min(shares) < 0.05:
            found = "UTF-16 (every other byte is NUL)"
    if found:
        raise DataError(f"{show(file)}: {found}; expected UTF-8 text, convert it first")


def _bad_byte(file: Path) -> str:
    """Find the first byte that is not UTF-8, by a second and slower reading; returns the message."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    done = 0  # bytes decoded without fault, those the decoder holds back not counted
    lines, after_cr = 1, False
    with file.open("rb") as stream:
        while True:
            chunk = stream.read(CHUNK_BYTES)
            held = decoder.getstate()[0]
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                before = (held + chunk)[: error.start]
                line = lines + _count_line_ends(before, after_cr)
                return (
                    f"{show(file)}: not UTF-8: line {line}, byte offset {done + error.start} "
                    f"(0x{error.object[error.start]:02x}: {error.reason}); expected UTF-8 text"
                )
            if not chunk:
                return f"{show(file)}: not UTF-8; expected UTF-8 text"
            whole = held + chunk
            whole = whole[: len(whole) - len(decoder.getstate()[0])]
            lines += _count_line_ends(whole, after_cr)
            after_cr = whole.endswith(b"\r")
            done += len(whole)


def _count_line_ends(data: bytes, after_cr: bool) -> int:
    """Line ends in `data`: LF, CR and CRLF (one), where `after_cr` says that a CR came just before."""
    return data.count(b"\n") + data.count(b"\r") - data.count(b"\r\n") - (after_cr and data.startswith(b"\n"))
