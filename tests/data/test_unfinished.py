"""A preparation that is killed, anywhere, goes on from its last segment and comes to the same bytes."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import numpy as np
import pytest

from equipoise.data import encoding, learning, splits
from equipoise.data import prepare as module
from equipoise.data import tokenizer as tokenizer_module
from equipoise.data.corpora import SPLITS
from equipoise.data.prepare import prepare
from equipoise.data.progress import Meter, Progress
from equipoise.data.tokenizer import TextTokenizer
from equipoise.data.unfinished import nothing_done, read_state, write_state
from equipoise.errors import Interrupted
from equipoise.spec.data import BpeTokenizer, Corpus, GrammarCorpus, TextCorpus

BPE = BpeTokenizer(vocab_size=280)
GRAMMAR = GrammarCorpus(num_documents=90, num_validation=7, num_selection=5)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    for where in (module, encoding):
        monkeypatch.setattr(where, "SEGMENT_BYTES", 8000)
    monkeypatch.setattr(encoding, "BATCH_BYTES", 1500)
    monkeypatch.setattr(tokenizer_module, "CHARS_AT_ONCE", 600)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # a killed process needs no disk that is in time


def text_corpus(folder: Path) -> TextCorpus:
    file = folder / "lines.jsonl"
    lines = [f'{{"text": "Line {index} of a café, {"again " * (index % 40)}"}}\n' for index in range(250)]
    file.write_text("".join(lines), encoding="utf-8")
    return TextCorpus(path=str(file))


def test_what_is_whole_but_for_its_name_is_not_made_again(
    tmp_path: Path, small_segments: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process killed while it clears up: some records of what is finished are gone, the data set is whole."""
    corpus = text_corpus(tmp_path)

    def killed(directory: Path) -> None:
        next(directory.glob("documents-*.npy")).unlink()
        raise Interrupted("killed")  # what is there is kept then

    monkeypatch.setattr(module, "clear", killed)
    with pytest.raises(Interrupted, match="killed"):
        prepare(corpus, BPE, tmp_path / "cache")
    monkeypatch.undo()
    said: list[str] = []
    found = prepare(corpus, BPE, tmp_path / "cache", progress=said.append)
    assert said == [] and files(found.directory) == files(prepare(corpus, BPE, tmp_path / "whole").directory)
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()] == [found.directory.name]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks a process to be killed")
@pytest.mark.parametrize("kind", ["grammar", "text"])
def test_killed_at_every_point_where_something_reaches_the_disk(
    kind: str, tmp_path: Path, small_segments: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL before the n-th fsync, for every eighth n; then twice more, a few on; the last process finishes."""
    corpus: Corpus = GRAMMAR if kind == "grammar" else text_corpus(tmp_path)
    calls: list[int] = []
    monkeypatch.setattr(os, "fsync", calls.append)
    whole = files(prepare(corpus, BPE, tmp_path / "whole").directory)
    assert len(calls) > 30
    killed = 0
    for first in range(1, len(calls), 8):
        cache = tmp_path / f"cache-{first}"
        for number in (first, 4, 7):
            killed += _killed(corpus, cache, number)
        assert files(prepare(corpus, BPE, cache).directory) == whole
        assert sorted(path.suffix for path in cache.iterdir()) == ["", ".lock"]
    assert killed > 6


def _killed(corpus: Corpus, cache: Path, number: int) -> bool:
    """Prepare in a process that kills itself before its fsync of that number; whether it did."""
    child = os.fork()
    if child == 0:
        calls = 0

        def kill_at(descriptor: int) -> None:
            nonlocal calls
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)

        os.fsync = kill_at
        try:
            prepare(corpus, BPE, cache)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def interrupted(corpus: Corpus, cache: Path, when: Callable[[Path], bool]) -> Path:
    """Prepare until `when(unfinished folder)`; the folder."""

    def should_stop() -> bool:
        return any(when(folder) for folder in cache.glob(".*.unfinished"))

    with pytest.raises(Interrupted):
        prepare(corpus, BPE, cache, should_stop=should_stop)
    (folder,) = cache.glob(".*.unfinished")
    return folder


def far(folder: Path) -> bool:
    """Whether half of the documents are encoded."""
    encoded = read_state(folder)["encoded"]
    return encoded is not None and encoded["documents"] > 50


def test_what_is_finished_is_not_done_again(
    tmp_path: Path, small_segments: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = interrupted(GRAMMAR, tmp_path, far)
    state = read_state(folder)
    assert state["all_read"] and state["encoded"]
    hashed: list[str] = []
    encoded: list[str] = []
    monkeypatch.setattr(splits, "normalise", lambda text: hashed.append(text) or text)
    monkeypatch.setattr(module, "learn", lambda *args: 1 // 0)
    encode = TextTokenizer.encode_stream

    def count(self: TextTokenizer, texts: Iterator[str]) -> Generator[np.ndarray]:
        for ids in encode(self, texts):
            encoded.append("")
            yield ids

    monkeypatch.setattr(TextTokenizer, "encode_stream", count)
    lines: list[str] = []
    prepare(GRAMMAR, BPE, tmp_path, progress=lines.append)
    assert hashed == []
    assert len(encoded) == 102 - state["encoded"]["documents"] < 52
    assert lines[0] == "data: reading story grammar, world 0, going on"


def test_reading_goes_on_within_the_corpus(
    tmp_path: Path, small_segments: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splits, "_CHECK_EVERY", 1)
    folder = interrupted(GRAMMAR, tmp_path, lambda folder: len(read_state(folder)["segments"]) == 2)
    state = read_state(folder)
    assert not state["all_read"]
    known = sum(len(np.load(folder / f"documents-{number:05d}.npy", allow_pickle=False)) for number in range(2))
    seen: list[str] = []
    normalise = splits.normalise
    monkeypatch.setattr(splits, "normalise", lambda text: seen.append(text) or normalise(text))
    prepare(GRAMMAR, BPE, tmp_path)
    assert len(seen) == 102 - known < 90


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda content: content[:-1],
    "empty": lambda content: b"",
    "altered": lambda content: content[: len(content) // 2] + b"\xff" + content[len(content) // 2 + 1 :],
    "longer": lambda content: content + b"rest of a killed process",
}


@pytest.mark.parametrize("damage", [*DAMAGES, "gone"])
def test_what_is_damaged_meanwhile_is_done_again(tmp_path: Path, small_segments: None, damage: str) -> None:
    whole = files(prepare(GRAMMAR, BPE, tmp_path / "whole").directory)
    begun = interrupted(GRAMMAR, tmp_path / "begun", far)
    names = sorted(path.name for path in begun.iterdir())
    assert {"progress.json", "tokenizer.json", "documents-00001.npy", "train.tokens"} <= set(names)
    for name in names:
        cache = tmp_path / name
        file = Path(shutil.copytree(begun, cache / begun.name)) / name
        if damage == "gone":
            file.unlink()
        else:
            file.write_bytes(DAMAGES[damage](file.read_bytes()))
        assert files(prepare(GRAMMAR, BPE, cache).directory) == whole


def test_a_token_file_that_is_being_written_is_not_taken_for_whole(tmp_path: Path, small_segments: None) -> None:
    folder = interrupted(GRAMMAR, tmp_path, far)
    for split in SPLITS:
        assert (folder / f"{split}.tokens").read_bytes()[:128] == bytes(128)


def test_what_another_version_began_begins_anew(tmp_path: Path) -> None:
    state = nothing_done()
    state["segments"] = ["ab" * 32]
    write_state(tmp_path, state)
    assert read_state(tmp_path) == state
    state["made_by"] = {**state["made_by"], "tokenizers": "0.1"}
    write_state(tmp_path, state)
    assert read_state(tmp_path) == nothing_done()


def test_progress_counts_every_byte_of_every_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equipoise.data.progress.LOOK_S", -1.0)
    monkeypatch.setattr(splits, "_CHECK_EVERY", 1)
    monkeypatch.setattr(module, "POLL_DOCUMENTS", 1)
    monkeypatch.setattr(encoding, "BATCH_BYTES", 1)
    monkeypatch.setattr(learning, "CHILD_CHARS", 1 << 30)
    seen: list[Progress] = []
    dataset = prepare(text_corpus(tmp_path), BPE, tmp_path / "cache", watch=seen.append)
    total = sum(split["bytes"] for split in dataset.info["splits"].values())
    done = {progress.stage: progress for progress in seen}
    assert [progress.stage for progress in seen] == sorted(progress.stage for progress in seen)
    assert total - 300 < done[0].done_bytes < total
    train = dataset.info["splits"]["train"]["bytes"]
    assert done[1].total_bytes == train and train - 300 < done[1].done_bytes < train
    assert (done[2].done_bytes, done[2].total_bytes) == (total, total)


def test_rates_are_of_this_process_alone() -> None:
    seen: list[Progress] = []
    now = 10.0
    meter = Meter(2, 1000, seen.append, clock=lambda: now)
    now = 30.0
    meter.skip(400)
    now = 30.5
    meter.add(50)
    now = 32.0
    meter.add(150)
    assert [(p.done_bytes, p.bytes_per_s, p.left_s) for p in seen] == [
        (400, None, None), (450, None, None), (600, 100.0, 4.0),
    ]  # fmt: skip
