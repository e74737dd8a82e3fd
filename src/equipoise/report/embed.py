"""What the page's own script is and reads: its source, its digest for the policy, and data as JSON inside the page.

Not for: what the data is (`curves`), nor for text that a reader sees without the script (the templates escape that).
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from importlib.resources import files
from typing import Any, Final

from markupsafe import Markup

from equipoise import text

_SPECIAL: Final = re.compile("[<>&]")


def template(name: str) -> str:
    """The text of a file beside the page's template: a style sheet or a script."""
    return files("equipoise.report").joinpath("templates", name).read_text(encoding="utf-8")


def digest(source: str) -> str:
    """The SHA-256 of an inline style or script as a Content-Security-Policy names it (`'sha256-…'`)."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"


def data_block(value: Any, name: str) -> Markup:
    r"""`value` as a JSON block with the id `name`: no browser runs it, and no text in it can end it.

    Unseen characters are made seen, as everywhere on the page; what is left of `<`, `>`, `&` and beyond ASCII is
    written as a JSON escape, so the block holds no `</script>`, no `<!--` and no U+2028.

    >>> print(data_block({"a": "</script>\u2028"}, "x"))
    <script type="application/json" id="x">{"a":"\u003c/script\u003e\\u2028"}</script>
    """
    written = json.dumps(_seen(value), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    escaped = _SPECIAL.sub(lambda found: f"\\u{ord(found[0]):04x}", written)
    return Markup('<script type="application/json" id="{}">{}</script>').format(name, Markup(escaped))


def _seen(value: Any) -> Any:
    """`value` with every text in it made visible."""
    if isinstance(value, str):
        return text.visible(value)
    if isinstance(value, dict):
        return {text.visible(key): _seen(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_seen(item) for item in value]
    return value
