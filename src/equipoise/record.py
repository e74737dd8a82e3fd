"""The run directory: the only interface between training and analysis. Reader and writer; no torch, no statistics.

config.json               the RunConfig and its digest, written first
metrics.jsonl             one row per update (`train`) and per evaluation (`eval`), each kind in step order
samples.jsonl             texts written along the way
val_losses.safetensors    loss per validation unit, at the end and at the best step
explorer.json             some validation stories token by token, and what each expert is used for, at the end
tokenizer.json            the tokenizer, so that the run can be sampled on its own
environment.json          machine, versions, device and dtype with the reason
branch.json               which checkpoint of a trunk it went on from (see `equipoise.trunk`); absent for most runs
checkpoints/              see `equipoise.checkpoint`; may be deleted after completion
summary.json              written last by rename: results, and size and SHA-256 of every other file
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from equipoise.config import differences, digest, dump, load, misfit
from equipoise.errors import ConfigError, IntegrityError
from equipoise.faults import not_accepted, reason
from equipoise.files import (
    describe_file,
    file_faults,
    parse_json,
    read_json,
    read_sealed,
    regular_bytes,
    seal,
    write_bytes,
    write_json,
)
from equipoise.shapes import Row, Summary, hold
from equipoise.spec.run import RunConfig

SCHEMA_VERSION: Final = 1
WEIGHTS: Final = "checkpoints"
EXPLORER: Final = "explorer.json"
ROW_FILES: Final = ("metrics.jsonl", "samples.jsonl")
SPIKE_WINDOW: Final = 128
SPIKE_SIGMAS: Final = 6.0
MASKED_FIELDS: Final = (
    "elapsed_s",
    "tokens_per_s",
    "train_s",
    "eval_s",
    "sample_s",
    "final_score_s",
    "peak_memory_bytes",
)
"""Fields that measure the machine, not the model: they differ between two equal runs."""

Status = Literal["missing", "started", "interrupted", "complete", "diverged", "broken"]


# ------------------------------------------------------------------------------------------------ writing


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Append one JSON line; it is in the file (not only in a buffer) when this returns."""
    line = json.dumps(row, separators=(",", ":"), ensure_ascii=False, allow_nan=False) + "\n"
    with path.open("a", encoding="utf-8") as file:
        file.write(line)


def start_run(directory: Path, run: RunConfig, tokenizer_json: str) -> None:
    """Create the directory with its config, or check that the one there is of the same run.

    What has not begun gives way. Raises IntegrityError naming the fields that differ.
    """
    try:
        existing = read_config(directory)
    except IntegrityError:  # altered: the run's own checkpoints say which run they belong to
        existing = None
    if existing is not None and existing != run and not has_begun(directory):
        existing = None
    if existing is not None and existing != run:
        lines = "; ".join(differences(dump(existing), dump(run)))
        raise IntegrityError(f"{directory}: holds another run ({lines}); choose another --out, or delete it")
    if existing is None:
        directory.mkdir(parents=True, exist_ok=True)
        write_json(directory / "config.json", {"schema_version": SCHEMA_VERSION, "digest": digest(run), "run": run})
    write_bytes(directory / "tokenizer.json", tokenizer_json.encode())


def has_begun(directory: Path) -> bool:
    """Whether the run or trunk there has done an update or has ended, as far as anything of it is left.

    A run that failed before its first update has shown nothing, so nothing that was declared of it has to stay.
    """
    metrics = directory / "metrics.jsonl"
    return (
        (directory / "summary.json").exists()
        or any("step-00000000" not in path.name for path in (directory / WEIGHTS).glob("*step-*"))
        or (metrics.is_file() and b'"kind":"train"' in metrics.read_bytes())
    )


def mark_rows(directory: Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of the row files as they are now, made durable: what belongs to a checkpoint saved now."""
    marks = {}
    for name in ROW_FILES:
        path = directory / name
        path.touch()
        with path.open("rb") as file:
            os.fsync(file.fileno())
        marks[name] = describe_file(path)
    return marks


def rows_fault(directory: Path, marks: dict[str, dict[str, Any]]) -> str | None:
    """Why the row files do not begin with what `mark_rows` described, or None when they do."""
    for name in ROW_FILES:
        path, mark = directory / name, marks[name]
        beginning = path.read_bytes()[: mark["bytes"]] if path.is_file() else b""
        if len(beginning) != mark["bytes"] or hashlib.sha256(beginning).hexdigest() != mark["sha256"]:
            return f"{path}: rows that belong to the checkpoint are missing or altered"
    return None


def cut_rows(directory: Path, marks: dict[str, dict[str, Any]] | None) -> None:
    """Cut the row files back to what `marks` describes (None: to nothing), whatever else was written since."""
    for name in ROW_FILES:
        path = directory / name
        if path.is_file():
            with path.open("r+b") as file:
                file.truncate(marks[name]["bytes"] if marks else 0)


def write_losses(directory: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write `val_losses.safetensors`: per-unit losses (float64 nats), token and byte counts, document numbers."""
    write_bytes(
        directory / "val_losses.safetensors", save({name: np.ascontiguousarray(a) for name, a in arrays.items()})
    )


def write_explorer(directory: Path, explored: dict[str, Any]) -> None:
    """Write `explorer.json`, on one line: it is mostly short numbers."""
    text = json.dumps(explored, separators=(",", ":"), ensure_ascii=False, allow_nan=False) + "\n"
    write_bytes(directory / EXPLORER, text.encode())


def finish_run(directory: Path, summary: dict[str, Any], steps: Iterable[int] | None = None) -> dict[str, Any]:
    """Write `summary.json` over everything else that lies in the directory; returns what was written.

    Of checkpoints only those of `steps` (None: all) belong to it: which others there are depends on time.
    """
    wanted = None if steps is None else {f"step-{step:08d}" for step in steps}
    files = {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if not path.is_file() or path.name == "summary.json" or path.name.startswith("."):
            continue
        if wanted is None or not name.startswith(f"{WEIGHTS}/") or path.parent.name in wanted:
            files[name] = describe_file(path)
    whole = {"schema_version": SCHEMA_VERSION, **summary, "files": files}
    write_json(directory / "summary.json", seal(whole))
    return whole


# ------------------------------------------------------------------------------------------------ reading


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What a run directory says, verified against its own summary."""

    directory: Path
    """Where it lies."""
    config: RunConfig | None
    """What was run; None when missing or unreadable."""
    status: Status
    """missing · started (no checkpoint yet) · interrupted (resumable) · complete · diverged · broken (see `fault`)."""
    summary: dict[str, Any] | None
    """The summary of a complete or diverged run."""
    fault: str | None = None
    """What is wrong with a broken one."""
    locked: RunConfig | None = None
    """The run that the study's lock declares here; None outside a study."""

    def rows(self, kind: Literal["train", "eval"]) -> list[dict[str, Any]]:
        """Rows of `metrics.jsonl` of one kind, in order."""
        return [row for row in read_rows(self.directory / "metrics.jsonl") if row.get("kind") == kind]

    def samples(self) -> list[dict[str, Any]]:
        """Rows of `samples.jsonl`, in order."""
        return read_rows(self.directory / "samples.jsonl")

    def losses(self) -> dict[str, np.ndarray]:
        """Arrays of `val_losses.safetensors` by name."""
        return read_tensors(self.directory / "val_losses.safetensors")


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a safetensors file by name; IntegrityError naming it when it is none or is no use."""
    try:
        return dict(load_file(path))
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise IntegrityError(f"{path}: not a readable safetensors file ({reason(error)})") from None


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file; a torn last line is dropped, any other bad line is an IntegrityError."""
    if not path.exists():
        return []
    try:
        lines = regular_bytes(path).split(b"\n")
    except OSError as error:
        raise IntegrityError(f"{path}: cannot be read ({error.strerror or error})") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            if number == len(lines):  # no newline after it: the writer was killed in the middle of this line
                break
            raise IntegrityError(
                f"{path}:{number}: not a JSON line; the file was changed after it was written ({error})"
            ) from None
        hold(f"{path}:{number}", row, Row)
        rows.append(row)
    return rows


def last_row(path: Path) -> dict[str, Any] | None:
    """The newest whole row of a JSON-lines file that may be growing, read from its end; None without one.

    Raises IntegrityError or ValueError when that is none.
    """
    if not path.is_file():
        return None
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 65_536))
        whole = file.read().split(b"\n")[1 if file.tell() > 65_536 else 0 : -1]
    if not whole:
        return None
    row: dict[str, Any] = parse_json(whole[-1])
    hold(path, row, Row)
    return row


def read_config(directory: Path) -> RunConfig | None:
    """The RunConfig of a run directory, None without one; IntegrityError when it is altered."""
    path = directory / "config.json"
    if not path.exists():
        return None
    stored = read_json(path)
    try:
        run = load(RunConfig, stored.get("run", {}))
    except ConfigError as error:
        if why := other_version(stored.get("run"), stored.get("digest")):
            raise IntegrityError(f"{path}: {why} ({str(error).splitlines()[0]})") from None
        raise IntegrityError(f"{path}: not a run configuration ({str(error).splitlines()[0]})") from None
    if digest(run) != stored.get("digest"):
        if why := other_version(stored["run"], stored.get("digest")):
            fields = "; ".join(differences(stored["run"], dump(run)))
            raise IntegrityError(f"{path}: {why} ({fields})")
        raise IntegrityError(
            f"{path}: its digest does not match its content; the file was changed after it was written"
        )
    return run


def other_version(stored: object, recorded: object) -> str:
    """What to say of a file whose content is as it was written but is not what this version makes of it; else nothing.

    `recorded` is the digest that the file gives for `stored`.
    """
    if not isinstance(stored, dict) or digest(stored) != recorded:
        return ""
    return (
        "written by another version of Equipoise, whose fields were others; go on with that version, or take another "
        "--out"
    )


def read_run(directory: Path, *, deep: bool = True) -> RunRecord:
    """Read and verify a run directory; never raises for what it finds there.

    Every file is compared with the SHA-256 in the summary; with `deep=False` only the size of weight files is, for
    callers that will not use them.
    """
    try:
        config = read_config(directory)
        if config is None:
            return RunRecord(directory=directory, config=None, status="missing", summary=None)
        if not (directory / "summary.json").exists():
            resumable = any((directory / WEIGHTS).glob("step-*/manifest.json"))
            status: Status = "interrupted" if resumable else "started"
            return RunRecord(directory=directory, config=config, status=status, summary=None)
        summary = read_sealed(directory / "summary.json")
        faults = _summary_faults(summary, config)
        faults = faults or file_faults(directory, _expected_files(directory, summary["files"], deep))
    except (IntegrityError, OSError) as error:
        return RunRecord(directory=directory, config=None, status="broken", summary=None, fault=str(error))
    if faults:
        return RunRecord(directory=directory, config=config, status="broken", summary=None, fault="; ".join(faults))
    return RunRecord(directory=directory, config=config, status=summary["status"], summary=summary)


def _summary_faults(summary: dict[str, Any], config: RunConfig) -> list[str]:
    if summary.get("schema_version") != SCHEMA_VERSION:
        return [f"summary.json: schema_version {summary.get('schema_version')!r}; expected {SCHEMA_VERSION}"]
    if summary.get("digest") != digest(config):
        return ["summary.json: belongs to another configuration"]
    fault = misfit(Summary, summary)
    if fault or summary["status"] not in ("complete", "diverged"):
        return [f"summary.json: {fault or not_accepted('status', summary['status'], 'complete or diverged')}"]
    return []


def _expected_files(directory: Path, files: dict[str, Any], deep: bool) -> dict[str, Any]:
    """The recorded files that have to be there: a checkpoint that was deleted whole is no fault of a complete run."""
    expected = {}
    for name, recorded in files.items():
        if not name.startswith(f"{WEIGHTS}/"):
            expected[name] = recorded
        elif (directory / name).parent.exists():
            expected[name] = recorded if deep else {"bytes": recorded["bytes"]}
    return expected


# ------------------------------------------------------------------------------------------------ what rows say


def count_spikes(losses: Sequence[float]) -> int | None:
    """Updates whose training loss lies over 6 standard deviations above the mean of the 128 before it.

    The rule of OLMo-core's stability monitor; the first 128 updates are not judged, and None is returned when there
    are no others.
    """
    if len(losses) <= SPIKE_WINDOW:
        return None
    window: deque[float] = deque(maxlen=SPIKE_WINDOW)
    spikes = 0
    for loss in losses:
        if len(window) == SPIKE_WINDOW and loss > statistics.fmean(window) + SPIKE_SIGMAS * statistics.stdev(window):
            spikes += 1
        window.append(loss)
    return spikes


def masked(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows without the fields that measure the machine: equal for two runs of one configuration."""
    return [{key: value for key, value in row.items() if key not in MASKED_FIELDS} for row in rows]
