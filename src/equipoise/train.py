"""One run: `train(run, directory, dataset)` is a pure function of its RunConfig, and can be stopped anywhere.

`train_trunk` does the updates that several budgets share; a run that finds a trunk goes on from there, bit for bit as
if it had done them itself.

Prose order: prepare → [evaluate · update]* → score the final and the best weights → summary. Every random choice is a
pure function of (seed, purpose, step), so a checkpoint holds weights, optimizer and a few numbers, nothing else.

Not for: choosing runs (`study`), starting processes (`engine`), judging results (`verdict`).

Shapes: B sequences, S tokens of a sequence.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch

from equipoise.accounting import count_flops
from equipoise.data.dataset import Dataset
from equipoise.data.packing import EvalWindows, batch, check_windows
from equipoise.device import Compute, choose_compute, keep_freed_memory, make_repeatable, put
from equipoise.errors import DivergedError, IntegrityError, Interrupted, ResourceError
from equipoise.finish import finish, finish_diverged
from equipoise.followers import check_copies, order_update
from equipoise.micro import check_processes, fitting, out_of_memory, smaller
from equipoise.parallel import ALONE, Group, Lost
from equipoise.record import append_row, read_run, start_run
from equipoise.schedule import learning_rate
from equipoise.score import Stopped, sample
from equipoise.session import Session, keep_session, note_environment, open_session, save_held, save_session
from equipoise.spec.run import RunConfig
from equipoise.specialisation import Followed
from equipoise.step import StepStats, train_step
from equipoise.trunk import TrunkConfig, start_trunk

WARM_STEPS: Final = 10
"""Updates after each start that throughput leaves out: allocators and caches settle."""

Log = Callable[[str], None]


def train(
    run: RunConfig,
    directory: Path,
    dataset: Dataset,
    *,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    log: Log = lambda _: None,
    stop_signal: Callable[[], int] = lambda: 0,
    trunk: Path | None = None,
    auto_micro_batch: bool = False,
    group: Group = ALONE,
) -> dict[str, Any]:
    """Train `run` in `directory`, or finish it, or find it finished; returns its summary.

    A directory that holds a complete run of the same configuration is left as it is; one that was interrupted goes on
    from its newest valid checkpoint, bit for bit as if it had never stopped. `stop_signal` is asked after every update,
    evaluation batch and sampled token; a signal number makes the run save and raise Interrupted. With the directory of
    a `trunk`, a run that has no checkpoint of its own goes on from where that serves it. With `auto_micro_batch` an
    update that finds no memory is done again in smaller forward passes, and so are those after it: the same batch, the
    same losses but for rounding, recorded as another environment. The leader of a `group` of processes calls this, its
    followers `followers.follow`: the same batches, the same losses but for rounding, recorded likewise.

    Raises DivergedError (the summary then says so, nothing non-finite is saved), IntegrityError when the directory
    belongs to another run or `dataset` is not the run's, DataError when the data holds no window, ResourceError when
    memory or disk is full, ConfigError when a batch cannot be shared out, Lost when a follower is gone, after saving.
    """
    _check(run, dataset, group)
    found = read_run(directory)
    if found.summary is not None and found.config == run:
        if found.status == "diverged":
            raise DivergedError(f"{directory}: {found.summary['message']} (delete the directory to train it again)")
        log(f"{directory}: already complete")
        return found.summary
    if found.fault:
        log(f"{directory}: {found.fault}; doing again what is needed")
    start_run(directory, run, dataset.tokenizer().to_json())
    compute = _compute(run, directory, device, log)
    session = open_session(run, directory, dataset, compute, log, stop_signal, trunk, auto_micro_batch, group)
    (directory / "summary.json").unlink(missing_ok=True)
    try:
        _loop(session)
        return finish(session)
    except DivergedError as error:
        message = f"step {session.progress.step}: {error}"
        save_held(session)
        finish_diverged(session, message)
        raise DivergedError(f"{directory}: {message}") from None


def train_trunk(
    trunk: TrunkConfig,
    directory: Path,
    dataset: Dataset,
    *,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    log: Log = lambda _: None,
    stop_signal: Callable[[], int] = lambda: 0,
    auto_micro_batch: bool = False,
    group: Group = ALONE,
) -> int:
    """Train a trunk in `directory` as far as its largest budget branches off; returns the step it got to.

    It goes on from its newest valid checkpoint, also when that was the end for fewer budgets. A trunk that diverges
    ends there, which is said: its runs go on from the checkpoint before and meet the same end, each in its own record.
    Signals, processes and errors are as in `train`.
    """
    _check(trunk, dataset, group)
    start_trunk(directory, trunk)
    compute = _compute(trunk, directory, device, log)
    session = open_session(trunk, directory, dataset, compute, log, stop_signal, None, auto_micro_batch, group)
    try:
        _loop(session)
    except DivergedError as error:
        save_held(session)
        log(f"{directory}: step {session.progress.step}: {error}; left to the runs that branch off before")
    return session.progress.step


def _check(run: RunConfig | TrunkConfig, dataset: Dataset, group: Group) -> None:
    check_processes(run.recipe, group.size)
    if dataset.digest != run.data:
        raise IntegrityError(f"{dataset.directory}: data digest {dataset.digest[:12]}…, the run needs {run.data[:12]}…")
    check_windows(dataset, run.recipe.seq_len)


def _compute(
    run: RunConfig | TrunkConfig, directory: Path, device: Literal["auto", "cpu", "cuda"], log: Log
) -> Compute:
    torch.set_num_threads(run.recipe.threads)
    compute = choose_compute(device, run.recipe.dtype, run.recipe.kernels)
    make_repeatable(compute)
    keep_freed_memory()
    log(f"{directory}: {compute.reason}, {run.recipe.threads} thread(s)")
    return compute


def _loop(session: Session) -> None:
    """Updates and curve evaluations up to the last step; returns there, or raises Interrupted or Lost after saving."""
    try:
        _steps(session)
    except Lost as error:  # in an update it is noticed before a weight moves
        step, path = session.progress.step, save_session(session)
        raise Lost(f"{path}: saved at step {step}, run again to go on; {error}") from None


def _steps(session: Session) -> None:
    progress, course = session.progress, session.course
    steps, resumed_at = course.num_steps, progress.step
    tokens = session.dataset.tokens("train")
    windows = session.windows(session.run.recipe.curve_tokens)
    while True:
        try:
            if progress.step in course.evals and progress.last_eval < progress.step:
                loss = _evaluate_curve(session, windows)
                session.log(f"step {progress.step}/{steps} loss {loss:.4f}")
                if progress.step:
                    keep_session(session)
            elif progress.step in course.stops and progress.step != resumed_at:
                save_session(session)
            if progress.step >= steps:
                return
            if session.stopping():
                raise Stopped
        except Stopped:
            path = save_session(session)
            text = f"{path}: saved at step {progress.step} of {steps}; run again to go on"
            raise Interrupted(text, session.stop_signal()) from None
        _update(session, tokens)


def _update(session: Session, tokens: np.ndarray) -> None:
    """One update and its row in the record."""
    run, progress, compute = session.run, session.progress, session.compute
    recipe = run.recipe
    started = time.perf_counter()
    inputs_BS, targets_BS = batch(tokens, recipe.seq_len, recipe.num_sequences, run.seed, progress.step)
    lr = learning_rate(progress.step, run.num_steps, recipe.batch_tokens, recipe.optim.lr, recipe.schedule)
    stats = _step_that_fits(session, put(inputs_BS, compute.device), put(targets_BS, compute.device), lr)
    elapsed = time.perf_counter() - started
    progress.step += 1
    session.steps_here += 1
    progress.train_s += elapsed
    if session.steps_here > WARM_STEPS:
        progress.timed_s += elapsed
        progress.timed_tokens += recipe.batch_tokens
    router = {} if stats.load_balance is None else {"load_balance": stats.load_balance, "router_z": stats.router_z}
    row = {
        "kind": "train",
        "step": progress.step,
        "tokens": session.tokens_seen(),
        "lr": lr,
        "lm_loss": stats.lm_loss,
        **router,
        "grad_norm": stats.grad_norm,
        "elapsed_s": round(progress.train_s, 4),
        "tokens_per_s": round(recipe.batch_tokens / elapsed, 1),
    }
    append_row(session.directory / "metrics.jsonl", row)


def _step_that_fits(session: Session, inputs_BS: torch.Tensor, targets_BS: torch.Tensor, lr: float) -> StepStats:
    """One update, its batch cut smaller for this and all later ones when there is no memory and that is wanted."""
    run, progress, compute, processes = session.run, session.progress, session.compute, session.group.size
    while True:
        most = progress.micro_sequences or run.recipe.sequences_per_forward
        rows = fitting(run.recipe, most, processes)
        try:
            order_update(session.group, inputs_BS, targets_BS, lr, progress.step, rows)
            return train_step(
                session.model,
                session.optimizer,
                inputs_BS,
                targets_BS,
                run,
                lr,
                compute.autocast,
                session.losses,
                step=progress.step,
                rows=rows,
                group=session.group,
            )
        except ResourceError as error:
            fewer = smaller(run.recipe, rows, processes) if session.auto_micro_batch else None
            said = f"{session.directory}: step {progress.step}: {error}"
            if fewer is None:
                raise ResourceError(f"{said}: {out_of_memory(run.model, run.recipe, rows, processes)}") from None
        if compute.device.type == "cuda":
            torch.cuda.empty_cache()
        session.log(f"warning: {said}; from here on {fewer} instead of {rows} sequences a forward pass")
        progress.micro_sequences = fewer
        note_environment(session)


def _evaluate_curve(session: Session, windows: EvalWindows) -> float:
    """One point of the curve, with samples where they are due; rows are written only when all of it was computed."""
    run, progress = session.run, session.progress
    recipe, tokens = run.recipe, session.tokens_seen()
    began = time.perf_counter()
    followed = Followed(num_experts=run.model.ffn.num_experts if run.model.ffn.kind == "moe" else 0, ids=[])
    check_copies(session.group, session.model, f"{session.directory}: step {progress.step}")
    result = session.score(session.model, windows, followed.add)
    scored = time.perf_counter()
    due = recipe.samples.prompts if progress.step in session.course.samples else ()
    tokenizer = session.dataset.tokenizer()
    texts = [
        sample(
            session.model,
            tokenizer,
            prompt,
            recipe.samples.num_tokens,
            context=recipe.seq_len,
            should_stop=session.stopping,
        )
        for prompt in due
    ]
    progress.eval_s += scored - began
    progress.sample_s += time.perf_counter() - scored
    row = {
        "kind": "eval",
        "step": progress.step,
        "tokens": tokens,
        "flops": count_flops(run.model, recipe.seq_len).training * tokens,
        "loss": result.loss,
        "bpb": result.bpb,
        "elapsed_s": round(progress.train_s, 4),
        "routing": result.routing,
        "chosen": followed.row(),
    }
    append_row(session.directory / "metrics.jsonl", row)
    for prompt, text in zip(due, texts, strict=True):
        sample_row = {"step": progress.step, "tokens": tokens, "prompt": prompt, "text": text}
        append_row(session.directory / "samples.jsonl", sample_row)
    progress.last_eval = progress.step
    if progress.step and result.loss < progress.best_loss:
        progress.best_loss, progress.best_step = result.loss, progress.step
    return result.loss
