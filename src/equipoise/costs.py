"""What a study would cost on another machine: seconds, device-hours, money and bytes, from a stated utilisation.

A prediction, not a measurement: the share of the peak that is reached is an assumption that is said with every number,
the same for dense and routed arms unless asked for otherwise. The formulas, what they leave out and how far they are
from what was measured: docs/scale.md. Not for: this machine's time (`probe`), executing anything.
"""

from __future__ import annotations

from typing import Any, Final

from equipoise.accounting import count_flops, count_params
from equipoise.budgets import arm_budgets, updates_of
from equipoise.data.tokenfile import dtype_for
from equipoise.errors import ConfigError
from equipoise.estimate import Rates, run_time
from equipoise.footprint import CHECKPOINT_BYTES, footprint, precision, traffic_bytes
from equipoise.hardware import USABLE_SHARE, Hardware, Setting
from equipoise.matching import resolve_arms
from equipoise.micro import check_processes, fitting
from equipoise.spec.model import ModelConfig
from equipoise.spec.recipe import Recipe
from equipoise.spec.study import StudySpec
from equipoise.spec.sweep import family
from equipoise.study import DataFacts, study_time

LAUNCHES_A_LAYER: Final = {"dense": 107, "moe": 155}
"""Operations that a layer takes, forward and backward, with the plain kernels: counted on a CPU."""
LAUNCH_S: Final = 5e-6
"""Seconds that starting an operation on a GPU takes, about: an assumption, for a warning alone."""


def peak_flops(recipe: Recipe, hardware: Hardware) -> float:
    """FLOP/s that one run could reach at most on a device: of a CPU the share of its threads.

    Raises ConfigError for bfloat16 on a device without it.
    """
    if precision(recipe, hardware) == "float32":
        share = 1.0 if hardware.cores is None else min(1.0, recipe.threads / hardware.cores)
        return hardware.float32_flops * share
    if hardware.bfloat16_flops is None:
        raise ConfigError(f"recipe.dtype: 'bfloat16' is not accepted on {hardware.name}; expected 'auto' or 'float32'")
    return hardware.bfloat16_flops


def update_seconds(
    model: ModelConfig, recipe: Recipe, hardware: Hardware, utilisation: float, processes: int = 1
) -> tuple[float, float]:
    """(Seconds of computing, seconds of moving weights) of one update; it takes the longer of them.

    Computing is the model's training FLOPs, causal attention at half, over peak × utilisation; moving is
    `footprint.traffic_bytes` over the bandwidth. Each process does its part of the batch.
    """
    flops = count_flops(model, recipe.seq_len).training_causal * recipe.batch_tokens
    passes = recipe.num_sequences // (fitting(recipe, recipe.sequences_per_forward, processes) * processes)
    moved = traffic_bytes(model, passes, precision(recipe, hardware))
    return flops / (peak_flops(recipe, hardware) * utilisation * processes), moved / hardware.bandwidth


def outlook(spec: StudySpec, facts: DataFacts, setting: Setting) -> dict[str, Any]:
    """What the study would cost there, as plain JSON values; a trunk that budgets share is counted once.

    `arms` per arm: seconds of an update, tokens/s and seconds of a run at each budget (each alone), `device_s` of all
    its runs, memory and bytes of a checkpoint. Not counted: preparing the data, starts, samples, checkpoints being
    written, and what devices that share a run tell each other. Raises ConfigError for processes that the balance groups
    of an update cannot be shared among, more processes than there is room for, and a utilisation of an unknown arm.
    """
    recipe, hardware, processes = spec.recipe, setting.hardware, setting.processes_per_run
    places = 1 if hardware.cores is None else max(1, hardware.cores // recipe.threads)
    _check(spec, setting, places)
    resolved = resolve_arms(spec.arms, facts.vocab_size, recipe.seq_len)
    models = {name: arm.model for name, arm in resolved.items()}
    steps = updates_of(spec, arm_budgets(spec, models))
    num_runs = len(models) * len(spec.seeds) * len(spec.budgets)
    jobs = setting.num_devices * places // processes
    rates: dict[str, Rates] = {}
    arms: dict[str, dict[str, Any]] = {}
    for name, model in models.items():
        reached = setting.reached(name)
        compute_s, move_s = update_seconds(model, recipe, hardware, reached, processes)
        per_s = peak_flops(recipe, hardware) * reached * processes
        rates[name] = Rates(
            start_s=0.0,
            update_s=max(compute_s, move_s),
            score_token_s=count_flops(model, recipe.seq_len).forward_causal / per_s,
            sample_token_s=0.0,
        )
        selection = facts.selection_tokens if family(name) else 0
        each = [run_time(recipe, num, facts.eval_tokens, rates[name], selection).total_s for num in steps[name]]
        arms[name] = {
            "utilisation": reached,
            "update_s": rates[name].update_s,
            "tokens_per_s": recipe.batch_tokens / rates[name].update_s,
            "run_s": {str(budget): seconds for budget, seconds in zip(spec.budgets, each, strict=True)},
            "moving_s": move_s,
            "launching_s": _launching_s(model, recipe, setting),
            **_bytes(model, recipe, setting, places),
        }
    time = study_time(spec, steps, facts, rates, min(jobs, num_runs))
    for name, row in arms.items():
        row["device_s"] = time["arms"][name]["total_s"] * processes / places
    device_s = sum(row["device_s"] for row in arms.values())
    held_s = time["study_s"] * setting.num_devices
    price = setting.price_per_hour
    largest = max(max(num) for num in steps.values()) * recipe.batch_tokens
    id_bytes = dtype_for(facts.vocab_size).itemsize
    return {
        "name": hardware.name,
        "title": hardware.title,
        "source": hardware.source,
        "memory_bytes": hardware.memory_bytes,
        "dtype": precision(recipe, hardware),
        "peak_flops": hardware.bfloat16_flops if precision(recipe, hardware) == "bfloat16" else hardware.float32_flops,
        "num_devices": setting.num_devices,
        "processes_per_run": processes,
        "jobs": min(jobs, num_runs),
        "idle_devices": setting.num_devices - -(-min(jobs, num_runs) * processes // places),
        "arms": arms,
        "study_s": time["study_s"],
        "device_s": device_s,
        "held_s": held_s,
        "price_per_hour": price,
        "money": None if price is None else held_s / 3600 * price,
        "bytes_per_token": id_bytes,
        "train_token_bytes": None if facts.train_tokens is None else facts.train_tokens * id_bytes,
        "once_through_bytes": largest * id_bytes,
    }


def _check(spec: StudySpec, setting: Setting, places: int) -> None:
    unknown = [name for name in setting.of_arm if name not in {*spec.arms, *map(family, spec.arms)}]
    if unknown:
        raise ConfigError(f"--utilisation {unknown[0]}=…: no such arm; expected one of {', '.join(spec.arms)}")
    processes = setting.processes_per_run
    check_processes(spec.recipe, processes)
    if processes > setting.num_devices * places:
        at_most = f"{setting.num_devices * places} that {setting.num_devices} × {setting.hardware.name} can hold"
        raise ConfigError(f"--processes-per-run {processes}: expected at most the {at_most} (--devices)")


def _bytes(model: ModelConfig, recipe: Recipe, setting: Setting, places: int) -> dict[str, Any]:
    """Memory of a process, whether it fits, and a checkpoint."""
    hardware = setting.hardware
    rows = fitting(recipe, recipe.sequences_per_forward, setting.processes_per_run)
    needs = footprint(model, recipe, hardware, rows)
    usable = hardware.memory_bytes * (USABLE_SHARE if hardware.cores is None else 1)
    return {
        "state_bytes": needs.state,
        "copy_bytes": needs.copies,
        "activation_bytes": needs.activations,
        "process_bytes": needs.total,
        "fits": needs.total * places <= usable,
        "checkpoint_bytes": CHECKPOINT_BYTES * count_params(model).total,
    }


def _launching_s(model: ModelConfig, recipe: Recipe, setting: Setting) -> float:
    """Seconds of an update that launching operations takes on a GPU, if nothing is compiled; 0 on a CPU."""
    if setting.hardware.cores is not None:
        return 0.0
    processes = setting.processes_per_run
    rows = fitting(recipe, recipe.sequences_per_forward, processes) * processes
    return recipe.num_sequences / rows * model.num_layers * LAUNCHES_A_LAYER[model.ffn.kind] * LAUNCH_S
