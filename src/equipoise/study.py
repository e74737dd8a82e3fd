"""A study before it runs: the plan, and its preparation (data, matched arms, lock). Never loads torch.

Not for: solving widths (`matching`), training (`train`), starting processes (`engine`), statistics (`results`).

    <study>/lock.json                    what was declared before the first run, and dated amendments
    <study>/<arm>/<tokens>-s<seed>/      one run directory each (see `equipoise.record`)
    <study>/<arm>/trunk-s<seed>/         what several budgets share under WSD (see `equipoise.trunk`)
    <study>/logs/                        what the child processes printed
    <study>/step_time.json               seconds of one update of each arm (see `equipoise.step_time`)
    <study>/results.json, results.md, report.html
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from equipoise.accounting import count_params, tokens_per_expert
from equipoise.budgets import ArmBudget, arm_budgets, updates_of
from equipoise.config import dump
from equipoise.data.dataset import Dataset, cached
from equipoise.data.packing import check_windows, epochs
from equipoise.data.prepare import estimate, prepare
from equipoise.data.progress import Progress
from equipoise.errors import ConfigError, ResourceError
from equipoise.estimate import Rates, RunTime, affordable_curve_tokens, curve_share, makespan, run_time, with_trunk
from equipoise.lock import Lock, lock_study
from equipoise.matching import ResolvedArm, resolve_arms
from equipoise.schedule import branch_step
from equipoise.spec.data import fetch_command, requested_vocab_size
from equipoise.spec.model import describe_ffn
from equipoise.spec.recipe import Recipe
from equipoise.spec.run import RunConfig, num_steps
from equipoise.spec.study import StudySpec
from equipoise.spec.sweep import family, standing_for
from equipoise.trunk import TrunkConfig, count_updates

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
    eval_tokens: int | None = None
    """Tokens of the split that the recipe evaluates on; None before the corpus was seen."""
    selection_tokens: int | None = None
    """Tokens of the selection split, which members of a sweep are scored on too; None before the corpus was seen."""

    def epochs(self, tokens: int, seq_len: int) -> float | None:
        """Passes over the training data of a run of `tokens`; None where that is not known."""
        if self.train_tokens is None or self.train_tokens <= seq_len:
            return None
        return epochs(tokens, self.train_tokens, seq_len)


def plan(
    spec: StudySpec, facts: DataFacts, rates: Mapping[str, Rates] | None = None, num_jobs: int = 1
) -> dict[str, Any]:
    """The study before it runs, as plain JSON values: arms, budgets, cost. Writes nothing.

    `rates` were measured per arm with `num_jobs` at work; without them there is no time estimate. Raises ConfigError
    when an arm cannot be matched, or two budgets of it are one.
    """
    recipe = spec.recipe
    arms = resolve_arms(spec.arms, facts.vocab_size, recipe.seq_len)
    own = arm_budgets(spec, {name: arm.model for name, arm in arms.items()})
    updates = {name: _updates([own[name, budget].asked for budget in spec.budgets], recipe) for name in arms}
    steps = {budget: num_steps(budget, recipe) for budget in spec.budgets}
    shared = count_updates(spec.budgets, recipe)[1] > 0
    budgets = [
        {
            "budget": budget,
            "steps": steps[budget],
            "tokens": steps[budget] * recipe.batch_tokens,
            "epochs": facts.epochs(steps[budget] * recipe.batch_tokens, recipe.seq_len),
            "curve_share": curve_share(recipe, steps[budget], facts.eval_tokens),
            "affordable_curve_tokens": affordable_curve_tokens(recipe, steps[budget]),
            "branch_step": branch_step(steps[budget], recipe.batch_tokens, recipe.schedule) if shared else 0,
        }
        for budget in spec.budgets
    ]
    seen = {place: facts.epochs(one.tokens, recipe.seq_len) for place, one in own.items()}
    per_seed = [updates[name]["per_seed"] * arm.flops.training * recipe.batch_tokens for name, arm in arms.items()]
    return {
        "schema_version": SCHEMA_VERSION,
        "name": spec.name,
        "question": spec.question,
        "vocab_size": facts.vocab_size,
        "train_tokens": facts.train_tokens,
        "data_certain": facts.certain,
        "arms": [{**row, "updates": updates[row["name"]]} for row in arm_tables(spec, arms, own, seen)],
        "seeds": list(spec.seeds),
        "budgets": budgets,
        "num_runs": len(spec.arms) * len(spec.seeds) * len(spec.budgets),
        "train_flops": len(spec.seeds) * sum(per_seed),
        "disk_bytes": len(spec.seeds)
        * sum(_bytes_per_seed(arm.params.total, updates[name], len(steps)) for name, arm in arms.items()),
        "time": None if rates is None else study_time(spec, updates_of(spec, own), facts, rates, num_jobs),
        "claims": dump(spec.claims),
        "recipe": dump(recipe),
    }


def _updates(budgets: Sequence[int], recipe: Recipe) -> dict[str, int]:
    """Updates of one arm and seed: in all, of its trunk among them, and what its runs would take one by one."""
    per_seed, of_trunk = count_updates(budgets, recipe)
    return {
        "of_trunk": of_trunk,
        "per_seed": per_seed,
        "from_scratch": sum(num_steps(budget, recipe) for budget in budgets),
    }


def study_time(
    spec: StudySpec,
    steps: Mapping[str, Sequence[int]],
    facts: DataFacts,
    rates: Mapping[str, Rates],
    num_jobs: int,
) -> dict[str, Any]:
    """Estimated seconds, as plain JSON values: `study_s` with `jobs` runs at a time, and per arm `update_s`, `total_s`
    of all its runs, and the parts of that. `steps` are those of each arm's budgets (see `budgets.updates_of`); the data
    is taken to be prepared.
    """
    arms: dict[str, dict[str, float]] = {}
    lengths: list[float] = []
    for name in spec.arms:
        branches = [branch_step(num, spec.recipe.batch_tokens, spec.recipe.schedule) for num in steps[name]]
        shared = sum(step > 0 for step in branches) > 1
        selection = facts.selection_tokens if family(name) else 0  # a member of a sweep is scored there too
        each = [run_time(spec.recipe, num, facts.eval_tokens, rates[name], selection) for num in steps[name]]
        runs = (with_trunk(each, steps[name], branches) if shared else each) * len(spec.seeds)
        parts = {field.name: sum(getattr(run, field.name) for run in runs) for field in fields(RunTime)}
        arms[name] = {"update_s": rates[name].update_s, "total_s": sum(parts.values()), **parts}
        lengths += [run.total_s for run in runs]
    return {"study_s": makespan(sorted(lengths, reverse=True), num_jobs), "jobs": num_jobs, "arms": arms}


def arm_tables(
    spec: StudySpec,
    arms: Mapping[str, ResolvedArm],
    budgets: Mapping[tuple[str, int], ArmBudget],
    epochs: Mapping[tuple[str, int], float | None],
) -> list[dict[str, Any]]:
    """Every arm as `arm_table`, with its learning rate, its own budgets, and the tokens each of its experts sees.

    `budgets` are those of `arm_budgets`, `epochs` the passes over the training data at each, where known. A match on
    parameters also says what is left over when embeddings and head are not counted (`residual_nonembedding`, None for a
    match on FLOPs).
    """
    rows = []
    for arm in arms.values():
        row, trained = arm_table(arm), {budget: budgets[arm.name, budget] for budget in spec.budgets}
        row["lr"] = spec.recipe_of(arm.name).optim.lr
        row["own_budgets"] = [own for b, one in trained.items() if (own := one.table(epochs.get((arm.name, b))))]
        row["tokens_per_expert"] = {str(b): tokens_per_expert(arm.model, one.tokens) for b, one in trained.items()}
        if arm.match is not None:
            name = {"active_params": "active_nonembedding", "total_params": "total_nonembedding"}.get(arm.match.on)
            both = (arm, arms[standing_for(arm.match.to, arms)])
            counts = [getattr(one.params, name) for one in both] if name else None
            row["match"]["residual_nonembedding"] = counts[0] / counts[1] - 1 if counts else None
        rows.append(row)
    return rows


def matches_between(arms: Sequence[Mapping[str, Any]], pairs: Sequence[tuple[str, str | None]]) -> list[dict[str, Any]]:
    """For each pair of which one arm is matched to the other: what on, and the residual with and without embeddings.

    `arms` are rows of `arm_tables`; `holds_nonembedding` says whether the match would be accepted without embeddings
    too (None for a match on FLOPs). Other pairs are left out. A family of swept arms is matched as its members are, and
    what is matched to a family is matched to each of its members.
    """
    matches = {arm["name"]: arm["match"] for arm in arms}
    found = []
    for pair in pairs:
        for name, other in (pair, pair[::-1]):
            match = matches.get(standing_for(name or "", matches))
            if match and other is not None and match["to"] in (other, family(other)):
                without = match["residual_nonembedding"]
                facts = {key: match[key] for key in ("to", "on", "rtol", "residual", "residual_nonembedding")}
                holds = None if without is None else abs(without) <= match["rtol"]
                found.append({"arm": name, **facts, "holds_nonembedding": holds})
    return found


def run_bytes(num_params: int, steps: int, num_runs: int) -> int:
    """Disk that runs need at most: weights and two moments in float32 per checkpoint, and the record."""
    return num_params * 12 * CHECKPOINTS_HELD * num_runs + steps * BYTES_PER_STEP


def _bytes_per_seed(num_params: int, updates: Mapping[str, int], num_budgets: int) -> int:
    """Disk that the runs of one arm and seed need at most, and their trunk."""
    runs = run_bytes(num_params, updates["from_scratch"], num_budgets)
    return runs + (trunk_bytes(num_params, updates["of_trunk"], num_budgets) if updates["of_trunk"] else 0)


def trunk_bytes(num_params: int, steps: int, num_budgets: int) -> int:
    """Disk that a trunk needs at most: per budget the checkpoint it branches from and its best, and three more."""
    return num_params * 12 * (2 * num_budgets + 3) + steps * BYTES_PER_STEP


def arm_table(arm: ResolvedArm) -> dict[str, Any]:
    """One arm as plain JSON values: what its layers are, widths, parameters by component, FLOPs, match and residual."""
    model, ffn = arm.model, arm.model.ffn
    widths: dict[str, int] = {
        "d_model": model.d_model,
        "num_layers": model.num_layers,
        "num_heads": model.num_heads,
        "num_kv_heads": model.num_kv_heads,
    }
    if ffn.kind == "moe":
        widths |= {"num_experts": ffn.num_experts, "top_k": ffn.top_k, "d_expert": ffn.width}
        widths |= {"num_shared_experts": ffn.num_shared_experts} if ffn.num_shared_experts else {}
    else:
        widths |= {"d_ff": ffn.width}
    match = None
    if arm.match is not None:
        match = {**dump(arm.match), "quantity": arm.quantity, "reference": arm.reference, "residual": arm.residual}
    totals = ("total", "active", "total_nonembedding", "active_nonembedding")
    return {
        "name": arm.name,
        "kind": ffn.kind,
        "ffn": describe_ffn(ffn),
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
        return DataFacts(
            vocab_size=dataset.vocab_size,
            train_tokens=len(dataset.tokens("train")),
            certain=True,
            eval_tokens=len(dataset.tokens(spec.recipe.eval_split)),
            selection_tokens=len(dataset.tokens("selection")),
        )
    guess = estimate(spec.corpus, spec.tokenizer)
    selection = spec.recipe.eval_split == "selection"
    return DataFacts(
        vocab_size=guess.vocab_size,
        train_tokens=guess.train_tokens,
        certain=False,
        eval_tokens=guess.selection_tokens if selection else guess.validation_tokens,
        selection_tokens=guess.selection_tokens,
    )


def prepare_study(
    spec: StudySpec,
    directory: Path,
    cache: Path,
    *,
    command: str = "",
    say: Callable[[str], None] = lambda _: None,
    watch: Callable[[Progress], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> tuple[Lock, Dataset]:
    """Prepare the corpus (once), match the arms with the vocabulary the tokenizer really has, lock the design.

    Raises ConfigError (no corpus, no match, a locked field changed), DataError, Interrupted.
    """
    if _path_is_unset(spec):
        raise ConfigError(
            f"corpus.path: not set; {spec.corpus.kind} needs a folder of text, "
            f"for example --set 'corpus.path=\"path/to/folder\"'; to get one: {fetch_command(spec.corpus.kind)}"
        )
    requested = requested_vocab_size(spec.tokenizer)
    resolve_arms(spec.arms, requested, spec.recipe.seq_len)  # a fault of the study costs no preparation
    dataset = prepare(spec.corpus, spec.tokenizer, cache, progress=say, watch=watch, should_stop=should_stop)
    check_windows(dataset, spec.recipe.seq_len)
    if dataset.vocab_size != requested:
        say(f"vocabulary: {dataset.vocab_size} reached of {requested}; arms matched anew")
    arms = resolve_arms(spec.arms, dataset.vocab_size, spec.recipe.seq_len)
    models = {name: arm.model for name, arm in arms.items()}
    said = set()
    for one in arm_budgets(spec, models).values():
        passes = epochs(one.tokens, len(dataset.tokens("train")), spec.recipe.seq_len)
        if passes > MANY_EPOCHS and one.asked not in said:
            whose = f" ({one.tokens:,} tokens of {one.arm})" if one.own else ""
            say(f"warning: budget {one.budget:,}{whose} repeats the training data {passes:.1f} times")
            said.add(one.asked)
    return lock_study(directory, spec, models, dataset, command), dataset


def check_disk(directory: Path, runs: Sequence[RunConfig], trunks: Sequence[TrunkConfig] = ()) -> None:
    """ResourceError when the disk has less than 1.2 times what `runs` and `trunks` will need at most."""
    bytes_of_runs = sum(run_bytes(count_params(run.model).total, run.num_steps, 1) for run in runs)
    bytes_of_trunks = sum(trunk_bytes(count_params(t.model).total, t.num_steps, len(t.budgets)) for t in trunks)
    need = round(SPARE * (bytes_of_runs + bytes_of_trunks))
    free = shutil.disk_usage(directory).free
    if free < need:
        raise ResourceError(f"{directory}: {free:,} bytes free; expected at least {need:,} for {len(runs)} runs")


def _path_is_unset(spec: StudySpec) -> bool:
    return getattr(spec.corpus, "path", "") is None
