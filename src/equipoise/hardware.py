"""Machines a study can be planned for: what their makers say of them, and the one that was measured here.

Peaks are of dense matrix products: where a maker prints a figure "with sparsity" it is halved. A GB is 10^9 bytes, as
makers count. Not for: what a study costs there (`costs`), or this machine (`machine`, `device`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from equipoise.errors import ConfigError
from equipoise.faults import cut, did_you_mean, printable
from equipoise.spec.sweep import family

GB: Final = 10**9
TFLOPS: Final = 10**12
DEFAULT_UTILISATION: Final = 0.4
"""FLOPs of the model ÷ what the device could have computed meanwhile, where nothing is said. Others measured 0.32 to
0.45 for dense models of 0.76 to 7 billion parameters on H100 cards (docs/scale.md); small models reach less."""
USABLE_SHARE: Final = 0.9
"""Share of a GPU's memory that a run may need: the rest is for the driver, for what only lives for a moment, and for
holes between tensors."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One device: a GPU, or all cores of a CPU together."""

    name: str
    """What `plan --device` calls it."""
    title: str
    """What its maker calls it."""
    bfloat16_flops: float | None
    """FLOP/s of dense bfloat16 products with float32 sums; None where `recipe.dtype = "auto"` is float32."""
    float32_flops: float
    """FLOP/s of float32 products; TensorFloat-32 is never used."""
    memory_bytes: int
    """Memory that runs can have together."""
    bandwidth: float
    """Bytes a second between that memory and where it computes."""
    source: str
    """Where the figures stand."""
    cores: int | None = None
    """Cores of a CPU, which runs share by their threads; None for a GPU, which a run has for itself."""


HARDWARE: Final = {
    one.name: one
    for one in (
        Hardware(
            name="cpu-2-cores",
            title="two cores of an AMD EPYC (AVX-512)",
            bfloat16_flops=None,
            float32_flops=0.19 * TFLOPS,
            memory_bytes=24 * GB,
            bandwidth=17 * GB,
            source="measured: matrix products of docs/performance.md, 183 to 194 GFLOP/s; a copy of 64 MiB and more",
            cores=2,
        ),
        Hardware(
            name="l4",
            title="NVIDIA L4",
            bfloat16_flops=121 * TFLOPS,
            float32_flops=30.3 * TFLOPS,
            memory_bytes=24 * GB,
            bandwidth=300 * GB,
            source="NVIDIA L4 data sheet (BF16 242 with sparsity)",
        ),
        Hardware(
            name="rtx-4090",
            title="NVIDIA GeForce RTX 4090",
            bfloat16_flops=165.2 * TFLOPS,
            float32_flops=82.6 * TFLOPS,
            memory_bytes=24 * GB,
            bandwidth=1_008 * GB,
            source="NVIDIA Ada GPU architecture white paper, appendix A (BF16 with FP32 accumulate)",
        ),
        Hardware(
            name="a100",
            title="NVIDIA A100 80GB SXM",
            bfloat16_flops=312 * TFLOPS,
            float32_flops=19.5 * TFLOPS,
            memory_bytes=80 * GB,
            bandwidth=2_039 * GB,
            source="NVIDIA A100 data sheet",
        ),
        Hardware(
            name="h100",
            title="NVIDIA H100 SXM",
            bfloat16_flops=989.4 * TFLOPS,
            float32_flops=66.9 * TFLOPS,
            memory_bytes=80 * GB,
            bandwidth=3_350 * GB,
            source="NVIDIA H100 data sheet (BF16 1,979 with sparsity)",
        ),
        Hardware(
            name="h200",
            title="NVIDIA H200 SXM",
            bfloat16_flops=989.4 * TFLOPS,
            float32_flops=66.9 * TFLOPS,
            memory_bytes=141 * GB,
            bandwidth=4_800 * GB,
            source="NVIDIA H200 data sheet (BF16 1,979 with sparsity)",
        ),
        Hardware(
            name="b200",
            title="NVIDIA B200 (HGX, 1,000 W)",
            bfloat16_flops=2_250 * TFLOPS,
            float32_flops=80 * TFLOPS,
            memory_bytes=180 * GB,
            bandwidth=8_000 * GB,
            source="NVIDIA Blackwell architecture brief and DGX B200 data sheet (BF16 4,500 with sparsity)",
        ),
    )
}
"""By name, the slowest first."""


def find_hardware(name: str) -> Hardware:
    """The device of this name; ConfigError with the known ones for any other."""
    if name not in HARDWARE:
        known = ", ".join(HARDWARE)
        raise ConfigError(f"--device {cut(printable(name))}: expected one of {known}{did_you_mean(name, HARDWARE)}")
    return HARDWARE[name]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where a study would run, and what is assumed."""

    hardware: Hardware
    """The kind of device."""
    num_devices: int = 1
    """How many of them."""
    processes_per_run: int = 1
    """Processes that share the batches of one run, each with a copy of everything else (data parallel): a device each,
    on a CPU `recipe.threads` cores each."""
    utilisation: float = DEFAULT_UTILISATION
    """Of every arm that `of_arm` does not name."""
    of_arm: Mapping[str, float]
    """Utilisation by name of an arm, or of a family of swept arms."""
    price_per_hour: float | None = None
    """Of one device, in any currency; None: no money is counted."""

    def reached(self, arm: str) -> float:
        """The utilisation assumed for an arm."""
        return self.of_arm.get(arm, self.of_arm.get(family(arm) or arm, self.utilisation))
