"""What this machine lends to a process, and how busy it is. Not for: speed (`bench`) or GPUs (`device`)."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

LOOK_S: Final = 0.5
"""Seconds over which it is looked how busy the machine is."""


def usable_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_memory() -> int | None:
    """Bytes that can be had without swapping; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that no memory could be had, as Python or torch on a CPU or a GPU says it."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "DefaultCPUAllocator" in str(error)  # torch has no class of its own for it
    )


def load_average() -> float | None:
    """Load average over the last minute; None where the system has none."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def busy_cores() -> float | None:
    """Cores at work while this process sleeps for half a second; None where there is no /proc/stat."""

    def ticks() -> tuple[int, int]:
        numbers = [int(n) for n in Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()[1:9]]
        return sum(numbers), numbers[3] + numbers[4]  # all, and those idle or waiting for a disk

    try:
        all_before, idle_before = ticks()
        time.sleep(LOOK_S)
        all_after, idle_after = ticks()
    except (OSError, ValueError, IndexError):
        return None
    passed = all_after - all_before
    return round((os.cpu_count() or 1) * (1 - (idle_after - idle_before) / passed), 3) if passed else None
