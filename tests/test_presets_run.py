"""Every shipped study for a CPU really runs: each of its arms is trained, scored and judged, on far less text."""

from __future__ import annotations

from pathlib import Path

import pytest

from equipoise.lock import status
from equipoise.report.verdicts import cards
from equipoise.report.write import write_report
from equipoise.results import collect, write_results
from equipoise.spec.study import load_study_table, parse_study, preset_names
from equipoise.study import prepare_study
from equipoise.train import train

SHORTER = {
    "seeds": [0],
    "corpus": {"kind": "grammar", "num_documents": 120, "num_validation": 12, "num_selection": 6},
    "tokenizer": {"kind": "bpe", "vocab_size": 512},
}
"""Of every preset; one seed judges no claim, but every claim is computed and told."""


def shortened(name: str) -> dict[str, object]:
    table = {**load_study_table(name)[0], **SHORTER}
    recipe = table["recipe"] = {**table["recipe"], "curve_tokens": 256, "eval_tokens": 512, "num_evals": 2}
    recipe.pop("samples", None)
    table["budgets"] = [2 * recipe["batch_tokens"] * factor for factor in range(1, 1 + len(table["budgets"]))]
    if "warmup_tokens" in recipe.get("schedule", {}):
        recipe["schedule"] = {**recipe["schedule"], "warmup_tokens": recipe["batch_tokens"]}
    arms = {arm: dict(values) for arm, values in table["arms"].items()}
    for values in arms.values():
        if "match" in values:
            values["match"] = {**values["match"], "rtol": 0.03}  # another vocabulary than the one they are matched for
    return {**table, "arms": arms}


@pytest.mark.parametrize("name", [name for name in preset_names() if name.endswith("-cpu")])
def test_every_preset_for_a_cpu_runs_to_its_verdicts(name: str, tiny_cache: Path, tmp_path: Path) -> None:
    study = parse_study(shortened(name))
    lock, dataset = prepare_study(study, tmp_path, tiny_cache)
    for record in status(tmp_path, lock):
        assert record.locked is not None
        train(record.locked, record.directory, dataset, device="cpu")
    results = collect(tmp_path)
    assert {row["status"] for row in results["runs"]} == {"complete"}
    assert len(results["runs"]) == len(study.arms) * len(study.budgets)
    assert [card.id for card in cards(results)] == [claim.id for claim in study.claims]
    write_results(tmp_path, results)
    write_report(results, tmp_path)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert all(claim.id in page for claim in study.claims) and all(arm in page for arm in study.arms)
