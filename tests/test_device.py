"""Device, dtype and kernels are chosen in one place, and the reason is said."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from equipoise.device import choose_compute, keep_freed_memory, make_repeatable, put
from equipoise.errors import ConfigError


def gpu(patch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """A card that is there as far as torch says; nothing is computed on it."""
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "get_device_name", lambda: "Card")
    patch.setattr(torch.cuda, "get_device_capability", lambda: capability)


@pytest.mark.parametrize("onednn", [False, True])
@pytest.mark.parametrize("kernels", ["fused", "plain"])
def test_a_cpu_computes_in_float32_with_the_kernels_asked_for(
    kernels: Any, onednn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("equipoise.device.ONEDNN", onednn)
    compute = choose_compute("cpu", "auto", kernels)
    assert (compute.device.type, compute.autocast, compute.kernels) == ("cpu", None, kernels)
    products = ", products with weights by oneDNN (an AMD processor)" if onednn and kernels == "fused" else ""
    assert compute.reason == f"CPU (asked for), float32, {kernels} kernels{products}" and not compute.compile


FOR_CPU = "plain kernels (the fused ones are for a CPU)"
GROUPED = f"bfloat16 autocast, {FOR_CPU}, experts in grouped products, steps compiled"
LOOP = "steps compiled but those of routed models"


@pytest.mark.parametrize(
    ("capability", "dtype", "kernels", "autocast", "built", "compiled", "reason"),
    [
        ((9, 0), "auto", "fused", torch.bfloat16, "grouped", True, GROUPED),
        ((9, 0), "bfloat16", "fused", torch.bfloat16, "grouped", True, GROUPED),
        (
            (9, 0),
            "auto",
            "plain",
            torch.bfloat16,
            "plain",
            False,
            "bfloat16 autocast, plain kernels (asked for), not compiled",
        ),
        (
            (9, 0),
            "float32",
            "plain",
            None,
            "plain",
            False,
            "float32 (asked for), plain kernels (asked for), not compiled",
        ),
        (
            (9, 0),
            "float32",
            "fused",
            None,
            "plain",
            True,
            f"float32 (asked for), {FOR_CPU}, a loop over experts (grouped products need bfloat16), {LOOP}",
        ),
        *(
            (
                capability,
                "auto",
                "fused",
                torch.bfloat16,
                "plain",
                True,
                f"bfloat16 autocast, {FOR_CPU}, a loop over experts (grouped products are slow or wrong at compute "
                f"capability {capability[0]}.{capability[1]}), {LOOP}",
            )
            for capability in ((8, 0), (8, 9), (10, 0), (12, 0))
        ),
        (
            (7, 5),
            "auto",
            "fused",
            None,
            "plain",
            True,
            f"float32 (the card has no native bfloat16), {FOR_CPU}, a loop over experts "
            f"(grouped products need bfloat16), {LOOP}",
        ),
    ],
)
def test_a_gpu_takes_plain_kernels_and_grouped_experts_where_those_are_fast_and_right(
    monkeypatch: pytest.MonkeyPatch,
    capability: Any,
    dtype: Any,
    kernels: Any,
    autocast: Any,
    built: str,
    compiled: bool,
    reason: str,
) -> None:
    gpu(monkeypatch, capability)
    compute = choose_compute("auto", dtype, kernels)
    assert (compute.device.type, compute.autocast, compute.kernels) == ("cuda", autocast, built)
    assert compute.compile is compiled
    assert compute.reason == f"Card, {reason}"


@pytest.mark.parametrize(("avx512", "amx"), [(False, False), (True, False), (False, True)])
def test_bfloat16_on_a_cpu_needs_instructions_for_it(monkeypatch: pytest.MonkeyPatch, avx512: bool, amx: bool) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    if not (avx512 or amx):
        with pytest.raises(ConfigError) as caught:
            choose_compute("cpu", "bfloat16")
        assert str(caught.value) == (
            "recipe.dtype: 'bfloat16' is not accepted on a CPU without AVX512-BF16 or AMX (10 to 20 times slower "
            "there); expected 'auto' or 'float32'"
        )
        return
    compute = choose_compute("cpu", "bfloat16")
    assert (compute.autocast, compute.kernels, compute.compile) == (torch.bfloat16, "plain", False)
    assert compute.reason == "CPU (asked for), bfloat16 autocast, plain kernels (the fused ones are for float32)"
    assert choose_compute("cpu", "auto").autocast is None


def test_bfloat16_is_refused_on_a_card_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, (7, 5))
    with pytest.raises(ConfigError, match=r"recipe\.dtype: 'bfloat16' is not accepted on Card; expected 'auto' or"):
        choose_compute("cuda", "bfloat16")


def test_a_cpu_needs_nothing_to_be_repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[bool, bool]] = []
    monkeypatch.setattr(
        torch, "use_deterministic_algorithms", lambda mode, *, warn_only: asked.append((mode, warn_only))
    )
    make_repeatable(choose_compute("cpu", "auto"))
    assert not asked
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    gpu(monkeypatch, (9, 0))
    make_repeatable(choose_compute("cuda", "auto"))
    assert asked == [(True, True)] and torch.utils.deterministic.fill_uninitialized_memory is False


def test_put_keeps_the_values() -> None:
    array = np.arange(6).reshape(2, 3)
    assert put(array, torch.device("cpu")).tolist() == array.tolist()


FAULTS = """
import resource, sys, torch
from equipoise.device import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.empty(1 << 24).fill_(1.0)
before = faults()
for _ in range(4):
    torch.empty(1 << 24).fill_(1.0)
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator than glibc's is left alone")
def test_freed_memory_is_used_again_without_asking_the_system() -> None:
    def count(how: str) -> int:
        command = [sys.executable, "-c", FAULTS, how]
        return int(subprocess.run(command, capture_output=True, encoding="utf-8", check=True, timeout=120).stdout)

    assert count("keep") < count("default") / 2


def test_another_allocator_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    monkeypatch.setattr(ctypes, "CDLL", lambda _: pytest.fail("not to be touched"))
    keep_freed_memory()
