"""`equipoise plan`: the study before it runs; writes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import typer

from equipoise.cli.console import (
    CacheOption,
    JobsOption,
    JsonOption,
    SetOption,
    StudyArgument,
    default_cache,
    emit_json,
    one_of,
    out,
    read_jobs,
    read_study,
    show_table,
)
from equipoise.cli.outlook import read_setting, show_outlook
from equipoise.estimate import MAX_CURVE_SHARE
from equipoise.hardware import DEFAULT_UTILISATION, HARDWARE
from equipoise.spec.sweep import lr_text
from equipoise.text import count, duration, percent, scientific, short, size

MAX_DEVICES: Final = 1_000_000
"""More than any machine has; a slip of a digit is told."""


def plan(
    study: StudyArgument,
    overrides: SetOption = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Measure each arm for a few seconds and estimate the time.")
    ] = False,
    jobs: JobsOption = "auto",
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="NAME",
            help=f"Predict cost on another machine: {', '.join(HARDWARE)}.",
            autocompletion=one_of(*HARDWARE),
        ),
    ] = None,
    utilisation: Annotated[
        list[str] | None,
        typer.Option(
            "--utilisation",
            metavar="SHARE|ARM=SHARE",
            help=f"Of its peak that --device is assumed to reach [{DEFAULT_UTILISATION:g}]; repeatable.",
        ),
    ] = None,
    num_devices: Annotated[
        int | None, typer.Option("--devices", metavar="N", min=1, max=MAX_DEVICES, help="Devices in all [1].")
    ] = None,
    processes_per_run: Annotated[
        int | None,
        typer.Option(
            "--processes-per-run",
            metavar="N",
            min=1,
            max=MAX_DEVICES,
            help="Processes that share a run, a GPU each [1].",
        ),
    ] = None,
    price_per_hour: Annotated[
        str | None, typer.Option("--price-per-hour", metavar="PRICE", help="Of one device, in any currency.")
    ] = None,
    cache: CacheOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show arms, matches, parameters, FLOPs, epochs and cost of a study. Writes nothing.

    With --device also what it would cost on another machine, from a stated utilisation (docs/scale.md): time,
    device-hours, money, memory.

    Example: equipoise plan tinystories-cpu --set 'corpus.path="stories"' --probe

    Example: equipoise plan tinystories --device h100 --devices 8 --utilisation 0.3 --price-per-hour 2.5
    """
    from equipoise.costs import outlook
    from equipoise.machine import busy_cores
    from equipoise.matching import resolve_arms
    from equipoise.probe import default_jobs, measure_rates
    from equipoise.study import data_facts
    from equipoise.study import plan as make_plan

    wanted = read_jobs(jobs)
    setting = read_setting(device, utilisation, num_devices, processes_per_run, price_per_hour)
    spec = read_study(study, overrides)
    facts = data_facts(spec, cache or default_cache())
    num_runs = len(spec.arms) * len(spec.seeds) * len(spec.budgets)
    num_jobs = min(wanted or default_jobs(spec.recipe.threads).number, num_runs)
    arms = resolve_arms(spec.arms, facts.vocab_size, spec.recipe.seq_len)
    models = {name: arm.model for name, arm in arms.items()}
    busy = busy_cores() if probe else None
    rates = measure_rates(models, spec.recipe, num_jobs) if probe else None
    planned = make_plan(spec, facts, rates, num_jobs)
    if probe:
        planned["time"]["busy_cores"] = busy
    if setting is not None:
        planned["device"] = outlook(spec, facts, setting)
    if as_json:
        emit_json(planned)
    else:
        show_plan(planned)


def show_plan(planned: Mapping[str, Any]) -> None:
    """The plan as tables on stdout."""
    out().print(f"{planned['name']}: {planned['question']}\n" if planned["question"] else f"{planned['name']}\n")
    known = "" if planned["data_certain"] else " (requested)" if planned["train_tokens"] is None else " (estimated)"
    out().print(f"vocabulary {planned['vocab_size']:,}{known}\n")
    show_table("Arms", ARM_HEADINGS, [arm_cells(arm) for arm in planned["arms"]])
    components = ("embedding", "head", "attention", "router", "ffn", "experts", "norms")
    show_table(
        "Parameters by component",
        ["arm", *components],
        [[arm["name"], *(count(arm["by_component"][name]) for name in components)] for arm in planned["arms"]],
    )
    if any(arm["kind"] == "moe" for arm in planned["arms"]):
        show_table(
            "Tokens per expert",
            ["arm", *(f"of {short(b['budget'])}" for b in planned["budgets"])],
            [[arm["name"], *map(count, arm["tokens_per_expert"].values())] for arm in planned["arms"]],
        )
    show_table(
        "Budgets",
        ["tokens asked", "steps", "tokens trained", "epochs"],
        [
            [
                count(b["budget"]),
                count(b["steps"]),
                count(b["tokens"]),
                epochs_text(b["epochs"], planned["data_certain"]),
            ]
            for b in planned["budgets"]
        ],
    )
    own = [(arm["name"], said) for arm in planned["arms"] for said in arm["own_budgets"]]
    if own:
        show_table(
            "Arms with budgets of their own",
            ["arm", "agrees on", "study budget", "own tokens", "steps", "epochs", "residual"],
            [
                [
                    name,
                    f"{said['on']} of {said['to']}",
                    count(said["budget"]),
                    count(said["tokens"]),
                    count(said["steps"]),
                    epochs_text(said["epochs"], planned["data_certain"]),
                    percent(said["residual"]),
                ]
                for name, said in own
            ],
        )
    if len({arm["lr"] for arm in planned["arms"]}) > 1:
        rates = ", ".join(f"{arm['name']} {lr_text(arm['lr'])}" for arm in planned["arms"])
        out().print(f"peak learning rates: {rates}\n", soft_wrap=True)
    if planned["train_tokens"] is None:
        out().print("epochs: unknown until corpus.path is set\n")
    for budget in planned["budgets"]:
        if budget["epochs"] is not None and budget["epochs"] > 4:
            out().print(f"warning: {budget['budget']:,} tokens repeat the training data {budget['epochs']:.1f} times\n")
        for name, said in own:
            if said["budget"] == budget["budget"] and said["epochs"] is not None and said["epochs"] > 4:
                passes = f"{said['tokens']:,} tokens of {name} repeat the training data {said['epochs']:.1f} times"
                out().print(f"warning: {passes}\n", soft_wrap=True)
        if budget["curve_share"] > MAX_CURVE_SHARE:
            out().print(
                f"warning: at {budget['budget']:,} tokens the curve costs {100 * budget['curve_share']:.1f} % of the "
                f"training; at most {100 * MAX_CURVE_SHARE:.0f} % with recipe.curve_tokens = "
                f"{budget['affordable_curve_tokens']:,} or less\n"
            )
    sizes = ((len(planned[kind]), kind.removesuffix("s")) for kind in ("arms", "seeds", "budgets"))
    product = " × ".join(f"{size} {what}{'s' * (size != 1)}" for size, what in sizes)
    out().print(f"runs: {planned['num_runs']} ({product})")
    for line in updates_lines(planned["arms"]):
        out().print(line, soft_wrap=True)
    out().print(f"training FLOPs: {scientific(planned['train_flops'])}    disk: at most {size(planned['disk_bytes'])}")
    if planned["time"] is None:
        out().print("time: not measured (add --probe)")
    else:
        show_time(planned["time"])
    for claim in planned["claims"]:
        out().print(f"claim {claim['id']}: {claim_text(claim)}")
    if "device" in planned:
        show_outlook(planned)


def updates_lines(arms: Sequence[Mapping[str, Any]]) -> list[str]:
    """What budgets that share a trunk save, in a line for all arms, or for each group of arms whose budgets differ."""
    groups: dict[tuple[int, int, int], list[str]] = {}
    for arm in arms:
        updates = arm["updates"]
        groups.setdefault((updates["per_seed"], updates["of_trunk"], updates["from_scratch"]), []).append(arm["name"])
    one = len(groups) == 1
    return [
        f"updates per {'arm and seed' if one else 'seed of ' + ', '.join(names)}: {count(per_seed)}, of which "
        f"{count(of_trunk)} in a trunk that the budgets share; one by one they would take {count(from_scratch)} "
        f"({from_scratch / per_seed:.2f} times as many)"
        for (per_seed, of_trunk, from_scratch), names in groups.items()
        if of_trunk
    ]


def show_time(estimate: Mapping[str, Any]) -> None:
    """The estimate of time: in all, and per arm what its runs take one after the other."""
    from equipoise.step_time import BUSY_CORES

    jobs = estimate["jobs"]
    out().print(f"time: about {duration(estimate['study_s'])} with {jobs} run(s) at a time once the data is prepared\n")
    if (estimate.get("busy_cores") or 0) > BUSY_CORES:
        out().print(
            f"warning: the machine was not idle when this was measured ({estimate['busy_cores']:.1f} cores at work for "
            "others); on an idle one it may take less\n"
        )
    parts = ("start_s", "updates_s", "curve_s", "samples_s", "final_s")
    show_table(
        "Time of all runs of an arm",
        ["arm", "ms/update", "start", "updates", "curve", "samples", "final scoring", "together"],
        [
            [name, f"{arm['update_s'] * 1e3:,.1f}", *(duration(arm[part]) for part in (*parts, "total_s"))]
            for name, arm in estimate["arms"].items()
        ],
    )


def claim_text(claim: Mapping[str, Any]) -> str:
    """A claim in a few words, from what the study declares."""
    if claim["kind"] == "routing":
        when = "" if claim["at_frac"] == 1 else f", after {100 * claim['at_frac']:g} % of training"
        where = f"{claim['direction']} {claim['threshold']:g}"
        return f"{claim['metric']} of {claim['arm']} ({claim['layers']} over layers{when}) {where}"
    left = ", ".join(claim["left"]) if isinstance(claim["left"], list) else claim["left"]
    if claim["kind"] == "trend":
        return f"lead of {left} over {claim['right']} {claim['direction']} with the budget on {claim['metric']}"
    if claim["kind"] == "larger":
        others = ", ".join(f"{step['left']} over {step['right']}" for step in claim["than"])
        return f"lead of {left} over {claim['right']} on {claim['metric']} larger than that of {others}"
    verb = {"lower": "lower than", "equivalent": "equivalent to", "faster": "faster than"}[claim["kind"]]
    margin, epsilon = claim.get("margin"), claim.get("equivalence_margin")
    more = f" by more than {margin:g}" if margin else ""
    same = (
        ""
        if epsilon is None
        else f" within {epsilon:g}"
        if claim["kind"] == "equivalent"
        else f" (else within {epsilon:g})"
    )
    return f"{left} {verb} {claim['right']} on {claim['metric']}{more}{same}"


ARM_HEADINGS = (
    "arm",
    "ffn",
    "d_model",
    "width",
    "total",
    "active",
    "FLOPs/token",
    "matched to",
    "residual",
    "no embeddings",
)


def arm_cells(arm: Mapping[str, Any]) -> list[str]:
    """One row of the table of arms."""
    widths, match = arm["widths"], arm["match"]
    return [
        arm["name"],
        arm["ffn"],
        count(widths["d_model"]),
        count(widths.get("d_ff", widths.get("d_expert"))),
        count(arm["params"]["total"]),
        count(arm["params"]["active"]),
        count(arm["flops_per_token"]),
        f"{match['to']} on {match['on']}" if match else "—",
        percent(match["residual"]) if match else "—",
        percent(match["residual_nonembedding"]) if match and match["residual_nonembedding"] is not None else "—",
    ]


def epochs_text(epochs: float | None, certain: bool) -> str:
    """Epochs, marked when they rest on an estimate."""
    if epochs is None:
        return "unknown"
    return f"{epochs:.2f}" if certain else f"{epochs:.2f} (estimated)"
