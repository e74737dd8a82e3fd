"""Nouns of the design: study, arm, match; and how a study file becomes one of them.

Not for: solving widths (`matching`), expanding into runs on disk (`study`), judging claims (`verdict`).
"""

from __future__ import annotations

import dataclasses
import errno
import re
import stat
import typing
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Final, Literal

from equipoise.config import MAX_CHARS, Table, check, config, load, read_toml, refuse_strange
from equipoise.errors import ConfigError
from equipoise.faults import as_meant, did_you_mean, not_accepted, printable, show
from equipoise.spec.claims import AnyClaim, Claim, FasterClaim, claim_faults
from equipoise.spec.data import Corpus, Tokenizer
from equipoise.spec.model import ModelConfig, Width, ffn_width
from equipoise.spec.published import Published, published_faults
from equipoise.spec.recipe import MAX_TOKENS, Recipe, decays
from equipoise.spec.run import num_steps
from equipoise.spec.sweep import expand_sweeps, families, family, standing_for, under_written_names
from equipoise.spec.tables import expand_arms, said_once

Quantity = Literal["active_params", "total_params", "flops_per_token"]

MAX_ARMS: Final = 256
"""Arms of a study, members of sweeps counted; also the number of its claims and of its budgets."""
MAX_RUNS: Final = 100_000
"""Runs of a study: with a folder each, more than file systems and readers like."""
MAX_STEPS: Final = 10**9
"""Updates of a run: 30 years at one a second."""

RESERVED_NAMES = (
    "data",
    "figures",
    "logs",
    "study.toml",
    "lock.json",
    "step_time.json",
    "results.json",
    "results.md",
    "results.csv",
    "results.tex",
    "gaps.csv",
    "report.html",
    "tensorboard",
    "wandb",
)
"""Names the study directory uses itself; an arm may not take one."""


MAX_NAME_BYTES = 200
"""File systems take 255 bytes a name; lock and temporary files add to a run's."""
DEVICE_NAMES = r"con|prn|aux|nul|com[0-9¹²³]|lpt[0-9¹²³]"
"""What Windows takes for a device, whatever ending follows (Microsoft, *Naming Files, Paths, and Namespaces*)."""


@config
class Match:
    """Solve one width of this arm so that it agrees with another arm on one quantity."""

    to: str
    """Name of the reference arm, which has no `match` of its own."""
    on: Quantity
    """The quantity that has to agree."""
    adjust: Width
    """The width that is solved; neither base nor arm sets it."""
    rtol: float = 0.01
    """Largest accepted |arm ÷ reference − 1|."""

    def __post_init__(self) -> None:
        check(self, ("rtol", 0 <= self.rtol < 1, "0 to below 1"))


@config
class OwnBudget:
    """Train this arm, at every budget of the study, on so many tokens that it agrees with another arm on `on`."""

    on: Literal["train_flops", "tokens_per_expert"]
    """What has to agree: training FLOPs, or tokens · top_k ÷ num_experts (a dense layer is one expert)."""
    to: str
    """Name of the reference arm, which has no `budget` of its own."""


@config
class Arm:
    """One side of the comparison: a model, what it is matched to, and where its training departs from the recipe."""

    model: ModelConfig
    """The model; `base.model` with the arm's own fields over it."""
    match: Match | None = None
    """How one width is solved; none = as written."""
    budget: OwnBudget | None = None
    """How its tokens at each budget of the study are found; none = the budget itself."""
    lr: float | None = None
    """Its peak learning rate; none = recipe.optim.lr. In a study file also `{ sweep = [...] }`, a family of arms."""

    def __post_init__(self) -> None:
        check(self, ("lr", self.lr is None or self.lr > 0, "above 0"))


@config
class StudySpec:
    """A study as declared: arms × seeds × budgets, one corpus, one recipe, and the claims made beforehand."""

    name: str
    """Short name, 1 to 64 characters that can name a folder; also the default folder under `runs/`."""
    question: str = ""
    """The question in one sentence, shown on top of the report."""
    seeds: tuple[int, ...]
    """Distinct seeds, 0 or more each; per seed all arms share data order and equally shaped initial tensors."""
    budgets: tuple[int, ...]
    """Distinct token budgets, at least half an update each; each is a run of its own with its own schedule."""
    corpus: Corpus
    """Where the documents come from."""
    tokenizer: Tokenizer
    """How documents become tokens."""
    recipe: Recipe
    """How every arm is trained."""
    arms: dict[str, Arm]
    """The arms by name (at least one), in the order of every table; a name can name a folder, as the study's can."""
    claims: tuple[Claim, ...] = ()
    """What is claimed before the first run."""
    alpha: float = 0.05
    """Level of every test, between 0 and 1, Holm-adjusted over the claims."""
    published: tuple[Published, ...] = ()
    """What others published about such arms: shown beside the results, never judged."""

    def __post_init__(self) -> None:
        faults = _study_faults(self.name, self.seeds, self.budgets, self.recipe, self.arms, self.claims, self.alpha)
        faults += published_faults(self.published, _named(self.arms), self.budgets)
        if faults:
            raise ValueError("\n".join(faults))

    def recipe_of(self, arm: str) -> Recipe:
        """The recipe that an arm is trained with: the study's, with the arm's own learning rate."""
        lr = self.arms[arm].lr
        if lr is None:
            return self.recipe
        return dataclasses.replace(self.recipe, optim=dataclasses.replace(self.recipe.optim, lr=lr))


def preset_names() -> list[str]:
    """Names of the shipped studies, sorted."""
    files = (resources.files("equipoise") / "presets").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def load_study_table(name_or_path: str) -> tuple[Table, str]:
    """Table and text of a preset, by name, or of a study file, by path (a file named like a preset: `./quick`).

    Raises ConfigError when it is neither, cannot be read, or is not UTF-8 or not TOML.
    """
    names = preset_names()
    if not name_or_path or "\0" in name_or_path:
        raise ConfigError(f"{show(name_or_path)}: no path; expected a study file (.toml) or one of {', '.join(names)}")
    shown = printable(name_or_path)
    try:
        if name_or_path in names:
            text = (resources.files("equipoise") / "presets" / f"{name_or_path}.toml").read_text(encoding="utf-8")
        else:
            text = _study_bytes(Path(name_or_path)).decode("utf-8-sig")  # some editors begin a file with the mark
    except FileNotFoundError:
        near = did_you_mean(name_or_path, names)
        raise ConfigError(f"{shown}: no such study file or preset; presets: {', '.join(names)}{near}") from None
    except OSError as error:
        raise ConfigError(f"{shown}: {error.strerror}; expected a study file (.toml) or a preset") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{shown}: not UTF-8 at byte {error.start}; expected a study file in UTF-8") from None
    except UnicodeEncodeError as error:  # a lone surrogate
        raise ConfigError(
            f"{shown}: no path ({error.encoding!r} codec cannot write it); expected a study file (.toml) or a preset"
        ) from None
    return read_toml(text, shown), text


def _study_bytes(path: Path) -> bytes:
    """The content of a study file; OSError for what is no file: a pipe could wait for ever, a device never end."""
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # opening a folder says what it is
        raise OSError(errno.EINVAL, "Is no regular file")
    with path.open("rb") as file:
        content = file.read(4 * MAX_CHARS + 1)  # a character has 4 bytes at most
    if len(content) > 4 * MAX_CHARS:
        raise OSError(errno.EFBIG, f"Larger than {4 * MAX_CHARS:,} bytes")
    return content


def parse_study(table: Table) -> StudySpec:
    """A study from its TOML table: arms deep-merged over `base`, adjusted widths opened, everything checked.

    Raises ConfigError with every fault found, one line each.
    """
    refuse_strange(table)
    base, arms = table.get("base", {}), table.get("arms", {})
    tables = {"base": base, "arms": arms}
    tables |= {f"arms.{name}": arm for name, arm in arms.items()} if isinstance(arms, dict) else {}
    tables |= {"base.model": base.get("model", {})} if isinstance(base, dict) else {}
    faults = [
        not_accepted(printable(path), value, "a table") for path, value in tables.items() if not isinstance(value, dict)
    ]
    if faults:
        raise ConfigError("\n".join(faults))  # without these tables nothing else can be told apart
    faults = [fault for name in arms if not name.isprintable() for fault in _name_faults("arms", name)]
    faults += _too_many(arms=arms, claims=table.get("claims"), budgets=table.get("budgets"))
    if faults:
        raise ConfigError("\n".join(faults))
    swept, faults = expand_sweeps(arms)
    if too_many := _too_many(arms=swept):
        raise ConfigError("\n".join(too_many))
    expanded, more = expand_arms(base, swept)
    faults += more
    whole = {key: value for key, value in table.items() if key != "base"} | {"arms": expanded}
    try:
        study = load(StudySpec, whole)
    except ConfigError as error:
        faults += [*str(error).split("\n"), *_faults_as_meant(whole)]
    if faults:
        raise ConfigError("\n".join(said_once(under_written_names(faults, swept.keys() - arms.keys()), base, arms)))
    return study


def _faults_as_meant(whole: Table) -> list[str]:
    """Faults that are found when misspelt fields are read as the nearest known ones, and parts by themselves.

    Some of them were said before.
    """
    meant, faults = as_meant(StudySpec, whole), []
    try:
        load(StudySpec, meant)
    except ConfigError as error:
        faults = str(error).split("\n")
    return list(dict.fromkeys([*faults, *_faults_of_parts(meant)]))


def _too_many(**parts: Any) -> list[str]:
    """A line for each part of a study with more members than checking them against each other should take time for."""
    return [
        f"{name}: {len(part):,} of them; expected at most {MAX_ARMS}"
        for name, part in parts.items()
        if isinstance(part, (dict, list)) and len(part) > MAX_ARMS
    ]


def _faults_of_parts(whole: Table) -> list[str]:
    """Faults between the parts of a study that can be read, found although another part cannot."""
    hints = typing.get_type_hints(StudySpec, include_extras=True)

    def part(annotation: Any, value: Any) -> Any:
        try:
            return load(annotation, value)
        except ConfigError:
            return None

    name, seeds, budgets, recipe, alpha = (
        part(hints[field], whole.get(field)) for field in ("name", "seeds", "budgets", "recipe", "alpha")
    )
    arms = {name: part(Arm, arm) for name, arm in whole["arms"].items()}
    listed = whole.get("claims", [])
    claims = [part(Claim, claim) for claim in listed] if isinstance(listed, list) else []
    listed = whole.get("published", [])
    published = [part(Published, value) for value in listed] if isinstance(listed, list) else []
    faults = _study_faults(name, seeds, budgets, recipe, arms, claims, alpha)
    return faults + published_faults(published, _named(arms), budgets)


def _study_faults(
    name: str | None,
    seeds: tuple[int, ...] | None,
    budgets: tuple[int, ...] | None,
    recipe: Recipe | None,
    arms: Mapping[str, Arm | None],
    claims: Sequence[AnyClaim | None],
    alpha: float | None,
) -> list[str]:
    """Faults that lie between the fields of a study; None stands for a part whose own faults were said already."""
    faults = [] if name is None else _name_faults("name", name)
    for path, values, low in (("seeds", seeds, 0), ("budgets", budgets, 1)):
        if values is not None and (not values or len(set(values)) < len(values) or min(values) < low):
            faults.append(not_accepted(path, values, f"a list of different whole numbers, {low} or more"))
    for budget in budgets or ():
        if recipe and 0 < 2 * budget < recipe.batch_tokens:
            expected = f"at least half a step of recipe.batch_tokens = {recipe.batch_tokens}"
            faults.append(not_accepted("budgets", budget, expected))
        if budget > MAX_TOKENS or (recipe and budget > MAX_STEPS * recipe.batch_tokens):
            most = min(MAX_TOKENS, MAX_STEPS * recipe.batch_tokens) if recipe else MAX_TOKENS
            faults.append(not_accepted("budgets", budget, f"at most {most:,} tokens ({MAX_STEPS:,} updates)"))
    faults += _equal_budgets(budgets, recipe) if budgets and recipe else []
    num_runs = len(arms) * len(seeds or ()) * len(budgets or ())
    if num_runs > MAX_RUNS:
        faults.append(f"study: {num_runs:,} runs (arms x seeds x budgets); expected at most {MAX_RUNS:,}")
    if alpha is not None and not 0 < alpha < 1:
        faults.append(not_accepted("alpha", alpha, "a number between 0 and 1"))
    if not arms:
        return [*faults, "arms: missing; expected at least one table [arms.NAME.model]"]
    for arm_name, arm in arms.items():
        faults += _name_faults("arms", arm_name)
        if arm_name.casefold() in RESERVED_NAMES:
            faults.append(not_accepted("arms", arm_name, "a name the study directory does not use itself"))
        if [other.casefold() for other in arms].count(arm_name.casefold()) > 1:
            faults.append(
                not_accepted("arms", arm_name, "names that differ by more than case, for they become folders")
            )
        faults += [] if arm is None else _arm_faults(arm_name, arm, arms)
    named = _named(arms)
    for index, claim in enumerate(claims):
        faults += [] if claim is None else claim_faults(f"claims.{index}", claim, claims, named, budgets)
        if recipe and isinstance(claim, FasterClaim) and len(budgets or ()) > 1 and not decays(recipe.schedule):
            faults.append(
                f"claims.{index}.kind: 'faster' is not accepted over several budgets whose rate never falls; "
                "expected recipe.schedule with final_frac below 1 and, of wsd, decay_frac above 0"
            )
    return faults


def _equal_budgets(budgets: Sequence[int], recipe: Recipe) -> list[str]:
    """Budgets of as many updates would be one training under two names; what is no budget is said elsewhere."""
    taken: dict[int, int] = {}
    faults = []
    for budget in dict.fromkeys(budget for budget in budgets if 2 * budget >= recipe.batch_tokens):
        steps = num_steps(budget, recipe)
        if steps in taken:
            faults.append(
                f"budgets: {taken[steps]} and {budget} both come to {steps} update{'s' * (steps != 1)} of "
                f"recipe.batch_tokens = {recipe.batch_tokens}; expected one of them, or budgets further apart"
            )
        taken.setdefault(steps, budget)
    return faults


def _named(arms: Mapping[str, Arm | None]) -> dict[str, Arm | None]:
    """What a claim can name: the arms, and families by their first member."""
    return {**arms, **{name: arms[members[0]] for name, members in families(arms).items()}}


def _name_faults(path: str, name: str) -> list[str]:
    """Names become folders, on any system, and parts of file names: nothing that one of them refuses."""
    letter = r'[^/\\:*?"<>|\x00-\x1f\x7f\ud800-\udfff]'
    end = rf"(?![.\s]){letter}"
    if not re.fullmatch(rf"{end}(?:{letter}{{0,62}}{end})?", name):
        return [not_accepted(path, name, '1 to 64 characters that can name a folder (no / \\ : * ? " < > |)')]
    if len(name.encode()) > MAX_NAME_BYTES:
        return [not_accepted(path, name, f"at most {MAX_NAME_BYTES} bytes of UTF-8, for it becomes a folder")]
    if re.fullmatch(DEVICE_NAMES, name.partition(".")[0].strip(), re.IGNORECASE):
        return [not_accepted(path, name, "a name that Windows does not keep for a device")]
    return []


def _arm_faults(name: str, arm: Arm, arms: Mapping[str, Arm | None]) -> list[str]:
    faults = []
    where, match, adjust = f"arms.{name}", arm.match, arm.match.adjust if arm.match else ""
    field, width = ffn_width(arm.model.ffn)
    if match:
        faults += _reference_faults(f"{where}.match.to", match.to, name, arms)
        reference = arms.get(standing_for(match.to, arms))
        if not faults and reference and reference.match:
            faults.append(not_accepted(f"{where}.match.to", match.to, "an arm that is not matched itself"))
        if adjust.startswith("ffn.") and adjust != f"ffn.{field}":
            expected = f"d_model or ffn.{field}, the widths of ffn.kind = {arm.model.ffn.kind!r}"
            faults.append(not_accepted(f"{where}.match.adjust", adjust, expected))
    if arm.budget:
        wrong = _reference_faults(f"{where}.budget.to", arm.budget.to, name, arms)
        reference = arms.get(standing_for(arm.budget.to, arms))
        if not wrong and reference and reference.budget:
            wrong = [not_accepted(f"{where}.budget.to", arm.budget.to, "an arm without a budget of its own")]
        faults += wrong
    if arm.model.d_model == 0 and adjust != "d_model":
        faults.append(f"{where}.model.d_model: missing; expected a whole number, or match.adjust = 'd_model'")
    if width == 0 and not adjust.startswith("ffn."):
        faults.append(
            f"{where}.model.ffn.{field}: missing; expected a whole number or a table, or match.adjust = 'ffn.{field}'"
        )
    return faults


def _reference_faults(where: str, to: str, name: str, arms: Mapping[str, Arm | None]) -> list[str]:
    """A reference is another arm, or a family that this arm is no member of."""
    others = [other for other in (*arms, *families(arms)) if other not in (name, family(name))]
    if to in others:
        return []
    expected = f"one of {', '.join(others)}{did_you_mean(to, others)}" if others else "a second arm"
    return [not_accepted(where, to, expected)]
