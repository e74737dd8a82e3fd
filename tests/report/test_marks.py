"""What must stand beside a number stands there, in page, Markdown and terminal alike: one set of tables, three forms.

Collapsed, post hoc, seeds left out, how much was scored, why there is no floor, mixed environments.
"""

from __future__ import annotations

import copy
import html
import re
from collections.abc import Callable
from typing import Any

import pytest

from equipoise.cli.reports import show_results
from equipoise.report.details import runs_table
from equipoise.report.markdown import render_markdown
from equipoise.report.page import render_html
from equipoise.report.tables import gaps_table, results_table
from equipoise.report.values import Cell

SMALL = 40_500_000
Render = Callable[[dict[str, Any]], str]


def plain(text: str) -> str:
    """Without what the formats add: tags, character references, backslashes, bars, line breaks."""
    text = re.sub(r"<style.*?</style>|<[^>]*>|\|", " ", re.sub(r"\\(?=\W|_)", "", text), flags=re.DOTALL)
    return " ".join(html.unescape(text).split())


@pytest.fixture(params=["page", "markdown", "terminal"])
def render(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Render:
    """Results in, the plain text of one of the three renderings out."""

    def terminal(results: dict[str, Any]) -> str:
        show_results(results)
        return capsys.readouterr().out

    how: Render = {"page": render_html, "markdown": render_markdown, "terminal": terminal}[request.param]
    return lambda results: plain(how(small(results)))


def small(results: dict[str, Any]) -> dict[str, Any]:
    """The same study with few figures and texts: quicker to render."""
    return {**results, "routing": results["routing"][:1], "curves": results["curves"][:1], "samples": []}


@pytest.fixture
def late(results: dict[str, Any]) -> dict[str, Any]:
    """Seed 2 turned into one that was added late: rows of what was declared are without it, and have a second one."""
    results["post_hoc"]["seeds"] = [2]
    for run in results["runs"]:
        run["post_hoc"] = run["seed"] == 2
    for name in ("table", "gaps"):
        declared = [
            {**row, "seeds": [0, 1], "expected_n": 2, "n": len(row.get("seeds", [0, 1]))} for row in results[name]
        ]
        results[name] = [row for old, new in zip(results[name], declared, strict=True) for row in (new, old)]
        for row in results[name][1::2]:
            row["post_hoc"] = True
    return results


def texts(cells: tuple[Cell, ...]) -> list[str]:
    return [cell.text for cell in cells]


# ------------------------------------------------------------------------------------------------ everywhere


def test_how_much_was_scored(results: dict[str, Any], render: Render) -> None:
    assert "Scored over 1,048,512 of 4,912,776 validation tokens." in render(results)


def test_nothing_scored_is_no_sentence(results: dict[str, Any]) -> None:
    results |= {"val_targets": None, "val_targets_total": None}
    assert not any("Scored" in fact for fact in results_table(results).facts)


def test_why_there_is_no_floor_stands_where_it_would_be(results: dict[str, Any], render: Render) -> None:
    assert "known floor" not in render(results)
    results["floor_reason"] = "no floor: a document is longer than recipe.seq_len = 64"
    shown = render(results)
    # In a terminal the reason may take several lines of its column.
    assert re.search(r"any known floor n/a n/a n/a – no floor: a document.* recipe\.seq_len = 64", shown)


def test_seeds_a_gap_is_without(results: dict[str, Any], render: Render) -> None:
    results["claims"][0]["metric"] = "best_val_loss"
    shown = render(results)
    assert "2 of 3, without seed 1 moe" in shown and "3 of 3 dense-total" in shown


def test_seeds_a_judged_contrast_is_without(results: dict[str, Any]) -> None:
    for how in (render_html, render_markdown):
        shown = plain(how(small(results)))
        assert "n = 2 of 3, without seed 1" in shown and "n = 3 of 3" in shown
    assert "dense-active − moe (collapsed), without seed 1" in plain(render_html(small(results)))  # its figure


def test_what_was_added_late_is_marked(late: dict[str, Any], render: Render) -> None:
    shown = render(late)
    for row in ("moe post hoc", "moe − dense-active post hoc"):
        assert row in shown.replace("(post hoc)", "post hoc"), row
    assert "added later" in shown and "Post hoc: with what was added after the first finished run" in shown
    assert shown.count("(post hoc)") + shown.count(" post hoc ") >= 8


def test_late_rows_stand_below_the_declared_ones(late: dict[str, Any]) -> None:
    for table, column in ((results_table(late), 1), (gaps_table(late), 0)):
        marks = [row[column].marks for row in table.rows]
        assert marks == [(), ("post hoc",)] * (len(marks) // 2)
    notes = [row[-1].text for row in results_table(late).rows]
    assert notes[:2] == ["–", "seed 2: collapsed, added later"]


def test_late_runs_arms_and_texts_are_marked_on_the_page(late: dict[str, Any]) -> None:
    late["post_hoc"] |= {"arms": ["dense-total"], "budgets": [SMALL]}
    for run in late["runs"]:
        run["post_hoc"] |= run["arm"] == "dense-total" or run["budget"] == SMALL
    marks = {(row[0].text, row[1].text, row[2].text): row[0].marks for row in runs_table(late).rows}
    assert marks["moe", "426.3M", "0"] == () and marks["moe", "426.3M", "2"] == ("post hoc",)
    assert marks["moe", "40.5M", "0"] == marks["dense-total", "426.3M", "0"] == ("post hoc",)
    source = render_html({**late, "curves": late["curves"][:1]})
    shown = plain(source)
    assert "3 seeds (1 post hoc)" in shown and "2 budgets (1 post hoc)" in shown
    assert "426.3M · seed 2 · post hoc" in shown and "40.5M · seed 2 · post hoc · collapsed" in shown
    assert re.search(r"moe − dense-active post hoc 426\.3M", shown)  # the table of the gaps
    headings = [plain(who) for who in re.findall(r'<p class="who">(.*?)</p>', source)]
    assert "dense-total post hoc" in headings and "moe post hoc collapsed" in headings and "dense-active" in headings
    assert 'class="arm arm-2"><bdi>dense-total</bdi></span> <span class="mark">post hoc</span></th>' in source


def test_the_scope_counts_declared_seeds(late: dict[str, Any]) -> None:
    shown = plain(render_html(small(late)))
    assert "2 seeds per arm and budget: too few to support anything" in shown
    assert "1 more came after the first finished run; no declared number rests on them." in shown


def test_a_mixture_of_environments_is_said(results: dict[str, Any], render: Render) -> None:
    assert "mixed environments" not in render(results)
    origin = results["provenance"]
    origin["mixed"] = {
        "fields": ["torch", "threads"],
        "resumed": [{"arm": "moe", "seed": 2, "budget": SMALL, "steps": [120, 300]}],
    }
    results["claims"][0]["marks"].append("mixed environments")
    said = (
        "the complete runs differ in torch, threads; moe 40.5M seed 2 went on under another environment after step "
        "120, 300"
    )
    shown = render(results)
    assert said in shown and "supported" in shown.lower() and shown.count("mixed environments") == 2


def test_each_environment_names_its_runs(results: dict[str, Any]) -> None:
    origin = results["provenance"]
    origin["environments"].append({**origin["environments"][0], "torch": "2.12.0"})
    for run in results["runs"]:
        run["environments"] = [int(run["seed"] == 1)] if run["arm"] == "moe" else [0, 1]
    for how in (render_html, render_markdown):
        shown = plain(how(small(results)))
        assert "2 different environments made these runs" in shown and "2.12.0" in shown
        assert re.search(r"runs moe 40\.5M seed 0; .*; dense-total 426\.3M seed 2 moe 40\.5M seed 1; ", shown)


# ------------------------------------------------------------------------------------------------ collapsed


def test_each_loss_is_marked_by_the_weights_it_was_measured_on(results: dict[str, Any]) -> None:
    """One run collapsed at its best step only, another at its end only."""
    (first, second) = (
        run for run in results["runs"] if (run["arm"], run["budget"]) == ("moe", SMALL) and run["seed"] < 2
    )
    first["best_collapsed"], second["collapsed"] = True, True
    for row in results["table"]:
        if (row["arm"], row["budget"]) == ("moe", SMALL):
            row["collapsed"] = [0] if row["metric"] == "best_val_loss" else [1]
    marks = {
        (row[0].text, row[1].text, row[2].text): [cell.marks for cell in row[4:7]] for row in runs_table(results).rows
    }
    assert marks["moe", "40.5M", "0"] == [(), ("collapsed",), ()]
    assert marks["moe", "40.5M", "1"] == [("collapsed",), (), ("collapsed",)]
    note = results_table(results).rows[0][-1].text
    assert note == "seed 0: collapsed at its best step; seed 1: collapsed; seed 2: collapsed"


@pytest.mark.parametrize("metric", ["val_loss", "best_val_loss", "val_bpb"])
def test_a_mean_is_marked_by_its_own_metric(results: dict[str, Any], metric: str) -> None:
    for row in results["table"]:
        row["collapsed"] = [0] if (row["arm"], row["metric"]) == ("dense-total", metric) else []
    marked = [
        [bool(cell.marks) for cell in row[2:5]] for row in results_table(results).rows if row[1].text == "dense-total"
    ]
    assert marked == [[metric == name for name in ("val_loss", "best_val_loss", "val_bpb")]] * 2
    for row in results["gaps"]:
        row["collapsed"] = ["moe"] if row["metric"] == "val_bpb" else []
    assert all(
        bool(row[3].marks) == bool(row[4].marks) == (row[2].text == "bits per byte") for row in gaps_table(results).rows
    )


def test_spikes_that_could_not_be_counted_are_not_zero(results: dict[str, Any]) -> None:
    results["runs"][0]["num_spikes"], results["runs"][1]["num_spikes"] = None, 0
    column = texts(runs_table(results).header).index("spikes")
    assert [row[column].text for row in runs_table(results).rows[:2]] == ["n/a", "0"]


def test_words_wrap_and_numbers_do_not(results: dict[str, Any]) -> None:
    """So that the row of the floor fits a page: a short name, and what explains it in a column that wraps."""
    results["floor"] = {"loss": 1.2, "loss_se": 0.01, "bpb": 0.6, "bpb_se": 0.01, "num_documents": 400}
    *_, floor = results_table(results).rows
    assert floor[1].text == "known floor" and floor[-1].text == "± standard error"
    assert all(row[-1].prose for row in results_table(results).rows)
    assert all(not cell.prose for row in results_table(results).rows for cell in row if cell.number)
    source = render_html(small(results))
    assert (
        re.search(r'<td [^>]*class="prose"><bdi>± standard error</bdi></td>', source)
        and "td.prose{white-space:normal" in source
    )
    assert ".num bdi{white-space:pre}" in source


def test_renderings_change_nothing(late: dict[str, Any], render: Render) -> None:
    before = copy.deepcopy(late)
    render(late)
    assert late == before


def test_a_command_is_shown_so_that_it_can_be_pasted() -> None:
    from equipoise.report.markdown import code

    assert code("equipoise run x --set 'budgets=[1_000]'") == "`equipoise run x --set 'budgets=[1_000]'`"
    assert code("a `b` ``c``") == "``` a `b` ``c`` ```"
    assert code("a\nb") == "`a b`"


# ------------------------------------------------------------------------------------------------ claims and statistics


def test_the_interval_over_documents_and_crossings_are_shown(results: dict[str, Any], render: Render) -> None:
    results["claims"][0]["metric"] = "best_val_loss"
    shown = render(results)
    assert "−0.0333 to +0.0444" in shown and "alidation sampling" in shown
    for part in ("is zero", "1 of 3", "120M to beyond", "seed 0: 120M", "beyond the measured range"):
        assert part in shown, part


def test_a_match_is_also_said_with_embeddings_not_counted(results: dict[str, Any], render: Render) -> None:
    match = {**results["arms"][1]["match"], "arm": "dense-active", "holds_nonembedding": False}
    results["claims"][0]["matches"] = [match, {**match, "residual_nonembedding": None, "on": "flops_per_token"}]
    shown = render(results)
    assert (
        "dense-active is matched to moe on active_params: residual +0.77 %; with embeddings not counted +8.08 %, no "
        "match within 1 %"
    ) in shown
    assert "on flops_per_token: residual +0.77 %; no parameters are matched" in shown
    assert "213,155,840" in shown  # tokens per expert


@pytest.mark.parametrize(
    ("changed", "said", "effect"),
    [
        (
            {"kind": "trend", "direction": "grows", "budget": None, "budgets": [SMALL, 426_300_000]},
            "the lead of moe over dense-active in best validation loss grows from 40.5M to 426.3M tokens",
            ("slope", "lead of moe over dense-active, slope on ln tokens"),
        ),
        (
            {"kind": "faster", "metric": "val_loss", "budget": None, "budgets": [SMALL, 426_300_000]},
            "moe reaches the same loss with fewer tokens than dense-active from 40.5M to 426.3M tokens",
            ("log_ratio", "ln(tokens of moe ÷ tokens of dense-active)"),
        ),
        (
            {"kind": "faster", "metric": "val_loss"},
            "moe runs ahead, on average, of dense-active along one training of 426.3M tokens",
            ("curve_gap", "moe − dense-active, mean along training"),
        ),
        (
            {
                "kind": "routing", "right": None, "metric": "log_z", "direction": "below", "threshold": -0.5,
                "layers": "max", "at_frac": 0.05,
            },
            "log_z of moe (largest of any layer, after 5 % of training) lies below −0.5 at 426.3M tokens",
            ("value", "moe"),
        ),
    ],
    ids=["trend", "faster", "faster-one-budget", "routing"],
)  # fmt: skip
def test_each_kind_says_what_is_claimed_and_what_its_effect_is(
    results: dict[str, Any], changed: dict[str, Any], said: str, effect: tuple[str, str]
) -> None:
    claim = results["claims"][0]
    claim.update({"margin": None, **changed})
    claim["contrasts"][0].update(statistic=effect[0], right=claim["right"])
    for how in (render_html, render_markdown):
        shown = plain(how(small(results)))
        assert said in shown and effect[1] in shown
