"""Equipoise: matched, reproducible, pre-declared comparisons of dense and Mixture-of-Experts language models."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from equipoise.loading import StudyResults

__all__ = ["load_study"]
__version__ = "0.1.0"


def load_study(path: Path | str) -> StudyResults:
    """A study's results as plain rows and numpy arrays, for notebooks and scripts. Loads no torch, writes nothing.

    `path` is the folder of a study (its run directories are read, so it may be unfinished: every run says its status),
    or a `results.json` on its own. Rows are small dataclasses, which `pandas.DataFrame(study.runs)` takes as they are;
    `study.results` is the whole of `results.json`, which the functions of `equipoise.figures` draw.

    Raises ConfigError for a path that is not there, IntegrityError for one that is no study or cannot be read.
    """
    from equipoise.loading import read_results  # what needs numpy is loaded when it is asked for

    return read_results(path)
