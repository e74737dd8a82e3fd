"""One file over HTTP, whole and verified, or a part of it that the next call goes on with.

Bytes go to `<name>.part`, with a note beside it of what they are a part of. A server is never believed: lengths are
counted, a resumed piece has to begin where the part ends, and what is known beforehand (size, SHA-256) has to agree.
Not for: naming the file in the end (`manifest.keep`), or knowing what it is.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.client import HTTPException, HTTPResponse
from io import FileIO
from pathlib import Path
from typing import Final

from equipoise.errors import DataError, EquipoiseError, ResourceError
from equipoise.faults import printable
from equipoise.fetch.web import Passing, ask, retry_after, shown
from equipoise.files import file_sha256, read_json, write_json
from equipoise.text import duration, size

CHUNK: Final = 1 << 16
"""Bytes read at most at a time."""
ATTEMPTS: Final = 5
"""In a row without progress before giving up: with waits of 1, 2, 4 and 8 s a short outage is survived."""
PROGRESS: Final = 1 << 20
"""Bytes that make an attempt count as progress; fewer could go on for ever."""
MAX_WAIT_S: Final = 300.0
"""The longest wait that a server is granted; beyond that a person decides."""
TIMEOUT_S: Final = 60.0
"""Seconds of silence after which a connection is given up."""
BUSY: Final = (408, 425, 429, 500, 502, 503, 504)
"""Statuses that may pass."""


class NotThere(DataError):
    """The server says that there is no such file."""


class Unusable(DataError):
    """What came is not what was asked for, and would not be another time."""


@dataclass(frozen=True, kw_only=True)
class Remote:
    """A file as it is known before it is fetched."""

    url: str
    name: str
    """What it is called here; never taken from a server."""
    max_bytes: int
    """More is not fetched, whatever the server says."""
    num_bytes: int | None = None
    sha256: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    fault: Callable[[Path], str] = lambda _: ""
    """What is wrong with the content, in a few words; empty when nothing is."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What a download tells while it goes on, and how it waits."""

    report: Callable[[str, int, int | None], None]
    """Is called with name, bytes that are here, and bytes of the whole file or None."""
    say: Callable[[str], None]
    sleep: Callable[[float], None] = time.sleep


def part_of(folder: Path, name: str) -> Path:
    """Where the bytes of a file lie until it is whole."""
    return folder / f"{name}.part"


def note_of(part: Path) -> Path:
    """Where it stands what a part is a part of."""
    return part.with_name(f"{part.name}.json")


def download(remote: Remote, folder: Path, progress: Progress, timeout_s: float = TIMEOUT_S) -> str:
    """Fetch `remote` into its part file, whole and verified; returns its SHA-256 (hex).

    What an earlier call left is gone on with where that is safe: the same address, and a SHA-256 known beforehand or
    a validator (ETag, date) of the server's. Raises NotThere, Unusable, DataError (given up; the part is kept) and
    ResourceError (the disk is full; the part is kept).
    """
    folder.mkdir(parents=True, exist_ok=True)
    part = part_of(folder, remote.name)
    failures = 0
    while True:
        before = _bytes(part)
        try:
            _receive(remote, part, progress, timeout_s)
            break
        except Passing as passing:
            failures = 1 if _bytes(part) - before >= PROGRESS else failures + 1
            where = f"{shown(remote.url)}: {passing}"
            if failures == ATTEMPTS:
                kept = f"; {size(_bytes(part))} are kept and gone on with next time" if _bytes(part) else ""
                raise DataError(f"{where}; given up after {failures} attempts{kept}") from None
            wait_s = max(passing.wait_s, 2.0 ** (failures - 1))
            if wait_s > MAX_WAIT_S:
                raise DataError(f"{where}; it asks to wait {duration(wait_s)}: try again then") from None
            progress.say(f"{where}; trying again in {duration(wait_s)}")
            progress.sleep(wait_s)
    found = file_sha256(part)
    if remote.sha256 is not None and found != remote.sha256:
        discard(part)
        raise Unusable(f"{shown(remote.url)}: SHA-256 {found}; expected {remote.sha256}; what came is thrown away")
    if wrong := remote.fault(part):
        discard(part)
        raise Unusable(f"{shown(remote.url)}: {wrong}")
    return found


def discard(part: Path) -> None:
    """Remove a part and its note."""
    part.unlink(missing_ok=True)
    note_of(part).unlink(missing_ok=True)


def _bytes(part: Path) -> int:
    return part.stat().st_size if part.is_file() else 0


@dataclass(frozen=True, kw_only=True)
class _Known:
    """What the note says of the whole file that a part belongs to."""

    validator: str = ""
    num_bytes: int | None = None


def _read_note(remote: Remote, part: Path) -> _Known | None:
    """What a part belongs to; None where going on with it would not be safe."""
    try:
        note = read_json(note_of(part))
    except EquipoiseError:
        return None
    validator, num_bytes = note.get("validator"), note.get("bytes")
    same = note.get("url") == remote.url and note.get("sha256") == remote.sha256
    if not same or not isinstance(validator, str) or not isinstance(num_bytes, int | None):
        return None
    if not validator and remote.sha256 is None:
        return None
    return _Known(validator=validator, num_bytes=num_bytes)


def _receive(remote: Remote, part: Path, progress: Progress, timeout_s: float) -> None:
    """One attempt: go on with the part, or begin it; returns when every byte is there."""
    have = _bytes(part)
    known = _read_note(remote, part) if have else None
    if known is None:
        discard(part)
        have, known = 0, _Known(num_bytes=remote.num_bytes)
    if have and have == known.num_bytes:
        return
    headers = dict(remote.headers)
    if have:
        headers["Range"] = f"bytes={have}-"
        if remote.sha256 is None:  # a wrong continuation would not be noticed: the server has to say that it is none
            headers["If-Range"] = known.validator
    response = ask(remote.url, headers, timeout_s)
    with response:
        if response.status == 416 and have:
            total = _content_range(response)[1]
            if total == have:
                return
            discard(part)
            raise Passing(f"the server cannot go on at byte {have:,}; beginning again")
        _check_status(remote, response)
        total = _total(remote, response, have, known, part)
        if response.status == 200:
            if have:
                progress.say(f"{remote.name}: the server does not go on with a file, or has another; beginning again")
            have = 0
            discard(part)
        _check_room(part, have, total)
        note = {"url": remote.url, "sha256": remote.sha256, "validator": _validator(response), "bytes": total}
        write_json(note_of(part), note)
        with part.open("ab", buffering=0) as file:
            _copy(remote, response, file, have, total, progress)


def _check_status(remote: Remote, response: HTTPResponse) -> None:
    """Raises unless the answer brings the file or the rest of it, as it is, and not a page about something else."""
    status = f"HTTP {response.status} {printable(response.reason or '')}".strip()
    if response.status in (404, 410):
        raise NotThere(f"{shown(remote.url)}: not there ({status})")
    if response.status in BUSY:
        raise Passing(status, retry_after(response.headers.get("Retry-After"), time.time()))
    if response.status not in (200, 206):
        raise DataError(f"{shown(remote.url)}: {status}")
    coding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        raise Unusable(f"{shown(remote.url)}: sent as {printable(coding)}; expected the file itself, uncompressed")
    if response.headers.get_content_type() in ("text/html", "application/xhtml+xml"):
        raise Unusable(f"{shown(remote.url)}: a web page came instead of the file")


def _content_range(response: HTTPResponse) -> tuple[int | None, int | None]:
    """First byte and whole length that a Content-Range header states."""
    found = re.fullmatch(
        r"bytes\s+(?:(\d{1,18})-\d{1,18}|\*)/(?:(\d{1,18})|\*)",
        response.headers.get("Content-Range", "").strip(),
        re.ASCII,
    )
    first, total = found.groups() if found else (None, None)
    return (None if first is None else int(first)), (None if total is None else int(total))


def _total(remote: Remote, response: HTTPResponse, have: int, known: _Known, part: Path) -> int | None:
    """Bytes of the whole file; None where it comes in pieces whose end can be told without.

    Raises Passing for a rest that does not fit the part (which is thrown away), Unusable for a length that cannot be.
    """
    if response.status == 206:
        first, total = _content_range(response)
        if not have or first != have or total is None or known.num_bytes not in (None, total):
            discard(part)
            raise Passing("the server went on with another piece than was asked for; beginning again")
        if remote.sha256 is None and _validator(response) not in ("", known.validator):  # it ignores If-Range
            discard(part)
            raise Passing("the server went on with another file than was begun; beginning again")
        return total
    stated = "" if response.chunked else response.headers.get("Content-Length", "").strip()  # RFC 9112, 6.3
    total = int(stated) if re.fullmatch(r"\d{1,18}", stated, re.ASCII) else None
    if total is None and not response.chunked and remote.num_bytes is None:
        raise Unusable(f"{shown(remote.url)}: the server does not say how long the file is")
    if total is not None and remote.num_bytes not in (None, total):
        raise Unusable(f"{shown(remote.url)}: {total:,} bytes; expected {remote.num_bytes:,}")
    total = remote.num_bytes if total is None else total
    if total is not None and total > remote.max_bytes:
        raise Unusable(f"{shown(remote.url)}: {total:,} bytes; expected at most {remote.max_bytes:,}")
    return total


def _validator(response: HTTPResponse) -> str:
    """What tells this file from a later one of the same address; only strong ETags do (RFC 9110, 13.1.5), or a date."""
    tag = response.headers.get("ETag", "").strip()
    found = tag if tag.startswith('"') else response.headers.get("Last-Modified", "").strip()
    return found if found.isascii() and found.isprintable() else ""


def _check_room(part: Path, have: int, total: int | None) -> None:
    free = shutil.disk_usage(part.parent).free
    if total is not None and total - have > free:
        raise ResourceError(f"{part.parent}: {free:,} bytes free; expected at least {total - have:,} for {part.name}")


def _copy(
    remote: Remote, response: HTTPResponse, file: FileIO, have: int, total: int | None, progress: Progress
) -> None:
    """Append the body until the whole file is there. Raises Passing when the connection ends before."""
    while total is None or have < total:
        try:
            piece = response.read1(CHUNK if total is None else min(CHUNK, total - have))
        except (OSError, HTTPException, ValueError) as error:  # ValueError: pieces whose length is no number
            silent = isinstance(error, TimeoutError)
            what = "nothing more came" if silent else "the connection was lost"
            raise Passing(f"{what} after {have:,} {_of(total)}bytes") from None
        if not piece:
            if total is None:
                return
            raise Passing(f"the connection ended after {have:,} {_of(total)}bytes")
        have += len(piece)
        if have > remote.max_bytes:
            file.truncate(0)
            raise Unusable(f"{shown(remote.url)}: over {remote.max_bytes:,} bytes came; expected at most that")
        left = memoryview(piece)
        try:
            while left:  # what is not buffered may be written in parts
                left = left[file.write(left) :]
        except OSError as error:
            kept = f"{have - len(left):,} bytes are kept; make room, then the same command goes on"
            raise ResourceError(f"{file.name}: cannot be written ({error.strerror}); {kept}") from None
        progress.report(remote.name, have, total)


def _of(total: int | None) -> str:
    return "" if total is None else f"of {total:,} "
