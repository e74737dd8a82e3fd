"""`equipoise export`: a trained run as a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from equipoise.cli.console import JsonOption, emit_json, out, place

RunArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RUN", help="A complete run's directory, e.g. runs/quick/moe/500000-s0.", parser=place("RUN")
    ),
]
BestOption = Annotated[
    bool, typer.Option("--best", help="The weights at the lowest point of the curve, not the last ones.")
]


def export(
    directory: RunArgument,
    destination: Annotated[
        Path, typer.Argument(metavar="DIR", help="Where to write; must not exist yet.", parser=place("DIR"))
    ],
    best: BestOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write a run as a Llama, Mixtral or Qwen2-MoE directory that Hugging Face's AutoModelForCausalLM loads.

    Example: equipoise export runs/quick/moe/500000-s0 moe-s0
    """
    from equipoise.export.write import export as write
    from equipoise.weights import read_weights

    weights = read_weights(directory, best=best)
    written = write(weights, destination)
    if as_json:
        emit_json({"run": str(directory), "step": weights.step, "directory": str(destination), **written})
    else:
        out().print(
            f"{destination}: {written['architecture']}, {written['num_parameters']:,} parameters, "
            f"weights of step {weights.step:,}"
        )
