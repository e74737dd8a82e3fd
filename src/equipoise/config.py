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
import tomllib
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, TypeVar, cast, dataclass_transform

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from equipoise.errors import ConfigError
from equipoise.faults import explain, not_accepted, show

T = TypeVar("T")
Table = dict[str, Any]

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


# ------------------------------------------------------------------------------------------------ reading


def read_toml(text: str, source: str) -> Table:
    """Parse TOML; raises ConfigError naming `source`, line and column."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source}: not valid TOML: {error}") from None


def apply_override(table: Table, assignment: str) -> Table:
    """A copy of `table` with one `path=value` override applied; the right side is a TOML value.

    `base.model.num_layers=4`, `corpus.path="x"`, `claims.0.margin=0.01`. Whether such a field exists is found out by
    loading. Raises ConfigError; for a bare word the quoted form is shown.

    >>> apply_override({"a": {"b": 1}}, "a.b=2")
    {'a': {'b': 2}}
    """
    path, equals, right = (part.strip() for part in assignment.partition("="))
    keys = [key.strip() for key in path.split(".")]
    if not equals or not all(keys):
        raise ConfigError(f"--set {assignment}: expected path.to.field=value")
    try:
        parsed = tomllib.loads(f"value = {right}")
    except tomllib.TOMLDecodeError:
        parsed = {}
    if list(parsed) != ["value"]:
        quoted = json.dumps(right, ensure_ascii=False)
        raise ConfigError(f"--set {path}={right}: the right side is a TOML value; a text is written {path}={quoted}")
    return {**table, **_assigned(table, keys, parsed["value"], f"--set {assignment}")}


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
    faults = _not_json(value, ())
    if faults:
        raise ConfigError("\n".join(faults))
    try:
        return cast(T, _adapter(cast(Any, cls)).validate_json(json.dumps(value), strict=True))
    except ValidationError as error:
        lines = [
            line
            for fault in error.errors()
            for line in explain(cls, value, fault["type"], fault["loc"], fault.get("ctx", {}).get("error"))
        ]
        raise ConfigError("\n".join(dict.fromkeys(lines))) from None


@functools.cache
def _adapter(annotation: Any) -> TypeAdapter[Any]:
    """The validator of a type; building the one of a whole study takes a tenth of a second."""
    return TypeAdapter(annotation)


def _not_json(value: Any, path: tuple[str, ...]) -> list[str]:
    """Lines for what TOML can say and a study cannot mean: NaN, infinities, dates."""
    if isinstance(value, dict):
        return [line for key, item in value.items() for line in _not_json(item, (*path, str(key)))]
    if isinstance(value, list):
        return [line for index, item in enumerate(value) for line in _not_json(item, (*path, str(index)))]
    if isinstance(value, float) and not math.isfinite(value):
        return [f"{'.'.join(path)}: {value} is not accepted; expected a finite number"]
    if not isinstance(value, (str, int, float, bool, types.NoneType)):
        return [
            f"{'.'.join(path)}: {value} is not accepted; expected a number, a text, true or false, a list or a table"
        ]
    return []


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
