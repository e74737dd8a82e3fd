"""What the documents tell people to type exists: make targets, commands, options, study files, links, exit codes."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from equipoise import errors
from equipoise.cli.main import app
from equipoise.spec.study import parse_study

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(text: str, *languages: str) -> list[str]:
    """Contents of the fenced blocks of these languages."""
    return [
        m["body"]
        for m in re.finditer(r"^```(?P<name>\w+)\n(?P<body>.*?)^```$", text, re.M | re.S)
        if m["name"] in languages
    ]


def commands(text: str) -> Iterator[list[str]]:
    """Every command of a document as words: all lines of sh blocks, in console blocks what follows `$ `."""
    for name in ("sh", "console"):
        for block in blocks(text, name):
            for line in block.replace("\\\n", " ").splitlines():
                if name == "sh" or line.startswith("$ "):
                    words = shlex.split(line.removeprefix("$ "), comments=True)
                    if words:
                        yield words


def all_commands(program: str) -> list[list[str]]:
    found = [words for path in DOCUMENTS for words in commands(path.read_text(encoding="utf-8"))]
    return [words[1:] for words in found if words[0] == program]


def complaint(command: Any, words: list[str]) -> str:
    """Why this command line is refused by the command tree; empty if it is not."""
    subcommands = getattr(command, "commands", None)
    if subcommands is not None and words and not words[0].startswith("-"):
        if words[0] not in subcommands:
            return f"no command {words[0]!r}"
        return complaint(subcommands[words[0]], words[1:])
    options = {name: p for p in command.params for name in [*p.opts, *p.secondary_opts] if name.startswith("-")}
    options.setdefault("--help", None)
    places = [p for p in command.params if not any(name.startswith("-") for name in p.opts)]
    given, rest = 0, list(words)
    while rest:
        word = rest.pop(0)
        if word.startswith("-"):
            name, equals, _ = word.partition("=")
            if name not in options:
                return f"no option {name!r}"
            option = options[name]
            if option is not None and not (option.is_flag or option.count or equals):
                if not rest:
                    return f"{name} without its value"
                rest.pop(0)
        else:
            given += 1
    if any(place.nargs == -1 for place in places):
        return ""
    required = sum(place.required for place in places)
    return "" if required <= given <= len(places) or "--help" in words else f"{given} arguments"


def command_tree() -> Any:
    return typer.main.get_command(app)


def test_equipoise_commands_exist() -> None:
    tree = command_tree()
    lines = all_commands("equipoise")
    assert len(lines) > 5
    wrong = [f"equipoise {' '.join(words)}: {why}" for words in lines if (why := complaint(tree, words))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "words", [["fly"], ["run"], ["run", "quick", "--wings"], ["run", "quick", "--jobs"], ["run", "a", "b"]]
)
def test_a_wrong_command_is_noticed(words: list[str]) -> None:
    assert complaint(command_tree(), words)


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.M)
    variables = set(re.findall(r"^([A-Z]+) \?=", makefile, re.M))
    calls = all_commands("make")
    assert ["demo"] in calls
    assert ["test"] in calls
    for words in calls:
        for word in words:
            assert word in phony.split() or word.partition("=")[0] in variables, f"make {' '.join(words)}"
    assert set(phony.split()) == set(re.findall(r"^([a-z-]+):", makefile, re.M))


def test_study_files_are_valid() -> None:
    studies = [
        body for path in DOCUMENTS for body in blocks(path.read_text(encoding="utf-8"), "toml") if "[corpus]" in body
    ]
    assert studies
    for body in studies:
        assert parse_study(tomllib.loads(body)).arms


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
        assert "://" in target or (path.parent / target).exists(), target


def test_the_readme_lists_every_exit_code() -> None:
    rows = re.findall(r"^\| (\d+) \|", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)
    branches = [errors.EquipoiseError, *errors.EquipoiseError.__subclasses__()]
    signals = {errors.Interrupted("", number).exit_code for number in (2, 15)}
    assert {int(code) for code in rows} == {0, *signals, *(branch.exit_code for branch in branches)}
    assert len(set(rows)) == len(rows)
