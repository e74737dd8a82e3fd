"""What is left of a study as lines for a shell, one a unit of work: for GNU parallel, another scheduler, or by hand.

A unit is a run, or a trunk followed by the runs that branch off it. Nothing is executed here: `equipoise run` gathers
what the lines have done, does what is left, and judges.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from equipoise.engine import Task, command_line
from equipoise.engines.worker import carried
from equipoise.errors import ConfigError
from equipoise.faults import printable
from equipoise.spec.run import RunConfig


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One line, and what is there when it has ended."""

    runs: tuple[str, ...]
    """Folders of its runs in the study directory."""
    command: str
    """For a POSIX shell; no line break in it."""


def unit(task: Task, after: Sequence[Task], arguments: Sequence[str], environment: Mapping[str, str]) -> Unit:
    """The unit of `task` and of what follows it, a trunk's runs: they start when it has succeeded, in turn.

    The line names this interpreter and what of `environment` the numbers depend on, so it means the same in any folder
    and on any machine that shares the file system. ConfigError for a path with a line break, which no line can hold.
    """
    variables = carried(environment)
    words = ["env", *(f"{name}={value}" for name, value in sorted(variables.items()))] if variables else []
    words += [sys.executable, "-m", "equipoise"]
    lines = [shlex.join([*words, *command_line(one, arguments)]) for one in (task, *after)]
    runs = tuple(one.run.folder for one in (task, *after) if isinstance(one.run, RunConfig))
    command = " && ".join(lines)
    if "\n" in command or "\r" in command:
        raise ConfigError(f"--engine commands: {printable(command)[:300]}: expected paths without line breaks")
    return Unit(runs=runs, command=command)
