"""Saturation, usage entropy and co-activation as figures, against hand-worked numbers."""

from __future__ import annotations

from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch

from equipoise.figures import coactivation, has_saturation, settling, style
from equipoise.figures.experts import DEEPEST


def make_routing(saturation: list[list[float] | None]) -> dict[str, Any]:
    return {
        "top_k": 2,
        "num_experts": 8,
        "points": [
            {
                "tokens": 1_000_000 * place,
                "layers": [{"usage_entropy": 0.9}, {"usage_entropy": 0.5 + 0.1 * place}],
                "saturation": both,
            }
            for place, both in enumerate(saturation)
        ],
    }


def lines(figure: Figure, ax: int) -> list[list[float]]:
    return [[float(y) for y in line.get_ydata()] for line in figure.axes[ax].get_lines()]


def test_each_layer_has_its_entropy_and_its_saturation_beside_chance() -> None:
    figure = settling(make_routing([[0.25, 0.3], [0.5, 0.7], [1.0, 1.0]]))
    assert lines(figure, 0) == [pytest.approx([0.9] * 3), pytest.approx([0.5, 0.6, 0.7])]
    assert lines(figure, 1) == [[0.25, 0.5, 1.0], [0.3, 0.7, 1.0], [0.25, 0.25]]
    assert [float(x) for x in figure.axes[1].get_lines()[0].get_xdata()] == [0.0, 1.0, 2.0]
    assert {text.get_text() for text in figure.legends[0].get_texts()} == {"layer 0", "layer 1", "by chance, K/E"}


def test_a_run_that_kept_no_choices_has_nothing_to_show() -> None:
    assert not has_saturation(make_routing([None, None]))
    assert has_saturation(make_routing([None, [0.5, 0.5]]))
    old = make_routing([None])
    del old["points"][0]["saturation"]
    assert not has_saturation(old)


def cells(figure: Figure, ax: int) -> dict[tuple[int, int], float]:
    """(row, column) → share, read back from the depth of tone."""
    found: dict[tuple[int, int], float] = {}
    for patch in figure.axes[ax].patches:
        assert isinstance(patch, PathPatch)
        for corners in patch.get_path().to_polygons(closed_only=True):
            (left, top), (right, bottom) = corners.min(axis=0), corners.max(axis=0)
            assert (right - left, bottom - top) == (1, 1)
            place = (int(top + 0.5), int(left + 0.5))
            assert place not in found
            found[place] = float(patch.get_alpha() or 0) / DEEPEST
    return found


def test_rows_chose_and_columns_were_chosen_as_well() -> None:
    layers = [{"coactivation": [[1.0, 0.25, 0.75], [0.5, 1.0, 0.5], [0.0, 1.0, 1.0]]}] * 5
    figure = coactivation(layers)
    expected = {(0, 1): 0.25, (0, 2): 0.75, (1, 0): 0.5, (1, 2): 0.5, (2, 0): 0.0, (2, 1): 1.0}
    assert cells(figure, 4) == pytest.approx(expected)
    written = {text.get_text(): text.get_position() for text in figure.axes[0].texts}
    assert written["0.25"] == (1, 0) and written["0.75"] == (2, 0)
    assert [ax.get_visible() for ax in figure.axes] == [True] * 5 + [False] * 3
    assert figure.axes[0].get_ylim() == (2.5, -0.5)  # row 0 on top
    assert style.svg(figure, "x") == style.svg(coactivation(layers), "x")


def test_of_many_experts_no_number_is_written() -> None:
    num = 32
    figure = coactivation([{"coactivation": [[0.1] * num for _ in range(num)]}])
    assert len(figure.axes[0].texts) == 0
    assert cells(figure, 0) == pytest.approx({(y, x): 0.1 for y in range(num) for x in range(num) if x != y})
    assert len(figure.axes[0].patches) == 1  # of one tone, one path
    assert [int(tick) for tick in figure.axes[0].get_xticks()] == list(range(0, num, 4))


def test_tones_are_told_apart_by_hundredths() -> None:
    shares = [[1.0, 0.254, 0.246], [0.3349, 1.0, 0.3351], [0.1, 0.2, 1.0]]
    found = cells(coactivation([{"coactivation": shares}]), 0)
    expected = {(0, 1): 0.25, (0, 2): 0.25, (1, 0): 0.33, (1, 2): 0.34, (2, 0): 0.1, (2, 1): 0.2}
    assert found == pytest.approx(expected)
