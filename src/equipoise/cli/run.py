"""`equipoise run`: the whole study; prepares, locks, trains what is missing, reports."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from equipoise.cli.console import (
    CacheOption,
    DeviceOption,
    JobsOption,
    JsonOption,
    MicroOption,
    QuietOption,
    SetOption,
    StudyArgument,
    check_device,
    default_cache,
    emit_json,
    place,
    read_jobs,
    read_study,
    say,
    waiting,
)
from equipoise.cli.engines import EngineOption, EngineSettings, check_engine, engine_opener
from equipoise.cli.preparing import Preparing
from equipoise.cli.processes import EachOption
from equipoise.cli.progress import Progress
from equipoise.cli.reports import show_results, tell_verdicts, write_outputs
from equipoise.cli.track import TrackOption, check_trackers, tracked
from equipoise.errors import EquipoiseError, LockedError
from equipoise.faults import printable
from equipoise.text import one_line

if TYPE_CHECKING:
    from equipoise.engine import Stop
    from equipoise.execute import Prepared

NAMED: Final = 5
"""Runs that are named one by one where several failed."""
QUIT_S: Final = 0.5
"""Seconds that a second signal leaves for killing children; their parent looks four times a second."""


def run(
    study: StudyArgument,
    jobs: JobsOption = "auto",
    destination: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Study directory; default runs/<study>.", parser=place("--out")),
    ] = None,
    overrides: SetOption = None,
    track: TrackOption = None,
    cache: CacheOption = None,
    device: DeviceOption = "auto",
    share: Annotated[
        bool,
        typer.Option(
            "--share", help="Work with other processes on one study: take runs nobody is at, one at a time or --jobs."
        ),
    ] = False,
    processes: EachOption = 1,
    auto_micro_batch: MicroOption = False,
    engine: EngineOption = "local",
    engine_options: EngineSettings = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run a study: every arm × seed × budget, each once; then verdicts and a report. Run again to go on or to add.

    After the last run one update of each arm is measured, in turn, once (step_time.json): keep the machine idle then.
    Engines other than local execute runs elsewhere, to the same result, and measure nothing (docs/engines.md).

    Example: equipoise run quick
    """
    from equipoise.engine import catching_signals
    from equipoise.execute import Prepared, execute
    from equipoise.files import held, holder
    from equipoise.lock import note_finished
    from equipoise.micro import check_processes
    from equipoise.study import prepare_study

    check_device(device)
    options = check_engine(engine, engine_options, device, processes)
    trackers = check_trackers(track)
    wanted = read_jobs(jobs) or (1 if share else None)  # of a shared machine nobody has all the cores
    spec = read_study(study, overrides)
    check_processes(spec.recipe, processes)
    directory = destination or Path("runs") / spec.name
    plan_lock = directory / ".plan.lock"
    with ExitStack() as stack:
        stop = stack.enter_context(catching_signals(second=_quit_at_once))
        try:
            stack.enter_context(held(directory / ".study.lock", f"study {directory}"))
        except LockedError as error:
            if not share:
                raise LockedError(f"{error}, or work beside it with --share") from None
            say(f"{directory}: beside {holder(directory / '.study.lock')}", quiet)
        wait = waiting(directory, stop, quiet)
        with held(plan_lock, str(directory), wait), Preparing(quiet) as preparing:
            lock, dataset = prepare_study(
                spec,
                directory,
                cache or default_cache(),
                command=printable(shlex.join(["equipoise", *sys.argv[1:]])),
                say=preparing.say,
                watch=preparing.show,
                should_stop=lambda: stop() != 0,
            )
        arguments = ["--data", str(dataset.directory.resolve())]
        arguments += ["--auto-micro-batch"] if auto_micro_batch else []
        arguments += ["--processes", str(processes)] if processes > 1 else []
        prepared = Prepared(
            directory=directory, lock=lock, dataset=dataset, wait=wait, say=lambda line: say(line, quiet)
        )
        if engine == "commands":
            _print_commands(prepared, [*arguments, "--device", device], trackers, as_json)
            return
        opener = engine_opener(
            options, directory, device, (spec.recipe.threads, processes), arguments, wanted, lambda: stop() != 0
        )
        try:
            codes = execute(prepared, opener, _progress(prepared, stop, quiet, trackers), stop)
        finally:
            with suppress(LockedError), held(plan_lock, str(directory)):  # should others be at it, they take note
                note_finished(directory)
        with held(plan_lock, str(directory), wait):
            if engine == "local":
                _measure_updates(directory, device, stop, quiet)
            results, report = write_outputs(directory, emit_json if as_json else show_results)
    if report and not as_json:
        say(f"report: {report}")
    failed = _exit_code(results, codes.values())
    if failed:
        say(f"error: {_unfinished(results, directory)}")
        raise typer.Exit(failed)


def _quit_at_once(number: int) -> None:
    """What a second signal does: children are killed where runs are executed, and all else is given up."""
    time.sleep(QUIT_S)
    os._exit(128 + number)


def _progress(study: Prepared, stop: Stop, quiet: bool, trackers: list[str]) -> Callable[..., Any]:
    """What shows the progress of a study, and hands it to trackers, for the time of a `with` block."""

    @contextmanager
    def shown(total: int, done: int, places: Sequence[str]) -> Iterator[Progress]:
        with (
            Progress(study.directory, total, done, quiet, stop) as progress,
            tracked(trackers, study.directory, places, stop),
        ):
            yield progress

    return shown


def _print_commands(study: Prepared, arguments: Sequence[str], trackers: list[str], as_json: bool) -> None:
    """What is left as lines for a shell, on stdout; the rest is for people, on stderr."""
    from equipoise.execute import units_left

    tracking = [word for name in trackers for word in ("--track", name)]
    headline, units = units_left(study, [*arguments, *tracking], os.environ)
    again = "run them anywhere that has these paths, then `equipoise run` again" if units else "nothing to train"
    study.say(f"{headline}; {len(units)} line(s): {again}")
    if as_json:
        emit_json({"commands": units})
    for unit in () if as_json else units:
        print(unit.command)


def _measure_updates(directory: Path, device: str, stop: Callable[[], int], quiet: bool) -> None:
    """Measure one update of every arm, once, when every run has ended; a failure costs no more than these times.

    The verdicts do not depend on them, and are told before.
    """
    from equipoise.lock import read_lock, status
    from equipoise.probe import measure_in_turn
    from equipoise.results import collect
    from equipoise.step_time import StepTimes, probed_models, read_step_times, write_step_times

    lock = read_lock(directory)
    if len(probed_models(lock)) < 2 or isinstance(read_step_times(directory, lock), StepTimes):
        return
    if any(record.status not in ("complete", "diverged") for record in status(directory, lock)):
        return
    tell_verdicts(directory, collect(directory), quiet)
    say(f"{directory}: measuring one update of each arm, in turn", quiet)
    try:
        measured = measure_in_turn(probed_models(lock), lock.study.recipe, device, lambda: stop() != 0)
        write_step_times(directory, lock, measured)
    except EquipoiseError as error:
        say(f"warning: {directory}: nothing is compared at equal seconds ({error})")


def _unfinished(results: dict[str, Any], directory: Path) -> str:
    """Which runs are not complete, and what to do about it."""
    runs = results["runs"]
    lost = [f"{row['arm']} {row['budget']} seed {row['seed']}: {row['status']}" for row in runs]
    lost = [text for text, row in zip(lost, runs, strict=True) if row["status"] != "complete"]
    named = "; ".join(lost[:NAMED]) + (f"; and {len(lost) - NAMED} more" if len(lost) > NAMED else "")
    return (
        f"{directory}: {len(lost)} of {len(runs)} runs not complete ({one_line(named)}); why: {directory / 'logs'}; "
        "the same command tries again, but for diverged ones (delete their directories first)"
    )


def _exit_code(results: dict[str, Any], codes: Iterable[int]) -> int:
    """0 when every run is complete; else what the first failed child ended with, or 4 for a run diverged before.

    A child that was killed outright (by the system, when memory ran out) counts as out of memory.
    """
    statuses = [row["status"] for row in results["runs"]]
    if all(status == "complete" for status in statuses):
        return 0
    code = next((code for code in codes if code), 4 if "diverged" in statuses else 1)
    return 7 if code == -9 else code if code > 0 else 1
