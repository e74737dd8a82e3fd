"""Plain text and everything that can be wrong with a file: each fault is one line that names file, line or byte."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from equipoise.data.corpora import open_corpus
from equipoise.data.corpora.reading import CHUNK_BYTES, named_split, read_lines, whole_text
from equipoise.errors import DataError
from equipoise.spec.data import TextCorpus


def texts(path: Path, field: str = "text") -> list[str]:
    return [document.text for document in open_corpus(TextCorpus(path=str(path), field=field)).read()]


def fault(path: Path, field: str = "text") -> str:
    """The message of the DataError, which is one line."""
    with pytest.raises(DataError) as caught:
        texts(path, field)
    message = str(caught.value)
    assert "\n" not in message
    return message


# ------------------------------------------------------------------------------------------------ what is read


def test_a_file_is_one_document_as_it_stands(tmp_path: Path) -> None:
    file = tmp_path / "one.txt"
    file.write_bytes("  Ünï  \n\ncode\n".encode())
    (document,) = open_corpus(TextCorpus(path=str(file))).read()
    assert (document.text, document.split, document.where) == ("  Ünï  \n\ncode\n", None, str(file))


def test_line_ends_become_newlines_and_nothing_else_is_touched(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    kept = "\u2028 \u2029 \x85 \x0b \x0c \x1c \x00 \ufeff e\u0301 👩‍👧 \U0010ffff"
    file.write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n\r\n" + kept.encode())
    assert texts(file) == [f"one\ntwo\nthree\n\n{kept}"]
    assert list(read_lines(file)) == ["one", "two", "three", "", kept]


def test_a_folder_is_read_in_order_of_name_below_any_depth(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.TXT", "c.jsonl", ".hidden.txt", ".git/x.txt", "notes.md", "a/train/y.txt"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text('{"text": "json"}\n' if name == "c.jsonl" else name, encoding="utf-8")
    (tmp_path / "d.txt").symlink_to(tmp_path / "b.txt")
    source = open_corpus(TextCorpus(path=str(tmp_path)))
    assert [file.name for file in source.files] == ["a/train/y.txt", "a/z.TXT", "b.txt", "c.jsonl", "d.txt"]
    assert [(d.text, d.split) for d in source.read()] == [
        ("a/train/y.txt", "train"),
        ("a/z.TXT", None),
        ("b.txt", None),
        ("json", None),
        ("b.txt", None),
    ]
    assert source.notes == ("1 files that end in none of .txt, .jsonl and .parquet were ignored",)
    assert [d.text for d in source.read()] == [d.text for d in source.read()]


def test_names_say_the_split() -> None:
    cases = {
        "TinyStories-train.txt": "train",
        "TinyStoriesV2-GPT4-valid.txt": "validation",
        "VALIDATION/0.txt": "validation",
        "train/valid.txt": "validation",
        "valid/train-0.txt": "train",
        "notes/a.txt": None,
    }
    assert {name: named_split(name) for name in cases} == cases


def test_the_name_of_a_single_file_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("x", encoding="utf-8")
    source = open_corpus(TextCorpus(path=str(tmp_path / "train.txt")))
    assert [d.split for d in source.read()] == [None]


def test_fingerprint_is_of_content_names_and_field_not_of_the_path(tmp_path: Path) -> None:
    def fingerprint(folder: str, name: str, content: str, field: str = "text") -> str:
        file = tmp_path / folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(content, encoding="utf-8")
        return open_corpus(TextCorpus(path=str(file.parent), field=field)).fingerprint

    first = fingerprint("a", "x.txt", "one")
    assert fingerprint("b", "x.txt", "one") == first
    others = [
        fingerprint("b", "x.txt", "two"),
        fingerprint("c", "y.txt", "one"),
        fingerprint("a", "x.txt", "one", field="story"),
    ]
    assert len({first, *others}) == 4


def test_jsonl_lines_are_documents(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(
        '{"story": "a\\r\\nb\\u2028", "n": 1}\n\n  \n{"story": ""}\n{"n": [], "story": "é"}', encoding="utf-8"
    )
    source = open_corpus(TextCorpus(path=str(file), field="story"))
    assert [(d.text, d.where) for d in source.read()] == [
        ("a\nb\u2028", f"{file}:1"),
        ("", f"{file}:4"),
        ("é", f"{file}:5"),
    ]


# ------------------------------------------------------------------------------------------------ what is refused

OBJECT = "expected one JSON object a line"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{broken", "not valid JSON (Expecting property name enclosed in double quotes, column 2); " + OBJECT),
        ("[" * 100_000, "not valid JSON (nested too deeply or a number too long); " + OBJECT),
        ('{"text": ' + "9" * 5000 + "}", "not valid JSON (nested too deeply or a number too long); " + OBJECT),
        ("[1]", "a list; expected a JSON object with the field 'text'"),
        ("null", "null; expected a JSON object with the field 'text'"),
        ('{"txt": "a", "id": 1}', "no field 'text'; fields there: 'txt', 'id'; name the right one with corpus.field"),
        ("{}", "no field 'text'; fields there: none; name the right one with corpus.field"),
        ('{"text": 3}', "field 'text' is a number; expected a text"),
        ('{"text": true}', "field 'text' is a boolean; expected a text"),
        ('{"text": {"a": 1}}', "field 'text' is an object; expected a text"),
        ('{"text": "ab\\ud800"}', "field 'text' holds a lone surrogate \\ud800 at character 2; expected Unicode text"),
    ],
)  # fmt: skip
def test_a_bad_json_line_is_named(tmp_path: Path, line: str, reason: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "fine"}\n' * 6 + line + "\n", encoding="utf-8")
    assert fault(file) == f"{file}:7: {reason}"


@pytest.mark.parametrize(
    ("content", "where"),
    [
        (b"caf\xe9 au lait", "line 1, byte offset 3 (0xe9: invalid continuation byte)"),
        (b"one\ntwo\r\nthree\rfo\xffr", "line 4, byte offset 17 (0xff: invalid start byte)"),
        (b"\xef\xbb\xbfab\n\x80", "line 2, byte offset 6 (0x80: invalid start byte)"),
        (b"cut \xe2\x82", "line 1, byte offset 4 (0xe2: unexpected end of data)"),
        (b"\xed\xa0\x80", "line 1, byte offset 0 (0xed: invalid continuation byte)"),
    ],
)
def test_bytes_that_are_not_utf8_are_named(tmp_path: Path, content: bytes, where: str) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(content)
    assert fault(file) == f"{file}: not UTF-8: {where}; expected UTF-8 text"


@pytest.mark.parametrize("end", ["\r\n", "\r", "\n"])
@pytest.mark.parametrize("shift", range(-3, 4))
def test_the_bad_byte_is_found_across_read_blocks(tmp_path: Path, shift: int, end: str) -> None:
    """Multi-byte characters and CRLF that straddle the border of two blocks are counted right."""
    line = f"é{end}".encode()
    num_lines = 2 * CHUNK_BYTES // len(line) + 3
    content = b"x" * (shift % len(line)) + line * num_lines + b"abc\xff"
    file = tmp_path / "a.txt"
    file.write_bytes(content)
    assert f"line {num_lines + 1}, byte offset {len(content) - 1} " in fault(file)


def test_other_encodings_are_recognised(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    story = "Once upon a time there was a café.\n" * 10
    for content, found in (
        (story.encode("utf-16"), "UTF-16 (by its byte-order mark)"),
        (b"\xfe\xff" + story.encode("utf-16-be"), "UTF-16 (by its byte-order mark)"),
        (story.encode("utf-16-le"), "UTF-16 (every other byte is NUL)"),
        (story.encode("utf-16-be"), "UTF-16 (every other byte is NUL)"),
        (story.encode("utf-32"), "UTF-32 (by its byte-order mark)"),
        (b"\x1f\x8b\x08\x00rest", "gzip-compressed"),
    ):
        file.write_bytes(content)
        assert fault(file) == f"{file}: {found}; expected UTF-8 text, convert it first"


def test_nul_characters_alone_are_text(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    for content in ("\0" * 50, "a\0b", "\0a"):
        file.write_text(content, encoding="utf-8")
        assert whole_text(file) == content


def test_paths_that_cannot_be_a_corpus(tmp_path: Path) -> None:
    expected = "expected a .txt, .jsonl or .parquet file, or a folder of them"
    missing = tmp_path / "none"
    assert fault(missing) == f"corpus.path: {missing} does not exist; {expected}"
    empty = tmp_path / "empty"
    empty.mkdir()
    assert fault(empty) == f"corpus.path: {empty} holds no file ending in .txt or .jsonl or .parquet; {expected}"
    (tmp_path / "a.csv").touch()
    assert fault(tmp_path / "a.csv") == f"corpus.path: {tmp_path / 'a.csv'} ends in '.csv'; {expected}"
    loop = tmp_path / "loop.txt"
    loop.symlink_to(loop)
    assert fault(loop) == f"corpus.path: {loop} cannot be read (Too many levels of symbolic links); {expected}"
    assert fault(tmp_path) == fault(loop)  # met inside a folder
    with pytest.raises(ValueError, match=r"^path: .* is not accepted; expected a file or folder"):
        TextCorpus(path=str(tmp_path / "x\0y"))


def test_special_files(tmp_path: Path) -> None:
    fifo = tmp_path / "pipe.txt"
    os.mkfifo(fifo)
    assert fault(fifo).startswith(f"corpus.path: {fifo} is neither a file nor a folder; expected a .txt")
    assert fault(tmp_path) == f"{fifo} is a special file; expected a regular file"


def test_a_folder_that_contains_itself_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a", encoding="utf-8")
    (tmp_path / "again").symlink_to(tmp_path)
    assert texts(tmp_path) == ["a"]


def test_files_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in for the operating system, because the tests may run as root."""
    file = tmp_path / "a.txt"
    file.write_text("a", encoding="utf-8")
    source = open_corpus(TextCorpus(path=str(file)))

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    for reading in (
        lambda: fault(file),
        lambda: _fault_of(lambda: list(source.read())),
        lambda: _fault_of(lambda: list(read_lines(file))),
    ):
        assert reading() == f"{file}: cannot be read (Permission denied)"


def _fault_of(action: object) -> str:
    with pytest.raises(DataError) as caught:
        action()  # type: ignore[operator]
    return str(caught.value)


def test_a_path_in_a_message_stays_on_its_line(tmp_path: Path) -> None:
    assert "a\\nb" in fault(tmp_path / "a\nb")
