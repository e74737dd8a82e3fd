"""A real Ray of two cores, started and ended by the command: the same bytes as local, failures, lost workers, stops."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from equipoise.engines.on_ray import _check_answers, _check_room
from equipoise.engines.options import RayOptions
from equipoise.errors import ConfigError, ResourceError

pytest.importorskip("ray", reason="the extra ray is not installed")
pytestmark = pytest.mark.timeout(900)  # several commands each, every run of which loads torch


def test_a_study_by_ray_is_that_of_this_machine_byte_for_byte(check_whole: Any) -> None:
    check_whole("by-ray", "--engine", "ray")


def test_a_lost_worker_s_run_and_a_stopped_study_go_on_as_if_nothing_had_been(check_stopped: Any) -> None:
    """The worker is killed outright: its child saves itself, and Ray starts the run again, which goes on from there."""
    check_stopped("lost-by-ray", lambda pid: os.kill(pid, signal.SIGKILL), "--engine", "ray")


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
