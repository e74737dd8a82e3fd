"""Books of Project Gutenberg by number, from a mirror, one at a time with a pause between requests.

Project Gutenberg asks programs to stay away from its own site and to use mirrors, with two seconds between requests
(www.gutenberg.org/policy/robot_access.html, www.gutenberg.org/MIRRORS.ALL). Not for: stripping the licence around a
book (`data.corpora.gutenberg` does that when it reads one), or finding books by title.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from equipoise.data.corpora.gutenberg import is_cut_off
from equipoise.errors import ConfigError, DataError
from equipoise.faults import not_accepted
from equipoise.fetch.download import NotThere, Progress, Remote, Unusable, download, part_of
from equipoise.fetch.manifest import VERSION, Manifest, entry, is_here, keep, read_manifest
from equipoise.fetch.web import check_url

MIRROR: Final = "https://gutenberg.pglaf.org"
"""Project Gutenberg's own mirror for programs; it has the generated files too."""
PAUSE_S: Final = 2.0
MAX_BYTES: Final = 1 << 26
"""64 MiB: ten times the longest novel."""
MAX_NUMBER: Final = 9_999_999
MAX_BOOKS: Final = 10_000
"""Six hours of pauses; whoever wants more keeps a mirror."""
SOURCE: Final = "Project Gutenberg"
LICENCE: Final = "public domain in the United States, as Project Gutenberg states for each book"


@dataclass(frozen=True, kw_only=True)
class Books:
    """What became of the books that were asked for: fetched now, already there, or not to be had, with the reason."""

    manifest: Manifest
    fetched: list[str]
    present: list[str]
    failed: dict[int, str]


def read_numbers(words: Sequence[str]) -> list[int]:
    """The numbers of books that `words` name, singly, in lists and as ranges; each once, in order of first mention.

    >>> read_numbers(["11,84", "100-102", "84"])
    [11, 84, 100, 101, 102]
    """
    numbers: dict[int, None] = {}
    for word in filter(None, ",".join(words).split(",")):
        found = re.fullmatch(r"([0-9]{1,7})(?:-([0-9]{1,7}))?", word, re.ASCII)
        first = int(found[1]) if found else 0
        last = int(found[2] or found[1]) if found else 0
        if not 1 <= first <= last:
            expected = f"numbers of books from 1 to {MAX_NUMBER:,}, for example 11 84 1342, 11,84,1342 or 100-110"
            raise ConfigError(not_accepted("IDS", word, expected))
        if last - first >= MAX_BOOKS or len(numbers) + last - first >= MAX_BOOKS:
            raise ConfigError(not_accepted("IDS", word, f"at most {MAX_BOOKS:,} books at a time"))
        numbers |= dict.fromkeys(range(first, last + 1))
    if not numbers:
        raise ConfigError("IDS: none given; expected numbers of books, for example 11 84 1342 or 100-110")
    return list(numbers)


def check_mirror(mirror: str) -> str:
    """`mirror` without a slash at its end; ConfigError for anything but a web address, and for the site itself."""
    try:
        check_url(mirror, "--mirror")
    except DataError as error:
        raise ConfigError(str(error)) from None
    if (urlsplit(mirror).hostname or "").removeprefix("www.") == "gutenberg.org":
        raise ConfigError(
            f"--mirror {mirror}: that site is for people alone and shuts programs out; expected one of the mirrors in "
            f"https://www.gutenberg.org/MIRRORS.ALL, for example {MIRROR}"
        )
    return mirror.rstrip("/")


def addresses(mirror: str, number: int) -> list[str]:
    """Where a mirror may have the UTF-8 or ASCII text of a book, likeliest first.

    >>> addresses("https://example.org", 1342)[1]
    'https://example.org/1/3/4/1342/1342-0.txt'
    >>> addresses("https://example.org", 7)[2]
    'https://example.org/0/7/7.txt'
    """
    shelf = "/".join(str(number)[:-1]) or "0"
    return [
        f"{mirror}/cache/epub/{number}/pg{number}.txt",
        f"{mirror}/{shelf}/{number}/{number}-0.txt",
        f"{mirror}/{shelf}/{number}/{number}.txt",
    ]


def fetch_books(
    numbers: Sequence[int], folder: Path, progress: Progress, *, mirror: str = MIRROR, pause_s: float = PAUSE_S
) -> Books:
    """Fetch those of the books that `folder` does not have yet, as `pg<number>.txt`.

    A book that is not there, or is no text of Project Gutenberg, is noted and the others are fetched. Raises DataError
    when the mirror cannot be used at all, ResourceError; what was fetched before is kept.
    """
    fresh: Manifest = {
        "schema_version": VERSION,
        "corpus": "gutenberg",
        "source": SOURCE,
        "revision": None,
        "licence": LICENCE,
        "files": {},
    }
    manifest = read_manifest(folder, fresh)
    fetched: list[str] = []
    present: list[str] = []
    failed: dict[int, str] = {}
    pauses = _pauses(progress, pause_s)
    for number in numbers:
        name = f"pg{number}.txt"
        try:
            if is_here(folder, manifest, name, None):
                present.append(name)
                continue
        except DataError as error:
            failed[number] = str(error)
            continue
        before = manifest["files"].get(name)
        for url in addresses(mirror, number):
            next(pauses)
            remote = Remote(url=url, name=name, max_bytes=MAX_BYTES, fault=book_fault)
            try:
                sha256 = download(remote, folder, progress)
            except NotThere:
                failed.setdefault(number, "not on this mirror as plain text")
                continue
            except Unusable as error:
                failed[number] = str(error)
                continue
            failed.pop(number, None)
            manifest = keep(folder, manifest, name, entry(url, part_of(folder, name), sha256))
            fetched.append(name)
            if before and before["sha256"] != sha256:
                progress.say(f"{name}: another text than on {before['fetched']}")
            break
    return Books(manifest=manifest, fetched=fetched, present=present, failed=failed)


def _pauses(progress: Progress, pause_s: float) -> Iterator[None]:
    """Waits before every request but the first."""
    yield
    while True:
        progress.sleep(pause_s)
        yield


def book_fault(path: Path) -> str:
    """Why a file is no whole book of Project Gutenberg in UTF-8; empty when it is one."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        return f"no UTF-8 text (byte {error.start:,})"
    if "project gutenberg" not in text.lower():
        return "no book of Project Gutenberg: the name does not occur in it"
    if is_cut_off(text):
        return "cut off: it has the line that ends Project Gutenberg's header, but not the one that begins its footer"
    return ""
