"""The page and the Markdown: what they say, what they escape, and that every build is the same bytes."""

from __future__ import annotations

import base64
import copy
import hashlib
import html
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from equipoise.report.markdown import render_markdown
from equipoise.report.page import render_html
from equipoise.report.write import write_report

VOID = {"meta", "input", "img", "br", "link"}


class Page(HTMLParser):
    """Elements in order with their attributes and text; fails on an element that is closed out of turn."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[dict[str, Any]] = []
        self._open: list[dict[str, Any]] = []
        self.feed(source)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"<{tag}> repeats an attribute"
        element = {"tag": tag, "text": "", "within": self._open[-1].get("class") if self._open else None}
        element |= dict(attrs)
        self.elements.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()["tag"] == tag

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element["text"] += data

    def find(self, tag: str, **attributes: str) -> list[dict[str, Any]]:
        return [e for e in self.elements if e["tag"] == tag and all(e.get(k) == v for k, v in attributes.items())]

    def rows(self, caption: str) -> list[list[str]]:
        """Cells of the first table whose caption ends with this, its header first."""
        texts: list[list[str]] = []
        on = False
        for element in self.elements:
            if element["tag"] == "p" and element.get("class") == "caption":
                if texts:
                    break
                on = element["text"].endswith(caption)
            if on and element["tag"] == "tr":
                texts.append([])
            if on and element["tag"] in ("td", "th"):
                texts[-1].append(" ".join(element["text"].split()))
        return texts


@pytest.fixture(scope="module")
def page(_made: dict[str, Any]) -> Page:
    return Page(render_html(_made))


def smaller(results: dict[str, Any]) -> dict[str, Any]:
    """The same study with few figures: quicker to render."""
    return {**results, "routing": results["routing"][:1], "curves": results["curves"][:1]}


# ------------------------------------------------------------------------------------------------ content


def test_sections_come_in_the_order_a_reader_needs(page: Page) -> None:
    headings = [element["text"] for element in page.find("h2")]
    expected = [
        "Verdicts",
        "Contracts",
        "Results",
        "Arms",
        "Curves",
        "Gaps",
        "Routing",
        "Explorer",
        "Samples",
        "Scope",
        "Provenance",
    ]
    assert headings == expected
    assert [element["href"] for element in page.find("a")][1:] == [f"#{name.lower()}" for name in expected]
    assert page.find("h1")[0]["text"] == "tinystories"


def test_a_card_says_claim_verdict_effect_interval_and_p(page: Page) -> None:
    first, second, third = page.find("article")
    assert first["class"] == "card supported" and second["class"] == "card refuted"
    text = " ".join(first["text"].split())
    assert "Supported" not in text and "✓ supported" in text  # capitals are the style sheet's
    assert "moe reaches a lower best validation loss than dense-active at 426.3M tokens, by more than 0.01" in text
    assert re.search(r"−0\.07\d\d 95 % interval −0\.08\d\d to −0\.07\d\d sd 0\.00\d\d n = 3 of 3", text)
    assert "adjusted p for the claim < 0.001" in text and "adjusted p against it 1" in text
    assert "moe-beats-dense-at-equal-active" in text and "the mean gap lies below" in text
    assert {"post hoc", "repeated data"} <= {e["text"] for e in page.find("span", **{"class": "mark"})}
    assert "moe and dense-total differ by less than 0.015 in best validation loss" in second["text"]
    assert "dense-active and dense-total each reach a lower bits per byte than moe at 40.5M tokens" in third["text"]
    assert "(unadjusted 0.400)" in third["text"]


def test_arms_are_integer_exact_with_their_residuals(page: Page) -> None:
    rows = {row[0]: row[1:] for row in page.rows("matching of each arm")}
    assert rows["parameters, total"] == ["21,064,192", "14,886,216", "21,056,000"]
    assert rows["parameters, active"] == ["14,772,736", "14,886,216", "21,056,000"]
    assert rows["training FLOPs per token"] == ["101,203,968", "99,738,624", "138,903,552"]
    assert rows["matched to"] == ["–", "moe, on active_params", "moe, on total_params"]
    assert rows["residual"] == ["–", "+113,480 (+0.77 %)", "−8,192 (−0.04 %)"]
    assert rows["initial tensors shared"] == ["–", "5 of 39, with moe", "26 of 39, with moe"]
    assert rows["experts"] == ["4", "–", "–"]


def test_components_sum_to_the_total(page: Page) -> None:
    rows = page.rows("by component")
    columns = [[int(cell.replace(",", "")) for cell in column] for column in list(zip(*rows[1:], strict=True))[1:]]
    assert [sum(column[:-1]) for column in columns] == [column[-1] for column in columns]


def test_results_are_in_the_published_form(page: Page, results: dict[str, Any]) -> None:
    rows = page.rows("mean ± sd over seeds")
    assert rows[0] == [
        "budget", "arm", "validation loss", "best validation loss", "bits per byte", "seeds", "notes",
    ]  # fmt: skip
    entry = next(
        r for r in results["table"] if (r["arm"], r["budget"], r["metric"]) == ("moe", 426_300_000, "val_loss")
    )
    assert rows[4][:3] == ["426.3M", "moe", f"{entry['mean']:.4f} ± {entry['sd']:.4f}"]
    assert rows[4][5:] == ["3 of 3", "–"]


def test_a_diverged_seed_is_named_and_a_collapse_stands_at_every_number(page: Page) -> None:
    collapsed, diverged = page.rows("mean ± sd over seeds")[1:3]
    assert all(cell.endswith("collapsed") for cell in collapsed[2:5]) and collapsed[6] == "seed 2: collapsed"
    assert diverged[5:] == ["2 of 3", "seed 1: diverged"]
    for row in page.rows("left − right")[1:]:
        assert row[2].endswith("collapsed") == row[3].endswith("collapsed") == (row[1] == "40.5M")
    runs = page.rows("Every run")
    assert sum(row[4].endswith("collapsed") for row in runs) == 1
    assert [row[3:7] for row in runs if row[3].startswith("diverged")] == [
        ["diverged: loss is nan at step 371", "n/a", "n/a", "n/a"]
    ]


def test_gaps_have_interval_noise_floor_and_n(page: Page) -> None:
    rows = page.rows("Paired gaps, left − right")
    assert rows[0] == [
        "contrast", "budget", "metric", "mean ± sd", "95 % interval", "noise floor", "validation sampling", "seeds",
        "lower",
    ]  # fmt: skip
    assert [row[6] for row in rows[1:3]] == ["−0.0333 to +0.0444", "n/a"]
    row = rows[3]
    assert row[0] == "moe − dense-active" and row[1] == "426.3M" and row[7:] == ["3 of 3", "moe"]
    assert re.fullmatch(r"−0\.0\d{3} ± 0\.0\d{3}", row[3])
    assert re.fullmatch(r"−0\.0\d{3} to −0\.0\d{3}", row[4])
    own = page.rows("Paired gaps in best validation loss, left − right")
    assert own[1:] == [row[:2] + row[3:6] + row[7:] for row in rows[1:] if row[2] == "best validation loss"]


def test_final_routing_names_the_ceiling_and_the_dead(page: Page) -> None:
    rows = page.rows("over the whole final evaluation")
    assert rows[0] == [
        "layer", "busiest share", "ceiling 1/K", "usage entropy", "router entropy", "log Z", "dead experts",
    ]  # fmt: skip
    assert len(rows) == 5 and rows[1][2] == "0.500" and rows[1][6] == "none"
    assert "0.650 collapsed" in page.find("section", id="routing")[0]["text"]


def test_curves_have_choices_and_routing_and_samples_a_view_a_run(page: Page) -> None:
    labels = Counter(element["name"] for element in page.find("input"))
    own = {"curve-axis": 3, "curve-scale": 2, "curve-show": 2}
    assert labels == {**own, "routing-0": 6, "sample": 6}
    assert [e["text"] for e in page.find("label")][:7] == [
        "tokens", "FLOPs", "seconds", "linear", "log", "mean ± interval", "seeds",
    ]  # fmt: skip
    assert len(page.find("svg")) == 3 + 2 + 2 + 6 * 2


def test_tables_and_figures_are_numbered_in_their_order(page: Page) -> None:
    captions = [e["text"] for e in page.elements if e.get("class") == "caption" or e["tag"] == "figcaption"]
    for what in ("Table", "Figure"):
        numbers = [int(text.split()[1].rstrip(".")) for text in captions if text.startswith(what)]
        assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) > 10
    assert all(text.startswith(("Table ", "Figure ")) for text in captions)


def test_samples_stand_side_by_side_and_are_the_last_ones(page: Page) -> None:
    quotes = page.find("blockquote")
    assert len(quotes) == 2 * 3 * 6
    assert quotes[0]["text"].startswith("named Pip (moe, 0, step 6504).")
    assert "step 300" not in page.find("section", id="samples")[0]["text"]


def test_scope_and_provenance(page: Page) -> None:
    scope = " ".join(page.find("section", id="scope")[0]["text"].split())
    assert "Models of 14.89M to 21.06M parameters, trained on 40.5M and 426.3M tokens" in scope
    assert "TinyStories, as 8,348 different tokens" in scope
    assert (
        "3 seeds per arm and budget, paired. The smallest mean gap in best validation loss they could support is "
        "between" in scope
    )
    assert "It tests no mechanism" in scope and "no wall-clock claim" in scope
    origin = page.find("section", id="provenance")[0]["text"]
    for fact in ("equipoise run STUDY.toml", "10c4" * 16, "d1" * 32, "2.13.0+cpu", "float32: bf16", "468,102,331"):
        assert fact in origin


# ------------------------------------------------------------------------------------------------ other studies


def test_one_seed_gives_na(results: dict[str, Any]) -> None:
    results = smaller(results)
    results["seeds"] = [0]
    for row in results["table"]:
        row.update(n=1, expected_n=1, seeds=[0], sd=None, diverged=[])
    for row in [*results["gaps"], *(c for claim in results["claims"] for c in claim["contrasts"])]:
        row.update(n=1, sd=None, ci_low=None, ci_high=None, noise_floor=None, per_seed={"0": row["mean"]})
        row.update(expected_n=1, dropped=[])
    page = Page(render_html(results))
    assert page.rows("mean ± sd over seeds")[4][2].endswith("± n/a")
    row = page.rows("Paired gaps, left − right")[3]
    assert row[3].endswith("± n/a") and row[4:6] == ["n/a", "n/a"]
    assert "too few to support anything" in page.find("section", id="scope")[0]["text"]
    assert "95 % interval n/a" in page.find("article")[0]["text"]
    assert "± n/a" in render_markdown(results)


def test_a_study_of_which_nothing_ran(results: dict[str, Any]) -> None:
    for run in results["runs"]:
        nothing = dict.fromkeys(set(run) - {"arm", "seed", "budget", "post_hoc"})
        run.update(nothing, status="missing", environments=[])
    for row in results["table"]:
        row.update(n=0, mean=None, sd=None, values={}, lost=[0, 1, 2], collapsed=[])
    nothing = {"n": 0, "mean": None, "sd": None, "ci_low": None, "ci_high": None, "noise_floor": None, "per_seed": {}}
    nothing |= {"dropped": [0, 1, 2], "collapsed": []}
    for row in [*results["gaps"], *(c for claim in results["claims"] for c in claim["contrasts"])]:
        row.update(nothing)
    results |= {"curves": [], "routing": [], "samples": [], "epochs": dict.fromkeys(results["epochs"])}
    results["provenance"]["environments"] = []
    page = Page(render_html(results))
    assert not page.find("svg")
    text = " ".join(page.find("main")[0]["text"].split())
    assert "No run has been evaluated yet." in text and "No text was sampled." in text
    assert page.rows("mean ± sd over seeds")[1][2:] == [
        "n/a", "n/a", "n/a", "0 of 3", "seed 0: missing; seed 1: missing; seed 2: missing",
    ]  # fmt: skip
    assert "seed 0: missing" in render_markdown(results)


@pytest.mark.parametrize(
    ("split", "said"),
    [("validation", "No claim was declared."), ("selection", "No claim is judged on the selection split.")],
)
def test_a_study_without_claims_says_so(results: dict[str, Any], split: str, said: str) -> None:
    results = {**smaller(results), "claims": [], "split": split}
    page = Page(render_html(results))
    assert said in page.find("section", id="verdicts")[0]["text"]
    assert not page.find("article")
    assert bool(page.find("p", **{"class": "warning"})) == (split == "selection")
    assert said.removesuffix(".") in render_markdown(results)
    assert ("for choosing, not for reporting" in render_markdown(results)) == (split == "selection")


def test_a_dense_study_has_no_routing(results: dict[str, Any]) -> None:
    results = {**smaller(results), "routing": []}
    results["arms"][0].update(kind="dense", widths={"d_model": 8, "d_ff": 16})
    page = Page(render_html(results))
    assert "every feed-forward layer is dense" in page.find("section", id="routing")[0]["text"]
    assert "experts" not in {row[0] for row in page.rows("matching of each arm")}
    assert "## Routing" not in render_markdown(results)


def test_a_grammar_has_its_floor_in_table_and_figure(results: dict[str, Any]) -> None:
    results = smaller(results)
    results["floor"] = {"loss": 1.23456, "loss_se": 0.0123, "bpb": 0.61, "bpb_se": 0.0061, "num_documents": 400}
    results["curve_floor"] = {**results["floor"], "loss": 1.111, "num_documents": 40}
    page = Page(render_html(results))
    row = page.rows("mean ± sd over seeds")[-1]
    assert row[1:5] == ["known floor", "1.2346 ± 0.0123", "1.2346 ± 0.0123", "0.6100 ± 0.0061"]
    assert "scores on the same 400 documents" in page.find("section", id="results")[0]["text"]
    curves = page.find("section", id="curves")[0]["text"]
    assert "the grammar itself" in curves and "scores on this same subset" in curves and "can stay below" not in curves


def test_what_was_added_after_the_lock_stands_beside_the_verdict(results: dict[str, Any]) -> None:
    results = smaller(results)
    claim = results["claims"][0]
    claim["post_hoc_contrasts"] = [{**claim["contrasts"][0], "n": 5, "mean": -0.0712}]
    results["provenance"]["amendments"] = [
        {"date": "2026-02-03", "added": {"seeds": [3, 4], "claims": []}, "after_first_run": True}
    ]
    page = Page(render_html(results))
    assert re.search(
        r"shown, not judged\): moe − dense-active at 426\.3M tokens −0\.0712, .*n = 5", page.find("article")[0]["text"]
    )
    assert (
        "2026-02-03, after the first finished run: added seeds 3, 4" in page.find("section", id="provenance")[0]["text"]
    )


def test_arms_beyond_the_palette_are_no_fault(results: dict[str, Any]) -> None:
    results = smaller(results)
    results["arms"] += [{**copy.deepcopy(results["arms"][1]), "name": f"more-{index}"} for index in range(9)]
    assert 'class="arm arm-3"' in render_html(results)


# ------------------------------------------------------------------------------------------------ safety


@pytest.fixture(scope="module")
def hostile_source(hostile: dict[str, Any]) -> str:
    return render_html(hostile)


def test_hostile_text_is_shown_and_never_becomes_markup(hostile_source: str) -> None:
    page = Page(hostile_source)
    assert [e.get("type") for e in page.find("script")] == ["application/json", None, None]  # the data, and our own
    assert not {"img", "iframe", "object", "embed", "link", "base", "form", "foreignobject"} & {
        element["tag"] for element in page.elements
    }
    assert '<script>alert(1)</script>"><img src=x onerror=alert(2)>{{7*7}}$x_$_base' in page.find("h1")[0]["text"]
    assert "{% raw %}" in page.find("blockquote")[0]["text"] and "49" not in page.find("h1")[0]["text"]


def test_unseen_characters_are_seen(hostile_source: str) -> None:
    assert "\\u2028\\u202e\\u200f\\u0000" in Page(hostile_source).find("h1")[0]["text"]
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u200f\u202e\ud800-\udfff]", hostile_source)
    hostile_source.encode()


@pytest.mark.parametrize("hostile_one", [False, True])
def test_nothing_but_the_hashed_style_sheet_and_script_may_act(
    page: Page, hostile_source: str, hostile_one: bool
) -> None:
    page = Page(hostile_source) if hostile_one else page
    (policy,) = [e["content"] for e in page.find("meta", **{"http-equiv": "Content-Security-Policy"})]
    (sheet,) = page.find("style")
    data, *scripts = page.find("script")
    sheet_hash, *hashes = (
        f"'sha256-{base64.b64encode(hashlib.sha256(element['text'].encode()).digest()).decode()}'"
        for element in (sheet, *scripts)
    )
    assert policy == (
        f"default-src 'none'; style-src {sheet_hash}; script-src {' '.join(hashes)}; require-trusted-types-for "
        "'script'; trusted-types 'none'; base-uri 'none'; form-action 'none'"
    )
    assert data["type"] == "application/json" and json.loads(data["text"])["budgets"]
    assert "<" not in data["text"] and data["text"].isascii()
    for script in scripts:
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(|fetch", script["text"]
        )
    assert "url(" not in sheet["text"] and "@import" not in sheet["text"]
    for element in page.elements:
        for name, value in element.items():
            assert not name.startswith("on") and name not in ("style", "src", "srcset", "data", "action", "poster")
            if name in ("href", "xlink:href"):
                assert str(value).startswith("#")
            if name != "text" and element["tag"] not in ("meta",):
                assert not re.search(r"url\((?!#)", str(value))


def test_ids_are_unique_and_every_reference_has_a_target(page: Page) -> None:
    ids = Counter(element["id"] for element in page.elements if "id" in element)
    assert max(ids.values()) == 1
    for element in page.elements:
        targets = [element[name] for name in ("for", "aria-labelledby") if name in element]
        targets += [element["href"][1:]] if "href" in element else []
        targets += [found for value in element.values() for found in re.findall(r"^url\(#([^)]+)\)", str(value))]
        assert set(targets) <= set(ids), element


def test_every_choice_is_a_keyboard_choice_with_one_made(page: Page) -> None:
    groups: dict[str, list[bool]] = {}
    for element in page.find("input"):
        assert element["type"] == "radio"
        groups.setdefault(element["name"], []).append("checked" in element)
    assert all(chosen == [True] + [False] * (len(chosen) - 1) for chosen in groups.values())
    scrolled = [element for element in page.elements if element.get("class") == "scroll"]
    assert scrolled and all(e["tabindex"] == "0" and e["aria-label"] for e in scrolled)
    assert all(e["within"] == "scroll" for e in page.find("table"))
    assert all(element["aria-label"] for element in page.find("svg"))


def test_each_figure_is_well_formed_and_follows_the_theme(_made: dict[str, Any]) -> None:
    source = render_html(smaller(_made))
    sheet = source[source.index("<style>") : source.index("</style>")]
    figures = re.findall(r"<svg .*?</svg>", source, re.DOTALL)
    assert len(figures) == 3 + 2 + 1 + 2
    for figure in figures:
        root = ElementTree.fromstring(figure)
        assert list(root.iter("text"))
        for element in root.iter():
            for name in ("fill", "stroke"):
                value = element.get(name, "none")
                assert value == "none" or re.fullmatch(r"var\(--[a-z0-9-]+\)", value), (element.tag, value)
                assert value == "none" or f"--{value[6:-1]}:" in sheet


# ------------------------------------------------------------------------------------------------ the same bytes


def test_json_there_and_back_changes_nothing(results: dict[str, Any]) -> None:
    results = smaller(results)
    results["gaps"][0]["per_seed"] = {int(key): value for key, value in results["gaps"][0]["per_seed"].items()}
    again = json.loads(json.dumps(results))
    assert render_html(results) == render_html(again)
    assert render_markdown(results) == render_markdown(again)


def test_arguments_are_not_changed(results: dict[str, Any]) -> None:
    before = copy.deepcopy(results)
    render_markdown(results)
    render_html(smaller(results))
    assert results == before


def test_another_place_time_zone_language_and_hash_seed_change_nothing(results: dict[str, Any], tmp_path: Path) -> None:
    """Also: no torch, no pyplot, and a window system that is not there is not asked for."""
    path = tmp_path / "results.json"
    path.write_text(json.dumps(smaller(results)), encoding="utf-8")
    code = f"""
import json, pathlib, sys
from equipoise.report.write import write_report
write_report(json.loads(pathlib.Path({str(path)!r}).read_text(encoding="utf-8")), pathlib.Path())
print(*sorted({{"torch", "matplotlib.pyplot", "tkinter"}} & set(sys.modules)))
"""
    digests = []
    for index, variables in enumerate(({"TZ": "UTC", "LANG": "C"}, {"TZ": "Asia/Tokyo", "LANG": "de_DE.UTF-8"})):
        folder = tmp_path / f"out{index}"
        folder.mkdir()
        environment = {
            **os.environ,
            **variables,
            "PYTHONHASHSEED": str(index + 1),
            "MPLBACKEND": "TkAgg",
            "DISPLAY": ":99",
        }
        command = [sys.executable, "-W", "error", "-c", code]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, encoding="utf-8", check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == ""
        digests.append(
            [hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in ("report.html", "results.md")]
        )
    assert digests[0] == digests[1]


def test_a_long_study_stays_small(results: dict[str, Any]) -> None:
    for entry in [*results["curves"][:1], *results["routing"][:1]]:
        first, last = entry["points"][0], entry["points"][-1]
        entry["points"] = [first, *(dict(last) for _ in range(3000))]
    assert len(render_html(smaller(results))) < 1_000_000


LEFT_OUT = "The figures of this run over its training are left out, to keep the page small."


def drawn(source: str) -> list[tuple[str, int]]:
    """(run, figures of its routing) of every pane of the first routed arm; either figures or a word stand there."""
    section = source[source.index('<section id="routing"') : source.index('<section id="explorer"')]
    panes = re.findall(r'<p class="pane-title">(.*?)</p>(.*?)(?=<p class="pane-title">|</section>)', section, re.DOTALL)
    assert all(("<svg" in inside) != (LEFT_OUT in inside) and "<table" in inside for _, inside in panes)
    return [(title, inside.count("<svg")) for title, inside in panes]


def test_a_page_without_room_leaves_out_figures_of_later_seeds_and_says_so(
    results: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    results["curves"] = results["curves"][:1]
    whole = render_html(results)
    assert [count for _, count in drawn(whole)] == [2] * 6 and LEFT_OUT not in whole
    sizes = [len(svg) for svg in re.findall(r'<svg [^>]*aria-label="Share of each .*?</svg>', whole, re.DOTALL)]
    limit = len(whole.encode()) - sum(sizes[1:3])
    monkeypatch.setattr("equipoise.report.page.LIMIT", limit)
    shorter = render_html(results)
    assert limit - max(sizes) * 3 < len(shorter.encode()) <= limit
    found = [(title.split(" · ")[1], count) for title, count in drawn(shorter)]
    assert found.count(("seed 0", 2)) == 2 and 0 < [count for _, count in found].count(0) <= 2
    assert [who for who, count in found if not count] in (["seed 2"], ["seed 2", "seed 2"])  # the last of each budget
    monkeypatch.setattr("equipoise.report.page.LIMIT", 1000)
    least = render_html(results)
    assert [count for _, count in drawn(least)] == [0] * 6
    assert least.count("<table") == whole.count("<table")  # no number of a table is ever left out


def test_a_page_without_any_room_shows_one_text_of_the_explorer_and_says_so(
    results: dict[str, Any], explorer: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    results = {**smaller(results), "explorer": explorer(results, list("abcdef"))}
    assert "only the first is shown" not in render_html(results)
    monkeypatch.setattr("equipoise.report.page.LIMIT", 1000)
    source = render_html(results)
    assert "Of 2 texts only the first is shown, to keep the page small." in source
    assert source.count('<div class="story">') == 1


# ------------------------------------------------------------------------------------------------ files


def test_both_files_are_written_whole(results: dict[str, Any], tmp_path: Path) -> None:
    results = smaller(results)
    assert write_report(results, tmp_path) == (tmp_path / "report.html", tmp_path / "results.md")
    assert (tmp_path / "report.html").read_bytes() == render_html(results).encode()
    assert (tmp_path / "results.md").read_bytes() == render_markdown(results).encode()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "results.md"]


def test_a_failure_leaves_the_old_report(results: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("old", encoding="utf-8")
    del results["arms"][0]["params"]
    with pytest.raises(KeyError):
        write_report(results, tmp_path)
    assert [path.read_text(encoding="utf-8") for path in tmp_path.iterdir()] == ["old"]


# ------------------------------------------------------------------------------------------------ Markdown


def cells(row: str) -> list[str]:
    """Cells of a Markdown table row, split at bars that no backslash escapes."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]


def test_markdown_begins_with_the_verdicts(results: dict[str, Any]) -> None:
    text = render_markdown(results)
    assert text.startswith("# Results of tinystories\n\n**Question.** At equal active")
    assert text.index("## Verdicts") < text.index("## Widths") < text.index("## Losses") < text.index("## Paired gaps")
    assert "- **supported** – moe reaches a lower best validation loss than dense-active" in text
    assert "- **refuted** [post hoc, repeated data] – moe and dense-total differ" in text
    assert "adjusted p for the claim: &lt; 0.001" in text


@pytest.mark.parametrize("hostile_one", [False, True])
def test_markdown_tables_are_regular_and_literal(
    results: dict[str, Any], hostile: dict[str, Any], hostile_one: bool
) -> None:
    text = render_markdown(hostile if hostile_one else results)
    assert not re.search("[\x00-\x08\x0b-\x1f\u2028\u202e\u200f\ud800-\udfff]", text)
    spans = re.findall(r"(?m)^- to repeat it: (`+) ?.* ?\1$", text)  # in a code span everything is literal
    assert len(spans) == text.count("- to repeat it:")
    text = re.sub(r"(?m)^- to repeat it:.*$", "", text)
    assert "<" not in text
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert len(tables) == 11
    for table in tables:
        assert len({len(cells(row)) for row in table.splitlines()}) == 1
    if hostile_one:
        name = "\\$x\\_\\$"
        assert any(name in cells(row) for row in text.splitlines() if row.startswith("|"))
        assert not re.search(r"(?<!\\)`", text)


def test_markdown_has_the_numbers_of_the_page(page: Page, results: dict[str, Any]) -> None:
    text = render_markdown(results)
    for caption in ("mean ± sd over seeds", "left − right"):
        for row in page.rows(caption)[1:]:
            assert any(row[3].split(" collapsed")[0] in line for line in text.splitlines()), row
    assert "(collapsed)" in text and html.escape("diverged: loss is nan at step 371") in text
