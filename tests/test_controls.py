"""Every option of routing through a small study: planned, trained, stopped, resumed, scored, reported, exported."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import equipoise.score as scoring
from equipoise.checkpoint import restore_model
from equipoise.config import read_toml
from equipoise.data.packing import eval_windows
from equipoise.errors import ConfigError, Interrupted
from equipoise.export.write import export
from equipoise.lock import lock_study, locked_runs, note_finished
from equipoise.matching import resolve_arms
from equipoise.model.transformer import build, token_losses
from equipoise.record import masked, read_rows
from equipoise.report.write import write_report
from equipoise.results import collect
from equipoise.score import evaluate, sample
from equipoise.spec.study import parse_study
from equipoise.study import DataFacts, plan
from equipoise.train import train
from equipoise.weights import read_weights

ARMS = """
learned = {}
bias = { balance = { kind = "bias", rate = 0.001 } }
bias-top-1 = { balance = { kind = "bias", rate = 0.001 }, top_k = 1, renormalize = false }
shared = { num_shared_experts = 2, balance = { kind = "none" } }
fine = { fine_grained = 2, num_shared_experts = 1 }
frozen = { router = "frozen" }
frozen-top-1 = { router = "frozen", top_k = 1 }
hash = { router = "hash" }
hash-all = { router = "hash", top_k = 3 }
random = { router = "random", num_shared_experts = 1 }
random-top-1 = { router = "random", top_k = 1, renormalize = false }
"""
NAMES = list(read_toml(ARMS, "arms"))
Stop = Callable[[], int]


@pytest.fixture(scope="module")
def study(tiny: Any, tiny_toml: str, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """One run of each arm, ten updates of two micro-batches, trained without a stop."""
    table = read_toml(tiny_toml, "tiny")
    del table["claims"]
    routed = {"kind": "moe", "num_experts": 3, "top_k": 2, "d_expert": 16}
    arms = {name: {"model": {"ffn": {**routed, **ffn}}} for name, ffn in read_toml(ARMS, "arms").items()}
    table |= {"seeds": [0], "arms": arms, "recipe": {**table["recipe"], "micro_sequences": 1}}
    spec = parse_study(table)
    directory = tmp_path_factory.mktemp("study")
    resolved = resolve_arms(spec.arms, tiny.dataset.vocab_size, spec.recipe.seq_len)
    lock = lock_study(directory, spec, {name: arm.model for name, arm in resolved.items()}, tiny.dataset, "run")
    runs = {run.arm: run for run in locked_runs(lock)}
    for run in runs.values():
        train(run, directory / run.folder, tiny.dataset)
    note_finished(directory)
    return SimpleNamespace(spec=spec, directory=directory, runs=runs, dataset=tiny.dataset)


def folder(study: SimpleNamespace, arm: str) -> Path:
    return study.directory / study.runs[arm].folder


def saved(directory: Path) -> dict[str, bytes]:
    (newest,) = sorted((directory / "checkpoints").glob("step-*"))[-1:]
    paths = (newest / "model.safetensors", newest / "optim.safetensors", directory / "val_losses.safetensors")
    return {path.name: path.read_bytes() for path in paths}


def loaded(study: SimpleNamespace, arm: str, kernels: Any = "fused") -> Any:
    run, weights = study.runs[arm], read_weights(folder(study, arm))
    model = build(run.model, run.seed, kernels=kernels)
    restore_model(model, {name: torch.from_numpy(tensor) for name, tensor in weights.tensors.items()})
    return model


@pytest.mark.parametrize("arm", NAMES)
def test_stopping_anywhere_changes_no_byte(study: SimpleNamespace, tmp_path: Path, arm: str) -> None:
    stops = 0
    while True:
        polls = iter(range(10_000))
        stop: Stop = lambda polls=polls, last=4 + 3 * stops: 15 * (next(polls) >= last)  # type: ignore[misc]  # noqa: E731
        try:
            train(study.runs[arm], tmp_path / "run", study.dataset, stop_signal=stop)
            break
        except Interrupted:
            stops += 1
    assert stops >= 3
    assert saved(tmp_path / "run") == saved(folder(study, arm))
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert masked(read_rows(tmp_path / "run" / name)) == masked(read_rows(folder(study, arm) / name))


@pytest.mark.parametrize("arm", NAMES)
def test_what_is_kept_scores_and_writes_as_it_did(study: SimpleNamespace, arm: str, monkeypatch: Any) -> None:
    """Loaded again from the run directory, in batches of another size, and once in a single forward pass."""
    run, dataset, model = study.runs[arm], study.dataset, loaded(study, arm)
    recorded = read_rows(folder(study, arm) / "metrics.jsonl")[-1]
    assert recorded["kind"] == "eval" and recorded["step"] == 10
    windows = eval_windows(dataset, "validation", run.recipe.seq_len, run.recipe.curve_tokens, 0)
    assert len(windows.inputs_WS) > 1
    monkeypatch.setattr(scoring, "FORWARD_TOKENS", 1)
    found = evaluate(model, windows, end_of_text=dataset.eot_id)
    assert found.loss == pytest.approx(recorded["loss"], rel=1e-6)
    assert [layer["usage"] for layer in found.routing] == [layer["usage"] for layer in recorded["routing"]]
    with torch.no_grad():
        numbers_W = torch.arange(len(windows.inputs_WS))
        output = model(torch.from_numpy(windows.inputs_WS), windows_B=numbers_W)
        losses = token_losses(model, output, torch.from_numpy(windows.targets_WS))[(windows.unit_WS >= 0).flatten()]
    assert float(losses.double().mean()) == pytest.approx(found.loss, rel=1e-6)
    (text,) = [row["text"] for row in read_rows(folder(study, arm) / "samples.jsonl") if row["step"] == 10]
    assert sample(model, dataset.tokenizer(), "Once", 4, context=run.recipe.seq_len) == text


def test_kernels_agree(study: SimpleNamespace) -> None:
    windows = eval_windows(study.dataset, "validation", 256, 512, 0)
    for arm in NAMES:
        one, other = (
            evaluate(loaded(study, arm, kernels), windows, end_of_text=study.dataset.eot_id).loss
            for kernels in ("fused", "plain")
        )
        assert one == pytest.approx(other, rel=1e-5), arm


@pytest.mark.parametrize("arm", ["bias", "bias-top-1"])
def test_the_bias_is_kept_bit_for_bit_and_bounded_by_its_steps(study: SimpleNamespace, arm: str) -> None:
    """After n moves of ±0.001 or none it is a multiple of 0.001, at most n of them."""
    at = {}
    for path in (folder(study, arm) / "checkpoints").glob("step-*"):
        at[int(path.name[5:])] = load_file(path / "model.safetensors")["blocks.0.ffn.router.bias"].numpy()
    assert 10 in at and len(at) > 1
    for step, bias_E in at.items():
        multiples = bias_E / 0.001
        assert np.allclose(multiples, np.round(multiples), atol=1e-4) and np.abs(multiples).max() <= step + 1e-4
    assert at[10].any()
    assert np.array_equal(read_weights(folder(study, arm)).tensors["blocks.0.ffn.router.bias"], at[10])


def test_the_frozen_router_is_the_initial_one(study: SimpleNamespace) -> None:
    run = study.runs["frozen"]
    initial = build(run.model, run.seed).state_dict()["blocks.0.ffn.router.weight"].numpy()
    assert np.array_equal(read_weights(folder(study, "frozen")).tensors["blocks.0.ffn.router.weight"], initial)
    moved = read_weights(folder(study, "learned")).tensors["blocks.0.ffn.router.weight"]
    assert initial.shape == moved.shape and not np.array_equal(initial, moved)


def test_results_and_report_cope_with_routers_that_have_no_probabilities(study: SimpleNamespace) -> None:
    found = collect(study.directory)
    assert {run["status"] for run in found["runs"]} == {"complete"}
    for entry in found["routing"]:
        none = entry["arm"].startswith(("hash", "random"))
        for layer in [*entry["final"], *(layer for point in entry["points"] for layer in point["layers"])]:
            assert (layer["router_entropy"] is None) is (layer["log_z"] is None) is none
            assert sum(layer["usage"]) == pytest.approx(1) and len(layer["usage"]) == entry["num_experts"]
    json.dumps(found, allow_nan=False)
    page, _ = sorted(write_report(found, study.directory), key=lambda path: path.suffix)
    html = page.read_text(encoding="utf-8")
    assert "3 experts, top-2, balanced by bias" in html and "6 experts, top-4, 2 shared" in html
    assert "3 experts, top-1, random router" in html and "3 experts, top-3, hash router" in html
    assert html.count("has no probabilities, hence neither router entropy nor log Z") >= 4
    learned = [name for name in NAMES if not name.startswith(("hash", "random"))]
    assert len(re.findall(r"Router entropy and log Z over training", html)) >= len(learned)


def test_rows_of_a_router_without_losses_name_none(study: SimpleNamespace) -> None:
    for arm in NAMES:
        (row, *_) = [row for row in read_rows(folder(study, arm) / "metrics.jsonl") if row["kind"] == "train"]
        assert ("load_balance" in row) is ("router_z" in row) is not arm.startswith(("hash", "random"))


def test_the_plan_says_what_each_arm_is(study: SimpleNamespace) -> None:
    planned = plan(study.spec, DataFacts(vocab_size=512, train_tokens=None, certain=False))
    said = {arm["name"]: arm for arm in planned["arms"]}
    assert said["learned"]["ffn"] == "3 experts, top-2"
    assert said["fine"]["ffn"] == "6 experts, top-4, 2 shared"
    assert said["random"]["ffn"] == "3 experts, top-2, 1 shared, random router"
    assert said["fine"]["widths"]["num_shared_experts"] == 2 and said["fine"]["widths"]["d_expert"] == 8
    assert "num_shared_experts" not in said["learned"]["widths"]
    assert said["hash"]["by_component"]["router"] == 0 and said["frozen"]["by_component"]["router"] == 48
    assert said["shared"]["by_component"]["ffn"] == 2 * 3 * 16 * 16


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        ("bias", r"blocks\.0\.ffn\.router\.bias: largest value .* cannot be exported; expected zeros: .*"),
        ("shared", r"ffn\.num_shared_experts: 2 cannot be exported; expected 0: .*"),
        ("hash", r"ffn\.router: 'hash' cannot be exported; expected 'learned' or 'frozen': .*"),
    ],
)
def test_what_cannot_be_exported_is_refused_and_leaves_nothing(
    study: SimpleNamespace, tmp_path: Path, arm: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{message}$"):
        export(read_weights(folder(study, arm)), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_frozen_router_is_exported_as_a_router(study: SimpleNamespace, tmp_path: Path) -> None:
    written = export(read_weights(folder(study, "frozen")), tmp_path / "out")
    assert written["model_type"] == "mixtral"
    assert json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))["equipoise"]["router"] == "frozen"
