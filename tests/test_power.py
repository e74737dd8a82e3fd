"""Seeds needed: published tables of power, SciPy's noncentral t, and simulated studies."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats as scipy_stats

import equipoise.results
from equipoise import stats
from equipoise.cli.power import power as command
from equipoise.errors import ConfigError
from equipoise.power import (
    LIMIT,
    fewest_seeds,
    plan_seeds,
    power_equivalence,
    power_one_sided,
    upper_sd,
)

# ------------------------------------------------------------------------------------------------ power


@pytest.mark.parametrize(("effect", "n"), [(0.2, 156), (0.5, 27), (0.8, 12), (1.0, 8)])
def test_seeds_are_those_of_the_published_tables(effect: float, n: int) -> None:
    """G*Power 3.1, paired t test, one-sided, α = 0.05, power 0.8: d = 0.2, 0.5, 0.8, 1."""
    assert fewest_seeds(lambda seeds: power_one_sided(effect, 1.0, seeds, 0.05)) == n


@pytest.mark.parametrize("n", [3, 5, 40, 3000])
@pytest.mark.parametrize("effect", [0.01, 0.3, 2.0, 50.0])
def test_power_is_scipys_noncentral_t(n: int, effect: float) -> None:
    critical = scipy_stats.t.ppf(0.99, n - 1)
    expected = scipy_stats.nct.sf(critical, n - 1, effect * math.sqrt(n)) if effect * math.sqrt(n) < 35 else 1.0
    assert power_one_sided(2 * effect, 2.0, n, 0.01) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("n", "gap", "margin"), [(3, 0.0, 3.0), (5, 0.4, 1.5), (12, -0.2, 1.0), (4, 0.5, 0.8)])
def test_both_powers_are_those_of_simulated_studies(n: int, gap: float, margin: float) -> None:
    """100,000 studies, judged by the tests that judge: a standard error of at most 0.16 %."""
    values = np.random.default_rng(n).normal(gap, 1.0, size=(100_000, n))
    mean, sd = values.mean(axis=-1), values.std(axis=-1, ddof=1)
    seen = np.mean(stats.p_within(mean, sd, n, margin) <= 0.05)
    assert power_equivalence(gap, margin, 1.0, n, 0.05) == pytest.approx(seen, abs=0.006)
    seen = np.mean(stats.p_below(mean, sd, n, margin) <= 0.05)
    assert power_one_sided(margin - gap, 1.0, n, 0.05) == pytest.approx(seen, abs=0.006)


def test_the_search_finds_the_first_of_all_n() -> None:
    for threshold in (1, 2, 3, 4, 5, 6, 7, 100, 9_999, LIMIT):
        assert fewest_seeds(lambda n, first=threshold: float(n >= first)) == max(3, threshold)  # type: ignore[misc]
    assert fewest_seeds(lambda n: float(n > LIMIT)) is None


def test_the_upper_limit_of_an_sd_holds_four_times_in_five() -> None:
    sds = np.random.default_rng(5).normal(size=(20_000, 4)).std(axis=-1, ddof=1)
    assert np.mean([upper_sd(float(sd), 4) >= 1 for sd in sds]) == pytest.approx(0.8, abs=0.01)
    assert upper_sd(1.0, 4) == pytest.approx(math.sqrt(3 / scipy_stats.chi2.ppf(0.2, 3)))


# ------------------------------------------------------------------------------------------------ of a study


def contrast(mean: float | None, sd: float | None, n: int = 3, **fields: Any) -> dict[str, Any]:
    return {
        "left": "a", "right": "b", "than": None, "budget": 1000, "statistic": "difference", "mean": mean, "sd": sd,
        "n": n, **fields,
    }  # fmt: skip


def claim(id: str, *contrasts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    plain = {
        "kind": "lower", "metric": "val_loss", "margin": 0.0, "equivalence_margin": None, "threshold": None,
        "post_hoc": False,
    }  # fmt: skip
    return {"id": id, **plain, "contrasts": list(contrasts), **fields}


def study(*claims: dict[str, Any], gaps: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    return {"name": "s", "alpha": 0.05, "claims": list(claims), "gaps": list(gaps)}


def needed(found: dict[str, Any], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in names) for row in found["contrasts"]]


def test_every_claim_is_planned_at_alpha_over_its_family() -> None:
    found = plan_seeds(study(claim("x", contrast(-0.5, 1.0)), claim("late", contrast(1.0, 1.0), post_hoc=True)))
    assert needed(found, "claim", "alpha", "seeds") == [("x", 0.05, 27), ("late", 0.05, 8)]
    two = plan_seeds(study(claim("x", contrast(-0.5, 1.0)), claim("y", contrast(-1.0, 1.0))))
    oracle = next(
        n for n in range(3, 99) if scipy_stats.nct.sf(scipy_stats.t.ppf(0.975, n - 1), n - 1, 0.5 * math.sqrt(n)) >= 0.8
    )
    assert needed(two, "alpha", "seeds")[0] == (0.025, oracle)
    wide = two["contrasts"][0]
    assert wide["sd_upper"] == pytest.approx(2.1169, abs=1e-4) and wide["seeds_upper"] > 4 * wide["seeds"]


def test_gap_is_the_lead_of_left_and_a_margin_is_taken_off() -> None:
    claims = [claim("x", contrast(0.9, 1.0)), claim("m", contrast(0.9, 1.0), margin=0.5)]
    found = plan_seeds(study(*claims), gap=1.0, alpha=0.1)
    assert needed(found, "assumed", "tested", "alpha") == [(-1.0, 0.0, 0.05), (-1.0, -0.5, 0.05)]
    assert needed(found, "seeds") == [(8,), (27,)]


def test_equivalence_is_planned_where_a_margin_is_declared() -> None:
    claims = [claim("e", contrast(0.1, 1.0), kind="equivalent", equivalence_margin=1.0)]
    row = plan_seeds(study(*claims))["contrasts"][0]
    assert row["seeds"] is None
    first = row["seeds_equivalence"]
    assert power_equivalence(0.1, 1.0, 1.0, first, 0.05) >= 0.8 > power_equivalence(0.1, 1.0, 1.0, first - 1, 0.05)
    both = plan_seeds(study(claim("l", contrast(-1.0, 1.0), equivalence_margin=0.5)))["contrasts"][0]
    assert (both["seeds"], both["seeds_equivalence"]) == (8, None)  # assumed outside the margin: none will do


def test_other_kinds_are_planned_with_what_was_measured() -> None:
    claims = [
        claim("t", contrast(1.0, 1.0, statistic="slope", budget=None), kind="trend", margin=None),
        claim("r", contrast(0.4, 1.0, statistic="value", right=None), kind="routing", margin=None, threshold=0.9),
    ]
    found = plan_seeds(study(*claims), gap=7.0, alpha=0.1)
    assert needed(found, "assumed", "tested", "seeds") == [(1.0, 0.0, 8), (0.4, 0.9, 27)]


def test_gaps_that_no_claim_is_about_are_planned_too() -> None:
    known = {**contrast(-1.0, 1.0), "metric": "val_loss", "post_hoc": False}
    gaps = (
        known,
        {**known, "left": known["right"], "right": known["left"], "mean": 1.0},
        {**known, "budget": 2000},
        {**known, "budget": 3000, "post_hoc": True},
        {**known, "metric": "val_bpb"},
    )
    found = plan_seeds(study(claim("x", contrast(-1.0, 1.0)), gaps=gaps))
    assert needed(found, "claim", "budget", "seeds") == [("x", 1000, 8), (None, 2000, 8)]


def test_where_no_number_exists() -> None:
    rows = plan_seeds(
        study(claim("c", contrast(None, None, 0), contrast(1.0, None, 1), contrast(0.0, 1.0), contrast(1.0, 0.0)))
    )["contrasts"]
    assert [(row["seeds"], row["seeds_upper"]) for row in rows] == [(None, None)] * 3 + [(3, 3)]
    assert plan_seeds(study(claim("c", contrast(1e-5, 1.0))))["contrasts"][0]["seeds"] is None


# ------------------------------------------------------------------------------------------------ the command


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> None:
    claims = [
        claim("gap", contrast(-0.5, 1.0), equivalence_margin=0.1),
        claim("tiny", contrast(1e-5, 1.0)),
        claim("none", contrast(0.0, 1.0)),
        claim("one", contrast(0.3, None, 1)),
        claim("trend", contrast(1.0, 1.0, statistic="slope", budget=None), kind="trend", margin=None),
    ]
    monkeypatch.setattr(equipoise.results, "collect", lambda _: study(*claims))


def test_the_table_says_what_is_assumed_and_why_there_is_no_number(
    collected: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command(tmp_path)
    shown = capsys.readouterr().out
    lines = {line.split()[0]: line for line in shown.splitlines() if line.strip()}
    assert "a − b" in lines["tiny"] and "more than 10,000" in lines["tiny"]
    assert "none will do" in lines["none"] and lines["one"].count("n/a") >= 2
    assert "several" in lines["trend"] and "within ±0.1" in shown
    assert "if the truth is what is assumed: the measured mean" in shown and "upper 80 % limit" in shown


def test_json_is_the_plan(collected: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command(tmp_path, 0.25, 0.5, True)
    found = json.loads(capsys.readouterr().out)
    assert (found["schema_version"], found["gap"], found["alpha"], found["power"]) == (1, 0.25, 0.5, 0.8)
    assert found["contrasts"][0]["assumed"] == -0.25


def test_nothing_to_plan_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(equipoise.results, "collect", lambda _: study())
    command(tmp_path)
    assert capsys.readouterr().out == "no claim and no paired gap: nothing to plan for\n"


def test_gap_and_alpha_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--gap nan: expected a finite number, e.g. 0.02$"):
        command(tmp_path, math.nan)
    with pytest.raises(ConfigError, match=r"^--alpha 1.0: expected between 0 and 1$"):
        command(tmp_path, None, 1.0)
