"""`equipoise probe`: a text token by token, through one run or several: losses, and experts layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.cells import cell_len
from rich.text import Text

from equipoise.cli.console import DeviceOption, JsonOption, check_device, emit_json, out, place
from equipoise.cli.export import BestOption
from equipoise.errors import ConfigError
from equipoise.text import number, piece, token_label, visible

COLOURS: Final = (
    "black on #e69f00",
    "black on #56b4e9",
    "white on #00664a",
    "black on #f0e442",
    "white on #0072b2",
    "black on #f0a0c8",
    "white on #a03c00",
    "black on #bbbbbb",
)
"""Of experts 0 to 7 (and 8 to 15, …): after Okabe & Ito, "Color Universal Design"; the number stands there as well."""
GAP: Final = 2
"""Blanks between two tokens."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line under the tokens."""

    label: str
    cells: tuple[str, ...]
    """One a token."""
    colours: tuple[str, ...] = ()
    """How each cell is drawn; empty: plain."""


def probe(
    directories: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Complete runs' directories, e.g. runs/quick/moe/500000-s0.",
            parser=place("RUN"),
        ),
    ],
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What to read.")],
    layer: Annotated[
        list[int] | None, typer.Option("--layer", min=0, help="Show this layer only; repeatable. Default: every layer.")
    ] = None,
    weights: Annotated[bool, typer.Option("--weights", help="Show the weight of every expert too.")] = False,
    best: BestOption = False,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Show what runs make of a text: the loss of each token, and the experts it is sent to in each layer.

    Under each token stand its loss in nats and, by layer, the numbers of its experts, the router's first choice first.
    Runs that share a tokenizer stand under one line of tokens.

    Example: equipoise probe runs/quick/moe/500000-s0 runs/quick/dense-total/500000-s0 "Once upon a time"
    """
    check_device(device)
    if not text:
        raise ConfigError("TEXT: empty; expected at least one character")
    found = [_explored(directory, text, best, device) for directory in directories]
    _check_layers(layer, found)
    if as_json:
        emit_json({"text": text, "runs": found})
        return
    groups: list[list[dict[str, Any]]] = []
    for row in found:
        if groups and _pieces(groups[-1][0]) == _pieces(row):
            groups[-1].append(row)
        else:
            groups.append([row])
    for group in groups:
        for row in group:
            out().print(_headline(row), soft_wrap=True)
        out().print()
        rows = [line for row in group for line in _rows(row, layer, weights, named=len(group) > 1)]
        _print_blocks([token_label(token["text"]) for token in group[0]["tokens"]] + ["(end)"], rows)


def _explored(directory: Path, text: str, best: bool, device: str) -> dict[str, Any]:
    """What one run makes of the text, as plain values."""
    import torch

    from equipoise.checkpoint import restore_model
    from equipoise.data.tokenizer import load_tokenizer
    from equipoise.device import choose_compute
    from equipoise.explore import explore
    from equipoise.model.transformer import build
    from equipoise.weights import read_weights

    saved = read_weights(directory, best=best)
    run, compute = saved.run, choose_compute(device, "float32", saved.run.recipe.kernels)  # type: ignore[arg-type]  # checked above
    tokenizer = load_tokenizer(directory / "tokenizer.json")
    ids = tokenizer.encode(text)
    model = build(run.model, run.seed, compute.device, compute.kernels)
    restore_model(model, {name: torch.from_numpy(tensor) for name, tensor in saved.tensors.items()})
    explored = explore(model, ids, end_of_text=tokenizer.eot_id, context=run.recipe.seq_len)
    experts_TLK = explored.expert_ids_LTK.transpose(1, 0, 2).tolist()
    weights_TLK = explored.weights_LTK.transpose(1, 0, 2).tolist()
    tokens = [
        {
            "id": index,
            "text": piece(raw),
            "bytes": raw.hex(),
            "loss": loss,
            "layers": [{"experts": experts, "weights": weights} for experts, weights in zip(*layers, strict=True)],
        }
        for index, raw, loss, *layers in zip(
            ids, tokenizer.spell(ids), explored.losses_T.tolist(), experts_TLK, weights_TLK, strict=True
        )
    ]
    ffn = run.model.ffn
    return {
        "run": str(directory),
        "arm": run.arm,
        "seed": run.seed,
        "step": saved.step,
        "best": best,
        "num_layers": run.model.num_layers,
        "num_experts": ffn.num_experts if ffn.kind == "moe" else 0,
        "top_k": ffn.top_k if ffn.kind == "moe" else 0,
        "loss": (sum(explored.losses_T.tolist()) + explored.end_loss) / (len(ids) + 1),
        "end_loss": explored.end_loss,
        "context": run.recipe.seq_len,
        "device": compute.reason,
        "tokens": tokens,
    }


def _check_layers(layers: Sequence[int] | None, found: Sequence[Mapping[str, Any]]) -> None:
    most = max(row["num_layers"] if row["num_experts"] else 0 for row in found)
    wrong = [layer for layer in layers or () if layer >= most]
    if wrong:
        accepted = f"expected 0 to {most - 1}" if most else "these runs are dense; expected no --layer"
        raise ConfigError(f"--layer {wrong[0]}: {accepted}")


def _pieces(row: Mapping[str, Any]) -> list[str]:
    return [token["bytes"] for token in row["tokens"]]


def _headline(row: Mapping[str, Any]) -> str:
    count = len(row["tokens"])
    kind = f"{row['num_experts']} experts, top-{row['top_k']}" if row["num_experts"] else "dense"
    cut = count > row["context"] - 1
    windows = f"; read in windows of {row['context'] - 1:,} tokens" if cut else ""
    return (
        f"{row['run']}, step {row['step']:,} ({kind}): {number(row['loss'])} nats/token over {count:,} token(s) "
        f"and the end{windows}"
    )


def _rows(row: Mapping[str, Any], layers: Sequence[int] | None, weights: bool, *, named: bool) -> list[Row]:
    """The lines of one run; `named` by its arm and seed where several runs stand under the same tokens."""
    who = f"{visible(row['arm'])} s{row['seed']} " if named else ""
    losses = [token["loss"] for token in row["tokens"]]
    rows = [Row(label=f"{who}loss", cells=(*(number(loss, 2) for loss in losses), number(row["end_loss"], 2)))]
    for layer in range(row["num_layers"] if row["num_experts"] else 0):
        if not layers or layer in layers:
            routed = [token["layers"][layer] for token in row["tokens"]]
            cells = tuple(_cell(one["experts"], one["weights"] if weights else None) for one in routed)
            colours = tuple(COLOURS[one["experts"][0] % len(COLOURS)] for one in routed)
            rows.append(Row(label=f"{who}layer {layer}", cells=(*cells, ""), colours=(*colours, "")))
    return rows


def _cell(experts: Sequence[int], weights: Sequence[float] | None) -> str:
    """The experts of a token, each with its weight if wanted.

    >>> _cell([2, 0], None), _cell([2, 0], [0.75, 0.25])
    ('2 0', '2:.75 0:.25')
    """
    if weights is None:
        return " ".join(map(str, experts))
    return " ".join(
        f"{expert}:{weight:.2f}".replace(":0.", ":.") for expert, weight in zip(experts, weights, strict=True)
    )


def _print_blocks(tokens: Sequence[str], rows: Sequence[Row]) -> None:
    """Tokens side by side with the rows under them, in as many blocks as the width of the terminal needs."""
    label = max(cell_len(row.label) for row in rows) + GAP
    widths = [
        max(cell_len(cell) for cell in (token, *cells))
        for token, *cells in zip(tokens, *(row.cells for row in rows), strict=True)
    ]
    start = 0
    while start < len(tokens):
        end, used = start + 1, label + widths[start] + GAP
        while end < len(tokens) and used + widths[end] <= out().width:
            used += widths[end] + GAP
            end += 1
        places = range(start, end)
        _print_line("", label, [(tokens[p], "bold", widths[p]) for p in places])
        for row in rows:
            cells = [(row.cells[p], row.colours[p] if row.colours else "", widths[p]) for p in places]
            _print_line(row.label, label, cells)
        out().print()
        start = end


def _print_line(label: str, width: int, cells: Sequence[tuple[str, str, int]]) -> None:
    line = Text().append(label, style="dim").append(" " * (width - cell_len(label)))
    for cell, style, cell_width in cells:
        line.append(cell, style=style).append(" " * (cell_width - cell_len(cell) + GAP))
    line.rstrip()
    out().print(line, soft_wrap=True)
