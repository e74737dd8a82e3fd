"""A figure inside the page: shorter than as a file, and the same lines in the same places and colours."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator

import numpy as np
import pytest
from matplotlib.figure import Figure

from equipoise.figures import style
from equipoise.report.svg import inline, short_path

NUMBER = re.compile(r"-?(?:\d+\.?\d*|\.\d+)")
PAIRS = {"M": 1, "m": 1, "L": 1, "l": 1, "C": 3, "c": 3, "Q": 2, "q": 2}


def corners(data: str) -> list[tuple[float, float]]:
    """Every point a path names, where it lies; written from the SVG specification, section 9.3."""
    found: list[tuple[float, float]] = []
    x = y = start_x = start_y = 0.0
    for command, rest in re.findall(r"([A-Za-z])([^A-Za-z]*)", data):
        numbers = [float(number) for number in NUMBER.findall(rest)]
        if command in "zZ":
            x, y = start_x, start_y
        elif command in "hv":
            for number in numbers:
                x, y = (x + number, y) if command == "h" else (x, y + number)
                found.append((x, y))
        else:
            many = 2 * PAIRS[command]
            assert numbers and len(numbers) % many == 0
            for first in range(0, len(numbers), many):
                own = numbers[first : first + many]
                base = (x, y) if command.islower() else (0.0, 0.0)
                found += [(base[0] + a, base[1] + b) for a, b in zip(own[::2], own[1::2], strict=True)]
                x, y = found[-1]
                if command in "mM" and not first:
                    start_x, start_y = x, y
    return found


def written(rng: np.random.Generator) -> str:
    """A path as Matplotlib writes one, several figures in it."""
    parts = []
    for _ in range(rng.integers(1, 4)):
        parts.append("M {} {} ".format(*rng.choice([0, 7.25, 100.04, -3.96], 2)))
        for command in rng.choice(list("LLLLCQ"), rng.integers(1, 30)):
            values = np.where(rng.random(6) < 0.3, 7.25, rng.normal(0, 100, 6))[: 2 * PAIRS[str(command)]]
            parts.append(f"{command} {' '.join(f'{value:.6f}' for value in values)} ")
        parts += ["z "] * int(rng.integers(0, 2))
    return "".join(parts)


@pytest.mark.parametrize("seed", range(50))
def test_a_short_path_goes_where_the_long_one_went(seed: int) -> None:
    data = written(np.random.default_rng(seed))
    short = short_path(data)
    assert np.abs(np.array(corners(short)) - np.array(corners(data))).max() < 0.0501
    assert len(short) < 0.6 * len(data)
    assert short.count("z") == data.count("z") and short_path(data) == short


def test_moves_that_follow_each_other_stay_moves() -> None:
    assert short_path("M 1 1 M 2 2 M 4 4 L 5 6") == "M1 1m1 1m2 2l1 2"
    assert short_path("M 0 0 L 1 0 L 2 0 L 2 3 L 1 2 L 0 0 ") == "M0 0h1 1v3l-1-1-1-2"


def test_what_is_not_read_keeps_its_form() -> None:
    assert short_path("M 0 0 A 1 1 0 0 1 2.00000 2.123456") == "M 0 0 A 1 1 0 0 1 2 2.12"


SAID = ("stroke", "stroke-width", "stroke-opacity", "stroke-dasharray", "fill", "fill-opacity", "opacity", "clip-path")


def paths(element: ElementTree.Element, above: dict[str, str]) -> Iterator[dict[str, str]]:
    """Every path that is drawn where it stands, with all that is said of it, by itself or by what it stands in."""
    own = {key: value for key, value in element.attrib.items() if key != "style"}
    own |= dict(re.findall(r"([a-z-]+): *([^;]+)", element.get("style", "")))
    said = {**above, **own}
    tag = element.tag.rpartition("}")[2]
    if tag in ("defs", "metadata", "style"):
        return
    if tag == "path":
        yield said
    for child in element:
        yield from paths(child, {key: value for key, value in said.items() if key in SAID})


def test_every_line_keeps_its_place_and_its_look() -> None:
    figure = Figure(figsize=(5, 3))
    ax = figure.add_subplot()
    figure.patch.set_alpha(0)
    ax.patch.set_alpha(0)
    rng = np.random.default_rng(0)
    for index in range(12):
        colour, alpha = style.EXPERTS[index // 3], (0.5, None)[index % 2]
        ax.plot(rng.random(40), color=colour, alpha=alpha, linewidth=1 + index // 6)
    ax.axhspan(0.2, 0.4, color=style.INK, alpha=0.3)
    long, short = style.svg(figure, "x"), str(inline(figure, "x", "said"))
    assert len(short) < 0.5 * len(long)
    names = {value: f"var(--{name})" for name, value in style.theme(dark=False).items()}
    before = [path for path in paths(ElementTree.fromstring(long), {}) if path.get("opacity") != "0"]
    after = list(paths(ElementTree.fromstring(short), {}))
    assert len(before) == len(after) > 12
    for old, new in zip(before, after, strict=True):
        assert np.abs(np.array(corners(new["d"])) - np.array(corners(old["d"]))).max() < 0.0501
        for key in SAID[:-1]:
            assert new.get(key) == names.get(old.get(key, ""), old.get(key)), key
        assert ("clip-path" in old) == ("clip-path" in new)
    used = set(re.findall(r'(?:url\(|href=")#([\w-]+)', short))
    assert used == set(re.findall(r' id="([^"]+)"', short)) and all(name.startswith("x-") for name in used)
