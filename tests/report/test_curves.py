"""What the page's script is given: means and intervals against SciPy, and JSON that no text of a study can leave."""

from __future__ import annotations

import json
import statistics
from typing import Any

import pytest
from scipy import stats

from equipoise.report.curves import LIMIT, curve_data
from equipoise.report.embed import data_block, digest

LARGE, SMALL = 426_300_000, 40_500_000


def arm_of(results: dict[str, Any], budget: int, name: str) -> dict[str, Any]:
    data = curve_data(results)
    assert data is not None
    (found,) = [b for b in data["budgets"] if b["title"].startswith({LARGE: "426.3M", SMALL: "40.5M"}[budget])]
    (arm,) = [arm for arm in found["arms"] if arm["name"] == name]
    return dict(arm)


def own(results: dict[str, Any], arm: str, budget: int) -> list[list[dict[str, Any]]]:
    return [c["points"] for c in results["curves"] if (c["arm"], c["budget"]) == (arm, budget)]


def test_every_mean_has_the_t_interval_of_its_seeds(results: dict[str, Any]) -> None:
    rows = arm_of(results, LARGE, "moe")["mean"]
    points = list(zip(*own(results, "moe", LARGE), strict=True))
    assert len(rows) == len(points) == 25
    for row, same in zip(rows, points, strict=True):
        losses = [point["loss"] for point in same]
        low, high = stats.t.interval(0.95, 2, statistics.mean(losses), stats.sem(losses))
        assert row[:3] == pytest.approx(
            [same[0]["tokens"], same[0]["flops"], statistics.mean(point["seconds"] for point in same)], rel=1e-5
        )
        assert row[3:] == pytest.approx([statistics.mean(losses), low, high], rel=1e-5)


def test_a_run_that_did_not_finish_is_shown_and_is_no_part_of_the_mean(results: dict[str, Any]) -> None:
    arm = arm_of(results, SMALL, "dense-active")
    assert [(run["seed"], run["whole"]) for run in arm["seeds"]] == [(0, True), (1, False), (2, True)]
    assert arm["notes"] == "2 of 3 finished"
    zero, one, two = own(results, "dense-active", SMALL)
    assert arm["mean"][-1][3] == pytest.approx((zero[-1]["loss"] + two[-1]["loss"]) / 2, rel=1e-5)
    assert len(arm["seeds"][1]["points"]) == sum(point["loss"] is not None for point in one) < 25


def test_one_seed_has_no_interval_and_a_late_one_no_part(results: dict[str, Any]) -> None:
    for run in results["runs"]:
        run["post_hoc"] = run["seed"] != 0
    results["post_hoc"]["seeds"] = [1, 2]
    arm = arm_of(results, LARGE, "moe")
    assert arm["notes"] == "without 2 post hoc" and len(arm["seeds"]) == 3
    assert arm["mean"][-1][3:] == [pytest.approx(own(results, "moe", LARGE)[0][-1]["loss"], rel=1e-5), None, None]


def test_seconds_that_were_not_recorded_are_no_number(results: dict[str, Any]) -> None:
    for point in own(results, "moe", LARGE)[0]:
        point["seconds"] = None
    arm = arm_of(results, LARGE, "moe")
    assert arm["seeds"][0]["points"][-1][2] is None and arm["mean"][-1][2] is None and arm["mean"][-1][3] is not None


def test_arms_look_as_in_every_figure_and_long_curves_are_thinned(results: dict[str, Any]) -> None:
    looks = [arm_of(results, LARGE, name) for name in ("moe", "dense-active", "dense-total")]
    assert [(look["colour"], look["marker"]) for look in looks] == [("arm-0", "o"), ("arm-1", "s"), ("arm-2", "^")]
    for curve in results["curves"]:
        first, last = curve["points"][0], curve["points"][-1]
        curve["points"] = [first, *({**last, "step": step} for step in range(1, 3001))]
    arm = arm_of(results, LARGE, "moe")
    assert len(arm["mean"]) == len(arm["seeds"][0]["points"]) == LIMIT


def test_nothing_evaluated_is_nothing_to_draw(results: dict[str, Any]) -> None:
    assert curve_data({**results, "curves": []}) is None


def test_no_text_leaves_its_block(hostile: dict[str, Any]) -> None:
    """Oracle: an HTML parser ends a script at `</script`, and changes its state at `<!--`; JavaScript at U+2028."""
    texts = [
        "</script><script>alert(1)</script>",
        "<!--",
        "]]>",
        "&lt;",
        "\u2028",
        "\u202e",
        "\ud800",
        '"\\',
        "{{7*7}}",
    ]
    block = str(data_block({"texts": texts, "</script>": 1.5, "curves": curve_data(hostile)}, "x"))
    inner = block.removeprefix('<script type="application/json" id="x">').removesuffix("</script>")
    assert inner.isascii() and not set("<>&") & set(inner)
    read = json.loads(inner)
    assert read["texts"][:4] == texts[:4] and read["texts"][4:7] == ["\\u2028", "\\u202e", "\\ud800"]
    assert read["texts"][7:] == texts[7:] and read["</script>"] == 1.5
    assert [arm["name"] for arm in read["curves"]["budgets"][0]["arms"]][:2] == ["$x_$", "_base"]


def test_a_number_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="Out of range float values are not JSON compliant"):
        data_block({"loss": float("nan")}, "x")


def test_a_digest_is_written_as_a_policy_names_it() -> None:
    """The value that `printf 'x' | openssl dgst -sha256 -binary | base64` prints."""
    assert digest("x") == "'sha256-LXEWQrcmsEQBYnyp+6wy9chTD7GQPMTbAiWHF5IaSIE='"
