"""What can be said to engines, read and refused; packages that are not there."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from equipoise.cli.engines import check_engine, engine_opener
from equipoise.engines.options import RayOptions, SlurmOptions, choose_device, read_options
from equipoise.errors import ConfigError


def test_options_are_read_by_type() -> None:
    given = ["address=auto", "cpus=4", "gpus=0.25", "memory_gb=1.5", "retries=0", "cpus=8"]
    assert read_options("ray", given) == RayOptions(address="auto", cpus=8, gpus=0.25, memory_gb=1.5, retries=0)
    given = ["partition=gpu", "minutes=90", "gpus=1", "cluster=local", "sbatch.mail_type=END", "sbatch.comment=a=b"]
    assert read_options("slurm", given) == SlurmOptions(
        partition="gpu", minutes=90, gpus=1, cluster="local", sbatch={"mail-type": "END", "comment": "a=b"}
    )
    assert read_options("local", []) is read_options("commands", []) is None


@pytest.mark.parametrize(
    ("engine", "given", "said"),
    [
        ("rya", "", "--engine rya: expected local, ray, slurm or commands; did you mean 'ray'?"),
        ("ray", "cpus", "--engine-option cpus: expected NAME=VALUE"),
        (
            "ray",
            "cpu=1",
            "--engine ray has no cpu; expected one of cpus, memory_gb, retries, address, gpus; did you mean",
        ),
        ("ray", "cpus=0", "--engine-option cpus=0: expected a whole number of at least 1"),
        ("ray", "cpus=1.5", "expected a whole number of at least 1"),
        ("ray", "retries=-1", "expected a whole number of at least 0"),
        ("ray", "gpus=nan", "expected a number of at least 0"),
        ("ray", "gpus=1.5", "expected a whole number, or a fraction of one GPU in steps of 0.0001"),
        ("ray", "gpus=0.00001", "expected a whole number, or a fraction of one GPU in steps of 0.0001"),
        ("slurm", "minutes=9999999999", "expected a whole number of at least 1, below a billion"),
        ("ray", "memory_gb=0", "expected a number above 0"),
        ("ray", "address=", "expected some text"),
        ("slurm", "gpus=0.5", "expected a whole number of at least 0"),
        ("slurm", "cluster=pbs", "--engine-option cluster=pbs: expected slurm or local"),
        ("slurm", "sbatch.=x", "--engine slurm has no sbatch.; expected one of "),
        ("slurm", "sbatch.qos=", "expected some text"),
        ("local", "cpus=1", "--engine local has no cpus; expected none"),
        ("commands", "cpus=1", "--engine commands has no cpus; expected none"),
        ("ray", "a\nb=1", r"--engine-option a\nb=1: --engine ray has no a\nb; expected one of"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_a_line(engine: str, given: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_options(engine, [given] if given else [])
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        read_options("ray", ["cpus=x", "gpus=1", "nodes=3"])
    assert [line.split(":")[0] for line in str(refused.value).splitlines()] == [
        "--engine-option cpus=x",
        "--engine-option nodes=3",
    ]


def test_a_run_computes_on_what_it_was_given() -> None:
    """Without a GPU `auto` stays, so that the record says what a local run's says; a GPU given is insisted on."""
    assert choose_device(RayOptions(), "auto") == ("auto", 0)
    assert choose_device(RayOptions(), "cuda") == ("cuda", 1)
    assert choose_device(RayOptions(), "cuda", processes=4) == ("cuda", 4)
    assert choose_device(SlurmOptions(), "auto", processes=4) == ("auto", 0)
    assert choose_device(RayOptions(gpus=0.5), "auto") == ("cuda", 0.5)
    assert choose_device(SlurmOptions(gpus=0), "cpu") == ("cpu", 0)
    with pytest.raises(ConfigError, match=r"^--engine-option gpus=1: nothing uses them with --device cpu; expected 0$"):
        choose_device(SlurmOptions(gpus=1), "cpu")
    with pytest.raises(ConfigError, match=r"^--engine-option gpus=0: --device cuda needs one; expected more than 0"):
        choose_device(RayOptions(gpus=0), "cuda")


def test_a_run_of_several_processes_is_booked_for_all_of_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    booked: list[dict[str, Any]] = []

    @contextmanager
    def opened(options: Any, **given: Any) -> Iterator[None]:
        booked.append(given)
        yield

    monkeypatch.setattr("equipoise.engines.on_slurm.slurm_engine", opened)
    for processes in (1, 4):
        opener = engine_opener(SlurmOptions(), tmp_path, "cuda", (3, processes), ["--x"], 5, lambda: False)
        with opener([]):
            pass
    assert [(given["cpus"], given["gpus"], given["num_jobs"]) for given in booked] == [(3, 1, 5), (12, 4, 5)]
    assert booked[0]["arguments"] == ["--x", "--device", "cuda"]


def test_each_process_of_a_run_is_given_a_gpu() -> None:
    assert choose_device(SlurmOptions(), "cuda", 4) == choose_device(RayOptions(gpus=4), "auto", 4) == ("cuda", 4)
    assert choose_device(RayOptions(), "auto", 4) == ("auto", 0)
    for gpus in (0.5, 2, 8):
        with pytest.raises(ConfigError, match=f"^--engine-option gpus={gpus}: each of the 4 processes .*; expected 4$"):
            check_engine("ray", [f"gpus={gpus}"], "cuda", 4)  # before anything is prepared


@pytest.mark.parametrize(("engine", "package"), [("ray", "ray"), ("slurm", "submitit")])
def test_an_engine_whose_package_is_absent_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, engine: str, package: str
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else find(name, *rest))
    with pytest.raises(ConfigError) as refused:
        check_engine(engine, None, "auto", 1)
    assert str(refused.value) == (
        f"--engine {engine}: the package {package} is not installed; python -m pip install 'equipoise[{engine}]'"
    )


def test_the_command_line_knows_them(run: Any) -> None:
    shown = run("nothing", "--help")[1]
    assert "--engine" in shown and "--engine-option" in shown
    code, _, told = run("nothing", "--engine", "ray", "--engine-option", "cpus=none")
    assert code == 2 and "error: --engine-option cpus=none: expected a whole number" in told
