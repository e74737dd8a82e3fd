"""`equipoise run`: the whole study; prepares, locks, trains what is missing, reports."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from equipoise.cli.console import (
    CacheOption,
    DeviceOption,
    JobsOption,
    JsonOption,
    QuietOption,
    SetOption,
    StudyArgument,
    check_device,
    default_cache,
    emit_json,
    read_jobs,
    read_study,
    say,
)
from equipoise.cli.progress import Progress
from equipoise.cli.reports import show_results, write_outputs
from equipoise.errors import EquipoiseError


def run(
    study: StudyArgument,
    jobs: JobsOption = "auto",
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

    After the last run one update of each arm is measured, in turn, once (step_time.json): keep the machine idle then.

    Example: equipoise run quick
    """
    from equipoise.engine import Task, catching_signals, run_local
    from equipoise.estimate import longest_first
    from equipoise.files import held
    from equipoise.lock import note_finished, status
    from equipoise.probe import choose_jobs
    from equipoise.study import check_disk, prepare_study
    from equipoise.work import first_tasks, next_tasks, work_left

    check_device(device)
    wanted = read_jobs(jobs)
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
        work = work_left(directory, records, lambda line: say(line, quiet))
        check_disk(directory, work.runs, list(work.trunks))
        tokenizer = dataset.tokenizer().to_json()
        tasks = first_tasks(directory, work, tokenizer)
        tasks = [tasks[index] for index in longest_first([task.run for task in tasks])]
        num_jobs, why = wanted or 1, ""
        if wanted is None and tasks:
            chosen = choose_jobs(work.runs, device, lambda: stop() != 0)
            num_jobs, why = chosen.number, f" ({chosen.reason})"
        done = len(records) - len(work.runs)
        trunks = f", {len(work.trunks)} trunk(s) first" if work.trunks else ""
        how = f", {min(num_jobs, len(work.runs))} at a time{why}" if tasks else "; nothing to train"
        say(f"{directory}: {len(records)} runs, {done} done{trunks}{how}", quiet)
        arguments = ["--data", str(dataset.directory), "--device", device]
        try:
            with Progress(len(records), done, quiet) as progress:

                def follow(task: Task) -> list[Task]:
                    after = next_tasks(directory, task, tokenizer, lambda line: say(line, quiet))
                    progress.done -= len(after) - task.num_runs if after else 0  # finished ones that are done again
                    return after

                codes = run_local(
                    tasks, num_jobs=num_jobs, arguments=arguments, on_event=progress.show, stop=stop, follow=follow
                )
        finally:
            note_finished(directory)
        _measure_updates(directory, device, stop, quiet)
        results, report = write_outputs(directory, emit_json if as_json else show_results)
    if report and not as_json:
        say(f"report: {report}")
    failed = _exit_code(results, codes.values())
    if failed:
        raise typer.Exit(failed)


def _measure_updates(directory: Path, device: str, stop: Callable[[], int], quiet: bool) -> None:
    """Measure one update of every arm, once, when every run has ended; a failure costs no more than these times."""
    from equipoise.lock import read_lock, status
    from equipoise.probe import measure_in_turn
    from equipoise.step_time import StepTimes, probed_models, read_step_times, write_step_times

    lock = read_lock(directory)
    if len(probed_models(lock)) < 2 or isinstance(read_step_times(directory, lock), StepTimes):
        return
    if any(record.status not in ("complete", "diverged") for record in status(directory, lock)):
        return
    say(f"{directory}: measuring one update of each arm, in turn", quiet)
    try:
        measured = measure_in_turn(probed_models(lock), lock.study.recipe, device, lambda: stop() != 0)
        write_step_times(directory, lock, measured)
    except EquipoiseError as error:
        say(f"warning: {directory}: nothing is compared at equal seconds ({error})")


def _exit_code(results: dict[str, Any], codes: Iterable[int]) -> int:
    """0 when every run is complete; else what the first failed child ended with, or 4 for a run diverged before.

    A child that was killed outright (by the system, when memory ran out) counts as out of memory.
    """
    statuses = [row["status"] for row in results["runs"]]
    if all(status == "complete" for status in statuses):
        return 0
    code = next((code for code in codes if code), 4 if "diverged" in statuses else 1)
    return 7 if code == -9 else code if code > 0 else 1
