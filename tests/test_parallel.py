"""Several processes at one run: the losses of one, whatever the experts that each sees; and what ends them.

Real processes over gloo, started by torchrun. What they are compared with is trained by this process alone.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from equipoise.config import dump
from equipoise.errors import ConfigError, Interrupted
from equipoise.files import read_json
from equipoise.micro import check_processes, fitting
from equipoise.model.moe import DrawnRouter
from equipoise.parallel import ALONE, Group, any_of, check_devices, cut_up, flat, gathered, launch, summed
from equipoise.record import masked, read_run, start_run
from equipoise.spec.model import BalanceBias, BalanceLoss, DenseFFN, MoEFFN, NoBalance
from equipoise.spec.recipe import WSD, Optim, Recipe
from equipoise.spec.run import RunConfig
from equipoise.train import train
from equipoise.trunk import checkpoint_steps

SCRIPT = Path(__file__).with_name("torchrun_runs.py")
SHARED: Any = importlib.util.module_from_spec(importlib.util.spec_from_file_location("torchrun_runs", SCRIPT))  # type: ignore[arg-type]
SHARED.__spec__.loader.exec_module(SHARED)
SEQUENCES: int = SHARED.SEQUENCES
STEPS = 12
HALF = 7
"""Updates after which runs are stopped: between two points of the curve."""


def made(tiny: Any, arm: str, ffn: Any, **recipe: Any) -> RunConfig:
    run = next(run for run in tiny.runs if run.arm == "moe" and run.seed == 0)
    changed = {"seq_len": 64, "batch_tokens": 64 * SEQUENCES, "num_evals": 3, **recipe}
    return dataclasses.replace(
        run,
        arm=arm,
        budget=STEPS * 64 * SEQUENCES,
        model=dataclasses.replace(run.model, ffn=ffn),
        recipe=dataclasses.replace(run.recipe, **changed),
    )


@pytest.fixture(scope="module")
def runs(tiny: Any) -> dict[str, RunConfig]:
    routed = MoEFFN(num_experts=3, top_k=2, d_expert=16, z_coef=0.001, balance=BalanceLoss(coef=0.01))
    drawn = MoEFFN(num_experts=5, top_k=2, d_expert=16, router="random", balance=NoBalance())
    biased = dataclasses.replace(routed, balance=BalanceBias(rate=0.01))
    return {
        "dense": made(tiny, "dense", DenseFFN(d_ff=32)),
        "moe": made(tiny, "moe", routed),
        "exact": made(tiny, "exact", routed, micro_sequences=SEQUENCES // 2),
        "bias": made(tiny, "bias", biased, kernels="plain"),
        "apart": made(tiny, "apart", drawn),
        "apart-plain": made(tiny, "apart-plain", drawn, kernels="plain"),
        "memory": made(tiny, "memory", routed),
        "nan": made(tiny, "nan", routed),
        "drift": made(tiny, "drift", DenseFFN(d_ff=32)),
        "wsd": made(tiny, "wsd", routed, schedule=WSD(warmup_tokens=2 * 64 * SEQUENCES)),
    }


def torchrun(processes: int, tiny: Any, folder: Path, planned: list[tuple[RunConfig, str, int | None]]) -> None:
    """Train runs in folders below `folder`, one after the other, stopping where it is said."""
    table = [{"run": dump(run), "directory": str(folder / place), "stop_at": stop} for run, place, stop in planned]
    for item, (run, *_) in zip(table, planned, strict=True):
        if run.arm == "wsd":
            item["beside"] = dump(dataclasses.replace(run, budget=2 * run.budget))
    plan = folder / f"plan-{processes}.json"
    plan.write_text(json.dumps({"data": str(tiny.dataset.directory), "runs": table}), encoding="utf-8")
    line = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), str(SCRIPT), str(plan)]
    done = subprocess.run(line, capture_output=True, text=True, encoding="utf-8", timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def alone(tiny: Any, runs: dict[str, RunConfig], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every run by this process alone, never stopped."""
    folder, before = tmp_path_factory.mktemp("alone"), SHARED.use_apart()
    for name, run in runs.items():
        train(run, folder / name, tiny.dataset)
    DrawnRouter.forward = before  # type: ignore[method-assign]
    return folder


@pytest.fixture(scope="module")
def together(tiny: Any, runs: dict[str, RunConfig], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same by two processes; some stopped half-way, and three processes going on with one of those."""
    folder = tmp_path_factory.mktemp("together")
    done = iter([0] * 2 * HALF)
    with pytest.raises(Interrupted):
        train(runs["moe"], folder / "from-one", tiny.dataset, stop_signal=lambda: next(done, 15))
    stopped = [(runs["moe"], place, HALF) for place in ("resumed", "to-one", "to-three")]
    going_on = [(runs["moe"], place, None) for place in ("resumed", "from-one")]
    torchrun(2, tiny, folder, [*((run, name, None) for name, run in runs.items()), *stopped, *going_on])
    torchrun(3, tiny, folder, [(runs["moe"], "to-three", None)])
    train(runs["moe"], folder / "to-one", tiny.dataset)
    return folder


def losses(directory: Path) -> list[float]:
    """Of every update and every point of the curve."""
    record = read_run(directory)
    return [row["lm_loss"] for row in record.rows("train")] + [row["loss"] for row in record.rows("eval")]


def left_behind(directory: Path) -> list[Any]:
    """Rows, weights, optimizer and losses, timings aside."""
    newest = directory / "checkpoints" / f"step-{checkpoint_steps(directory)[-1]:08d}"
    files = (newest / "model.safetensors", newest / "optim.safetensors", directory / "val_losses.safetensors")
    record = read_run(directory)
    rows = [masked(record.rows("train")), masked(record.rows("eval")), record.samples()]
    return [*rows, *(path.read_bytes() for path in files), (directory / "explorer.json").read_bytes()]


def processes_of(directory: Path) -> list[int]:
    return [e.get("processes", 1) for e in read_json(directory / "environment.json")["environments"]]


# ------------------------------------------------------------------------------------------------ the same numbers


def test_several_processes_do_what_one_does(alone: Path, together: Path) -> None:
    """One test, so that all of it is trained once, however many processes test."""
    for name in ("dense", "moe", "exact", "bias", "apart", "apart-plain", "wsd"):
        check_two_processes_give_the_losses_of_one(alone, together, name)
    check_where_the_passes_are_the_same_so_is_every_bit(alone, together)
    check_each_process_had_experts_that_the_other_never_saw(together)
    check_biases_moved_by_the_loads_of_the_whole_batch(alone, together)
    check_a_run_went_on_from_a_trunk(together)
    check_resumed_by_as_many_processes_it_is_the_run_never_stopped(together)
    for name, by in (("from-one", [1, 2]), ("to-one", [2, 1]), ("to-three", [2, 3])):
        check_checkpoints_are_gone_on_from_by_any_number_which_is_recorded(alone, together, name, by)
    check_no_memory_in_one_process_cuts_the_passes_of_all(alone, together)
    check_a_number_that_is_not_finite_in_one_process_ends_the_run_in_all(together)
    check_weights_that_drift_apart_are_noticed_and_not_saved(together)


def check_two_processes_give_the_losses_of_one(alone: Path, together: Path, name: str) -> None:
    expected, found = read_run(alone / name), read_run(together / name)
    assert found.status == "complete" and len(found.rows("train")) == STEPS
    assert losses(together / name) == pytest.approx(losses(alone / name), rel=1e-6)
    for field in ("load_balance", "router_z", "grad_norm"):
        ones, twos = ([row.get(field) for row in record.rows("train")] for record in (expected, found))
        assert twos == (ones if ones[0] is None else pytest.approx(ones, rel=1e-5))
    assert found.losses()["final_loss_U"] == pytest.approx(expected.losses()["final_loss_U"], rel=1e-5)
    assert expected.summary and found.summary
    assert found.summary["tokens"] == expected.summary["tokens"]
    assert processes_of(together / name) == [2] and processes_of(alone / name) == [1]


def check_where_the_passes_are_the_same_so_is_every_bit(alone: Path, together: Path) -> None:
    """Two passes of half a batch each: whether their gradients are added up in one process or across two."""
    assert left_behind(together / "exact") == left_behind(alone / "exact")


def check_each_process_had_experts_that_the_other_never_saw(together: Path) -> None:
    """So that the comparison above is one: the experts of both halves were trained, the fifth was only decayed."""
    newest = together / "apart" / "checkpoints" / f"step-{STEPS:08d}"
    from safetensors.numpy import load_file

    moments = load_file(newest / "optim.safetensors")["blocks.0.ffn.experts.w_up/exp_avg_sq"]
    assert [bool(expert.any()) for expert in moments] == [True, True, True, True, False]


def check_biases_moved_by_the_loads_of_the_whole_batch(alone: Path, together: Path) -> None:
    from safetensors.numpy import load_file

    one, two = (
        load_file(f / "bias" / "checkpoints" / f"step-{STEPS:08d}" / "model.safetensors") for f in (alone, together)
    )
    assert one["blocks.0.ffn.router.bias"].any()
    np.testing.assert_array_equal(one["blocks.0.ffn.router.bias"], two["blocks.0.ffn.router.bias"])


def check_a_run_went_on_from_a_trunk(together: Path) -> None:
    assert read_json(together / "wsd" / "branch.json")["step"] > 0


# ------------------------------------------------------------------------------------------------ checkpoints


def check_resumed_by_as_many_processes_it_is_the_run_never_stopped(together: Path) -> None:
    assert left_behind(together / "resumed") == left_behind(together / "moe")
    assert read_json(together / "resumed" / "summary.json")["resumed_elsewhere"] == []


def check_checkpoints_are_gone_on_from_by_any_number_which_is_recorded(
    alone: Path, together: Path, name: str, by: list[int]
) -> None:
    assert losses(together / name) == pytest.approx(losses(alone / "moe"), rel=1e-6)
    record = read_run(together / name)
    assert record.status == "complete" and record.summary and processes_of(together / name) == by
    (step,) = record.summary["resumed_elsewhere"]
    assert step == HALF or name == "from-one"


# ------------------------------------------------------------------------------------------------ what one alone meets


def check_no_memory_in_one_process_cuts_the_passes_of_all(alone: Path, together: Path) -> None:
    assert losses(together / "memory") == pytest.approx(losses(alone / "memory"), rel=1e-6)
    (environment,) = read_json(together / "memory" / "environment.json")["environments"]
    assert environment["micro_sequences"] == 1 and environment["processes"] == 2


def check_a_number_that_is_not_finite_in_one_process_ends_the_run_in_all(together: Path) -> None:
    record = read_run(together / "nan")
    assert record.status == "diverged" and record.summary
    assert record.summary["message"] == "step 5: lm_loss is not finite"
    assert len(record.rows("train")) == 5


def check_weights_that_drift_apart_are_noticed_and_not_saved(together: Path) -> None:
    said = (together / "drift" / "error.txt").read_text(encoding="utf-8")
    assert "drift: step 4: the weights are not the same in all 2 processes; is a machine's memory failing?" in said
    assert checkpoint_steps(together / "drift") == []


# ------------------------------------------------------------------------------------------------ the command


LONG = 100_000
"""Updates that no test waits for."""


@pytest.fixture
def endless(tiny: Any, runs: dict[str, RunConfig], tmp_path: Path) -> Path:
    """The directory of a run that does not end by itself."""
    long = dataclasses.replace(runs["dense"], budget=LONG * 64 * SEQUENCES)
    start_run(tmp_path / "dense" / "run", long, tiny.dataset.tokenizer().to_json())
    return tmp_path / "dense" / "run"


def updates(directory: Path) -> int:
    metrics = directory / "metrics.jsonl"
    return metrics.read_bytes().count(b'"kind":"train"') if metrics.exists() else 0


def started(line: list[str], directory: Path) -> subprocess.Popen[str]:
    """A command in a process of its own, once the run has done three updates."""
    process = subprocess.Popen(
        [sys.executable, *line], stderr=subprocess.PIPE, encoding="utf-8", start_new_session=True
    )
    end = time.monotonic() + 120
    while updates(directory) < 3 and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    return process


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code, and what it said; nothing is left behind."""
    try:
        said = process.communicate(timeout=120)[1]
    finally:
        process.kill()
    return process.returncode, said


def child_of(pid: int, rank: int) -> int:
    """The process with this rank that `pid` has started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
    (child,) = [c for c in children if f"RANK={rank}".encode() in Path(f"/proc/{c}/environ").read_bytes().split(b"\0")]
    return int(child)


def saved(directory: Path) -> list[int]:
    """Steps of the checkpoints, of which the newest has every row there is."""
    assert checkpoint_steps(directory)[-1] == updates(directory) >= 3
    return checkpoint_steps(directory)


def test_a_signal_to_torchrun_stops_all_and_saves_once(tiny: Any, endless: Path) -> None:
    line = ["train", str(endless), "--data", str(tiny.dataset.directory), "--device", "cpu"]
    torchrun = started(["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "equipoise", *line], endless)
    torchrun.send_signal(signal.SIGTERM)
    _, said = ended(torchrun)
    (step,) = saved(endless)
    assert said.count("error: ") == 1 and f"step-{step:08d}: saved at step {step} of {LONG}; run again" in said


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_a_process_that_is_killed_or_left_alone_ends_them_all_and_what_was_done_is_saved(
    tiny: Any, endless: Path
) -> None:
    """First a follower is killed, then whoever started them: that one's exit code is then the signal's."""
    line = ["-m", "equipoise", "train", str(endless), "--data", str(tiny.dataset.directory), "--processes", "2"]
    process = started([*line, "--device", "cpu"], endless)
    os.kill(child_of(process.pid, rank=1), signal.SIGKILL)
    code, said = ended(process)
    (first,) = saved(endless)
    assert code == 7 and f"saved at step {first}, run again to go on; another process of this run has ended" in said
    process = started([*line, "--device", "cpu"], endless)
    while updates(endless) <= first:
        time.sleep(0.05)
    process.kill()
    said = process.communicate(timeout=120)[1]  # until the last of them has closed its end
    assert f"going on from step {first}" in said and saved(endless)[0] == first


STUDY = """
name = "shared"
question = "do its runs have several processes?"
seeds = [0]
budgets = [3072]
[corpus]
kind = "grammar"
num_documents = 120
num_validation = 12
num_selection = 4
[tokenizer]
kind = "bpe"
vocab_size = 512
[recipe]
seq_len = 64
batch_tokens = 384
balance_group = 1
num_evals = 2
curve_tokens = 512
optim = { lr = 3e-3 }
samples = { prompts = [] }
[base.model]
num_layers = 1
num_heads = 2
d_model = 16
[arms.moe.model.ffn]
kind = "moe"
num_experts = 3
top_k = 2
d_expert = 16
"""


def test_run_gives_every_run_so_many_processes_and_torchrun_does_the_same(tiny: Any, tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(STUDY, encoding="utf-8")
    cache = str(tiny.dataset.directory.parent)
    line = ["run", "study.toml", "--device", "cpu", "--cache", cache, "--processes-per-run", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "equipoise", *line], cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=300
    )
    assert done.returncode == 0, done.stderr
    study = tmp_path / "runs" / "shared"
    results = read_json(study / "results.json")
    assert [e["processes"] for e in results["provenance"]["environments"]] == [2]
    assert results["provenance"]["mixed"] is None and [row["status"] for row in results["runs"]] == ["complete"]
    run = read_run(study / "moe/3072-s0").config
    assert run is not None
    train(run, tmp_path / "alone", tiny.dataset)
    assert losses(study / "moe/3072-s0") == pytest.approx(losses(tmp_path / "alone"), rel=1e-6)

    start_run(tmp_path / "moe" / "torchrun", run, tiny.dataset.tokenizer().to_json())
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "equipoise"]
    line = ["train", str(tmp_path / "moe" / "torchrun"), "--data", str(tiny.dataset.directory), "--device", "cpu"]
    done = subprocess.run([sys.executable, *torchrun, *line], capture_output=True, encoding="utf-8", timeout=300)
    assert done.returncode == 0, done.stderr
    assert left_behind(tmp_path / "moe" / "torchrun") == left_behind(study / "moe/3072-s0")


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    from equipoise.cli.main import call as called

    return called(arguments), capsys.readouterr().err


def test_what_cannot_be_shared_out_is_refused_in_one_line_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study.toml").write_text(STUDY, encoding="utf-8")
    code, said = call(capsys, "run", "study.toml", "--processes-per-run", "4")
    assert code == 2 and not (tmp_path / "runs").exists()
    assert said == (
        "error: 4 processes: the 6 sequences of a batch are 6 whole balance group(s), recipe.balance_group = 1, of "
        "which each process takes as many; expected 1, 2, 3, 6, or a smaller recipe.balance_group\n"
    )
    for processes in ("0", "257", "two"):
        code, said = call(capsys, "train", "study.toml", "--processes", processes)
        assert code == 2 and "--processes" in said and said.count("\n") == 1


def test_a_single_run_is_refused_too(tiny: Any, runs: dict[str, RunConfig], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^4 processes: the 6 sequences of a batch"):
        train(runs["moe"], tmp_path / "run", tiny.dataset, group=Group(size=4))
    assert not (tmp_path / "run").exists()


def test_torchrun_and_processes_are_two_ways_to_the_same(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "4")
    code, said = call(capsys, "train", "quick", "--processes", "2", "--device", "cpu")
    assert code == 2 and said == "error: --processes 2: torchrun has started 4 already; expected one way\n"


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(
        ConfigError, match=r"^3 processes: 2 CUDA device\(s\) are visible; expected 1 to 2, or --device"
    ):
        check_devices(3, "auto")
    check_devices(2, "cuda")
    check_devices(3, "cpu")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    check_devices(3, "auto")


# ------------------------------------------------------------------------------------------------ its parts


def shapes() -> Iterator[tuple[int, int, int]]:
    for sequences in range(1, 25):
        for group in (g for g in range(1, sequences + 1) if sequences % g == 0):
            for processes in range(1, sequences + 1):
                yield sequences, group, processes


def test_passes_are_whole_groups_that_divide_a_share() -> None:
    """By trying every number."""
    for sequences, group, processes in shapes():
        recipe = Recipe(seq_len=1, batch_tokens=sequences, balance_group=group, optim=Optim(lr=1.0))
        if sequences % (processes * group):
            with pytest.raises(ConfigError, match=f"^{processes} processes: the {sequences} sequences"):
                check_processes(recipe, processes)
            continue
        check_processes(recipe, processes)
        share = sequences // processes
        for rows in range(1, sequences + 1):
            allowed = [n for n in range(1, rows + 1) if n % group == 0 and share % n == 0]
            assert fitting(recipe, rows, processes) == max(allowed, default=group)


def test_alone_nothing_is_exchanged() -> None:
    numbers = torch.tensor([1.0, 2.0])
    assert gathered(ALONE, numbers) is numbers and summed(ALONE, numbers) is numbers
    assert any_of(ALONE, True) and not any_of(ALONE, False)
    assert ALONE.share(5) == slice(0, 5)


def test_a_vector_of_gradients_is_cut_up_as_it_was_put_together() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((2, 3), (5,), (1, 1, 7))]
    gradients = [torch.full_like(parameter, index + 1) for index, parameter in enumerate(parameters)]
    cut_up(2 * flat(gradients), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert parameter.grad is not None and torch.equal(parameter.grad, 2 * gradient)


@pytest.mark.parametrize(
    ("exit_codes", "expected"),
    [({0: 4}, 4), ({1: -9}, 7), ({0: 1, 1: -9}, 7), ({1: 1, 0: 5}, 5), ({1: 2}, 2), ({0: -15}, 143)],
)
def test_the_exit_code_is_that_of_the_cause(
    monkeypatch: pytest.MonkeyPatch, exit_codes: dict[int, int], expected: int
) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    def failing(*_: Any) -> Any:
        def launched(*_: Any) -> None:
            failures = {
                rank: ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file="<N/A>")
                for rank, code in exit_codes.items()
            }
            raise ChildFailedError("python", failures)

        return launched

    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", failing)
    monkeypatch.setattr("logging.disable", lambda _: None)
    assert launch(2, ["train", "x"]) == expected
