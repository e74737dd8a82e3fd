"""`plan --device` as a user types it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from equipoise.cli.main import call
from equipoise.cli.outlook import lines, read_setting
from equipoise.cli.plan import show_time
from equipoise.errors import ConfigError


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert call(["plan", *words]) == 0
    return capsys.readouterr().out


def test_the_plan_is_the_same_and_the_prediction_comes_after_it(capsys: pytest.CaptureFixture[str]) -> None:
    alone = planned(capsys, "tinystories")
    both = planned(capsys, "tinystories", "--device", "h100", "--price-per-hour", "2.5")
    assert both.startswith(alone)
    said = both.removeprefix(alone)
    assert (
        "predicted for 1 × NVIDIA H100 SXM (h100): bfloat16, peak 989.4 TFLOP/s a device, assumed to reach 0.4 of it "
        "for every arm"
    ) in said
    assert "money: " in said and "at 2.50 a device-hour" in said and "device-hours" in said
    assert "NO" not in said and "warning: does not fit" not in said
    assert "starting operations one by one would take longer than computing them, about moe " in said
    document = json.loads(planned(capsys, "tinystories", "--json"))
    predicted = json.loads(planned(capsys, "tinystories", "--device", "h100", "--json"))
    device = predicted.pop("device")
    assert predicted == document and device["name"] == "h100" and set(device["arms"]) >= {"moe", "dense-total"}


def test_what_does_not_fit_and_who_is_slower_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    said = planned(
        capsys,
        *("gutenberg", "--set", "base.model.d_model=6144", "--set", "base.model.num_heads=48"),
        *("--device", "l4", "--utilisation", "0.3", "--utilisation", "moe=0.15", "--devices", "20"),
    )
    assert "assumed to reach of it 0.15 for moe, 0.3 for moe-unbalanced" in said
    assert "warning: does not fit: moe, moe-unbalanced" in said and "in the 24 GB of l4" in said and "  NO  " in said
    assert "warning: 2 of 20 devices would be idle" in said
    assert "moving weights takes longer" not in said
    small = planned(capsys, "gutenberg", "--device", "l4")
    assert "dense-active: moving weights" not in small
    assert "warning: moe, moe-unbalanced, experts-8, experts-16, experts-32: moving weights takes longer than" in small


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((None, None, 2, None, None), "--devices: goes with --device NAME, which is missing"),
        ((None, ["0.3"], None, None, None), "--utilisation: goes with --device NAME, which is missing"),
        ((None, None, None, None, "2"), "--price-per-hour: goes with --device NAME, which is missing"),
        (
            ("h100", ["1.1"], None, None, None),
            "--utilisation 1.1: expected a number above 0 and at most 1, or ARM=NUMBER",
        ),
        (
            ("h100", ["moe="], None, None, None),
            "--utilisation moe=: expected a number above 0 and at most 1, or ARM=NUMBER",
        ),
        (
            ("h100", ["nan"], None, None, None),
            "--utilisation nan: expected a number above 0 and at most 1, or ARM=NUMBER",
        ),
        (
            ("h100", None, None, None, "-1"),
            "--price-per-hour -1: expected a number of 0 or more, below a billion",
        ),
        (
            ("h100", None, None, None, "inf"),
            "--price-per-hour inf: expected a number of 0 or more, below a billion",
        ),
    ],
)
def test_options_that_cannot_be_read(given: Sequence[Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_setting(*given)
    assert str(error.value) == said


def test_options_are_read() -> None:
    assert read_setting(None, None, None, None, None) is None
    found = read_setting("a100", ["0.3", "dense@lr=3e-4=0.2"], 4, 2, "0")
    assert found is not None and found.of_arm == {"dense@lr=3e-4": 0.2} and found.utilisation == 0.3
    assert (found.num_devices, found.processes_per_run, found.price_per_hour) == (4, 2, 0.0)
    assert found.reached("dense@lr=3e-4") == 0.2 and found.reached("dense@lr=1e-3") == 0.3


@pytest.mark.parametrize("device", ["h10", "cuda", ""])
def test_a_wrong_device_ends_in_one_line(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["plan", "quick", "--device", device]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --device {device}: expected one of cpu-2-cores, l4, ")


@pytest.mark.parametrize(("busy", "warned"), [(1.3, True), (0.2, False), (None, False)])
def test_a_probe_of_a_busy_machine_says_so(
    busy: float | None, warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    show_time({"study_s": 12.0, "jobs": 2, "arms": {}, "busy_cores": busy})
    assert ("the machine was not idle when this was measured" in capsys.readouterr().out) == warned


def test_the_corpus_is_said_once_it_is_known() -> None:
    found = {
        "jobs": 1,
        "processes_per_run": 2,
        "study_s": 7200.0,
        "device_s": 14_400.0,
        "held_s": 14_400.0,
        "money": None,
        "bytes_per_token": 4,
        "train_token_bytes": 2**30,
        "once_through_bytes": 2**20,
        "arms": {},
        "idle_devices": 0,
        "num_devices": 2,
    }
    said = lines(found)
    assert said[0].startswith(
        "whole study: about 2 h 0 min with 1 run(s) at a time, 2 processes each; device-hours: 4 at work"
    )
    assert (
        said[1]
        == "data: 4 bytes a token on disk; the training tokens 1.0 GiB, the longest run without repeating any 1.0 MiB"
    )
