"""Two studies side by side: what differs is said, and gaps meet only where they may."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import ttest_ind

from equipoise.cli.compare import compare as command
from equipoise.cli.main import call
from equipoise.compare import compare
from equipoise.errors import IntegrityError
from equipoise.stats import welch_interval

FIRST = {0: -0.10, 1: -0.12, 2: -0.08}
SECOND = {0: -0.02, 1: 0.01, 2: -0.03, 3: 0.0}


def make_gap(values: dict[int, float], **over: Any) -> dict[str, Any]:
    mean = sum(values.values()) / len(values)
    gap = {
        "left": "moe", "right": "dense", "budget": 1000, "metric": "val_loss", "post_hoc": False, "n": len(values),
        "expected_n": len(values), "mean": mean, "sd": 0.02, "ci_low": mean - 0.05, "ci_high": mean + 0.03,
        "confidence": 0.95, "noise_floor": 0.01, "per_seed": {str(seed): value for seed, value in values.items()},
        "dropped": [], "collapsed": [], "validation_sampling": None,
    }  # fmt: skip
    return {**gap, **over}


def make_study(name: str, values: dict[int, float]) -> dict[str, Any]:
    recipe = {"batch_tokens": 512, "schedule": {"kind": "wsd", "decay_frac": 0.2}}
    arm = {"params": {"total": 9, "active": 6}}
    study = {"seeds": list(values), "budgets": [1000], "alpha": 0.05, "recipe": recipe, "corpus": {"kind": "grammar"},
             "tokenizer": {"kind": "byte"}, "arms": {"moe": {"lr": None}, "dense": {"lr": None}}}  # fmt: skip
    return {
        "schema_version": 1, "name": name, "question": "?", "split": "validation", "seeds": list(values),
        "budgets": [1000], "arms": [{**arm, "name": "moe", "widths": {"d_model": 16}},
                                    {**arm, "name": "dense", "widths": {"d_model": 24}}],
        "runs": [], "gaps": [make_gap(values)],
        "claims": [{"id": "c", "kind": "lower", "metric": "val_loss", "left": ["moe"], "right": "dense",
                    "verdict": "supported", "marks": ["repeated data"], "post_hoc": False, "reason": "so"}],
        "provenance": {"lock_digest": "a" * 64, "data_digest": "d" * 64, "study": study,
                       "environments": [{"torch": "2.13.0", "threads": 1}]},
    }  # fmt: skip


@pytest.fixture
def two() -> tuple[dict[str, Any], dict[str, Any]]:
    return make_study("one", FIRST), make_study("two", SECOND)


def test_the_change_is_welchs_interval(two: tuple[dict[str, Any], dict[str, Any]]) -> None:
    table = compare(*two)
    assert table["reason"] is None and table["differences"]["design"] == ["seeds: [0, 1, 2] → [0, 1, 2, 3]"]
    (row,) = table["gaps"]
    told = ttest_ind(list(SECOND.values()), list(FIRST.values()), equal_var=False).confidence_interval(0.95)
    assert row["change"] == pytest.approx({"mean": -0.01 + 0.1, "ci_low": told.low, "ci_high": told.high})
    assert [side["n"] for side in row["sides"]] == [3, 4]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [([1.0], [3.0, 4.0], (2.5, None, None)), ([1.0, 1.0], [2.0, 2.0], (1.0, 1.0, 1.0))],
)
def test_welch_without_a_spread(first: list[float], second: list[float], expected: tuple[Any, ...]) -> None:
    assert welch_interval(first, second, 0.95) == expected


def test_welch_needs_values() -> None:
    with pytest.raises(ValueError, match="a side without values"):
        welch_interval([], [1.0], 0.95)


def test_another_schedule_keeps_gaps_apart_and_is_named(two: tuple[dict[str, Any], dict[str, Any]]) -> None:
    two[1]["provenance"]["study"]["recipe"]["schedule"] = {"kind": "cosine", "decay_frac": 0.2}
    table = compare(*two)
    assert table["differences"]["schedule"] == ['recipe.schedule.kind: "wsd" → "cosine"']
    assert table["differences"]["recipe"] == []
    assert table["reason"] == "their schedules differ, and gaps are compared only within one schedule"
    assert table["gaps"][0]["change"] is None and None not in table["gaps"][0]["sides"]


def test_other_data_and_another_split_keep_gaps_apart(two: tuple[dict[str, Any], dict[str, Any]]) -> None:
    two[1]["provenance"]["data_digest"] = "e" * 64
    two[1]["split"] = "selection"
    table = compare(*two)
    assert "their data differ" in table["reason"] and "on the selection split" in table["reason"]
    assert table["differences"]["data"] == ['data.digest: "dddddddddddd" → "eeeeeeeeeeee"']


def test_recipe_arms_and_environment_are_named_field_by_field(two: tuple[dict[str, Any], dict[str, Any]]) -> None:
    two[1]["provenance"]["study"]["recipe"]["batch_tokens"] = 1024
    two[1]["arms"][1]["widths"]["d_model"] = 32
    two[1]["arms"].append({"name": "big", "widths": {}, "params": {"total": 1, "active": 1}})
    two[1]["provenance"]["environments"] = [{"torch": "2.14.0", "threads": 1}]
    found = compare(*two)["differences"]
    assert found["recipe"] == ["recipe.batch_tokens: 512 → 1024"]
    assert found["arms"] == ["arms.dense.widths.d_model: 24 → 32", "arms.big: only in the second"]
    assert found["environment"] == ["torch: 2.13.0 → 2.14.0"]


def test_a_contrast_the_other_way_round_is_turned(two: tuple[dict[str, Any], dict[str, Any]]) -> None:
    turned = {seed: -value for seed, value in SECOND.items()}
    two[1]["gaps"] = [make_gap(turned, left="dense", right="moe")]
    (row,) = compare(*two)["gaps"]
    side = row["sides"][1]
    assert (row["left"], row["right"]) == ("moe", "dense")
    assert side["mean"] == pytest.approx(-0.01) and side["ci_low"] == pytest.approx(-0.01 - 0.03)
    assert side["ci_high"] == pytest.approx(-0.01 + 0.05) and row["change"]["mean"] == pytest.approx(0.09)


def test_what_only_one_study_has_stands_alone(two: tuple[dict[str, Any], dict[str, Any]]) -> None:
    two[1]["gaps"] = [make_gap(SECOND, budget=2000), make_gap(SECOND, post_hoc=True)]
    rows = compare(*two)["gaps"]
    assert [(row["budget"], row["post_hoc"], [side is None for side in row["sides"]]) for row in rows] == [
        (1000, False, [False, True]),
        (2000, False, [True, False]),
        (1000, True, [True, False]),
    ]
    assert not any(row["change"] for row in rows)


@pytest.mark.parametrize(("field", "one", "other"), [("direction", "grows", "narrows"), ("margin", 0.0, 0.01)])
def test_another_margin_or_direction_makes_another_claim(
    two: tuple[dict[str, Any], dict[str, Any]], field: str, one: object, other: object
) -> None:
    """A budget does not: the largest of each study is its own number."""
    for study, value, budget in zip(two, (one, other), (1000, 2000), strict=True):
        study["claims"] = [{**two[0]["claims"][0], field: value, "budget": budget}]
    assert compare(*two)["claims"][0]["same_claim"] is False
    two[1]["claims"][0][field] = one
    assert compare(*two)["claims"][0]["same_claim"] is True


def test_claims_of_one_name_are_only_called_the_same_if_they_are(two: tuple[dict[str, Any], dict[str, Any]]) -> None:
    two[1]["claims"] = [{**two[1]["claims"][0], "metric": "val_bpb", "verdict": "refuted", "marks": []}]
    two[0]["claims"].append({**two[0]["claims"][0], "id": "d"})
    rows = compare(*two)["claims"]
    assert rows == [
        {"id": "c", "same_claim": False, "verdicts": ["supported", "refuted"], "marks": [["repeated data"], []]},
        {"id": "d", "same_claim": None, "verdicts": ["supported", None], "marks": [["repeated data"], None]},
    ]


def saved(folder: Path, studies: tuple[dict[str, Any], dict[str, Any]]) -> list[Path]:
    paths = [folder / f"{index}.json" for index in range(2)]
    for path, study in zip(paths, studies, strict=True):
        path.write_text(json.dumps(study), encoding="utf-8")
    return paths


def test_the_command_shows_both_sides(
    two: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two[1]["gaps"][0]["collapsed"] = ["moe"]
    two[1]["gaps"][0]["dropped"] = [4]
    command(*saved(tmp_path, two))
    shown = " ".join(capsys.readouterr().out.split())
    assert "different seeds and budgets (one → two) seeds: [0, 1, 2] → [0, 1, 2, 3]" in shown
    assert "the same: recipe, schedule, data, arms, machine and versions" in shown
    assert "−0.1000 −0.1500 to −0.0700 3 of 3 −0.0100 (collapsed) −0.0600 to +0.0200 4 of 4, without seed 4" in shown
    assert "+0.0900" in shown and "c supported (repeated data) supported (repeated data)" in shown
    two[1]["provenance"]["study"]["recipe"]["schedule"]["kind"] = "cosine"
    two[1]["name"] = "one"
    command(*saved(tmp_path, two))
    shown = " ".join(capsys.readouterr().out.split())
    assert "Not put against each other: their schedules differ" in shown and "change" not in shown
    assert "one (1): mean" in shown and "one (2): mean" in shown


def test_no_text_can_act_on_the_terminal_and_json_is_one_document(
    two: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = copy.deepcopy(two[1])
    hostile["name"] = hostile["claims"][0]["id"] = "a\x1b[2J\u202e"
    paths = saved(tmp_path, (two[0], hostile))
    command(*paths)
    assert not {"\x1b", "\u202e"} & set(capsys.readouterr().out)
    command(*paths, as_json=True)
    table = json.loads(capsys.readouterr().out)
    assert table["schema_version"] == 1 and table["studies"][1]["directory"].endswith("1.json")


def test_results_that_are_not_whole_are_refused_in_one_line(
    two: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path
) -> None:
    del two[1]["provenance"]["data_digest"]
    with pytest.raises(
        IntegrityError, match=r"1\.json: not the whole results of two studies \(KeyError: 'data_digest'\)"
    ):
        command(*saved(tmp_path, two))


def test_a_study_is_a_path(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["compare", "", "runs"]) == call(["compare", "runs", ""]) == 2
    assert capsys.readouterr().err == 'error: STUDY "": expected a path; the current folder is written .\n' * 2
