"""Learn a tokenizer from any amount of text, on all cores and in bounded memory; the result is what one core gives.

The library counts words on all cores only through a thread pool that dead-locks in processes forked after its use, so a
large text is handed to a child process that has nothing else to do. What a word costs there bounds how many different
ones may come. Not for: what a tokenizer is, or how it is trained (`tokenizer`).
"""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import IO, Final

from tokenizers import Tokenizer as LibraryTokenizer

from equipoise.config import dump
from equipoise.data.tokenizer import (
    PIECE_CHARS,
    POLL_S,
    TextTokenizer,
    frozen,
    split_text,
    train_on_pieces,
    train_tokenizer,
)
from equipoise.errors import DataError, ResourceError
from equipoise.faults import cut, printable
from equipoise.machine import usable_cores
from equipoise.spec.data import BpeTokenizer, ByteTokenizer

MAX_WORD_BYTES: Final = 1 << 22
"""UTF-8 bytes of different words that merges are learnt from. The library holds about 130 bytes for each (measured on
words of 8 letters, runs of 512 and Chinese): 550 MB. Stories of any amount stay far below, as do some hundred MB of
other prose; beyond are languages without blanks, base64, and much of the web."""
MEMO_CHARS: Final = 1 << 22
"""Characters of what stands between blanks that are remembered as already looked at: some 60 MB."""
CHILD_CHARS: Final = 1 << 24
"""Characters that are learnt from without a child process: three seconds of one core."""
FRAME_CHARS: Final = 1 << 18
"""Characters sent to the child at once."""
_WORD: Final = re.compile(r"\w+|[^\w\s]+")
_LENGTH: Final = struct.Struct("<q")
END: Final = -1
"""The length after the last frame: a parent that was killed closes the pipe without it."""


@dataclass(frozen=True, kw_only=True)
class Learnt:
    """A tokenizer, and what it was learnt from."""

    tokenizer: TextTokenizer
    """The tokenizer."""
    note: str | None
    """A sentence where the texts held more different words than are learnt from; None: all texts were read."""


def learn(spec: BpeTokenizer | ByteTokenizer, texts: Iterator[str], poll: Callable[[], None]) -> Learnt:
    """The tokenizer that `train_tokenizer` makes of `texts`, up to the piece that passes MAX_WORD_BYTES.

    `poll` is called several times a second and may raise. Raises ResourceError when the child process was killed.
    """
    if isinstance(spec, ByteTokenizer):
        return Learnt(tokenizer=train_tokenizer(spec, iter(())), note=None)
    bounded = _Bounded(texts)
    pieces = iter(bounded)
    first: list[str] = []
    size = 0
    for piece in pieces:
        first.append(piece)
        size += len(piece)
        if size >= CHILD_CHARS:
            break
    if size < CHILD_CHARS or usable_cores() == 1:
        tokenizer = train_on_pieces(spec, chain(first, pieces), poll)
    else:
        tokenizer = _in_child(spec, chain(first, pieces), poll)
    note = None
    if bounded.stopped:
        note = (
            f"the tokenizer was learnt from the first {bounded.num_chars:,} characters of the training documents, in "
            f"which {MAX_WORD_BYTES:,} bytes of different words were met"
        )
    return Learnt(tokenizer=tokenizer, note=note)


class _Bounded:
    """The pieces of texts, until too many different words have come (mutable: it counts them)."""

    def __init__(self, texts: Iterator[str]) -> None:
        self._texts = texts
        self.stopped = False
        self.num_chars = 0

    def __iter__(self) -> Iterator[str]:
        words: set[str] = set()
        met: set[str] = set()  # a memo: most of what stands between blanks came before, and looking is cheaper
        word_bytes = met_chars = 0
        for text in self._texts:
            for piece in split_text(text, PIECE_CHARS):
                new = set(piece.split()) - met
                found = {word for one in new for word in _WORD.findall(one)} - words
                word_bytes += sum(len(word.encode()) for word in found)
                if word_bytes > MAX_WORD_BYTES:
                    self.stopped = True
                    return
                words |= found
                met |= new
                met_chars += sum(map(len, new))
                if met_chars > MEMO_CHARS:
                    met, met_chars = set(), 0
                self.num_chars += len(piece)
                yield piece


# ------------------------------------------------------------------------------------------------ the child process


def _in_child(spec: BpeTokenizer, pieces: Iterator[str], poll: Callable[[], None]) -> TextTokenizer:
    command = [sys.executable, "-m", "equipoise.data.learning", json.dumps(dump(spec))]
    with subprocess.Popen(  # a session of its own: a Ctrl-C in the terminal is the parent's, which kills it
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as child:
        assert child.stdin is not None
        try:
            with suppress(BrokenPipeError):  # it is gone: its exit code says why
                for frame in _frames(pieces):
                    poll()
                    child.stdin.write(frame)
            _close(child)
            while True:
                try:
                    out, complaint = child.communicate(timeout=POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    poll()
        except BaseException:
            child.kill()
            _close(child)
            raise
    if child.returncode == -9:
        raise ResourceError("learning the tokenizer was killed; did the system run out of memory?")
    if child.returncode != 0:
        lines = complaint.decode("utf-8", "replace").strip().splitlines() or [f"exit code {child.returncode}"]
        raise DataError(f"learning the tokenizer failed: {cut(printable(lines[-1]))}")
    return frozen(LibraryTokenizer.from_str(out.decode("utf-8")))


def _close(child: subprocess.Popen[bytes]) -> None:
    """Close the pipe to the child, which may be gone with something still to be written to it."""
    if child.stdin is not None:
        with suppress(BrokenPipeError):
            child.stdin.close()
    child.stdin = None


def _frames(pieces: Iterator[str]) -> Iterator[bytes]:
    """Pieces as bytes: per frame its length, then the pieces as a JSON list; at last `END`."""
    frame: list[str] = []
    size = 0
    for piece in pieces:
        frame.append(piece)
        size += len(piece)
        if size >= FRAME_CHARS:
            yield _packed(frame)
            frame, size = [], 0
    yield _packed(frame)
    yield _LENGTH.pack(END)


def _packed(frame: list[str]) -> bytes:
    data = json.dumps(frame, ensure_ascii=False).encode()
    return _LENGTH.pack(len(data)) + data


def _received(stream: IO[bytes]) -> Iterator[str]:
    """The pieces that `_frames` sent; EOFError when they end without `END`."""
    while True:
        head = stream.read(_LENGTH.size)
        if len(head) < _LENGTH.size:
            raise EOFError("the process that sends the text is gone")
        (length,) = _LENGTH.unpack(head)
        if length == END:
            return
        data = stream.read(length)
        if len(data) < length:
            raise EOFError("the process that sends the text is gone")
        yield from json.loads(data)


def _child(spec: str) -> None:
    os.putenv("TOKENIZERS_PARALLELISM", "true")  # nothing is ever forked from here
    tokenizer = train_on_pieces(BpeTokenizer(**json.loads(spec)), _received(sys.stdin.buffer))
    sys.stdout.buffer.write(tokenizer.to_json().encode())


if __name__ == "__main__":
    _child(sys.argv[1])
