"""Standard output and standard error that take whatever a command writes, wherever they lead.

A reader who went away (`| head`) has seen enough: the rest goes nowhere, quietly, and the command ends with the exit
code it would have had. A character that the encoding cannot carry is written as one that looks like it. An output that
cannot be written, as on a full disk, is an error in one line.

Not for: what is said, or how it is laid out (`console`).
"""

from __future__ import annotations

import codecs
import errno
import os
import sys
from collections.abc import Callable
from typing import Any, Final, TextIO, cast

from equipoise.errors import EquipoiseError, ResourceError

LOOKALIKES: Final = {
    "\u2014": "-",
    "\u2013": "-",
    "\u2212": "-",
    "\u2011": "-",
    "×": "x",
    "÷": "/",
    "±": "+-",
    "≤": "<=",
    "≥": ">=",
    "→": "->",
    "…": "...",
    "·": "|",
    "α": "alpha",
    "ε": "epsilon",
    "\u2018": "'",
    "\u2019": "'",
    "\u201c": '"',
    "\u201d": '"',
}
"""What stands for a character of ours where the encoding lacks it; any other is written as its escape."""


class Output:
    """A text stream that forgives its reader; everything but writing is the stream's own."""

    def __init__(self, stream: TextIO, name: str, *, strict: bool) -> None:
        """`strict`: a disk that is full, or any other failure but a reader who went away, is an error (ResourceError
        or EquipoiseError, naming `name`); otherwise it is passed over, because nobody can be told.
        """
        self._stream = stream
        self._name = name
        self._strict = strict

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._stream, attribute)

    def write(self, text: str) -> int:
        """Write `text`; returns its length."""
        self._guarded(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Hand over what was written."""
        self._guarded(self._stream.flush)

    def _guarded(self, act: Callable[[], object]) -> None:
        try:
            act()
        except OSError as error:
            self._discard()
            if isinstance(error, BrokenPipeError) or not self._strict:
                return
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            text = f"{self._name}: cannot be written ({error.strerror or error})"
            raise (ResourceError if full else EquipoiseError)(text) from None

    def _discard(self) -> None:
        """Let everything from here on go nowhere, also what is still waiting to be flushed when the process ends."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


def prepare_outputs() -> None:
    """Put an `Output` in the place of sys.stdout and sys.stderr; called once, when the command starts."""
    codecs.register_error("equipoise", _lookalikes)
    for name, strict in (("stdout", True), ("stderr", False)):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever started the command
            stream = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115  # for as long as the process lives
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="equipoise")
        setattr(sys, name, cast(TextIO, Output(stream, f"standard {'output' if strict else 'error'}", strict=strict)))


def is_unicode(stream: TextIO) -> bool:
    """Whether `stream` carries every character as it is."""
    return (getattr(stream, "encoding", None) or "utf-8").lower().replace("_", "-").startswith("utf")


def _lookalikes(error: UnicodeError) -> tuple[str, int]:
    """The error handler of an encoding that lacks a character."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(LOOKALIKES.get(c) or c.encode("ascii", "backslashreplace").decode() for c in lacking), error.end
