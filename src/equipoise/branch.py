"""A run that begins where its trunk has got to: the run directory becomes what training from the start would have left.

The trunk's rows that are the run's own are written, its progress over its own points of the curve, weights and
optimizer are what the run goes on from, as from a checkpoint; from there on it is a run like any other.

Not for: training a trunk (`train`), or deciding whether one is needed (`work`).
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from equipoise.checkpoint import TrainState, checkpoint_path, load_checkpoint, save_checkpoint
from equipoise.config import digest
from equipoise.errors import IntegrityError
from equipoise.files import parse_json
from equipoise.record import ROW_FILES, WEIGHTS, mark_rows, rows_fault
from equipoise.schedule import eval_steps, sample_steps
from equipoise.shapes import Row, SessionState, hold
from equipoise.spec.run import RunConfig
from equipoise.trunk import (
    best_step,
    branched_at,
    checkpoint_digest,
    checkpoint_steps,
    identity,
    write_branch,
)


@dataclass(frozen=True, kw_only=True)
class _Start:
    """A state of the trunk as the run's own: what is saved at one step."""

    state: TrainState
    """With the run's digest and progress."""
    rows: dict[str, list[bytes]]
    """Lines of each row file up to there."""


def branch(run: RunConfig, directory: Path, trunk: Path, log: Callable[[str], None]) -> TrainState | None:
    """Put `run` at the newest step of the trunk that serves it; returns its state there, None when none does.

    That state is not saved, for the trunk has it; best weights that are older are. Such a step has a checkpoint that
    verifies, is not beyond where the run branches off, and the trunk was evaluated and kept its weights at every step
    where the run needs it. Whatever is wrong with others is told in a line each.
    """
    for step in (s for s in reversed(checkpoint_steps(trunk)) if 0 < s <= branched_at(run)):
        try:
            starts = _starts(run, trunk, step)
            checkpoint = checkpoint_digest(trunk, step)
        except (IntegrityError, OSError, KeyError, TypeError, ValueError) as error:
            log(f"{trunk}: step {step} is of no use ({error})")
            continue
        for name in ROW_FILES:
            (directory / name).unlink(missing_ok=True)
        note = {"step": step, "checkpoint": checkpoint}
        write_branch(directory, note)
        if (trunk / "environment.json").exists():
            shutil.copyfile(trunk / "environment.json", directory / "environment.json")
        state = starts[-1].state
        for start in starts:
            for name, lines in start.rows.items():
                (directory / name).write_bytes(b"".join(lines))
            own = {**start.state.state, "rows": mark_rows(directory), "branch": note}
            state = replace(start.state, state=own)
            if start is not starts[-1]:
                save_checkpoint(directory / WEIGHTS, state, keep=())
        log(f"{directory}: branched from {trunk} at step {step}, checkpoint {checkpoint[:12]}…")
        return state
    log(f"{directory}: {trunk} has nothing to branch from; trained from the start")
    return None


def _starts(run: RunConfig, trunk: Path, step: int) -> tuple[_Start, ...]:
    """What is saved of the run: its best weights so far if they are older, and those of `step`."""
    start = _start(run, trunk, step)
    best = start.state.state["progress"]["best_step"]
    return (start,) if best in (0, step) else (_start(run, trunk, best), start)


def _start(run: RunConfig, trunk: Path, step: int) -> _Start:
    """The trunk's state at `step` as the run's; IntegrityError when anything the run needs is missing or altered."""
    saved = load_checkpoint(checkpoint_path(trunk / WEIGHTS, step))
    if saved.run != identity(run):
        raise IntegrityError("it belongs to another trunk")
    hold(checkpoint_path(trunk / WEIGHTS, step) / "state.json", saved.state, SessionState)
    marks = saved.state["rows"]
    if fault := rows_fault(trunk, marks):
        raise IntegrityError(fault)
    evals, samples = eval_steps(run.num_steps, run.recipe), sample_steps(run.num_steps, run.recipe)
    own = {"metrics.jsonl": evals, "samples.jsonl": samples}
    rows: dict[str, list[bytes]] = {name: [] for name in ROW_FILES}
    curve: dict[int, float] = {}
    for name in ROW_FILES:
        for line, row in _lines(trunk / name, marks[name]["bytes"]):
            if row.get("kind") == "train" or row["step"] in own[name]:
                rows[name].append(line)
            if row.get("kind") == "eval" and row["step"] in evals:
                curve[row["step"]] = row["loss"]
    needed = {"evaluation": (evals, set(curve))}
    if run.recipe.samples.prompts:
        needed["sample"] = (samples, {parse_json(line)["step"] for line in rows["samples.jsonl"]})
    for what, (wanted, found) in needed.items():
        if missing := [s for s in sorted(wanted - found) if s <= step]:
            raise IntegrityError(f"no {what} at step {missing[0]}")
    best = best_step(curve, curve)
    progress = {
        **saved.state["progress"],
        "last_eval": max(curve),
        "best_step": best,
        "best_loss": curve[best] if best else sys.float_info.max,
    }
    return _Start(state=replace(saved, run=digest(run), state={**saved.state, "progress": progress}), rows=rows)


def _lines(path: Path, num_bytes: int) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each whole line of the first `num_bytes` with the row it holds."""
    for line in path.read_bytes()[:num_bytes].splitlines(keepends=True):
        row = parse_json(line)
        hold(path, row, Row)
        yield line, row
