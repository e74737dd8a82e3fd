"""The routing explorer of the page: what stands at each token, that no token acts, and its script in a real browser."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from equipoise.figures import style
from equipoise.report.page import render_html

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
TOKENS = [
    "Once",
    " upon",
    "\n",
    " ",
    "\\xe2",
    "</bdi><script>alert(1)</script>",
    "\u2028\u202e\u200f\x00",
    "שלום",
    "\"'&",
]


def with_explorer(results: dict[str, Any], num_experts: int = 4, top_k: int = 2) -> dict[str, Any]:
    """The study with two stories for each arm; in layer l token t goes to experts t + l, t + l + 1, …."""
    num_layers = 2

    def story(routed: bool, losses: list[float], end: float | None) -> dict[str, Any]:
        experts = [
            [[(t + layer + k) % num_experts for k in range(top_k)] for t in range(len(TOKENS))]
            for layer in range(num_layers if routed else 0)
        ]
        weights = [[[0.75, 0.25, 0.0, 0.0][:top_k] for _ in layer] for layer in experts]
        return {"tokens": TOKENS, "losses": losses, "end_loss": end, "experts": experts, "weights": weights}

    losses = [0.05, 0.1, 0.7, 1.0, 2.5, 4.0, 9.0, 0.0, 0.4999]
    share = [[1.0 if i == j else 0.25 for j in range(num_experts)] for i in range(num_experts)]
    top = [[{"token": TOKENS[5], "share": 0.996, "count": 12}, {"token": " upon", "share": 0.5, "count": 99}], []]
    layer = {"coactivation": share, "top_tokens": [*top, *([[]] * (num_experts - 2))]}
    arms = []
    for arm in results["arms"]:
        routed = arm["kind"] == "moe"
        arms.append(
            {
                "arm": arm["name"],
                "top_k": top_k if routed else 0,
                "num_experts": num_experts if routed else 0,
                "stories": [story(routed, losses, 1.5), story(routed, losses, None)],
                "layers": [layer] * num_layers if routed else [],
            }
        )
    few = {**results, "routing": [], "curves": results["curves"][:1], "samples": []}
    return {**few, "explorer": {"budget": results["budgets"][0], "seed": 2, "arms": arms}}


class Section(HTMLParser):
    """The tokens of the section, one list a column, each with its attributes, text and what stands below."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.columns: list[list[dict[str, str]]] = []
        self.tags: list[str] = []
        self.breaks = 0
        self._inside, self._token = "", False
        self.feed(source[source.index('<section id="explorer"') : source.index('<section id="samples"')])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        self._token = (tag == "span" and "data-l" in given) or (self._token and tag in ("bdi", "sub"))
        self._inside = tag if self._token else ""
        if given.get("class") == "tokens":
            self.columns.append([])
        if tag == "span" and "data-l" in given:
            self.columns[-1].append({**given, "bdi": "", "sub": ""})
        self.breaks += tag == "br"

    def handle_endtag(self, tag: str) -> None:
        self._token = self._token and tag == "bdi"
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside in ("bdi", "sub") and self.columns and self.columns[-1]:
            self.columns[-1][-1][self._inside] += data


def text_of(source: str) -> str:
    part = source[source.index('<section id="explorer"') : source.index('<section id="samples"')]
    return " ".join(html.unescape(re.sub("<[^>]*>", " ", part)).split())


def test_each_token_has_its_experts_or_its_loss_below(results: dict[str, Any]) -> None:
    section = Section(render_html(with_explorer(results)))
    assert len(section.columns) == 2 * 3 and section.breaks == 2 * 3
    moe, dense = section.columns[0], section.columns[1]
    assert [len(column) for column in section.columns] == [10] * 3 + [9] * 3
    assert [token["bdi"] for token in moe[:5]] == ["Once", " upon", "⏎", "␣", "\\xe2"]
    assert [token["sub"] for token in moe] == ["0 1", "1 2", "2 3", "3 0", "0 1", "1 2", "2 3", "3 0", "0 1", "1.5"]
    assert [token["class"] for token in moe[:4]] == ["tk x0", "tk x1", "tk x2", "tk x3"]
    assert moe[1]["data-r"] == "1:0.75 2:0.25|2:0.75 3:0.25"
    assert moe[1]["title"] == "loss 0.10; layer 0: expert 1 at 0.75, expert 2 at 0.25"
    shades = ["tk s0", "tk s1", "tk s2", "tk s3", "tk s4", "tk s5", "tk s5", "tk s0", "tk s2", "tk s3"]
    assert [token["class"] for token in dense] == shades
    assert [token["sub"] for token in dense[:3]] == ["0.1", "0.1", "0.7"] and dense[8]["data-l"] == "0.50"
    assert all("data-r" not in token for token in dense) and dense[-1]["bdi"] == "(end)"


def test_the_section_says_whose_text_it_is_and_how_well_it_was_predicted(results: dict[str, Any]) -> None:
    shown = text_of(render_html(with_explorer(results)))
    assert "as each arm reads it at the end of its training (40.5M tokens, seed 2)" in shown
    assert "moe collapsed 1.9350 nats/token" in shown  # seed 2 of the small budget collapsed; (17.8499 + 1.5) ÷ 10
    assert "moe collapsed 1.9833 nats/token" in shown  # without the end, ÷ 9
    assert "expert 3 under 0.1 nats 0.1 to 0.5 0.5 to 1 1 to 2 2 to 4 from 4 on" in shown
    assert "“␣upon” 50 %" in shown and "1 none" in shown


def test_no_token_acts_and_all_of_it_is_seen(results: dict[str, Any]) -> None:
    source = render_html(with_explorer(results))
    section = Section(source)
    assert "script" not in section.tags and "<script>alert" not in source
    moe = section.columns[0]
    assert moe[5]["bdi"] == "</bdi><script>alert(1)</script>"
    assert moe[6]["bdi"] == "\\u2028\\u202e\\u200f\\u0000"
    assert moe[7]["bdi"] == "שלום" and moe[8]["bdi"] == "\"'&"
    assert not re.search("[\x00-\x08\u2028\u200f\u202e]", source)
    assert source == render_html(with_explorer(results))


@pytest.mark.parametrize(("num_experts", "top_k", "drawn"), [(4, 2, True), (4, 1, False), (2, 2, False)])
def test_a_heat_map_only_where_it_says_something(
    results: dict[str, Any], num_experts: int, top_k: int, drawn: bool
) -> None:
    source = render_html(with_explorer(results, num_experts, top_k))
    assert ("How often two experts are chosen together, layer by layer: moe" in source) is drawn


def test_more_experts_than_colours_begin_again(results: dict[str, Any]) -> None:
    source = render_html(with_explorer(results, num_experts=11))
    moe = Section(source).columns[0]
    assert [token["class"] for token in moe[6:9]] == ["tk x6", "tk x7", "tk x0"] and moe[8]["sub"] == "8 9"
    assert "the colours begin again at expert 8" in text_of(source)
    assert len(style.EXPERTS) == 8


def test_without_a_view_it_is_said(results: dict[str, Any]) -> None:
    few = {**results, "routing": [], "curves": [], "samples": [], "explorer": None}
    assert "No finished run kept a token by token view." in text_of(render_html(few))


# ------------------------------------------------------------------------------------------------ in a browser


DRIVER = """
const click = value => document.querySelector(`input[name="explorer-view"][value="${value}"]`).click();
const press = key => document.activeElement.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
const tokens = column => [...document.querySelectorAll(".story .column")[column].querySelectorAll(".tk")];
const look = column => tokens(column).map(t => t.className + " " + t.querySelector("sub").textContent);
const said = [];
said.push(document.querySelector(".picker").hidden, look(0)[1], look(1)[1]);
click("1"); said.push(look(0)[1], tokens(0)[1].title, look(1)[1]);
click("loss"); said.push(look(0)[1], tokens(0)[1].title);
click("0");
tokens(0)[0].focus(); press("ArrowRight"); press("ArrowRight"); press("ArrowLeft");
said.push(document.querySelector(".readout").textContent, tokens(0).indexOf(document.activeElement));
press("End"); said.push(document.querySelector(".readout").textContent);
said.push(tokens(0).filter(t => t.tabIndex === 0).length, tokens(2)[9].classList.contains("on"));
tokens(0)[5].dispatchEvent(new MouseEvent("mouseenter")); said.push(document.querySelector(".readout b").textContent);
document.title = JSON.stringify(said);
"""


@pytest.mark.skipif(PROGRAM is None, reason="no Chromium found; on Debian and Ubuntu: apt install chromium")
def test_layers_losses_keys_and_the_pointer_in_a_browser(results: dict[str, Any], tmp_path: Path) -> None:
    """The page as it is, but for one more script that the policy is made to know, which tries everything."""
    source = render_html(with_explorer(results))
    digest = base64.b64encode(hashlib.sha256(DRIVER.encode()).digest()).decode()
    source = source.replace("script-src ", f"script-src 'sha256-{digest}' ", 1)
    path = tmp_path / "report.html"
    path.write_text(source.replace("</body>", f"<script>{DRIVER}</script></body>"), encoding="utf-8")
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
    found = subprocess.run(
        [str(PROGRAM), *flags, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", path.as_uri()],
        capture_output=True,
        encoding="utf-8",
        timeout=180,
        check=True,
    ).stdout
    title = re.search("<title>(.*?)</title>", found, re.DOTALL)
    assert title is not None
    said = json.loads(html.unescape(title[1]))
    assert said[:3] == [False, "tk x1 1 2", "tk s1 0.1"]
    assert said[3:6] == ["tk x2 2 3", "loss 0.10; layer 1: expert 2 at 0.75, expert 3 at 0.25", "tk s1 0.1"]
    assert said[6:8] == ["tk s1 0.1", "loss 0.10"]
    assert said[8].startswith(
        "“ upon”moe: loss 0.10; layer 0: expert 1 at 0.75, expert 2 at 0.25dense-active: loss 0.10"
    )
    assert said[9] == 1 and said[10].startswith("“(end)”moe: loss 1.50dense-active: loss 1.50")
    assert said[11:13] == [1, True]
    assert said[13] == "“</bdi><script>alert(1)</script>”"
