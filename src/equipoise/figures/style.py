"""How every figure looks: colours, line styles, an empty figure, and a figure as deterministic SVG.

Not for: what any figure shows. Colours are named here once; `theme` gives the same names their values on a dark page.
"""

from __future__ import annotations

import functools
import io
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, ParamSpec, get_args

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from equipoise.spec.sweep import standing_for
from equipoise.text import shortened

P = ParamSpec("P")
Axis = Literal["tokens", "flops", "seconds"]
"""What the horizontal axis of a curve counts."""
AXES: Final[tuple[Axis, ...]] = get_args(Axis)

# Okabe & Ito, "Color Universal Design" (2008), without its yellow and black, which vanish on a white or a dark page;
# the last two are of Tol's "muted" scheme and of our own. The dark values keep the hue and, like the experts' colours,
# were searched for distance under simulated colour blindness; a test holds all four lists to it.
ARMS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#882255", "#8c6d31")
_ARMS_DARK: Final = ("#487ffa", "#ed6727", "#36eb95", "#eb97d7", "#f5e83d", "#d3f6e8", "#b13ba0", "#826954")
ARM_MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X", "h")
_DASHES: Final[tuple[Any, ...]] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2)))

# Experts have no identity across arms or seeds, hence colours that no arm has.
EXPERTS: Final = ("#3c0562", "#b84f8f", "#055127", "#a89505", "#2ea26e", "#8b3eaa", "#506cf5", "#606508")
_EXPERTS_DARK: Final = ("#af65fa", "#e56f9f", "#61b94b", "#fae830", "#6afab3", "#9b4191", "#c1d1fa", "#626a38")

# Of an axis: from which length on, divisor, label. Hours and minutes only from three of them on.
_UNITS: Final[dict[str, tuple[tuple[float, float, str], ...]]] = {
    "tokens": (
        (1e9, 1e9, "training tokens (billions)"),
        (1e6, 1e6, "training tokens (millions)"),
        (1e3, 1e3, "training tokens (thousands)"),
        (0, 1.0, "training tokens"),
    ),
    "flops": (
        (1e21, 1e21, "training FLOPs (×10²¹)"),
        (1e18, 1e18, "training FLOPs (×10¹⁸)"),
        (1e15, 1e15, "training FLOPs (×10¹⁵)"),
        (1e12, 1e12, "training FLOPs (×10¹²)"),
        (1e9, 1e9, "training FLOPs (×10⁹)"),
        (0, 1.0, "training FLOPs"),
    ),
    "seconds": (
        (10800, 3600.0, "training time (hours)"),
        (180, 60.0, "training time (minutes)"),
        (0, 1.0, "training time (seconds)"),
    ),
}

INK: Final = "#1c1f24"
MUTED: Final = "#666d78"
RULE: Final = "#d9dde3"
LOST: Final = "#a4262c"

_RC: Final[dict[str, Any]] = {
    "font.family": ["DejaVu Sans", "sans-serif"],
    "font.size": 10,
    "text.usetex": False,
    "text.parse_math": False,
    "svg.fonttype": "none",
    "svg.image_inline": True,
    "path.simplify": True,
    "axes.formatter.use_locale": False,
    "axes.unicode_minus": True,
}


LEGEND_ENTRY, LEGEND_LETTER, LEGEND_LINE = 46.0, 5.6, 15.0
"""Points of a legend entry without its letters, of a letter, and of a line: measured at 10 points of DejaVu Sans."""


def theme(*, dark: bool) -> dict[str, str]:
    """Name of each colour → its value on a light or on a dark page."""
    arms, experts = (_ARMS_DARK, _EXPERTS_DARK) if dark else (ARMS, EXPERTS)
    named = {f"arm-{index}": colour for index, colour in enumerate(arms)}
    named |= {f"expert-{index}": colour for index, colour in enumerate(experts)}
    rest = ("#e7e9ed", "#a0a7b3", "#363b44", "#ff8f8f") if dark else (INK, MUTED, RULE, LOST)
    return named | dict(zip(("ink", "muted", "rule", "lost"), rest, strict=True))


def arm_style(results: Mapping[str, Any], arm: str) -> dict[str, Any]:
    """Colour, marker and dashes of an arm: by its place in the study, hence the same in every figure.

    A family of swept arms looks like its first member.
    """
    names = [entry["name"] for entry in results["arms"]]
    index = names.index(standing_for(arm, names))
    return {
        "color": ARMS[index % len(ARMS)],
        "marker": ARM_MARKERS[index % len(ARM_MARKERS)],
        "linestyle": _DASHES[index // len(ARMS) % len(_DASHES)],
    }


def settings() -> dict[Any, Any]:
    """Matplotlib's own defaults and ours: what a user's matplotlibrc says may not change a report."""
    kept = re.compile(r"backend|interactive|toolbar|datapath|savefig\.directory|webagg|tk\.|date\.")
    return {key: value for key, value in mpl.rcParamsDefault.items() if not kept.match(key)} | _RC


def drawn(make: Callable[P, Figure]) -> Callable[P, Figure]:
    """Decorator of a figure function: it draws under our settings, not a matplotlibrc's, and leaves none behind."""

    @functools.wraps(make)
    def inside(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with mpl.rc_context(settings()):
            return make(*args, **kwargs)

    return inside


def blank(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """A transparent figure of `width` × `height` points with a grid of equal axes, row by row."""
    figure = Figure(figsize=(width / 72, height / 72), dpi=72)
    figure.patch.set_alpha(0)
    axes = [figure.add_subplot(rows, columns, index + 1) for index in range(rows * columns)]
    for ax in axes:
        ax.patch.set_alpha(0)
        ax.spines[["top", "right"]].set_visible(False)
        for spine in ax.spines.values():
            spine.set_color(MUTED)
            spine.set_linewidth(0.8)
        ax.tick_params(colors=MUTED, labelcolor=INK, width=0.8, length=3, labelsize=10)
        ax.grid(axis="y", color=RULE, linewidth=0.7)
        ax.set_axisbelow(True)
    return figure, axes


def place(
    figure: Figure, *, left: float, right: float, top: float, bottom: float, wspace: float = 0, hspace: float = 0
) -> None:
    """Margins of the axes, and the room between them, in points. Fixed: one set of numbers, one layout."""
    width, height = figure.get_size_inches() * 72
    grid = figure.axes[0].get_subplotspec()
    rows, columns = grid.get_gridspec().get_geometry() if grid else (1, 1)
    panel_width = (width - left - right - (columns - 1) * wspace) / columns
    panel_height = (height - top - bottom - (rows - 1) * hspace) / rows
    figure.subplots_adjust(
        left=left / width,
        right=1 - right / width,
        top=1 - top / height,
        bottom=bottom / height,
        wspace=wspace / panel_width,
        hspace=hspace / panel_height,
    )


def write(ax: Axes, x: float, y: float, text: str, **options: Any) -> None:
    """Literal text on the axes: never mathematics."""
    ax.text(x, y, text, **{"fontsize": 10, "color": INK, **options}, parse_math=False)


def title(ax: Axes, text: str) -> None:
    """A small title at the left edge of the axes."""
    ax.set_title(text, loc="left", fontsize=10.5, color=INK, fontweight="bold", pad=5, parse_math=False)


def axis_labels(ax: Axes, x: str, y: str) -> None:
    """Labels of both axes, literal."""
    ax.set_xlabel(x, color=INK, fontsize=10.5, labelpad=4, parse_math=False)
    ax.set_ylabel(y, color=INK, fontsize=10.5, labelpad=4, parse_math=False)


def legend(owner: Axes | Figure, entries: Iterable[tuple[Line2D, str]], **options: Any) -> None:
    """A legend of these handles with these labels: literal, and none left out for how it begins."""
    pairs = list(entries)
    if not pairs:
        return
    made = owner.legend(
        [handle for handle, _ in pairs],
        ["" for _ in pairs],
        **{"frameon": False, "fontsize": 10, "labelcolor": INK, "handlelength": 2.0, "borderaxespad": 0.2, **options},
    )
    root = owner.get_figure(root=True)
    width = root.get_size_inches()[0] * 72 if root else math.inf
    limit = int(min(64, (width - 2 * LEGEND_ENTRY) / LEGEND_LETTER))  # no entry is wider than the figure
    for text, (_, label) in zip(made.get_texts(), pairs, strict=True):
        text.set_parse_math(False)
        text.set_text(shortened(label, limit))


def legend_below(figure: Figure, entries: Sequence[tuple[Line2D, str]]) -> float:
    """A legend in the lower left corner of a figure; returns the points its rows beyond the first take.

    In one row where that fits, else in columns; the figure grows by what is returned, so that its panels do not shrink.
    """
    width, height = figure.get_size_inches() * 72
    lengths = [LEGEND_ENTRY + LEGEND_LETTER * len(shortened(label, 64)) for _, label in entries]
    room = 0.95 * width
    columns = len(entries) if sum(lengths) <= room else max(1, int(room / max(lengths)))
    more = LEGEND_LINE * (math.ceil(len(entries) / columns) - 1) if entries else 0.0
    figure.set_size_inches(width / 72, (height + more) / 72)
    legend(figure, entries, loc="lower left", ncols=max(1, columns), bbox_to_anchor=(0.05, 0.0))
    return more


def unit(axis: Axis, longest: float) -> tuple[float, str]:
    """Divisor and label of an axis that reaches `longest`: the largest unit that does not make it a fraction.

    >>> unit("tokens", 2_500_000), unit("seconds", 100)
    ((1000000.0, 'training tokens (millions)'), (1.0, 'training time (seconds)'))
    """
    return next((size, label) for least, size, label in _UNITS[axis] if longest >= least)


def thinned(points: Sequence[Any], limit: int = 200) -> list[Any]:
    """At most `limit` of the points, evenly chosen, the first and the last among them."""
    if len(points) <= limit:
        return list(points)
    last = len(points) - 1
    return [points[(2 * index * last + limit - 1) // (2 * (limit - 1))] for index in range(limit)]


def saved(figure: Figure, extension: Literal["svg", "pdf"], name: str = "figure", *, ground: str = "white") -> bytes:
    """The figure as the content of an SVG or PDF file: no date, and the same bytes for the same figure and `name`.

    Text stays text: as it is in an SVG, as embedded TrueType in a PDF, because many journals refuse Type 3 fonts.
    `name` makes the ids inside an SVG its own; `ground` is the colour behind everything, "none" for no such.
    """
    target = io.BytesIO()
    dates: dict[str, dict[str, None]] = {
        "svg": {"Date": None, "Creator": None},
        "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    }
    own = {**settings(), "svg.hashsalt": f"equipoise/{name}", "pdf.fonttype": 42}
    with mpl.rc_context(own), warnings.catch_warnings():
        # A name may hold letters the measuring font lacks; whoever shows an SVG may have them.
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        figure.savefig(target, format=extension, metadata=dates[extension], facecolor=ground)
    return target.getvalue()


def svg(figure: Figure, name: str) -> str:
    """The figure as SVG text without a ground, for a page."""
    return saved(figure, "svg", name, ground="none").decode()
