"""Make a data set: documents → splits → tokenizer → token files, written aside and renamed into the cache.

The corpus is streamed three times (to place documents, to learn the tokenizer, to encode); of each document some dozens
of bytes stay in memory. What is finished is kept when the process is stopped or killed (`unfinished`). A lock a key
lets two processes prepare at once: the second waits and opens what the first made. Not for: opening a data set
(`dataset`).
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from equipoise.config import dump
from equipoise.data.corpora import SPLITS, Source, open_corpus
from equipoise.data.dataset import (
    SCHEMA_VERSION,
    Dataset,
    content_digest,
    dataset_key,
    log_probs_path,
    open_dataset,
    usable,
)
from equipoise.data.encoding import CHANGED, Written, kept, write_tokens
from equipoise.data.learning import learn
from equipoise.data.progress import Meter, Progress
from equipoise.data.splits import SELECTION_SHARE, TRAIN, VALIDATION_SHARE, Assignment, place, read_documents
from equipoise.data.tokenizer import TextTokenizer, load_tokenizer, train_tokenizer
from equipoise.data.unfinished import (
    SEGMENT_BYTES,
    Encoded,
    State,
    clear,
    nothing_done,
    read_segments,
    read_state,
    write_segment,
    write_state,
)
from equipoise.errors import DataError, Interrupted, ResourceError
from equipoise.files import file_sha256, sync_folder, write_bytes, write_json
from equipoise.spec.data import Corpus, GrammarCorpus, Tokenizer, requested_vocab_size

SAMPLE_CHARS: Final = 1 << 20
"""What `estimate` reads, of one document at most a 64th: a single book's names would pass for the corpus'."""
POLL_S: Final = 0.2
"""How often a process that waits for another one's lock looks at `should_stop`."""
POLL_DOCUMENTS: Final = 256
"""Documents between two looks at `should_stop` while the tokenizer reads: a few milliseconds."""
READING, LEARNING, ENCODING = range(3)


def never() -> bool:
    """The `should_stop` of a caller that never stops."""
    return False


def quiet(line: str) -> None:
    """The `progress` of a caller that does not want any."""


def unwatched(progress: Progress) -> None:
    """The `watch` of a caller that does not want any."""


@dataclass(frozen=True, kw_only=True)
class _Caller:
    """Who wants the data set: what is told to it, and how it stops."""

    say: Callable[[str], None]
    watch: Callable[[Progress], None]
    poll: Callable[[], None]


def prepare(
    corpus: Corpus,
    tokenizer: Tokenizer,
    cache: Path,
    *,
    progress: Callable[[str], None] | None = None,
    watch: Callable[[Progress], None] = unwatched,
    should_stop: Callable[[], bool] = never,
) -> Dataset:
    """The data set of a corpus and a tokenizer, made if `cache` does not hold it yet.

    `progress` gets a line when a stage begins, `watch` how far it has got, several times a second. `should_stop` is
    looked at all the time; when it says so, Interrupted is raised. After that, or after being killed, the next call
    goes on from the last segment that was finished, and comes to the same bytes; after other failures nothing is left.
    Raises DataError for a corpus that cannot be used, ResourceError when the disk is full.
    """

    def poll() -> None:
        if should_stop():
            raise Interrupted("preparing the data was interrupted; what is finished was kept: run it again to go on")

    caller = _Caller(say=progress or quiet, watch=watch, poll=poll)
    source = open_corpus(corpus)
    key = dataset_key(source, tokenizer)
    directory = cache / key
    if found := usable(directory):
        return found
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f"{key}.lock", caller):
            if found := usable(directory):
                return found
            built = cache / f".{key}.unfinished"
            for left in cache.glob(f".{key}.*"):  # of earlier versions; the lock says that nobody is at it
                if left != built:
                    shutil.rmtree(left, ignore_errors=True)
            built.mkdir(exist_ok=True)
            try:
                if not usable(built):  # it is whole where a process was killed that was clearing it up
                    _build(source, tokenizer, built, caller)
                if open_corpus(corpus).fingerprint != source.fingerprint:
                    raise DataError(CHANGED.format(source.title))
                if directory.exists():  # one that does not open
                    shutil.rmtree(directory)
                clear(built)
                built.replace(directory)
                sync_folder(cache)
            except (Interrupted, KeyboardInterrupt):
                raise
            except BaseException:  # a corpus that changed, a full disk: what is there is of no use, or in the way
                shutil.rmtree(built, ignore_errors=True)
                raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise ResourceError(f"{cache}: no space left while preparing the data ({error.strerror})") from None
        raise DataError(f"{cache}: the data cache cannot be written ({error.strerror or error})") from None
    return open_dataset(directory)


@contextmanager
def _locked(path: Path, caller: _Caller) -> Iterator[None]:
    """Hold the lock; while another process does, wait, say so once and keep polling."""
    lock = FileLock(path)
    waiting = False
    while True:
        try:
            lock.acquire(timeout=POLL_S)
            break
        except Timeout:
            if not waiting:
                caller.say("data: another process is preparing it; waiting")
            waiting = True
            caller.poll()
    try:
        yield
    finally:
        lock.release()


def _build(source: Source, spec: Tokenizer, directory: Path, caller: _Caller) -> None:
    """Write every file of the data set into `directory`, from where an earlier process left it."""
    state = read_state(directory)
    going_on = ", going on" if state["segments"] else ""
    caller.say(f"data: reading {source.title}{going_on}")
    placed = place(source, _documents(source, directory, state, caller))
    num_train = int((placed.split_of == TRAIN).sum())
    caller.say(f"data: {num_train:,} training documents; learning the tokenizer")
    tokenizer = _tokenizer(source, spec, placed, directory, state, caller)
    caller.say(f"data: vocabulary {tokenizer.vocab_size:,}; encoding")

    def keep(encoded: Encoded) -> None:
        state["encoded"] = encoded
        write_state(directory, state)

    meter = Meter(ENCODING, sum(placed.kept_bytes), caller.watch)
    written = write_tokens(
        source, placed, tokenizer, directory, begun=state["encoded"], keep=keep, poll=caller.poll, meter=meter
    )
    info = _describe(source, placed, spec, tokenizer, written, state["notes"])
    if source.kind == "grammar":
        for split in SPLITS:
            info["splits"][split]["log_probs"] = file_sha256(log_probs_path(directory, split))
    write_json(directory / "dataset.json", info)


def _documents(source: Source, directory: Path, state: State, caller: _Caller) -> NDArray[Any]:
    """What `place` needs to know of the documents: as far as it was read before, and read on; recorded in `state`."""
    segments = read_segments(directory, state)
    if len(segments) < len(state["segments"]):  # one is missing or altered: what follows from it is as well
        state.update({**nothing_done(), "segments": state["segments"][: len(segments)]})

    def keep(rows: NDArray[Any]) -> None:
        state["segments"].append(write_segment(directory, len(state["segments"]), rows))
        write_state(directory, state)

    meter = Meter(READING, sum(source.text_sizes), caller.watch)
    if not state["all_read"]:
        segments = [
            read_documents(source, caller.poll, before=segments, keep=keep, segment_bytes=SEGMENT_BYTES, meter=meter)
        ]
        state["all_read"] = True
        write_state(directory, state)
    return np.concatenate(segments)


def _tokenizer(
    source: Source, spec: Tokenizer, placed: Assignment, directory: Path, state: State, caller: _Caller
) -> TextTokenizer:
    """The tokenizer, as an earlier process left it, or learnt now and recorded."""
    path = directory / "tokenizer.json"
    if state["tokenizer"] is not None:
        with suppress(DataError):
            found = load_tokenizer(path)
            if found.digest == state["tokenizer"]:
                return found
    meter = Meter(LEARNING, placed.kept_bytes[TRAIN], caller.watch)
    learnt = learn(spec, _training_texts(source, placed, caller.poll, meter), caller.poll)
    write_bytes(path, learnt.tokenizer.to_json().encode())
    state["tokenizer"], state["encoded"] = learnt.tokenizer.digest, None
    state["notes"] = [learnt.note] if learnt.note else []
    write_state(directory, state)
    return learnt.tokenizer


def _training_texts(source: Source, placed: Assignment, poll: Callable[[], None], meter: Meter) -> Iterator[str]:
    """The texts of the train split: the tokenizer sees no other."""
    untold = 0
    for index, (document, split) in enumerate(kept(source, placed)):
        if index % POLL_DOCUMENTS == 0:
            poll()
            meter.add(untold)
            untold = 0
        if split == TRAIN:
            text = document.text
            untold += len(text) if text.isascii() else len(text.encode())
            yield text


def _describe(
    source: Source,
    placed: Assignment,
    spec: Tokenizer,
    tokenizer: TextTokenizer,
    written: Written,
    notes: list[str],
) -> dict[str, Any]:
    """`dataset.json`."""
    sha256 = dict(zip(SPLITS, written.sha256, strict=True))
    return {
        "schema_version": SCHEMA_VERSION,
        "digest": content_digest(sha256, tokenizer.vocab_size, tokenizer.digest),
        "kind": source.kind,
        "title": source.title,
        "licence": source.licence,
        "corpus": source.fingerprint,
        "files": [asdict(file) for file in source.files],
        "notes": [*source.notes, *notes],
        "vocab_size": tokenizer.vocab_size,
        "eot_id": tokenizer.eot_id,
        "tokenizer": {**dump(spec), "digest": tokenizer.digest},
        "splits": {
            split: {
                "documents": header.num_documents,
                "tokens": header.count,
                "bytes": header.num_bytes,
                "sha256": sha256[split],
            }
            for split, header in zip(SPLITS, written.headers, strict=True)
        },
        "blank_documents": placed.num_blank,
        "duplicates": {
            "dropped": placed.duplicates_dropped,
            "exact": placed.exact_duplicates,
            "normalised": placed.normalised_duplicates,
        },
    }


# ------------------------------------------------------------------------------------------------ before preparing


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What can be said of a corpus that was not prepared."""

    train_tokens: int
    """Tokens of the train split, end-of-text included: tokens per byte of a sample × bytes of the corpus."""
    validation_tokens: int
    """Tokens of the validation split, likewise."""
    selection_tokens: int
    """Tokens of the selection split, likewise."""
    vocab_size: int
    """V as the sample reached it when it was the whole corpus, else as asked for."""


def estimate(corpus: Corpus, tokenizer: Tokenizer) -> Estimate:
    """Tokens and vocabulary from about a megabyte of the text that may become training text; writes nothing.

    Raises DataError for a corpus that cannot be used. Off by a few per cent: the sample's merges are not the corpus',
    and duplicates are not looked for; for .jsonl the bytes around the text count as well.
    """
    source = open_corpus(corpus)
    sample: list[str] = []
    size = 0
    complete = True
    for document in source.read():
        if document.split in ("validation", "selection") or not document.text.strip():
            continue
        sample.append(document.text[: SAMPLE_CHARS // 64])
        size += len(sample[-1])
        complete = complete and len(sample[-1]) == len(document.text)
        if size >= SAMPLE_CHARS:
            complete = False
            break
    if not sample:
        raise DataError(f"corpus {source.kind}: no training text found; expected at least 3 documents")
    trained = train_tokenizer(tokenizer, iter(sample))
    num_tokens = sum(len(ids) + 1 for ids in trained.encode_arrays(sample))
    num_bytes = sum(len(text.encode()) for text in sample)
    tokens = [
        round(size * num_tokens / num_bytes) for size in _split_bytes(corpus, source, num_bytes, len(sample), complete)
    ]
    return Estimate(
        train_tokens=tokens[0],
        selection_tokens=tokens[1],
        validation_tokens=tokens[2],
        vocab_size=trained.vocab_size if complete else requested_vocab_size(tokenizer),
    )


def _split_bytes(
    corpus: Corpus, source: Source, sample_bytes: int, sample_documents: int, complete: bool
) -> tuple[float, float, float]:
    """Bytes that train, selection and validation will have, as far as the sample and the sizes of the files tell."""
    if isinstance(corpus, GrammarCorpus):
        each = sample_bytes / sample_documents
        return corpus.num_documents * each, corpus.num_selection * each, corpus.num_validation * each
    sized = list(zip(source.files, source.text_sizes, strict=True))
    official = sum(size for file, size in sized if file.split == "validation")
    rest = sample_bytes if complete else sum(size for file, size in sized if file.split != "validation")
    validation = official or VALIDATION_SHARE * rest
    share = 1 - SELECTION_SHARE - (0 if official else VALIDATION_SHARE)
    return share * rest, SELECTION_SHARE * rest, validation
