"""`equipoise bench`: what this machine can do; and the hidden `gauge`, the child that measures."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from equipoise.cli.console import (
    CacheOption,
    DeviceOption,
    JsonOption,
    QuietOption,
    check_device,
    default_cache,
    emit_json,
    out,
    say,
    show_table,
)
from equipoise.text import count, duration, scientific


def bench(
    quick: Annotated[bool, typer.Option("--quick", help="Rough figures in seconds: does it run?")] = False,
    device: DeviceOption = "auto",
    cache: CacheOption = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure this machine for a minute or two, and show which presets it trains within an hour.

    Example: equipoise bench --json
    """
    from equipoise.sizing import FULL, QUICK, size_machine
    from equipoise.spec.study import load_study_table, parse_study, preset_names
    from equipoise.study import data_facts

    check_device(device)
    specs = {name: parse_study(load_study_table(name)[0]) for name in preset_names()}
    studies = {name: (spec, data_facts(spec, cache or default_cache())) for name, spec in specs.items()}
    machine = size_machine(
        studies, effort=QUICK if quick else FULL, device=device, say=lambda line: say(line, quiet or quick)
    )
    if as_json:
        emit_json(machine)
        return
    out().print(f"{machine.compute}; {machine.jobs} process(es) at a time")
    out().print(f"float32 matrix product: {scientific(machine.gemm_flops)} FLOP/s a process\n")
    show_table(
        "Updates (~ calculated from FLOPs, not measured)",
        ["preset", "arm", "ms/update", "tokens/s", "of the matrix product"],
        [
            [
                speed.study,
                speed.arm,
                ("" if speed.measured else "~") + f"{speed.update_s * 1e3:,.1f}",
                count(speed.tokens_per_s),
                "n/a" if speed.gemm_share is None else f"{speed.gemm_share:.0%}",
            ]
            for speed in machine.arms
        ],
        left=2,
    )
    show_table(
        "Presets on this machine",
        ["preset", "runs", "at a time", "threads", "about", "within an hour"],
        [_study_cells(row) for row in machine.studies],
    )
    if not all(row["final_scoring"] for row in machine.studies):
        out().print("* without the scoring of the whole validation set at the end: its size is the corpus'")


def _study_cells(row: Mapping[str, Any]) -> list[str]:
    return [
        row["name"],
        count(row["num_runs"]),
        count(row["jobs"]),
        count(row["threads"]),
        ("" if row["measured"] else "~") + duration(row["study_s"]) + ("" if row["final_scoring"] else "*"),
        "yes" if row["fits_in_an_hour"] else "no",
    ]


def gauge(device: DeviceOption = "auto") -> None:
    """Answer requests to measure, one JSON object a line, until there are no more (used by commands that estimate)."""
    import equipoise.train  # noqa: F401  # what a run imports, so that readiness means the same
    from equipoise.bench import Workload, answer, make_workload
    from equipoise.config import load
    from equipoise.spec.model import ModelConfig
    from equipoise.spec.recipe import Recipe

    def loaded(request: Mapping[str, Any]) -> Workload:
        model, recipe = load(ModelConfig, request["model"]), load(Recipe, request["recipe"])
        whole = request.get("whole", False)
        return make_workload(model, recipe, device, whole=whole)  # type: ignore[arg-type]  # the parent checked it

    print("{}", flush=True)
    for line in answer(sys.stdin, loaded):
        print(line, flush=True)
