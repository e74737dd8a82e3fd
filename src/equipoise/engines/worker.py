"""A task carried out in a process that a scheduler started, maybe on another machine: the same command as everywhere.

The command is a child of that process, so that it can be told to save itself, and so that its numbers are those of a
local run: what the environment says to numeric libraries is taken from where the study was started, not from here. If
this process is killed, its child saves itself and ends (Linux).

Not for: schedulers (`on_ray`, `on_slurm`). The only file below the command line that reads the environment: there is no
command line above it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from equipoise.engine import start_child
from equipoise.errors import LockedError
from equipoise.files import held
from equipoise.forks import Child, Nursery, nursery
from equipoise.shares import run_lock

POLL_S: Final = 0.2
"""Seconds between two looks at the child."""
SAVING_S: Final = 120.0
"""Seconds that the child of an attempt before, whose worker was killed, is given to save itself."""
NUMERIC: Final = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "DNNL_", "ONEDNN_", "ATEN_", "TORCH_", "PYTORCH_")
"""How names begin of environment variables that numeric libraries read."""
CARRIED: Final = ("PYTHONPATH",)
"""What a child needs besides to be the same program."""
NO_GPU: Final = {"CUDA_VISIBLE_DEVICES": ""}
"""What a run that was given no GPU has to have too: a scheduler may let it see those of its machine."""
STOPPED: Final = 128 + signal.SIGTERM
"""Exit code of a run that was told to stop and left none of its own."""


def carried(environment: Mapping[str, str]) -> dict[str, str]:
    """What of the environment of a study's process every child has to have, wherever it runs.

    >>> carried({"OMP_NUM_THREADS": "1", "HOME": "/home/me"})
    {'OMP_NUM_THREADS': '1'}
    """
    return {name: value for name, value in environment.items() if name in CARRIED or name.startswith(NUMERIC)}


@dataclass(kw_only=True)
class Attempt:
    """A task that is being carried out."""

    child: Child
    forker: Nursery | None
    told: bool = False

    def stop(self) -> None:
        """Tell it to save itself and end; a second call does nothing."""
        if self.told:
            return
        self.told = True
        if self.forker:
            self.forker.close()  # so that it is told once, also when this process is killed while it saves
        else:
            self.child.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        """Its exit code, once it has one."""
        while (code := self.child.poll()) is None:
            time.sleep(POLL_S)
        return code


@contextmanager
def attempt(line: Sequence[str], log: Path, environment: Mapping[str, str]) -> Iterator[Attempt]:
    """Carry out the command `line` (see `engine.command_line`), output appended to `log`, for a `with` block.

    `environment` is what `carried` returned where the study was started, and maybe NO_GPU.
    """
    here = {name: value for name, value in os.environ.items() if not name.startswith(NUMERIC)}
    _wait_for_another(Path(line[1]))
    with nursery({**here, **environment}) as forker:
        yield Attempt(child=start_child(line, log, forker, {**here, **environment}), forker=forker)


def _wait_for_another(directory: Path) -> None:
    """Give the child of an attempt before time to save itself; whoever else trains there, the command will name."""
    until = time.monotonic() + SAVING_S

    def wait(who: str) -> None:
        if time.monotonic() > until:
            raise LockedError(who)
        time.sleep(POLL_S)

    try:
        with held(run_lock(directory), str(directory), wait):
            pass
    except LockedError:
        return


def note_failure(log: Path, reason: str) -> None:
    """Append why a task has no exit code of its own to its log, as its own process would have said it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        file.write(f"error: {reason}\n")
