"""The `equipoise` command: registers every group and turns errors into one line and an exit code."""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final

import typer

from equipoise import __version__
from equipoise.cli import (
    archive,
    bench,
    compare,
    data,
    doctor,
    evaluate,
    export,
    plan,
    power,
    presets,
    probe,
    reports,
    run,
    sample,
    selftest,
    train,
    watch,
)
from equipoise.cli.console import emit_json, say
from equipoise.cli.output import prepare_outputs
from equipoise.errors import EquipoiseError, ResourceError
from equipoise.faults import printable
from equipoise.machine import is_out_of_memory

EPILOG = (
    "Exit codes: 0 ok · 1 unexpected · 2 usage or study file · 3 data · 4 diverged · 5 integrity · 6 held by another "
    "process · 7 memory or disk · 129 terminal closed, 130 Ctrl-C and 143 SIGTERM, each after saving."
)

MAX_LINES: Final = 100
"""Faults that are told one by one."""

app = typer.Typer(
    name="equipoise",
    help="Matched, reproducible, pre-declared comparisons of dense and Mixture-of-Experts language models.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        print(f"equipoise {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Declare a study in TOML; plan it, run it, read the verdicts."""


def _help(command: Callable[..., Any]) -> str:
    """What a command says of itself, a paragraph a line: the terminal breaks lines, not the source."""
    return "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(command.__doc__ or "").split("\n\n"))


for _command in (
    *(run.run, plan.plan, reports.status, watch.watch, reports.report, archive.archive, compare.compare, power.power),
    *(train.train, sample.sample, probe.probe, evaluate.evaluate, export.export),
    *(doctor.doctor, selftest.selftest, bench.bench),
):
    app.command(help=_help(_command))(_command)
app.add_typer(presets.app, name="presets")
app.add_typer(data.app, name="data")
app.command(name="gauge", hidden=True)(bench.gauge)


def _fail(message: str, exit_code: int, as_json: bool, kind: str = "EquipoiseError") -> int:
    """Say what went wrong, on stderr and for programs as JSON; returns the exit code."""
    if as_json:
        with contextlib.suppress(EquipoiseError):  # stdout itself may be what cannot be written
            emit_json({"error": {"exit_code": exit_code, "kind": kind, "message": message}})
    lines = message.split("\n")
    for line in lines[:MAX_LINES]:
        say(f"error: {printable(line)}")
    if len(lines) > MAX_LINES:
        say(f"error: and {len(lines) - MAX_LINES:,} more")
    return exit_code


@app.command(hidden=True, name="nursery")
def nursery() -> None:
    """Fork a child for every request on stdin (used by `run`)."""
    from equipoise import train  # noqa: F401  (what every child needs, loaded once)
    from equipoise.config import prepare
    from equipoise.forks import ONE_THREAD, serve
    from equipoise.spec.run import RunConfig

    prepare(RunConfig)
    _whole()
    os.environ.pop(ONE_THREAD, None)  # everything is loaded; what a run does with threads is for its recipe to say
    serve(call)


@functools.cache
def _whole() -> Any:
    """The command with all its options, made once."""
    return typer.main.get_command(app)


def call(arguments: Sequence[str]) -> int:
    """Run the command with these arguments; returns the exit code. An error a user can cause is said, never raised."""
    as_json = "--json" in (arguments[: arguments.index("--")] if "--" in arguments else arguments)
    try:
        return _whole().main(list(arguments), standalone_mode=False, prog_name="equipoise") or 0
    except EquipoiseError as error:
        return _fail(str(error), error.exit_code, as_json, type(error).__name__)
    except KeyboardInterrupt:
        return _fail("interrupted", 130, as_json, "Interrupted")
    except MemoryError:
        return _fail("out of memory", ResourceError.exit_code, as_json, "ResourceError")
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        return _fail(f"{where}{error.strerror or error}", ResourceError.exit_code if full else 1, as_json)
    except Exception as error:
        kind = type(error).__name__
        if kind == "NoArgsIsHelpError":  # the bare command: show the help that the library made
            say(error.format_message())  # type: ignore[attr-defined]
            return 2
        if hasattr(error, "format_message"):  # a usage error of the command-line library, whose classes are private
            context = getattr(error, "ctx", None)
            hint = f"; see {context.command_path} --help" if context else ""
            return _fail(error.format_message().removesuffix(".") + hint, 2, as_json, "UsageError")
        if is_out_of_memory(error):
            text = f"out of memory ({str(error).splitlines()[0]}); try fewer --jobs or a smaller recipe.micro_sequences"
            return _fail(text, ResourceError.exit_code, as_json, "ResourceError")
        raise


def main() -> None:
    """Entry point of `equipoise`; never shows a traceback for an error a user can cause."""
    # Read when a GPU's matrix library starts, here or in a child: products then add in the same order every time.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    prepare_outputs()
    code = call(sys.argv[1:])
    try:
        sys.stdout.flush()
    except EquipoiseError as error:  # what was printed last did not get there
        code = code or _fail(str(error), error.exit_code, False)
    sys.exit(code)
