"""The routing explorer of the page: what stands at each token, and that no token acts. Its script: test_browser.py."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import pytest

from equipoise.figures import style
from equipoise.report.page import render_html

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
WithExplorer = Callable[..., dict[str, Any]]


@pytest.fixture
def with_explorer(explorer: Callable[..., dict[str, Any]]) -> WithExplorer:
    """A function that gives a study its explorer and takes away what else takes long to draw."""

    def make(results: dict[str, Any], num_experts: int = 4, top_k: int = 2) -> dict[str, Any]:
        few = {**results, "routing": [], "curves": results["curves"][:1], "samples": []}
        return {**few, "explorer": explorer(results, TOKENS, num_experts, top_k)}

    return make


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


def test_each_token_has_its_experts_or_its_loss_below(results: dict[str, Any], with_explorer: WithExplorer) -> None:
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


def test_the_section_says_whose_text_it_is_and_how_well_it_was_predicted(
    results: dict[str, Any], with_explorer: WithExplorer
) -> None:
    shown = text_of(render_html(with_explorer(results)))
    assert "as each arm reads it at the end of its training (40.5M tokens, seed 2)" in shown
    assert "moe collapsed 1.9350 nats/token" in shown  # seed 2 of the small budget collapsed; (17.8499 + 1.5) ÷ 10
    assert "moe collapsed 1.9833 nats/token" in shown  # without the end, ÷ 9
    assert "expert 3 under 0.1 nats 0.1 to 0.5 0.5 to 1 1 to 2 2 to 4 from 4 on" in shown
    assert "“␣upon” 50 %" in shown and "1 none" in shown


def test_no_token_acts_and_all_of_it_is_seen(results: dict[str, Any], with_explorer: WithExplorer) -> None:
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
    results: dict[str, Any], with_explorer: WithExplorer, num_experts: int, top_k: int, drawn: bool
) -> None:
    source = render_html(with_explorer(results, num_experts, top_k))
    assert ("How often two experts are chosen together, layer by layer: moe" in source) is drawn


def test_more_experts_than_colours_begin_again(results: dict[str, Any], with_explorer: WithExplorer) -> None:
    source = render_html(with_explorer(results, num_experts=11))
    moe = Section(source).columns[0]
    assert [token["class"] for token in moe[6:9]] == ["tk x6", "tk x7", "tk x0"] and moe[8]["sub"] == "8 9"
    assert "the colours begin again at expert 8" in text_of(source)
    assert len(style.EXPERTS) == 8


def test_without_a_view_it_is_said(results: dict[str, Any]) -> None:
    few = {**results, "routing": [], "curves": [], "samples": [], "explorer": None}
    assert "No finished run kept a token by token view." in text_of(render_html(few))
