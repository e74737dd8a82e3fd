"""A real Ray of two cores, started and ended by the command: the same bytes as local, failures, lost workers, stops."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from equipoise.engine import Task
from equipoise.engines.on_ray import _check_answers, _check_room, ray_engine
from equipoise.engines.options import RayOptions
from equipoise.errors import ConfigError, ResourceError

pytest.importorskip("ray", reason="the extra ray is not installed")
pytestmark = pytest.mark.timeout(900)  # several commands each, every run of which loads torch


def test_a_study_by_ray_is_that_of_this_machine_byte_for_byte(check_whole: Any) -> None:
    check_whole("by-ray", "--engine", "ray")


def test_a_lost_worker_s_run_and_a_stopped_study_go_on_as_if_nothing_had_been(check_stopped: Any) -> None:
    """The worker is killed outright: its child saves itself, and Ray starts the run again, which goes on from there."""
    check_stopped("lost-by-ray", lambda pid: os.kill(pid, signal.SIGKILL), "--engine", "ray")


def test_what_ray_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ray that only notes what it is asked for: cores, a part of a GPU, memory and retries of every run."""
    begun: list[dict[str, Any]] = []
    asked: list[dict[str, Any]] = []
    called: list[tuple[Any, ...]] = []

    def options(**wants: Any) -> Any:
        asked.append(wants)
        return SimpleNamespace(remote=lambda *given: called.append(given))

    ray = SimpleNamespace(
        init=lambda **given: begun.append(given),
        shutdown=lambda: begun.append({}),
        nodes=lambda: [{"Alive": True, "Resources": {"CPU": 16.0, "GPU": 1.0, "memory": 2.0**34}}],
        remote=lambda function: SimpleNamespace(options=options),
        get_runtime_context=lambda: SimpleNamespace(gcs_address="head:6379"),
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    task = Task(run=SimpleNamespace(folder="moe/1-s0"), directory=tmp_path / "run", log=tmp_path / "log")  # type: ignore[arg-type]
    where = {"num_jobs": 3, "cpus": 4, "arguments": ["--data", "d"], "environment": {"OMP_NUM_THREADS": "1"}}
    chosen = RayOptions(address="auto", memory_gb=1.5, retries=7)
    with ray_engine(chosen, gpus=0.25, **where) as engine:  # type: ignore[arg-type]
        engine.start([task])
        assert (engine.num_jobs, engine.retries) == (3, 7)
        assert engine.how == "by Ray at head:6379, 4 core(s) and 0.25 GPU(s) a run, 3 at a time"
    with ray_engine(RayOptions(cpus=2), gpus=0, **where) as engine:  # type: ignore[arg-type]
        engine.start([task])
    assert [given.get("address") for given in begun] == ["auto", None, "local", None]
    share = {"name": "moe/1-s0", "num_cpus": 4, "num_gpus": 0.25, "memory": 3 * 2**29, "max_retries": 7}
    assert asked == [share, {**share, "num_cpus": 2, "num_gpus": 0, "memory": None, "max_retries": 3}]
    line = ["train", str(tmp_path / "run"), "--data", "d"]
    assert called[0] == (line, str(tmp_path / "log"), {"OMP_NUM_THREADS": "1"})
    assert called[1] == (line, str(tmp_path / "log"), {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("127.0.0.1:9", "Connection refused"),
        ("ray://127.0.0.1:9", "Connection refused"),
        ("head:port", "not HOST:PORT or ray://HOST:PORT"),
        (":6379", "not HOST:PORT or ray://HOST:PORT"),
    ],
)
def test_a_cluster_that_is_not_there_is_named(address: str, why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        _check_answers(address)
    assert str(refused.value) == (
        f"--engine-option address={address}: {why}; expected local, auto or the address of a running cluster"
    )


def test_addresses_that_ray_finds_itself_are_left_to_it() -> None:
    for address in ("local", "auto"):
        _check_answers(address)


def cluster(*nodes: dict[str, float]) -> Any:
    return SimpleNamespace(nodes=lambda: [{"Alive": True, "Resources": node} for node in nodes])


def test_what_no_machine_has_is_refused_and_a_cluster_that_may_grow_is_waited_for() -> None:
    two = cluster({"CPU": 8.0, "memory": 2.0**34}, {"CPU": 16.0, "GPU": 1.0, "memory": 2.0**33})
    _check_room(two, 16, 1, RayOptions(memory_gb=16))
    for cpus, gpus, memory_gb, said in (
        (17, 0, None, "cpus=17: no machine of this Ray cluster has so many; the most is 16"),
        (1, 2, None, "gpus=2: no machine of this Ray cluster has so many; the most is 1"),
        (1, 0, 17, "memory_gb=17: no machine of this Ray cluster has so many; the most is 16"),
    ):
        with pytest.raises(ResourceError, match=f"^--engine-option {said}$"):
            _check_room(two, cpus, gpus, RayOptions(memory_gb=memory_gb))
    _check_room(cluster({"CPU": 0.0}), 17, 0, RayOptions())
