"""Several processes at one run: the options that start them, and what torchrun says of this one.

Not for: what they do (`equipoise.followers`).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Final

import typer

from equipoise.errors import ConfigError

if TYPE_CHECKING:
    from equipoise.parallel import Group

MAX_PROCESSES: Final = 256
"""More than any machine has cores or GPUs to give; a slip of a digit would otherwise bring it down."""
SAVING_S: Final = 7 * 24 * 3600
"""Seconds that processes get to end in after a signal, before they are killed; torchrun by itself gives 30."""

ProcessesOption = Annotated[
    int,
    typer.Option(
        "--processes",
        metavar="N",
        min=1,
        max=MAX_PROCESSES,
        help="Processes on this machine that share every batch of the run, as with torchrun --nproc-per-node N.",
    ),
]
EachOption = Annotated[
    int,
    typer.Option(
        "--processes-per-run",
        metavar="N",
        min=1,
        max=MAX_PROCESSES,
        help="Processes that share every batch of a run: a GPU each, or recipe.threads cores each.",
    ),
]


def under_torchrun() -> int:
    """How many processes torchrun has started, of which this is one; 0 when it was not started so."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else 0


def start_processes(processes: int, device: str, arguments: Sequence[str]) -> int:
    """Run the command with `arguments` in so many processes at once; returns the exit code."""
    from equipoise.parallel import check_devices, launch

    if under_torchrun() > 1:
        raise ConfigError(f"--processes {processes}: torchrun has started {under_torchrun()} already; expected one way")
    check_devices(processes, device)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SAVING_S))
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # until each has read how many threads its recipe gives it
    return launch(processes, arguments)


@contextmanager
def started_together(device: str) -> Iterator[Group | None]:
    """The processes that torchrun started with this one, joined for a `with` block; None when there is no other."""
    if under_torchrun() < 2:
        yield None
        return
    from equipoise.parallel import joined

    rank, size, local_rank, local_size = (
        int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    )
    with joined(rank=rank, size=size, local_rank=local_rank, local_size=local_size, device=device) as group:
        yield group


def or_orphaned(stop: Callable[[], int]) -> Callable[[], int]:
    """`stop`, and SIGTERM once the process that started this one is gone: nobody would pass on a signal."""
    parent = os.getppid()
    return lambda: stop() or (0 if os.getppid() == parent else int(signal.SIGTERM))
