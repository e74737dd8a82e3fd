"""One run: resume is bit-exact wherever it stops, arms are paired, what is measured is what the definitions say."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import equipoise.session as session
import equipoise.train as training
from equipoise.data.packing import batch, eval_windows
from equipoise.errors import ConfigError, DivergedError, IntegrityError, Interrupted
from equipoise.files import read_json
from equipoise.model.transformer import build
from equipoise.optim import make_adamw
from equipoise.record import count_spikes, masked, read_rows, read_run
from equipoise.schedule import eval_steps, sample_steps
from equipoise.score import evaluate
from equipoise.session import EVAL_SEED
from equipoise.spec.run import RunConfig
from equipoise.step import train_step
from equipoise.train import train


def pick(tiny: Any, arm: str, seed: int = 0, kernels: Any = "fused") -> RunConfig:
    run = next(run for run in tiny.runs if run.arm == arm and run.seed == seed)
    return dataclasses.replace(run, recipe=dataclasses.replace(run.recipe, kernels=kernels))


def weights(directory: Path) -> bytes:
    (newest,) = sorted((directory / "checkpoints").glob("step-*"))[-1:]
    return (newest / "model.safetensors").read_bytes() + (newest / "optim.safetensors").read_bytes()


def stop_after(polls: int) -> Callable[[], int]:
    """A stop signal that is raised at the given poll, counted over updates, evaluation batches and sampled tokens."""
    seen = 0

    def poll() -> int:
        nonlocal seen
        seen += 1
        return 15 if seen > polls else 0

    return poll


@pytest.fixture(scope="module")
def straight(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both arms trained without a stop, by fused kernels; and by plain ones."""
    folder = tmp_path_factory.mktemp("straight")
    for arm in ("moe", "dense"):
        train(pick(tiny, arm), folder / arm, tiny.dataset)
        train(pick(tiny, arm, kernels="plain"), folder / f"{arm}-plain", tiny.dataset)
    return {path.name: path for path in folder.iterdir()}


@pytest.mark.parametrize("kernels", ["fused", "plain"])
@pytest.mark.parametrize("arm", ["moe", "dense"])
def test_stopping_anywhere_changes_no_byte(
    tiny: Any, straight: dict[str, Path], tmp_path: Path, arm: str, kernels: str
) -> None:
    """Stopped over and over, each time after a few more polls (evaluation, sampling and updates included)."""
    directory, expected = tmp_path / "run", straight[arm if kernels == "fused" else f"{arm}-plain"]
    run, stops = pick(tiny, arm, kernels=kernels), 0
    while True:
        try:
            train(run, directory, tiny.dataset, stop_signal=stop_after(3 + 2 * stops))
            break
        except Interrupted as error:
            assert error.exit_code == 143
            stops += 1
    assert stops >= 4
    assert weights(directory) == weights(expected)
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert masked(read_rows(directory / name)) == masked(read_rows(expected / name))
    losses = "val_losses.safetensors"
    assert (directory / losses).read_bytes() == (expected / losses).read_bytes()


@pytest.mark.parametrize("arm", ["moe", "dense"])
def test_kernels_agree_over_a_whole_run(straight: dict[str, Path], arm: str) -> None:
    fused, plain = (read_run(straight[name]) for name in (arm, f"{arm}-plain"))
    assert fused.summary and plain.summary
    assert fused.summary["val_loss"] == pytest.approx(plain.summary["val_loss"], abs=1e-5)
    assert weights(straight[arm]) != weights(straight[f"{arm}-plain"]), "the same kernels twice"
    kernels = [read_json(straight[name] / "environment.json")["environments"][0]["compute"] for name in straight]
    assert sum("fused kernels" in reason for reason in kernels) == 2


def test_killed_after_rows_were_written_but_before_the_save(
    tiny: Any, straight: dict[str, Path], tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    with pytest.raises(Interrupted):
        train(pick(tiny, "moe"), directory, tiny.dataset, stop_signal=stop_after(20))
    with (directory / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"kind":"train","step":9999,"lm_loss":1.0}\n{"kind":"train","st')
    train(pick(tiny, "moe"), directory, tiny.dataset)
    assert masked(read_rows(directory / "metrics.jsonl")) == masked(read_rows(straight["moe"] / "metrics.jsonl"))


def test_evaluating_and_sampling_move_no_weight(tiny: Any, straight: dict[str, Path], tmp_path: Path) -> None:
    run = pick(tiny, "moe")
    quiet = dataclasses.replace(run.recipe, num_evals=1, samples=dataclasses.replace(run.recipe.samples, prompts=()))
    train(dataclasses.replace(run, recipe=quiet), tmp_path / "run", tiny.dataset)
    assert weights(tmp_path / "run") == weights(straight["moe"])


def test_a_complete_run_is_left_alone(tiny: Any, straight: dict[str, Path]) -> None:
    before = {path: path.stat().st_mtime_ns for path in straight["moe"].rglob("*") if path.is_file()}
    summary = train(pick(tiny, "moe"), straight["moe"], tiny.dataset)
    assert summary["status"] == "complete"
    assert {path: path.stat().st_mtime_ns for path in straight["moe"].rglob("*") if path.is_file()} == before


def test_another_run_in_the_directory_is_refused_naming_the_field(tiny: Any, straight: dict[str, Path]) -> None:
    with pytest.raises(IntegrityError, match=r"seed: 0 → 1"):
        train(pick(tiny, "moe", 1), straight["moe"], tiny.dataset)


def test_other_data_is_refused(tiny: Any, tmp_path: Path) -> None:
    other = dataclasses.replace(pick(tiny, "moe"), data="0" * 64)
    with pytest.raises(IntegrityError, match="the run needs 000000000000"):
        train(other, tmp_path / "run", tiny.dataset)


def test_arms_of_a_seed_share_data_order_and_equal_tensors(tiny: Any) -> None:
    moe, dense = (build(pick(tiny, arm).model, 0) for arm in ("moe", "dense"))
    shared = [
        name
        for name, tensor in moe.state_dict().items()
        if name in dense.state_dict() and dense.state_dict()[name].shape == tensor.shape
    ]
    assert len(shared) >= 8  # embedding, norms, attention
    for name in shared:
        assert torch.equal(moe.state_dict()[name], dense.state_dict()[name]), name
    other = build(pick(tiny, "moe").model, 1).state_dict()
    assert not torch.equal(other["embed.weight"], moe.state_dict()["embed.weight"])


def test_the_record_counts_tokens_flops_and_epochs(tiny: Any, straight: dict[str, Path]) -> None:
    record = read_run(straight["moe"])
    assert record.status == "complete" and record.summary is not None
    rows, evals = record.rows("train"), record.rows("eval")
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert [row["tokens"] for row in rows] == [512 * step for step in range(1, 11)]
    assert [row["step"] for row in evals] == sorted(eval_steps(10, tiny.spec.recipe)) == [0, 2, 5, 8, 10]
    assert evals[-1]["flops"] == record.summary["train_flops"] == 5120 * record.summary["flops_per_token"]
    windows = (len(tiny.dataset.tokens("train")) - 1) // 256
    assert record.summary["epochs"] == pytest.approx(20 / windows)
    assert rows[0]["lm_loss"] == pytest.approx(math.log(tiny.dataset.vocab_size), abs=0.15)
    assert {"load_balance", "router_z"} <= rows[0].keys() and 0.9 < rows[0]["load_balance"] < 1.5
    assert not {"load_balance", "router_z"} & read_run(straight["dense"]).rows("train")[0].keys()
    assert len(record.samples()) == len(sample_steps(10, tiny.spec.recipe)) == 4


def test_val_loss_is_the_loss_of_the_final_weights_on_every_validation_token(
    tiny: Any, straight: dict[str, Path]
) -> None:
    """Oracle: each document alone, one forward pass each, float64 sums: no packing, no batching."""
    record = read_run(straight["moe"])
    assert record.summary is not None
    model = build(record.config.model, 0)  # type: ignore[union-attr]
    model.load_state_dict(load_file(straight["moe"] / "checkpoints" / "step-00000010" / "model.safetensors"))
    tokens = np.asarray(tiny.dataset.tokens("validation")).astype(np.int64)
    ends = np.flatnonzero(tokens == tiny.dataset.eot_id)
    starts = [0, *(ends[:-1] + 1)]
    total = text = 0.0
    windows = eval_windows(tiny.dataset, "validation", 256, 0, EVAL_SEED)
    assert windows.num_targets == len(tokens)
    with torch.no_grad():
        for row in range(len(windows.inputs_WS)):
            output = model(torch.from_numpy(windows.inputs_WS[row : row + 1]))
            log_probs = torch.log_softmax(model.logits(output.hidden_TD).double(), -1)
            for position, unit in enumerate(windows.unit_WS[row]):
                if unit >= 0:
                    target = int(windows.targets_WS[row, position])
                    total -= float(log_probs[position, target])
                    text -= float(log_probs[position, target]) if target != tiny.dataset.eot_id else 0.0
    num_bytes = sum(
        len(tiny.dataset.tokenizer().decode([int(t) for t in tokens[a:b]]).encode())
        for a, b in zip(starts, ends, strict=True)
    )
    assert record.summary["val_loss"] == pytest.approx(total / len(tokens), rel=1e-5)
    assert record.summary["val_bpb"] == pytest.approx(text / math.log(2) / num_bytes, rel=1e-5)


def rising(tiny: Any) -> RunConfig:
    """A run whose rate climbs to something far too high: the best point of its curve is not the last."""
    run = pick(tiny, "dense")
    optim = dataclasses.replace(run.recipe.optim, lr=1.0, grad_clip=0.0)
    schedule = dataclasses.replace(run.recipe.schedule, warmup_frac=0.99, final_frac=1.0)
    return dataclasses.replace(
        run, recipe=dataclasses.replace(run.recipe, optim=optim, schedule=schedule, num_evals=10)
    )


def test_best_val_loss_is_the_full_score_at_the_lowest_point_of_the_curve(tiny: Any, tmp_path: Path) -> None:
    summary = train(rising(tiny), tmp_path / "run", tiny.dataset)
    curve = {row["step"]: row["loss"] for row in read_run(tmp_path / "run").rows("eval") if row["step"]}
    best = summary["best_step"]
    assert best == min(curve, key=lambda step: curve[step]) and best < summary["steps"]
    assert summary["best_val_loss"] < summary["val_loss"]
    model = build(rising(tiny).model, 0)
    model.load_state_dict(load_file(tmp_path / "run" / "checkpoints" / f"step-{best:08d}" / "model.safetensors"))
    windows = eval_windows(tiny.dataset, "validation", 256, 0, EVAL_SEED)
    with torch.no_grad():
        total = 0.0
        for row in range(len(windows.inputs_WS)):
            hidden = model(torch.from_numpy(windows.inputs_WS[row : row + 1])).hidden_TD
            losses = torch.nn.functional.cross_entropy(
                model.logits(hidden), torch.from_numpy(windows.targets_WS[row]), reduction="none"
            )
            total += float(losses[torch.from_numpy(windows.unit_WS[row] >= 0)].double().sum())
    assert summary["best_val_loss"] == pytest.approx(total / windows.num_targets, rel=1e-5)


@pytest.mark.parametrize("what", ["best", "rows", "line"])
def test_a_run_whose_parts_were_damaged_is_done_again_to_the_same_bytes(tiny: Any, tmp_path: Path, what: str) -> None:
    """The best weights altered, rows lost although the checkpoint is whole, a line broken in the middle."""
    run, directory = rising(tiny), tmp_path / "run"
    first = train(run, directory, tiny.dataset)
    metrics, said = directory / "metrics.jsonl", list[str]()
    rows = masked(read_rows(metrics))
    if what == "best":
        path = directory / "checkpoints" / f"step-{first['best_step']:08d}" / "model.safetensors"
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif what == "rows":
        metrics.write_bytes(metrics.read_bytes()[:-400])
    else:
        metrics.write_bytes(metrics.read_bytes().replace(b'"step":4', b'"step:4'))
    again = train(run, directory, tiny.dataset, log=said.append)
    assert any("doing again what is needed" in line for line in said)
    assert any("set aside" in line for line in said)
    assert (again["val_loss"], again["best_val_loss"]) == (first["val_loss"], first["best_val_loss"])
    assert masked(read_rows(metrics)) == rows and read_run(directory).status == "complete"


def test_going_on_under_another_environment_is_said_and_recorded(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, said = tmp_path / "run", list[str]()
    with pytest.raises(Interrupted):
        train(pick(tiny, "dense"), directory, tiny.dataset, stop_signal=stop_after(20))
    step = int(sorted(path.name for path in (directory / "checkpoints").glob("step-*"))[-1].removeprefix("step-"))
    here = session.environment
    monkeypatch.setattr(session, "environment", lambda *a: {**here(*a), "torch": "9.9"})
    summary = train(pick(tiny, "dense"), directory, tiny.dataset, log=said.append)
    assert summary["resumed_elsewhere"] == [step]
    assert any("goes on with another torch" in line for line in said)
    environments = read_json(directory / "environment.json")["environments"]
    assert [e["torch"] for e in environments] == [torch.__version__, "9.9"]


def test_a_loss_that_is_not_finite_stops_the_run_before_anything_is_stepped(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def poisoned(model: Any, *rest: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 6:
            with torch.no_grad():
                model.embed.weight[3] = float("nan")
        return train_step(model, *rest, **named)

    monkeypatch.setattr(training, "train_step", poisoned)
    with pytest.raises(DivergedError, match=r"step 5: lm_loss is not finite"):
        train(pick(tiny, "moe"), tmp_path / "run", tiny.dataset)
    record = read_run(tmp_path / "run")
    assert record.status == "diverged" and record.summary is not None
    assert record.summary["val_loss"] is None and record.summary["steps"] == 5
    assert "lm_loss is not finite" in record.summary["message"]
    monkeypatch.undo()
    said = r"step 5: lm_loss is not finite, first weight embed\.weight \(delete the directory"
    with pytest.raises(DivergedError, match=said):
        train(pick(tiny, "moe"), tmp_path / "run", tiny.dataset)


def test_a_gradient_that_is_not_finite_is_named(tiny: Any) -> None:
    run = pick(tiny, "moe")
    model = build(run.model, 0)
    model.blocks[0].attention.w_o.register_hook(lambda grad: grad * float("inf"))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    inputs, targets = (torch.from_numpy(a) for a in batch(tiny.dataset.tokens("train"), 256, 2, 0, 0))
    with pytest.raises(DivergedError, match=r"gradient of blocks\.0\.attention\.w_o is not finite"):
        train_step(model, make_adamw(model, run.recipe.optim), inputs, targets, run, 1e-3)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_micro_batches_change_no_loss_and_no_gradient(tiny: Any) -> None:
    """Two sequences at once or one by one: the same objective, balance groups and all."""
    run = pick(tiny, "moe")
    gradients, stats = [], []
    inputs, targets = (torch.from_numpy(a) for a in batch(tiny.dataset.tokens("train"), 256, 2, 0, 0))
    for micro in (1, 2):
        cut = dataclasses.replace(run, recipe=dataclasses.replace(run.recipe, micro_sequences=micro))
        model = build(run.model, 0)
        optimizer = make_adamw(model, run.recipe.optim)
        stats.append(train_step(model, optimizer, inputs, targets, cut, 0.0))
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-4, atol=1e-6)
    for field in ("lm_loss", "load_balance", "router_z", "grad_norm"):
        assert getattr(stats[0], field) == pytest.approx(getattr(stats[1], field), rel=1e-5)


def test_evaluation_is_the_same_in_any_batch_size(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropless: a window's loss does not depend on what is scored beside it (no expert capacity)."""
    model = build(pick(tiny, "moe").model, 0)
    windows = eval_windows(tiny.dataset, "validation", 256, 0, EVAL_SEED)
    whole = evaluate(model, windows, end_of_text=tiny.dataset.eot_id)
    monkeypatch.setattr("equipoise.score.FORWARD_TOKENS", 256)
    alone = evaluate(model, windows, end_of_text=tiny.dataset.eot_id)
    np.testing.assert_allclose(whole.unit_losses_U, alone.unit_losses_U, rtol=1e-5)
    usage = [layer["usage"] for layer in whole.routing]
    assert usage == [layer["usage"] for layer in alone.routing]
    assert all(sum(layer) == pytest.approx(1) for layer in usage)


def test_bfloat16_on_a_cpu_without_it_is_refused_with_the_reason(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("equipoise.device.cpu_has_bfloat16", lambda: False)
    run = pick(tiny, "moe")
    run = dataclasses.replace(run, recipe=dataclasses.replace(run.recipe, dtype="bfloat16"))
    with pytest.raises(ConfigError, match=r"recipe\.dtype: 'bfloat16' is not accepted on a CPU"):
        train(run, tmp_path / "run", tiny.dataset, device="cpu")


def test_spikes_are_counted_against_the_128_updates_before() -> None:
    calm = [3.0 + 0.01 * (i % 2) for i in range(200)]
    assert count_spikes(calm) == 0
    calm[150] = 4.0
    assert count_spikes(calm) == 1
    calm[30] = 9.0  # not judged itself, but it widens the window in which 150 is
    assert count_spikes(calm) == 0
    assert count_spikes(calm[:128]) is None  # nothing was judged


def test_a_lost_environment_is_restored_from_the_checkpoint(tiny: Any, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    first = train(pick(tiny, "dense"), directory, tiny.dataset)
    (directory / "environment.json").write_text("{", encoding="utf-8")
    again = train(pick(tiny, "dense"), directory, tiny.dataset)
    assert again["val_loss"] == first["val_loss"] and again["resumed_elsewhere"] == []
    assert len(read_json(directory / "environment.json")["environments"]) == 1
    assert read_run(directory).status == "complete"
