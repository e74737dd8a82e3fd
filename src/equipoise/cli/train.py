"""`equipoise train`: one run, in this process or in several."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from equipoise.cli.console import (
    CacheOption,
    DeviceOption,
    JsonOption,
    MicroOption,
    QuietOption,
    SetOption,
    check_device,
    default_cache,
    emit_json,
    out,
    place,
    read_study,
    say,
    waiting,
)
from equipoise.cli.preparing import Preparing
from equipoise.cli.processes import ProcessesOption, or_orphaned, start_processes, started_together
from equipoise.cli.track import TrackOption, check_trackers, tracked
from equipoise.errors import ConfigError, DataError, IntegrityError
from equipoise.faults import did_you_mean, printable
from equipoise.text import number


def train(
    target: Annotated[
        str,
        typer.Argument(
            metavar="STUDY|RUN", help="A study (with --arm and --seed), or the directory of a run or trunk."
        ),
    ],
    arm: Annotated[str | None, typer.Option("--arm", help="Which arm of the study.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Which seed of the study.")] = None,
    budget: Annotated[int | None, typer.Option("--budget", help="Which budget; default the largest.")] = None,
    destination: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Study directory.", parser=place("--out"))
    ] = None,
    overrides: SetOption = None,
    track: TrackOption = None,
    data: Annotated[
        Path | None,
        typer.Option("--data", metavar="DIR", help="Prepared data set of the run.", parser=place("--data")),
    ] = None,
    device: DeviceOption = "auto",
    cache: CacheOption = None,
    auto_micro_batch: MicroOption = False,
    processes: ProcessesOption = 1,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train one run, or go on with it where it stopped; the result is the same.

    A run with the WSD schedule goes on from the trunk beside it, `<arm>/trunk-s<seed>`, if that serves it.

    Under torchrun, or with --processes, each process computes its share of every batch: the same losses but for
    rounding. The first one reads and writes.

    Example: equipoise train quick --arm moe --seed 0
    """
    from equipoise.engine import catching_signals
    from equipoise.files import held
    from equipoise.shares import run_lock

    check_device(device)
    trackers = check_trackers(track)
    if processes > 1:
        given = {"arm": arm, "seed": seed, "budget": budget, "out": destination, "data": data, "device": device}
        arguments = _options({**given, "cache": cache, "set": overrides, "track": track})
        flags = {"--auto-micro-batch": auto_micro_batch, "--quiet": quiet, "--json": as_json}
        arguments += [flag for flag, is_set in flags.items() if is_set]
        raise typer.Exit(start_processes(processes, device, ["train", *arguments, "--", target]))
    folder = cache or default_cache()
    with started_together(device) as group, catching_signals(second=lambda number: os._exit(128 + number)) as stop:
        if group is not None and group.rank:
            from equipoise.followers import follow

            follow(group)  # a first signal is for the leader to act on; it got it too
            return
        is_trunk = (Path(target) / "trunk.json").exists()
        if is_trunk or (Path(target) / "config.json").exists():
            if any(value is not None for value in (arm, seed, budget, destination, overrides)):
                raise ConfigError(f"{target}: a run directory; --arm, --seed, --budget, --out and --set are a study's")
            run, directory, dataset = _of_directory(Path(target).resolve(), is_trunk, data, folder)
        else:
            wanted = (arm, seed, budget)
            run, directory, dataset = _of_study(target, wanted, destination, overrides, folder, quiet, stop)
        from equipoise.train import train as train_run
        from equipoise.train import train_trunk
        from equipoise.trunk import trunk_name

        trunk = directory.parent / trunk_name(run.seed)
        summary: dict[str, Any]
        options: dict[str, Any] = {
            "device": device,
            "log": lambda line: say(line, quiet),
            "stop_signal": or_orphaned(stop) if group else stop,
            "auto_micro_batch": auto_micro_batch,
            **({"group": group} if group else {}),
        }
        study, place = directory.parent.parent, f"{directory.parent.name}/{directory.name}"
        with held(run_lock(directory), str(directory)), tracked(trackers, study, [place], stop):
            if is_trunk:
                summary = {"trunk": str(directory), "steps": train_trunk(run, directory, dataset, **options)}
            else:
                options["trunk"] = trunk if (trunk / "trunk.json").exists() else None
                summary = train_run(run, directory, dataset, **options)
    if as_json:
        emit_json(summary)
    elif is_trunk:
        out().print(f"{directory}: trunk at step {summary['steps']} of {run.num_steps}")
    else:
        mark = " (collapsed)" if summary["collapsed"] else ""
        out().print(f"{directory}: {summary['split']} loss {number(summary['val_loss'])} nats/token{mark}")


def _options(given: dict[str, Any]) -> list[str]:
    """The words of a command line that give these options, each once or as often as it has values."""
    values = {name: value if isinstance(value, list) else [value] for name, value in given.items() if value is not None}
    return [word for name, several in values.items() for value in several for word in (f"--{name}", str(value))]


def _of_directory(directory: Path, is_trunk: bool, data: Path | None, cache: Path) -> tuple[Any, Path, Any]:
    """The run of a run directory, or the trunk of a trunk's, and its data set."""
    from equipoise.data.dataset import open_dataset
    from equipoise.files import read_json
    from equipoise.record import read_config
    from equipoise.trunk import read_trunk

    run = read_trunk(directory) if is_trunk else read_config(directory)
    assert run is not None  # its config.json, or trunk.json, exists
    if data:
        return run, directory, open_dataset(data)
    for path in sorted(cache.glob("*/dataset.json")):
        with contextlib.suppress(IntegrityError):  # what is wrong with another data set is none of this run's business
            if read_json(path).get("digest") == run.data:
                return run, directory, open_dataset(path.parent)
    raise DataError(
        f"{directory}: its data set {run.data[:12]}… is not in {cache}; "
        "run the study again to prepare it, or pass --data DIR"
    )


def _of_study(
    target: str,
    wanted: tuple[str | None, int | None, int | None],
    destination: Path | None,
    overrides: list[str] | None,
    cache: Path,
    quiet: bool,
    stop: Any,
) -> tuple[Any, Path, Any]:
    """One run of a study that is prepared and locked first."""
    from equipoise.files import held
    from equipoise.lock import locked_runs, study_budget
    from equipoise.record import read_run
    from equipoise.study import check_disk, prepare_study
    from equipoise.work import is_finished

    spec = read_study(target, overrides)
    arm, seed, budget = wanted
    for option, value, known in (("arm", arm, spec.arms), ("seed", seed, spec.seeds)):
        if value is None:
            raise ConfigError(f"--{option}: missing; expected one of {', '.join(map(str, known))}")
    for option, found, known in (("arm", arm, spec.arms), ("seed", seed, spec.seeds), ("budget", budget, spec.budgets)):
        if found is not None and found not in known:
            near = did_you_mean(found, map(str, known))
            raise ConfigError(f"--{option} {found}: expected one of {', '.join(map(str, known))}{near}")
    directory = destination or Path("runs") / spec.name
    with held(directory / ".plan.lock", str(directory), waiting(directory, stop, quiet)), Preparing(quiet) as preparing:
        lock, dataset = prepare_study(
            spec,
            directory,
            cache,
            command=printable(shlex.join(["equipoise", *sys.argv[1:]])),
            say=preparing.say,
            watch=preparing.show,
            should_stop=lambda: stop() != 0,
        )
    chosen, at = (arm, seed, budget or max(spec.budgets)), study_budget(lock)
    run = next(run for run in locked_runs(lock) if (run.arm, run.seed, at[run.arm, run.budget]) == chosen)
    if not is_finished(read_run(directory / run.folder, deep=False)):
        check_disk(directory, [run])
    return run, (directory / run.folder).resolve(), dataset
