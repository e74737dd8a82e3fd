"""A run that is open: model, optimizer, progress and record, brought to the newest valid checkpoint, and saved again.

Not for: what a run does between opening and saving (`train`), or what is said of it at the end (`finish`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from equipoise.checkpoint import (
    TrainState,
    checkpoint_path,
    load_checkpoint,
    load_latest,
    optimizer_tensors,
    restore_model,
    restore_optimizer,
    save_checkpoint,
)
from equipoise.config import digest
from equipoise.data.dataset import Dataset
from equipoise.data.packing import EvalWindows, eval_windows
from equipoise.device import Compute, environment
from equipoise.errors import IntegrityError
from equipoise.files import read_json, write_json
from equipoise.model.transformer import Transformer, build
from equipoise.optim import make_adamw
from equipoise.record import WEIGHTS, cut_rows, mark_rows, rows_fault
from equipoise.score import Evaluation, evaluate
from equipoise.spec.run import RunConfig

EVAL_SEED: Final = 0
"""Seed of the choice of validation windows: a constant, so that every arm, seed and budget reads the same text."""


@dataclass
class Progress:
    """What a run remembers between updates besides weights and optimizer; saved in every checkpoint."""

    step: int = 0
    """Updates done."""
    last_eval: int = -1
    """Step of the last point of the curve."""
    best_loss: float = sys.float_info.max  # JSON has no infinity
    """Lowest loss of the curve beyond step 0."""
    best_step: int = 0
    """Where it was."""
    train_s: float = 0.0
    """Seconds spent in updates."""
    timed_s: float = 0.0
    """The same without the first updates after each start."""
    timed_tokens: int = 0
    """Tokens of those."""
    resumed_elsewhere: list[int] = field(default_factory=list)
    """Steps from which the run went on under another environment than before."""


@dataclass(kw_only=True)
class Session:
    """Everything that is open while a run trains."""

    run: RunConfig
    directory: Path
    dataset: Dataset
    compute: Compute
    model: Transformer
    optimizer: torch.optim.Optimizer
    progress: Progress
    log: Callable[[str], None]
    stop_signal: Callable[[], int]
    steps_here: int = 0
    """Updates done by this process."""

    def stopping(self) -> bool:
        """Whether a signal asked to stop."""
        return self.stop_signal() != 0

    def tokens_seen(self) -> int:
        """Training tokens so far."""
        return self.progress.step * self.run.recipe.batch_tokens

    def windows(self, max_targets: int) -> EvalWindows:
        """The evaluation windows of the recipe's split, the same for every run; 0 = all."""
        recipe = self.run.recipe
        return eval_windows(self.dataset, recipe.eval_split, recipe.seq_len, max_targets, EVAL_SEED)

    def score(self, model: Transformer, windows: EvalWindows) -> Evaluation:
        """Loss and routing of `model` on `windows`; raises `score.Stopped` when a signal came."""
        return evaluate(
            model,
            windows,
            end_of_text=self.dataset.eot_id,
            autocast=self.compute.autocast,
            should_stop=self.stopping,
        )


def open_session(
    run: RunConfig,
    directory: Path,
    dataset: Dataset,
    compute: Compute,
    log: Callable[[str], None],
    stop_signal: Callable[[], int],
) -> Session:
    """Model and optimizer at the newest valid checkpoint of the run, or at the start; the record cut to match."""
    model = build(run.model, run.seed, compute.device, compute.kernels)
    session = Session(
        run=run,
        directory=directory,
        dataset=dataset,
        compute=compute,
        model=model,
        optimizer=make_adamw(model, run.recipe.optim),
        progress=Progress(),
        log=log,
        stop_signal=stop_signal,
    )
    saved = load_latest(directory / WEIGHTS, digest(run), log, lambda state: _fault(directory, state))
    cut_rows(directory, saved.state["rows"] if saved else None)
    if saved is not None:
        restore_model(model, saved.model)
        restore_optimizer(model, session.optimizer, saved.optim)
        session.progress = Progress(**saved.state["progress"])
        log(f"{directory}: going on from step {saved.step}")
    _note_environment(session)
    return session


def save_session(session: Session) -> Path:
    """Write a checkpoint at the current step; returns its folder."""
    progress = session.progress
    train_state = TrainState(
        step=progress.step,
        run=digest(session.run),
        model=session.model.state_dict(),
        optim=optimizer_tensors(session.model, session.optimizer),
        state={"progress": asdict(progress), "rows": mark_rows(session.directory)},
    )
    return save_checkpoint(session.directory / WEIGHTS, train_state, keep=[progress.best_step])


def _fault(directory: Path, state: TrainState) -> str | None:
    """Why a whole checkpoint cannot be gone on from: its rows, or the best weights needed in the end, are gone."""
    best_step = state.state["progress"]["best_step"]
    if best_step not in (0, state.step):
        try:
            load_checkpoint(checkpoint_path(directory / WEIGHTS, best_step))
        except IntegrityError as error:
            return f"{error} (the best weights so far)"
    return rows_fault(directory, state.state["rows"])


def _note_environment(session: Session) -> None:
    """Add this process's environment to `environment.json` if it is another than the last one, and say so."""
    path = session.directory / "environment.json"
    here = environment(session.compute, session.run.recipe)
    known: list[dict[str, Any]] = []
    if session.progress.step:
        try:
            known = list(read_json(path)["environments"])
        except (IntegrityError, KeyError, TypeError):
            known = [{"compute": "unknown: environment.json was lost"}]
    if not known or known[-1] != here:
        if known:
            changed = ", ".join(name for name in here if known[-1].get(name) != here[name])  # all of them when lost
            session.log(f"warning: {session.directory}: goes on with another {changed}; not bit for bit the same run")
            session.progress.resumed_elsewhere.append(session.progress.step)
        write_json(path, {"environments": [*known, here]})
