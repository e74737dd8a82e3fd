"""Which device, dtype and kernels a run computes with, and why: chosen here and nowhere else."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, Literal

import torch
from numpy.typing import NDArray

from equipoise import __version__
from equipoise.errors import ConfigError
from equipoise.spec.recipe import Kernels, ModelKernels, Recipe

GROUPED_MAJOR: Final = 9
"""Major compute capability of the cards whose experts are computed in grouped products: Hopper alone. Before it torch's
kernel falls back to a loop that waits for the device (pytorch/pytorch #169970, slow on an A100: #186615), from 12 on it
does so without #184334, and on 10 it gives an expert without tokens a gradient that is not zero (#172439)."""


M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
"""Parameters of mallopt(3): bytes above which free memory is handed back, and allocations come from the system."""


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


ONEDNN: Final = (
    "AMD" in cpu_name() and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
)
"""Whether fused kernels multiply by weights with oneDNN instead of MKL, which is Intel's (`model.fused.products`)."""


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Device, dtype and kernels of a run."""

    device: torch.device
    """Where weights and tokens live."""
    autocast: torch.dtype | None
    """Compute dtype of the forward pass; None = float32. Weights, router and losses are float32 always."""
    kernels: ModelKernels
    """What models are built with."""
    compile: bool
    """Whether to compile the losses of a training step, where the model is one graph (`equipoise.compiled`)."""
    reason: str
    """Why these, for people; the same for every model."""


def choose_compute(
    device: Literal["auto", "cpu", "cuda"], dtype: Literal["auto", "float32", "bfloat16"], kernels: Kernels = "fused"
) -> Compute:
    """Resolve `auto`: a GPU when there is one, bfloat16 there when the card has it, float32 on a CPU.

    The fused kernels are written for float32 on a CPU; elsewhere they give way to the plain ones, on a Hopper card in
    bfloat16 with experts in grouped products, and the reason says so. `kernels = "plain"` is the definitions alone
    everywhere, and nothing is compiled.

    Raises ConfigError for a GPU that is absent, and for bfloat16 on a CPU or a card without instructions for it
    (measured 10 to 20 times slower than float32 on such a CPU).
    """
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise ConfigError("--device cuda: no CUDA device is visible to torch; expected cpu or auto")
    if device == "cpu" or not available:
        return _choose_cpu(dtype, kernels, "asked for" if device == "cpu" else "no CUDA device is visible to torch")
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    native = capability >= (8, 0)
    if dtype == "bfloat16" and not native:
        raise ConfigError(f"recipe.dtype: 'bfloat16' is not accepted on {name}; expected 'auto' or 'float32'")
    half = native and dtype != "float32"
    why_float32 = "asked for" if dtype == "float32" else "the card has no native bfloat16"
    precision = "bfloat16 autocast" if half else f"float32 ({why_float32})"
    if kernels == "plain":
        how = "plain kernels (asked for), not compiled"
    elif half and capability[0] == GROUPED_MAJOR:
        how = "plain kernels (the fused ones are for a CPU), experts in grouped products, steps compiled"
    else:
        why = f"grouped products are slow or wrong at compute capability {capability[0]}.{capability[1]}"
        why = why if half else "grouped products need bfloat16"
        how = (
            "plain kernels (the fused ones are for a CPU), "
            f"a loop over experts ({why}), steps compiled but those of routed models"
        )
    grouped = kernels != "plain" and half and capability[0] == GROUPED_MAJOR
    return Compute(
        device=torch.device("cuda"),
        autocast=torch.bfloat16 if half else None,
        kernels="grouped" if grouped else "plain",
        compile=kernels != "plain",
        reason=f"{name}, {precision}, {how}",
    )


def _choose_cpu(dtype: Literal["auto", "float32", "bfloat16"], kernels: Kernels, why: str) -> Compute:
    cpu = torch.device("cpu")
    if dtype != "bfloat16":
        products = ", products with weights by oneDNN (an AMD processor)" if kernels == "fused" and ONEDNN else ""
        reason = f"CPU ({why}), float32, {kernels} kernels{products}"
        return Compute(device=cpu, autocast=None, kernels=kernels, compile=False, reason=reason)
    if not cpu_has_bfloat16():
        raise ConfigError(
            "recipe.dtype: 'bfloat16' is not accepted on a CPU without AVX512-BF16 or AMX (10 to 20 times slower "
            "there); expected 'auto' or 'float32'"
        )
    plain = "plain kernels" + (" (the fused ones are for float32)" if kernels == "fused" else "")
    reason = f"CPU ({why}), bfloat16 autocast, {plain}"
    return Compute(device=cpu, autocast=torch.bfloat16, kernels="plain", compile=False, reason=reason)


def cpu_has_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 by instructions of its own, as torch sees it."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def make_repeatable(compute: Compute) -> None:
    """Ask torch for algorithms that add in a fixed order on a GPU, so that a resumed run is the same run.

    Attention's backward pass is the one of ours that has another; where torch has none it warns and goes on. A setting
    of the process, as the number of threads is. On a CPU everything is repeatable at a fixed number of threads.
    """
    if compute.device.type == "cuda":
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs a pass


def keep_freed_memory() -> None:
    """Ask glibc's allocator to keep what is freed for what is allocated next, instead of handing it back.

    Every update frees and allocates the same buffers; handing megabytes back to the system and getting them anew costs
    up to 4 % of it (docs/performance.md). A setting of the process; the peak stays the same. Other allocators and
    systems are left alone.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    library = ctypes.CDLL(None)
    for option in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
        library.mallopt(option, 1 << 30)


def put(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """`array` as a tensor on `device`; to a GPU from pinned memory, so that the copy is not waited for."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


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


def peak_memory_bytes(compute: Compute) -> int | None:
    """Peak of this process: device memory on a GPU, resident set on a CPU; None where the system cannot say."""
    if compute.device.type == "cuda":
        return int(torch.cuda.max_memory_allocated())
    if sys.platform == "win32":
        return None
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)
