"""Writes docs/study.md, the reference of the study file, from the docstrings, types, defaults and checks of the spec.

    python docs/study_reference.py        # or: make docs

What a field means and accepts is said once, in `src/equipoise/spec`; this file only knows in which order a reader wants
it. A test compares the page with what this file makes of the spec. Not for: what no field says (docs/concepts.md).
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import itertools
import re
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from equipoise.config import dump
from equipoise.faults import describe, fields, members
from equipoise.spec.run import RunConfig
from equipoise.spec.study import StudySpec

PAGE: Final = Path(__file__).with_name("study.md")
HEAD: Final = """\
# Study file

<!-- Written by docs/study_reference.py from src/equipoise/spec. Change the docstrings there, then: make docs -->

A study is one TOML file. This page lists every table and field of it: what it accepts, what it is when left out, and
what it means. It is made from the source, so it is what this version accepts. Begin with a preset
(`equipoise presets copy quick study.toml`) or with the [tutorial](tutorial.md); what the words mean is in
[concepts](concepts.md).

- **Unknown fields are refused**, and all faults of a file are reported at once, one line each: path, value, what would
  be accepted, the nearest known name.
- **`--set path.to.field=value`** overrides one field on the command line; the right side is a TOML value, so a text
  needs its quotes: `--set 'corpus.path="my-text"'`. Items of a list count from 0: `--set claims.0.margin=0.01`.
- **`[base.model]`** holds what arms have in common. An arm's own fields are laid over it, table by table; a table whose
  `kind` changes replaces the one of the base. The base's value of a width that an arm solves is ignored.
- **A table with a `kind`** has the fields of that kind and no others.

"""
ORDER: Final = {
    "": "The top of the file",
    "corpus": "`[corpus]`",
    "tokenizer": "`[tokenizer]`",
    "recipe": "`[recipe]`",
    "recipe.optim": "`recipe.optim`",
    "recipe.schedule": "`recipe.schedule`",
    "recipe.samples": "`recipe.samples`",
    "arms": "`[arms.NAME]`",
    "arms.match": "`match`",
    "arms.budget": "`budget` of an arm",
    "arms.model": "`[base.model]`, `[arms.NAME.model]`",
    "arms.model.ffn": "`ffn`",
    "arms.model.ffn.balance": "`balance`",
    "arms.model.ffn.d_ff": "A width as a rule",
    "claims": "`[[claims]]`",
    "claims.than": "`than` of a claim",
    "published": "`[[published]]`",
}
"""Every table of a study file in reading order, with its heading; widths of experts take the same rule as `d_ff`."""
ALSO: Final = {
    "arms": """
        In a study file `lr` may also be a sweep, `lr = { sweep = [3e-4, 1e-3] }`. It makes one arm a rate, named
        `NAME@lr=3e-4` and so on, all else equal; `NAME` then stands for the member that the selection split chooses.
        """,
    "arms.model.ffn": """
        Beside `kind = "moe"` a study file may say `fine_grained = n`, a whole number of at least 1: every expert is cut
        into n (DeepSeekMoE, arXiv 2401.06066), so `num_experts`, `top_k` and `num_shared_experts` are multiplied by n
        and `d_expert`, which has to be written as a number, is divided by it, into multiples of 8.
        """,
    "claims": """
        A claim is fixed before the first run. How each kind is tested is in
        [design.md](design.md#4-vocabulary-and-definitions), what a routing `metric` measures in
        [concepts](concepts.md#routing-in-numbers). `budget` is one of the study's.
        """,
}
"""What a study file may say beyond the fields, by table: it is rewritten into them before they are read."""
TAIL: Final = """\
## What a run is made of

Arms, seeds and budgets are multiplied out into runs. `config.json` in the directory of a run holds all of it, with
every width solved; its digest decides whether a run on disk is the one asked for. Nobody writes it by hand.

"""


def reference() -> str:
    """The whole page."""
    tables = dict(_tables("", StudySpec))
    assert set(ORDER) == set(tables), f"tables without a place: {set(tables) ^ set(ORDER)}"
    parts = [HEAD]
    places = {cls: anchor(heading) for path, heading in ORDER.items() for cls in tables[path]}
    for path, heading in ORDER.items():
        classes = tables[path]
        parts.append(f"{'###' if '.' in path else '##'} {heading}\n\n")
        parts += [_section(cls, places, several=len(classes) > 1) for cls in classes]
        if path in ALSO:
            parts.append(_filled(ALSO[path]))
    return "".join([*parts, TAIL, _section(RunConfig, places, several=False)]).rstrip("\n") + "\n"


def _tables(path: str, annotation: Any) -> Iterator[tuple[str, list[Any]]]:
    """(path, classes) of every table that can stand at or below `path`; of equal ones the first."""
    classes = [found for member in members(annotation) for found in _classes(member)]
    if not classes:
        return
    yield path, classes
    seen: set[Any] = set()
    for cls in classes:
        for name, inner in fields(cls).items():
            below = tuple(found for member in members(inner) for found in _classes(member))
            if below and below not in seen:
                seen.add(below)
                yield from _tables(f"{path}.{name}".strip("."), inner)


def _classes(member: Any) -> list[Any]:
    """The configs that a type holds: itself, or as items of a list or values of a mapping."""
    if dataclasses.is_dataclass(member):
        return [member]
    inner = [arg for arg in typing.get_args(member) if arg not in (str, Ellipsis)]
    held = typing.get_origin(member) in (tuple, dict)
    return [found for arg in inner for part in members(arg) for found in _classes(part)] if held else []


def _section(cls: Any, places: dict[Any, str], *, several: bool) -> str:
    kind = getattr(cls, "kind", None) if several else None
    text = _filled((f'**`kind = "{kind}"`**: ' if kind else "") + _sentence(cls.__doc__))
    rows = [row for row in _rows(cls, places) if not row.startswith("| `kind` ")]
    if not rows:
        return text
    return text + "| field | accepts | left out | what |\n|---|---|---|---|\n" + "\n".join(rows) + "\n\n"


def _rows(cls: Any, places: dict[Any, str]) -> Iterator[str]:
    docs, rules = _docstrings(cls), _rules(cls)
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    for name, annotation in fields(cls).items():
        accepted = "; ".join([_type(annotation, places), *rules.get(name, [])])
        cells = [f"`{name}`", accepted, _default(defaults[name]), docs[name]]
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _type(annotation: Any, places: dict[Any, str]) -> str:
    """What a value looks like, with a link where it is a table of its own or a list of them."""
    text = re.sub(r"a table with kind = .*", "a table", describe(annotation))
    held = [cls for member in members(annotation) for cls in _classes(member)]
    if held:
        text = re.sub(r"a table|a list of tables", rf"[\g<0>](#{places[held[0]]})", text)
    return re.sub(r"'([\w.]+)'", r'`"\1"`', text)


def _default(value: Any) -> str:
    if value is dataclasses.MISSING:
        return "required"
    if dataclasses.is_dataclass(value):
        return f'`kind = "{value.kind}"`' if hasattr(value, "kind") else "its defaults"
    return "–" if value is None else f"`{_toml(dump(value))}`"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return f'"{value}"' if isinstance(value, str) else repr(value).replace("e-0", "e-")


def anchor(heading: str) -> str:
    """The name under which a heading is linked to: lower case, blanks as hyphens, punctuation dropped.

    >>> anchor("`[base.model]`, a width")
    'basemodel-a-width'
    """
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


# ------------------------------------------------------------------------------------------------ reading the source


def _class_node(cls: Any) -> ast.ClassDef:
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(node, ast.ClassDef)
    return node


def _docstrings(cls: Any) -> dict[str, str]:
    """The text under each field; of `kind` nothing, the class says what it is."""
    body = _class_node(cls).body
    found = {"kind": ""}
    for field, text in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            found[ast.unparse(field.target)] = _sentence(str(text.value.value))
    return found


def _rules(cls: Any) -> dict[str, list[str]]:
    """What the checks of a class expect of each field, without values that only a study has."""
    names = vars(importlib.import_module(cls.__module__))
    post_init = [node for node in _class_node(cls).body if isinstance(node, ast.FunctionDef) and "post" in node.name]
    rules: dict[str, list[str]] = {}
    for node in (inner for function in post_init for inner in ast.walk(function)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "check":
            for field, text in (found for rule in node.args[1:] for found in _read_rule(rule, names, cls.__name__)):
                rules.setdefault(field, []).append(text)
    return rules


def _read_rule(rule: ast.expr, names: dict[str, Any], where: str) -> Iterator[tuple[str, str]]:
    """Field and text of a rule that is written out, or of each limit of `*at_most(self, field=LIMIT)`."""
    if isinstance(rule, ast.Tuple):
        field, _, expected = rule.elts
        text = _expected(expected, names)
        if isinstance(field, ast.Constant) and text:
            yield str(field.value), text
        return
    assert isinstance(rule, ast.Starred), f"{where}: a rule is written out, for it is read from here"
    if isinstance(rule.value, ast.GeneratorExp):  # about fields of other tables
        return
    assert isinstance(rule.value, ast.Call), f"{where}: rules are written out, or limits given to at_most"
    assert ast.unparse(rule.value.func) == "at_most", f"{where}: rules are written out, or limits given to at_most"
    for limit in rule.value.keywords:
        yield str(limit.arg), f"at most {names[ast.unparse(limit.value)]:,}"


def _expected(node: ast.expr, names: dict[str, Any]) -> str:
    """The text of a rule: constants of the module put in, `= {value}` and `{count} things` left out; "" where a rule
    is computed or ends in a value, for then its sentence is not whole without it (the docstring says it)."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if not isinstance(node, ast.JoinedStr):
        return ""
    parts = []
    for part in node.values:
        if isinstance(part, ast.Constant):
            parts.append(str(part.value))
        else:
            assert isinstance(part, ast.FormattedValue)
            name = ast.unparse(part.value)
            parts.append(str(names[name]) if name in names else "{}")
    text = re.sub(r" = \{\}", "", "".join(parts))
    return "" if text.endswith("{}") or " {}," in text else text.replace("{} ", "")


def _sentence(text: str | None) -> str:
    return " ".join((text or "").split())


def _filled(text: str) -> str:
    return textwrap.fill(_sentence(text), 118, break_long_words=False, break_on_hyphens=False) + "\n\n"


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
    print(f"{PAGE.name} written")
