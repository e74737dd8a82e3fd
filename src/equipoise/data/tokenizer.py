"""Text to token ids and back: byte-level BPE of any size, or plain bytes, behind one frozen wrapper.

Both kinds are a real file of the `tokenizers` library, so that an exported model carries its tokenizer. End-of-text is
id 0 and is only ever put between documents by us: text that looks like it stays text. Not for: reading or splitting.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from threading import Thread
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from typing_extensions import TypedDict

from equipoise.config import misfit
from equipoise.errors import DataError
from equipoise.faults import reason
from equipoise.files import parse_json, regular_bytes
from equipoise.machine import usable_cores
from equipoise.spec.data import BpeTokenizer, ByteTokenizer
from equipoise.spec.model import MAX_VOCAB

NUM_BYTES: Final = 256
END_OF_TEXT: Final = "<|endoftext|>"
EOT_ID: Final = 0
MIN_FREQUENCY: Final = 2
"""A pair met once is no pattern; the library's own byte-level trainer uses 2 as well."""
PIECE_CHARS: Final = 8192
"""Texts are encoded in pieces of about this many characters: measured twice as fast as one call of 5 MB."""

MAX_RUN: Final = 1 << 14
"""Characters that may stand without a place where pieces can be cut. The library takes a run for one word, and learning
merges from a word takes time that grows with the square of its length: a line of 1 MB without a blank took minutes."""
CUT_CHARS: Final = 512
"""Length of the pieces that a longer run is cut into, wherever that falls."""

_BOUNDARY: Final = re.compile(r"(?<=\S)[ \n]")
_INNER: Final = re.compile(r"(?<=[^\W_])[^\w\s]")  # what follows a letter or digit and is neither begins a word too
CHARS_AT_ONCE: Final = 1 << 18
"""Characters that a thread encodes at once: a twentieth of a second; the library holds some 150 bytes a token."""
GROUPS_A_THREAD: Final = 2
"""Groups of that size which wait or are worked on, for each thread: one more than it has in hand."""
MAX_THREADS: Final = 8
"""Threads that encode at once: more gain nothing beside the making of arrays, which they share."""
POLL_S: Final = 0.1
"""Seconds between two looks at whether learning merges should stop."""

_Group = list[tuple[str, bool]]  # pieces of texts; whether each is the last of its text

# Where this variable says true, the library's thread pool dead-locks in a process forked after its use; where it is not
# set, older versions warn at every fork. Threads of our own, which end with each call, take its place for encoding.
# `putenv` only writes: the library looks the variable up in C.
os.putenv("TOKENIZERS_PARALLELISM", "false")


@dataclass(frozen=True, kw_only=True)
class TextTokenizer:
    """A trained tokenizer."""

    library: LibraryTokenizer
    """The library's object; treat it as frozen."""

    @property
    def vocab_size(self) -> int:
        """V, the number of ids that exist; may be below what was asked for."""
        return self.library.get_vocab_size()

    @property
    def eot_id(self) -> int:
        """Id of end-of-text."""
        return EOT_ID

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without end-of-text; raises DataError for a lone surrogate."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text; as `encode`, faster for many."""
        return [ids.tolist() for ids in self.encode_arrays(texts)]

    def encode_arrays(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """Ids of each text as an array; for large texts, whose ids as Python numbers take several times the memory."""
        try:
            return list(self.encode_stream(texts))
        except (UnicodeEncodeError, TypeError):  # the library's word for a lone surrogate
            raise DataError(_surrogate(texts)) from None

    def encode_stream(self, texts: Iterable[str]) -> Generator[NDArray[np.int64]]:
        """Ids of each text, in order, while threads encode what comes after it; holds some megabytes, whatever comes.

        Threads encode, as the library lets go of the interpreter meanwhile; texts are read and arrays made by the
        caller's, because threads that made them would wait for each other. How many there are changes no id. A lone
        surrogate is the library's UnicodeEncodeError or TypeError.
        """
        if self.vocab_size == NUM_BYTES + 1:  # nothing can be merged: a table does in 1 s what takes the library 60
            for text in texts:
                yield self._id_of_byte[np.frombuffer(text.encode(), np.uint8)]
            return
        parts: list[NDArray[np.int64]] = []
        for group, encodings in self._encoded(_groups(texts)):
            for (_, is_last), encoding in zip(group, encodings, strict=True):
                parts.append(np.array(encoding.ids, np.int64))
                if is_last:
                    yield parts[0] if len(parts) == 1 else np.concatenate(parts)
                    parts = []

    def _encoded(self, groups: Iterator[_Group]) -> Iterator[tuple[_Group, list[Encoding]]]:
        """Each group with what the library makes of it, in order; a single one without a thread for it."""
        threads = min(MAX_THREADS, usable_cores())
        first, second = next(groups, None), next(groups, None)
        if first is None:
            return
        if second is None or threads == 1:
            for group in chain([first], [second] if second else [], groups):
                yield group, self._encode_group(group)
            return
        waiting: deque[tuple[_Group, Future[list[Encoding]]]] = deque()
        with ThreadPoolExecutor(threads) as pool:
            try:
                for group in chain([first, second], groups):
                    waiting.append((group, pool.submit(self._encode_group, group)))
                    while len(waiting) > GROUPS_A_THREAD * threads:
                        done, future = waiting.popleft()
                        yield done, future.result()
                while waiting:
                    done, future = waiting.popleft()
                    yield done, future.result()
            finally:
                pool.shutdown(cancel_futures=True)  # whoever stops early need not wait for what nobody will read

    def _encode_group(self, group: _Group) -> list[Encoding]:
        pieces = [piece for piece, _ in group]
        encodings: list[Encoding] = self.library.encode_batch_fast(pieces, add_special_tokens=False)
        return encodings

    @cached_property
    def _id_of_byte(self) -> NDArray[np.int64]:
        return np.array([self.library.token_to_id(token) for token in byte_alphabet()], np.int64)

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """The text of ids; bytes that are not UTF-8 become U+FFFD, end-of-text is shown as `<|endoftext|>`.

        Raises DataError for an id outside the vocabulary.
        """
        return self.library.decode(self._known(ids), skip_special_tokens=False)

    @cached_property
    def token_bytes(self) -> NDArray[np.int64]:
        """[V] bytes of raw text that each id stands for; 0 for end-of-text."""
        lengths = np.zeros(self.vocab_size, np.int64)
        for token, index in self.library.get_vocab(with_added_tokens=True).items():
            # The byte alphabet writes every byte as one character, so parts of a character count exactly.
            lengths[index] = 0 if index == EOT_ID else len(token)
        return lengths

    def spell(self, ids: Sequence[int] | NDArray[np.integer]) -> list[bytes]:
        """The bytes of raw text that each id stands for, which may be part of a character; none for end-of-text.

        Raises DataError for an id outside the vocabulary.
        """
        known = self._known(ids)
        written = [self.library.id_to_token(index) or "" for index in known]
        return [
            b"" if index == EOT_ID else bytes(self._byte_of_letter[letter] for letter in token)
            for index, token in zip(known, written, strict=True)
        ]

    def _known(self, ids: Sequence[int] | NDArray[np.integer]) -> list[int]:
        """The ids as plain numbers; DataError for one outside the vocabulary."""
        plain = [int(index) for index in ids]
        wrong = [index for index in plain if not 0 <= index < self.vocab_size]
        if wrong:
            raise DataError(f"token id {wrong[0]} is not accepted; expected 0 to {self.vocab_size - 1}")
        return plain

    @cached_property
    def _byte_of_letter(self) -> dict[str, int]:
        return {letter: byte for byte, letter in enumerate(byte_alphabet())}

    def to_json(self) -> str:
        """The tokenizer as text of a `tokenizer.json` of the library."""
        return self.library.to_str(pretty=False)

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of `to_json()`."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def train_tokenizer(
    spec: BpeTokenizer | ByteTokenizer, texts: Iterator[str], poll: Callable[[], None] = lambda: None
) -> TextTokenizer:
    """A tokenizer of the wanted kind, its merges learnt from `texts` (not read for plain bytes).

    The result does not depend on the machine; the vocabulary is smaller than asked for when the texts hold too few
    pairs that occur at least twice. `poll` is called several times a second and may raise.
    """
    return train_on_pieces(spec, (piece for text in texts for piece in split_text(text, PIECE_CHARS)), poll)


def train_on_pieces(
    spec: BpeTokenizer | ByteTokenizer, pieces: Iterator[str], poll: Callable[[], None] = lambda: None
) -> TextTokenizer:
    """As `train_tokenizer`, from texts that `split_text` has cut."""
    if isinstance(spec, ByteTokenizer):
        return frozen(_byte_tokenizer())
    library = _around(BPE())
    trainer = BpeTrainer(
        vocab_size=spec.vocab_size,
        min_frequency=MIN_FREQUENCY,
        show_progress=False,
        special_tokens=[AddedToken(END_OF_TEXT, special=True, normalized=False)],
        initial_alphabet=ByteLevel.alphabet(),
    )
    _interruptible(lambda: library.train_from_iterator(pieces, trainer=trainer), poll)
    return frozen(library)


def _interruptible(work: Callable[[], None], poll: Callable[[], None]) -> None:
    """Do `work` in a thread while this one calls `poll`: within the library, for minutes, no signal is heard.

    What `work` raises is raised here. When `poll` raises, the thread is left behind and ends with the process.
    """
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(POLL_S)
        poll()
    if raised:
        raise raised[0]


def load_tokenizer(path: Path) -> TextTokenizer:
    """A tokenizer from a `tokenizer.json` that this module wrote; raises DataError naming the file."""
    try:
        content = regular_bytes(path)
        _check_ids(path, parse_json(content))  # first: the library walks through every id up to the largest
        library = LibraryTokenizer.from_str(content.decode("utf-8"))
        read = json.loads(library.to_str())
    except DataError:
        raise
    except Exception as error:  # the library raises bare Exception for a broken file
        raise DataError(f"{path}: not a readable tokenizer file ({reason(error)})") from None
    if library.token_to_id(END_OF_TEXT) != EOT_ID or any(library.token_to_id(byte) is None for byte in byte_alphabet()):
        raise DataError(
            f"{path}: not a byte-level tokenizer of this project; expected 256 bytes and {END_OF_TEXT} as id 0"
        )
    if _around_vocabulary(read) != _around_vocabulary(json.loads(_byte_tokenizer().to_str())):
        raise DataError(
            f"{path}: does more than byte-level BPE; expected a tokenizer of this project: no normalizer, no template, "
            f"no special token but {END_OF_TEXT}"
        )
    return frozen(library)


class _Model(TypedDict):
    vocab: dict[str, int]


class _File(TypedDict):
    model: _Model


def _check_ids(path: Path, table: Any) -> None:
    if fault := misfit(_File, table):
        raise DataError(f"{path}: {fault}; expected a tokenizer of this project")
    ids = sorted(table["model"]["vocab"].values())
    if not ids or ids != list(range(len(ids))) or len(ids) > MAX_VOCAB:
        found = f"{len(ids)} tokens with ids from {ids[0]} to {ids[-1]}" if ids else "no tokens"
        raise DataError(f"{path}: {found}; expected ids from 0 without a gap, at most {MAX_VOCAB} of them")


def _around_vocabulary(table: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer file without what training decides: what it does to text besides merging bytes."""
    model = {key: value for key, value in table["model"].items() if key not in ("vocab", "merges")}
    return {**table, "model": model}


def _byte_tokenizer() -> LibraryTokenizer:
    alphabet = {token: 1 + byte for byte, token in enumerate(byte_alphabet())}
    library = _around(BPE(vocab={END_OF_TEXT: EOT_ID, **alphabet}, merges=[]))
    library.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return library


def _around(model: BPE) -> LibraryTokenizer:
    library = LibraryTokenizer(model)
    library.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=True)
    library.decoder = ByteLevelDecoder()
    return library


def frozen(library: LibraryTokenizer) -> TextTokenizer:
    """A trained tokenizer of the library as one of ours."""
    library.encode_special_tokens = True  # not part of the file: `<|endoftext|>` in a text is encoded as text
    return TextTokenizer(library=library)


def byte_alphabet() -> list[str]:
    """The character that byte-level BPE writes for each byte: itself where printable, else the next free code point.

    Printable are `!`–`~`, `¡`–`¬` and `®`–`ÿ` (GPT-2's table, Radford et al. 2019).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte if byte in printable else 256 + others.index(byte)) for byte in range(256)]


def split_text(text: str, size: int) -> list[str]:
    """`text` in pieces of `size` characters or a little more, cut where no token can lie across.

    A piece begins at a blank or line end after something that is no white space. The pre-tokenizer's pattern has
    white space only at the start of a match that goes on with anything else, so a match ends at every such place, and
    none of its look-aheads passes over it: encoding the pieces gives the tokens of the whole (tested). Where the next
    `MAX_RUN` characters have no such place, a sign after a letter or digit serves as well; where there is none either,
    as in a line of base64 or a genome, the run is cut into pieces of `CUT_CHARS`, which tokens then do not cross.
    """
    if len(text) <= size:
        return [text]
    pieces: list[str] = []
    start = 0
    while len(text) - start > size:
        place, last = start + size, start + size + MAX_RUN
        found = _BOUNDARY.search(text, place, last) or _INNER.search(text, place, last)
        if not found and last >= len(text):
            break
        cuts = [found.start()] if found else range(place, last, CUT_CHARS)
        for cut in cuts:
            pieces.append(text[start:cut])
            start = cut
    pieces.append(text[start:])
    return pieces


def _groups(texts: Iterable[str]) -> Iterator[_Group]:
    """The pieces of the texts in order, about CHARS_AT_ONCE characters at a time."""
    group: _Group = []
    size = 0
    for text in texts:
        pieces = split_text(text, PIECE_CHARS)
        for place, piece in enumerate(pieces, start=1):
            group.append((piece, place == len(pieces)))
            size += len(piece)
            if size >= CHARS_AT_ONCE:
                yield group
                group, size = [], 0
    if group:
        yield group


def _surrogate(texts: Sequence[str]) -> str:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            code = ord(text[error.start])
            return f"text holds a lone surrogate U+{code:04X} at character {error.start}; expected Unicode text"
    return "text cannot be encoded; expected Unicode text"
