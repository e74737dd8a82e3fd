"""Figures against hand-worked numbers: what is drawn, what it is called, and that every build is the same bytes."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import xml.etree.ElementTree as ElementTree
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from equipoise.figures import (
    contrast_label,
    effects,
    expert_usage,
    has_router_health,
    loss_curves,
    router_health,
    style,
)

NAMES = ["$x_$", "_base", "plain"]


def make_curve(arm: str, seed: int, losses: list[float | None], budget: int = 4_000_000) -> dict[str, Any]:
    last = len(losses) - 1
    return {
        "arm": arm,
        "seed": seed,
        "budget": budget,
        "points": [
            {
                "step": 10 * index,
                "tokens": budget * index // last,
                "flops": budget * index // last * 1_000_000,
                "seconds": 60.0 * index * (1 + seed),
                "loss": loss,
            }
            for index, loss in enumerate(losses)
        ],
    }


@pytest.fixture
def results() -> dict[str, Any]:
    """Three arms, two seeds each, five evaluations; one run of the last arm diverged after its second."""
    curves = [
        make_curve("$x_$", 0, [9.0, 3.0, 2.0, 1.5, 1.0]),
        make_curve("$x_$", 1, [9.0, 3.2, 2.4, 1.7, 1.4]),
        make_curve("_base", 0, [9.0, 4.0, 3.0, 2.5, 2.0]),
        make_curve("_base", 1, [9.0, 4.0, 3.0, 2.5, 2.0]),
        make_curve("plain", 0, [9.0, 5.0, 4.0, 3.5, 3.0]),
        make_curve("plain", 1, [9.0, 70.0, None, None, None]),
    ]
    runs = [{"arm": c["arm"], "seed": c["seed"], "budget": c["budget"], "status": "complete"} for c in curves]
    runs = [{**run, "collapsed": run["arm"] == "$x_$" and run["seed"] == 1, "post_hoc": False} for run in runs]
    runs = [{**run, "best_collapsed": run["collapsed"]} for run in runs]
    runs[-1]["status"] = "diverged"
    arms = [{"name": name} for name in NAMES]
    return {"arms": arms, "runs": runs, "curves": curves, "curve_floor": None, "split": "validation"}


def make_routing(num_layers: int, num_experts: int, top_k: int, num_points: int = 5) -> dict[str, Any]:
    """Expert 0 grows from an even share to twice that; the others share the rest."""
    points = []
    for index in range(num_points):
        top = (1 + index / (num_points - 1)) / num_experts
        usage = [top] + [(1 - top) / (num_experts - 1)] * (num_experts - 1)
        layer = {"usage": usage, "router_entropy": 0.9, "log_z": None if index == 0 else float(index)}
        points.append({"step": index, "tokens": 1_000_000 * index, "layers": [layer] * num_layers})
    return {"arm": "$x_$", "seed": 0, "budget": 1, "top_k": top_k, "num_experts": num_experts, "points": points}


def lines(figure: Figure, width: float) -> list[tuple[list[float], list[float]]]:
    """Coordinates of every line of this width that has points."""
    found = [line for line in figure.axes[0].get_lines() if line.get_linewidth() == width and len(line.get_xdata())]
    return [(list(map(float, line.get_xdata())), list(map(float, line.get_ydata()))) for line in found]


def texts(figure: Figure) -> list[str]:
    """Every text a reader sees in the SVG."""
    root = ElementTree.fromstring(style.svg(figure, "test"))
    return [str(element.text) for element in root.iter("{http://www.w3.org/2000/svg}text")]


# ------------------------------------------------------------------------------------------------ curves


def test_the_bold_line_is_the_mean_of_the_finished_seeds(results: dict[str, Any]) -> None:
    figure = loss_curves(results, 4_000_000, "tokens")
    bold = lines(figure, 2)
    assert bold[0] == (pytest.approx([0, 1, 2, 3, 4]), pytest.approx([9.0, 3.1, 2.2, 1.6, 1.2]))
    assert bold[2] == (pytest.approx([0, 1, 2, 3, 4]), pytest.approx([9.0, 5.0, 4.0, 3.5, 3.0]))  # seed 0 alone
    assert len(lines(figure, 0.8)) == 6


def test_the_mean_uses_only_steps_that_every_seed_has(results: dict[str, Any]) -> None:
    del results["curves"][1]["points"][2]
    assert lines(loss_curves(results, 4_000_000, "tokens"), 2)[0][1] == pytest.approx([9.0, 3.1, 1.6, 1.2])


@pytest.mark.parametrize(
    ("axis", "label", "last"),
    [
        ("tokens", "training tokens (millions)", 4.0),
        ("flops", "training FLOPs (×10¹²)", 4.0),
        ("seconds", "training time (minutes)", 6.0),
    ],
)
def test_axes_are_scaled_and_named(results: dict[str, Any], axis: Any, label: str, last: float) -> None:
    figure = loss_curves(results, 4_000_000, axis)
    assert figure.axes[0].get_xlabel() == label
    assert lines(figure, 2)[0][0][-1] == pytest.approx(last)
    assert figure.axes[0].get_ylabel() == "validation loss (nats/token)"


def test_small_axes_are_plain(results: dict[str, Any]) -> None:
    results["curves"] = [make_curve("plain", 0, [2.0, 1.0], budget=500)]
    results["runs"][4]["budget"] = 500
    assert loss_curves(results, 500, "tokens").axes[0].get_xlabel() == "training tokens"
    assert loss_curves(results, 500, "seconds").axes[0].get_xlabel() == "training time (seconds)"


def test_a_late_seed_is_drawn_but_is_no_part_of_the_mean(results: dict[str, Any]) -> None:
    results["runs"][1]["post_hoc"] = True
    figure = loss_curves(results, 4_000_000)
    assert lines(figure, 2)[0][1] == pytest.approx([9.0, 3.0, 2.0, 1.5, 1.0])  # seed 0 alone
    assert len(lines(figure, 0.8)) == 6
    assert "$x_$ (collapsed, without 1 post hoc)" in texts(figure)


def test_of_a_late_arm_the_mean_is_over_all_seeds(results: dict[str, Any]) -> None:
    for run in results["runs"][:2]:
        run.update(post_hoc=True, collapsed=False, best_collapsed=False)
    figure = loss_curves(results, 4_000_000)
    assert lines(figure, 2)[0][1] == pytest.approx([9.0, 3.1, 2.2, 1.6, 1.2])
    assert "$x_$ (post hoc)" in texts(figure)


def test_a_collapse_at_the_best_step_is_named_too(results: dict[str, Any]) -> None:
    results["runs"][2]["best_collapsed"] = True
    assert "_base (collapsed)" in texts(loss_curves(results, 4_000_000))


def test_the_frame_ignores_the_start_and_what_diverged(results: dict[str, Any]) -> None:
    ax = loss_curves(results, 4_000_000).axes[0]
    low, high = ax.get_ylim()
    assert 0.5 < low < 1.0  # the lowest loss, and a margin
    assert 5.0 < high < 9.0  # the highest loss from a quarter of training on, and room for the legend
    (cross,) = [line for line in ax.get_lines() if line.get_marker() == "x"]
    assert (list(cross.get_xdata()), list(cross.get_ydata())) == ([1.0], [high])  # it went to 70


def test_the_floor_is_a_line_inside_the_frame(results: dict[str, Any]) -> None:
    results |= {"curve_floor": {"loss": 0.25}, "floor": {"loss": 0.75}}
    figure = loss_curves(results, 4_000_000)
    assert figure.axes[0].get_ylim()[0] < 0.25
    (drawn,) = [line for line in figure.axes[0].get_lines() if len(set(line.get_ydata())) == 1 < len(line.get_ydata())]
    assert set(drawn.get_ydata()) == {0.25}
    assert "the grammar itself" in texts(figure)


def test_no_name_is_mathematics_and_none_is_left_out(results: dict[str, Any]) -> None:
    shown = texts(loss_curves(results, 4_000_000))
    assert {"$x_$ (collapsed)", "_base", "plain (1 of 2 finished)"} <= set(shown)


def test_a_curve_of_many_points_is_thinned(results: dict[str, Any]) -> None:
    results["curves"] = [make_curve("plain", 0, [9.0 - index / 1000 for index in range(1234)])]
    (x, y), *_ = lines(loss_curves(results, 4_000_000), 2)
    assert len(x) == 200 and y[0] == 9.0 and y[-1] == pytest.approx(9.0 - 1.233)


def test_nothing_to_draw_is_an_empty_frame(results: dict[str, Any]) -> None:
    results["curves"] = []
    assert not lines(loss_curves(results, 4_000_000), 2)


@pytest.mark.parametrize(("length", "limit"), [(1, 3), (3, 3), (4, 3), (201, 200), (1000, 200), (7, 2)])
def test_thinning_keeps_the_ends_and_the_order(length: int, limit: int) -> None:
    kept = style.thinned(range(length), limit)
    assert len(kept) == min(length, limit) and kept[0] == 0 and kept[-1] == length - 1
    assert kept == sorted(set(kept))


# ------------------------------------------------------------------------------------------------ effects


def make_contrast(**over: Any) -> dict[str, Any]:
    row = {
        "left": "$x_$",
        "right": "_base",
        "mean": -0.3,
        "ci_low": -0.5,
        "ci_high": -0.1,
        "per_seed": {"10": -0.4, "9": -0.2},
        "collapsed": [],
        "dropped": [],
    }
    return {**row, **over}


def test_an_effect_shows_seeds_mean_interval_and_zero(results: dict[str, Any]) -> None:
    figure = effects(results, [make_contrast()], margins={"+ε": 0.2})
    drawn = [tuple(map(float, line.get_xdata())) for line in figure.axes[0].get_lines()]
    assert (0.0, 0.0) in drawn and (0.2, 0.2) in drawn
    assert (-0.2, -0.4) in drawn  # seeds 9 and 10, in that order
    assert (-0.5, -0.1) in drawn and (-0.3,) in drawn
    low, high = figure.axes[0].get_xlim()
    assert low < -0.5 and high > 0.2
    assert {"$x_$ \u2212 _base", "+ε"} <= set(texts(figure))


def test_no_line_runs_through_a_label(results: dict[str, Any]) -> None:
    """Zero and a margin lie at the left, where the labels begin; boxes as drawn, in pixels."""
    rows = [make_contrast(mean=0.3, ci_low=0.1, ci_high=0.5, per_seed={"0": 0.2})] * 3
    figure = effects(results, rows, margins={"+ε": 0.05})
    renderer = FigureCanvasAgg(figure).get_renderer()
    (ax,) = figure.axes
    figure.draw(renderer)
    labels = [text.get_window_extent(renderer) for text in ax.texts if "\u2212" in text.get_text()]
    upright = [line for line in ax.get_lines() if len(set(line.get_xdata())) == 1 < len(line.get_xdata())]
    boxes = [line.get_window_extent(renderer) for line in upright]
    assert len(labels) == 3 and len(boxes) == 6
    assert any(label.x0 <= box.x0 <= label.x1 for label in labels for box in boxes)  # they are above each other
    assert not any(label.overlaps(box) for label in labels for box in boxes)


def test_a_label_says_what_a_reader_must_know_of_the_contrast() -> None:
    row = make_contrast(collapsed=["$x_$"], dropped=[1, 4])
    assert contrast_label(row, "5k tokens", "post hoc") == (
        "$x_$ (collapsed) \u2212 _base, 5k tokens, post hoc, without seeds 1, 4"
    )
    assert contrast_label(make_contrast()) == "$x_$ \u2212 _base"


def test_an_effect_of_one_seed_has_no_interval(results: dict[str, Any]) -> None:
    figure = effects(results, [make_contrast(ci_low=None, ci_high=None, per_seed={"0": -0.3})])
    assert not [line for line in figure.axes[0].get_lines() if line.get_linewidth() == 2.4]


def test_equal_arms_still_have_a_frame(results: dict[str, Any]) -> None:
    low, high = effects(results, [make_contrast(mean=0, ci_low=0, ci_high=0, per_seed={"0": 0})]).axes[0].get_xlim()
    assert low < 0 < high


# ------------------------------------------------------------------------------------------------ routing


def test_each_expert_has_a_line_in_each_layer() -> None:
    figure = expert_usage(make_routing(num_layers=3, num_experts=4, top_k=2))
    assert len(figure.axes) == 3
    for ax in figure.axes:
        solid = [line for line in ax.get_lines() if line.get_linewidth() == 1.6]
        assert [line.get_color() for line in solid] == list(style.EXPERTS[:4])
        assert list(map(float, solid[0].get_ydata())) == pytest.approx([0.25, 0.3125, 0.375, 0.4375, 0.5])
        assert ax.get_ylim() == pytest.approx((0, 0.51))  # the ceiling, 1/2, is inside
    assert {"layer 2", "expert 3", "even share, 1/4"} <= set(texts(figure))


def test_of_many_experts_the_extremes_are_coloured() -> None:
    figure = expert_usage(make_routing(num_layers=1, num_experts=16, top_k=1))
    thick = [line for line in figure.axes[0].get_lines() if line.get_linewidth() == 1.8]
    assert [float(line.get_ydata()[-1]) for line in thick] == pytest.approx([2 / 16, (1 - 2 / 16) / 15])
    assert {"busiest at the end", "idlest at the end", "other experts"} <= set(texts(figure))


def test_layers_beyond_a_row_go_on_below_and_spare_panels_are_hidden() -> None:
    figure = expert_usage(make_routing(num_layers=5, num_experts=2, top_k=1))
    assert [ax.get_visible() for ax in figure.axes] == [True] * 5 + [False] * 3


def test_router_health_leaves_out_what_is_no_number() -> None:
    figure = router_health(make_routing(num_layers=2, num_experts=4, top_k=1))
    assert [len(line.get_xdata()) for ax in figure.axes for line in ax.get_lines()] == [5, 5, 4, 4]


def test_a_router_without_probabilities_has_no_health_to_draw() -> None:
    routing = make_routing(num_layers=2, num_experts=4, top_k=1)
    assert has_router_health(routing)
    for point in routing["points"]:
        for layer in point["layers"]:
            layer |= {"router_entropy": None, "log_z": None}
    assert not has_router_health(routing)
    routing["points"][-1]["layers"][1]["log_z"] = 0.5
    assert has_router_health(routing)
    assert not has_router_health({**routing, "points": []})


# ------------------------------------------------------------------------------------------------ style


def test_an_arm_looks_the_same_everywhere_and_unlike_the_others() -> None:
    results = {"arms": [{"name": f"arm {index}"} for index in range(20)]}
    looks = [style.arm_style(results, f"arm {index}") for index in range(20)]
    assert looks[0]["color"] == style.ARMS[0] and looks[8]["color"] == style.ARMS[0]
    assert len({repr(look) for look in looks}) == 20


def test_both_themes_name_the_same_colours_and_no_two_light_ones_are_equal() -> None:
    light, dark = style.theme(dark=False), style.theme(dark=True)
    assert list(light) == list(dark)
    assert len(set(light.values())) == len(light)  # a page tells them apart by value


# Machado, Oliveira & Fernandes (2009), "A Physiologically-based Model for Simulation of Color Vision Deficiency",
# severity 1, on linear RGB.
SIMULATED = {
    "none": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)


def linear(colour: str) -> np.ndarray:
    channels = np.array([int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)])
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    x, y, z = (np.cbrt(v) if v > 0.008856 else 7.787 * v + 16 / 116 for v in TO_XYZ @ rgb / [0.95047, 1, 1.08883])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def contrast(one: str, other: str) -> float:
    low, high = sorted(float(TO_XYZ[1] @ linear(colour)) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("group", ["arm", "expert"])
@pytest.mark.parametrize("eye", SIMULATED)
def test_colours_stay_apart_for_every_eye(dark: bool, group: str, eye: str) -> None:
    """Any two by 12 in CIELAB (about five times what is just seen); the first four by 17."""
    colours = [colour for name, colour in style.theme(dark=dark).items() if name.startswith(group)]
    seen = [lab(np.clip(SIMULATED[eye] @ linear(colour), 0, 1)) for colour in colours]
    for (i, one), (j, other) in itertools.combinations(enumerate(seen), 2):
        assert np.linalg.norm(one - other) >= (16.9 if j < 4 else 12), (colours[i], colours[j])


@pytest.mark.parametrize(("dark", "page"), [(False, "#ffffff"), (True, "#14171b")])
def test_colours_stand_out_from_the_page(dark: bool, page: str) -> None:
    for name, colour in style.theme(dark=dark).items():
        needed = {"ink": 7.0, "muted": 4.5, "rule": 1.2}.get(name, 2.2 if name in ("arm-4", "arm-5") else 3.0)
        assert contrast(colour, page) >= needed, name


def test_svg_has_no_date_and_the_same_bytes_every_time(results: dict[str, Any]) -> None:
    first, second = (style.svg(loss_curves(results, 4_000_000), "a") for _ in range(2))
    assert first == second
    assert "dc:date" not in first and "Matplotlib v" not in first


def test_a_matplotlibrc_changes_nothing_and_nothing_is_left_behind(results: dict[str, Any]) -> None:
    def build() -> list[str]:
        made = [
            loss_curves(results, 4_000_000),
            effects(results, [make_contrast()]),
            expert_usage(make_routing(2, 4, 1)),
        ]
        return [style.svg(figure, "a") for figure in made]

    expected = build()
    theirs = {
        "axes.linewidth": 9,
        "font.size": 30,
        "text.parse_math": True,
        "lines.solid_capstyle": "round",
        "axes.grid": True,
    }
    with mpl.rc_context({**theirs, "xtick.labelsize": 3, "legend.fontsize": 40}):
        assert build() == expected
        assert mpl.rcParams["font.size"] == 30


def test_letters_the_font_lacks_and_unseen_characters_are_no_fault(results: dict[str, Any]) -> None:
    for curve, run in zip(results["curves"], results["runs"], strict=True):
        if curve["arm"] == "plain":
            curve["arm"] = run["arm"] = "龘\U0001f600\x00\u202e\ud800"
    results["arms"][2]["name"] = "龘\U0001f600\x00\u202e\ud800"
    assert any(text.startswith("龘\U0001f600\\u0000\\u202e\\ud800") for text in texts(loss_curves(results, 4_000_000)))


def test_figures_can_be_made_in_a_thread(results: dict[str, Any]) -> None:
    made: list[str] = []
    thread = threading.Thread(target=lambda: made.append(style.svg(loss_curves(results, 4_000_000), "a")))
    thread.start()
    thread.join()
    assert made == [style.svg(loss_curves(results, 4_000_000), "a")]


def test_figures_need_no_display_no_pyplot_and_no_torch() -> None:
    code = """
import sys
from equipoise.figures import effects, style
row = {"left": "a", "right": "b", "mean": 1.0, "ci_low": 0.5, "ci_high": 1.5, "per_seed": {"0": 1.0}}
row |= {"collapsed": [], "dropped": []}
figure = effects({"arms": [{"name": "a"}, {"name": "b"}]}, [row])
assert "<svg" in style.svg(figure, "x")
print(*sorted({"torch", "matplotlib.pyplot", "tkinter"} & set(sys.modules)))
"""
    environment = {**os.environ, "MPLBACKEND": "TkAgg", "DISPLAY": ":99"}
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""
