"""The run directory: its status is what its files say, alterations are found, rows survive a torn line."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from equipoise.config import digest
from equipoise.errors import IntegrityError
from equipoise.record import (
    append_row,
    cut_rows,
    finish_run,
    last_row,
    mark_rows,
    masked,
    read_config,
    read_rows,
    read_run,
    rows_fault,
    start_run,
)
from equipoise.spec.model import DenseFFN, ModelConfig
from equipoise.spec.recipe import Optim, Recipe
from equipoise.spec.run import RunConfig


@pytest.fixture
def run() -> RunConfig:
    recipe = Recipe(seq_len=8, batch_tokens=16, balance_group=1, optim=Optim(lr=1e-3))
    model = ModelConfig(num_layers=1, num_heads=2, d_model=16, ffn=DenseFFN(d_ff=16), vocab_size=300)
    return RunConfig(arm="dense", seed=0, budget=160, model=model, recipe=recipe, data="d" * 64)


@pytest.fixture
def finished(run: RunConfig, tmp_path: Path) -> Path:
    directory = tmp_path / "dense" / "160-s0"
    start_run(directory, run, "{}")
    (directory / "checkpoints" / "step-00000010").mkdir(parents=True)
    (directory / "checkpoints" / "step-00000010" / "manifest.json").write_text("{}", encoding="utf-8")
    append_row(directory / "metrics.jsonl", {"kind": "train", "step": 1})
    finish_run(directory, {"status": "complete", "digest": digest(run), "val_loss": 2.5})
    return directory


def test_states_of_a_directory(run: RunConfig, finished: Path, tmp_path: Path) -> None:
    assert read_run(tmp_path / "nowhere").status == "missing"
    assert read_run(finished).status == "complete"
    summary = finished / "summary.json"
    summary.unlink()
    assert read_run(finished).status == "interrupted"
    shutil.rmtree(finished / "checkpoints")
    assert read_run(finished).status == "started"


def test_a_complete_run_needs_no_weights_but_may_not_have_altered_ones(finished: Path) -> None:
    manifest = finished / "checkpoints" / "step-00000010" / "manifest.json"
    manifest.write_text("{ }", encoding="utf-8")
    assert read_run(finished).status == "broken"
    shutil.rmtree(finished / "checkpoints")
    assert read_run(finished).status == "complete"


@pytest.mark.parametrize("name", ["metrics.jsonl", "tokenizer.json", "config.json"])
@pytest.mark.parametrize("how", ["truncate", "flip", "delete"])
def test_every_altered_file_breaks_the_run_and_is_named(finished: Path, name: str, how: str) -> None:
    path = finished / name
    content = path.read_bytes()
    if how == "delete":
        path.unlink()
    else:
        path.write_bytes(content[:-2] if how == "truncate" else content[:-1] + bytes([content[-1] ^ 1]))
    record = read_run(finished)
    if name == "config.json" and how == "delete":
        assert record.status == "missing"
    else:
        assert record.status == "broken" and name in str(record.fault)


def test_an_altered_summary_breaks_the_run(finished: Path) -> None:
    path = finished / "summary.json"
    stored = json.loads(path.read_text(encoding="utf-8"))
    for change in ({"val_loss": 1.5}, {"digest": "0" * 64}, {"status": "done"}, {"schema_version": 2}, {"files": None}):
        path.write_text(json.dumps({**stored, **change}), encoding="utf-8")
        record = read_run(finished)
        assert record.status == "broken" and "summary.json: its digest does not match" in str(record.fault)


def test_a_flipped_bit_in_weights_is_found_when_looked_for(finished: Path) -> None:
    manifest = finished / "checkpoints" / "step-00000010" / "manifest.json"
    manifest.write_text("[]", encoding="utf-8")  # as many bytes
    assert read_run(finished, deep=False).status == "complete"
    assert read_run(finished).status == "broken"


def test_config_comes_back_and_another_run_is_refused(run: RunConfig, finished: Path) -> None:
    assert read_config(finished) == run
    with pytest.raises(IntegrityError, match=r"holds another run \(budget: 160 → 320\)"):
        start_run(finished, dataclasses.replace(run, budget=320), "{}")
    stored = json.loads((finished / "config.json").read_text(encoding="utf-8"))
    stored["run"]["seed"] = 7
    (finished / "config.json").write_text(json.dumps(stored), encoding="utf-8")
    with pytest.raises(IntegrityError, match="digest does not match"):
        read_config(finished)


def test_rows_are_cut_to_their_mark_and_a_torn_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2, 3):
        if step == 3:
            marks = mark_rows(tmp_path)
        append_row(path, {"kind": "train", "step": step, "text": "a\u2028b"})
    with path.open("a", encoding="utf-8") as file:
        file.write('{"kind":"train","ste')
    assert [row["step"] for row in read_rows(path)] == [1, 2, 3]
    assert last_row(path) == {"kind": "train", "step": 3, "text": "a\u2028b"}
    assert rows_fault(tmp_path, marks) is None
    cut_rows(tmp_path, marks)
    assert [row["step"] for row in read_rows(path)] == [1, 2]
    cut_rows(tmp_path, None)
    assert path.read_bytes() == b""


def test_rows_missing_before_a_mark_or_altered_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2, 3):
        append_row(path, {"kind": "train", "step": step})
    marks, content = mark_rows(tmp_path), path.read_bytes()
    for broken in (content[:-1], b"", content.replace(b"2", b"7")):
        path.write_bytes(broken)
        assert "metrics.jsonl: rows that belong to the checkpoint are missing or altered" in str(
            rows_fault(tmp_path, marks)
        )


def test_the_last_row_of_a_long_file_is_read_from_its_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": step, "pad": "x" * 500} for step in range(300)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    found: Any = last_row(path)
    assert path.stat().st_size > 65_536 and found["step"] == 299
    assert last_row(tmp_path / "none.jsonl") is None


def test_a_bad_line_in_the_middle_is_an_error_naming_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":1}\n{"ste\n{"step":3}\n', encoding="utf-8")
    with pytest.raises(IntegrityError, match=r"metrics\.jsonl:2: not a JSON line"):
        read_rows(path)


def test_masked_rows_hold_no_machine_field() -> None:
    row = {"step": 1, "lm_loss": 2.0, "elapsed_s": 3.0, "tokens_per_s": 4.0}
    assert masked([row]) == [{"step": 1, "lm_loss": 2.0}]
