"""Which device, dtype and kernels a run computes with, and why: chosen here and nowhere else."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch

from equipoise import __version__
from equipoise.errors import ConfigError
from equipoise.spec.recipe import Kernels, Recipe


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Device, dtype and kernels of a run."""

    device: torch.device
    """Where weights and tokens live."""
    autocast: torch.dtype | None
    """Compute dtype of the forward pass; None = float32. Weights, router and losses are float32 always."""
    kernels: Kernels
    """The passes that models are built with."""
    reason: str
    """Why these, for people."""


def choose_compute(
    device: Literal["auto", "cpu", "cuda"], dtype: Literal["auto", "float32", "bfloat16"], kernels: Kernels = "fused"
) -> Compute:
    """Resolve `auto`: a GPU when there is one, bfloat16 there when the card has it, float32 on a CPU.

    The fused kernels are written for a CPU; on a GPU they give way to the plain ones, and the reason says so.

    Raises ConfigError for a GPU that is absent, and for bfloat16 on a CPU (measured 10 to 20 times slower than float32
    on CPUs without native support) or on a card without it.
    """
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise ConfigError("--device cuda: no CUDA device is visible to torch; expected cpu or auto")
    if device == "cpu" or not available:
        if dtype == "bfloat16":
            raise ConfigError(
                "recipe.dtype: 'bfloat16' is not accepted on a CPU (10 to 20 times slower there); "
                "expected 'auto' or 'float32'"
            )
        why = "asked for" if device == "cpu" else "no CUDA device is visible to torch"
        reason = f"CPU ({why}), float32, {kernels} kernels"
        return Compute(device=torch.device("cpu"), autocast=None, kernels=kernels, reason=reason)
    name = torch.cuda.get_device_name()
    plain = "plain kernels" + (" (the fused ones are for a CPU)" if kernels == "fused" else "")
    cuda = torch.device("cuda")
    native = torch.cuda.get_device_capability() >= (8, 0)
    if dtype == "bfloat16" and not native:
        raise ConfigError(f"recipe.dtype: 'bfloat16' is not accepted on {name}; expected 'auto' or 'float32'")
    if dtype == "float32" or not native:
        why = "asked for" if dtype == "float32" else "the card has no native bfloat16"
        return Compute(device=cuda, autocast=None, kernels="plain", reason=f"{name}, float32 ({why}), {plain}")
    reason = f"{name}, bfloat16 autocast, {plain}"
    return Compute(device=cuda, autocast=torch.bfloat16, kernels="plain", reason=reason)


def environment(compute: Compute, recipe: Recipe) -> dict[str, Any]:
    """Versions and machine as plain JSON values: what has to be equal for two runs to agree bit for bit."""
    return {
        "equipoise": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": version("numpy"),
        "tokenizers": version("tokenizers"),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "device": str(compute.device),
        "compute": compute.reason,
        "threads": recipe.threads,
    }


def cpu_name() -> str:
    """Model name of the processor, or its architecture where the system does not say."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def peak_memory_bytes(compute: Compute) -> int | None:
    """Peak of this process: device memory on a GPU, resident set on a CPU; None where the system cannot say."""
    if compute.device.type == "cuda":
        return int(torch.cuda.max_memory_allocated())
    if sys.platform == "win32":
        return None
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)
