"""Files that are whole or not there: atomic writes, checksums, and JSON read without trust. No format of our own.

Every file Equipoise leaves behind is written through `write_bytes` (or renamed as a folder): a killed process or a full
disk leaves the old content or the new one, never a mixture.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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


def take(path: Path) -> FileLock | None:
    """The lock file `path`, taken, with a note beside it that names this process; None when another one holds it.

    It is free again when this process dies, or when it is given to `give_back`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        return None
    started = datetime.now(UTC).isoformat(timespec="seconds")
    with suppress(OSError):  # a full disk, say: it is held all the same
        _note(path).write_text(f"process {os.getpid()} on {platform.node()} since {started}\n", encoding="utf-8")
    return lock


def give_back(lock: FileLock) -> None:
    """Let go of a lock that `take` gave."""
    _note(Path(lock.lock_file)).unlink(missing_ok=True)
    lock.release()


def holder(path: Path) -> str:
    """Who holds the lock file `path`, as its note says; whether it is held is not looked at."""
    try:
        return _note(path).read_text(encoding="utf-8").strip() or "another process"
    except OSError:
        return "another process"


def _note(path: Path) -> Path:
    return path.with_suffix(".holder")


@contextmanager
def held(path: Path, what: str, wait: Callable[[str], None] | None = None) -> Iterator[None]:
    """Hold the lock file `path` for the time of a `with` block; it is free again when the process dies.

    While another process holds it, `wait` is called with that one's name again and again, until it is free or `wait`
    raises. Without `wait`, raises LockedError naming `what` and the holder's process, host and start.
    """
    while (lock := take(path)) is None:
        if wait is None:
            raise LockedError(f"{what}: held by {holder(path)}; wait for it or stop it")
        wait(holder(path))
    try:
        yield
    finally:
        give_back(lock)
