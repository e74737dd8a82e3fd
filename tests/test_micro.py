"""No memory for an update: done again in smaller forward passes with the same losses, or said with what it needs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import equipoise.step as step_module
from equipoise.environments import mixed
from equipoise.errors import Interrupted, ResourceError
from equipoise.files import read_json
from equipoise.micro import MIB, smaller, update_bytes
from equipoise.record import has_begun, read_run
from equipoise.spec.model import DenseFFN, ModelConfig, MoEFFN
from equipoise.spec.recipe import Optim, Recipe
from equipoise.spec.run import RunConfig
from equipoise.train import train

ALLOCATOR = "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"


def four_sequences(tiny: Any, group: int = 1) -> RunConfig:
    run = next(run for run in tiny.runs if run.arm == "moe" and run.seed == 0)
    recipe = dataclasses.replace(run.recipe, batch_tokens=1024, balance_group=group)
    return dataclasses.replace(run, recipe=recipe, budget=10 * 1024)


class Memory:
    """Room for the losses of so many sequences from the given pass on; what was asked for."""

    def __init__(
        self, patch: pytest.MonkeyPatch, rows: int, since: int = 0, error: type[Exception] = RuntimeError
    ) -> None:
        self.asked: list[int] = []
        original = step_module.mean_loss

        def mean_loss(model: Any, output: Any, targets_BS: torch.Tensor) -> torch.Tensor:
            self.asked.append(len(targets_BS))
            if len(self.asked) > since and len(targets_BS) > rows:
                raise error(ALLOCATOR if error is RuntimeError else "CUDA out of memory. Tried to allocate 2.00 GiB")
            return original(model, output, targets_BS)

        patch.setattr(step_module, "mean_loss", mean_loss)


def losses(directory: Path) -> list[float]:
    return [row["lm_loss"] for row in read_run(directory).rows("train")]


@pytest.fixture(scope="module")
def straight(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("straight")
    train(four_sequences(tiny), directory, tiny.dataset)
    return directory


@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError, MemoryError])
def test_the_batch_is_halved_until_it_fits_and_losses_stay(
    tiny: Any, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    memory, said = Memory(monkeypatch, rows=1, error=error), list[str]()
    summary = train(four_sequences(tiny), tmp_path, tiny.dataset, log=said.append, auto_micro_batch=True)
    assert memory.asked[:7] == [4, 2, 1, 1, 1, 1, 1] and len(memory.asked) == 2 + 10 * 4
    assert losses(tmp_path) == pytest.approx(losses(straight), rel=1e-6)
    expected = read_run(straight).summary
    assert expected and summary["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-6)
    assert summary["tokens"] == expected["tokens"] and summary["steps"] == 10
    (environment,) = read_json(tmp_path / "environment.json")["environments"]
    assert environment["micro_sequences"] == 1 and summary["resumed_elsewhere"] == []
    assert [line for line in said if "from here on 2 instead of 4 sequences a forward pass" in line]
    assert [line for line in said if "from here on 1 instead of 2 sequences a forward pass" in line]


def test_memory_that_runs_out_later_is_recorded_with_its_step(
    tiny: Any, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Memory(monkeypatch, rows=2, since=5)
    summary = train(four_sequences(tiny), tmp_path, tiny.dataset, auto_micro_batch=True)
    assert losses(tmp_path)[:5] == losses(straight)[:5]
    assert losses(tmp_path) == pytest.approx(losses(straight), rel=1e-6)
    environments = read_json(tmp_path / "environment.json")["environments"]
    assert [e.get("micro_sequences") for e in environments] == [None, 2] and summary["resumed_elsewhere"] == [5]


def test_a_run_that_was_cut_smaller_goes_on_so_and_resumes_bit_for_bit(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        Memory(patched, rows=2)
        train(four_sequences(tiny), tmp_path / "whole", tiny.dataset, auto_micro_batch=True)
        polls = iter([0] * 12)
        with pytest.raises(Interrupted):
            train(
                four_sequences(tiny),
                tmp_path / "stopped",
                tiny.dataset,
                auto_micro_batch=True,
                stop_signal=lambda: next(polls, 15),
            )
    memory = Memory(monkeypatch, rows=4)  # now there would be room
    summary = train(four_sequences(tiny), tmp_path / "stopped", tiny.dataset)
    assert set(memory.asked) == {2} and summary["resumed_elsewhere"] == []
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")


def test_without_being_asked_it_is_said_what_is_needed_and_nothing_has_begun(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Memory(monkeypatch, rows=2)
    needs = (
        r"step 0: out of memory \(.*DefaultCPUAllocator.*\): an update with 4 sequences a forward pass needs about "
        r"[\d,]+ MiB, [\d,]+ MiB are free on this machine; "
        r"expected recipe\.micro_sequences = 2, --auto-micro-batch, fewer --jobs, or a smaller model$"
    )
    with pytest.raises(ResourceError, match=needs) as short:
        train(four_sequences(tiny), tmp_path, tiny.dataset)
    assert short.value.exit_code == 7 and not has_begun(tmp_path)


def test_one_group_is_the_least(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Memory(monkeypatch, rows=1)
    with pytest.raises(ResourceError, match=r"with 2 sequences .* expected a smaller recipe\.balance_group or seq_len"):
        train(four_sequences(tiny, group=2), tmp_path, tiny.dataset, auto_micro_batch=True)


def test_no_memory_for_the_optimizer_is_not_tried_again(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some weights may have moved by then: an update is never done twice."""

    def full(*_: Any) -> None:
        raise RuntimeError(ALLOCATOR)

    monkeypatch.setattr("equipoise.optim.AdamW.step", full)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        train(four_sequences(tiny), tmp_path, tiny.dataset, auto_micro_batch=True)


def test_other_errors_are_not_taken_for_it(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Memory(monkeypatch, rows=0, error=ValueError)
    with pytest.raises(ValueError, match="CUDA out of memory"):
        train(four_sequences(tiny), tmp_path, tiny.dataset, auto_micro_batch=True)


def test_runs_that_were_cut_differently_are_mixed() -> None:
    from equipoise.evidence import Evidence

    def run(seed: int, **more: int) -> Evidence:
        environment = {"device": "cpu", "torch": "2", **more}
        return Evidence(
            arm="a",
            seed=seed,
            budget=1,
            post_hoc=False,
            status="complete",
            message=None,
            summary={"resumed_elsewhere": []},
            environments=(environment,),
        )

    found = mixed([run(0), run(1, micro_sequences=2)])
    assert found and found["fields"] == ["micro_sequences"]
    assert mixed([run(0, micro_sequences=2), run(1, micro_sequences=2)]) is None


def test_smaller_cuts_are_whole_groups_that_divide_the_batch() -> None:
    """By trying every number."""
    for sequences in range(1, 25):
        for group in (g for g in range(1, sequences + 1) if sequences % g == 0):
            recipe = Recipe(seq_len=1, batch_tokens=sequences, balance_group=group, optim=Optim(lr=1.0))
            for rows in (r for r in range(group, sequences + 1, group) if sequences % r == 0):
                allowed = [r for r in range(1, rows // 2 + 1) if r % group == 0 and sequences % r == 0]
                assert smaller(recipe, rows) == max(allowed, default=None)


@pytest.mark.parametrize(
    ("measured", "width", "layers", "ffn"),
    [  # docs/performance.md, peak RSS: shapes A, B and that of tinystories-cpu
        (1_940, 256, 8, DenseFFN(d_ff=1024)),
        (2_025, 256, 8, MoEFFN(num_experts=4, top_k=2, d_expert=512)),
        (753, 128, 4, DenseFFN(d_ff=512)),
        (786, 128, 4, MoEFFN(num_experts=4, top_k=2, d_expert=256)),
        (363, 64, 4, DenseFFN(d_ff=128)),
    ],
)
def test_what_an_update_needs_is_about_what_was_measured(measured: int, width: int, layers: int, ffn: Any) -> None:
    heads, tokens = {256: (8, 8192), 128: (4, 8192), 64: (2, 1024)}[width]
    model = ModelConfig(
        num_layers=layers, num_heads=heads, d_model=width, ffn=ffn, vocab_size=4096 if width > 64 else 1024
    )
    recipe = Recipe(seq_len=128, batch_tokens=tokens, optim=Optim(lr=1.0))
    assert update_bytes(model, recipe, tokens // 128) / MIB == pytest.approx(measured, rel=0.15)
    plain = dataclasses.replace(recipe, kernels="plain")
    assert update_bytes(model, plain, 1) - update_bytes(model, recipe, 1) == 2 * 4 * 128 * model.vocab_size
