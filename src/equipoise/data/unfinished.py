"""What is finished of a data set that is still being made, so that a process that was killed costs a segment at most.

`<cache>/.<key>.unfinished/` holds the files of the data set as far as they go, `documents-*.npy` (a row a document, a
file a segment of the corpus), and `progress.json`, which is replaced whenever something is finished. Only what it
names, with the SHA-256 it gives, counts as done; whatever else lies there is done again. Not for: doing the work
(`prepare`).
"""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any, Final

import numpy as np
import tokenizers
from numpy.typing import NDArray
from typing_extensions import TypedDict

import equipoise
from equipoise.config import misfit
from equipoise.data.splits import DOCUMENT
from equipoise.errors import IntegrityError
from equipoise.files import read_sealed, regular_bytes, seal, write_bytes, write_json

SEGMENT_BYTES: Final = 1 << 26
"""Bytes of text between two records of what is finished: some seconds of work, and too few records to cost anything."""
PROGRESS: Final = "progress.json"


class Part(TypedDict):
    """How far a token file goes."""

    tokens: int
    documents: int
    bytes: int
    sha256: str


class Encoded(TypedDict):
    """How far encoding has got: documents that were not dropped, and what of them each split's file holds."""

    documents: int
    splits: dict[str, Part]


class State(TypedDict):
    """What `progress.json` says."""

    made_by: dict[str, str]
    segments: list[str]
    all_read: bool
    tokenizer: str | None
    notes: list[str]
    encoded: Encoded | None


def nothing_done() -> State:
    """The state of a preparation that has not begun."""
    made_by = {"equipoise": equipoise.__version__, "tokenizers": tokenizers.__version__, "numpy": np.__version__}
    return {"made_by": made_by, "segments": [], "all_read": False, "tokenizer": None, "notes": [], "encoded": None}


def read_state(directory: Path) -> State:
    """What is finished there; nothing, where no record can be read or another version wrote it."""
    state: Any = None
    if (directory / PROGRESS).exists():
        try:
            state = read_sealed(directory / PROGRESS)
        except (IntegrityError, OSError):
            return nothing_done()
    if state is None or misfit(State, state) or state["made_by"] != nothing_done()["made_by"]:
        return nothing_done()
    found: State = state
    return found


def write_state(directory: Path, state: State) -> None:
    """Record what is finished; the files it names are on disk before."""
    write_json(directory / PROGRESS, seal({**state}))


def read_segments(directory: Path, state: State) -> list[NDArray[Any]]:
    """The rows of the documents that were read, a segment an array, up to the first that is not as recorded."""
    segments = []
    for number, sha256 in enumerate(state["segments"]):
        try:
            content = regular_bytes(_segment(directory, number))
        except OSError:
            break
        if hashlib.sha256(content).hexdigest() != sha256:
            break
        rows = np.load(io.BytesIO(content), allow_pickle=False)
        if rows.dtype != DOCUMENT:
            break
        segments.append(rows)
    return segments


def write_segment(directory: Path, number: int, rows: NDArray[Any]) -> str:
    """Write the rows of a segment; the SHA-256 (hex) of the file."""
    stream = io.BytesIO()
    np.save(stream, rows, allow_pickle=False)
    write_bytes(_segment(directory, number), stream.getvalue())
    return hashlib.sha256(stream.getvalue()).hexdigest()


def clear(directory: Path) -> None:
    """Remove what is of use only while the data set is made; the record of it last."""
    for pattern in ("documents-*.npy", ".*"):  # hidden is what a process was about to rename when it was killed
        for path in directory.glob(pattern):
            path.unlink()
    (directory / PROGRESS).unlink(missing_ok=True)


def _segment(directory: Path, number: int) -> Path:
    return directory / f"documents-{number:05d}.npy"
