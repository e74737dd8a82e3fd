"""The arms of a study file while they are still plain tables: laid over `base`, the solved width left open, finer
experts (`fine_grained`) written out.

Not for: checking values (that is `config.load` of the nouns).
"""

from __future__ import annotations

import re
import typing
from collections.abc import Sequence
from typing import Any

from equipoise.config import Table, merge
from equipoise.faults import not_accepted
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
        whole = _without(whole, ["model", *adjusted.split(".")]) if adjusted else whole
        expanded[name], found = _fine_grained(whole, f"arms.{name}.model.ffn")
        faults += found
    return expanded, faults


def _fine_grained(arm: Table, path: str) -> tuple[Table, list[str]]:
    """`arm` with the routed layer's `fine_grained = n` written out, and a line if that cannot be done.

    Every expert is cut into n (DeepSeekMoE, arXiv 2401.06066 section 3.1): num_experts, top_k and num_shared_experts
    times n, d_expert ÷ n, so that but for the router neither active parameters nor FLOPs change. What is missing or no
    number stays as it is, to be found by loading.
    """
    ffn = arm["model"].get("ffn") if isinstance(arm["model"], dict) else None
    if not isinstance(ffn, dict) or ffn.get("kind") != "moe" or "fine_grained" not in ffn:
        return arm, []
    n, width = ffn["fine_grained"], ffn.get("d_expert")
    finer = {key: value for key, value in ffn.items() if key != "fine_grained"}
    written = {**arm, "model": {**arm["model"], "ffn": finer}}
    if not _is_whole(n) or n < 1:
        return written, [not_accepted(f"{path}.fine_grained", n, "a whole number, 1 or more")]
    if not _is_whole(width):
        return written, [not_accepted(f"{path}.fine_grained", n, "d_expert beside it as a number: it is divided")]
    if width % (8 * n):
        expected = f"a number that divides d_expert = {width} into multiples of 8"
        return written, [not_accepted(f"{path}.fine_grained", n, expected)]
    counts = {key: ffn[key] * n for key in ("num_experts", "top_k", "num_shared_experts") if _is_whole(ffn.get(key))}
    finer |= {**counts, "d_expert": width // n}
    return written, []


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def said_once(lines: Sequence[str], base: Table, arms: dict[str, Table]) -> list[str]:
    """A fault that comes from `base` shows up in every arm: say it once, where it is written or is missing."""
    named: list[str] = []
    for line in lines:
        found = re.match(r"arms\.(?P<arm>.+?)\.(?P<path>model\.[\w.]+)", line)
        if found:
            path, rest = found["path"], line[found.end() :]
            inherited = _has(base, path) and not _has(arms.get(found["arm"], {}), path)
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
