"""A figure as a piece of an HTML page: no style attribute, no colour of its own, no name that another figure uses.

A page whose policy allows only hashed style sheets ignores `style="…"`, hence every declaration becomes a presentation
attribute; every colour of `figures.style` becomes the page's variable of that name, which is how a figure follows light
and dark. Not for: SVG files that stand alone (`publish`).
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from typing import Final

from markupsafe import Markup, escape
from matplotlib.figure import Figure

from equipoise.figures import style
from equipoise.text import visible

_COLOURS: Final = {value: f"var(--{name})" for name, value in style.theme(dark=False).items()}
_DROPPED: Final = {"metadata", "style"}
_GEOMETRY: Final = {"d", "x", "y", "width", "height", "points", "transform", "font-size"}
_URL: Final = re.compile(r"url\(#([^)]+)\)")


def inline(figure: Figure, name: str, label: str) -> Markup:
    """The figure as an `<svg>` element that scales with its column.

    `name` is unique on the page and prefixes every id; `label` is what a screen reader says.
    """
    root = ElementTree.fromstring(style.svg(figure, name))
    used = {
        found for element in root.iter() for key, value in element.attrib.items() for found in _referenced(key, value)
    }
    view = root.get("viewBox", "0 0 1 1")
    width = float(view.split()[2])
    inner = "".join(_element(child, name, used) for child in root)
    return Markup('<svg viewBox="{}" width="{}" role="img" aria-label="{}">{}</svg>').format(
        view, f"{width:g}", visible(label), Markup(inner)
    )


def _element(element: ElementTree.Element, name: str, used: set[str]) -> str:
    tag = element.tag.rpartition("}")[2]
    if tag in _DROPPED:
        return ""
    attributes = _attributes(element, name, used)
    inner = str(escape(element.text or "")) if tag in ("text", "tspan") else ""
    inner += "".join(_element(child, name, used) for child in element)
    if not inner and tag in ("g", "defs", "text"):
        return ""
    written = "".join(f' {key}="{escape(value)}"' for key, value in attributes.items())
    return f"<{tag}{written}>{inner}</{tag}>"


def _attributes(element: ElementTree.Element, name: str, used: set[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in element.attrib.items():
        key = key.rpartition("}")[2]
        if key == "style":
            for declaration in value.split(";"):
                field, _, setting = declaration.partition(":")
                if field.strip():
                    found |= _presentation(field.strip(), setting.strip())
        elif key != "id":
            found[key] = value
        elif value in used:
            found["id"] = value
    return {key: _renamed(key, _rounded(value) if key in _GEOMETRY else value, name) for key, value in found.items()}


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


def _referenced(key: str, value: str) -> list[str]:
    return [value.removeprefix("#")] if key.endswith("href") else _URL.findall(value)


def _renamed(key: str, value: str, name: str) -> str:
    if key == "id":
        return f"{name}-{value}"
    if key == "href":
        return f"#{name}-{value.removeprefix('#')}"
    return _URL.sub(rf"url(#{name}-\1)", value)
