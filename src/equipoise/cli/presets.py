"""`equipoise presets`: the studies that come with the package."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from equipoise.cli.console import JsonOption, emit_json, say, show_table
from equipoise.errors import ConfigError

app = typer.Typer(help="List, show or copy the studies that come with the package.", invoke_without_command=True)
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of a preset.")]


@app.callback()
def presets(context: typer.Context, as_json: JsonOption = False) -> None:
    """List the studies that come with the package.

    Example: equipoise presets copy tinystories-cpu study.toml
    """
    if context.invoked_subcommand is not None:
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
        show_table(
            "Presets",
            ["name", "corpus", "runs", "question"],
            [[str(row["name"]), str(row["corpus"]), str(row["runs"]), str(row["question"])] for row in rows],
        )


@app.command()
def show(name: NameArgument, as_json: JsonOption = False) -> None:
    """Print the study file of a preset.

    Example: equipoise presets show quick
    """
    source = _source(name)
    if as_json:
        emit_json({"name": name, "toml": source})
    else:
        print(source, end="")


@app.command()
def copy(
    name: NameArgument,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write it; must not exist.")],
    as_json: JsonOption = False,
) -> None:
    """Write the commented study file of a preset, to start from; the study is named after the file.

    Example: equipoise presets copy quick study.toml
    """
    source = _source(name)
    if file.exists():
        raise ConfigError(f"{file}: exists already; choose another name")
    if not file.parent.is_dir():
        raise ConfigError(f"{file.parent}: no such folder")
    own = re.sub(r'(?m)^(name\s*=\s*)".*?"', lambda found: found[1] + json.dumps(file.stem), source, count=1)
    file.write_text(own, encoding="utf-8")
    if as_json:
        emit_json({"name": name, "file": str(file)})
    else:
        say(f"{file}: written; plan it with `equipoise plan {file}`")


def _source(name: str) -> str:
    from equipoise.spec.study import load_study_table, preset_names

    if name not in preset_names():
        raise ConfigError(f"preset {name!r}: unknown; expected one of {', '.join(preset_names())}")
    return load_study_table(name)[1]
