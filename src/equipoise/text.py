"""Texts and numbers as a reader sees them: nothing invisible acts, and a missing number says so.

The one home of number formats, for terminal, page, Markdown and figures alike. Not for: escaping for HTML or Markdown
(the renderers do that on top), or rounding what is stored.
"""

from __future__ import annotations

import math
import re
from typing import Final

MISSING: Final = "n/a"
"""What stands where there is no number."""

MINUS: Final = "\u2212"

_SPACES: Final = str.maketrans({" ": "␣", "\n": "⏎", "\t": "⇥"})

_UNSEEN: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # controls, but for tab and newline
    "\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\ufffe\uffff"  # marks, separators, directions
    "\ud800-\udfff"  # lone surrogates, which UTF-8 cannot write
    "\U000e0000-\U000e007f]"  # tag characters
)


def visible(text: str) -> str:
    r"""`text` with every character that is unseen, or that changes the order of others, written as its escape.

    Tabs and newlines stay. The result can be stored as UTF-8 and is legal in HTML and XML once escaped.

    >>> visible("a\x00b\u202ec")
    'a\\u0000b\\u202ec'
    """
    return _UNSEEN.sub(
        lambda found: found[0].encode("unicode_escape", "surrogatepass").decode().replace("\\x", "\\u00"), text
    )


def piece(raw: bytes) -> str:
    r"""A token's bytes as text: parts of a character that are none by themselves as `\xe2`; not yet `visible`.

    >>> piece(b" caf\xc3\xa9"), piece(b"\xc3")
    (' café', '\\xc3')
    """
    return raw.decode("utf-8", "backslashreplace")


def token_label(token: str) -> str:
    r"""A token in one line: its white space as signs, `visible` all of it.

    >>> token_label(" upon"), token_label("a\n")
    ('␣upon', 'a⏎')
    """
    return visible(token.translate(_SPACES))


def one_line(text: str) -> str:
    """`visible(text)` with each run of white space as one blank."""
    return " ".join(visible(text).split())


def shortened(text: str, limit: int = 40) -> str:
    """`one_line(text)` with the middle left out beyond `limit` characters: a label in a figure.

    >>> shortened("abcdefghij", 5)
    'ab…ij'
    """
    line = one_line(text)
    half = (limit - 1) // 2
    return line if len(line) <= limit else f"{line[:half]}…{line[-half:]}"


def is_number(value: object) -> bool:
    """Whether `value` is a finite number, as a float would hold it; booleans are none."""
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # a whole number beyond every float
        return False


def count(value: int | float | None) -> str:
    """A whole number with thousands separated.

    >>> count(14772736), count(None)
    ('14,772,736', 'n/a')
    """
    return f"{round(value):,}".replace("-", MINUS) if value is not None and is_number(value) else MISSING


def short(value: int | float | None) -> str:
    """A count in thousands, millions, billions, with at most four significant digits.

    >>> short(40_500_000), short(768_000), short(426_311_680), short(12)
    ('40.5M', '768k', '426.3M', '12')
    """
    if value is None or not is_number(value):
        return MISSING
    for unit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.99995 * unit:
            return f"{value / unit:.4g}{letter}"
    return f"{value:.4g}"


def loss(value: float | None) -> str:
    """A loss, or a spread of losses: four decimals, as published; a value they would show as zero gets two digits.

    >>> loss(1.65449), loss(0.0), loss(0.0000123)
    ('1.6545', '0.0000', '1.2e-05')
    """
    if value is None or not is_number(value):
        return MISSING
    text = f"{value:.1e}" if 0 < abs(value) < 0.00005 else f"{value + 0.0:.4f}"  # no sign where nothing is: −0 + 0 is 0
    return text.replace("-", MINUS, 1) if value < 0 else text


def gap(value: float | None) -> str:
    """A difference of losses: as `loss`, with its sign.

    >>> gap(0.018)
    '+0.0180'
    """
    text = loss(value)
    return f"+{text}" if value is not None and is_number(value) and value > 0 else text


def number(value: float | None, digits: int = 4) -> str:
    """A plain number with a fixed count of decimals.

    >>> number(-0.5), number(2.0, 2)
    ('−0.5000', '2.00')
    """
    return f"{value:.{digits}f}".replace("-", MINUS) if value is not None and is_number(value) else MISSING


def percent(value: float | None) -> str:
    """A signed fraction in per cent, two decimals.

    >>> percent(0.00768), percent(0.0)
    ('+0.77 %', '0.00 %')
    """
    if value is None or not is_number(value):
        return MISSING
    text = f"{100 * value:+.2f} %".replace("-", MINUS)
    return text[1:] if float(f"{100 * value:.2f}") == 0 else text


def probability(value: float | None) -> str:
    """A p value: three decimals, small ones as a bound.

    >>> probability(0.01234), probability(0.0002), probability(1.0)
    ('0.012', '< 0.001', '1')
    """
    if value is None or not is_number(value):
        return MISSING
    if value < 0.001:
        return "< 0.001"
    return "1" if value >= 0.9995 else f"{value:.3f}"


def scientific(value: float | None) -> str:
    """A large amount such as FLOPs: three significant digits.

    >>> scientific(1176576000000)
    '1.18e12'
    """
    if value is None or not is_number(value):
        return MISSING
    return f"{value:.2e}".replace("e+", "e").replace("e0", "e") if value else "0"


def duration(seconds: float | None) -> str:
    """Seconds as people say them.

    >>> duration(8.25), duration(83), duration(5025)
    ('8.2 s', '83 s', '1 h 24 min')
    """
    if seconds is None or not is_number(seconds):
        return MISSING
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def span(seconds: float | None) -> str:
    """`duration`, but days from 100 hours on: what takes so long is not waited for by the hour.

    >>> span(5025), span(400_000), span(3.2e9)
    ('1 h 24 min', '4.6 days', '37,037 days')
    """
    if seconds is None or not is_number(seconds) or seconds < 360_000:
        return duration(seconds)
    return f"{seconds / 86_400:,.1f} days" if seconds < 8_640_000 else f"{seconds / 86_400:,.0f} days"


def size(num_bytes: float | None) -> str:
    """Bytes in binary units, one decimal from KiB on.

    >>> size(512), size(3221225472)
    ('512 B', '3.0 GiB')
    """
    if num_bytes is None or not is_number(num_bytes):
        return MISSING
    value, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"
