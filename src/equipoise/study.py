"""A study before it runs: the plan, and its preparation (data, matched arms, lock). Never loads torch.

Not for: solving widths (`matching`), training (`train`), starting processes (`engine`), statistics (`results`).

    <study>/lock.json                    what was declared before the first run, and dated amendments
    <study>/<arm>/<tokens>-s<seed>/      one run directory each (see `equipoise.record`)
    <study>/logs/                        what the child processes printed
    <study>/results.json, results.md, report.html
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from equipoise.accounting import count_params
from equipoise.config import dump
from equipoise.data.dataset import Dataset, cached
from equipoise.data.packing import check_windows, epochs
from equipoise.data.prepare import estimate, prepare
from equipoise.errors import ConfigError, ResourceError
from equipoise.lock import Lock, lock_study
from equipoise.matching import ResolvedArm, resolve_arms
from equipoise.spec.data import requested_vocab_size
from equipoise.spec.run import RunConfig, num_steps
from equipoise.spec.study import StudySpec

SCHEMA_VERSION: Final = 1
CHECKPOINTS_HELD: Final = 4
"""Checkpoints of a run that can lie on disk at once: the newest two, the best, and the one being written."""
BYTES_PER_STEP: Final = 240
"""Measured size of one row of metrics.jsonl."""
SPARE: Final = 1.2
"""Free disk wanted, as a multiple of what the runs will need."""
MANY_EPOCHS: Final = 4
"""Passes over the training data beyond which repeated data hurts visibly (arXiv 2305.16264)."""


# ------------------------------------------------------------------------------------------------ plan


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """What is known of the data when planning."""

    vocab_size: int
    """Vocabulary the arms are resolved with."""
    train_tokens: int | None
    """Tokens of the train split; None before the corpus was seen."""
    certain: bool
    """False: requested vocabulary or estimated tokens."""


def plan(
    spec: StudySpec, facts: DataFacts, step_s: Mapping[str, float] | None = None, num_jobs: int = 1
) -> dict[str, Any]:
    """The study before it runs, as plain JSON values: arms, budgets, cost. Writes nothing.

    `step_s` are measured seconds of one update per arm; without them there is no time estimate. Raises ConfigError
    when an arm cannot be matched.
    """
    recipe = spec.recipe
    arms = resolve_arms(spec.arms, facts.vocab_size, recipe.seq_len)
    steps = {budget: num_steps(budget, recipe) for budget in spec.budgets}
    budgets = [
        {
            "budget": budget,
            "steps": steps[budget],
            "tokens": steps[budget] * recipe.batch_tokens,
            "epochs": None
            if facts.train_tokens is None or facts.train_tokens <= recipe.seq_len
            else epochs(steps[budget] * recipe.batch_tokens, facts.train_tokens, recipe.seq_len),
        }
        for budget in spec.budgets
    ]
    per_arm = [
        sum(steps.values()) * len(spec.seeds) * arm.flops.training * recipe.batch_tokens for arm in arms.values()
    ]
    seconds = None
    if step_s is not None:
        seconds = sum(step_s[name] * sum(steps.values()) * len(spec.seeds) for name in spec.arms) / num_jobs
    return {
        "schema_version": SCHEMA_VERSION,
        "name": spec.name,
        "question": spec.question,
        "vocab_size": facts.vocab_size,
        "train_tokens": facts.train_tokens,
        "data_certain": facts.certain,
        "arms": [arm_table(arm) for arm in arms.values()],
        "seeds": list(spec.seeds),
        "budgets": budgets,
        "num_runs": len(spec.arms) * len(spec.seeds) * len(spec.budgets),
        "train_flops": sum(per_arm),
        "disk_bytes": sum(
            run_bytes(arm.params.total, sum(steps.values()), len(steps)) * len(spec.seeds) for arm in arms.values()
        ),
        "step_s": dict(step_s) if step_s is not None else None,
        "train_s": seconds,
        "jobs": num_jobs,
        "claims": dump(spec.claims),
        "recipe": dump(recipe),
    }


def run_bytes(num_params: int, steps: int, num_runs: int) -> int:
    """Disk that runs need at most: weights and two moments in float32 per checkpoint, and the record."""
    return num_params * 12 * CHECKPOINTS_HELD * num_runs + steps * BYTES_PER_STEP


def arm_table(arm: ResolvedArm) -> dict[str, Any]:
    """One arm as plain JSON values: widths, parameters by component, FLOPs, and the match with its residual."""
    model, ffn = arm.model, arm.model.ffn
    widths: dict[str, int] = {
        "d_model": model.d_model,
        "num_layers": model.num_layers,
        "num_heads": model.num_heads,
        "num_kv_heads": model.num_kv_heads,
    }
    if ffn.kind == "moe":
        widths |= {"num_experts": ffn.num_experts, "top_k": ffn.top_k, "d_expert": ffn.width}
    else:
        widths |= {"d_ff": ffn.width}
    match = None
    if arm.match is not None:
        match = {**dump(arm.match), "quantity": arm.quantity, "reference": arm.reference, "residual": arm.residual}
    totals = ("total", "active", "total_nonembedding", "active_nonembedding")
    return {
        "name": arm.name,
        "kind": ffn.kind,
        "widths": widths,
        "params": {name: getattr(arm.params, name) for name in totals},
        "by_component": arm.params.by_component(),
        "flops_per_token": arm.flops.training,
        "forward_flops_per_token": arm.flops.forward,
        "match": match,
    }


# ------------------------------------------------------------------------------------------------ preparation


def data_facts(spec: StudySpec, cache: Path) -> DataFacts:
    """Vocabulary and training tokens as far as they are known without writing anything.

    From the cache; else estimated from a sample; without `corpus.path`, the requested vocabulary alone. Raises
    DataError for a corpus that cannot be used.
    """
    if _path_is_unset(spec):
        return DataFacts(vocab_size=requested_vocab_size(spec.tokenizer), train_tokens=None, certain=False)
    dataset = cached(spec.corpus, spec.tokenizer, cache)
    if dataset is not None:
        return DataFacts(vocab_size=dataset.vocab_size, train_tokens=len(dataset.tokens("train")), certain=True)
    guess = estimate(spec.corpus, spec.tokenizer)
    return DataFacts(vocab_size=guess.vocab_size, train_tokens=guess.train_tokens, certain=False)


def prepare_study(
    spec: StudySpec,
    directory: Path,
    cache: Path,
    *,
    command: str = "",
    say: Callable[[str], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> tuple[Lock, Dataset]:
    """Prepare the corpus (once), match the arms with the vocabulary the tokenizer really has, lock the design.

    Raises ConfigError (no corpus, no match, a locked field changed), DataError, Interrupted.
    """
    if _path_is_unset(spec):
        raise ConfigError(
            f"corpus.path: not set; {spec.corpus.kind} needs a folder of text, "
            "for example --set 'corpus.path=\"path/to/folder\"'"
        )
    requested = requested_vocab_size(spec.tokenizer)
    resolve_arms(spec.arms, requested, spec.recipe.seq_len)  # a fault of the study costs no preparation
    dataset = prepare(spec.corpus, spec.tokenizer, cache, progress=say, should_stop=should_stop)
    check_windows(dataset, spec.recipe.seq_len)
    if dataset.vocab_size != requested:
        say(f"vocabulary: {dataset.vocab_size} reached of {requested}; arms matched anew")
    arms = resolve_arms(spec.arms, dataset.vocab_size, spec.recipe.seq_len)
    for budget in spec.budgets:
        tokens = num_steps(budget, spec.recipe) * spec.recipe.batch_tokens
        passes = epochs(tokens, len(dataset.tokens("train")), spec.recipe.seq_len)
        if passes > MANY_EPOCHS:
            say(f"warning: budget {budget:,} repeats the training data {passes:.1f} times")
    models = {name: arm.model for name, arm in arms.items()}
    return lock_study(directory, spec, models, dataset, command), dataset


def check_disk(directory: Path, runs: Sequence[RunConfig]) -> None:
    """ResourceError when the disk has less than 1.2 times what `runs` will need at most."""
    need = round(SPARE * sum(run_bytes(count_params(run.model).total, run.num_steps, 1) for run in runs))
    free = shutil.disk_usage(directory).free
    if free < need:
        raise ResourceError(f"{directory}: {free:,} bytes free; expected at least {need:,} for {len(runs)} runs")


def _path_is_unset(spec: StudySpec) -> bool:
    return getattr(spec.corpus, "path", "") is None
