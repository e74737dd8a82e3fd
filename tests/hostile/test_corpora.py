"""Corpora as they should not be: each becomes a data set whose bytes are all there, or is refused in one line."""

from __future__ import annotations

import itertools
import json
import os
import string
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.data import tokenizer as tokenizer_module
from equipoise.data.corpora import open_corpus
from equipoise.data.dataset import Dataset
from equipoise.data.prepare import estimate, prepare
from equipoise.data.tokenizer import _INNER, CUT_CHARS, MAX_RUN, TextTokenizer, split_text, train_tokenizer
from equipoise.errors import DataError, Interrupted
from equipoise.rng import stream
from equipoise.spec.data import BpeTokenizer, ByteTokenizer, Corpus, GutenbergCorpus, TextCorpus, TinyStoriesCorpus

from .conftest import HOSTILE, Call, told

ENCODINGS = ("utf-8", "utf-8", "utf-8", "utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32", "latin-1", "cp1252")
BAD_LINES = (
    b"{",
    b"[]",
    b"null",
    b'{"text": 7}',
    b'{"txt": "a"}',
    b'{"text": "\\ud800"}',
    b"[" * 3_000,
    b"\xff",
    b"NaN",
)

characters = st.one_of(
    st.sampled_from("ab é\n\r\0\t\ufeff\u2028\u2029\x85\x0b\x0c\x1c\u200d中<|>*'\""),
    st.characters(exclude_categories=["Cs"]),
)
texts = st.one_of(
    st.text(characters, max_size=40),
    st.sampled_from(
        ["", " \n", "a" * 40_000, " " * 40_000, "\0" * 30_000, "*** START OF THE PROJECT GUTENBERG EBOOK X ***\n"]
    ),
)


@st.composite
def contents(draw: st.DrawFn, separator: str) -> bytes:
    """A file: documents under some encoding, or any bytes."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=60))
    text = separator.join(draw(st.lists(texts, max_size=5)))
    return text.encode(draw(st.sampled_from(ENCODINGS)), "replace")


@st.composite
def jsonl(draw: st.DrawFn) -> bytes:
    """Lines of JSON, the seventh of which may be none."""
    lines = [json.dumps({"text": draw(texts)}).encode() for _ in range(draw(st.integers(0, 9)))]
    if draw(st.booleans()):
        lines[6:6] = [draw(st.one_of(st.sampled_from(BAD_LINES), st.binary(max_size=9)))]
    return draw(st.sampled_from([b"\n", b"\r\n", b"\r", b"\n\n"])).join(lines)


def put(folder: bytes, name: bytes, content: bytes) -> None:
    """Names are bytes, as file systems have them: one need not be text."""
    path = Path(os.fsdecode(folder), os.fsdecode(name))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


@HOSTILE
@given(data=st.data())
def test_any_folder_of_any_files(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder, cache = tmp_path_factory.mktemp("corpus"), tmp_path_factory.mktemp("cache")
    kind = data.draw(st.sampled_from(["text", "text", "tinystories", "gutenberg"]))
    names = [
        b"a.txt",
        b"train.txt",
        b"x/valid.txt",
        b"caf\xe9.txt",
        b"a\nb.txt",
        b"\xf0\x9f\x91\x8d.TXT",
        b".h.txt",
        b"e",
    ]
    for name in data.draw(st.lists(st.sampled_from(names), max_size=6, unique=True)):
        put(os.fsencode(folder), name, data.draw(contents("\n<|endoftext|>\n" if kind == "tinystories" else "\n")))
    for number in range(data.draw(st.integers(0, 2))):
        put(os.fsencode(folder), b"%d.jsonl" % number, data.draw(jsonl()))
    special = data.draw(st.sampled_from(["", "", "", "", "", "fifo", "loop", "dangling", "folder", "itself"]))
    if special == "fifo":
        os.mkfifo(folder / "pipe.txt")
    elif special == "folder":
        (folder / "folder.txt").mkdir()
    elif special:
        target = {"loop": folder / "l.txt", "dangling": folder / "none", "itself": folder}[special]
        (folder / ("again" if special == "itself" else "l.txt")).symlink_to(target)
    corpora: dict[str, Corpus] = {
        "text": TextCorpus(path=str(folder)),
        "tinystories": TinyStoriesCorpus(path=str(folder)),
        "gutenberg": GutenbergCorpus(path=str(folder)),
    }
    tokenizer = data.draw(st.sampled_from([ByteTokenizer(), ByteTokenizer(), BpeTokenizer(vocab_size=280)]))
    made: list[Dataset] = []
    message = told(lambda: made.append(prepare(corpora[kind], tokenizer, cache)), DataError)
    estimated = told(lambda: estimate(corpora[kind], tokenizer), DataError)
    if message is not None:
        assert "\n" not in message and (message.startswith(("corpus", str(folder))) or str(folder) in message)
        return
    assert estimated is None
    (dataset,) = made
    for split, said in dataset.info["splits"].items():
        ids = dataset.tokens(split)
        assert int(dataset.token_bytes[ids].sum()) == said["bytes"] and len(ids) == said["tokens"]


# ------------------------------------------------------------------------------------------------ names, separators


def test_a_name_in_other_bytes_is_read_and_recorded_by_its_escapes(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path / "texts")
    for number in range(4):
        put(folder, b"caf\xe9 %d.txt" % number, b"story number %d" % number)
    dataset = prepare(TextCorpus(path=str(tmp_path / "texts")), ByteTokenizer(), tmp_path / "cache")
    assert [file["name"] for file in dataset.info["files"]] == [f"caf\\xe9 {number}.txt" for number in range(4)]
    put(folder, b"caf\xe9 9.txt", b"caf\xe9")
    message = told(
        lambda: prepare(TextCorpus(path=str(tmp_path / "texts")), ByteTokenizer(), tmp_path / "cache"), DataError
    )
    assert message == f"{tmp_path}/texts/caf\\udce9 9.txt: not UTF-8: line 1, byte offset 3 (0xe9: unexpected end of " \
        "data); expected UTF-8 text"  # fmt: skip


def test_tinystories_without_separators_are_refused_before_they_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "train.txt"
    expected = "line <|endoftext|>; expected stories separated by such lines, or corpus.kind = 'text'"
    file.write_text("One story.\n\nAnother one.\n", encoding="utf-8")
    corpus = TinyStoriesCorpus(path=str(tmp_path))
    assert told(lambda: list(open_corpus(corpus).read()), DataError) == f"{file}: no {expected}"
    monkeypatch.setattr("equipoise.data.corpora.tinystories.MAX_STORY_CHARS", 1_000)
    file.write_text("One.\n<|endoftext|>\n" + "On and on.\n" * 100, encoding="utf-8")
    message = told(lambda: list(open_corpus(corpus).read()), DataError)
    assert message == f"{file}:3: over 1,000 characters without a {expected}"
    file.write_text("One.\n<|endoftext|>\n" * 200, encoding="utf-8")
    assert len(list(open_corpus(corpus).read())) == 200


# ------------------------------------------------------------------------------------------------ runs without a blank


@pytest.fixture(scope="module")
def bpe() -> TextTokenizer:
    return train_tokenizer(
        BpeTokenizer(vocab_size=320), iter(["It's 12 o'clock, they'll play; we've 3 dogs! 中文，中文。"] * 4)
    )


@HOSTILE
@given(text=st.text(st.one_of(st.sampled_from(" \n'sdmtlrve19é中，._²Ⅷ\u0301\u0e33\x1c\x85"), characters), max_size=60))
def test_a_sign_after_a_letter_or_digit_begins_a_word(bpe: TextTokenizer, text: str) -> None:
    """So a text cut there has the tokens of the whole: a line of Chinese is encoded as before, however long."""
    cuts = [0, *(found.start() for found in _INNER.finditer(text)), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(cuts)]
    whole = bpe.library.encode(text, add_special_tokens=False).ids
    assert [i for piece in pieces for i in bpe.library.encode(piece, add_special_tokens=False).ids] == whole


@pytest.mark.parametrize("unit", ["x", " ", "\0", "中", "é1", "\n"])
def test_a_run_without_a_blank_is_cut_into_short_pieces(unit: str) -> None:
    text = "Once upon a time " + unit * (300_000 // len(unit)) + " there was a dog."
    pieces = split_text(text, 8_192)
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= 8_192 + MAX_RUN and np.median([len(piece) for piece in pieces]) == CUT_CHARS


def test_ordinary_text_is_cut_where_it_always_was() -> None:
    """At the first blank beyond the size, and at no other place, as long as there is one within reach."""
    words = "".join(stream(0, "data").choice(list(string.ascii_lowercase + "  \n,."), 200_000).tolist())
    text = words[:50_000] + "y" * (MAX_RUN - 1) + words[50_000:]
    start, expected = 0, []
    while len(text) - start > 8_192:
        place = start + 8_192
        while not (text[place] in " \n" and not text[place - 1].isspace()):
            place += 1
        expected.append(text[start:place])
        start = place
    assert split_text(text, 8_192) == [*expected, text[start:]]


def test_one_line_of_a_hundred_megabytes(tmp_path: Path) -> None:
    line = "abcdefgh" * (100_000_000 // 8)
    (tmp_path / "a.txt").write_text(line, encoding="utf-8")
    message = told(lambda: prepare(TextCorpus(path=str(tmp_path)), ByteTokenizer(), tmp_path / "cache"), DataError)
    assert message is not None and message.startswith("corpus text: 1 different documents in a.txt, too few to cut")
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(f"{number}: {line[:5_000_000]}", encoding="utf-8")
    (tmp_path / "a.txt").unlink()
    dataset = prepare(TextCorpus(path=str(tmp_path)), BpeTokenizer(vocab_size=300), tmp_path / "cache")
    assert sum(said["bytes"] for said in dataset.info["splits"].values()) == 3 * 5_000_003


def test_learning_merges_hears_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is left to itself in a thread, which a stand-in keeps from ending."""
    ended = threading.Event()
    monkeypatch.setattr(tokenizer_module, "POLL_S", 0.01)
    looks: list[int] = []

    def endless() -> object:
        yield "some words"
        ended.wait(60)

    def poll() -> None:
        looks.append(1)
        if len(looks) == 3:
            raise Interrupted("stopped")

    with pytest.raises(Interrupted, match=r"^stopped$"):
        train_tokenizer(BpeTokenizer(vocab_size=300), endless(), poll)  # type: ignore[arg-type]
    ended.set()
    with pytest.raises(ZeroDivisionError):
        train_tokenizer(BpeTokenizer(vocab_size=300), (str(1 // 0) for _ in range(1)))


@pytest.mark.parametrize(("content", "code"), [(b"caf\xe9\n", 3), (b"a\0b".decode().encode("utf-16"), 3)])
def test_the_command_says_file_and_code(content: bytes, code: int, tmp_path: Path, call: Call) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_bytes(content)
    study = ["quick", "--set", f'corpus={{ kind = "text", path = "{tmp_path / "texts"}" }}']
    for command in (["plan"], ["run", "--out", str(tmp_path / "out"), "--quiet"]):
        found, out, err = call(command[0], *study, *command[1:], "--cache", str(tmp_path / "cache"))
        assert (
            (found, out) == (code, "") and err.startswith(f"error: {tmp_path}/texts/a.txt: ") and err.count("\n") == 1
        )
