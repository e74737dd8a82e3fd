"""`equipoise sample`: what a trained run writes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from equipoise.cli.console import JsonOption, emit_json
from equipoise.errors import ConfigError, IntegrityError


def sample(
    directory: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, e.g. runs/quick/moe/500000-s0.")],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The beginning of the text.")],
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens to write at most.")] = 120,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 = the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the draws at a temperature above 0.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Continue a text with the newest weights of a run.

    Example: equipoise sample runs/quick/moe/500000-s0 "Once upon a time"
    """
    from equipoise.checkpoint import load_latest, restore_model
    from equipoise.config import digest
    from equipoise.data.tokenizer import load_tokenizer
    from equipoise.model.transformer import build
    from equipoise.record import read_config
    from equipoise.rng import stream
    from equipoise.score import sample as write

    run = read_config(directory) if directory.is_dir() else None
    if run is None:
        raise ConfigError(f"{directory}: no run directory; expected one that holds a config.json")
    saved = load_latest(directory / "checkpoints", digest(run))
    if saved is None:
        raise IntegrityError(
            f"{directory}/checkpoints: no checkpoint there; to have weights again, delete {directory} and run the study"
        )
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
        emit_json({"run": str(directory), "step": saved.step, "prompt": prompt, "text": text})
    else:
        print(text)
