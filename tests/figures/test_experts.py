"""Saturation, usage entropy and co-activation as figures, against hand-worked numbers."""

from __future__ import annotations

from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

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
    found = {}
    for patch in figure.axes[ax].patches:
        assert isinstance(patch, Rectangle)
        x, y = patch.get_xy()
        found[int(y + 0.5), int(x + 0.5)] = float(patch.get_alpha() or 0) / DEEPEST
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
    assert len(cells(figure, 0)) == num * (num - 1)
    assert [int(tick) for tick in figure.axes[0].get_xticks()] == list(range(0, num, 4))
