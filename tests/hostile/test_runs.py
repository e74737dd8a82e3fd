"""Checkpoints and run records that someone else made or altered: read, or refused in a line that names the file."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.checkpoint import (
    FILES,
    TrainState,
    load_checkpoint,
    load_latest,
    optimizer_tensors,
    restore_model,
    restore_optimizer,
    save_checkpoint,
)
from equipoise.config import digest
from equipoise.errors import IntegrityError
from equipoise.explored import read_explorer
from equipoise.files import describe_file, seal
from equipoise.optim import AdamW, make_adamw
from equipoise.record import append_row, finish_run, last_row, read_config, read_rows, read_run, read_tensors, start_run
from equipoise.spec.model import DenseFFN, ModelConfig
from equipoise.spec.recipe import Optim, Recipe
from equipoise.spec.run import RunConfig

from .conftest import HOSTILE, altered, json_values, told


class Evil:
    """What a pickle can do when it is loaded."""

    def __init__(self, canary: str) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return (os.mkdir, (self.canary,))


# ------------------------------------------------------------------------------------------------ checkpoints


def a_model() -> tuple[torch.nn.Module, AdamW]:
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    optimizer = make_adamw(model, Optim(lr=1e-3))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, optimizer = a_model()
    state = TrainState(
        step=3, run="r", model=model.state_dict(), optim=optimizer_tensors(model, optimizer), state={"best": 1.5}
    )
    return save_checkpoint(tmp_path_factory.mktemp("saved"), state, keep=[])


def seal_checkpoint(path: Path) -> None:
    """Write sizes and hashes of altered files into the manifest, as whoever altered them on purpose would."""
    manifest = {"schema_version": 1, "step": 3, "files": {name: describe_file(path / name) for name in FILES}}
    (path / "manifest.json").write_text(json.dumps(seal(manifest)), encoding="utf-8")


def restore(path: Path) -> None:
    """Load a checkpoint and put it into a model, as a resumed run does; what is restored is finite in number."""
    model, optimizer = a_model()
    found = load_checkpoint(path)
    restore_model(model, found.model)
    restore_optimizer(model, optimizer, found.optim)
    json.dumps(found.state, allow_nan=False)


@st.composite
def safetensors(draw: st.DrawFn, content: bytes, canary: str) -> bytes:
    """A safetensors file with another header, another length, or none at all."""
    (length,) = struct.unpack_from("<Q", content)
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    kind = draw(st.sampled_from(["header", "header", "table", "length", "cut", "more", "flip", "pickle", "bytes"]))
    if kind in ("header", "table"):
        tensors = {name: value for name, value in header.items() if name != "__metadata__"}
        wrong = draw(altered(tensors)) if kind == "header" else draw(json_values)
        if kind == "header" and isinstance(wrong, dict) and draw(st.booleans()):
            name = draw(st.sampled_from(sorted(tensors)))
            shapes = [[], [1], [2, 3], [3, 2], [6], [2**63, 2**63], [-1], [0], [2**31, 2**31, 4]]
            new = {"dtype": draw(st.sampled_from(["F32", "F64", "I32", "BF16", "BOOL", "X9"]))}
            wrong[name] = {**tensors[name], **new, "shape": draw(st.sampled_from(shapes))}
        text = json.dumps(wrong).encode()
        return struct.pack("<Q", len(text)) + text + data
    if kind == "length":
        return (
            struct.pack("<Q", draw(st.sampled_from([0, 1, length - 1, 2**31, 2**40, 2**63, 2**64 - 1]))) + content[8:]
        )
    place = draw(st.integers(0, len(content) - 1))
    if kind == "cut":
        return content[:place]
    if kind == "more":
        return content + draw(st.binary(min_size=1, max_size=9))
    if kind == "flip":
        return content[:place] + bytes([content[place] ^ 1 << draw(st.integers(0, 7))]) + content[place + 1 :]
    return pickle.dumps(Evil(canary)) if kind == "pickle" else draw(st.binary(max_size=99))


@HOSTILE
@given(data=st.data())
def test_altered_tensors_of_a_checkpoint(saved: Path, tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / saved.name
    shutil.copytree(saved, path, dirs_exist_ok=True)
    name = data.draw(st.sampled_from(["model.safetensors", "optim.safetensors"]))
    canary = tmp_path / "canary"
    content = data.draw(safetensors((saved / name).read_bytes(), str(canary)))
    (path / name).write_bytes(content)
    if content != (saved / name).read_bytes():
        assert told(lambda: load_checkpoint(path), IntegrityError) is not None
    seal_checkpoint(path)
    message = told(lambda: restore(path), IntegrityError)
    assert message is None or name in message
    told(lambda: read_tensors(path / name), IntegrityError)
    assert not canary.exists()


@HOSTILE
@given(data=st.data())
def test_altered_words_of_a_checkpoint(saved: Path, tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / saved.name
    shutil.copytree(saved, path, dirs_exist_ok=True)
    name = data.draw(st.sampled_from(["state.json", "manifest.json"]))
    table = json.loads((saved / name).read_text(encoding="utf-8"))
    table.pop("self_digest", None)
    wrong = data.draw(st.one_of(altered(table), altered(table), json_values))
    if name == "manifest.json" and isinstance(wrong, dict):
        try:
            wrong = seal(wrong)
        except (ValueError, RecursionError):  # no digest can be made of it
            wrong = {**wrong, "self_digest": "0" * 64}
    (path / name).write_text(json.dumps(wrong), encoding="utf-8")
    if name == "state.json":
        seal_checkpoint(path)
    message = told(lambda: restore(path), IntegrityError)
    assert message is None or message.startswith(str(path))
    told(lambda: load_latest(tmp_path, "r"), IntegrityError)


# ------------------------------------------------------------------------------------------------ run records


@pytest.fixture(scope="module")
def run() -> RunConfig:
    recipe = Recipe(seq_len=8, batch_tokens=16, balance_group=1, optim=Optim(lr=1e-3))
    model = ModelConfig(num_layers=1, num_heads=2, d_model=16, ffn=DenseFFN(d_ff=16), vocab_size=300)
    return RunConfig(arm="dense", seed=0, budget=160, model=model, recipe=recipe, data="d" * 64)


LAYER = {"usage": [0.5, 0.5, 0.0], "busiest_frac": 0.5, "router_entropy": 0.5, "log_z": 1.0, "collapsed": False}
CHOSEN = {"tokens": 2, "layers": ["oA=="]}
ROW = {
    "kind": "eval", "step": 10, "tokens": 160, "flops": 9, "loss": 3.0, "elapsed_s": 0.1, "routing": [LAYER],
    "chosen": CHOSEN,
}  # fmt: skip
STORY = {"tokens": ["Once", " upon"], "losses": [1.0, 0.5], "end_loss": None, "experts": [], "weights": []}
SUMMARY = {
    "status": "complete", "val_loss": 2.5, "best_val_loss": 2.5, "val_bpb": 1.5, "best_val_bpb": 1.5, "floor": None,
    "curve_floor": None, "floor_reason": None, "val_targets": 900, "val_targets_total": 1200, "num_spikes": None,
    "epochs": 0.5, "routing": [LAYER], "best_routing": [LAYER], "collapsed": False, "best_collapsed": False,
    "resumed_elsewhere": [], "init": {"a": [[2], 0.02]}, "message": None, "steps": 10, "best_step": 10,
}  # fmt: skip
WORDS = {
    "config.json": None,
    "metrics.jsonl": ROW,
    "samples.jsonl": {"step": 10, "tokens": 160, "prompt": "Once", "text": "upon"},
    "environment.json": {"environments": [{"torch": "2", "threads": 1}]},
    "explorer.json": {"stories": [STORY], "layers": []},
    "summary.json": SUMMARY,
}


@HOSTILE
@given(data=st.data())
def test_altered_words_of_a_run(run: RunConfig, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    directory = tmp_path_factory.mktemp("runs") / "run"
    start_run(directory, run, "{}")
    name = data.draw(st.sampled_from(sorted(WORDS)))
    table = WORDS[name] or json.loads((directory / name).read_text(encoding="utf-8"))
    wrong = data.draw(st.one_of(altered(table), altered(table), json_values))
    for known in ("metrics.jsonl", "samples.jsonl"):
        append_row(directory / known, WORDS[known])  # type: ignore[arg-type]
    for known in ("environment.json", "explorer.json"):
        (directory / known).write_text(json.dumps(WORDS[known]), encoding="utf-8")
    text = json.dumps(wrong)
    if name.endswith(".jsonl"):
        text = f"{json.dumps(table)}\n{text}\n"
    summary = {**SUMMARY, "digest": digest(run)}
    if name != "summary.json":
        (directory / name).write_text(text, encoding="utf-8")
        finish_run(directory, summary)
    else:
        finish_run(directory, summary)
        whole = json.loads((directory / name).read_text(encoding="utf-8"))
        whole.pop("self_digest")
        changed = {**whole, **wrong} if isinstance(wrong, dict) else wrong
        try:
            changed = seal(changed) if isinstance(changed, dict) else changed
        except (ValueError, RecursionError):
            changed = {**changed, "self_digest": "0" * 64}
        (directory / name).write_text(json.dumps(changed), encoding="utf-8")
    record = read_run(directory)  # never raises
    assert record.fault is None or record.fault.isprintable()
    told(lambda: read_config(directory), IntegrityError)
    told(lambda: read_explorer(directory / "explorer.json", run.model), IntegrityError)
    for rows in ("metrics.jsonl", "samples.jsonl"):
        told(functools.partial(read_rows, directory / rows), IntegrityError)
        with contextlib.suppress(ValueError):
            told(functools.partial(last_row, directory / rows), IntegrityError)
