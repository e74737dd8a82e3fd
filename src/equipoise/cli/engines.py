"""`--engine` and `--engine-option`: the options of `run`, and the engine they name."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from equipoise.cli.console import one_of
from equipoise.engines.options import ENGINES, PACKAGES, RayOptions, choose_device, read_options
from equipoise.errors import ConfigError

if TYPE_CHECKING:
    from equipoise.engine import Engine
    from equipoise.engines.options import Options
    from equipoise.spec.run import RunConfig

EngineOption = Annotated[
    str,
    typer.Option(
        "--engine",
        metavar="|".join(ENGINES),
        help="Who executes the runs; commands = print a line for each instead, for any other scheduler.",
        autocompletion=one_of(*ENGINES),
    ),
]
EngineSettings = Annotated[
    list[str] | None,
    typer.Option(
        "--engine-option",
        metavar="NAME=VALUE",
        help="What to say to the engine; repeatable. ray: address, cpus, gpus, memory_gb, retries. "
        "slurm: partition, minutes, cpus, gpus, memory_gb, retries, cluster, and sbatch.NAME for any other of sbatch.",
    ),
]


def check_engine(name: str, settings: list[str] | None, device: str, processes: int) -> Options:
    """What is said to an engine; ConfigError for what cannot be meant, or a package that is not installed."""
    options = read_options(name, settings or ())
    if options is not None:
        choose_device(options, device, processes)
    package = PACKAGES.get(name)
    spec = importlib.util.find_spec(package) if package else None
    if package and (spec is None or spec.origin is None):  # a mere folder of that name has no origin
        raise ConfigError(
            f"--engine {name}: the package {package} is not installed; python -m pip install 'equipoise[{name}]'"
        )
    return options


def engine_opener(
    options: Options,
    study: Path,
    device: str,
    threads_processes: tuple[int, int],
    arguments: Sequence[str],
    wanted: int | None,
    should_stop: Callable[[], bool],
) -> Callable[[Sequence[RunConfig]], AbstractContextManager[Engine]]:
    """What opens the engine for some runs; `wanted` is the number of runs at a time, None = the engine finds it.

    `threads_processes` are the threads of each process of a run and how many those are, `arguments` what every run's
    command line has besides its device.
    """
    from equipoise.engine import local_engine
    from equipoise.engines.on_ray import ray_engine
    from equipoise.engines.on_slurm import slurm_engine
    from equipoise.forks import nursery
    from equipoise.probe import choose_jobs, default_jobs

    threads, processes = threads_processes
    cpus = threads * processes
    if options is None:

        @contextmanager
        def here(runs: Sequence[RunConfig]) -> Iterator[Engine]:
            many = len(runs) > 1
            with nursery(os.environ) if many else nullcontext() as forker:  # it loads while numbers are tried
                number, why = wanted, ""
                if number is None:
                    # what is tried side by side are runs of one process
                    chosen = choose_jobs(runs, device, should_stop) if processes == 1 else default_jobs(cpus, device)
                    number, why = chosen.number, f" ({chosen.reason})"
                line, number = [*arguments, "--device", device], min(number, len(runs))
                yield local_engine(num_jobs=number, arguments=line, environment=os.environ, forker=forker, why=why)

        return here

    device, gpus = choose_device(options, device, processes)
    line = [*arguments, "--device", device]

    @contextmanager
    def elsewhere(runs: Sequence[RunConfig]) -> Iterator[Engine]:
        if isinstance(options, RayOptions):
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would tell its makers that it is used
            os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # the default to come; else it warns
            opened = ray_engine(options, num_jobs=wanted, cpus=cpus, gpus=gpus, arguments=line, environment=os.environ)
        else:
            opened = slurm_engine(
                options, study=study, num_jobs=wanted, cpus=cpus, gpus=gpus, arguments=line, environment=os.environ
            )
        with opened as engine:
            yield engine

    return elsewhere
