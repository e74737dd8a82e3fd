"""Trackers are fed from the record alone: every row once, anew after a cut, and a failure costs one warning.

TensorBoard and wandb are the real packages where they are installed; what they wrote is read back by their own readers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from equipoise import trackers, tracking
from equipoise.cli.track import check_trackers
from equipoise.errors import ConfigError
from equipoise.trackers import Opened

PLACE = "moe/5120-s0"
ROWS = [
    {"kind": "eval", "step": 0, "tokens": 0, "loss": 6.0, "elapsed_s": 0.0, "routing": [{"log_z": 1.5, "dead": []}]},
    {"kind": "train", "step": 1, "tokens": 512, "lm_loss": 5.5, "lr": 0.001, "elapsed_s": 0.25, "router_z": None},
    {"kind": "train", "step": 2, "tokens": 1024, "lm_loss": 5.25, "lr": 0.002, "elapsed_s": 0.5, "router_z": None},
]


def write_rows(study: Path, rows: list[dict[str, Any]], place: str = PLACE) -> Path:
    """The record of a run begun at Unix time 1,000,000."""
    folder = study / place
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"run": {"arm": "moe", "seed": 0}}), encoding="utf-8")
    os.utime(folder / "config.json", (1_000_000, 1_000_000))
    return folder


def finish(folder: Path) -> None:
    (folder / "summary.json").write_text(json.dumps({"val_loss": 5.125, "steps": 2, "status": "x"}), encoding="utf-8")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a stub in TensorBoard's place is told."""
    told: list[Any] = []

    def opener(study: Path, place: str, config: Mapping[str, Any]) -> Opened:
        told.append(("open", place, dict(config)))
        return Opened(
            write=lambda step, when, numbers: told.append((step, when, dict(numbers))),
            close=lambda summary: told.append(("close", dict(summary))),
        )

    monkeypatch.setitem(trackers.TRACKERS, "tensorboard", opener)
    monkeypatch.setattr(tracking, "_installed", lambda name, warn: True)
    return told


def track(study: Path, said: list[str], names: tuple[str, ...] = ("tensorboard",)) -> Any:
    return tracking.tracking(names, study, [PLACE], said.append, poll_s=0.01)


def wait_for(true: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not true() and time.monotonic() < until:
        time.sleep(0.005)
    assert true()


def test_every_row_is_handed_over_once_with_the_time_it_had(tmp_path: Path, calls: list[Any]) -> None:
    said: list[str] = []
    folder = write_rows(tmp_path, ROWS[:2])
    with track(tmp_path, said):
        wait_for(lambda: len(calls) == 3)
        with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(ROWS[2]) + '\n{"kind": "tr')  # a row that is being written is not read
        wait_for(lambda: len(calls) == 4)
    assert not said
    assert calls == [
        ("open", PLACE, {"arm": "moe", "seed": 0}),
        (0, 1_000_000.0, {"eval/tokens": 0, "eval/loss": 6, "eval/elapsed_s": 0, "routing/log_z/layer-0": 1.5}),
        (1, 1_000_000.25, {"train/tokens": 512, "train/lm_loss": 5.5, "train/lr": 0.001, "train/elapsed_s": 0.25}),
        (2, 1_000_000.5, {"train/tokens": 1024, "train/lm_loss": 5.25, "train/lr": 0.002, "train/elapsed_s": 0.5}),
        ("close", {}),
    ]


def test_a_record_cut_back_is_handed_over_anew(tmp_path: Path, calls: list[Any]) -> None:
    """A run that goes on from a checkpoint writes other rows over those beyond it, here more bytes than before."""
    write_rows(tmp_path, ROWS)
    with track(tmp_path, []):
        wait_for(lambda: len(calls) == 4)
        again = [{**ROWS[1], "elapsed_s": 7.125}, {**ROWS[2], "elapsed_s": 8.25, "lm_loss": 4.0}]
        write_rows(tmp_path, [ROWS[0], *again, {**ROWS[2], "step": 3}])
        wait_for(lambda: len(calls) >= 10)
    assert [call[0] for call in calls] == ["open", 0, 1, 2, "close", "open", 0, 1, 2, 3, "close"]
    assert calls[8][2]["train/lm_loss"] == 4.0


def test_a_finished_run_is_closed_with_its_summary_and_not_handed_over_again(tmp_path: Path, calls: list[Any]) -> None:
    folder = write_rows(tmp_path, ROWS)
    finish(folder)
    with track(tmp_path, []):
        wait_for(lambda: len(calls) == 5)
        time.sleep(0.05)
    assert calls[-1] == ("close", {"val_loss": 5.125, "steps": 2.0}) and len(calls) == 5
    with track(tmp_path, []):
        pass
    assert len(calls) == 5
    write_rows(tmp_path, ROWS[:2])  # the run was done again
    with track(tmp_path, []):
        pass
    assert [call[0] for call in calls[5:]] == ["open", 0, 1, "close"]
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "metrics.jsonl", "summary.json"]


def test_a_tracker_that_fails_is_one_warning_and_the_other_goes_on(
    tmp_path: Path, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    attempts: list[int] = []

    def failing(study: Path, place: str, config: Mapping[str, Any]) -> Opened:
        attempts.append(1)
        raise SystemExit("no\nservice")

    monkeypatch.setitem(trackers.TRACKERS, "wandb", failing)
    write_rows(tmp_path, ROWS)
    with track(tmp_path, said, ("wandb", "tensorboard")):
        wait_for(lambda: len(calls) == 4)
        time.sleep(0.05)
    assert said == ["wandb: nothing more is handed to it (SystemExit: no service)"] and len(attempts) == 1
    assert calls[-1] == ("close", {})


def test_a_tracker_that_hangs_holds_nobody_up(
    tmp_path: Path, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    release = threading.Event()
    monkeypatch.setitem(trackers.TRACKERS, "wandb", lambda *_: release.wait(60) and None)
    monkeypatch.setattr(tracking, "DRAIN_S", 0.1)
    write_rows(tmp_path, ROWS)
    with track(tmp_path, said, ("wandb",)):
        pass
    assert said == ["wandb: not done after 0 s; the same command goes on with it"]
    release.set()


def test_many_records_may_take_longer_than_one_may(
    tmp_path: Path, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten finished runs that take 0.03 s each, where a tracker has 0.2 s for one; and once with a signal."""
    places = [f"moe/5120-s{seed}" for seed in range(10)]
    stub = trackers.TRACKERS["tensorboard"]

    def slow(*about: Any) -> Opened:
        time.sleep(0.03)
        return stub(*about)

    monkeypatch.setitem(trackers.TRACKERS, "tensorboard", slow)
    monkeypatch.setattr(tracking, "DRAIN_S", 0.2)
    for place in places:
        finish(write_rows(tmp_path, ROWS, place))
    said: list[str] = []
    with tracking.tracking(["tensorboard"], tmp_path, places, said.append):
        pass
    assert not said and [call[1] for call in calls if call[0] == "open"] == places


def test_a_missing_package_is_one_line_that_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    write_rows(tmp_path, ROWS)
    with track(tmp_path, said, ("wandb", "wandb")):
        pass
    assert said == [
        "--track wandb: the package wandb is not installed, so nothing is handed to it; python -m pip install "
        "'equipoise[wandb]', then the same command again: the record has everything"
    ]


def test_an_unknown_tracker_is_refused_before_anything_begins() -> None:
    with pytest.raises(ConfigError, match=r"^--track comet: expected tensorboard or wandb$"):
        check_trackers(["tensorboard", "comet"])
    assert check_trackers(None) == []


# ------------------------------------------------------------------------------------------------ the real ones


@pytest.fixture
def tensorboard() -> Iterator[Any]:
    """TensorBoard's reader of event files."""
    yield pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="the extra tensorboard is not installed"
    )


def test_tensorboard_reads_back_what_the_record_says(tmp_path: Path, tensorboard: Any) -> None:
    folder = write_rows(tmp_path, ROWS)
    for _ in range(2):  # the second time in place of the first, with the end of the run
        said: list[str] = []
        with track(tmp_path, said):
            pass
        assert not said
        finish(folder)
    (events,) = (tmp_path / "tensorboard" / PLACE).glob("events.out.tfevents.*")
    read = tensorboard.EventAccumulator(str(events.parent))
    read.Reload()
    tags = read.Tags()["tensors"]
    assert {"train/lm_loss", "eval/loss", "routing/log_z/layer-0", "summary/val_loss"} <= set(tags)
    points = [(event.step, event.wall_time, event.tensor_proto.float_val[0]) for event in read.Tensors("train/lm_loss")]
    assert points == [(1, 1_000_000.25, 5.5), (2, 1_000_000.5, 5.25)]
    assert [event.step for event in read.Tensors("summary/val_loss")] == [2]


def test_wandb_writes_an_offline_run_that_wandb_reads_back(tmp_path: Path) -> None:
    """In a child process: wandb starts a service of its own, and is to be given no chance to disturb other tests."""
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    finish(write_rows(tmp_path / "study", ROWS))
    code = """
import json, pathlib
from equipoise.tracking import tracking
from wandb.proto import wandb_internal_pb2

def records(content):  # a LevelDB log: blocks of 32 KiB, records as checksum (4), length (2), kind (1: whole … 4: last)
    place, part = 7, b""
    while place + 7 < len(content):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        length, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        part += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield part
            part = b""

said = []
with tracking(["wandb"], pathlib.Path("study"), ["moe/5120-s0"], said.append):
    pass
(path,) = pathlib.Path("study/wandb").glob("offline-run-*/*.wandb")
rows, summary = [], {}
for data in records(path.read_bytes()):
    record = wandb_internal_pb2.Record()
    record.ParseFromString(data)
    if record.HasField("history"):
        items = record.history.item
        rows.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items})
    for item in record.summary.update:
        summary["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
print(json.dumps({"said": said, "rows": rows, "summary": summary}))
"""
    environment = {**os.environ, "WANDB_MODE": "online", "WANDB_ERROR_REPORTING": "false", "HOME": str(tmp_path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8", timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    read = json.loads(done.stdout)
    assert read["said"] == []
    losses = [(row["_step"], row["train/lm_loss"]) for row in read["rows"] if "train/lm_loss" in row]
    assert losses == [(1, 5.5), (2, 5.25)]
    assert read["rows"][0]["eval/loss"] == 6.0 and read["summary"]["val_loss"] == 5.125
