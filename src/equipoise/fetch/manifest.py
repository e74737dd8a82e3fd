"""`manifest.json` of a fetched corpus: which files, from where, when, their sizes and SHA-256; and what they are now.

A file is whole and verified before it gets its name, and stands in the manifest before it gets it: whatever happens in
between, the next call finds its way. Nothing that lies here already is ever replaced. Not for: fetching (`download`).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from typing_extensions import TypedDict

from equipoise.config import misfit
from equipoise.data.corpora.reading import MANIFEST
from equipoise.errors import DataError
from equipoise.faults import show
from equipoise.fetch.download import note_of, part_of
from equipoise.files import file_faults, file_sha256, read_json, sync_folder, write_json

VERSION: Final = 1


class FetchedFile(TypedDict):
    """One file as it was fetched; `fetched` is the date and time, UTC."""

    url: str
    bytes: int
    sha256: str
    fetched: str


class Manifest(TypedDict):
    """What a folder of fetched files holds; `revision` is that of a data set which has them, or null."""

    schema_version: int
    corpus: str
    source: str
    revision: str | None
    licence: str
    files: dict[str, FetchedFile]


def read_manifest(folder: Path, fresh: Manifest) -> Manifest:
    """The manifest of `folder`, or `fresh` where there is none yet.

    Raises DataError when it is not one or is about another corpus or source, which would be mixed with this one.
    """
    path = folder / MANIFEST
    if not path.exists():
        return fresh
    stored: Any = read_json(path)
    if fault := misfit(Manifest, stored):
        raise DataError(f"{path}: {fault}; it is not a manifest of fetched files: choose another folder with --out")
    for key in ("corpus", "source"):
        if stored[key] != fresh[key]:
            raise DataError(
                f"{path}: {key} is {show(stored[key])}; expected {show(fresh[key])}: choose another folder with --out"
            )
    found: Manifest = stored
    return found


def is_here(folder: Path, manifest: Manifest, name: str, sha256: str | None) -> bool:
    """Whether `name` lies in `folder` as it was fetched, or, if `sha256` is known beforehand, as it would be.

    Raises DataError when something else has that name: a file that was changed since, or that was not fetched.
    """
    path = folder / name
    recorded = manifest["files"].get(name)
    if not path.exists():
        return False
    advice = "move it away to fetch it again"
    if recorded and sha256 in (None, recorded["sha256"]):
        expected = {"bytes": recorded["bytes"], "sha256": recorded["sha256"]}
        if faults := file_faults(folder, {name: expected}):
            raise DataError(f"{folder / faults[0]}; it was changed since it was fetched: {advice}")
        return True
    if sha256 is None:
        raise DataError(f"{path}: is there, but not in {MANIFEST}: {advice}")
    if not path.is_file() or file_sha256(path) != sha256:
        raise DataError(f"{path}: is not the file that would be fetched (SHA-256 {sha256}): {advice}")
    return True


def keep(folder: Path, manifest: Manifest, name: str, fetched: FetchedFile) -> Manifest:
    """Record a file whose bytes are whole in its part, and give it its name; returns the new manifest."""
    manifest = record(folder, manifest, {name: fetched})
    part = part_of(folder, name)
    part.replace(folder / name)
    sync_folder(folder)
    note_of(part).unlink(missing_ok=True)
    return manifest


def record(folder: Path, manifest: Manifest, files: Mapping[str, FetchedFile]) -> Manifest:
    """Write the manifest with these files added; returns it. Files stand in order of name."""
    new: Manifest = {**manifest, "files": dict(sorted({**manifest["files"], **files}.items()))}
    write_json(folder / MANIFEST, new)
    return new


def entry(url: str, path: Path, sha256: str) -> FetchedFile:
    """What is recorded of the file whose bytes lie at `path`."""
    now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    return {"url": url, "bytes": path.stat().st_size, "sha256": sha256, "fetched": now}
