"""`equipoise run`: the whole study; prepares, locks, trains what is missing, reports."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from equipoise.cli.console import (
    CacheOption,
    DeviceOption,
    JsonOption,
    QuietOption,
    SetOption,
    StudyArgument,
    check_device,
    default_cache,
    emit_json,
    read_study,
    say,
)
from equipoise.cli.progress import Progress
from equipoise.cli.reports import show_results, write_outputs


def run(
    study: StudyArgument,
    jobs: Annotated[int, typer.Option("--jobs", min=0, help="Runs at a time; 0 = one per recipe.threads cores.")] = 0,
    destination: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Study directory; default runs/<study>.")
    ] = None,
    overrides: SetOption = None,
    cache: CacheOption = None,
    device: DeviceOption = "auto",
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run a study: every arm × seed × budget, each once; then verdicts and a report. Run again to go on or to add.

    Example: equipoise run quick
    """
    from equipoise.engine import Task, catching_signals, default_jobs, run_local
    from equipoise.files import held
    from equipoise.lock import note_finished, status
    from equipoise.record import start_run
    from equipoise.study import check_disk, prepare_study

    check_device(device)
    spec = read_study(study, overrides)
    directory = destination or Path("runs") / spec.name
    with ExitStack() as stack:
        stop = stack.enter_context(catching_signals())
        stack.enter_context(held(directory / ".study.lock", f"study {directory}"))
        lock, dataset = prepare_study(
            spec,
            directory,
            cache or default_cache(),
            command=shlex.join(["equipoise", *sys.argv[1:]]),
            say=lambda line: say(line, quiet),
            should_stop=lambda: stop() != 0,
        )
        records = status(directory, lock, deep=True)
        todo = [record for record in records if record.status not in ("complete", "diverged")]
        check_disk(directory, [record.locked for record in todo if record.locked])
        tasks = []
        for record in todo:
            assert record.locked is not None
            start_run(record.directory, record.locked, dataset.tokenizer().to_json())
            log = directory / "logs" / f"{record.locked.folder}.log"
            tasks.append(Task(run=record.locked, directory=record.directory, log=log))
        num_jobs = jobs or default_jobs(spec.recipe.threads)
        done = len(records) - len(todo)
        how = f", {min(num_jobs, len(todo))} at a time" if todo else "; nothing to train"
        say(f"{directory}: {len(records)} runs, {done} done{how}", quiet)
        arguments = ["--data", str(dataset.directory), "--device", device]
        try:
            with Progress(len(records), done, quiet) as progress:
                codes = run_local(tasks, num_jobs=num_jobs, arguments=arguments, on_event=progress.show, stop=stop)
        finally:
            note_finished(directory)
        results, report = write_outputs(directory, emit_json if as_json else show_results)
    if report and not as_json:
        say(f"report: {report}")
    failed = _exit_code(results, codes.values())
    if failed:
        raise typer.Exit(failed)


def _exit_code(results: dict[str, Any], codes: Iterable[int]) -> int:
    """0 when every run is complete; else what the first failed child ended with, or 4 for a run diverged before.

    A child that was killed outright (by the system, when memory ran out) counts as out of memory.
    """
    statuses = [row["status"] for row in results["runs"]]
    if all(status == "complete" for status in statuses):
        return 0
    code = next((code for code in codes if code), 4 if "diverged" in statuses else 1)
    return 7 if code == -9 else code if code > 0 else 1
