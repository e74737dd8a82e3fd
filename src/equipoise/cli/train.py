"""`equipoise train`: one run, in this process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from equipoise.cli.console import (
    CacheOption,
    DeviceOption,
    JsonOption,
    QuietOption,
    SetOption,
    default_cache,
    emit_json,
    number,
    out,
    read_study,
    say,
)
from equipoise.errors import ConfigError, DataError, IntegrityError


def train(
    target: Annotated[
        str, typer.Argument(metavar="STUDY|RUN", help="A study (with --arm and --seed) or a run directory.")
    ],
    arm: Annotated[str | None, typer.Option("--arm", help="Which arm of the study.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Which seed of the study.")] = None,
    budget: Annotated[int | None, typer.Option("--budget", help="Which budget; default the largest.")] = None,
    destination: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Study directory.")] = None,
    overrides: SetOption = None,
    data: Annotated[Path | None, typer.Option("--data", metavar="DIR", help="Prepared data set of the run.")] = None,
    device: DeviceOption = "auto",
    cache: CacheOption = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train one run, or go on with it where it stopped; the result is the same.

    Example: equipoise train quick --arm moe --seed 0
    """
    from equipoise.engine import catching_signals

    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device {device}: expected auto, cpu or cuda")
    with catching_signals(second=lambda number: os._exit(128 + number)) as stop:
        run, directory, dataset = _find(target, arm, seed, budget, destination, overrides, data, cache, quiet, stop)
        from equipoise.files import held
        from equipoise.train import train as train_run

        with held(directory.parent / f".{directory.name}.lock", str(directory)):
            summary = train_run(
                run,
                directory,
                dataset,
                device=device,  # type: ignore[arg-type]  # checked above
                log=lambda line: say(line, quiet),
                stop_signal=stop,
            )
    if as_json:
        emit_json(summary)
    else:
        out().print(
            f"{directory}: {summary['split']} loss {number(summary['val_loss'])} nats/token ({summary['status']})"
        )


def _find(
    target: str,
    arm: str | None,
    seed: int | None,
    budget: int | None,
    destination: Path | None,
    overrides: list[str] | None,
    data: Path | None,
    cache: Path | None,
    quiet: bool,
    stop: Any,
) -> tuple[Any, Path, Any]:
    """The run, its directory and its data set: from a run directory, or from a study, prepared and locked first."""
    from equipoise.cli.run import prepare_study
    from equipoise.data.dataset import open_dataset
    from equipoise.record import read_config

    directory = Path(target)
    if (directory / "config.json").exists():
        run = read_config(directory)
        if run is None:
            raise IntegrityError(f"{directory}: no config.json there")
        found = open_dataset(data) if data else _cached(cache or default_cache(), run.data)
        if found is None:
            raise DataError(
                f"{directory}: its data set {run.data[:12]}… is not in {cache or default_cache()}; "
                "run the study again to prepare it, or pass --data DIR"
            )
        return run, directory, found
    spec = read_study(target, overrides)
    if arm not in spec.arms:
        raise ConfigError(f"--arm {arm}: expected one of {', '.join(spec.arms)}")
    if seed not in spec.seeds:
        raise ConfigError(f"--seed {seed}: expected one of {', '.join(map(str, spec.seeds))}")
    if budget is not None and budget not in spec.budgets:
        raise ConfigError(f"--budget {budget}: expected one of {', '.join(map(str, spec.budgets))}")
    study = prepare_study(spec, destination, cache or default_cache(), quiet, stop)
    wanted = (arm, seed, budget or max(spec.budgets))
    run = next(run for run in study.runs if (run.arm, run.seed, run.budget) == wanted)
    return run, study.directory / run.folder, study.dataset


def _cached(cache: Path, digest: str) -> Any:
    """The data set with this content digest, None when the cache does not hold it."""
    from equipoise.data.dataset import open_dataset
    from equipoise.files import read_json

    for path in sorted(cache.glob("*/dataset.json")):
        if read_json(path).get("digest") == digest:
            return open_dataset(path.parent)
    return None
