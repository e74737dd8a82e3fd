"""`equipoise sample`: what a trained run writes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from equipoise.cli.console import JsonOption, emit_json, place, say
from equipoise.errors import ConfigError, IntegrityError


def sample(
    directory: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run directory, e.g. runs/quick/moe/500000-s0.", parser=place("RUN"))
    ],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The beginning of the text.")],
    tokens: Annotated[int, typer.Option("--tokens", min=1, max=1_000_000, help="Tokens to write at most.")] = 120,
    temperature: Annotated[
        float, typer.Option("--temperature", help="0 = the likeliest token each time; above it, drawn, e.g. 0.8.")
    ] = 0.0,
    seed: Annotated[
        int, typer.Option("--seed", min=0, max=2**63 - 1, help="Seed of the draws at a temperature above 0.")
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Continue a text with the newest weights of a run: the likeliest token each time, unless a temperature is given.

    Example: equipoise sample runs/quick/moe/500000-s0 "Once upon a time" --temperature 0.8 --seed 1
    """
    from equipoise.accounting import size_fault
    from equipoise.checkpoint import checkpoint_path, load_checkpoint, load_latest, restore_model
    from equipoise.config import digest
    from equipoise.data.tokenizer import load_tokenizer
    from equipoise.model.transformer import build
    from equipoise.record import read_config
    from equipoise.rng import stream
    from equipoise.score import sample as write
    from equipoise.trunk import checkpoint_steps

    if not (math.isfinite(temperature) and temperature >= 0):
        raise ConfigError(f"--temperature {temperature}: expected 0 or more")
    run = read_config(directory) if directory.is_dir() else None
    if run is None:
        raise ConfigError(f"{directory}: no run directory; expected one that holds a config.json")
    saved = load_latest(directory / "checkpoints", digest(run))
    if saved is None:
        raise IntegrityError(
            f"{directory}/checkpoints: no checkpoint there; to have weights again, delete {directory} and run the study"
        )
    newest = max(checkpoint_steps(directory))
    if saved.step < newest:
        try:
            load_checkpoint(checkpoint_path(directory / "checkpoints", newest))
            why = f"step {newest} belongs to another run"
        except IntegrityError as error:
            why = str(error)
        say(f"warning: {why}; these are the weights of step {saved.step:,}")
    fault = size_fault(run.model, {name: tensor.numel() for name, tensor in saved.model.items()})
    if fault:
        raise IntegrityError(f"{directory}/checkpoints: {fault}")
    model = build(run.model, run.seed)
    restore_model(model, saved.model)
    tokenizer = load_tokenizer(directory / "tokenizer.json")
    text = write(
        model,
        tokenizer,
        prompt,
        tokens,
        context=run.recipe.seq_len,
        temperature=temperature,
        generator=stream(seed, "sample", prompt),
    )
    if as_json:
        facts = {"step": saved.step, "newest_step": newest, "temperature": temperature, "seed": seed}
        emit_json({"run": str(directory), **facts, "prompt": prompt, "text": text})
    else:
        print(text)
