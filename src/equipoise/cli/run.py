"""`equipoise run`: the whole study; prepares, locks, trains what is missing, reports."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
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
from equipoise.cli.progress import Progress
from equipoise.cli.reports import show_results, write_outputs
from equipoise.cli.track import TrackOption, check_trackers, tracked
from equipoise.errors import EquipoiseError, LockedError
from equipoise.faults import printable
from equipoise.text import one_line

if TYPE_CHECKING:
    from equipoise.data.dataset import Dataset
    from equipoise.engine import Stop
    from equipoise.lock import Lock
    from equipoise.spec.run import RunConfig

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
    auto_micro_batch: MicroOption = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run a study: every arm × seed × budget, each once; then verdicts and a report. Run again to go on or to add.

    After the last run one update of each arm is measured, in turn, once (step_time.json): keep the machine idle then.

    Example: equipoise run quick
    """
    from equipoise.engine import catching_signals
    from equipoise.files import held, holder
    from equipoise.lock import note_finished
    from equipoise.probe import choose_jobs
    from equipoise.study import prepare_study

    check_device(device)
    trackers = check_trackers(track)
    wanted = read_jobs(jobs) or (1 if share else None)  # of a shared machine nobody has all the cores
    spec = read_study(study, overrides)
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
        with held(plan_lock, str(directory), wait):
            lock, dataset = prepare_study(
                spec,
                directory,
                cache or default_cache(),
                command=printable(shlex.join(["equipoise", *sys.argv[1:]])),
                say=lambda line: say(line, quiet),
                should_stop=lambda: stop() != 0,
            )
        arguments = ["--data", str(dataset.directory), "--device", device]
        arguments += ["--auto-micro-batch"] if auto_micro_batch else []

        def choose(runs: Sequence[RunConfig]) -> tuple[int, str]:
            if wanted is not None:
                return wanted, ""
            chosen = choose_jobs(runs, device, lambda: stop() != 0)
            return chosen.number, f" ({chosen.reason})"

        try:
            codes = _train(
                directory, lock, dataset, choose, arguments, stop, wait, lambda line: say(line, quiet), quiet, trackers
            )
        finally:
            with suppress(LockedError), held(plan_lock, str(directory)):  # should others be at it, they take note
                note_finished(directory)
        with held(plan_lock, str(directory), wait):
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


def _train(
    directory: Path,
    lock: Lock,
    dataset: Dataset,
    choose: Callable[[Sequence[RunConfig]], tuple[int, str]],
    arguments: Sequence[str],
    stop: Stop,
    wait: Callable[[str], None],
    tell: Callable[[str], None],
    quiet: bool,
    trackers: list[str],
) -> dict[Path, int]:
    """Train what is left of the study, as far as no other process is at it, until nothing is; exit codes of children.

    What others are at is waited for: should one of them die, its runs are taken over. `choose` says how many runs go
    at a time, and why.
    """
    from equipoise.engine import Task, run_local
    from equipoise.estimate import longest_first
    from equipoise.files import held
    from equipoise.lock import locked_runs, status
    from equipoise.shares import shares_of
    from equipoise.study import check_disk
    from equipoise.work import first_tasks, is_finished, next_tasks, work_left

    shares, tokenizer = shares_of(directory, lock), dataset.tokenizer().to_json()
    codes: dict[Path, int] = {}
    first = True
    while True:
        with held(directory / ".plan.lock", str(directory), wait), shares.planning() as free:
            records = status(directory, lock, deep=first)
            by_whom = [(record, record.locked is not None and record.locked.folder in free) for record in records]
            work = work_left(directory, [record for record, is_free in by_whom if is_free], tell)
            if first:
                check_disk(directory, work.runs, list(work.trunks))
            tasks = first_tasks(directory, work, tokenizer)
        tasks = [task for task in tasks if codes.get(task.directory, LockedError.exit_code) == LockedError.exit_code]
        tasks = [tasks[index] for index in longest_first([task.run for task in tasks])]
        others = [record for record, is_free in by_whom if not is_free and not is_finished(record)]
        done = len(records) - len(work.runs) - len(others)
        if first or tasks:
            number, why = choose(work.runs) if tasks else (1, "")
            held_by_others = f", {len(others)} with others" if others else ""
            trunks = f", {len(work.trunks)} trunk(s) first" if work.trunks else ""
            how = (
                f", {min(number, len(work.runs))} at a time{why}"
                if tasks
                else f"; nothing {'free' if others else 'to train'}"
            )
            tell(f"{directory}: {len(records)} runs, {done} done{held_by_others}{trunks}{how}")
        first = False
        if not tasks and not others:
            return codes
        if not tasks:
            wait(", ".join(shares.holders(others)) or "another process")
            continue
        try:
            places = [trunk.folder for trunk in work.trunks] + [run.folder for run in locked_runs(lock)]
            with (
                Progress(directory, len(records), done, quiet, stop) as progress,
                tracked(trackers, directory, places, stop),
            ):

                def follow(task: Task) -> list[Task]:
                    after = next_tasks(directory, task, tokenizer, progress.say)
                    progress.done -= len(after) - task.num_runs if after else 0  # finished ones that are done again
                    return after

                codes |= run_local(
                    tasks,
                    num_jobs=number,
                    arguments=arguments,
                    environment=os.environ,
                    on_event=progress.show,
                    stop=stop,
                    follow=follow,
                    take=shares.take,
                )
        finally:
            shares.give_back()


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
