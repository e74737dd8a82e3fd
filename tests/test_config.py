"""Reading, overriding, merging, dumping and hashing: of nouns made up here, so that no product noun is in the way."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.config import (
    TAG,
    apply_override,
    canonical,
    check,
    config,
    differences,
    digest,
    dump,
    load,
    merge,
    read_toml,
)
from equipoise.errors import ConfigError


@config
class Wheel:
    """A tagged member."""

    kind: Literal["wheel"] = "wheel"
    radius: float

    def __post_init__(self) -> None:
        check(self, ("radius", self.radius > 0, "above 0"))


@config
class Wing:
    """Another one."""

    kind: Literal["wing"] = "wing"
    span: int
    ribs: int = 2

    def __post_init__(self) -> None:
        check(self, ("span", self.span >= 1, "at least 1"), ("ribs", self.ribs % 2 == 0, "an even number"))


@config
class Colour:
    """A member of a plain union."""

    red: float


@config
class Machine:
    """One field of every type a study uses."""

    name: str
    part: Annotated[Wheel | Wing, TAG]
    size: int = 1
    fast: bool = False
    mode: Literal["slow", "quick"] = "slow"
    paint: int | Colour = 0
    pair: tuple[float, float] = (1.0, 2.0)
    notes: tuple[str, ...] = ()
    owner: str | tuple[str, ...] | None = None
    spare: dict[str, Colour] | None = None


WHOLE: dict[str, Any] = {"name": "m", "part": {"kind": "wheel", "radius": 0.5}}


def faults(**changes: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(Machine, {**WHOLE, **changes})
    assert caught.value.exit_code == 2
    return str(caught.value).splitlines()


# ------------------------------------------------------------------------------------------------ loading


def test_loads_every_type() -> None:
    machine = load(
        Machine,
        {
            **WHOLE,
            "part": {"kind": "wing", "span": 3},
            "fast": True,
            "mode": "quick",
            "paint": {"red": 1},
            "pair": [0, 0.5],
            "notes": ["a"],
            "owner": ["x", "y"],
            "spare": {"z": {"red": 0.25}},
        },
    )
    assert machine == Machine(
        name="m",
        part=Wing(span=3),
        fast=True,
        mode="quick",
        paint=Colour(red=1.0),
        pair=(0.0, 0.5),
        notes=("a",),
        owner=("x", "y"),
        spare={"z": Colour(red=0.25)},
    )
    assert isinstance(machine.pair[0], float)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"size": "a"}, 'size: "a" is not accepted; expected a whole number'),
        ({"size": 1.5}, "size: 1.5 is not accepted; expected a whole number"),
        ({"size": True}, "size: true is not accepted; expected a whole number"),
        ({"name": 3}, "name: 3 is not accepted; expected a text"),
        ({"fast": 1}, "fast: 1 is not accepted; expected true or false"),
        ({"mode": "quik"}, "mode: \"quik\" is not accepted; expected one of 'slow', 'quick'; did you mean 'quick'?"),
        ({"mode": 3}, "mode: 3 is not accepted; expected one of 'slow', 'quick'"),
        ({"pair": 1.0}, "pair: 1.0 is not accepted; expected a list of 2 numbers"),
        ({"pair": [1.0]}, "pair: [1.0] is not accepted; expected a list of 2 numbers"),
        ({"pair": [1, 2, 3]}, "pair: [1, 2, 3] is not accepted; expected a list of 2 numbers"),
        ({"pair": [1, "a"]}, 'pair.1: "a" is not accepted; expected a number'),
        ({"notes": "a"}, 'notes: "a" is not accepted; expected a list of texts'),
        ({"notes": ["a", 2]}, "notes.1: 2 is not accepted; expected a text"),
        ({"owner": 3}, "owner: 3 is not accepted; expected a text or a list of texts"),
        ({"owner": ["a", 3]}, "owner.1: 3 is not accepted; expected a text"),
        ({"owner": {"a": 1}}, 'owner: {"a": 1} is not accepted; expected a text or a list of texts'),
        ({"paint": "red"}, 'paint: "red" is not accepted; expected a whole number or a table'),
        ({"paint": {"red": "x"}}, 'paint.red: "x" is not accepted; expected a number'),
        ({"paint": {}}, "paint.red: missing; expected a number"),
        ({"paint": {"red": 1, "rad": 1}}, "paint.rad: unknown field; did you mean 'red'?"),
        ({"spare": 1}, "spare: 1 is not accepted; expected a table"),
        ({"spare": {"x": {"red": "a"}}}, 'spare.x.red: "a" is not accepted; expected a number'),
        ({"part": 3}, "part: 3 is not accepted; expected a table with kind = one of 'wheel', 'wing'"),
        ({"part": {"radius": 1}}, "part.kind: missing; expected one of 'wheel', 'wing'"),
        (
            {"part": {"kind": "weel"}},
            "part.kind: \"weel\" is not accepted; expected one of 'wheel', 'wing'; did you mean 'wheel'?",
        ),
        ({"part": {"kind": 3}}, "part.kind: 3 is not accepted; expected one of 'wheel', 'wing'"),
        ({"part": {"kind": "wheel"}}, "part.radius: missing; expected a number"),
        ({"part": {"kind": "wheel", "radius": -1}}, "part.radius: -1.0 is not accepted; expected above 0"),
        ({"part": {"kind": "wing", "span": 1, "wing": 1}}, "part.wing: unknown field; known fields: kind, span, ribs"),
        (
            {"part": {"kind": "wing", "span": 1, "radius": 1}},
            "part.radius: unknown field; known fields: kind, span, ribs",
        ),
        ({"sise": 1}, "sise: unknown field; did you mean 'size'?"),
        ({"size": math.nan}, "size: nan is not accepted; expected a finite number"),
        ({"pair": [math.inf, 1]}, "pair.0: inf is not accepted; expected a finite number"),
        ({"notes": ["x" * 90]}, None),
    ],
)
def test_a_fault_says_where_what_and_what_would_do(change: dict[str, Any], expected: str | None) -> None:
    if expected is None:
        load(Machine, {**WHOLE, **change})
    else:
        assert faults(**change) == [expected]


def test_a_date_is_not_accepted() -> None:
    table = read_toml('name = 1979-05-27\npart = { kind = "wheel", radius = 1 }', "x.toml")
    with pytest.raises(ConfigError) as caught:
        load(Machine, table)
    assert str(caught.value) == (
        "name: 1979-05-27 is not accepted; expected a number, a text, true or false, a list or a table"
    )


def test_all_faults_at_once() -> None:
    assert faults(size="a", mode=3, part={"kind": "wing", "span": 0, "ribs": 3}, colour=1) == [
        "part.span: 0 is not accepted; expected at least 1",
        "part.ribs: 3 is not accepted; expected an even number",
        'size: "a" is not accepted; expected a whole number',
        "mode: 3 is not accepted; expected one of 'slow', 'quick'",
        "colour: unknown field; known fields: name, part, size, fast, mode, paint, pair, notes, owner, spare",
    ]


def test_a_table_of_another_type_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^study: 3 is not accepted; expected a table$"):
        load(Machine, 3)


def test_a_long_value_is_cut() -> None:
    (line,) = faults(size="x" * 200)
    assert line == f'size: "{"x" * 76}... is not accepted; expected a whole number'


def test_check_raises_one_line_a_rule() -> None:
    with pytest.raises(ValueError) as caught:
        Wing(span=0, ribs=1)
    assert str(caught.value).splitlines() == [
        "span: 0 is not accepted; expected at least 1",
        "ribs: 1 is not accepted; expected an even number",
    ]


def test_configs_are_frozen_and_keyword_only() -> None:
    with pytest.raises(AttributeError):
        Wheel(radius=1.0).radius = 2.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        Wheel("wheel", 1.0)  # type: ignore[misc]


# ------------------------------------------------------------------------------------------------ TOML, --set, merge


def test_broken_toml_names_file_and_place() -> None:
    with pytest.raises(ConfigError, match=r"^study\.toml: not valid TOML: .*\(at line 2, column 5\)$"):
        read_toml("a = 1\nb = =", "study.toml")


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("a.b=2", {"a": {"b": 2, "c": [1, {"d": 2}]}}),
        (' a . b = "x=y" ', {"a": {"b": "x=y", "c": [1, {"d": 2}]}}),
        ("a.c.1.d=[]", {"a": {"b": 1, "c": [1, {"d": []}]}}),
        ("a.c.0={e = 1.5}", {"a": {"b": 1, "c": [{"e": 1.5}, {"d": 2}]}}),
        ("a.x.y=true", {"a": {"b": 1, "c": [1, {"d": 2}], "x": {"y": True}}}),
        ("z=1_000", {"a": {"b": 1, "c": [1, {"d": 2}]}, "z": 1000}),
    ],
)
def test_an_override_changes_one_place_of_a_copy(assignment: str, expected: dict[str, Any]) -> None:
    table = {"a": {"b": 1, "c": [1, {"d": 2}]}}
    assert apply_override(table, assignment) == expected
    assert table == {"a": {"b": 1, "c": [1, {"d": 2}]}}


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("a.b", "--set a.b: expected path.to.field=value"),
        ("=1", "--set =1: expected path.to.field=value"),
        ("a..b=1", "--set a..b=1: expected path.to.field=value"),
        ("a.b=x y", '--set a.b=x y: the right side is a TOML value; a text is written a.b="x y"'),
        ("a.b=", '--set a.b=: the right side is a TOML value; a text is written a.b=""'),
        ("a.b=1\nc=2", '--set a.b=1\\nc=2: the right side is a TOML value; a text is written a.b="1\\nc=2"'),
        ("a.b.c=1", "--set a.b.c=1: 1 is no table; it has no field 'c'"),
        ("a.c.2=1", "--set a.c.2=1: '2' is no item of a list of 2; items count from 0"),
        ("a.c.x=1", "--set a.c.x=1: 'x' is no item of a list of 2; items count from 0"),
    ],
)
def test_an_override_that_cannot_be_meant(assignment: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        apply_override({"a": {"b": 1, "c": [1, {"d": 2}]}}, assignment)
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("base", "over", "expected"),
    [
        ({"a": 1, "b": 2}, {"b": 3, "c": 4}, {"a": 1, "b": 3, "c": 4}),
        ({"t": {"a": 1, "u": {"b": 2}}}, {"t": {"u": {"c": 3}}}, {"t": {"a": 1, "u": {"b": 2, "c": 3}}}),
        ({"t": {"kind": "x", "a": 1}}, {"t": {"kind": "x", "b": 2}}, {"t": {"kind": "x", "a": 1, "b": 2}}),
        ({"t": {"kind": "x", "a": 1}}, {"t": {"b": 2}}, {"t": {"kind": "x", "a": 1, "b": 2}}),
        ({"t": {"kind": "x", "a": 1}}, {"t": {"kind": "y", "b": 2}}, {"t": {"kind": "y", "b": 2}}),
        ({"t": {"a": 1}}, {"t": {"kind": "y"}}, {"t": {"kind": "y"}}),
        ({"t": {"a": 1}}, {"t": 5}, {"t": 5}),
        ({"t": [1, 2]}, {"t": [3]}, {"t": [3]}),
    ],
)
def test_merge_goes_deep_but_a_new_kind_replaces(base: Any, over: Any, expected: Any) -> None:
    before = json.dumps([base, over])
    assert merge(base, over) == expected
    assert json.dumps([base, over]) == before


# ------------------------------------------------------------------------------------------------ writing

MACHINE = Machine(name="ü", part=Wheel(radius=2.0), owner=("x",), spare={"b": Colour(red=0.1), "a": Colour(red=1e-7)})
CANONICAL = (
    '{"fast":false,"mode":"slow","name":"\\u00fc","notes":[],"owner":["x"],"paint":0,"pair":[1,2],'
    '"part":{"kind":"wheel","radius":2},"size":1,"spare":{"a":{"red":1e-07},"b":{"red":0.1}}}'
)
DIGEST = "8632d8927820cd9996eb19633f606d34ffe3eb533cf1b49671742b1a0a545a69"


def test_dump_is_plain_and_loads_back() -> None:
    plain = dump(MACHINE)
    assert plain["part"] == {"kind": "wheel", "radius": 2.0}
    assert load(Machine, plain) == MACHINE
    assert load(Machine, json.loads(json.dumps(plain))) == MACHINE
    assert load(Machine, json.loads(canonical(MACHINE))) == MACHINE


def test_canonical_text_and_digest_never_change() -> None:
    assert canonical(MACHINE) == CANONICAL
    assert digest(MACHINE) == DIGEST


def test_equal_values_have_equal_digests() -> None:
    assert digest(Colour(red=1)) == digest(Colour(red=1.0)) == digest({"red": 1})
    assert digest(Colour(red=-0.0)) == digest(Colour(red=0.0))
    assert digest({"a": 1, "b": (2,)}) == digest({"b": [2], "a": 1})
    assert digest({"a": True}) != digest({"a": 1})
    assert digest({"a": "1"}) != digest({"a": 1})


def test_the_digest_is_the_same_in_every_process() -> None:
    code = "from equipoise.config import digest; print(digest({'a': 1.5, 'b': {'d': [1, 'x'], 'c': None}}))"
    found = set()
    for seed in ("0", "1"):
        command = [sys.executable, "-c", code]
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parent.parent / "src")}
        found.add(subprocess.run(command, env=environment, capture_output=True, check=True).stdout.decode().strip())
    assert found == {digest({"b": {"c": None, "d": [1, "x"]}, "a": 1.5})}


def test_what_json_cannot_say_has_no_canonical_text() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical({"a": math.nan})


plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(plain_values)
def test_canonical_text_reads_back_to_an_equal_value(value: Any) -> None:
    assert json.loads(canonical(value)) == value


def test_differences_name_the_fields() -> None:
    old = {"a": 1, "b": {"c": [1], "d": 2}, "e": 0}
    new = {"a": 1, "b": {"c": [1, 2], "d": 2}, "f": None}
    assert differences(old, new) == ["b.c: [1] → [1, 2]", "e: 0 → absent", "f: absent → null"]
    assert differences(old, old) == []
