"""The self-test passes here, and each of its checks fails, alone, when what it watches is broken."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from typer.testing import CliRunner

import equipoise.model.fused.rms_norm as rms_norm
import equipoise.selftest as selftest
from equipoise.cli.main import app
from equipoise.errors import ConfigError, EquipoiseError
from equipoise.model.layers import Attention
from equipoise.model.moe import MoE, Router, Routing, router_losses
from equipoise.model.transformer import build
from equipoise.record import append_row
from equipoise.selftest import CHECKS, TOP_1, TOP_2, Check, run_checks
from equipoise.step import train_step

NAMES = [row[0] for row in CHECKS]
CPU = torch.device("cpu")


def failed() -> list[str]:
    return [check.name for check in run_checks("cpu")[1] if check.status == "failed"]


def test_every_check_passes_with_room_to_spare() -> None:
    compute, checks = run_checks("cpu")
    assert compute.device == CPU
    assert [check.name for check in checks] == NAMES and len(set(NAMES)) == len(NAMES)
    assert {check.name: check.status for check in checks} == {
        **dict.fromkeys(NAMES, "ok"),
        **dict.fromkeys(NAMES[-3:], "skipped"),
    }
    assert NAMES[-3:] == ["gpu-cpu", "gpu-bfloat16", "gpu-compiled"]
    for check in checks[:-3]:
        assert check.difference is not None and check.note == ""
        if check.above:
            assert check.difference > 1000 * check.tolerance
        else:
            assert check.difference <= check.tolerance / 10
    for check in checks[-3:]:
        assert check.difference is None
        assert check.note == (
            "--device cpu was asked for" if torch.cuda.is_available() else "no CUDA device is visible to torch"
        )


@pytest.mark.parametrize("ffn", [TOP_2, TOP_1], ids=["top-2", "top-1"])
def test_no_choice_of_the_routers_is_so_close_that_rounding_decides_it(ffn: Any) -> None:
    """Another device rounds otherwise; the self-test must not call that a fault."""
    model = selftest._model(ffn, CPU)
    with torch.no_grad():
        output = model(selftest._tokens(CPU)[0])
    for routing in output.routing:
        ordered_TE = routing.probs_TE.sort(dim=-1, descending=True).values
        assert float((ordered_TE[:, ffn.top_k - 1] - ordered_TE[:, ffn.top_k]).min()) > 2e-5


# ------------------------------------------------------------------------------------------- each check can fail

Patch = pytest.MonkeyPatch


def rerouted(
    patch: Patch,
    scores: Callable[[Tensor], Tensor] = lambda probs: probs,
    probs: Callable[[Tensor], Tensor] = lambda logits: logits.softmax(-1),
    renormalize: bool | None = None,
) -> None:
    """Replace every router by one that chooses by `scores` of its probabilities, or computes those otherwise."""

    def forward(self: Router, x_TD: Tensor, places: Any = None) -> Routing:
        logits_TE = F.linear(x_TD, self.weight)
        probs_TE = probs(logits_TE)
        ids_TK = scores(probs_TE).sort(dim=-1, descending=True, stable=True).indices[:, : self.top_k]
        weights_TK = probs_TE.gather(1, ids_TK)
        if self.renormalize if renormalize is None else renormalize:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        return Routing(logits_TE=logits_TE, probs_TE=probs_TE, expert_ids_TK=ids_TK, weights_TK=weights_TK)

    patch.setattr(Router, "forward", forward)


def a_lonely_expert_counts_double(patch: Patch) -> None:
    forward = MoE.forward

    def doubled(self: MoE, x_TD: Tensor, places: Any = None) -> Any:
        output_TD, routing = forward(self, x_TD, places)
        return (2 if routing.probs_TE.shape[1] == 1 else 1) * output_TD, routing

    patch.setattr(MoE, "forward", doubled)


def weights_that_do_not_add_up(patch: Patch) -> None:
    rerouted(patch, renormalize=False)


def a_softmax_with_a_temperature(patch: Patch) -> None:
    rerouted(patch, probs=lambda logits: (logits / 2).softmax(-1))


def a_preference_for_late_experts(patch: Patch) -> None:
    rerouted(patch, scores=lambda probs: probs + 0.1 * torch.arange(probs.shape[1]))


def weights_divided_by_themselves(patch: Patch) -> None:
    rerouted(patch, renormalize=True)


def a_coefficient_squared(patch: Patch, which: str) -> None:
    def squared(model: Any, optimizer: Any, inputs: Any, targets: Any, run: Any, lr: float) -> Any:
        ffn = run.model.ffn
        if which == "z":
            ffn = dataclasses.replace(ffn, z_coef=ffn.z_coef**2)
        elif ffn.balance.kind == "loss":
            ffn = dataclasses.replace(ffn, balance=dataclasses.replace(ffn.balance, coef=ffn.balance.coef**2))
        run = dataclasses.replace(run, model=dataclasses.replace(run.model, ffn=ffn))
        return train_step(model, optimizer, inputs, targets, run, lr)

    patch.setattr("equipoise.selftest.train_step", squared)


def a_balance_coefficient_squared(patch: Patch) -> None:
    a_coefficient_squared(patch, "balance")


def a_z_coefficient_squared(patch: Patch) -> None:
    a_coefficient_squared(patch, "z")


def balance_groups_that_follow_the_micro_batch(patch: Patch) -> None:
    patch.setattr("equipoise.step.router_losses", lambda routing, num_groups: router_losses(routing, 1))


def attention_to_everything(patch: Patch) -> None:
    attend = F.scaled_dot_product_attention
    patch.setattr(
        "equipoise.model.layers.F.scaled_dot_product_attention",
        lambda q, k, v, is_causal, enable_gqa: attend(q, k, v, enable_gqa=enable_gqa),
    )


def a_router_that_looks_one_token_ahead(patch: Patch) -> None:
    def pairs(probs_TE: Tensor) -> Tensor:
        scores_TE = probs_TE.clone()
        scores_TE[: len(probs_TE) // 2 * 2 : 2] = probs_TE[1::2]
        return scores_TE

    rerouted(patch, scores=pairs)


def moments_that_are_forgotten(patch: Patch) -> None:
    patch.setattr("equipoise.session.restore_optimizer", lambda model, optimizer, tensors: None)


def a_fused_pass_that_is_wrong(patch: Patch) -> None:
    backward = rms_norm._RMSNorm.backward
    wrong = lambda ctx, d_y_TD: (1.001 * backward(ctx, d_y_TD)[0], *backward(ctx, d_y_TD)[1:])  # noqa: E731
    patch.setattr(rms_norm._RMSNorm, "backward", staticmethod(wrong))


BREACHES: list[tuple[Callable[[Patch], None], list[str]]] = [
    (a_lonely_expert_counts_double, ["one-expert"]),
    (weights_that_do_not_add_up, ["identical-experts"]),
    (a_softmax_with_a_temperature, ["all-experts"]),
    (a_preference_for_late_experts, ["expert-order"]),
    (weights_divided_by_themselves, ["router-gradient"]),
    (a_balance_coefficient_squared, ["balance-linear"]),
    (a_z_coefficient_squared, ["z-linear"]),
    (balance_groups_that_follow_the_micro_batch, ["micro-batches"]),
    (attention_to_everything, ["causal-dense", "causal-moe"]),
    (a_router_that_looks_one_token_ahead, ["causal-moe"]),
    (a_fused_pass_that_is_wrong, ["fused-plain"]),
    (moments_that_are_forgotten, ["resume"]),
]


@pytest.mark.parametrize(("breach", "expected"), BREACHES, ids=lambda value: getattr(value, "__name__", None))
def test_what_is_broken_is_named_and_nothing_else(
    breach: Callable[[Patch], None], expected: list[str], monkeypatch: Patch
) -> None:
    breach(monkeypatch)
    assert failed() == expected


def check(name: str, **changes: Any) -> Check:
    """One check by itself."""
    return selftest._check(*next(row for row in CHECKS if row[0] == name), **{"device": CPU, **changes})


def test_devices_that_disagree_are_noticed(monkeypatch: Patch) -> None:
    assert selftest._devices(CPU, CPU) == 0.0
    built: list[int] = []

    def perturbed(*arguments: Any) -> Any:
        model = build(*arguments)
        with torch.no_grad():
            model.final_norm.weight[7] += 1e-2 * (len(built) % 2)
        built.append(0)
        return model

    monkeypatch.setattr(selftest, "build", perturbed)
    assert 1e-4 < selftest._devices(CPU, CPU) < 1.0


def test_an_error_on_the_way_is_a_failure_that_says_so(monkeypatch: Patch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no kernel image is available\nand more")

    monkeypatch.setattr(selftest, "train_step", broken)
    found = check("micro-batches")
    assert (found.status, found.difference, found.note) == ("failed", None, "no kernel image is available")


def test_no_number_is_a_failure(monkeypatch: Patch) -> None:
    swiglu = selftest.swiglu
    monkeypatch.setattr(selftest, "swiglu", lambda *tensors: swiglu(*tensors) * math.nan)
    found = check("all-experts")
    assert (found.status, found.difference, found.note) == ("failed", None, "no finite number")


def test_a_probe_that_sees_nothing_is_a_failure(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Attention, "forward", lambda self, x_BSD, rope, cache=None: torch.zeros_like(x_BSD))
    for name in ("causal-dense", "causal-moe"):
        found = check(name)
        assert found.status == "failed"
        assert found.note == "position 1 was changed and not every later one moved: nothing is to be seen"


def test_a_run_that_does_not_stop_is_a_failure(monkeypatch: Patch) -> None:
    train = selftest.train
    monkeypatch.setattr(selftest, "train", lambda run, directory, dataset, **_: train(run, directory, dataset))
    assert check("resume").note == "the run did not stop when asked to"


# ------------------------------------------------------------------------------------------- two runs, byte by byte


def write_run(directory: Path, weight: float = 1.0, lr: float = 0.1, metadata: dict[str, str] | None = None) -> None:
    newest = directory / "checkpoints" / "step-00000008"
    newest.mkdir(parents=True)
    save_file({"w": torch.full((3,), weight)}, newest / "model.safetensors", metadata)
    save_file({"w/step": torch.ones(())}, newest / "optim.safetensors")
    save_file({"final_loss_U": torch.ones(2)}, directory / "val_losses.safetensors")
    append_row(directory / "metrics.jsonl", {"step": 1, "lr": lr, "elapsed_s": id(directory)})
    append_row(directory / "samples.jsonl", {"step": 1, "text": "a"})


def test_equal_runs_differ_by_nothing(tmp_path: Path) -> None:
    for name in ("one", "other"):
        write_run(tmp_path / name)
    assert list(selftest._files_apart(tmp_path / "one", tmp_path / "other")) == []


def test_the_largest_difference_of_two_runs_is_found(tmp_path: Path) -> None:
    write_run(tmp_path / "one")
    write_run(tmp_path / "other", weight=1.25)
    assert list(selftest._files_apart(tmp_path / "one", tmp_path / "other")) == [0.25]


@pytest.mark.parametrize(
    ("changes", "absent", "message"),
    [
        ({"metadata": {"by": "another"}}, "", "model.safetensors: the same numbers in other bytes"),
        ({"lr": 0.2}, "", "metrics.jsonl: the resumed run wrote other rows"),
        ({}, "val_losses.safetensors", "val_losses.safetensors: not written by the resumed run"),
    ],
)
def test_runs_that_differ_otherwise(tmp_path: Path, changes: dict[str, Any], absent: str, message: str) -> None:
    write_run(tmp_path / "one")
    write_run(tmp_path / "other", **changes)
    if absent:
        (tmp_path / "other" / absent).unlink()
    with pytest.raises(EquipoiseError) as caught:
        list(selftest._files_apart(tmp_path / "one", tmp_path / "other"))
    assert str(caught.value) == message


# ----------------------------------------------------------------------------------------------------- the command


def command(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["selftest", *arguments])


def test_the_command_prints_a_table_or_json() -> None:
    done = command("--device", "cpu")
    assert done.exit_code == 0
    for column in ("check", "compared", "largest difference", "tolerance", "ok"):
        assert column in done.stdout
    assert all(name in done.stdout for name in NAMES) and "above 1e-06" in done.stdout
    assert "gpu-cpu: skipped: " in done.stderr
    assert "Example: equipoise selftest" in command("--help").stdout


def test_the_command_exits_1_naming_what_failed(monkeypatch: Patch) -> None:
    monkeypatch.setattr(selftest, "CHECKS", CHECKS[:6])
    weights_divided_by_themselves(monkeypatch)
    done = command("--device", "cpu")
    assert done.exit_code == 1 and "FAILED" in done.stdout
    assert done.stderr.splitlines()[-1] == "error: selftest: failed: router-gradient"
    done = command("--device", "cpu", "--json")
    found = json.loads(done.stdout)
    assert done.exit_code == 1 and found["failed"] == ["router-gradient"] and found["ok"] is False
    assert found["schema_version"] == 1 and "CPU" in found["compute"]
    assert [line["status"] for line in found["checks"]] == ["ok"] * 4 + ["failed", "ok"]
    assert found["checks"][4]["above"] is True and found["checks"][4]["difference"] < 1e-6


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("gpu", "--device gpu: expected auto, cpu or cuda; did you mean 'cpu'?"),
        ("cuda", "--device cuda: no CUDA device is visible to torch; expected cpu or auto"),
    ],
)
def test_a_device_that_is_not_there(device: str, message: str) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    done = command("--device", device)
    assert isinstance(done.exception, ConfigError) and str(done.exception) == message
