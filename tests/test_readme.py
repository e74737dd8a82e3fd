"""What the documents tell people to type exists and does what they say: make targets, commands, options, study files,
code, links, exit codes. The pages with tests of their own: study.md (test_study_reference), extending.md
(test_extending), cases.md (test_cases), the table of coefficients in concepts.md (model/test_balance_conventions).
"""

from __future__ import annotations

import doctest
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer.main

import equipoise
from equipoise import errors
from equipoise.cli.main import app
from equipoise.config import merge
from equipoise.errors import ConfigError
from equipoise.routing import diagnose
from equipoise.spec.study import load_study_table, parse_study

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
                    words = words[: words.index("|")] if "|" in words else words
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


def test_parts_of_study_files_have_known_fields() -> None:
    """Parts are laid over `quick`; arms and budgets they speak of may be missing there, fields and kinds may not."""
    quick, _ = load_study_table("quick")
    parts = [(path, body) for path in DOCUMENTS for body in blocks(path.read_text(encoding="utf-8"), "toml")]
    assert len(parts) > 3
    for path, body in parts:
        try:
            parse_study(merge(quick, tomllib.loads(body)))
        except ConfigError as error:
            unknown = re.findall(r".*(?:unknown field|kind: ).*", str(error))
            assert not [line for line in unknown if "budget(s)" not in line], f"{path.name}: {unknown}"


@pytest.mark.parametrize(
    ("part", "names"), [("[recipe]\nseq_length = 8", "seq_length"), ("[corpus]\nkind = 'x'", '"x"')]
)
def test_an_unknown_field_or_kind_is_noticed(part: str, names: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown field|kind: .*{names}"):
        parse_study(merge(load_study_table("quick")[0], tomllib.loads(part)))


def anchors(path: Path) -> set[str]:
    """Names under which the headings of a page are linked to, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    names = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    return {name if (n := names[:place].count(name)) == 0 else f"{name}-{n}" for place, name in enumerate(names)}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target, _, anchor in re.findall(r"\]\(([^)#]*)(#([^)]*))?\)", path.read_text(encoding="utf-8")):
        if "://" not in target:
            page = path.parent / target if target else path
            assert page.exists(), target
            assert not anchor or anchor in anchors(page), f"{target}#{anchor}"


def test_a_missing_anchor_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# One `two`, three\n```sh\n# no heading\n```\n## Ä-b\n## Ä-b\n", encoding="utf-8")
    assert anchors(tmp_path / "a.md") == {"one-two-three", "ä-b", "ä-b-1"}


def test_the_readme_leads_to_every_page() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in DOCUMENTS[2:] if f"](docs/{path.name})" not in readme] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_sessions_answer_as_written(path: Path) -> None:
    session = "\n".join(blocks(path.read_text(encoding="utf-8"), "pycon"))
    said: list[str] = []
    example = doctest.DocTestParser().get_doctest(session, {}, path.name, str(path), 0)
    failed, _ = doctest.DocTestRunner(verbose=False).run(example, out=said.append)
    assert not failed, "".join(said)


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if path.name != "analysis.md"], ids=lambda path: path.name)
def test_code_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python blocks of a page, one after the other in an empty folder; those that are files of their own aside.

    Those of analysis.md need a study, and have one in report/test_files.py.
    """
    text = re.sub(r"^New file `[^`]+`:\n\n```python\n.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for body in blocks(text, "python"):
        exec(compile(body, path.name, "exec"), names)


def test_commands_inside_sentences_exist() -> None:
    spans = [
        (path.name, name)
        for path in DOCUMENTS
        for name in re.findall(r"`equipoise ([a-z-]+)[ `]", path.read_text(encoding="utf-8"))
    ]
    assert len(spans) > 5
    assert [span for span in spans if span[1] not in command_tree().commands] == []


def test_the_extremes_of_routing_numbers_are_as_tabulated() -> None:
    """Even use and full collapse of docs/concepts.md, E = 8 and K = 2, from counts."""
    page = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    table = page.partition("| name | what | even use | full collapse |")[2].partition("\n\n")[0]
    rows = {cells[1].strip(" `"): (cells[3].strip(), cells[4].strip()) for cells in map(_cells, table.splitlines()[2:])}
    E, K = 8, 2
    even, collapsed = ([30] * E, [120] * K + [0] * (E - K))
    worked = {
        "0": 0.0,
        "1": 1.0,
        "1/E": 0.125,
        "1/K": 0.5,
        "K/E": 0.25,
        "E/K − 1": 3.0,
        "√(E/K − 1)": 3**0.5,
        "(E − K) ÷ (K·E²)": 6 / 128,
        "ln K ÷ ln E": 1 / 3,
    }
    checked = 0
    for place, counts in enumerate((even, collapsed)):
        found = diagnose(np.array(counts), 1.0, 1.0, K)
        assert set(rows) <= set(found)
        for name, formulas in rows.items():
            if formulas[place]:
                checked += 1
                assert found[name] == pytest.approx(worked[formulas[place]]), name
    assert checked == 12


def _cells(line: str) -> list[str]:
    return re.split(r"(?<!\\)\|", line)


def test_the_readme_lists_every_exit_code() -> None:
    rows = re.findall(r"^\| (\d+) \|", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)
    branches = [errors.EquipoiseError, *errors.EquipoiseError.__subclasses__()]
    signals = {errors.Interrupted("", number).exit_code for number in (1, 2, 15)}
    assert {int(code) for code in rows} == {0, *signals, *(branch.exit_code for branch in branches)}
    assert len(set(rows)) == len(rows)


def test_the_citation_names_this_version() -> None:
    (entry,) = blocks((ROOT / "README.md").read_text(encoding="utf-8"), "bibtex")
    assert f"version = {{{equipoise.__version__}}}" in entry
