"""step_time.json: what is read is checked; whatever is wrong with it is a reason, never an error."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from equipoise.files import seal, write_json
from equipoise.lock import lock_study
from equipoise.step_time import NAME, StepTimes, probed_models, read_step_times, write_step_times

MEASURED = {
    "measured": "2026-01-02T03:04:05+00:00",
    "rounds": {"moe": [0.3, 0.1, 0.2], "dense": [0.1, 0.1, 0.4, 0.2]},
    "environment": {"cpu": "a processor", "threads": 1},
    "load": 0.75,
    "busy_cores": 0.1,
}


@pytest.fixture
def lock(tiny: Any, tmp_path: Path) -> Any:
    return lock_study(tmp_path, tiny.spec, tiny.models, tiny.dataset)


def test_medians_and_spreads_of_the_rounds(lock: Any, tmp_path: Path) -> None:
    write_step_times(tmp_path, lock, MEASURED)
    times = read_step_times(tmp_path, lock)
    assert isinstance(times, StepTimes)
    assert times.step_s == pytest.approx({"moe": 0.2, "dense": 0.15})
    assert times.spread == pytest.approx({"moe": 0.2 / 0.2, "dense": 0.3 / 0.15})
    assert times.idle is True and times.environment["threads"] == 1 and times.load == 0.75
    assert dataclasses.replace(times, busy_cores=0.51).idle is False
    assert dataclasses.replace(times, busy_cores=None).idle is None


def test_an_absent_file_is_said(lock: Any, tmp_path: Path) -> None:
    assert read_step_times(tmp_path, lock) == "no step_time.json; `equipoise run` writes it after the last run"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"rounds": {"moe": [0.1]}}, r"cannot be used \('dense'\)"),
        ({"rounds": {"moe": [0.1], "dense": []}}, "rounds of dense: expected seconds above 0"),
        ({"rounds": {"moe": [0.1], "dense": [0.1, -1]}}, "rounds of dense: expected seconds above 0"),
        ({"rounds": {"moe": [0.1], "dense": ["a"]}}, "rounds of dense: expected seconds above 0"),
        ({"rounds": 3}, "cannot be used"),
        ({"environment": []}, "cannot be used"),
        ({"schema_version": 9}, "schema_version 9; expected 1"),
        ({"models": "other"}, "measured on other arms or another recipe"),
    ],
)
def test_a_broken_one_is_a_reason(lock: Any, tmp_path: Path, changed: dict[str, Any], reason: str) -> None:
    write_step_times(tmp_path, lock, MEASURED)
    stored = json.loads((tmp_path / NAME).read_text(encoding="utf-8"))
    del stored["self_digest"]
    write_json(tmp_path / NAME, seal({**stored, **changed}))
    said = read_step_times(tmp_path, lock)
    assert isinstance(said, str)
    assert re.search(reason, said)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"rounds": {}}'])
def test_no_content_of_the_file_is_an_error(lock: Any, tmp_path: Path, content: bytes) -> None:
    (tmp_path / NAME).write_bytes(content)
    said = read_step_times(tmp_path, lock)
    assert isinstance(said, str) and said.startswith("step_time.json: cannot be used")


def test_a_change_by_hand_is_noticed(lock: Any, tmp_path: Path) -> None:
    write_step_times(tmp_path, lock, MEASURED)
    text = (tmp_path / NAME).read_text(encoding="utf-8")
    (tmp_path / NAME).write_text(text.replace("0.75", "0.01"), encoding="utf-8")
    assert "changed after it was written" in str(read_step_times(tmp_path, lock))


def test_members_of_a_sweep_are_probed_once(tiny: Any, lock: Any) -> None:
    arm = tiny.spec.arms["dense"]
    arms = {
        "moe": tiny.spec.arms["moe"],
        **{f"dense@lr={lr}": dataclasses.replace(arm, lr=float(lr)) for lr in ("1e-3", "3e-3")},
    }
    models = {"moe": tiny.models["moe"], **{name: tiny.models["dense"] for name in arms if name != "moe"}}
    swept = dataclasses.replace(lock, study=dataclasses.replace(tiny.spec, arms=arms), models=models)
    assert probed_models(swept) == tiny.models
