"""Files that are whole or not there: atomic writes, checksums, and JSON read without trust. No format of our own.

Every file Equipoise leaves behind is written through `write_bytes` (or renamed as a folder): a killed process or a full
disk leaves the old content or the new one, never a mixture.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from equipoise.config import digest, dump
from equipoise.errors import IntegrityError, LockedError


def write_bytes(path: Path, content: bytes) -> None:
    """Replace `path` atomically and durably: temporary file, fsync, rename, fsync of the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename inside `folder` durable (no-op where folders cannot be opened, as on Windows)."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Atomic, readable JSON: indented, UTF-8, no NaN (ValueError)."""
    text = json.dumps(dump(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_bytes(path, text.encode())


def seal(value: dict[str, Any]) -> dict[str, Any]:
    """`value` with a digest of itself under `self_digest`, so that any later change of it can be noticed."""
    return {**value, "self_digest": digest(value)}


def read_sealed(path: Path) -> dict[str, Any]:
    """A JSON object written through `seal`; IntegrityError naming the file when it is not what was sealed."""
    stored = read_json(path)
    if stored.pop("self_digest", None) != digest(stored):
        raise IntegrityError(f"{path}: its digest does not match its content; it was changed after it was written")
    return stored


def file_sha256(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; IntegrityError naming the file otherwise."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise IntegrityError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(value, dict):
        raise IntegrityError(f"{path}: expected a JSON object")
    return value


def describe_file(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file, as manifests and summaries record them."""
    return {"bytes": path.stat().st_size, "sha256": file_sha256(path)}


def file_faults(directory: Path, files: dict[str, dict[str, Any]]) -> list[str]:
    """One line per recorded file that is missing or altered; without a recorded SHA-256 only sizes are compared."""
    faults = []
    for name, recorded in files.items():
        path = directory / name
        if not path.is_file():
            faults.append(f"{name}: missing")
        elif path.stat().st_size != recorded["bytes"]:
            faults.append(f"{name}: {path.stat().st_size} bytes, recorded {recorded['bytes']}")
        elif "sha256" in recorded and file_sha256(path) != recorded["sha256"]:
            faults.append(f"{name}: content differs from its recorded SHA-256")
    return faults


@contextmanager
def held(path: Path, what: str) -> Iterator[None]:
    """Hold the lock file `path` for the time of a `with` block; it is free again when the process dies.

    Raises LockedError, naming `what` and the holder's process, host and start, when another process holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    holder = path.with_suffix(".holder")
    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        try:
            who = holder.read_text(encoding="utf-8").strip()
        except OSError:
            who = "another process"
        raise LockedError(f"{what}: held by {who}; wait for it or stop it") from None
    try:
        started = datetime.now(UTC).isoformat(timespec="seconds")
        holder.write_text(f"process {os.getpid()} on {platform.node()} since {started}\n", encoding="utf-8")
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()
