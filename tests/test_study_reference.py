"""docs/study.md is what its script makes of the spec, names every field, and says the bounds that loading enforces."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import pkgutil
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import equipoise.spec
from equipoise.config import dump, load
from equipoise.errors import ConfigError
from equipoise.faults import fields, members
from equipoise.spec.claims import EquivalentClaim, LowerClaim, RoutingClaim
from equipoise.spec.data import BpeTokenizer, GrammarCorpus
from equipoise.spec.model import BalanceBias, BalanceLoss, DenseFFN, ModelConfig, MoEFFN, WidthRule
from equipoise.spec.published import Published
from equipoise.spec.recipe import WSD, Cosine, Optim, Recipe, Samples
from equipoise.spec.study import Arm, Match

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "study.md").read_text(encoding="utf-8")


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("study_reference", ROOT / "docs" / "study_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_spec_says() -> None:
    assert script().reference() == PAGE, "docs/study.md is out of date: make docs"


def configs() -> list[Any]:
    """Every class of the spec that a file can hold."""
    modules = [
        importlib.import_module(m.name) for m in pkgutil.iter_modules(equipoise.spec.__path__, "equipoise.spec.")
    ]
    found = {value for module in modules for value in vars(module).values() if hasattr(value, "__pydantic_config__")}
    return sorted(found, key=lambda cls: cls.__name__)


def rows_of(cls: Any) -> dict[str, str]:
    """The rows of the table under the sentence that a class says of itself."""
    sentence = " ".join(cls.__doc__.split())
    flat = re.sub(r"(?<=[^|\n])\n(?=[^|\n#])", " ", PAGE)  # sentences are wrapped, tables are not
    table = flat.split(sentence, 1)[1].lstrip("\n")
    lines = table.splitlines()[2:] if table.startswith("| field |") else []
    end = next((number for number, line in enumerate(lines) if not line.startswith("| ")), len(lines))
    return {line.split("`")[1]: line for line in lines[:end]}


@pytest.mark.parametrize("cls", configs(), ids=lambda cls: cls.__name__)
def test_every_field_has_a_row_that_says_something(cls: Any) -> None:
    rows = rows_of(cls)
    assert list(rows) == [name for name in fields(cls) if name != "kind"]
    for name, row in rows.items():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
        assert len(cells) == 4, row
        assert all(cells), f"{cls.__name__}.{name}"


EXAMPLES = [
    GrammarCorpus(),
    BpeTokenizer(vocab_size=512),
    Optim(lr=1.0),
    Cosine(),
    WSD(warmup_tokens=1),
    Samples(),
    Recipe(seq_len=8, batch_tokens=64, optim=Optim(lr=1.0)),
    WidthRule(ratio=4, multiple_of=8),
    BalanceLoss(coef=0.01),
    BalanceBias(),
    MoEFFN(num_experts=4, top_k=2, d_expert=8),
    ModelConfig(num_layers=1, num_heads=1, d_model=8, ffn=DenseFFN(d_ff=8)),
    Match(to="a", on="total_params", adjust="d_model"),
    Arm(model=ModelConfig(num_layers=1, num_heads=1, d_model=8, ffn=DenseFFN(d_ff=8)), lr=1.0),
    LowerClaim(id="a", left="a", right="b", equivalence_margin=0.1),
    EquivalentClaim(id="a", left="a", right="b", equivalence_margin=0.1),
    RoutingClaim(id="a", arm="a", metric="log_z", direction="above", threshold=1.0),
    Published(arm="a", mean=1.0, sd=0.1, source="a paper"),
]
FREE = {
    ("RoutingClaim", "threshold"),
    ("RoutingClaim", "budget"),
    ("LowerClaim", "budget"),
    ("EquivalentClaim", "budget"),
    ("LargerClaim", "budget"),
    ("Published", "budget"),
    ("Published", "mean"),
}
"""Numbers of any size, and budgets, which only a whole study can refuse."""
SAID_IN_WORDS = {("DenseFFN", "d_ff"), ("MoEFFN", "d_expert")}
"""Checked by the model that holds them."""


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda value: type(value).__name__)
def test_numbers_far_below_are_refused_with_the_bound_that_the_page_states(example: Any) -> None:
    """The page reads checks from their source; here the same checks are met by loading."""
    cls, rows = type(example), rows_of(type(example))
    tried = 0
    for name, annotation in fields(cls).items():
        if not {int, float} & set(members(annotation)) or (cls.__name__, name) in FREE | SAID_IN_WORDS:
            continue
        tried += 1
        with pytest.raises(ConfigError) as raised:
            load(cls, {**dump(example), name: -(10**9) - 1})
        first = next(line for line in str(raised.value).splitlines() if line.startswith(f"{name}: "))
        bound = re.sub(r" = [\d.]+", "", first.partition("; expected ")[2])
        assert bound, first
        assert bound in rows[name], f"{cls.__name__}.{name}: {bound!r} is not in {rows[name]!r}"
    assert tried


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda value: type(value).__name__)
def test_numbers_one_above_the_limit_that_the_page_states_are_refused(example: Any) -> None:
    cls = type(example)
    for name, row in rows_of(cls).items():
        limit = re.search(r"at most ([\d,]+)", row)
        if limit and {int, float} & set(members(fields(cls)[name])):
            most = int(limit[1].replace(",", ""))
            with pytest.raises(
                ConfigError, match=rf"(?m)^{name}: {most + 1}(\.0)? is not accepted; expected {limit[0]}"
            ):
                load(cls, {**dump(example), name: most + 1})


def test_limits_are_on_the_page() -> None:
    assert "; at least 1; at most 1,024 |" in rows_of(ModelConfig)["num_layers"]
    assert "; at most 10,000 |" in rows_of(Recipe)["num_evals"]


def test_every_class_with_numbers_is_tried() -> None:
    tried = {type(example).__name__ for example in EXAMPLES}
    left = {
        cls.__name__
        for cls in configs()
        if cls.__name__ not in tried
        and any({int, float} & set(members(annotation)) for annotation in fields(cls).values())
    }
    assert left == {
        "StudySpec",
        "DenseFFN",
        "LargerClaim",
        "RunConfig",
    }  # whose bounds are sentences, or made by others


def test_defaults_are_those_of_the_classes() -> None:
    for cls in configs():
        rows = rows_of(cls)
        for field in dataclasses.fields(cls):
            if field.name in rows:
                said = re.split(r"(?<!\\)\|", rows[field.name])[3].strip()
                assert (said == "required") == (field.default is dataclasses.MISSING), rows[field.name]
                if isinstance(field.default, int | float) and not isinstance(field.default, bool):
                    assert float(said.strip("`")) == field.default
