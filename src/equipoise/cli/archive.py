"""`equipoise archive`: a study's records without weights, in a folder that can be committed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from equipoise.cli.console import JsonOption, emit_json, out, place, say
from equipoise.cli.reports import DirectoryArgument, write_outputs


def archive(
    directory: DirectoryArgument,
    destination: Annotated[
        Path,
        typer.Argument(
            metavar="DEST", help="Where to, e.g. results/quick; may hold an earlier copy.", parser=place("DEST")
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Copy a study without its weights to DEST, and make its results and report there: small enough to commit.

    Finished runs only, of each everything but checkpoints; absolute paths are cut to their last part. Call it again
    after more runs: what is there stays as it is. `equipoise run STUDY --out DEST` goes on from it, and trains no run
    again that is there, unless it branches off a trunk that comes out otherwise (docs/analysis.md).

    Example: equipoise archive runs/quick results/quick
    """
    from equipoise.archive import archive as copy
    from equipoise.archive import check_place
    from equipoise.files import held
    from equipoise.lock import read_lock

    read_lock(directory)  # no folder is made for what is no study, and no lock where no copy will be
    check_place(directory, destination)
    with held(destination / ".study.lock", f"study {destination}"):
        done = copy(directory, destination)
        results, report = write_outputs(destination)
    if as_json:
        emit_json({"directory": str(destination), "copied": done.copied, "kept": done.kept, "left": done.left})
    else:
        out().print(
            f"{destination}: {len(done.copied)} run(s) copied, {len(done.kept)} there before, "
            f"{len(done.left)} of {len(results['runs'])} not finished"
        )
    if report is None:
        raise typer.Exit(1)
    if not as_json:
        say(f"report: {report}")
