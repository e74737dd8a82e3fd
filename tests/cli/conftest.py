"""A finished study, run once per test process by the real command, and how to call the command."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Call = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def equipoise(tmp_path_factory: pytest.TempPathFactory, tiny_cache: Path) -> Call:
    """Call the command line in a child process, with the shared cache, in `cwd` (default: a folder of its own)."""
    home = tmp_path_factory.mktemp("home")

    def call(
        *arguments: str, cwd: Path = home, timeout: float = 240, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": "/usr/bin:/bin",
            "HOME": str(home),
            "EQUIPOISE_CACHE": str(tiny_cache),
            "LC_ALL": "C.UTF-8",
            **({"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}),
        }
        return subprocess.run(
            [sys.executable, "-m", "equipoise", *arguments],
            cwd=cwd,
            env=environment,
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=timeout,
            check=False,
            **options,
        )

    return call


@pytest.fixture(scope="session")
def finished(equipoise: Call, tmp_path_factory: pytest.TempPathFactory, tiny_toml: str) -> Path:
    """The folder in which the tiny study was run: `study.toml` and `runs/tiny`. Tests that change it copy it first."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "study.toml").write_text(tiny_toml, encoding="utf-8")
    done = equipoise("run", "study.toml", cwd=folder)
    assert done.returncode == 0, done.stderr
    (folder / "stdout").write_text(done.stdout, encoding="utf-8")
    (folder / "stderr").write_text(done.stderr, encoding="utf-8")
    return folder
