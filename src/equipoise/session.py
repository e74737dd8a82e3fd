"""A run that is open: model, optimizer, progress and record, brought to the newest valid checkpoint, and saved again.

Not for: what a run does between opening and saving (`train`), or what is said of it at the end (`finish`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from equipoise.branch import branch
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
from equipoise.compiled import choose_losses
from equipoise.config import digest, load
from equipoise.data.corpora.source import Split
from equipoise.data.dataset import Dataset
from equipoise.data.packing import EvalWindows, eval_windows
from equipoise.device import Compute, environment
from equipoise.errors import ConfigError, DivergedError, IntegrityError
from equipoise.faults import not_accepted
from equipoise.files import read_json, write_json
from equipoise.followers import give_weights, open_followers, score_together
from equipoise.model.transformer import Transformer, build
from equipoise.nonfinite import is_finite
from equipoise.optim import AdamW, make_adamw
from equipoise.parallel import ALONE, Group
from equipoise.record import WEIGHTS, cut_rows, mark_rows, read_rows, rows_fault
from equipoise.schedule import eval_steps, sample_steps
from equipoise.score import Evaluation, Watch, evaluate, watch_nothing
from equipoise.shapes import Environments, SessionState, hold
from equipoise.spec.recipe import Recipe
from equipoise.spec.run import RunConfig
from equipoise.step import Losses
from equipoise.trunk import TrunkConfig, best_step, branched_at, identity, read_branch, write_branch

EVAL_SEED: Final = 0
"""Seed of the choice of validation windows: a constant, so that every arm, seed and budget reads the same text."""
SAVE_S: Final = 10.0
"""Seconds between checkpoints at points of the curve: what a kill may cost beyond the way to the next point."""


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
    eval_s: float = 0.0
    """Seconds spent in the points of the curve, samples left out."""
    sample_s: float = 0.0
    """Seconds spent in samples."""
    timed_s: float = 0.0
    """The same without the first updates after each start."""
    timed_tokens: int = 0
    """Tokens of those."""
    micro_sequences: int = 0
    """Sequences of a forward pass since memory ran out; 0 = as many as the recipe says."""
    resumed_elsewhere: list[int] = field(default_factory=list)
    """Steps from which the run went on under another environment than before."""


@dataclass(frozen=True, kw_only=True)
class Course:
    """At which steps a session ends, measures, and keeps what others will go on from."""

    identity: str
    """Digest its checkpoints carry."""
    num_steps: int
    """Where it ends."""
    evals: frozenset[int]
    """Points of the curve."""
    samples: frozenset[int]
    """Points at which texts are written."""
    branches: tuple[RunConfig, ...] = ()
    """Runs that branch off a trunk."""

    @property
    def stops(self) -> frozenset[int]:
        """Steps whose checkpoint is kept for a run to branch off."""
        return frozenset(branched_at(run) for run in self.branches)


def course_of(run: RunConfig | TrunkConfig) -> Course:
    """The course of a run trained on its own, or of a trunk."""
    if isinstance(run, TrunkConfig):
        return Course(
            identity=identity(run),
            num_steps=run.num_steps,
            evals=run.evals,
            samples=run.samples,
            branches=run.runs,
        )
    return Course(
        identity=digest(run),
        num_steps=run.num_steps,
        evals=eval_steps(run.num_steps, run.recipe),
        samples=sample_steps(run.num_steps, run.recipe),
    )


@dataclass(kw_only=True)
class Session:
    """Everything that is open while a run, or a trunk, trains."""

    run: RunConfig
    """What is trained; of a trunk the run of its largest budget, whose first updates are the trunk."""
    course: Course
    directory: Path
    dataset: Dataset
    compute: Compute
    model: Transformer
    losses: Losses
    """What computes the losses of an update."""
    optimizer: AdamW
    progress: Progress
    log: Callable[[str], None]
    stop_signal: Callable[[], int]
    auto_micro_batch: bool = False
    """Whether a batch that finds no memory is cut into smaller pieces."""
    group: Group = ALONE
    """The processes at it, which this one leads."""
    steps_here: int = 0
    """Updates done by this process."""
    saved_at: float = field(default_factory=time.monotonic)
    """When it was opened or last saved."""
    held: dict[int, TrainState] = field(default_factory=dict)
    """States at points of the curve since then that may still be needed, by step; saved with the next checkpoint."""
    environments: list[dict[str, Any]] = field(default_factory=list)
    """What the run was made with so far, this process last; `environment.json` says the same."""

    def stopping(self) -> bool:
        """Whether a signal asked to stop."""
        return self.stop_signal() != 0

    def tokens_seen(self) -> int:
        """Training tokens so far."""
        return self.progress.step * self.run.recipe.batch_tokens

    def windows(self, max_targets: int, split: Split | None = None) -> EvalWindows:
        """The evaluation windows of a split (None: the recipe's), the same for every run; 0 = all."""
        recipe = self.run.recipe
        return eval_windows(self.dataset, split or recipe.eval_split, recipe.seq_len, max_targets, EVAL_SEED)

    def score(self, model: Transformer, windows: EvalWindows, watch: Watch = watch_nothing) -> Evaluation:
        """Loss and routing of `model` on `windows`; raises `score.Stopped` when a signal came."""
        if model is not self.model:
            give_weights(self.group, model)
        evaluation = evaluate(
            model,
            windows,
            end_of_text=self.dataset.eot_id,
            autocast=self.compute.autocast,
            should_stop=self.stopping,
            watch=watch,
            scorer=partial(score_together, self.group),
            at_once=self.group.size,
        )
        if model is not self.model:
            give_weights(self.group, self.model)
        return evaluation


def open_session(
    of: RunConfig | TrunkConfig,
    directory: Path,
    dataset: Dataset,
    compute: Compute,
    log: Callable[[str], None],
    stop_signal: Callable[[], int],
    trunk: Path | None = None,
    auto_micro_batch: bool = False,
    group: Group = ALONE,
) -> Session:
    """Model and optimizer at the newest valid checkpoint, else where `trunk` has got to, else at the start.

    The record is cut to match. The followers of `group` hold the same then.
    """
    run = of.runs[-1] if isinstance(of, TrunkConfig) else of
    model = build(run.model, run.seed, compute.device, compute.kernels)
    losses, compute = choose_losses(model, run.recipe, compute, log, processes=group.size)
    session = Session(
        run=run,
        course=course_of(of),
        directory=directory,
        dataset=dataset,
        compute=compute,
        model=model,
        losses=losses,
        optimizer=make_adamw(model, run.recipe.optim),
        progress=Progress(),
        log=log,
        stop_signal=stop_signal,
        auto_micro_batch=auto_micro_batch,
        group=group,
    )
    saved = _newest(session)
    if saved is None:
        (directory / "branch.json").unlink(missing_ok=True)
        saved = branch(run, directory, trunk, log) if trunk is not None else None
    cut_rows(directory, saved.state["rows"] if saved else None)
    if saved is not None:
        restore_model(model, saved.model)
        restore_optimizer(model, session.optimizer, saved.optim)
        session.progress = load(Progress, saved.state["progress"])
        if not checkpoint_path(directory / WEIGHTS, saved.step).exists() and saved.step in _needed(session):
            session.held[saved.step] = _copied(saved)
        if "branch" in saved.state:
            write_branch(directory, saved.state["branch"])
        log(f"{directory}: going on from step {saved.step}")
    session.environments = _environments(directory, saved)
    note_environment(session)
    open_followers(group, run, compute, model, session.optimizer)
    return session


def keep_session(session: Session) -> None:
    """Save what a point of the curve was measured on; in memory alone when the last checkpoint is younger than SAVE_S.

    The last step, and those that runs branch off, are always saved. Raises as `save_session` does, in either case.
    """
    course, step = session.course, session.progress.step
    if step == course.num_steps or step in course.stops or time.monotonic() - session.saved_at >= SAVE_S:
        save_session(session)
        return
    state, needed = _state(session), _needed(session)
    session.held = {step: held for step, held in session.held.items() if step in needed}
    session.held[step] = _copied(state)


def save_session(session: Session) -> Path:
    """Write a checkpoint at the current step, and before it those held in memory that are needed; returns its folder.

    At the end that is also the newest of them, so that a finished run has two. A checkpoint also holds what the run's
    small files say of its past, so that none of them is lost for good. Raises DivergedError, and writes nothing, when a
    number of weights or optimizer is not finite.
    """
    state, needed = _state(session), _needed(session)
    before_last = {max(session.held, default=0)} if state.step == session.course.num_steps else set()
    for step in sorted(session.held.keys() & (needed | before_last) - {state.step}):
        save_checkpoint(session.directory / WEIGHTS, session.held[step], keep=needed)
    path = save_checkpoint(session.directory / WEIGHTS, state, keep=needed)
    session.held, session.saved_at = {}, time.monotonic()
    return path


def save_held(session: Session) -> None:
    """Write what is only held in memory: nothing newer will be saved."""
    for _, state in sorted(session.held.items()):
        save_checkpoint(session.directory / WEIGHTS, state, keep=_needed(session))
    session.held = {}


def _state(session: Session) -> TrainState:
    """What a checkpoint of the current step holds, tensors as they are."""
    progress = session.progress
    state = TrainState(
        step=progress.step,
        run=session.course.identity,
        model=session.model.state_dict(),
        optim=optimizer_tensors(session.model, session.optimizer),
        state={
            "progress": asdict(progress),
            "rows": mark_rows(session.directory),
            "environments": session.environments,
            "branch": read_branch(session.directory),
        },
    )
    for name, tensor in (*state.model.items(), *state.optim.items()):
        if not is_finite(tensor):
            raise DivergedError(f"{name} is not finite after the update")
    return state


def _copied(state: TrainState) -> TrainState:
    """The state with tensors of its own, in this machine's memory."""
    parts = (state.model, state.optim)
    model, optim = ({name: value.to("cpu", copy=True) for name, value in part.items()} for part in parts)
    return replace(state, model=model, optim=optim)


def _needed(session: Session) -> set[int]:
    """Steps whose checkpoints have to be there in the end, as far as is known now."""
    return {session.progress.best_step, *_kept(session)}


def _newest(session: Session) -> TrainState | None:
    """The newest checkpoint that can be gone on from."""
    directory = session.directory
    return load_latest(
        directory / WEIGHTS,
        session.course.identity,
        session.log,
        lambda state: _fault(directory, state, session.run.recipe),
    )


def _kept(session: Session) -> set[int]:
    """Steps of a trunk that runs will need: where they branch off, and their best weights up to there."""
    if not session.course.branches:
        return set()
    rows = read_rows(session.directory / "metrics.jsonl")
    curve = {row["step"]: row["loss"] for row in rows if row["kind"] == "eval"}
    best = set()
    for run in session.course.branches:
        points = eval_steps(run.num_steps, run.recipe)
        best.add(best_step(curve, (s for s in points if s <= branched_at(run))))
    return best | session.course.stops


def _fault(directory: Path, state: TrainState, recipe: Recipe) -> str | None:
    """Why a whole checkpoint cannot be gone on from: its rows, or the best weights needed in the end, are gone."""
    where = f"{checkpoint_path(directory / WEIGHTS, state.step)}/state.json"
    try:
        hold(where, state.state, SessionState)
        progress = load(Progress, state.state["progress"])
    except (IntegrityError, ConfigError) as error:
        return str(error).splitlines()[0]
    best_step = progress.best_step
    if progress.step != state.step or not -1 <= progress.last_eval <= state.step or not 0 <= best_step <= state.step:
        return f"{where}: progress is not that of step {state.step}"
    group, micro = recipe.balance_group, progress.micro_sequences
    if micro and not (group <= micro <= recipe.num_sequences and recipe.num_sequences % micro == micro % group == 0):
        return f"{where}: {not_accepted('micro_sequences', micro, 'whole groups, and passes of equal size')}"
    if best_step not in (0, state.step):
        try:
            load_checkpoint(checkpoint_path(directory / WEIGHTS, best_step))
        except IntegrityError as error:
            return f"{error} (the best weights so far)"
    return rows_fault(directory, state.state["rows"])


def _environments(directory: Path, saved: TrainState | None) -> list[dict[str, Any]]:
    """What a run that goes on from `saved` was made with before."""
    if saved is None or not saved.step:
        return []
    if saved.state.get("environments"):
        return list(saved.state["environments"])
    path = directory / "environment.json"
    try:
        stored = read_json(path)
        hold(path, stored, Environments)
        return list(stored["environments"])
    except IntegrityError:
        return [{"compute": "unknown: environment.json was lost"}]


def note_environment(session: Session) -> None:
    """Write `environment.json`, with what computes now if it is another environment than before; that is said."""
    micro, processes = session.progress.micro_sequences, session.group.size
    here = environment(session.compute, session.run.recipe)
    here |= ({"micro_sequences": micro} if micro else {}) | ({"processes": processes} if processes > 1 else {})
    known = session.environments if session.progress.step else []
    if known and known[-1] != here:
        before = known[-1]
        changed = ", ".join(name for name in here | before if before.get(name) != here.get(name))  # all when lost
        session.log(f"warning: {session.directory}: goes on with another {changed}; not bit for bit the same run")
        session.progress.resumed_elsewhere.append(session.progress.step)
    session.environments = known if known and known[-1] == here else [*known, here]
    write_json(session.directory / "environment.json", {"environments": session.environments})
