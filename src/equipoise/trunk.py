"""The trunk that budgets of one arm and seed share under WSD: what it is, where budgets branch off, what is on disk.

    <study>/<arm>/trunk-s<seed>/
        trunk.json                   what it is a function of, and the budgets it was trained for
        metrics.jsonl, samples.jsonl, environment.json, checkpoints/      as in a run directory (see `equipoise.record`)

With WSD the first updates of a budget are those of every larger one, bit for bit, so they are done once. A trunk is a
way to execute runs and no part of what they are: a run says nothing of it but in `branch.json`, and where a trunk is
missing or of no use, a run is trained from its start to the same result.

Not for: training a trunk (`train`), going on from one (`branch`), choosing which has to be trained (`work`).
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from equipoise.config import check, config, differences, digest, dump, load
from equipoise.errors import ConfigError, IntegrityError
from equipoise.files import file_faults, read_json, read_sealed, seal, write_json
from equipoise.record import WEIGHTS, has_begun
from equipoise.schedule import branch_step, eval_steps, sample_steps
from equipoise.shapes import Branched, Manifest, hold
from equipoise.spec.model import ModelConfig
from equipoise.spec.recipe import Recipe
from equipoise.spec.run import RunConfig, num_steps

SCHEMA_VERSION: Final = 1
SHARED: Final = ("arm", "seed", "model", "recipe", "data", "select")
"""What the runs of a trunk have in common, that is all but the budget."""


@config
class TrunkConfig:
    """The updates that several budgets of one arm and seed have in common."""

    arm: str
    """Name of the arm."""
    seed: int
    """Seed of data order and initialisation."""
    model: ModelConfig
    """The resolved model, as in a RunConfig."""
    recipe: Recipe
    """How it is trained; its schedule is WSD."""
    data: str
    """Digest of the prepared data set."""
    budgets: tuple[int, ...]
    """The budgets that branch off, ascending: they say where it is evaluated, what it keeps, and how long it is."""
    select: bool = False
    """As in a RunConfig: of no account before the end of a run, here so that its runs are the study's."""

    def __post_init__(self) -> None:
        ascending = list(self.budgets) == sorted(set(self.budgets)) and len(self.budgets) > 0
        check(self, ("budgets", ascending and self.budgets[0] > 0, "different whole numbers, ascending, at least one"))
        check(self, ("recipe.schedule", self.num_steps > 0, "a schedule whose budgets share updates"))

    @property
    def folder(self) -> str:
        """Path inside the study directory: `<arm>/trunk-s<seed>`."""
        return f"{self.arm}/{trunk_name(self.seed)}"

    @property
    def num_steps(self) -> int:
        """Its updates: up to where the largest budget branches off."""
        return max(branched_at(run) for run in self.runs)

    @property
    def runs(self) -> tuple[RunConfig, ...]:
        """The runs that branch off, by ascending budget."""
        shared = {name: getattr(self, name) for name in SHARED}
        return tuple(RunConfig(budget=budget, **shared) for budget in self.budgets)

    @property
    def evals(self) -> frozenset[int]:
        """Steps with an evaluation: those of every budget up to where it branches off."""
        return frozenset(s for run in self.runs for s in eval_steps(run.num_steps, run.recipe) if s <= branched_at(run))

    @property
    def samples(self) -> frozenset[int]:
        """Steps at which samples are written, likewise."""
        return frozenset(
            s for run in self.runs for s in sample_steps(run.num_steps, run.recipe) if s <= branched_at(run)
        )


def trunk_name(seed: int) -> str:
    """Folder of a trunk beside the runs of its arm."""
    return f"trunk-s{seed}"


def branched_at(run: RunConfig) -> int:
    """Updates after which `run` branches off a trunk; 0 = it shares none."""
    return branch_step(run.num_steps, run.recipe.batch_tokens, run.recipe.schedule)


def identity(of: RunConfig | TrunkConfig) -> str:
    """Digest of what a trunk and its runs have in common: everything but the budgets."""
    return digest({name: getattr(of, name) for name in SHARED})


def trunks_of(runs: Iterable[RunConfig]) -> tuple[TrunkConfig, ...]:
    """The trunks of some runs, in their order: one where two or more budgets of an arm and seed share updates."""
    groups: dict[str, list[RunConfig]] = {}
    for run in runs:
        if branched_at(run):
            groups.setdefault(identity(run), []).append(run)
    return tuple(
        TrunkConfig(
            budgets=tuple(sorted(run.budget for run in group)),
            **{name: getattr(group[0], name) for name in SHARED},
        )
        for group in groups.values()
        if len(group) > 1
    )


def count_updates(budgets: Sequence[int], recipe: Recipe) -> tuple[int, int]:
    """Updates that one arm and seed take in all, and those of the trunk among them (0 = no trunk).

    >>> from equipoise.spec.recipe import WSD, Optim
    >>> recipe = Recipe(seq_len=1, batch_tokens=8, optim=Optim(lr=1.0), schedule=WSD(warmup_tokens=8, decay_frac=0.2))
    >>> count_updates([800, 1600, 3200, 6400], recipe)  # 640 + 20 + 40 + 80 + 160, instead of 1,500
    (940, 640)
    """
    steps = [num_steps(budget, recipe) for budget in budgets]
    branches = [branch_step(n, recipe.batch_tokens, recipe.schedule) for n in steps]
    if sum(step > 0 for step in branches) < 2:
        return sum(steps), 0
    return max(branches) + sum(steps) - sum(branches), max(branches)


def spent_flops(summaries: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """What the runs with these summaries cost: each as if trained alone, and really, a shared trunk counted once.

    Keys `alone`, `spent` (training FLOPs) and `trunks` (trunks that runs branched from). What was done twice because
    something was lost is not known to a summary, and not counted.
    """
    alone = shared = 0
    trunks: dict[tuple[str, int], int] = {}
    for summary in summaries:
        total, note = summary.get("train_flops") or 0, summary.get("branched_from")
        alone += total
        if note:
            flops = total // summary["steps"] * note["step"]
            shared += flops
            place = (summary["arm"], summary["seed"])
            trunks[place] = max(trunks.get(place, 0), flops)
    return {"alone": alone, "spent": alone - shared + sum(trunks.values()), "trunks": len(trunks)}


def best_step(curve: Mapping[int, float], points: Iterable[int]) -> int:
    """The first of `points` beyond step 0 with the lowest loss on the curve; 0 if it holds none of them."""
    known = [step for step in points if step > 0 and step in curve]
    return min(known, key=lambda step: (curve[step], step), default=0)


# ------------------------------------------------------------------------------------------------ on disk


def start_trunk(directory: Path, trunk: TrunkConfig) -> None:
    """Create the directory with `trunk.json`, or write the budgets of `trunk` into the one there.

    Raises IntegrityError naming the fields that differ when it belongs to another trunk.
    """
    try:
        existing = read_trunk(directory)
    except IntegrityError:  # altered: the trunk's own checkpoints say which trunk they belong to
        existing = None
    if existing is not None and identity(existing) != identity(trunk) and has_begun(directory):
        before, after = ({name: dump(getattr(one, name)) for name in SHARED} for one in (existing, trunk))
        lines = "; ".join(differences(before, after))
        raise IntegrityError(f"{directory}: holds another trunk ({lines}); delete it, or choose another --out")
    if existing != trunk:
        write_json(directory / "trunk.json", seal({"schema_version": SCHEMA_VERSION, "trunk": dump(trunk)}))


def read_trunk(directory: Path) -> TrunkConfig | None:
    """What the trunk in `directory` is, None without one; IntegrityError when `trunk.json` is altered."""
    path = directory / "trunk.json"
    if not path.exists():
        return None
    stored = read_sealed(path)
    try:
        return load(TrunkConfig, stored.get("trunk", {}))
    except ConfigError as error:
        raise IntegrityError(f"{path}: not a trunk ({str(error).splitlines()[0]})") from None


def checkpoint_steps(directory: Path) -> list[int]:
    """Steps of the checkpoints in a run or trunk directory, ascending, whether they verify or not."""
    names = (re.fullmatch(r"step-(\d+)", path.name) for path in (directory / WEIGHTS).glob("step-*"))
    return sorted(int(name[1]) for name in names if name)


def checkpoint_digest(directory: Path, step: int) -> str:
    """Digest of the weights and optimizer saved at `step`, from the manifest: equal for equal training, timings aside.

    Raises IntegrityError when the manifest is missing or altered.
    """
    path = directory / WEIGHTS / f"step-{step:08d}" / "manifest.json"
    manifest = read_sealed(path)
    hold(path, manifest, Manifest)
    files = manifest["files"]
    if not {"model.safetensors", "optim.safetensors"} <= files.keys():
        raise IntegrityError(f"{path}: weights or optimizer missing")
    return digest(
        {"step": step, **{name: files[name]["sha256"] for name in ("model.safetensors", "optim.safetensors")}}
    )


def can_branch(directory: Path, run: RunConfig) -> bool:
    """Whether the trunk has a checkpoint that verifies where `run` branches off, with all evaluations up to there."""
    step = branched_at(run)
    folder = directory / WEIGHTS / f"step-{step:08d}"
    try:
        manifest = read_sealed(folder / "manifest.json")
        hold(folder / "manifest.json", manifest, Manifest)
        faults = file_faults(folder, manifest["files"])
        evaluated = 0 if faults else read_json(folder / "state.json")["state"]["progress"]["last_eval"]
    except (IntegrityError, KeyError, TypeError):
        return False
    return not faults and bool(evaluated >= max(s for s in eval_steps(run.num_steps, run.recipe) if s <= step))


def rewind(directory: Path, step: int) -> None:
    """Delete the trunk's checkpoints from `step` on, so that training it goes on before it."""
    for found in checkpoint_steps(directory):
        if found >= step:
            shutil.rmtree(directory / WEIGHTS / f"step-{found:08d}")


def write_branch(directory: Path, note: dict[str, Any] | None) -> None:
    """Note in a run directory which checkpoint of its trunk it goes on from: `step` and its digest `checkpoint`.

    None: from no trunk.
    """
    if note is None:
        (directory / "branch.json").unlink(missing_ok=True)
    else:
        write_json(directory / "branch.json", note)


def read_branch(directory: Path) -> dict[str, Any] | None:
    """`step` and `checkpoint` (its digest) that a run branched from; None for a run from its own start.

    Raises IntegrityError when the note cannot be read.
    """
    path = directory / "branch.json"
    if not path.exists():
        return None
    note = read_json(path)
    if set(note) != {"step", "checkpoint"}:
        raise IntegrityError(f"{path}: expected step and checkpoint")
    hold(path, note, Branched)
    return note
