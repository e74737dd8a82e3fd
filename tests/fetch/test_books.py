"""Books by number from a mirror: what is there arrives as it is, what is not is named, nothing is ever replaced."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from equipoise.data.corpora import open_corpus
from equipoise.errors import ConfigError, DataError, EquipoiseError
from equipoise.fetch import books as module
from equipoise.fetch.books import Books, book_fault, check_mirror, fetch_books, read_numbers
from equipoise.fetch.download import Progress
from equipoise.fetch.manifest import Manifest
from equipoise.files import read_json, write_json
from equipoise.spec.data import STARTING_BOOKS, GutenbergCorpus


def book(title: str) -> bytes:
    return (
        f"\ufeffThe Project Gutenberg eBook of {title}\r\n\r\n"
        + f"*** START OF THE PROJECT GUTENBERG EBOOK {title} ***\r\n\r\n"
        + f"CHAPTER I.\r\n\r\nIt was a café, and it was called {title}.\r\n" * 50
        + f"\r\n*** END OF THE PROJECT GUTENBERG EBOOK {title} ***\r\n"
    ).encode()


@pytest.fixture
def mirror(site: Any) -> Any:
    """Book 7 as generated text, 84 as a UTF-8 file, 1342 as an ASCII file."""
    site.files = {
        "/m/cache/epub/7/pg7.txt": book("SEVEN"),
        "/m/8/84/84-0.txt": book("EIGHTY-FOUR"),
        "/m/1/3/4/1342/1342.txt": book("PRIDE"),
    }
    return site


def fetch(site: Any, folder: Path, *numbers: int, said: list[str] | None = None, **options: Any) -> Books:
    told: list[str] = [] if said is None else said
    progress = Progress(report=lambda *_: None, say=told.append, sleep=options.pop("sleep", lambda _: None))
    return fetch_books(numbers, folder, progress, mirror=f"{site.url}/m", **options)


def test_books_arrive_from_wherever_the_mirror_has_them(mirror: Any, tmp_path: Path) -> None:
    slept: list[float] = []
    books = fetch(mirror, tmp_path, 7, 84, 1342, sleep=slept.append)
    assert books.fetched == ["pg7.txt", "pg84.txt", "pg1342.txt"] and not books.present and not books.failed
    assert (tmp_path / "pg84.txt").read_bytes() == book("EIGHTY-FOUR")
    assert len(mirror.asked) == 1 + 2 + 3 and slept == [2.0] * 5  # between requests
    manifest = read_json(tmp_path / "manifest.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json", "pg1342.txt", "pg7.txt", "pg84.txt"]
    assert list(manifest["files"]) == ["pg1342.txt", "pg7.txt", "pg84.txt"]
    recorded = manifest["files"]["pg1342.txt"]
    assert recorded["sha256"] == hashlib.sha256(book("PRIDE")).hexdigest() and recorded["bytes"] == len(book("PRIDE"))
    assert recorded["url"] == f"{mirror.url}/m/1/3/4/1342/1342.txt" and recorded["fetched"].endswith("Z")
    source = open_corpus(GutenbergCorpus(path=str(tmp_path)))
    assert [document.text.count("café") for document in source.read()] == [50, 50, 50]
    assert not any("ignored" in note for note in source.notes)  # the manifest is no stray file


def test_a_second_call_asks_nothing(mirror: Any, tmp_path: Path) -> None:
    first = fetch(mirror, tmp_path, 7, 84)
    asked = len(mirror.asked)
    again = fetch(mirror, tmp_path, 84, 7)
    assert again.present == ["pg84.txt", "pg7.txt"] and not again.fetched and len(mirror.asked) == asked
    assert again.manifest == first.manifest
    more = fetch(mirror, tmp_path, 7, 1342)
    assert more.fetched == ["pg1342.txt"] and len(more.manifest["files"]) == 3


def test_what_is_not_there_is_named_and_the_rest_is_kept(mirror: Any, tmp_path: Path) -> None:
    mirror.files["/m/cache/epub/9/pg9.txt"] = "Project Gutenberg's caf\xe9".encode("latin-1")
    books = fetch(mirror, tmp_path, 5, 7, 9, 84)
    assert books.fetched == ["pg7.txt", "pg84.txt"]
    assert books.failed[5] == "not on this mirror as plain text"
    assert books.failed[9] == f"{mirror.url}/m/cache/epub/9/pg9.txt: no UTF-8 text (byte 23)"
    assert not list(tmp_path.glob("*.part*"))


def test_a_broken_book_is_looked_for_elsewhere(mirror: Any, tmp_path: Path) -> None:
    mirror.files["/m/cache/epub/84/pg84.txt"] = book("EIGHTY-FOUR")[:2000]
    books = fetch(mirror, tmp_path, 84)
    assert books.fetched == ["pg84.txt"] and not books.failed
    assert (tmp_path / "pg84.txt").read_bytes() == book("EIGHTY-FOUR")


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (book("X"), ""),
        (b"Project Gutenberg Etext of X, with the small print that had no footer", ""),
        (b"*END*THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.29.93*END*\nProject Gutenberg", ""),
        (book("X")[:2000], "cut off: it has the line that ends Project Gutenberg's header, but not the one that begin"),
        (b"Too many requests", "no book of Project Gutenberg: the name does not occur in it"),
        (b"", "no book of Project Gutenberg"),
        (b"Project Gutenberg \xff", "no UTF-8 text (byte 18)"),
    ],
)
def test_faults_of_a_book(tmp_path: Path, content: bytes, fault: str) -> None:
    (tmp_path / "x").write_bytes(content)
    assert book_fault(tmp_path / "x").startswith(fault) and bool(book_fault(tmp_path / "x")) == bool(fault)


def test_a_changed_file_is_noticed_and_left_alone(mirror: Any, tmp_path: Path) -> None:
    fetch(mirror, tmp_path, 7, 84)
    changed = book("SEVEN").replace(b"caf", b"Caf")
    (tmp_path / "pg7.txt").write_bytes(changed)
    (tmp_path / "pg1342.txt").write_text("my own notes", encoding="utf-8")
    books = fetch(mirror, tmp_path, 7, 84, 1342)
    advice = "move it away to fetch it again"
    assert books.present == ["pg84.txt"] and books.failed == {
        7: f"{tmp_path}/pg7.txt: content differs from its recorded SHA-256; it was changed since it was fetched: "
        + advice,
        1342: f"{tmp_path}/pg1342.txt: is there, but not in manifest.json: {advice}",
    }
    assert (tmp_path / "pg7.txt").read_bytes() == changed
    assert (tmp_path / "pg1342.txt").read_text(encoding="utf-8") == "my own notes"


def test_another_text_at_the_source_is_said(mirror: Any, tmp_path: Path) -> None:
    fetch(mirror, tmp_path, 7)
    (tmp_path / "pg7.txt").unlink()
    mirror.files["/m/cache/epub/7/pg7.txt"] = book("SEVEN, CORRECTED")
    said: list[str] = []
    books = fetch(mirror, tmp_path, 7, said=said)
    assert books.fetched == ["pg7.txt"] and "pg7.txt: another text than on 20" in said[0]
    sha256 = books.manifest["files"]["pg7.txt"]["sha256"]
    assert sha256 == hashlib.sha256(book("SEVEN, CORRECTED")).hexdigest()


def test_killed_between_manifest_and_name(mirror: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one moment at which the manifest names a file that has not its name yet."""
    mirror.tags = {"/m/cache/epub/7/pg7.txt": '"seven"'}

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "replace", killed)
        fetch(mirror, tmp_path, 7)
    fetch(mirror, tmp_path, 7)
    assert (tmp_path / "pg7.txt").read_bytes() == book("SEVEN")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json", "pg7.txt"]


def test_a_mirror_that_refuses_ends_it(mirror: Any, tmp_path: Path) -> None:
    mirror.script["/m/cache/epub/84/pg84.txt"] = [lambda handler, _: handler.begin(403, {"Content-Length": "0"})]
    with pytest.raises(DataError, match=r"/m/cache/epub/84/pg84.txt: HTTP 403 Forbidden$"):
        fetch(mirror, tmp_path, 7, 84, 1342)
    assert (tmp_path / "pg7.txt").exists() and len(mirror.asked) == 2


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ('{"schema_version": 1}', "corpus: missing; it is not a manifest of fetched files: choose another folder"),
        ('{"files": {"../x": 5}}', "missing; it is not a manifest of fetched files: choose another folder with --out"),
        ("[]", "expected a JSON object"),
        ("{", "not readable as JSON"),
    ],
)
def test_a_folder_with_another_manifest(mirror: Any, tmp_path: Path, content: str, fault: str) -> None:
    (tmp_path / "manifest.json").write_text(content, encoding="utf-8")
    with pytest.raises(EquipoiseError) as caught:
        fetch(mirror, tmp_path, 7)
    assert str(caught.value).startswith(f"{tmp_path}/manifest.json: ") and fault in str(caught.value)
    assert not mirror.asked


def test_a_folder_of_another_corpus(mirror: Any, tmp_path: Path) -> None:
    books = fetch(mirror, tmp_path / "a", 7)
    other: Manifest = {**books.manifest, "corpus": "tinystories"}
    write_json(tmp_path / "manifest.json", other)
    with pytest.raises(DataError) as caught:
        fetch(mirror, tmp_path, 7)
    assert str(caught.value) == (
        f'{tmp_path}/manifest.json: corpus is "tinystories"; expected "gutenberg": choose another folder with --out'
    )


def test_names_in_a_manifest_are_no_paths(mirror: Any, tmp_path: Path) -> None:
    """Whoever writes a manifest can name any file in it: only names of our own are ever looked at."""
    books = fetch(mirror, tmp_path / "corpus", 7)
    (tmp_path / "secret").write_text("s", encoding="utf-8")
    evil = {**books.manifest["files"], "../secret": books.manifest["files"]["pg7.txt"]}
    write_json(tmp_path / "corpus" / "manifest.json", {**books.manifest, "files": evil})
    fetch(mirror, tmp_path / "corpus", 7, 84)
    assert (tmp_path / "secret").read_text(encoding="utf-8") == "s"


# ------------------------------------------------------------------------------------------------ arguments


def test_numbers() -> None:
    assert read_numbers(["11", "84,1342", "5-7", "84", "007"]) == [11, 84, 1342, 5, 6, 7]
    assert read_numbers([str(number) for number in STARTING_BOOKS]) == list(STARTING_BOOKS)


@pytest.mark.parametrize("word", ["0", "-3", "eleven", "7-5", "1.5", "12345678", "١", "3-", "1--2", " "])
def test_what_is_no_number(word: str) -> None:
    with pytest.raises(
        ConfigError, match=r'^IDS: ".*" is not accepted; expected numbers of books from 1 to 9,999,999, for'
    ):
        read_numbers(["11", word])


@pytest.mark.parametrize("words", [["1-10001"], ["1-9999", "20000-20001"], ["1-9999999"]])
def test_too_many_numbers(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"^IDS: .* is not accepted; expected at most 10,000 books at a time$"):
        read_numbers(words)


def test_no_number() -> None:
    with pytest.raises(ConfigError, match=r"^IDS: none given; expected numbers of books"):
        read_numbers([","])


def test_mirrors() -> None:
    assert check_mirror("http://localhost:1/gutenberg//") == "http://localhost:1/gutenberg"
    assert check_mirror(module.MIRROR) == module.MIRROR
    for site in ("https://www.gutenberg.org", "http://gutenberg.org/"):
        with pytest.raises(ConfigError, match=r"^--mirror .*: that site is for people alone and shuts programs out"):
            check_mirror(site)
    with pytest.raises(ConfigError, match=r'^--mirror: "rsync://x" is not accepted; expected the address'):
        check_mirror("rsync://x")
