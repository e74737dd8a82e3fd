"""Files that are whole or not there: atomic writes, checksums, and JSON read without trust. No format of our own.

Every file Equipoise leaves behind is written through `write_bytes` (or renamed as a folder): a killed process or a full
disk leaves the old content or the new one, never a mixture.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from filelock import FileLock, Timeout

from equipoise.config import MAX_DEPTH, deeper_than, digest, dump
from equipoise.errors import ConfigError, IntegrityError, LockedError
from equipoise.faults import printable, show


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


MAX_DIGITS: Final = 100
"""Digits of a whole number in a file of ours; FLOPs of the largest trainings have 26, and floats reach 308."""
_HALF_PAIR: Final = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(content: bytes) -> Any:
    """The value of a JSON text that is not trusted; ValueError says in a few words why there is none.

    Refused besides what is no JSON: NaN, infinities, numbers of over 100 digits, lone surrogates (which could not be
    written again), and depths that make whoever walks through the value fail.
    """
    text = content.decode("utf-8")
    try:
        value = json.loads(text, parse_constant=_no_number, parse_int=_whole_number, parse_float=_finite_number)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if text.count("[") + text.count("{") > MAX_DEPTH and deeper_than(MAX_DEPTH, value):
        raise ValueError("nested too deeply")
    if _HALF_PAIR.search(text):
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _whole_number(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _finite_number(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _no_number(text[:MAX_DIGITS])


def check_regular(path: Path) -> None:
    """OSError for a pipe or a device: reading the one could wait for ever, the other never end."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(f"{path} is no regular file")


def regular_bytes(path: Path) -> bytes:
    """The content of a regular file; OSError otherwise."""
    check_regular(path)
    return path.read_bytes()


def file_sha256(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; IntegrityError naming the file otherwise."""
    try:
        value = parse_json(regular_bytes(path))
    except (OSError, ValueError) as error:
        raise IntegrityError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(value, dict):
        raise IntegrityError(f"{path}: expected a JSON object")
    return value


def describe_file(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file, as manifests and summaries record them."""
    return {"bytes": path.stat().st_size, "sha256": file_sha256(path)}


def file_faults(directory: Path, files: dict[str, dict[str, Any]]) -> list[str]:
    """One line per recorded file that is missing or altered; without a recorded SHA-256 only sizes are compared.

    `files` is what `shapes.RecordedFile` says.
    """
    faults = []
    for name, recorded in files.items():
        path = directory / name
        shown = printable(name)
        try:
            if not path.is_file():
                faults.append(f"{shown}: missing")
            elif path.stat().st_size != recorded["bytes"]:
                faults.append(f"{shown}: {path.stat().st_size} bytes, recorded {show(recorded['bytes'])}")
            elif "sha256" in recorded and file_sha256(path) != recorded["sha256"]:
                faults.append(f"{shown}: content differs from its recorded SHA-256")
        except OSError as error:
            faults.append(f"{shown}: cannot be read ({error.strerror})")
    return faults


def take(path: Path) -> FileLock | None:
    """The lock file `path`, taken, with a note beside it that names this process; None when another one holds it.

    It is free again when this process dies, or when it is given to `give_back`. ConfigError when its folder is a file.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise ConfigError(f"{path.parent}: is a file; expected a folder, or a name that is free") from None
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
