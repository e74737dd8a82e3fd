"""One run: `train(run, directory, dataset)` is a pure function of its RunConfig, and can be stopped anywhere.

Prose order: prepare → [evaluate · update]* → score the final and the best weights → summary. Every random choice is a
pure function of (seed, purpose, step), so a checkpoint holds weights, optimizer and a few numbers, nothing else.

Not for: choosing runs (`study`), starting processes (`engine`), judging results (`verdict`).

Shapes: B sequences, S tokens of a sequence, U validation units.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch

from equipoise.accounting import count_flops, count_params
from equipoise.checkpoint import (
    TrainState,
    checkpoint_path,
    load_checkpoint,
    load_latest,
    optimizer_tensors,
    restore_optimizer,
    save_checkpoint,
)
from equipoise.config import digest, dump
from equipoise.data.dataset import Dataset
from equipoise.data.packing import EvalWindows, batch, check_windows, epochs, eval_windows
from equipoise.device import Compute, choose_compute, environment, peak_memory_bytes
from equipoise.errors import DivergedError, IntegrityError, Interrupted
from equipoise.files import write_json
from equipoise.model.transformer import Transformer, build
from equipoise.optim import make_adamw
from equipoise.record import (
    append_row,
    count_spikes,
    cut_rows,
    finish_run,
    read_rows,
    read_run,
    start_run,
    write_losses,
)
from equipoise.schedule import learning_rate
from equipoise.score import Evaluation, Stopped, evaluate, sample
from equipoise.spec.study import RunConfig
from equipoise.step import train_step

EVAL_SEED: Final = 0
"""Seed of the choice of validation windows: a constant, so that every arm, seed and budget reads the same text."""
WARM_STEPS: Final = 10
"""Updates after each start that throughput leaves out: allocators and caches settle."""

Log = Callable[[str], None]


@dataclass
class _Progress:
    """What a run remembers between updates besides weights and optimizer; saved in every checkpoint."""

    step: int = 0
    last_eval: int = -1
    best_loss: float = sys.float_info.max  # JSON has no infinity
    best_step: int = 0
    train_s: float = 0.0
    timed_s: float = 0.0
    timed_tokens: int = 0
    steps_here: int = 0

    def saved(self) -> dict[str, Any]:
        names = ("last_eval", "best_loss", "best_step", "train_s", "timed_s", "timed_tokens")
        return {name: getattr(self, name) for name in names}


def eval_steps(num_steps: int, num_evals: int) -> frozenset[int]:
    """Steps with an evaluation: 0, then `num_evals` evenly spaced ones of which the last is `num_steps`."""
    return frozenset({0, *(round(num_steps * i / num_evals) for i in range(1, num_evals + 1))})


def sample_steps(num_steps: int, num_evals: int) -> frozenset[int]:
    """Evaluation steps at which samples are written: those nearest a quarter, half, three quarters, and the end."""
    points = sorted(eval_steps(num_steps, num_evals) - {0})
    return frozenset(min(points, key=lambda step: abs(step - num_steps * q / 4)) for q in (1, 2, 3, 4))


@dataclass(kw_only=True)
class _Session:
    """Everything that is open while a run trains."""

    run: RunConfig
    directory: Path
    dataset: Dataset
    compute: Compute
    model: Transformer
    optimizer: torch.optim.Optimizer
    progress: _Progress
    log: Log
    stop_signal: Callable[[], int]

    def stopping(self) -> bool:
        return self.stop_signal() != 0

    def tokens_seen(self) -> int:
        return self.progress.step * self.run.recipe.batch_tokens

    def score(self, model: Transformer, windows: EvalWindows) -> Evaluation:
        return evaluate(
            model,
            windows,
            end_of_text=self.dataset.eot_id,
            autocast=self.compute.autocast,
            should_stop=self.stopping,
        )


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
    if found.status in ("complete", "diverged") and found.config == run and found.summary is not None:
        log(f"{directory}: already {found.status}")
        return found.summary
    if found.fault:
        log(f"{directory}: {found.fault}; doing again what is needed")
    start_run(directory, run, dataset.tokenizer().to_json())
    (directory / "summary.json").unlink(missing_ok=True)
    torch.set_num_threads(run.recipe.threads)
    compute = choose_compute(device, run.recipe.dtype)
    write_json(directory / "environment.json", environment(compute, run.recipe))
    log(f"{directory}: {compute.reason}, {run.recipe.threads} thread(s)")

    model = build(run.model, run.seed, compute.device)
    optimizer = make_adamw(model, run.recipe.optim)
    session = _Session(
        run=run,
        directory=directory,
        dataset=dataset,
        compute=compute,
        model=model,
        optimizer=optimizer,
        progress=_Progress(),
        log=log,
        stop_signal=stop_signal,
    )
    _restore(session)
    try:
        _loop(session)
        return _finish(session)
    except DivergedError as error:
        message = f"step {session.progress.step}: {error}"
        finish_run(directory, _diverged_summary(session, message))
        raise DivergedError(f"{directory}: {message}") from None


def _loop(session: _Session) -> None:
    """Updates and curve evaluations up to the last step; returns there, or raises Interrupted after saving."""
    run, progress = session.run, session.progress
    recipe, steps = run.recipe, run.num_steps
    tokens = session.dataset.tokens("train")
    windows = eval_windows(session.dataset, recipe.eval_split, recipe.seq_len, recipe.curve_tokens, EVAL_SEED)
    evaluated = eval_steps(steps, recipe.num_evals)
    while True:
        try:
            if progress.step in evaluated and progress.last_eval < progress.step:
                loss = _evaluate_curve(session, windows)
                session.log(f"step {progress.step}/{steps} loss {loss:.4f}")
                if progress.step:
                    _save(session)
            if progress.step == steps:
                return
            if session.stopping():
                raise Stopped
        except Stopped:
            path = _save(session)
            text = f"{path}: saved at step {progress.step} of {steps}; run again to go on"
            raise Interrupted(text, session.stop_signal()) from None
        _update(session, tokens)


def _update(session: _Session, tokens: np.ndarray) -> None:
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
    progress.steps_here += 1
    progress.train_s += elapsed
    if progress.steps_here > WARM_STEPS:
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


def _evaluate_curve(session: _Session, windows: EvalWindows) -> float:
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


def _finish(session: _Session) -> dict[str, Any]:
    """Score the final weights, and the best ones if they are others, on the full set; then write the summary."""
    run, recipe, progress, directory = session.run, session.run.recipe, session.progress, session.directory
    windows = eval_windows(session.dataset, recipe.eval_split, recipe.seq_len, recipe.eval_tokens, EVAL_SEED)
    try:
        final = best = session.score(session.model, windows)
        if progress.best_step != progress.step:
            saved = load_checkpoint(checkpoint_path(directory / "checkpoints", progress.best_step))
            best_model = build(run.model, run.seed, session.compute.device)
            best_model.load_state_dict(saved.model)
            best = session.score(best_model, windows)
    except Stopped:
        text = f"{directory}: stopped while scoring; all {progress.step} steps are saved, run again to go on"
        raise Interrupted(text, session.stop_signal()) from None
    write_losses(
        directory,
        {
            "final_loss_U": final.unit_losses_U,
            "best_loss_U": best.unit_losses_U,
            "unit_tokens_U": windows.unit_tokens_U,
            "unit_bytes_U": windows.unit_bytes_U,
            "unit_document_U": windows.unit_document_U,
        },
    )
    summary = {
        "status": "complete",
        **_facts(session),
        "val_loss": final.loss,
        "val_bpb": final.bpb,
        "best_val_loss": best.loss,
        "best_val_bpb": best.bpb,
        "best_step": progress.best_step,
        "val_targets": windows.num_targets,
        "floor": dump(windows.floor),
        "routing": final.routing,
        "collapsed": any(layer["collapsed"] for layer in final.routing),
        "message": None,
    }
    session.log(f"{directory}: complete, {recipe.eval_split} loss {final.loss:.4f} (best {best.loss:.4f})")
    return finish_run(directory, summary)


def _facts(session: _Session) -> dict[str, Any]:
    """The part of a summary that a complete and a diverged run share."""
    run, progress, tokens = session.run, session.progress, session.tokens_seen()
    flops, params = count_flops(run.model, run.recipe.seq_len), count_params(run.model)
    losses = [row["lm_loss"] for row in read_rows(session.directory / "metrics.jsonl") if row["kind"] == "train"]
    speed = progress.timed_tokens / progress.timed_s if progress.timed_s > 0 else None
    return {
        "digest": digest(run),
        "arm": run.arm,
        "seed": run.seed,
        "budget": run.budget,
        "steps": progress.step,
        "tokens": tokens,
        "split": run.recipe.eval_split,
        "epochs": epochs(tokens, len(session.dataset.tokens("train")), run.recipe.seq_len),
        "flops_per_token": flops.training,
        "train_flops": flops.training * tokens,
        "params": {
            name: getattr(params, name) for name in ("total", "active", "total_nonembedding", "active_nonembedding")
        },
        "train_s": round(progress.train_s, 3),
        "tokens_per_s": round(speed, 1) if speed else None,
        "peak_memory_bytes": peak_memory_bytes(session.compute),
        "num_spikes": count_spikes(losses),
        "shapes": {name: list(parameter.shape) for name, parameter in session.model.named_parameters()},
    }


def _diverged_summary(session: _Session, message: str) -> dict[str, Any]:
    names = ("val_loss", "val_bpb", "best_val_loss", "best_val_bpb", "best_step", "val_targets", "floor")
    rest = {"routing": [], "collapsed": False, "message": message}
    return {"status": "diverged", **_facts(session), **dict.fromkeys(names), **rest}


def _restore(session: _Session) -> None:
    """Bring the session to its newest valid checkpoint, or to the start; cut the record to match."""
    saved = load_latest(session.directory / "checkpoints", digest(session.run), session.log)
    for name in ("metrics.jsonl", "samples.jsonl"):
        cut_rows(session.directory / name, saved.step if saved else -1)
    if saved is None:
        return
    session.model.load_state_dict(saved.model)
    restore_optimizer(session.model, session.optimizer, saved.optim)
    session.progress = _Progress(step=saved.step, **saved.state)
    session.log(f"{session.directory}: going on from step {saved.step}")


def _save(session: _Session) -> Path:
    progress = session.progress
    train_state = TrainState(
        step=progress.step,
        run=digest(session.run),
        model=session.model.state_dict(),
        optim=optimizer_tensors(session.model, session.optimizer),
        state=progress.saved(),
    )
    return save_checkpoint(session.directory / "checkpoints", train_state, keep=[progress.best_step])
