"""`--track`: the option of `run` and `train`, and what it starts."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated

import typer

from equipoise.cli.console import say
from equipoise.errors import ConfigError

TrackOption = Annotated[
    list[str] | None,
    typer.Option(
        "--track",
        metavar="tensorboard|wandb",
        help="Also hand the metrics to a tracker, in the study's folder, nothing is sent; repeatable.",
    ),
]


def check_trackers(names: list[str] | None) -> list[str]:
    """The trackers asked for; ConfigError for one that is not known."""
    from equipoise.trackers import TRACKERS

    for name in names or ():
        if name not in TRACKERS:
            raise ConfigError(f"--track {name}: expected {' or '.join(TRACKERS)}")
    return list(names or ())


def tracked(
    names: list[str], study: Path, places: Sequence[str], stop: Callable[[], int]
) -> AbstractContextManager[None]:
    """Follow the records in these folders of a study for the time of a `with` block (`equipoise.tracking`)."""
    from equipoise.tracking import tracking

    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # it would report its own faults to its makers
    return tracking(names, study, places, lambda line: say(f"warning: {line}"), interrupted=lambda: stop() != 0)
