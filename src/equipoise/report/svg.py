"""A figure as a piece of an HTML page: no style attribute, no colour of its own, no name that another figure uses.

A page whose policy allows only hashed style sheets ignores `style="…"`, hence every declaration becomes a presentation
attribute; every colour of `figures.style` becomes the page's variable of that name, which is how a figure follows light
and dark. What nobody sees is left out, and paths are written as short as they can be: a page holds a hundred figures.
Not for: SVG files that stand alone (`publish`).
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Final, NamedTuple

from markupsafe import Markup, escape
from matplotlib.figure import Figure

from equipoise.figures import style
from equipoise.text import visible

_COLOURS: Final = {value: f"var(--{name})" for name, value in style.theme(dark=False).items()}
_DROPPED: Final = {"metadata", "style"}
_GEOMETRY: Final = {"x", "y", "width", "height", "points", "transform", "font-size"}
_URL: Final = re.compile(r"url\(#([^)]+)\)")
_OWN: Final = {"id", "d", "opacity"}
"""Attributes of a path that a group cannot say for it."""
_LINE: Final = re.compile(r"M[^a-z]*[hv][^a-z ]*")
_STEP: Final = re.compile(r"([MLCQz])([^MLCQz]*)")
_STILL: Final = re.compile(r"rotate\(-?0 [^)]*\)")


def inline(figure: Figure, name: str, label: str) -> Markup:
    """The figure as an `<svg>` element that scales with its column.

    `name` is unique on the page and prefixes every id; `label` is what a screen reader says.
    """
    root = ElementTree.fromstring(style.svg(figure, name))
    found = (ref for element in root.iter() for key, value in element.attrib.items() for ref in _referenced(key, value))
    used = {ref: f"{name}-{number}" for number, ref in enumerate(dict.fromkeys(found))}
    view = root.get("viewBox", "0 0 1 1")
    width = float(view.split()[2])
    looks = {
        f"#{used[key]}": _attributes(element, used) for element in root.iter() if (key := element.get("id")) in used
    }
    inner = _written([piece for child in root for piece in _element(child, used, looks)])
    return Markup('<svg viewBox="{}" width="{}" role="img" aria-label="{}">{}</svg>').format(
        view, f"{width:g}", visible(label), Markup(inner)
    )


class _Piece(NamedTuple):
    """An element: `start`, `look`, `end`. A run of elements of one look says it once."""

    start: str
    look: str
    end: str


def _element(
    element: ElementTree.Element, used: Mapping[str, str], looks: Mapping[str, Mapping[str, str]]
) -> list[_Piece]:
    """What is seen of an element: nothing, itself, or the content of a group that says nothing of its own."""
    tag = element.tag.rpartition("}")[2]
    if tag in _DROPPED:
        return []
    attributes = _attributes(element, used)
    pieces = [piece for child in element for piece in _element(child, used, looks)]
    inner = (str(escape(element.text or "")) if tag in ("text", "tspan") else "") + _written(pieces)
    if not inner and (tag in ("g", "defs", "text") or attributes.get("opacity") == "0"):
        return []
    if tag == "g" and not attributes:
        return pieces
    if tag == "use":  # what it refers to says most of it already, and a mere line has nothing to fill
        same = looks.get(attributes["href"], {})
        line = _LINE.fullmatch(same.get("d", ""))
        attributes = {k: v for k, v in attributes.items() if same.get(k) != v and not (line and k == "fill")}
    shared = {key: value for key, value in attributes.items() if tag == "path" and key not in _OWN}
    own = {key: value for key, value in attributes.items() if key not in shared}
    return [_Piece(f"<{tag}{_said(own)}", _said(shared), f">{inner}</{tag}>" if inner else "/>")]


def _said(attributes: Mapping[str, str]) -> str:
    return "".join(f' {key}="{escape(value)}"' for key, value in attributes.items())


def _written(pieces: Iterable[_Piece]) -> str:
    written = ""
    for look, run in groupby(pieces, lambda piece: piece.look):
        same = list(run)
        once = bool(look) and len(same) > 1
        inner = "".join(f"{piece.start}{'' if once else look}{piece.end}" for piece in same)
        written += f"<g{look}>{inner}</g>" if once else inner
    return written


def _attributes(element: ElementTree.Element, used: Mapping[str, str]) -> dict[str, str]:
    """Those of an element; `used` has the new name of every id that something refers to."""
    found: dict[str, str] = {}
    for key, value in element.attrib.items():
        key = key.rpartition("}")[2]
        if key == "style":
            for declaration in value.split(";"):
                field, _, setting = declaration.partition(":")
                if field.strip():
                    found |= _presentation(field.strip(), setting.strip())
        elif key == "id":
            found |= {key: used[value]} if value in used else {}
        elif key == "href":
            found[key] = f"#{used[value.removeprefix('#')]}"
        elif key == "d":
            found[key] = short_path(value)
        elif not (key == "transform" and _STILL.fullmatch(value)):
            found[key] = value
    renamed = {key: _URL.sub(lambda ref: f"url(#{used[ref[1]]})", value) for key, value in found.items()}
    return {key: _rounded(value) if key in _GEOMETRY else value for key, value in renamed.items()}


def _presentation(field: str, setting: str) -> dict[str, str]:
    """A CSS declaration as attributes; the family of a font is the page's."""
    if field == "font":
        size = re.search(r"([\d.]+)px", setting)
        bold = {"font-weight": "600"} if re.search(r"\b(bold|[6-9]00)\b", setting) else {}
        return ({"font-size": size[1]} if size else {}) | bold
    if field == "font-size":
        return {field: setting.removesuffix("px")}
    if field in ("font-family", "font-style", "font-variant", "font-stretch"):
        return {}
    return {field: _COLOURS.get(setting, setting)}


def _rounded(value: str) -> str:
    return re.sub(r"-?\d+\.\d+", lambda number: f"{float(number[0]):.2f}".rstrip("0").rstrip("."), value)


def short_path(data: str) -> str:
    """The same path to a twentieth of a point, by relative steps; of what it cannot read, only numbers get shorter.

    It is the ends of the steps that are rounded, not the steps: nothing adds up.

    >>> short_path("M 0 201  L 211.5 201  L 211.5 24.04  L 0 24.04  z ")
    'M0 201h211.5v-177h-211.5z'
    """
    written, last, at, start = "", "", (0, 0), (0, 0)  # in tenths
    for command, numbers in _STEP.findall(data):
        try:
            ends = [round(10 * float(number)) for number in numbers.split()]
        except ValueError:
            return _rounded(data)
        if command == "z":
            written, last, at = f"{written}z", "z", start
            continue
        points = list(zip(ends[::2], ends[1::2], strict=True))
        steps = [end - at[place % 2] for place, end in enumerate(ends)]
        here, at = at, points[-1]
        if command == "M":
            code, start = ("m" if last else "M"), at
        elif command == "L" and at[1] == here[1]:
            code, steps = "h", steps[:1]
        elif command == "L" and at[0] == here[0]:
            code, steps = "v", steps[1:]
        else:
            code = command.lower()
        words = [_tenths(step) for step in steps]
        joined = words[0] + "".join(word if word.startswith("-") else f" {word}" for word in words[1:])
        again = code == last and code != "m"  # a second pair after m would be a line
        written += (joined if joined.startswith("-") else f" {joined}") if again else f"{code}{joined}"
        last = code
    return written


def _tenths(value: int) -> str:
    """A number of tenths as SVG has it shortest: 12, 1.2, .2, -.2."""
    whole, rest = divmod(abs(value), 10)
    return ("-" if value < 0 else "") + (f"{whole or ''}.{rest}" if rest else f"{whole}")


def _referenced(key: str, value: str) -> list[str]:
    return [value.removeprefix("#")] if key.endswith("href") else _URL.findall(value)
