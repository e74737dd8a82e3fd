"""The edge between files and frozen values: `@config`, TOML in, canonical JSON out, digests, `--set`.

The one file that knows pydantic. It knows no noun of the product (those are in `spec/`), only how any of them is read,
checked, dumped and hashed.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import re
import tomllib
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, TypeVar, cast, dataclass_transform

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from equipoise.errors import ConfigError
from equipoise.faults import cut, explain, not_accepted, printable, show

T = TypeVar("T")
Table = dict[str, Any]
MAX_CHARS: Final = 1 << 18
"""Characters of a study file; the longest shipped one has 4,000."""
MAX_NAME: Final = 200
"""Characters of a field's or an arm's name."""
MAX_DEPTH: Final = 32
"""Tables and lists inside each other, and parts of a dotted key; a study has 6."""

TAG: Final = Field(discriminator="kind")
"""Marks a union of configs as told apart by their `kind`: `Annotated[A | B, TAG]`."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
def config(cls: type[T]) -> type[T]:
    """Class decorator: a frozen keyword-only dataclass that refuses unknown fields, NaN and infinities when loaded."""
    cls.__pydantic_config__ = ConfigDict(  # type: ignore[attr-defined]
        extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
    return dataclass(frozen=True, kw_only=True)(cls)


def check(value: object, *rules: tuple[str, bool, str]) -> None:
    """For `__post_init__`: each rule is (field, whether it holds, what is expected); dots reach into a field.

    Raises ValueError with a line `field: value is not accepted; expected …` for every rule that does not hold. `load`
    puts the path of the config in front of each line.
    """
    faults = [
        not_accepted(name, dump(attrgetter(name)(value)), expected) for name, holds, expected in rules if not holds
    ]
    if faults:
        raise ValueError("\n".join(faults))


def at_most(value: object, **limits: int) -> list[tuple[str, bool, str]]:
    """Rules for `check`: each named field is a number of at most its limit."""
    return [(name, getattr(value, name) <= limit, f"at most {limit:,}") for name, limit in limits.items()]


# ------------------------------------------------------------------------------------------------ reading


# The reader takes seconds for a key of thousands of parts: its time grows with their square, and more.
_LONG_KEY: Final = re.compile(
    r"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){%d}""" % MAX_DEPTH  # noqa: UP031 (braces of the pattern)
)


def read_toml(text: str, source: str) -> Table:
    """Parse TOML; raises ConfigError naming `source` and, where there is one, line and column."""
    try:
        return _parsed(text)
    except ValueError as error:
        raise ConfigError(f"{source}: not valid TOML: {printable(str(error))}") from None


def _parsed(text: str) -> Table:
    """The table of a TOML text; ValueError (`tomllib.TOMLDecodeError` is one) says in a line why there is none."""
    if len(text) > MAX_CHARS:
        raise ValueError(f"{len(text):,} characters; expected at most {MAX_CHARS:,}")
    too_deep = f"nested too deeply; expected at most {MAX_DEPTH} levels"
    if _LONG_KEY.search(text):
        raise ValueError(too_deep)
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise ValueError(too_deep) from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:  # Python refuses to read a number of thousands of digits
        raise ValueError("a number of thousands of digits; expected one of at most 64 bits") from None
    if deeper_than(MAX_DEPTH, table):
        raise ValueError(too_deep)
    return table


def deeper_than(levels: int, value: Any) -> bool:
    """Whether tables and lists lie more than `levels` deep inside each other; itself not recursive."""
    layer = [value]
    for _ in range(levels + 1):
        layer = [
            item
            for holder in layer
            if isinstance(holder, (dict, list))
            for item in (holder.values() if isinstance(holder, dict) else holder)
        ]
    return bool(layer)


def apply_override(table: Table, assignment: str) -> Table:
    """A copy of `table` with one `path=value` override applied; the right side is a TOML value.

    `base.model.num_layers=4`, `corpus.path="x"`, `claims.0.margin=0.01`. Whether such a field exists is found out by
    loading. Raises ConfigError; for a bare word the quoted form is shown.

    >>> apply_override({"a": {"b": 1}}, "a.b=2")
    {'a': {'b': 2}}
    """
    path, equals, right = (part.strip() for part in assignment.partition("="))
    keys = [key.strip() for key in path.split(".")]
    where = f"--set {cut(printable(assignment))}"
    if not equals or not all(keys) or len(keys) > MAX_DEPTH or len(max(keys, key=len)) > MAX_NAME:
        raise ConfigError(f"{where}: expected path.to.field=value")
    try:
        parsed = _parsed(f"value = {right}")
    except ValueError:
        parsed = {}
    if list(parsed) != ["value"]:
        said = f"--set {cut(printable(path))}={cut(printable(right))}"
        raise ConfigError(
            f"{said}: the right side is a TOML value; a text is written {cut(printable(path))}={show(right)}"
        )
    return {**table, **_assigned(table, keys, parsed["value"], where)}


def _assigned(holder: Any, keys: Sequence[str], value: Any, where: str) -> Any:
    if not keys:
        return value
    head, rest = keys[0], keys[1:]
    if isinstance(holder, dict):
        return {**holder, head: _assigned(holder.get(head, {}), rest, value, where)}
    if not isinstance(holder, list):
        raise ConfigError(f"{where}: {show(holder)} is no table; it has no field {head!r}")
    if not (head.isdecimal() and int(head) < len(holder)):
        raise ConfigError(f"{where}: {head!r} is no item of a list of {len(holder)}; items count from 0")
    items = list(holder)
    items[int(head)] = _assigned(items[int(head)], rest, value, where)
    return items


def merge(base: Table, over: Table) -> Table:
    """Deep-merge `over` onto `base`; a table whose `kind` changes replaces instead of merging.

    >>> merge({"a": {"kind": "x", "b": 1}, "c": 1}, {"a": {"kind": "y", "d": 2}})
    {'a': {'kind': 'y', 'd': 2}, 'c': 1}
    """
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict) and not _changes_kind(old, value):
            merged[key] = merge(old, value)
        else:
            merged[key] = value
    return merged


def _changes_kind(old: Table, new: Table) -> bool:
    return "kind" in new and new["kind"] != old.get("kind")


def load(cls: type[T], value: Any) -> T:
    """Validate plain values (tables, lists, numbers, texts) as `cls`, a `@config` class or a nest of them.

    Raises ConfigError with every fault, one line each.
    """
    refuse_strange(value)
    try:
        return cast(T, _adapter(cast(Any, cls)).validate_json(json.dumps(value), strict=True))
    except ValidationError as error:
        lines = [
            line
            for fault in error.errors()
            for line in explain(cls, value, fault["type"], fault["loc"], fault.get("ctx", {}).get("error"))
        ]
        raise ConfigError("\n".join(dict.fromkeys(map(printable, lines)))) from None


def misfit(shape: Any, value: Any) -> str | None:
    """The first place where plain values are not what `shape` (a TypedDict, a list, …) says; None when they are.

    >>> misfit(list[int], [1, "x"])
    '1: "x" is not accepted; expected a valid integer'
    """
    try:
        _adapter(shape).validate_python(value, strict=True)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(cut(printable(str(step)), 40) for step in fault["loc"])
        if fault["type"] == "missing":
            return f"{where}: missing"
        return not_accepted(where or "all of it", fault["input"], fault["msg"].removeprefix("Input should be "))
    return None


def prepare(cls: type) -> None:
    """Have what `load` needs for `cls` made, once for this process and those forked from it."""
    _adapter(cast(Any, cls))


@functools.cache
def _adapter(annotation: Any) -> TypeAdapter[Any]:
    """The validator of a type; building the one of a whole study takes a tenth of a second."""
    return TypeAdapter(annotation)


def refuse_strange(value: Any) -> None:
    """ConfigError, one line each, for what TOML or JSON can say and no config can mean.

    NaN, infinities, dates, whole numbers beyond 64 bits, lone surrogates, and tables too deep inside each other.
    """
    if deeper_than(MAX_DEPTH, value):
        raise ConfigError(f"nested too deeply; expected at most {MAX_DEPTH} levels")
    faults = _strange(value, ())
    if faults:
        raise ConfigError("\n".join(faults))


def _strange(value: Any, path: tuple[str, ...]) -> list[str]:
    if isinstance(value, dict):
        wrong = [key for key in map(str, value) if len(key) > MAX_NAME or _has_surrogate(key)]
        if wrong:
            expected = f"a name of at most {MAX_NAME} characters of Unicode text"
            return [f"{'.'.join((*path, show(wrong[0])))}: not accepted; expected {expected}"]
        return [line for key, item in value.items() for line in _strange(item, (*path, printable(str(key))))]
    if isinstance(value, list):
        return [line for index, item in enumerate(value) for line in _strange(item, (*path, str(index)))]
    expected = ""
    if isinstance(value, float):
        expected = "" if math.isfinite(value) else "a finite number"
    elif isinstance(value, int):
        expected = "" if value.bit_length() <= 64 else "a whole number of at most 64 bits"
    elif isinstance(value, str):
        expected = "Unicode text (no lone surrogates)" if _has_surrogate(value) else ""
    elif not isinstance(value, types.NoneType):
        expected = "a number, a text, true or false, a list or a table"
    shown = show(value) if isinstance(value, (int, str)) else str(value)
    return [f"{'.'.join(path) or 'study'}: {shown} is not accepted; expected {expected}"] if expected else []


def _has_surrogate(text: str) -> bool:
    """Whether a text cannot be written as UTF-8: an argument of other bytes, or an escape that names half a pair."""
    return not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text)


# ------------------------------------------------------------------------------------------------ writing


def dump(value: Any) -> Any:
    """A config (or any nest of configs, tuples and mappings) as plain JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: dump(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): dump(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [dump(item) for item in value]
    return value


def canonical(value: Any) -> str:
    """Canonical JSON: sorted keys, no blanks, ASCII, no NaN (ValueError). Equal values give equal text: 1.0 is 1.

    >>> canonical({"b": 1.0, "a": (1, 0.5)})
    '{"a":[1,0.5],"b":1}'
    """
    plain = _whole_as_int(dump(value))
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def _whole_as_int(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _whole_as_int(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole_as_int(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def digest(value: Any) -> str:
    """SHA-256 (hex) of the canonical JSON of `value`."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """One line per field in which two dumped values differ: `path: old → new`."""
    if isinstance(old, dict) and isinstance(new, dict):
        lines: list[str] = []
        for key in sorted({*old, *new}):
            inner = f"{path}.{key}" if path else str(key)
            if key not in old:
                lines.append(f"{inner}: absent → {show(new[key])}")
            elif key not in new:
                lines.append(f"{inner}: {show(old[key])} → absent")
            else:
                lines.extend(differences(old[key], new[key], inner))
        return lines
    return [] if old == new else [f"{path}: {show(old)} → {show(new)}"]
