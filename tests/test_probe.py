"""How many runs go at a time, and children that measure."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from equipoise import bench
from equipoise import probe as module
from equipoise.bench import answer, make_workload
from equipoise.errors import EquipoiseError, Interrupted
from equipoise.probe import (
    Jobs,
    Probes,
    choose_jobs,
    default_jobs,
    load_request,
    measure_in_turn,
    pick_jobs,
    probing,
    that_fit,
)


class FakeProbes:
    """Children whose update takes 1 s alone and as much longer side by side as the test says."""

    def __init__(self, slowdown: dict[int, float]) -> None:
        self.slowdown = slowdown
        self.asked: list[tuple[str, int | None]] = []

    def ask(self, request: dict[str, Any], num: int | None = None) -> list[dict[str, Any]]:
        self.asked.append((request["do"], num))
        return [{"s": self.slowdown.get(num or 0, 1.0), "bytes": 1000}] * (num or 4)


def on_a_machine(monkeypatch: pytest.MonkeyPatch, cores: int, slowdown: dict[int, float]) -> FakeProbes:
    fake = FakeProbes(slowdown)

    @contextmanager
    def children(num: int, device: str, should_stop: Any) -> Iterator[FakeProbes]:
        fake.asked.append(("start", num))
        yield fake

    monkeypatch.setattr(module, "probing", children)
    monkeypatch.setattr(module, "usable_cores", lambda: cores)
    monkeypatch.setattr(module.shutil, "which", lambda _: None)
    return fake


def long_runs(tiny: Any, num: int) -> list[Any]:
    return [dataclasses.replace(tiny.runs[0], budget=10**11, seed=seed) for seed in range(num)]


def test_halves_are_tried_and_the_soonest_end_is_taken(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = on_a_machine(monkeypatch, 8, {8: 4.0, 4: 1.2, 2: 1.0, 1: 1.0})
    chosen = choose_jobs(long_runs(tiny, 40))
    first = [("start", 8), ("load", 1), ("memory", 1), ("load", 8)]
    assert fake.asked == [*first, *(("update", n) for n in (8, 4, 2, 1))]
    assert chosen.number == 4
    # 40 runs: 5 rounds of 4, 10 of 1.2, 20 of 1, 40 of 1
    assert chosen.reason.startswith(
        "measured speed of the study by runs at a time: 1: 1.00×, 2: 2.00×, 4: 3.33×, 8: 2.00×"
    )


def test_a_last_run_alone_counts(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three runs: two at a time take two rounds, at 1.6 times the time of one alone that is longer than one by one."""
    on_a_machine(monkeypatch, 2, {2: 1.6, 1: 1.0})
    assert choose_jobs(long_runs(tiny, 3)).number == 1
    assert choose_jobs(long_runs(tiny, 4)).number == 2


def test_nothing_is_tried_where_it_cannot_pay(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = on_a_machine(monkeypatch, 4, {})
    assert choose_jobs(tiny.runs) == Jobs(
        number=4, reason="4 core(s), 1 thread(s) a run; too little work to measure what is best"
    )
    assert choose_jobs(long_runs(tiny, 1)) == Jobs(number=1, reason="one run is left")
    monkeypatch.setattr(module, "usable_cores", lambda: 1)
    assert choose_jobs(long_runs(tiny, 9)) == Jobs(number=1, reason="1 core(s), 1 thread(s) a run")
    monkeypatch.setattr(module.shutil, "which", lambda _: "/usr/bin/nvidia-smi")
    assert choose_jobs(long_runs(tiny, 9)) == Jobs(number=1, reason="a run has the GPU for itself")
    assert default_jobs(1, "cpu").number == 1 and default_jobs(3).number == 1
    assert not fake.asked


def test_memory_bounds_the_number(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert that_fit([4, 2, 1], 100, None) == that_fit([4, 2, 1], 100, 500) == [4, 2, 1]
    assert that_fit([4, 2, 1], 100 << 20, 300 << 20) == [2, 1]
    assert that_fit([4, 2, 1], 100, 1) == [1]
    assert pick_jobs({4: 1.0, 2: 2.0, 1: 4.0}).number == 4
    assert pick_jobs({2: 0.98, 1: 1.0}).number == 1  # two per cent are noise
    fake = on_a_machine(monkeypatch, 4, {})
    monkeypatch.setattr(module, "available_memory", lambda: 3000)
    chosen = choose_jobs(long_runs(tiny, 40))
    assert fake.asked == [("start", 4), ("load", 1), ("memory", 1), ("load", 2), ("update", 2), ("update", 1)]
    assert chosen.number == 2 and chosen.reason.endswith("; memory for 2, a run takes 0 MiB")


def test_a_workload_answers_in_seconds_of_whole_updates(tiny: Any) -> None:
    run = tiny.runs[0]
    workload = make_workload(run.model, run.recipe, "cpu")
    slow = dataclasses.replace(workload, micro_batches=1000)
    ask = [{"do": "load"}, *({"do": what} for what in ("update", "score", "sample", "memory"))]
    ask.append({"do": "gemm", "threads": 1})
    replies = [json.loads(line) for line in answer(io.StringIO("\n".join(map(json.dumps, ask))), lambda _: slow)]
    assert replies[0] == {"reason": workload.reason, "environment": workload.environment}
    assert workload.environment["device"] == "cpu" and replies[4]["bytes"] > 1e6
    assert replies[1]["s"] > 1000 * 1e-5 and 0 < replies[2]["s"] < 0.01 and 0 < replies[3]["s"] < 1
    assert 1e8 < 1 / replies[5]["s"] < 1e14
    with pytest.raises(ValueError, match=r"request \{'do': 'update'\}: nothing is loaded, or nothing is called that"):
        next(answer(iter(['{"do": "update"}']), lambda _: workload))


def test_several_workloads_are_held_by_name(tiny: Any) -> None:
    """Asked for in turn, each answers for itself: one says a thousand times the seconds of its update."""
    run = tiny.runs[0]
    plain = make_workload(run.model, run.recipe, "cpu")
    held = {"plain": plain, "slow": dataclasses.replace(plain, micro_batches=100_000)}
    ask = [{"do": "load", "name": name} for name in held] + [{"do": "update", "name": name} for name in held] * 2
    replies = [json.loads(line) for line in answer(map(json.dumps, ask), lambda request: held[request["name"]])]
    first, slow, again, slow_again = (reply["s"] for reply in replies[2:])
    assert max(first, again) < min(slow, slow_again)


def test_a_whole_update_takes_every_micro_batch(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two sequences in micro-batches of one, what is quick computes one and counts it twice."""
    tokens: list[int] = []
    step = bench.train_step

    def counting(model: Any, optimizer: Any, inputs_BS: Any, *rest: Any, **named: Any) -> Any:
        tokens.append(inputs_BS.numel())
        return step(model, optimizer, inputs_BS, *rest, **named)

    monkeypatch.setattr(bench, "train_step", counting)
    recipe = dataclasses.replace(tiny.spec.recipe, balance_group=1, micro_sequences=1)
    for whole, factor in ((False, 2), (True, 1)):
        tokens.clear()
        workload = make_workload(tiny.models["moe"], recipe, "cpu", whole=whole)
        assert workload.micro_batches == factor
        assert set(tokens) == {recipe.batch_tokens // factor}


@pytest.mark.parametrize(
    ("unit", "turn", "rounds"),
    [
        (0.001, 3, {"moe": [4.5, 10.5], "dense": [7.5, 13.5]}),
        (1.0, 1, {"moe": [3.0, 5.0], "dense": [4.0, 6.0]}),
    ],
)
def test_models_are_measured_in_turn(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, unit: float, turn: int, rounds: dict[str, list[float]]
) -> None:
    """Two rounds at least; of three short updates the median of the last two; one long one is enough."""
    asked: list[str] = []
    seconds = iter(range(1, 1000))

    class Child:
        def ask(self, request: dict[str, Any]) -> list[dict[str, Any]]:
            asked.append(f"{request['do']} {request['name']}")
            number = next(seconds)
            return [{"s": number * unit if request["do"] == "update" else 0.0, "environment": {"device": "cpu"}}]

    @contextmanager
    def one(num: int, device: str, should_stop: Any) -> Iterator[Child]:
        assert num == 1
        yield Child()

    monkeypatch.setattr(module, "probing", one)
    monkeypatch.setattr(module, "ROUNDS_S", -1.0)
    monkeypatch.setattr(module, "busy_cores", lambda: 0.25)
    measured = measure_in_turn(tiny.models, tiny.spec.recipe, "cpu")
    assert asked == ["load moe", "load dense"] + (["update moe"] * turn + ["update dense"] * turn) * 2
    for name, numbers in rounds.items():
        assert measured["rounds"][name] == pytest.approx([number * unit for number in numbers])
    assert measured["environment"] == {"device": "cpu"} and measured["busy_cores"] == 0.25


def test_children_are_asked_at_once_and_a_failure_is_told(tiny: Any) -> None:
    stopping = False
    with probing(2, "cpu", lambda: stopping) as probes:
        children = probes.children
        run = tiny.runs[0]
        assert len(probes.ask(load_request(run.model, run.recipe))) == 2
        assert len(probes.ask({"do": "update", "seconds": 0.01}, 1)) == 1
        with pytest.raises(EquipoiseError, match=r"^the probe of one update failed: .*nothing is called that"):
            probes.ask({"do": "dance"})
        stopping = True
        with pytest.raises(Interrupted, match=r"^stopped while measuring; run again to go on$"):
            probes.ask({"do": "memory"})
    assert all(child.poll() is not None for child in children)
    assert isinstance(probes, Probes)
