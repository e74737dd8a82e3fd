"""Device, dtype and kernels are chosen in one place, and the reason is said."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from equipoise.device import choose_compute
from equipoise.errors import ConfigError


def gpu(patch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """A card that is there as far as torch says; nothing is computed on it."""
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "get_device_name", lambda: "Card")
    patch.setattr(torch.cuda, "get_device_capability", lambda: capability)


@pytest.mark.parametrize("kernels", ["fused", "plain"])
def test_a_cpu_computes_in_float32_with_the_kernels_asked_for(kernels: Any) -> None:
    compute = choose_compute("cpu", "auto", kernels)
    assert (compute.device.type, compute.autocast, compute.kernels) == ("cpu", None, kernels)
    assert compute.reason == f"CPU (asked for), float32, {kernels} kernels"


@pytest.mark.parametrize(
    ("capability", "dtype", "kernels", "autocast", "reason"),
    [
        ((9, 0), "auto", "fused", torch.bfloat16, "bfloat16 autocast, plain kernels (the fused ones are for a CPU)"),
        ((9, 0), "auto", "plain", torch.bfloat16, "bfloat16 autocast, plain kernels"),
        ((9, 0), "float32", "plain", None, "float32 (asked for), plain kernels"),
        ((7, 5), "auto", "plain", None, "float32 (the card has no native bfloat16), plain kernels"),
    ],
)
def test_a_gpu_takes_plain_kernels(
    monkeypatch: pytest.MonkeyPatch, capability: Any, dtype: Any, kernels: Any, autocast: Any, reason: str
) -> None:
    gpu(monkeypatch, capability)
    compute = choose_compute("auto", dtype, kernels)
    assert (compute.device.type, compute.autocast, compute.kernels) == ("cuda", autocast, "plain")
    assert compute.reason == f"Card, {reason}"


def test_bfloat16_is_refused_where_it_is_slow_or_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"recipe\.dtype: 'bfloat16' is not accepted on a CPU"):
        choose_compute("cpu", "bfloat16")
    gpu(monkeypatch, (7, 5))
    with pytest.raises(ConfigError, match=r"recipe\.dtype: 'bfloat16' is not accepted on Card; expected 'auto' or"):
        choose_compute("cuda", "bfloat16")
