"""One run: `train(run, directory, dataset)` is a pure function of its RunConfig, and can be stopped anywhere.

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
from equipoise.device import choose_compute
from equipoise.errors import DivergedError, IntegrityError, Interrupted
from equipoise.finish import finish, finish_diverged
from equipoise.record import append_row, read_run, start_run
from equipoise.schedule import learning_rate
from equipoise.score import Stopped, sample
from equipoise.session import Session, open_session, save_session
from equipoise.spec.run import RunConfig
from equipoise.step import train_step

WARM_STEPS: Final = 10
"""Updates after each start that throughput leaves out: allocators and caches settle."""

Log = Callable[[str], None]


def eval_steps(num_steps: int, num_evals: int) -> frozenset[int]:
    """Steps with an evaluation: 0, then `num_evals` evenly spaced ones of which the last is `num_steps`."""
    points = min(num_evals, num_steps)  # more would fall on the same steps
    return frozenset({0, *(round(num_steps * i / points) for i in range(1, points + 1))})


def sample_steps(num_steps: int, num_evals: int) -> frozenset[int]:
    """Evaluation steps at which samples are written: those nearest a quarter, half, three quarters, and the end."""
    points = sorted(eval_steps(num_steps, num_evals) - {0})
    return frozenset(min(points, key=lambda step: abs(step - num_steps * q / 4)) for q in (1, 2, 3, 4))


def train(
    run: RunConfig,
    directory: Path,
    dataset: Dataset,
    *,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    log: Log = lambda _: None,
    stop_signal: Callable[[], int] = lambda: 0,
) -> dict[str, Any]:
    """Train `run` in `directory`, or finish it, or find it finished; returns its summary.

    A directory that holds a complete run of the same configuration is left as it is; one that was interrupted goes on
    from its newest valid checkpoint, bit for bit as if it had never stopped. `stop_signal` is asked after every update,
    evaluation batch and sampled token; a signal number makes the run save and raise Interrupted.

    Raises DivergedError (the summary then says so, nothing non-finite is saved), IntegrityError when the directory
    belongs to another run or `dataset` is not the run's, DataError when the data holds no window.
    """
    if dataset.digest != run.data:
        raise IntegrityError(f"{dataset.directory}: data digest {dataset.digest[:12]}…, the run needs {run.data[:12]}…")
    check_windows(dataset, run.recipe.seq_len)
    found = read_run(directory)
    if found.summary is not None and found.config == run:
        if found.status == "diverged":
            raise DivergedError(f"{directory}: {found.summary['message']} (delete the directory to train it again)")
        log(f"{directory}: already complete")
        return found.summary
    if found.fault:
        log(f"{directory}: {found.fault}; doing again what is needed")
    start_run(directory, run, dataset.tokenizer().to_json())
    torch.set_num_threads(run.recipe.threads)
    compute = choose_compute(device, run.recipe.dtype, run.recipe.kernels)
    log(f"{directory}: {compute.reason}, {run.recipe.threads} thread(s)")
    session = open_session(run, directory, dataset, compute, log, stop_signal)
    (directory / "summary.json").unlink(missing_ok=True)
    try:
        _loop(session)
        return finish(session)
    except DivergedError as error:
        message = f"step {session.progress.step}: {error}"
        finish_diverged(session, message)
        raise DivergedError(f"{directory}: {message}") from None


def _loop(session: Session) -> None:
    """Updates and curve evaluations up to the last step; returns there, or raises Interrupted after saving."""
    run, progress = session.run, session.progress
    recipe, steps = run.recipe, run.num_steps
    tokens = session.dataset.tokens("train")
    windows = session.windows(recipe.curve_tokens)
    evaluated = eval_steps(steps, recipe.num_evals)
    while True:
        try:
            if progress.step in evaluated and progress.last_eval < progress.step:
                loss = _evaluate_curve(session, windows)
                session.log(f"step {progress.step}/{steps} loss {loss:.4f}")
                if progress.step:
                    save_session(session)
            if progress.step == steps:
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
    run, progress, device = session.run, session.progress, session.compute.device
    recipe = run.recipe
    started = time.perf_counter()
    inputs_BS, targets_BS = batch(tokens, recipe.seq_len, recipe.num_sequences, run.seed, progress.step)
    lr = learning_rate(progress.step, run.num_steps, recipe.batch_tokens, recipe.optim.lr, recipe.schedule)
    on_device = (torch.from_numpy(inputs_BS).to(device), torch.from_numpy(targets_BS).to(device))
    stats = train_step(session.model, session.optimizer, *on_device, run, lr, session.compute.autocast)
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


def _evaluate_curve(session: Session, windows: EvalWindows) -> float:
    """One point of the curve, with samples where they are due; rows are written only when all of it was computed."""
    run, progress = session.run, session.progress
    recipe, tokens = run.recipe, session.tokens_seen()
    result = session.score(session.model, windows)
    due = recipe.samples.prompts if progress.step in sample_steps(run.num_steps, recipe.num_evals) else ()
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
    row = {
        "kind": "eval",
        "step": progress.step,
        "tokens": tokens,
        "flops": count_flops(run.model, recipe.seq_len).training * tokens,
        "loss": result.loss,
        "bpb": result.bpb,
        "elapsed_s": round(progress.train_s, 4),
        "routing": result.routing,
    }
    append_row(session.directory / "metrics.jsonl", row)
    for prompt, text in zip(due, texts, strict=True):
        sample_row = {"step": progress.step, "tokens": tokens, "prompt": prompt, "text": text}
        append_row(session.directory / "samples.jsonl", sample_row)
    progress.last_eval = progress.step
    if progress.step and result.loss < progress.best_loss:
        progress.best_loss, progress.best_step = result.loss, progress.step
    return result.loss
