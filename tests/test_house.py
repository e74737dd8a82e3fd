"""House rules that no linter knows: docstrings, exported names, pins, and what an installed package carries."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import equipoise

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "equipoise"
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
SCRIPTS = sorted(
    path.relative_to(ROOT).as_posix() for folder in ("benchmarks", "docs") for path in (ROOT / folder).glob("*.py")
)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def undocumented(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line number, name) of every public thing without a docstring: module, function, class, method, @config field."""
    if not ast.get_docstring(tree):
        yield 1, "the module"
    for node in tree.body:
        if isinstance(node, Documented) and not node.name.startswith("_"):
            yield from _undocumented_in(node)


def _undocumented_in(node: Documented) -> Iterator[tuple[int, str]]:
    assert not isinstance(node, ast.Module)
    if not ast.get_docstring(node):
        yield node.lineno, node.name
    if not isinstance(node, ast.ClassDef):
        return
    for member in node.body:
        # `forward` is torch's name for "call it": its shapes are said there or in the class.
        if isinstance(member, ast.FunctionDef) and not member.name.startswith("_") and member.name != "forward":
            yield from ((number, f"{node.name}.{name}") for number, name in _undocumented_in(member))
    if any(isinstance(decorator, ast.Name) and decorator.id == "config" for decorator in node.decorator_list):
        for field, following in zip(node.body, [*node.body[1:], None], strict=True):
            # `kind` only tells the members of a union apart; the class docstring says what it is.
            if isinstance(field, ast.AnnAssign) and ast.unparse(field.target) != "kind" and not _is_text(following):
                yield field.lineno, f"{node.name}.{ast.unparse(field.target)}"


def _is_text(node: ast.stmt | None) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


@pytest.mark.parametrize("file", FILES)
def test_public_things_are_documented(file: str) -> None:
    found = list(undocumented(ast.parse((PACKAGE / file).read_text(encoding="utf-8"))))
    assert not found, "\n".join(f"{file}:{number}: no docstring: {name}" for number, name in found)


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("x = 1", "the module"),
        ("'d'\ndef f(): pass", "f"),
        ("'d'\nclass C: x = 1", "C"),
        ("'d'\nclass C:\n  'd'\n  def m(self): pass", "C.m"),
        ("'d'\n@config\nclass C:\n  'd'\n  x: int\n  y: int\n  'd'", "C.x"),
        ("'d'\n@config\nclass C:\n  'd'\n  x: int = 1", "C.x"),
    ],
)
def test_a_missing_docstring_is_found(code: str, name: str) -> None:
    assert [found for _, found in undocumented(ast.parse(code))] == [name]


@pytest.mark.parametrize("file", FILES)
def test_exported_names_exist(file: str) -> None:
    module = importlib.import_module(
        ".".join(["equipoise", *Path(file).with_suffix("").parts]).removesuffix(".__init__")
    )
    exported = getattr(module, "__all__", [])
    assert len(set(exported)) == len(exported)
    assert not [name for name in exported if not hasattr(module, name)]


def _has(module: ModuleType, name: str) -> bool:
    inside = hasattr(module, "__path__") and importlib.util.find_spec(f"{module.__name__}.{name}") is not None
    return hasattr(module, name) or inside


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_scripts_import_exists(script: str) -> None:
    """Benchmarks and what makes pages are run seldom; a name that moved would be noticed late."""
    imports = [
        node
        for node in ast.walk(ast.parse((ROOT / script).read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "equipoise"
    ]
    missing = [
        f"{node.module}.{alias.name}"
        for node in imports
        for alias in node.names
        if not _has(importlib.import_module(str(node.module)), alias.name)
    ]
    assert imports and missing == []


@pytest.mark.parametrize("file", FILES)
def test_no_unfinished_marks(file: str) -> None:
    text = (PACKAGE / file).read_text(encoding="utf-8")
    assert not re.findall(r".*\b(?:TODO|FIXME|XXX|HACK|NotImplementedError)\b.*", text)


def test_every_requirement_is_pinned_within_its_range() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins: dict[str, str] = {}
    for line in lines:
        if line and not line.startswith("#"):
            name, version = re.fullmatch(r"([\w.-]+)==([\w.]+)", line).groups()  # type: ignore[union-attr]
            pins[name.lower().replace("_", "-")] = version
    extras = PROJECT["optional-dependencies"]
    for text in [*PROJECT["dependencies"], *(text for extra in extras.values() for text in extra)]:
        requirement = Requirement(text)
        assert requirement.specifier, f"{text}: a range is missing"
        assert requirement.specifier.contains(pins[requirement.name]), (
            f"{text}: constraints.txt pins {pins[requirement.name]}"
        )


def test_the_change_log_knows_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## \[(?P<version>[^\]]+)\]", text, re.MULTILINE)
    assert newest is not None
    assert Version(newest["version"]) == Version(equipoise.__version__)


def test_the_wheel_carries_everything(tmp_path: Path) -> None:
    """Presets, report templates and the typing mark are package data; the command is an entry point."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (entry_points,) = [name for name in names if name.endswith("entry_points.txt")]
        assert "equipoise = equipoise.cli.main:main" in archive.read(entry_points).decode("utf-8")
    ours = [path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    missing = {f"equipoise/{path.relative_to(PACKAGE).as_posix()}" for path in ours} - names
    assert not missing
    assert wheel.name == f"equipoise-{equipoise.__version__}-py3-none-any.whl"
