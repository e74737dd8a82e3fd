"""The end of a run: its weights scored on the whole evaluation set, and the summary that makes it complete.

Not for: points of the curve (`train`), means over seeds (`results`).
"""

from __future__ import annotations

import time
from typing import Any

from equipoise.accounting import count_flops, count_params
from equipoise.checkpoint import checkpoint_path, load_checkpoint, restore_model
from equipoise.config import digest, dump
from equipoise.data.packing import EvalWindows, epochs
from equipoise.device import peak_memory_bytes
from equipoise.errors import Interrupted
from equipoise.explore import EXPLORED_TOKENS, explore_stories, token_name
from equipoise.model.transformer import build, init_std
from equipoise.record import WEIGHTS, count_spikes, finish_run, read_rows, write_explorer, write_losses
from equipoise.score import Stopped
from equipoise.session import Session
from equipoise.spec.model import ModelConfig
from equipoise.specialisation import Uses, new_uses
from equipoise.trunk import read_branch


def finish(session: Session) -> dict[str, Any]:
    """Score the final weights, and the best ones if they are others, on the full set; write and return the summary.

    Raises Interrupted when a signal comes first: nothing is lost, because the last step was saved.
    """
    run, recipe, progress, directory = session.run, session.run.recipe, session.progress, session.directory
    windows = session.windows(recipe.eval_tokens)
    began = time.perf_counter()
    try:
        uses = new_uses(*_routed_shape(run.model), session.dataset.vocab_size)
        final = best = session.score(session.model, windows, uses.add)
        if progress.best_step != progress.step:
            saved = load_checkpoint(checkpoint_path(directory / WEIGHTS, progress.best_step))
            best_model = build(run.model, run.seed, session.compute.device, session.compute.kernels)
            restore_model(best_model, saved.model)
            best = session.score(best_model, windows)
        selection = None
        if run.select:
            selection = session.score(session.model, session.windows(recipe.eval_tokens, "selection")).loss
        explored = _explored(session, uses)
    except Stopped:
        text = f"{directory}: stopped while scoring; all {progress.step} steps are saved, run again to go on"
        raise Interrupted(text, session.stop_signal()) from None
    final_score_s = time.perf_counter() - began
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
    write_explorer(directory, explored)
    summary = {
        "status": "complete",
        **_facts(session),
        "final_score_s": round(final_score_s, 3),
        "val_loss": final.loss,
        "val_bpb": final.bpb,
        "best_val_loss": best.loss,
        "best_val_bpb": best.bpb,
        "best_step": progress.best_step,
        "selection_loss": selection,
        "val_targets": windows.num_targets,
        "val_targets_total": len(session.dataset.tokens(recipe.eval_split)),
        "floor": dump(windows.floor),
        "curve_floor": dump(session.windows(recipe.curve_tokens).floor),
        "floor_reason": _floor_reason(session, windows),
        "routing": final.routing,
        "best_routing": best.routing,
        "collapsed": any(layer["collapsed"] for layer in final.routing),
        "best_collapsed": any(layer["collapsed"] for layer in best.routing),
        "message": None,
    }
    session.log(f"{directory}: complete, {recipe.eval_split} loss {final.loss:.4f} (best {best.loss:.4f})")
    return finish_run(directory, summary, {progress.best_step, progress.step})


def finish_diverged(session: Session, message: str) -> dict[str, Any]:
    """Write and return the summary of a run that diverged: what was measured until then, no loss."""
    losses = ("val_loss", "val_bpb", "best_val_loss", "best_val_bpb", "best_step", "selection_loss")
    targets = ("val_targets", "val_targets_total")
    floors = ("floor", "curve_floor", "floor_reason")
    routing = {"routing": [], "best_routing": [], "collapsed": False, "best_collapsed": False}
    nothing = dict.fromkeys((*losses, *targets, *floors, "final_score_s"))
    summary = {"status": "diverged", **_facts(session), **nothing, **routing, "message": message}
    return finish_run(session.directory, summary, {session.progress.best_step, session.progress.last_eval})


def _facts(session: Session) -> dict[str, Any]:
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
        "branched_from": read_branch(session.directory),
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
        "eval_s": round(progress.eval_s, 3),
        "sample_s": round(progress.sample_s, 3),
        "tokens_per_s": round(speed, 1) if speed else None,
        "peak_memory_bytes": peak_memory_bytes(session.compute),
        "num_spikes": count_spikes(losses),
        "resumed_elsewhere": progress.resumed_elsewhere,
        "init": {name: [list(p.shape), init_std(name, run.model)] for name, p in session.model.named_parameters()},
    }


def _explored(session: Session, uses: Uses) -> dict[str, Any]:
    """What `explorer.json` holds: some stories token by token, and what each expert is used for."""
    model, tokenizer, context = session.model, session.dataset.tokenizer(), session.run.recipe.seq_len
    if session.stopping():
        raise Stopped
    return {
        "stories": explore_stories(model, session.windows(EXPLORED_TOKENS), tokenizer, context),
        "layers": uses.tables(lambda index: token_name(tokenizer, index)),
    }


def _routed_shape(model: ModelConfig) -> tuple[int, int]:
    """Routed layers and experts in each; none of a dense model."""
    return (model.num_layers, model.ffn.num_experts) if model.ffn.kind == "moe" else (0, 0)


def _floor_reason(session: Session, windows: EvalWindows) -> str | None:
    """Why a grammar has no floor here; None when there is one, or when the corpus is no grammar."""
    recipe = session.run.recipe
    if windows.floor is not None or session.dataset.floor_log_probs(recipe.eval_split) is None:
        return None
    return f"no floor: a document is longer than recipe.seq_len = {recipe.seq_len}"
