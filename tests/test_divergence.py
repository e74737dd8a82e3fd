"""A number that is not finite ends a run in that very step: named, nothing stepped or saved, shown as diverged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import equipoise.session as session
import equipoise.train as training
from equipoise.errors import DivergedError
from equipoise.model.transformer import Transformer, build
from equipoise.nonfinite import first_nonfinite, is_finite
from equipoise.record import read_run
from equipoise.spec.run import RunConfig
from equipoise.step import losses, train_step
from equipoise.train import train
from equipoise.trunk import checkpoint_steps

NAN, INF = float("nan"), float("inf")
WHEN = {"first": 0, "mid": 4, "last": 9}


def moe(tiny: Any) -> RunConfig:
    found: RunConfig = next(run for run in tiny.runs if run.arm == "moe" and run.seed == 0)
    return found


def poison(model: Transformer, what: str) -> Any:
    """Make something of the next forward or backward pass not finite; what undoes it."""
    block: Any = model.blocks[0]
    if what == "loss":
        return model.final_norm.register_forward_hook(lambda *a: a[2] * INF)
    if what == "router":
        return block.ffn.router.register_forward_pre_hook(
            lambda _, a: (a[0].index_fill(0, torch.tensor([5]), NAN), a[1])
        )
    if what == "activation":
        return block.attention.register_forward_hook(lambda *a: a[2].index_fill(1, torch.tensor([3]), INF))
    return block.ffn.experts.w_up.register_hook(lambda grad: grad.index_fill(0, torch.tensor([1]), NAN))


SAID = {
    "loss": "lm_loss is not finite, first output of final_norm",
    "router": "lm_loss is not finite, first output of blocks.0.ffn.router",
    "activation": "lm_loss is not finite, first output of blocks.0.attention",
    "gradient": "gradient of blocks.0.ffn.experts.w_up is not finite",
}


@pytest.mark.usefixtures("every_point_saved")
@pytest.mark.parametrize(
    ("what", "when"),
    [(what, when) for what in SAID for when in WHEN if what in ("router", "gradient") or when == "mid"],
)
def test_the_same_step_ends_the_run_with_nothing_stepped_or_saved(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, when: str
) -> None:
    step, calls = WHEN[when], 0
    states: list[dict[str, Any]] = []
    models: list[tuple[Transformer, Any]] = []
    saved_before: list[list[int]] = []

    def poisoned(model: Any, optimizer: Any, *rest: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls <= step:
            return train_step(model, optimizer, *rest, **named)
        states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        models.append((model, optimizer))
        saved_before.append(checkpoint_steps(tmp_path))
        handle = poison(model, what)
        try:
            return train_step(model, optimizer, *rest, **named)
        finally:
            handle.remove()

    monkeypatch.setattr(training, "train_step", poisoned)
    with pytest.raises(DivergedError, match=rf"step {step}: {SAID[what]}") as diverged:
        train(moe(tiny), tmp_path, tiny.dataset)
    assert diverged.value.exit_code == 4 and calls == step + 1
    (model, optimizer), (before,) = models[0], states
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(int(state["step"]) == step for state in optimizer.state.values())
    assert checkpoint_steps(tmp_path) == saved_before[0], "nothing was saved"
    record = read_run(tmp_path)
    assert record.status == "diverged" and record.summary is not None
    assert record.summary["message"] == f"step {step}: {SAID[what]}" and record.summary["steps"] == step
    assert len(record.rows("train")) == step


def test_an_evaluation_that_is_not_finite_ends_the_run(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update itself was finite, what it made of the weights is not: an evaluation is next, and no save."""

    def overflowing(model: Any, *rest: Any, **named: Any) -> Any:
        stats = train_step(model, *rest, **named)
        if named["step"] == 4:
            with torch.no_grad():
                model.final_norm.weight[0] = INF
        return stats

    monkeypatch.setattr(training, "train_step", overflowing)
    with pytest.raises(DivergedError, match="step 5: evaluation: the loss is not finite"):
        train(moe(tiny), tmp_path, tiny.dataset)
    assert checkpoint_steps(tmp_path) == [2] and read_run(tmp_path).status == "diverged"


@pytest.mark.parametrize("what", ["weight", "moment"])
def test_what_is_not_finite_is_never_saved(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Asked to stop right after an update that overflowed: the run has diverged, and the checkpoint before stays."""
    name, last = "blocks.0.attention.w_q", [0]

    def overflowing(model: Any, optimizer: Any, *rest: Any, **named: Any) -> Any:
        stats = train_step(model, optimizer, *rest, **named)
        last[0] = named["step"] + 1
        if last[0] == 4:
            parameter = model.get_parameter(name)
            tensor = parameter.data if what == "weight" else optimizer.state[parameter]["exp_avg_sq"]
            tensor[0, 0] = INF
        return stats

    monkeypatch.setattr(training, "train_step", overflowing)
    told = name if what == "weight" else f"{name}/exp_avg_sq"
    with pytest.raises(DivergedError, match=rf"step 4: {told} is not finite after the update"):
        train(moe(tiny), tmp_path, tiny.dataset, stop_signal=lambda: 15 if last[0] == 4 else 0)
    assert checkpoint_steps(tmp_path) == [2] and read_run(tmp_path).status == "diverged"
    assert session.load_latest(tmp_path / "checkpoints", read_run(tmp_path).summary["digest"]).step == 2  # type: ignore[index, union-attr]


def test_nothing_is_named_where_everything_is_finite(tiny: Any) -> None:
    model = build(moe(tiny).model, 0)
    tokens = torch.ones(2, 8, dtype=torch.int64)
    assert first_nonfinite(model, tokens) is None
    with torch.no_grad():
        model.blocks[0].ffn.router.weight[1, 2] = -INF  # type: ignore[union-attr, operator]
    assert first_nonfinite(model, tokens) == "weight blocks.0.ffn.router.weight"


def test_a_loss_whose_cause_is_not_found_again_is_still_named(tiny: Any) -> None:
    from equipoise.optim import make_adamw

    run = moe(tiny)
    model = build(run.model, 0)
    tokens = torch.ones(run.recipe.num_sequences, 8, dtype=torch.int64)

    def once(*arguments: Any) -> Any:
        return tuple(loss * NAN if place == 1 else loss for place, loss in enumerate(losses(*arguments)))

    with pytest.raises(DivergedError, match=r"^load_balance is not finite$"):
        train_step(model, make_adamw(model, run.recipe.optim), tokens, tokens, run, 1e-3, None, once)


@pytest.mark.parametrize(
    ("numbers", "finite"),
    [
        ([], True),
        ([1.0, -2.0], True),
        ([3e38, 3e38], True),
        ([INF, -INF], False),
        ([1.0, -INF], False),
        ([float("nan"), 1.0], False),
    ],
)
def test_what_is_finite_is_told_also_where_its_sum_is_not(numbers: list[float], finite: bool) -> None:
    assert is_finite(torch.tensor(numbers)) is finite
