"""How hostile input is offered: values no reader expects, and what may come of them."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from equipoise.errors import EquipoiseError

# Every example has files of its own, so that a fixture of the function may be shared; shrinking would only cost time.
HOSTILE = settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)

NASTY_TEXTS = (
    "",
    "\0",
    "a\nb",
    "a\u2028b\u202e",
    "\x1b[31mred",
    "../../etc/passwd",
    "/dev/zero",
    "<script>alert(1)</script>",
    "{{ 7 * 7 }}",
    "__import__('os').system('touch canary')",
    "x" * 5_000,
    "\U0010ffff",
    "nan",
)
NASTY_NUMBERS = (0, -1, 1, 3, 7, 2**31, 2**53 + 1, 2**63, 2**64, 10**30, -(2**63), 0.0, -0.5, 1e-320, 1e308, 1.5)


def nested(depth: int) -> Any:
    """Tables and lists, `depth` deep."""
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"kind": value}
    return value


json_values = st.one_of(
    st.sampled_from(NASTY_TEXTS),
    st.sampled_from(NASTY_NUMBERS),
    st.booleans(),
    st.none(),
    st.integers(),
    st.floats(),
    st.text(max_size=6),
    st.sampled_from([1, 3, 31, 40, 200]).map(nested),
    st.lists(st.sampled_from([*NASTY_NUMBERS, *NASTY_TEXTS]), max_size=3),
    st.dictionaries(st.sampled_from([*NASTY_TEXTS, "kind", "sweep"]), st.sampled_from(NASTY_NUMBERS), max_size=2),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of everything in a nest of tables and lists, the whole aside."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, item in inner for place in [(*path, key), *places(item, (*path, key))]]


@st.composite
def altered(draw: st.DrawFn, value: Any) -> Any:
    """A copy of a nest of plain values with one or two places replaced, taken away, or given a neighbour."""
    value = json.loads(json.dumps(value))
    for _ in range(draw(st.integers(1, 2))):
        known = places(value)
        if not known:
            return value
        *path, last = draw(st.sampled_from(known))
        holder = value
        for key in path:
            holder = holder[key]
        action = draw(st.sampled_from(["replace", "replace", "replace", "drop", "add"]))
        if action == "replace":
            holder[last] = draw(json_values)
        elif action == "drop":
            del holder[last]
        elif isinstance(holder, dict):
            holder[f"{last}x"] = draw(json_values)
    return value


def told(action: Callable[[], object], *branches: type[EquipoiseError]) -> str | None:
    """What `action` is refused with, lines that can be printed, of one of the branches; None when it is accepted.

    Any other exception passes: that is the failure these tests look for.
    """
    try:
        action()
    except branches as error:
        lines = str(error).split("\n")
        for line in lines:
            assert line.isprintable() and 0 < len(line) < 8_000, line[:300]
        return str(error)
    return None


Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call() -> Call:
    """The command line in this process: exit code, stdout and stderr. An unexpected exception passes through."""
    from equipoise.cli.main import call as command

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = command([str(argument) for argument in arguments])
        assert "Traceback" not in err.getvalue()
        return code, out.getvalue(), err.getvalue()

    return run
