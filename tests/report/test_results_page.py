"""docs/results.md and the results in README are what docs/results_page.py makes of results/ and docs/claims.toml."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The file docs/results_page.py as a module."""
    spec = importlib.util.spec_from_file_location("results_page", ROOT / "docs" / "results_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def found(script: ModuleType, results: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A made-up study as that of tinystories-cpu, alone: its first claim supported, its second refuted."""
    results["claims"][1] |= {"id": "dense-beats-moe-at-equal-total", "marks": ["post hoc"]}
    results["provenance"]["environments"] = [{"cpu": "a processor", "cores": 2, "torch": "2.13.0+cpu"}]
    results["training_flops"] = {"spent": 2.5e18}
    return {"tinystories-cpu": results}


def test_the_pages_are_what_the_results_say(script: ModuleType) -> None:
    found = script.studies()
    assert script.PAGE.read_text(encoding="utf-8") == script.page(found), "docs/results.md is out of date: make results"
    readme = script.README.read_text(encoding="utf-8")
    (marked,) = script.MARKED.finditer(readme)
    assert marked[0] == marked[1] + script.front(found) + marked[2], "README.md is out of date: make results"


def test_every_published_claim_is_there_before_anything_was_run(script: ModuleType) -> None:
    page = script.page({})
    rows = [line for line in page.splitlines() if line.endswith(" | no records yet | – |")]
    assert len(rows) == 18
    for number in ("0.0758 ± 0.0021", "0.0180 ± 0.0020", "1.5788 ± 0.0020", "1.6545 ± 0.0012", "1.5608 ± 0.0025"):
        assert number in page
    assert page.count("No records in `results/` yet: ") == 7 and "What neither paper asks" not in page
    assert script.front({}) == ""


def test_an_answer_that_no_study_gives_is_noticed(script: ModuleType) -> None:
    with pytest.raises(KeyError, match="tinystories-cpu/moe-flies"):
        script._card({}, "tinystories-cpu/moe-flies")


def test_a_study_fills_its_rows(script: ModuleType, found: dict[str, Any]) -> None:
    page = script.page(found)
    first, second = (line for line in page.splitlines() if "[tinystories-cpu](#tinystories-cpu): " in line)
    assert first.endswith(" | **supported** | yes |") and second.endswith(" | **refuted** (post hoc) | no |")
    contrast = found["tinystories-cpu"]["claims"][0]["contrasts"][0]
    shown = re.search(r"moe − dense-active = −(0\.\d{4}) \(−(0\.\d{4}) to ([−+]0\.\d{4})\), n = 3 of 3<br>", first)
    assert shown is not None and float(shown[1]) == pytest.approx(-contrast["mean"], abs=5e-5)
    assert "14.77M to 21.06M active parameters, at 426.3M tokens" in first
    assert "| [tinystories-cpu](#tinystories-cpu) | dense-active and dense-total each reach" in page
    assert "- *tinystories-cpu/dense-beats-moe-at-equal-total*: the mean gap lies outside ±ε" in page
    assert "2.50e+18 training FLOPs" in page and "interpolated" in page
    assert "(../results/tinystories-cpu/figures/gaps-best-val-loss.svg)" in page
    front = script.front(found)
    assert "(results/tinystories-cpu/figures/gaps-best-val-loss.svg)" in front
    assert "| **supported** ([but: note](docs/results.md#tinystories-cpu)) | yes |" in front
    assert "| **refuted** (post hoc) ([but: note](docs/results.md#tinystories-cpu)) | no |" in front
    assert "no records" not in front and front.count("\n| P | ") == 2 and "| G | " not in front


@pytest.mark.parametrize(
    ("agrees", "verdict", "expected"),
    [
        (["supported"], "supported", "yes"),
        (["supported"], "refuted", "no"),
        (["supported"], "equivalent", "no"),
        (["supported"], "inconclusive", "open"),
        (["refuted", "equivalent", "inconclusive"], "inconclusive", "yes"),
        (["refuted", "equivalent", "inconclusive"], "supported", "no"),
    ],
)
def test_agreement(script: ModuleType, found: dict[str, Any], agrees: list[str], verdict: str, expected: str) -> None:
    found["tinystories-cpu"]["claims"][0]["verdict"] = verdict
    card = script._card(found, "tinystories-cpu/moe-beats-dense-at-equal-active")
    assert script._agreement({"agrees": agrees}, card) == expected


def test_why_is_told_only_while_something_differs(script: ModuleType, found: dict[str, Any]) -> None:
    claim = {"agrees": ["supported"], "answers": ["tinystories-cpu/moe-beats-dense-at-equal-active"], "why": "Because."}
    assert script._reasons([claim], found) == []
    found["tinystories-cpu"]["claims"][0]["verdict"] = "inconclusive"
    (_, lines) = script._reasons([claim], found)
    assert lines.endswith("\n  - Because.\n")


def test_the_front_hides_no_answer_of_the_study_it_shows(
    script: ModuleType, found: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two locked claims of one study answer one published claim, a second study answers it too: both of the first."""
    found["lr-fairness-cpu"] = found["tinystories-cpu"]
    both = [f"tinystories-cpu/{name}" for name in ("moe-beats-dense-at-equal-active", "dense-beats-moe-at-equal-total")]
    answers = [*both, "lr-fairness-cpu/moe-beats-dense-at-equal-active"]
    assert [(name, card.verdict) for name, card in script._first(found, answers)] == [
        ("tinystories-cpu", "supported"),
        ("tinystories-cpu", "refuted"),
    ]
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "claims.toml").write_text(
        f"""[[claims]]
paper = "P"
published = "It is so: 1.5"
agrees = ["supported"]
answers = {answers}
[[studies]]
name = "tinystories-cpu"
figures = ["a-figure"]
note = "once otherwise"
""",
        encoding="utf-8",
    )
    monkeypatch.setattr(script, "ROOT", tmp_path)
    first, second = (line for line in script.front(found).splitlines() if line.startswith("| P | "))
    assert first.startswith("| P | It is so | *moe reaches a lower ") and second.startswith("| P | ″ | ")
    assert first.endswith(" | **supported** ([but: note](docs/results.md#tinystories-cpu)) | yes |")
    assert second.endswith(" | **refuted** (post hoc) ([but: note](docs/results.md#tinystories-cpu)) | no |")


def test_the_answer_is_there_while_its_verdicts_hold(script: ModuleType) -> None:
    """Where a verdict has changed, docs/claims.toml has to be written anew: until then neither page says anything."""
    found = script.studies()
    question = "**Does MoE beat dense?**"
    pages = script.page(found), script.front(found)
    assert all(question in page for page in pages), "a verdict changed: write [answer] in docs/claims.toml anew"
    (effect,) = found["tinystories-cpu"]["claims"][0]["contrasts"]
    assert f"moe − dense-active = −{-effect['mean']:.4f} (" in " ".join(pages[1].partition("| | published")[0].split())
    without = {name: results for name, results in found.items() if name != "gutenberg-cpu"}
    assert question not in script.page(without) + script.front(without)
    found["tinystories-cpu"]["claims"][0]["verdict"] = "inconclusive"
    assert question not in script.page(found) + script.front(found)
