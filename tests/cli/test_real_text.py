"""The shipped studies on real text, a few updates each: the way from a folder of files to a report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


def run(equipoise: Any, preset: str, folder: Path, cwd: Path, *overrides: str) -> Any:
    sets = [f'corpus.path="{folder}"', "seeds=[0]", *overrides]
    words = [word for item in sets for word in ("--set", item)]
    done = equipoise("run", preset, *words, "--json", cwd=cwd, timeout=600)  # s; a machine may do much else
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_tinystories_cpu(equipoise: Any, tinystories: Path, tmp_path: Path) -> None:
    found = run(equipoise, "tinystories-cpu", tinystories, tmp_path, "budgets=[8192]")
    assert found["vocab_size"] == 1024 and [row["status"] for row in found["runs"]] == ["complete"] * 3
    totals = {arm["name"]: arm["params"]["total"] for arm in found["arms"]}
    assert totals == {"moe": 329_280, "dense-active": 229_952, "dense-total": 328_256}
    assert found["arms"][0]["params"]["active"] == 230_976
    splits = found["data"]["splits"]
    assert splits["validation"]["documents"] == 989  # the official file, whole
    assert splits["validation"]["bytes"] <= 795_652 < splits["train"]["bytes"]
    losses = [row["val_loss"] for row in found["runs"]]
    assert all(5.0 < loss < 6.95 for loss in losses)  # below ln 1,024 after 8 updates
    assert all(claim["verdict"] == "inconclusive" for claim in found["claims"])  # one seed decides nothing
    again = equipoise("plan", "tinystories-cpu", "--set", f'corpus.path="{tinystories}"', "--json")
    assert json.loads(again.stdout)["data_certain"]


def test_gutenberg_cpu(equipoise: Any, gutenberg: Path, tmp_path: Path) -> None:
    few = tmp_path / "books"
    few.mkdir()
    for path in sorted(gutenberg.glob("*.txt"))[:6]:
        (few / path.name).write_bytes(path.read_bytes())
    found = run(equipoise, "gutenberg-cpu", few, tmp_path, "budgets=[8192]")
    assert all(row["status"] == "complete" for row in found["runs"]) and len(found["runs"]) == len(found["arms"])
    assert found["data"]["splits"]["validation"]["documents"] == 1
    assert {entry["top_k"] for entry in found["routing"]} >= {1}


@pytest.mark.parametrize("preset", ["tinystories-cpu", "gutenberg-cpu"])
def test_a_folder_without_text_is_a_data_error(equipoise: Any, preset: str, tmp_path: Path) -> None:
    done = equipoise("run", preset, "--set", f'corpus.path="{tmp_path}"', cwd=tmp_path)
    assert done.returncode == 3 and str(tmp_path) in done.stderr and "Traceback" not in done.stderr
