"""`equipoise doctor`: what this machine offers and whether everything Equipoise needs is there."""

from __future__ import annotations

import os
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import typer

from equipoise.cli.console import JsonOption, default_cache, emit_json, print_table
from equipoise.text import size

CORE = (
    "torch",
    "numpy",
    "tokenizers",
    "safetensors",
    "pydantic",
    "typer",
    "rich",
    "jinja2",
    "matplotlib",
    "scipy",
    "filelock",
)
EXTRAS = ("transformers", "huggingface_hub", "pyarrow", "ray", "submitit", "tensorboard", "wandb")


def doctor(as_json: JsonOption = False) -> None:
    """Check versions, device, threads, cache and disk; exit 1 when something needed is missing.

    Example: equipoise doctor
    """
    checks = [("python", f"{sys.version.split()[0]}", sys.version_info >= (3, 11))]
    for package in (*CORE, *EXTRAS):
        try:
            checks.append((package, version(package), True))
        except PackageNotFoundError:
            checks.append((package, "not installed", package in EXTRAS))
    checks += [
        _device(),
        ("cores", str(os.cpu_count()), True),
        _folder("cache", default_cache()),
        _folder("here", Path.cwd()),
    ]
    if as_json:
        emit_json({"checks": [{"name": name, "found": found, "ok": ok} for name, found, ok in checks]})
    else:
        print_table(
            "Equipoise on this machine",
            [("", False), ("", False), ("found", False)],
            [[name, "ok" if ok else "MISSING", found] for name, found, ok in checks],
        )
    if not all(ok for _, _, ok in checks):
        raise typer.Exit(1)


def _device() -> tuple[str, str, bool]:
    try:
        from equipoise.device import choose_compute
    except ImportError as error:
        return "device", str(error), False
    return "device", choose_compute("auto", "auto").reason, True


def _folder(name: str, folder: Path) -> tuple[str, str, bool]:
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    return name, f"{folder} ({size(free)} free)", os.access(existing, os.W_OK)
