"""Learning-rate sweeps: one arm of a study file becomes a family of arms that differ in nothing but the rate.

`lr = { sweep = [3e-4, 1e-3] }` on the arm `dense` makes the arms `dense@lr=3e-4` and `dense@lr=1e-3`; `dense` is then
the name of the family, and stands for the member that the selection split chooses. Not for: choosing (`sweeps`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from decimal import Decimal
from typing import Any, Final, TypeGuard

from equipoise.config import Table
from equipoise.faults import not_accepted

MARK: Final = "@lr="
"""What stands between a family's name and the rate; no arm of a study file may hold it."""


def lr_text(lr: float) -> str:
    """A learning rate as the name of an arm holds it: the shortest digits that read back as the same number.

    >>> lr_text(3e-4), lr_text(0.0015), lr_text(1.0)
    ('3e-4', '1.5e-3', '1e0')
    """
    _, digits, exponent = Decimal(repr(float(lr))).normalize().as_tuple()
    assert isinstance(exponent, int)  # a number, as `expand_sweeps` checked
    first, *rest = map(str, digits)
    return f"{first}{'.' if rest else ''}{''.join(rest)}e{exponent + len(rest)}"


def family(arm: str) -> str | None:
    """The family that an arm is a member of; None for an arm that is not swept.

    >>> family("dense@lr=3e-4"), family("dense")
    ('dense', None)
    """
    name, mark, _ = arm.rpartition(MARK)
    return name if mark else None


def families(arms: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Every family with its members, in the order of the arms."""
    found: dict[str, tuple[str, ...]] = {}
    for arm in arms:
        name = family(arm)
        if name is not None:
            found[name] = (*found.get(name, ()), arm)
    return found


def units(arms: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """What a study compares, in the order of the arms: families with their members, other arms with themselves.

    >>> units(["moe", "dense@lr=1e-3", "dense@lr=3e-3"])
    {'moe': ('moe',), 'dense': ('dense@lr=1e-3', 'dense@lr=3e-3')}
    """
    found: dict[str, tuple[str, ...]] = {}
    for arm in arms:
        name = family(arm) or arm
        found[name] = (*found.get(name, ()), arm)
    return found


def standing_for(name: str, arms: Iterable[str]) -> str:
    """An arm with the model that `name` has: the arm itself, or the first member of that family; else `name`."""
    names = list(arms)
    return name if name in names else families(names).get(name, (name,))[0]


def expand_sweeps(arms: dict[str, Table]) -> tuple[dict[str, Table], list[str]]:
    """The arms of a study file with each sweep replaced by its members in place; and a line for each fault.

    A sweep that is at fault leaves its arm as one without a rate, so that its other faults can still be found.
    """
    expanded: dict[str, Table] = {}
    faults: list[str] = []
    for name, arm in arms.items():
        if MARK in name:
            expected = f"a name without {MARK!r}, which is how the members of a sweep are named"
            faults.append(not_accepted("arms", name, expected))
        lr = arm.get("lr")
        if not isinstance(lr, dict):
            expanded[name] = arm
            continue
        rest = {key: value for key, value in arm.items() if key != "lr"}
        rates = lr.get("sweep")
        if set(lr) != {"sweep"}:
            faults.append(not_accepted(f"arms.{name}.lr", lr, "a number or a table { sweep = [...] }"))
            expanded[name] = rest
        elif _is_sweep(rates):
            expanded |= {f"{name}{MARK}{lr_text(rate)}": {**rest, "lr": rate} for rate in rates}
        else:
            faults.append(not_accepted(f"arms.{name}.lr.sweep", rates, "a list of 2 or more different numbers above 0"))
            expanded[name] = rest
    return expanded, faults


def under_written_names(lines: Iterable[str], arms: Iterable[str]) -> list[str]:
    """Lines about `arms`, members of families, as lines about the arm that the study file has, each once."""
    said = list(lines)
    for arm in arms:
        name = family(arm)
        if name is not None:
            said = [line.replace(f"arms.{arm}.", f"arms.{name}.") for line in said]
    return list(dict.fromkeys(said))


def _is_sweep(value: Any) -> TypeGuard[list[float]]:
    """Whether this is what a sweep may go through."""
    if not isinstance(value, list) or not all(
        isinstance(rate, (int, float)) and not isinstance(rate, bool) and math.isfinite(rate) and rate > 0
        for rate in value
    ):
        return False
    return len(value) >= 2 and len({float(rate) for rate in value}) == len(value)
