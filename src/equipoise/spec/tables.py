"""The arms of a study file while they are still plain tables: laid over `base`, and with the solved width left open.

Not for: checking values (that is `config.load` of the nouns).
"""

from __future__ import annotations

import re
import typing
from collections.abc import Sequence
from typing import Any

from equipoise.config import Table, merge
from equipoise.spec.model import Width


def expand_arms(base: Table, arms: dict[str, Table]) -> tuple[dict[str, Table], list[str]]:
    """Every arm laid over `base`, without the width it solves; and a line for each field an arm may not set.

    The base's value of an adjusted width is ignored; the arm itself may not set one, although a rule that follows
    `d_model` may stand beside `adjust = "d_model"`.
    """
    faults = [f"base.{key}: unknown field; known fields: model" for key in base if key != "model"]
    expanded: dict[str, Table] = {}
    for name, arm in arms.items():
        whole = merge({"model": base.get("model", {})}, arm)
        adjusted = _adjusted(arm)
        if adjusted and _has(arm, f"model.{adjusted}"):
            faults.append(
                f"arms.{name}.model.{adjusted}: set beside match.adjust = {adjusted!r}; it is solved, leave it out"
            )
        if _has(whole, "model.vocab_size"):
            faults.append(
                f"arms.{name}.model.vocab_size: not set here; it is what the tokenizer has, tokenizer.vocab_size"
            )
            whole = _without(whole, ["model", "vocab_size"])
        expanded[name] = _without(whole, ["model", *adjusted.split(".")]) if adjusted else whole
    return expanded, faults


def said_once(lines: Sequence[str], base: Table, arms: dict[str, Table]) -> list[str]:
    """A fault that comes from `base` shows up in every arm: say it once, where it is written or is missing."""
    named: list[str] = []
    for line in lines:
        found = re.match(r"arms\.(?P<arm>.+?)\.(?P<path>model\.[\w.]+)", line)
        if found:
            path, rest = found["path"], line[found.end() :]
            inherited = _has(base, path) and not _has(arms[found["arm"]], path)
            everywhere = len(arms) > 1 and all(f"arms.{arm}.{path}{rest}" in lines for arm in arms)
            line = f"base.{path}{rest}" if inherited or everywhere else line
        named.append(line)
    return list(dict.fromkeys(named))


def _adjusted(arm: Table) -> str:
    match = arm.get("match")
    adjust = match.get("adjust") if isinstance(match, dict) else None
    return adjust if isinstance(adjust, str) and adjust in typing.get_args(Width) else ""


def _has(table: Any, path: str) -> bool:
    for key in path.split("."):
        if not isinstance(table, dict) or key not in table:
            return False
        table = table[key]
    return True


def _without(table: Any, keys: Sequence[str]) -> Any:
    """A copy of `table` without the field at the end of `keys`; the same where there is none."""
    head, rest = keys[0], keys[1:]
    if not isinstance(table, dict) or head not in table:
        return table
    if rest:
        return {**table, head: _without(table[head], rest)}
    return {key: value for key, value in table.items() if key != head}
