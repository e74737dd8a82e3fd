"""What is wrong with a study file, said in one line: path, value, what would be accepted, the nearest name.

Not for: finding the faults. `config` does that with pydantic and hands each finding over as a plain dict.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal

NEAR: Final = 0.65
"""How alike two names have to be for one to be offered for the other (`difflib`'s ratio)."""
_NAMES: Final[dict[Any, tuple[str, str]]] = {
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("a text", "texts"),
    bool: ("true or false", "of true or false"),
}
"""Types as a reader of TOML calls them: one, several."""


def not_accepted(where: str, value: Any, expected: str) -> str:
    """The one form in which a value is refused.

    >>> not_accepted("recipe.seq_len", 0, "at least 1")
    'recipe.seq_len: 0 is not accepted; expected at least 1'
    """
    return f"{where}: {show(value)} is not accepted; expected {expected}"


def show(value: Any) -> str:
    """`value` as JSON, printable, cut at 80 characters.

    >>> show("a\\u2028b"), show(1 << 20_000)
    ('"a\\\\u2028b"', 'a number of 20001 bits')
    """
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (ValueError, RecursionError):  # more digits than Python writes, or deeper than it follows
        text = f"a number of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
    return cut(printable(text))


def printable(text: str) -> str:
    """`text` on one line: characters that cannot be printed are escaped, lone surrogates too."""
    return text if text.isprintable() else "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def cut(text: str, limit: int = 80) -> str:
    """`text`, of which at most `limit` characters are shown."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def reason(error: BaseException) -> str:
    """What an error of another library says, on one line that can be printed; it may quote the file it met.

    >>> reason(ValueError("no header\\n in \\x1b[31mred")), reason(EOFError())
    ('no header in \\\\x1b[31mred', 'EOFError')
    """
    return cut(printable(" ".join(str(error).split())), 300) or type(error).__name__


def did_you_mean(given: Any, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the nearest known name, or nothing when none is near."""
    near = difflib.get_close_matches(str(given), list(known), n=1, cutoff=NEAR)
    return f"; did you mean {near[0]!r}?" if near else ""


def explain(annotation: Any, value: Any, kind: str, loc: Sequence[int | str], error: object) -> list[str]:
    """The lines for one finding of pydantic about `value`, read as `annotation`.

    `kind` and `loc` are the finding's type and location; `error` the exception of a check of our own, whose lines
    begin with the name of a field. Empty for a finding about the branch of a union that was not meant.
    """
    about_key = kind in ("missing", "unexpected_keyword_argument")
    found = _walk(annotation, value, loc[:-1] if about_key else loc)
    if found is None:
        return []
    path, value, annotation = found
    where = ".".join(path)
    if about_key and isinstance(value, dict):
        known = fields(members(annotation)[0])
        key = str(loc[-1])
        if kind == "missing":
            return [f"{'.'.join([*path, key])}: missing; expected {describe(known[key])}"]
        hint = did_you_mean(key, known) or f"; known fields: {', '.join(known)}"
        return [f"{'.'.join([*path, key])}: unknown field{hint}"]
    if kind == "value_error":
        return [".".join([*path, line]) for line in str(error).split("\n")]
    if kind.startswith("union_tag"):
        tags = _tags(annotation)
        one_of = f"one of {_quoted(tags)}"
        if "kind" not in value:
            return [f"{where}.kind: missing; expected {one_of}"]
        return [not_accepted(f"{where}.kind", value["kind"], one_of + did_you_mean(value["kind"], tags))]
    literals = [item for member in members(annotation) for item in _literals(member)]
    near = did_you_mean(value, literals) if isinstance(value, str) else ""
    return [not_accepted(where or "study", value, describe(annotation) + near)]


def _walk(annotation: Any, value: Any, loc: Sequence[int | str]) -> tuple[list[str], Any, Any] | None:
    """Follow a location: path as a study file has it, value there, its annotation; None for a branch not meant.

    Pydantic's locations also name the branch of a union (`int`, `WidthRule`, the `kind`), which no study file does.
    """
    path: list[str] = []
    for step in loc:
        options = members(annotation)
        if len(options) > 1:
            meant = _meant(options, value)
            if meant is None:
                return path, value, annotation
            if not _tags(annotation) and _label(meant) != str(step).partition("[")[0]:
                return None
            annotation = meant
            continue
        (annotation,) = options
        if isinstance(value, dict):
            known = fields(annotation)
            annotation = known[str(step)] if known else typing.get_args(annotation)[1]
            value = value[step]
        else:
            items = typing.get_args(annotation)
            annotation = items[0] if items[-1] is Ellipsis else items[int(step)]
            value = value[step]
        path.append(str(step))
    return path, value, annotation


def as_meant(annotation: Any, value: Any) -> Any:
    """`value` with every unknown field under the nearest name that is free, or left out where none is near.

    For looking further: a table with a misspelt field can be checked as the one that was meant.
    """
    options = members(annotation)
    annotation = _meant(options, value) if len(options) > 1 else options[0]
    if isinstance(value, list) and typing.get_origin(annotation) is tuple:
        item = typing.get_args(annotation)[0]
        return [as_meant(item, one) for one in value]
    if not isinstance(value, dict) or annotation is None:
        return value
    known = fields(annotation)
    if not known:
        inner = typing.get_args(annotation)
        return {key: as_meant(inner[1], one) for key, one in value.items()} if len(inner) == 2 else value
    found = {name: as_meant(known[name], one) for name, one in value.items() if name in known}
    for name, one in value.items():
        near = difflib.get_close_matches(str(name), [k for k in known if k not in found], n=1, cutoff=NEAR)
        if name not in known and near:
            found[near[0]] = as_meant(known[near[0]], one)
    return found


def _meant(options: Sequence[Any], value: Any) -> Any:
    """The member of a union that a table or a list claims to be; None for anything else."""
    if isinstance(value, list):
        return next((option for option in options if typing.get_origin(option) is tuple), None)
    if not isinstance(value, dict):
        return None
    tables = [option for option in options if dataclasses.is_dataclass(option)]
    tagged = [option for option in tables if value.get("kind") in _literals(fields(option).get("kind"))]
    return next(iter(tagged or tables), None)


def _label(member: Any) -> str:
    return str((typing.get_origin(member) or member).__name__)


def members(annotation: Any) -> list[Any]:
    """The types of a union, None aside; of anything else, itself."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return members(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return [
            inner for member in typing.get_args(annotation) for inner in members(member) if inner is not types.NoneType
        ]
    return [annotation]


def fields(annotation: Any) -> dict[str, Any]:
    """Field names of a config class with their types, in order; empty for any other type."""
    if not (isinstance(annotation, type) and dataclasses.is_dataclass(annotation)):
        return {}
    hints = typing.get_type_hints(annotation, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(annotation)}


def _literals(annotation: Any) -> tuple[str, ...]:
    return typing.get_args(annotation) if typing.get_origin(annotation) is Literal else ()


def _tags(annotation: Any) -> list[str]:
    """The kinds of a tagged union; empty for any other type."""
    options = members(annotation)
    return [tag for option in options for tag in _literals(fields(option).get("kind"))] if len(options) > 1 else []


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)


def describe(annotation: Any) -> str:
    """What a value of this type looks like in a study file.

    >>> describe(tuple[float, float]), describe(int | Literal["largest"])
    ('a list of 2 numbers', "a whole number or 'largest'")
    """
    if tags := _tags(annotation):
        return f"a table with kind = one of {_quoted(tags)}"
    return " or ".join(dict.fromkeys(_describe_one(member) for member in members(annotation)))


def _describe_one(member: Any) -> str:
    if member in _NAMES:
        return _NAMES[member][0]
    if literals := _literals(member):
        return _quoted(literals) if len(literals) == 1 else f"one of {_quoted(literals)}"
    if typing.get_origin(member) is tuple:
        items = typing.get_args(member)
        several = _NAMES.get(items[0], ("", "tables"))[1]
        return f"a list of {several}" if items[-1] is Ellipsis else f"a list of {len(items)} {several}"
    return "a table"
