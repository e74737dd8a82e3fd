"""One small study with everything at once: WSD trunks, an own budget, a swept arm, claims over budgets; to the page.

The oracle of each number is the summaries of the runs and NumPy.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from equipoise.config import read_toml
from equipoise.lock import lock_study, note_finished, status
from equipoise.matching import resolve_arms
from equipoise.power import plan_seeds
from equipoise.report.markdown import render_markdown
from equipoise.report.page import render_html
from equipoise.results import collect
from equipoise.spec.study import parse_study
from equipoise.train import train, train_trunk
from equipoise.trunk import TrunkConfig, branched_at, read_branch
from equipoise.work import first_tasks, next_tasks, work_left

BUDGETS = (2048, 4096)
OWN = {("moe", 2048): 2048, ("moe", 4096): 4096, ("dense", 2048): 1536, ("dense", 4096): 2560}
"""Tokens trained: 4 and 8 updates of moe, of whose 3 experts 2 are chosen; of dense 2.67 and 5.33, rounded."""

CLAIMS = """
[[claims]]
id = "moe-lead-narrows"
kind = "trend"
left = "moe"
right = "dense"
direction = "narrows"
allow_collapsed = true
[[claims]]
id = "moe-balanced"
kind = "routing"
arm = "moe"
metric = "topk_share"
direction = "below"
threshold = 0.99
"""


@pytest.fixture(scope="module")
def study(tiny: Any, tiny_toml: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """moe at two rates, dense with the tokens per expert of moe, three seeds, two budgets; trunks, then branches."""
    text = tiny_toml.replace("budgets = [5120]", f"budgets = {list(BUDGETS)}").replace("num_evals = 4", "num_evals = 2")
    text = text.replace("optim =", 'schedule = { kind = "wsd", warmup_tokens = 512 }\noptim =')
    text = text.replace("[arms.moe.model.ffn]", "[arms.moe]\nlr = { sweep = [1e-3, 3e-2] }\n[arms.moe.model.ffn]")
    text = text.replace("[arms.dense]", '[arms.dense]\nbudget = { on = "tokens_per_expert", to = "moe" }')
    spec = parse_study(read_toml(text + CLAIMS, "tiny"))
    directory = tmp_path_factory.mktemp("together")
    arms = resolve_arms(spec.arms, tiny.dataset.vocab_size, 256)
    lock = lock_study(directory, spec, {name: arm.model for name, arm in arms.items()}, tiny.dataset)
    said: list[str] = []
    tokenizer, records = tiny.dataset.tokenizer().to_json(), status(directory, lock)
    tasks = first_tasks(directory, work_left(directory, records, said.append), tokenizer)
    summaries: dict[str, Any] = {}
    while tasks:
        task = tasks.pop(0)
        if isinstance(task.run, TrunkConfig):
            train_trunk(task.run, task.directory, tiny.dataset)
        else:
            trunk = task.directory.parent / f"trunk-s{task.run.seed}"
            summaries[task.run.folder] = train(task.run, task.directory, tiny.dataset, trunk=trunk)
        tasks += next_tasks(directory, task, tokenizer, said.append)
    note_finished(directory)
    assert not said
    return SimpleNamespace(directory=directory, lock=lock, summaries=summaries, results=collect(directory))


def losses(study: Any, name: str, budget: int) -> list[float]:
    """Per seed the final loss of an arm, or of the member of moe with the lowest mean selection loss."""
    own = OWN[name, budget]
    if name == "moe":
        chosen = {
            lr: np.mean([study.summaries[f"moe@lr={lr}/{own}-s{seed}"]["selection_loss"] for seed in range(3)])
            for lr in ("1e-3", "3e-2")
        }
        name = f"moe@lr={min(chosen, key=lambda lr: chosen[lr])}"
    return [study.summaries[f"{name}/{own}-s{seed}"]["val_loss"] for seed in range(3)]


def test_every_run_branched_from_a_trunk_of_its_own_budgets(study: Any, tiny: Any, tmp_path: Path) -> None:
    """Swept members and own budgets too; a branch of both kinds is the run trained alone."""
    assert len(study.summaries) == 18
    runs = {record.locked.folder: record.locked for record in status(study.directory, study.lock) if record.locked}
    for folder, run in runs.items():
        note = read_branch(study.directory / folder)
        assert note is not None and note["step"] == branched_at(run) > 0
    assert study.results["training_flops"]["trunks"] == 9
    for folder in ("moe@lr=3e-2/2048-s0", "dense/2560-s1"):
        alone = train(runs[folder], tmp_path / folder, tiny.dataset)
        for name in ("val_loss", "best_val_loss", "selection_loss", "train_flops"):
            assert study.summaries[folder][name] == alone[name]


def test_the_trend_is_that_of_the_chosen_members_over_the_tokens_really_trained(study: Any) -> None:
    claim = next(claim for claim in study.results["claims"] if claim["id"] == "moe-lead-narrows")
    x_B = [(math.log(OWN["moe", budget]) + math.log(OWN["dense", budget])) / 2 for budget in BUDGETS]
    leads = [np.subtract(losses(study, "dense", budget), losses(study, "moe", budget)) for budget in BUDGETS]
    slopes = [float(np.polyfit(x_B, [lead[seed] for lead in leads], 1)[0]) for seed in range(3)]
    (contrast,) = claim["contrasts"]
    assert list(contrast["per_seed"].values()) == pytest.approx(slopes)
    assert contrast["n"] == 3 and claim["p"]["sup"] is not None
    assert "own budget: dense 1,536 tokens at 2,048" in claim["marks"]
    assert sum(mark.endswith("of moe at 4,096, chosen on the selection split") for mark in claim["marks"]) == 1
    assert [(match["arm"], match["to"]) for match in claim["matches"]] == [("dense", "moe")]
    assert claim["verdict"] in ("supported", "refuted", "inconclusive") and not claim["reason"].startswith("not judged")


def test_gaps_crossings_and_routing_of_a_family(study: Any) -> None:
    gap = next(row for row in study.results["gaps"] if (row["budget"], row["metric"]) == (2048, "val_loss"))
    assert (gap["left"], gap["right"]) == ("moe", "dense")
    differences = np.subtract(losses(study, "moe", 2048), losses(study, "dense", 2048))
    assert list(gap["per_seed"].values()) == pytest.approx(list(differences))
    assert gap["validation_sampling"]["ci_low"] < gap["mean"] < gap["validation_sampling"]["ci_high"]
    crossing = next(row for row in study.results["crossovers"] if row["metric"] == "val_loss")
    ends = [math.sqrt(OWN["moe", budget] * OWN["dense", budget]) for budget in BUDGETS]
    assert all(at is None or ends[0] <= at <= ends[1] for at in crossing["per_seed"].values())
    routing = next(claim for claim in study.results["claims"] if claim["kind"] == "routing")
    assert routing["right"] is None and routing["contrasts"][0]["n"] == 3 and not routing["matches"]
    assert any("of moe, chosen on the selection split" in mark for mark in routing["marks"])
    dense = next(arm for arm in study.results["arms"] if arm["name"] == "dense")
    assert dense["tokens_per_expert"] == {"2048": 1536, "4096": 2560}
    assert plan_seeds(study.results)["contrasts"]  # a family has a row like an arm


def test_page_and_markdown_show_all_of_it(study: Any) -> None:
    said = (
        "the lead of moe over dense",
        "equal training FLOPs",
        "Arms with budgets of their own",
        "sweep charged",
        "Budget at which a gap",
        "branch from a shared trunk",
    )
    for text in (render_html(study.results), render_markdown(study.results)):
        assert [part for part in said if part not in text] == []
