"""Learning a tokenizer from much text: a child on all cores gives what one core gives, in bounded memory."""

from __future__ import annotations

import io
import os
import random
import signal
import string
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from equipoise.data import learning
from equipoise.data.corpora import open_corpus
from equipoise.data.learning import END, learn
from equipoise.data.prepare import prepare
from equipoise.data.tokenizer import train_tokenizer
from equipoise.errors import DataError, Interrupted, ResourceError
from equipoise.spec.data import BpeTokenizer, ByteTokenizer, GrammarCorpus, TextCorpus

BPE = BpeTokenizer(vocab_size=400)


def go_on() -> None:
    """A poll that never stops."""


def stories() -> Iterator[str]:
    yield from (document.text for document in open_corpus(GrammarCorpus(num_documents=300)).read())
    yield "ein Café, 中文字, 🙂 " * 900  # longer than a piece, and not ASCII
    yield "ACGT" * 9000  # a run without any place to cut at


@pytest.fixture
def in_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "CHILD_CHARS", 5000)
    monkeypatch.setattr(learning, "FRAME_CHARS", 3000)
    monkeypatch.setattr(learning, "usable_cores", lambda: 2)


def test_a_child_learns_what_this_process_learns(in_child: None, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = train_tokenizer(BPE, stories())
    used: list[int] = []
    original = learning._in_child
    monkeypatch.setattr(learning, "_in_child", lambda *args: used.append(1) or original(*args))
    learnt = learn(BPE, stories(), go_on)
    assert used == [1]
    assert learnt.tokenizer.digest == expected.digest and learnt.note is None
    text = "a story <|endoftext|> of café"
    assert learnt.tokenizer.encode(text) == expected.encode(text)
    monkeypatch.setattr(learning, "usable_cores", lambda: 1)
    assert learn(BPE, stories(), go_on).tokenizer.digest == expected.digest
    assert used == [1]


def test_plain_bytes_read_nothing() -> None:
    def texts() -> Iterator[str]:
        raise AssertionError
        yield ""

    assert learn(ByteTokenizer(), texts(), go_on).tokenizer.vocab_size == 257


def words(count: int) -> list[str]:
    draw = random.Random(0)
    return ["".join(draw.choices(string.ascii_lowercase, k=6)) for _ in range(count)]


def test_different_words_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 words of 6 letters are within 600 bytes, the next is not; words that came before cost nothing."""
    known = words(101)
    assert len(set(known)) == 101
    monkeypatch.setattr(learning, "MAX_WORD_BYTES", 600)
    texts = [" ".join(known[:60]), " ".join(reversed(known[:60])), " ".join(known[40:100]), known[100], "never read"]
    read: list[str] = []

    def told() -> Iterator[str]:
        for text in texts:
            read.append(text)
            yield text

    learnt = learn(BPE, told(), go_on)
    assert read == texts[:4]
    assert learnt.tokenizer.digest == train_tokenizer(BPE, iter(texts[:3])).digest
    assert learnt.note == (
        f"the tokenizer was learnt from the first {sum(map(len, texts[:3])):,} characters of the training documents, "
        "in which 600 bytes of different words were met"
    )


def test_a_bound_counts_bytes_and_forgets_no_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chinese takes three bytes a character; a memo that is emptied all the time changes nothing."""
    monkeypatch.setattr(learning, "MAX_WORD_BYTES", 12)
    monkeypatch.setattr(learning, "MEMO_CHARS", 1)
    assert learn(BPE, iter(["中文 中文", "文中 (中文)"]), go_on).note is not None  # 6 + 6 + two signs
    assert learn(BPE, iter(["中文 中文", "文中 文中"] * 9), go_on).note is None


def test_the_note_is_told_by_the_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "MAX_WORD_BYTES", 600)
    file = tmp_path / "t.jsonl"
    file.write_text("".join(f'{{"text": "{word} and more"}}\n' for word in words(300)), encoding="utf-8")
    (note,) = prepare(TextCorpus(path=str(file)), BPE, tmp_path / "cache").info["notes"]
    assert note.startswith("the tokenizer was learnt from the first ")


def children() -> set[int]:
    path = Path(f"/proc/{os.getpid()}/task/{threading.get_native_id()}/children")
    return {int(number) for number in path.read_text(encoding="utf-8").split()}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks /proc for the child")
@pytest.mark.parametrize("when", ["fed", "learning"])
def test_stopping_kills_the_child(in_child: None, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = children()
    seen: set[int] = set()
    fed = False

    def texts() -> Iterator[str]:
        nonlocal fed
        yield from stories()
        fed = True

    def poll() -> None:
        seen.update(children() - before)
        if seen and (when == "fed" or fed):
            raise Interrupted("stopped")

    with pytest.raises(Interrupted):
        learn(BPE, texts(), poll)
    assert len(seen) == 1 and children() == before


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks /proc for the child")
def test_a_child_that_is_killed_is_said(in_child: None) -> None:
    before = children()

    def poll() -> None:
        for child in children() - before:
            os.kill(child, signal.SIGKILL)
            time.sleep(0.05)

    with pytest.raises(ResourceError) as caught:
        learn(BPE, stories(), poll)
    assert str(caught.value) == "learning the tokenizer was killed; did the system run out of memory?"


def test_a_child_that_fails_is_said(in_child: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "_packed", lambda frame: learning._LENGTH.pack(3) + b"[1,")
    with pytest.raises(DataError, match=r"^learning the tokenizer failed: json\.decoder\.JSONDecodeError: "):
        learn(BPE, stories(), go_on)


def test_a_child_whose_parent_was_killed_learns_nothing() -> None:
    """A pipe that is closed before the end: nobody would read what it learns from a part."""
    whole = b"".join(learning._frames(iter(["one piece", "another"])))
    assert list(learning._received(io.BytesIO(whole))) == ["one piece", "another"]
    assert whole.endswith(learning._LENGTH.pack(END))
    for length in (0, 3, 12, len(whole) - 8, len(whole) - 1):
        with pytest.raises(EOFError, match="the process that sends the text is gone"):
            list(learning._received(io.BytesIO(whole[:length])))
    command = [sys.executable, "-m", "equipoise.data.learning", '{"vocab_size": 300}']
    done = subprocess.run(command, input=whole[:-8], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, b"")
