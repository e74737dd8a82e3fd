"""Every failure a user can meet, one exit code a branch; nothing here knows about any other module.

    EquipoiseError        1   unexpected; also what any uncaught exception ends with
    ├── ConfigError       2   a study file, an override or a command line that cannot be meant
    ├── DataError         3   a corpus or token file that cannot be used
    ├── DivergedError     4   a loss, gradient or router output that is not finite
    ├── IntegrityError    5   a checkpoint or run directory that does not match its own record
    ├── LockedError       6   another process holds the run or the study
    ├── ResourceError     7   out of memory or disk
    └── Interrupted     130   SIGHUP (129), SIGINT (130) or SIGTERM (143), after the state was saved

A message names the field or file, the value met, and what would be accepted, in one line; `ConfigError` may carry
several such lines, because all faults of a study file are reported at once.
"""

from __future__ import annotations


class EquipoiseError(Exception):
    """Base of all errors; `exit_code` is what the command line exits with."""

    exit_code: int = 1


class ConfigError(EquipoiseError):
    """A study file, override or argument is wrong; one line a fault."""

    exit_code = 2


class DataError(EquipoiseError):
    """A corpus or a token file is missing, broken or too small."""

    exit_code = 3


class DivergedError(EquipoiseError):
    """A loss, gradient or router output is not finite; the tensor and step are named."""

    exit_code = 4


class IntegrityError(EquipoiseError):
    """A checkpoint or a run directory does not match its own manifest, or belongs to another configuration."""

    exit_code = 5


class LockedError(EquipoiseError):
    """Another live process holds what this one wants to write."""

    exit_code = 6


class ResourceError(EquipoiseError):
    """Memory or disk ran out, or would."""

    exit_code = 7


class Interrupted(EquipoiseError):
    """A signal asked the process to stop and the state was saved; 128 + the signal's number."""

    exit_code = 130

    def __init__(self, message: str, signal_number: int = 2) -> None:
        super().__init__(message)
        self.signal_number = signal_number
        self.exit_code = 128 + signal_number
