"""Child processes that measure: rates of the arms and runs at a time, side by side; updates of the arms, in turn.

A child is `python -m equipoise gauge`; it answers one request a line (see `equipoise.bench`). Where requests go to
several children at once, each is measured while the others are at work, as the runs of a study are. Arms are compared
in speed only by one child that holds them all: whatever disturbs the machine then disturbs all of them.
Not for: the arithmetic on what was measured (`estimate`), or executing runs (`engine`).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from statistics import fmean, median
from typing import Any, Final

from equipoise.config import dump
from equipoise.errors import EquipoiseError, Interrupted
from equipoise.estimate import Rates, longest_first, makespan, run_flops
from equipoise.forks import can_fork
from equipoise.machine import available_memory, busy_cores, load_average, usable_cores
from equipoise.spec.model import ModelConfig
from equipoise.spec.recipe import Recipe
from equipoise.spec.run import RunConfig

UPDATE_S: Final = 2.0
"""Seconds that `measure_rates` spends on the updates of an arm; scoring and sampling take a fifth of it each."""
TRIAL_S: Final = 1.0
"""Seconds that `choose_jobs` spends on each number of runs at a time."""
START_S: Final = 4.0
"""Seconds that starting the children of a probe takes, several at once: measured 2 to 4 on two cores."""
MAX_COST: Final = 0.05
"""Share of the work left that a probe may cost; below that it is not made."""
FAST_CORE_FLOPS: Final = 50e9
"""FLOP/s of training that a core hardly passes in float32: bounds the work left from below before anything is known."""
WORTH: Final = 1.03
"""A number of runs at a time replaces a smaller one only if it is this much faster: less is noise."""
MEMORY_SHARE: Final = 0.8
"""Share of the available memory that runs may take together."""
ROUNDS: Final = (2, 9)
"""Rounds of `measure_in_turn`, at least and at most."""
ROUNDS_S: Final = 5.0
"""Seconds after which no further round begins once there are the fewest."""
TURN: Final = 3
"""Most updates of a model in its turn; of several the first is thrown away: the caches still hold the model before."""
TURN_S: Final = 0.3
"""Seconds after which no further update begins in a turn: filling the caches is then lost in the update itself."""


# ------------------------------------------------------------------------------------------------ children


@dataclass(kw_only=True)
class Probes:
    """Children that measure; `start_s` is how long the slowest took to be ready."""

    children: list[subprocess.Popen[str]]
    start_s: float = 0.0
    should_stop: Callable[[], bool] = field(default=lambda: False)

    def ask(self, request: Mapping[str, Any], num: int | None = None) -> list[dict[str, Any]]:
        """The answers of the first `num` children (None: all) to one request, which all of them got at once.

        Raises EquipoiseError with what a child said when it failed, Interrupted when `should_stop` says so.
        """
        if self.should_stop():
            raise Interrupted("stopped while measuring; run again to go on")
        asked = self.children[:num]
        for child in asked:
            assert child.stdin is not None
            try:
                child.stdin.write(json.dumps(request) + "\n")
                child.stdin.flush()
            except BrokenPipeError:
                pass  # it has ended, and says why below
        return [_reply(child) for child in asked]


def _reply(child: subprocess.Popen[str]) -> dict[str, Any]:
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        said = child.communicate()[1].strip().splitlines()[-1:] or [f"exit code {child.returncode}"]
        raise EquipoiseError(f"the probe of one update failed: {said[0].removeprefix('error: ')}")
    return dict(json.loads(line))


@contextmanager
def probing(num: int, device: str = "auto", should_stop: Callable[[], bool] = lambda: False) -> Iterator[Probes]:
    """`num` children that are ready to be asked; none is left behind."""
    probes = Probes(children=[], should_stop=should_stop)
    began = time.monotonic()
    try:
        for _ in range(num):
            probes.children.append(
                subprocess.Popen(
                    [sys.executable, "-m", "equipoise", "gauge", "--device", device],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    encoding="utf-8",
                    start_new_session=True,  # a Ctrl-C in the terminal is for the parent
                )
            )
        for child in probes.children:
            _reply(child)
        probes.start_s = time.monotonic() - began
        yield probes
    finally:
        for child in probes.children:
            child.kill()
            child.communicate()


def load_request(model: ModelConfig, recipe: Recipe) -> dict[str, Any]:
    """The request that makes children hold `model`."""
    return {"do": "load", "model": dump(model), "recipe": dump(recipe)}


# ------------------------------------------------------------------------------------------------ rates


def measure_rates(
    models: Mapping[str, ModelConfig], recipe: Recipe, num_jobs: int, device: str = "auto"
) -> dict[str, Rates]:
    """Rates of each arm, measured in `num_jobs` processes at a time: means over the processes.

    Raises EquipoiseError with what a child said when it fails.
    """
    rates = {}
    with probing(num_jobs, device) as probes:
        for name, model in models.items():
            began = time.monotonic()
            probes.ask(load_request(model, recipe))
            load_s = time.monotonic() - began
            update, score, sample = (
                fmean(reply["s"] for reply in probes.ask({"do": what, "seconds": seconds}))
                for what, seconds in (("update", UPDATE_S), ("score", UPDATE_S / 5), ("sample", UPDATE_S / 5))
            )
            start_s = load_s if can_fork() else probes.start_s + load_s  # a run is forked from what has loaded already
            rates[name] = Rates(start_s=start_s, update_s=update, score_token_s=score, sample_token_s=sample)
    return rates


def measure_in_turn(
    models: Mapping[str, ModelConfig],
    recipe: Recipe,
    device: str = "auto",
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Seconds of one update of each model, the models in turn for several rounds, as plain JSON values.

    `rounds` holds for each model the median of each of its turns; beside it stand when, on what machine, and how busy
    that was before. One child holds all models at once. Takes five seconds and a little, or two rounds if these last
    longer. Raises as `Probes.ask` does.
    """
    busy, load, measured = busy_cores(), load_average(), datetime.now(UTC).isoformat(timespec="seconds")
    rounds: dict[str, list[float]] = {name: [] for name in models}
    environment: dict[str, Any] = {}
    with probing(1, device, should_stop) as probes:
        for name, model in models.items():
            (loaded,) = probes.ask({**load_request(model, recipe), "name": name, "whole": True})
            environment = loaded["environment"]
        began = time.monotonic()
        for done in range(ROUNDS[1]):
            if done >= ROUNDS[0] and time.monotonic() - began > ROUNDS_S:
                break
            for name in models:
                turn: list[float] = []
                while len(turn) < TURN and sum(turn) < TURN_S:
                    turn.append(probes.ask({"do": "update", "name": name})[0]["s"])
                rounds[name].append(median(turn[1:] or turn))
    return {"measured": measured, "rounds": rounds, "environment": environment, "load": load, "busy_cores": busy}


# ------------------------------------------------------------------------------------------------ runs at a time


@dataclass(frozen=True, kw_only=True)
class Jobs:
    """How many runs go at a time."""

    number: int
    """At least 1."""
    reason: str
    """Why so many, for people."""


def default_jobs(threads: int, device: str = "auto") -> Jobs:
    """One run per `threads` cores; one where there is a GPU, which a run has for itself."""
    if device != "cpu" and shutil.which("nvidia-smi"):
        return Jobs(number=1, reason="a run has the GPU for itself")
    cores = usable_cores()
    return Jobs(number=max(1, cores // threads), reason=f"{cores} core(s), {threads} thread(s) a run")


def choose_jobs(
    runs: Sequence[RunConfig], device: str = "auto", should_stop: Callable[[], bool] = lambda: False
) -> Jobs:
    """How many of `runs` (of one recipe, at least one) to execute at a time, so that the last one ends soonest.

    The threads of a run are fixed by its recipe, because sums depend on them; what is free is how many run at a time.
    `default_jobs` is the most; it, its half, and so on down to 1 are tried for a second each with the longest run's
    model. Not tried are numbers whose memory does not fit, and nothing is tried where the work left is less than 20
    times what trying costs. Raises as `Probes.ask` does.
    """
    threads = runs[0].recipe.threads
    most = default_jobs(threads, device)
    number = min(most.number, len(runs))
    if number == 1:
        return Jobs(number=1, reason=most.reason if len(runs) > 1 else "one run is left")
    candidates = [number]
    while candidates[-1] > 1:
        candidates.append(candidates[-1] // 2)
    work_s = sum(run_flops(run) for run in runs) / (FAST_CORE_FLOPS * threads * number)
    if START_S + (TRIAL_S + 0.5) * len(candidates) > MAX_COST * work_s:
        return Jobs(number=number, reason=f"{most.reason}; too little work to measure what is best")
    lengths = [run_flops(runs[index]) for index in longest_first(runs)]
    longest = runs[longest_first(runs)[0]]
    ends_at: dict[int, float] = {}
    with probing(number, device, should_stop) as probes:
        load = load_request(longest.model, longest.recipe)
        probes.ask(load, 1)
        (alone,) = probes.ask({"do": "memory"}, 1)
        fits = that_fit(candidates, alone["bytes"] or 0, available_memory())
        probes.ask(load, fits[0])
        for jobs in fits:
            update_s = fmean(reply["s"] for reply in probes.ask({"do": "update", "seconds": TRIAL_S}, jobs))
            ends_at[jobs] = makespan([update_s * length / lengths[0] for length in lengths], jobs)
    chosen = pick_jobs(ends_at)
    if len(fits) == len(candidates):
        return chosen
    return replace(
        chosen, reason=f"{chosen.reason}; memory for {fits[0]}, a run takes {alone['bytes'] / 2**20:,.0f} MiB"
    )


def that_fit(candidates: Sequence[int], peak: int, available: int | None) -> list[int]:
    """The numbers of runs at a time whose memory fits, in their order; 1 always does.

    `peak` are the bytes of one run, `available` what the machine has (None: not known).
    """
    return [jobs for jobs in candidates if jobs == 1 or available is None or jobs * peak <= MEMORY_SHARE * available]


def pick_jobs(ends_at: Mapping[int, float]) -> Jobs:
    """The number of runs at a time that ends soonest; a larger one only if it is worth it.

    `ends_at` is the relative end of the work per number.
    """
    best = min(ends_at)
    for jobs in sorted(ends_at):
        if ends_at[best] > WORTH * ends_at[jobs]:
            best = jobs
    speeds = ", ".join(f"{jobs}: {ends_at[min(ends_at)] / ends_at[jobs]:.2f}×" for jobs in sorted(ends_at))
    return Jobs(number=best, reason=f"measured speed of the study by runs at a time: {speeds}")
