"""Predicted time, device-hours and money, against numbers worked by hand from the table of devices."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from equipoise.costs import outlook, update_seconds
from equipoise.errors import ConfigError
from equipoise.hardware import HARDWARE, Setting, find_hardware
from equipoise.spec.model import ModelConfig, MoEFFN
from equipoise.spec.recipe import Optim, Recipe
from equipoise.spec.study import StudySpec, load_study_table, parse_study
from equipoise.study import DataFacts

QUICK = DataFacts(vocab_size=512, train_tokens=640_000, certain=True, eval_tokens=64_016)
FULL = DataFacts(vocab_size=8_348, train_tokens=None, certain=False)


def preset(name: str) -> StudySpec:
    return parse_study(load_study_table(name)[0])


def on(device: str, **changes: Any) -> Setting:
    return dataclasses.replace(Setting(hardware=HARDWARE[device], of_arm={}), **changes)


def test_peaks_are_of_dense_products() -> None:
    """Half of what the data sheets print "with sparsity", within their rounding; memory and bandwidth as they stand."""
    for name, sparse, gigabytes, terabytes_per_s in (
        ("h100", 1979, 80, 3.35),
        ("h200", 1979, 141, 4.8),
        ("a100", 624, 80, 2.039),
        ("l4", 242, 24, 0.3),
        ("rtx-4090", 330.4, 24, 1.008),
        ("b200", 4500, 180, 8),
    ):
        one = HARDWARE[name]
        assert one.bfloat16_flops == pytest.approx(sparse / 2 * 1e12, rel=1e-3) and one.cores is None
        assert (one.memory_bytes, one.bandwidth) == (gigabytes * 10**9, pytest.approx(terabytes_per_s * 1e12))
        assert 0 < one.float32_flops < one.bfloat16_flops


def test_an_update_takes_the_longer_of_computing_and_moving() -> None:
    """Forward 392,192 FLOPs a token at 128 of context, of which scores 65,536: causal training 3 · 359,424 = 1,078,272.
    1,024 tokens are one pass of 384,832 parameters: 62 bytes each."""
    ffn = MoEFFN(num_experts=8, top_k=2, d_expert=96)
    model = ModelConfig(num_layers=2, num_heads=4, num_kv_heads=2, d_model=64, vocab_size=1000, ffn=ffn)
    recipe = Recipe(seq_len=128, batch_tokens=1024, optim=Optim(lr=1e-3))
    compute_s, move_s = update_seconds(model, recipe, HARDWARE["l4"], 0.5)
    assert compute_s == pytest.approx(1_104_150_528 / 60.5e12) and move_s == pytest.approx(23_859_584 / 300e9)
    slow, _ = update_seconds(model, dataclasses.replace(recipe, dtype="float32"), HARDWARE["l4"], 0.5)
    assert slow == pytest.approx(1_104_150_528 / 15.15e12)
    cut = dataclasses.replace(recipe, balance_group=1, micro_sequences=2)
    assert update_seconds(model, cut, HARDWARE["l4"], 0.5)[1] == pytest.approx(384_832 * (4 * 22 + 40) / 300e9)
    two = update_seconds(model, cut, HARDWARE["l4"], 0.5, processes=2)
    assert two == (pytest.approx(compute_s / 2), pytest.approx(384_832 * (2 * 22 + 40) / 300e9))


def test_a_study_on_two_cores_by_hand() -> None:
    """moe of quick: 1,084,416 training FLOPs a token less half of 3 · 131,072 for scores = 887,808; a run of one thread
    has half of 0.19 TFLOP/s, at 0.4: 3.8e10. 488 updates of 1,024 tokens, 21 points of 2,304, 64,016 at the end."""
    found = outlook(preset("quick"), QUICK, on("cpu-2-cores"))
    moe, score_s = found["arms"]["moe"], 295_936 / 3.8e10
    assert moe["update_s"] == pytest.approx(887_808 * 1024 / 3.8e10)
    run_s = 488 * 887_808 * 1024 / 3.8e10 + (21 * 2_304 + 64_016) * score_s
    assert moe["run_s"] == {"500000": pytest.approx(run_s)}
    assert moe["device_s"] == pytest.approx(3 * run_s / 2)  # two runs share the device
    assert found["jobs"] == 2 and found["dtype"] == "float32" and found["money"] is None
    # Three long runs, then six short ones, on two places, by hand.
    long, short = (found["arms"][name]["run_s"]["500000"] for name in ("dense-total", "moe"))
    other = found["arms"]["dense-active"]["run_s"]["500000"]
    places = [0.0, 0.0]
    for seconds in (long, long, long, short, short, short, other, other, other):
        places[places.index(min(places))] += seconds
    assert found["study_s"] == pytest.approx(max(places)) and found["held_s"] == pytest.approx(max(places))
    assert found["train_token_bytes"] == 1_280_000 and found["bytes_per_token"] == 2
    assert moe["checkpoint_bytes"] == 12 * 164_672


def test_devices_processes_and_money() -> None:
    spec = preset("tinystories")
    one = outlook(spec, FULL, on("h100", price_per_hour=2.0))
    many = outlook(spec, FULL, on("h100", num_devices=8, processes_per_run=4, price_per_hour=2.0))
    assert many["jobs"] == 2 and many["idle_devices"] == 0 and one["money"] == pytest.approx(one["study_s"] / 1800)
    for name, arm in one["arms"].items():
        assert many["arms"][name]["update_s"] == pytest.approx(arm["update_s"] / 4)
        assert many["arms"][name]["device_s"] == pytest.approx(arm["device_s"])
        assert many["arms"][name]["state_bytes"] == arm["state_bytes"]  # every device holds everything
    assert many["held_s"] == pytest.approx(8 * many["study_s"]) and many["held_s"] >= many["device_s"]
    assert many["money"] == pytest.approx(8 * many["study_s"] / 3600 * 2)
    alone, shared = (outlook(spec, FULL, on("cpu-2-cores", processes_per_run=n)) for n in (1, 2))
    assert (alone["jobs"], shared["jobs"]) == (2, 1) and shared["idle_devices"] == 0  # a core each
    assert shared["device_s"] == pytest.approx(alone["device_s"])
    wasteful = outlook(preset("quick"), QUICK, on("h100", num_devices=16))
    assert wasteful["jobs"] == 9 and wasteful["idle_devices"] == 7


def test_a_shared_trunk_is_paid_for_once() -> None:
    """budgets: 7,494 updates an arm and seed instead of 11,446; the curve costs next to nothing here."""
    spec = preset("budgets")
    spec = dataclasses.replace(spec, recipe=dataclasses.replace(spec.recipe, curve_tokens=1))
    for arm in outlook(spec, FULL, on("h100"))["arms"].values():
        assert arm["device_s"] == pytest.approx(3 * 7_494 * arm["update_s"], rel=1e-4)
        assert sum(arm["run_s"].values()) == pytest.approx(11_446 * arm["update_s"], rel=1e-4)


def test_arms_are_treated_alike_unless_one_is_named() -> None:
    spec = preset("tinystories")
    assert {arm["utilisation"] for arm in outlook(spec, FULL, on("h100"))["arms"].values()} == {0.4}
    found = outlook(spec, FULL, on("h100", utilisation=0.2, of_arm={"moe": 0.1}))["arms"]
    assert [found[name]["utilisation"] for name in ("moe", "dense-active")] == [0.1, 0.2]
    alike = outlook(spec, FULL, on("h100", utilisation=0.2))["arms"]
    assert found["moe"]["update_s"] == pytest.approx(2 * alike["moe"]["update_s"])
    swept = preset("lr-fairness")
    family = outlook(swept, FULL, on("h100", of_arm={"moe": 0.1}))["arms"]
    assert {arm["utilisation"] for name, arm in family.items() if name.startswith("moe@")} == {0.1}


@pytest.mark.parametrize(
    ("device", "changes", "recipe", "said"),
    [
        ("h100", {"of_arm": {"mo": 0.3}}, {}, r"^--utilisation mo=…: no such arm; expected one of moe, dense-active, "),
        (
            "h100",
            {"processes_per_run": 3},
            {},
            r"^3 processes: the 128 sequences of a batch are 16 whole balance group\(s\)",
        ),
        (
            "h100",
            {"processes_per_run": 4},
            {},
            r"^--processes-per-run 4: expected at most the 1 that 1 × h100 can hold \(--devices\)$",
        ),
        (
            "cpu-2-cores",
            {"processes_per_run": 4},
            {},
            r"^--processes-per-run 4: expected at most the 2 that 1 × cpu-2-cores can hold",
        ),
        (
            "cpu-2-cores",
            {},
            {"dtype": "bfloat16"},
            r"^recipe\.dtype: 'bfloat16' is not accepted on cpu-2-cores; expected ",
        ),
    ],
)
def test_what_cannot_be_is_refused(device: str, changes: dict[str, Any], recipe: dict[str, Any], said: str) -> None:
    spec = preset("tinystories")
    spec = dataclasses.replace(spec, recipe=dataclasses.replace(spec.recipe, **recipe))
    with pytest.raises(ConfigError, match=said):
        outlook(spec, FULL, on(device, **changes))


def test_an_unknown_device_is_told_the_known_ones() -> None:
    assert find_hardware("l4").title == "NVIDIA L4"
    with pytest.raises(ConfigError) as error:
        find_hardware("h10")
    known = "cpu-2-cores, l4, rtx-4090, a100, h100, h200, b200"
    assert str(error.value) == f"--device h10: expected one of {known}; did you mean 'h100'?"
