"""`equipoise presets`: the studies that come with the package."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from typing import Annotated

import typer

from equipoise.cli.console import JsonOption, emit_json, one_of, place, print_table, say
from equipoise.errors import ConfigError
from equipoise.faults import did_you_mean

app = typer.Typer(invoke_without_command=True)


def _presets(incomplete: str) -> list[str]:
    from equipoise.spec.study import preset_names

    return one_of(*preset_names())(incomplete)


NameArgument = Annotated[
    str,
    typer.Argument(metavar="NAME", help="Name of a preset.", autocompletion=_presets),
]
JSON_FOR_ALL = "as_json"
"""Under which the group hands its --json on to the command after it."""


@app.callback()
def presets(context: typer.Context, as_json: JsonOption = False) -> None:
    """List, show or copy the studies that come with the package.

    Example: equipoise presets
    """
    if context.invoked_subcommand is not None:
        context.obj = {JSON_FOR_ALL: as_json}
        return
    from equipoise.spec.study import load_study_table, parse_study, preset_names

    rows = []
    for name in preset_names():
        spec = parse_study(load_study_table(name)[0])
        num_runs = len(spec.arms) * len(spec.seeds) * len(spec.budgets)
        rows.append({"name": name, "corpus": spec.corpus.kind, "runs": num_runs, "question": spec.question})
    if as_json:
        emit_json({"presets": rows})
    else:
        print_table(
            "Presets",
            [("name", False), ("corpus", False), ("runs", True), ("question", False)],
            [[str(row["name"]), str(row["corpus"]), str(row["runs"]), str(row["question"])] for row in rows],
        )


@app.command()
def show(context: typer.Context, name: NameArgument, as_json: JsonOption = False) -> None:
    """Print the study file of a preset.

    Example: equipoise presets show quick
    """
    source = _source(name)
    if as_json or context.obj[JSON_FOR_ALL]:
        emit_json({"name": name, "toml": source})
    else:
        print(source, end="")


@app.command()
def copy(
    context: typer.Context,
    name: NameArgument,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Where to write it; must not exist.", parser=place("FILE"))
    ],
    as_json: JsonOption = False,
) -> None:
    """Write the commented study file of a preset, to start from; the study is named after the file.

    Example: equipoise presets copy quick study.toml
    """
    from equipoise.config import read_toml
    from equipoise.files import write_bytes
    from equipoise.spec.study import parse_study

    source = _source(name)
    if os.path.lexists(file):
        raise ConfigError(f"{file}: exists already; choose another name")
    if not file.parent.is_dir():
        raise ConfigError(f"{file.parent}: no such folder")
    quoted = json.dumps(file.stem, ensure_ascii=False)
    own = re.sub(r'(?m)^(name\s*=\s*)".*?"', lambda found: found[1] + quoted, source, count=1)
    try:
        parse_study(read_toml(own, str(file)))
    except ConfigError as error:
        raise ConfigError(f"{file}: the study would be named after it; {error}") from None
    write_bytes(file, own.encode())
    if as_json or context.obj[JSON_FOR_ALL]:
        emit_json({"name": name, "file": str(file)})
    else:
        say(f"{file}: written; plan it with: {shlex.join(['equipoise', 'plan', str(file)])}")


def _source(name: str) -> str:
    from equipoise.spec.study import load_study_table, preset_names

    if name not in preset_names():
        known = ", ".join(preset_names())
        raise ConfigError(f"preset {name!r}: unknown; expected one of {known}{did_you_mean(name, preset_names())}")
    return load_study_table(name)[1]
