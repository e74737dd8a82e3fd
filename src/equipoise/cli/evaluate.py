"""`equipoise evaluate`: a trained run's loss on any text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from equipoise.cli.console import (
    DeviceOption,
    JsonOption,
    QuietOption,
    check_device,
    emit_json,
    one_of,
    out,
    place,
    say,
)
from equipoise.cli.export import BestOption, RunArgument
from equipoise.errors import ConfigError, DataError
from equipoise.faults import did_you_mean
from equipoise.text import count, number


def evaluate(
    directory: RunArgument,
    text: Annotated[
        Path,
        typer.Option(
            "--text",
            metavar="PATH",
            help="A .txt, .jsonl or .parquet file, or a folder of them.",
            parser=place("--text"),
        ),
    ],
    kind: Annotated[
        str,
        typer.Option(
            "--kind",
            metavar="text|tinystories|gutenberg",
            help="How files hold documents, as in a study.",
            autocompletion=one_of("text", "tinystories", "gutenberg"),
        ),
    ] = "text",
    field: Annotated[str, typer.Option("--field", help="The field of a .jsonl line that holds the text.")] = "text",
    best: BestOption = False,
    device: DeviceOption = "auto",
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Score a text with a run's weights: nats per token, and bits per byte of the raw text. Each token counts once.

    Example: equipoise evaluate runs/quick/moe/500000-s0 --text story.txt
    """
    import torch

    from equipoise.checkpoint import restore_model
    from equipoise.data.corpora import open_corpus
    from equipoise.data.tokenizer import load_tokenizer
    from equipoise.device import choose_compute
    from equipoise.model.transformer import build
    from equipoise.score import score_text
    from equipoise.spec.data import Corpus, GutenbergCorpus, TextCorpus, TinyStoriesCorpus
    from equipoise.weights import read_weights

    check_device(device)
    corpora: dict[str, Corpus] = {
        "text": TextCorpus(path=str(text), field=field),
        "tinystories": TinyStoriesCorpus(path=str(text)),
        "gutenberg": GutenbergCorpus(path=str(text)),
    }
    if kind not in corpora:
        raise ConfigError(f"--kind {kind}: expected one of {', '.join(corpora)}{did_you_mean(kind, corpora)}")
    weights = read_weights(directory, best=best)
    run, compute = weights.run, choose_compute(device, "float32", weights.run.recipe.kernels)  # type: ignore[arg-type]  # checked above
    try:
        source = open_corpus(corpora[kind])
        model = build(run.model, run.seed, compute.device, compute.kernels)
        restore_model(model, {name: torch.from_numpy(tensor) for name, tensor in weights.tensors.items()})
        score = score_text(
            model,
            load_tokenizer(directory / "tokenizer.json"),
            _told((document.text for document in source.read()), kind, quiet),
            context=run.recipe.seq_len,
            on_progress=_progress(quiet),
        )
    except DataError as error:  # readers name the fields of a study
        raise DataError(str(error).replace("corpus.path", "--text").replace("corpus.field", "--field")) from None
    if as_json:
        emit_json(
            {
                "run": str(directory),
                "step": weights.step,
                "best": best,
                "text": str(text),
                "kind": kind,
                "files": source.files,
                "documents": score.num_documents,
                "tokens": score.num_tokens,
                "bytes": score.num_bytes,
                "loss": score.loss,
                "bpb": score.bpb,
                "context": run.recipe.seq_len,
                "device": compute.reason,
            }
        )
    else:
        out().print(
            f"{directory}, step {weights.step:,}: {number(score.loss)} nats/token, {number(score.bpb)} bits per byte "
            f"({count(score.num_documents)} document(s), {count(score.num_tokens)} tokens with their ends, "
            f"{count(score.num_bytes)} bytes)"
        )


def _told(texts: Iterator[str], kind: str, quiet: bool) -> Iterator[str]:
    """The same texts; says once when one looks like many stories that are being scored as a single one."""
    told = kind == "tinystories"
    for text in texts:
        if not told and "\n<|endoftext|>\n" in text:
            told = True
            say("warning: lines <|endoftext|> are scored as text; --kind tinystories takes them as separators", quiet)
        yield text


def _progress(quiet: bool) -> Callable[[int], None]:
    """A line on stderr every ten seconds."""
    said = time.monotonic()

    def show(num_tokens: int) -> None:
        nonlocal said
        if time.monotonic() - said >= 10:
            said = time.monotonic()
            say(f"{num_tokens:,} tokens scored", quiet)

    return show
