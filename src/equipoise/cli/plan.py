"""`equipoise plan`: the study before it runs; writes nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from equipoise.cli.console import (
    CacheOption,
    JsonOption,
    SetOption,
    StudyArgument,
    default_cache,
    emit_json,
    out,
    read_study,
    show_table,
)
from equipoise.text import count, duration, percent, scientific, size


def plan(
    study: StudyArgument,
    overrides: SetOption = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Measure a few updates of each arm and estimate the time.")
    ] = False,
    jobs: Annotated[
        int, typer.Option("--jobs", min=0, help="Runs at a time for the estimate; 0 = as `run` would.")
    ] = 0,
    cache: CacheOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show arms, matches, parameters, FLOPs, epochs and cost of a study. Writes nothing.

    Example: equipoise plan tinystories-cpu --set 'corpus.path="stories"' --probe
    """
    from equipoise.engine import default_jobs, probe_steps
    from equipoise.matching import resolve_arms
    from equipoise.study import data_facts
    from equipoise.study import plan as make_plan

    spec = read_study(study, overrides)
    facts = data_facts(spec, cache or default_cache())
    num_jobs = jobs or default_jobs(spec.recipe.threads)
    arms = resolve_arms(spec.arms, facts.vocab_size, spec.recipe.seq_len)
    step_s = probe_steps({name: arm.model for name, arm in arms.items()}, spec.recipe) if probe else None
    planned = make_plan(spec, facts, step_s, num_jobs)
    if as_json:
        emit_json(planned)
    else:
        show_plan(planned)


def step_time() -> None:
    """Read models and a recipe as JSON from stdin, print seconds of one update per model (used by `plan --probe`)."""
    from equipoise.bench import step_seconds
    from equipoise.config import load
    from equipoise.spec.model import ModelConfig
    from equipoise.spec.recipe import Recipe

    request = json.load(sys.stdin)
    recipe = load(Recipe, request["recipe"])
    print(json.dumps({name: step_seconds(load(ModelConfig, m), recipe) for name, m in request["models"].items()}))


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
    if planned["train_tokens"] is None:
        out().print("epochs: unknown until corpus.path is set\n")
    for budget in planned["budgets"]:
        if budget["epochs"] is not None and budget["epochs"] > 4:
            out().print(f"warning: {budget['budget']:,} tokens repeat the training data {budget['epochs']:.1f} times\n")
    seeds = len(planned["seeds"])
    sizes = ((len(planned["arms"]), "arm"), (seeds, "seed"), (len(planned["budgets"]), "budget"))
    product = " × ".join(f"{size} {what}{'s' * (size != 1)}" for size, what in sizes)
    out().print(f"runs: {planned['num_runs']} ({product})")
    out().print(f"training FLOPs: {scientific(planned['train_flops'])}    disk: at most {size(planned['disk_bytes'])}")
    if planned["train_s"] is None:
        out().print("time: not measured (add --probe)")
    else:
        out().print(f"time: about {duration(planned['train_s'])} of training with {planned['jobs']} run(s) at a time")
        out().print(
            "update: " + ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in planned["step_s"].items())
        )
    for claim in planned["claims"]:
        left = ", ".join(claim["left"]) if isinstance(claim["left"], list) else claim["left"]
        verb = {"lower": "lower than", "equivalent": "equivalent to"}[claim["kind"]]
        out().print(f"claim {claim['id']}: {left} {verb} {claim['right']} on {claim['metric']}")


ARM_HEADINGS = ("arm", "ffn", "d_model", "width", "total", "active", "FLOPs/token", "matched to", "residual")


def arm_cells(arm: Mapping[str, Any]) -> list[str]:
    """One row of the table of arms."""
    widths, match = arm["widths"], arm["match"]
    ffn = f"{widths['num_experts']} experts, top-{widths['top_k']}" if arm["kind"] == "moe" else "dense"
    return [
        arm["name"],
        ffn,
        count(widths["d_model"]),
        count(widths.get("d_ff", widths.get("d_expert"))),
        count(arm["params"]["total"]),
        count(arm["params"]["active"]),
        count(arm["flops_per_token"]),
        f"{match['to']} on {match['on']}" if match else "—",
        percent(match["residual"]) if match else "—",
    ]


def epochs_text(epochs: float | None, certain: bool) -> str:
    """Epochs, marked when they rest on an estimate."""
    if epochs is None:
        return "unknown"
    return f"{epochs:.2f}" if certain else f"{epochs:.2f} (estimated)"
