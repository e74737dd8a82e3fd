"""`equipoise run`: the whole study; prepares, locks, trains what is missing, reports."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from equipoise.cli.console import (
    CacheOption,
    DeviceOption,
    JsonOption,
    QuietOption,
    SetOption,
    StudyArgument,
    default_cache,
    emit_json,
    read_study,
    say,
)
from equipoise.cli.plan import default_jobs
from equipoise.cli.progress import Progress
from equipoise.cli.reports import show_results, write_outputs
from equipoise.errors import ConfigError
from equipoise.spec.study import RunConfig, StudySpec


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A study whose data is prepared and whose design is locked."""

    directory: Path
    dataset: Any
    runs: tuple[RunConfig, ...]


def run(
    study: StudyArgument,
    jobs: Annotated[int, typer.Option("--jobs", min=0, help="Runs at a time; 0 = one per recipe.threads cores.")] = 0,
    destination: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Study directory; default runs/<study>.")
    ] = None,
    overrides: SetOption = None,
    cache: CacheOption = None,
    device: DeviceOption = "auto",
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run a study: every arm × seed × budget, each once; then verdicts and a report. Run again to go on or to add.

    Example: equipoise run quick
    """
    from equipoise.engine import Task, catching_signals, run_local
    from equipoise.files import held
    from equipoise.record import read_run, start_run

    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device {device}: expected auto, cpu or cuda")
    spec = read_study(study, overrides)
    directory = destination or Path("runs") / spec.name
    with ExitStack() as stack:
        stop = stack.enter_context(catching_signals())
        stack.enter_context(held(directory / ".study.lock", f"study {directory}"))
        prepared = prepare_study(spec, directory, cache or default_cache(), quiet, stop)
        waiting = []
        for config in prepared.runs:
            place = directory / config.folder
            if read_run(place).status not in ("complete", "diverged"):
                start_run(place, config, prepared.dataset.tokenizer().to_json())
                waiting.append(Task(run=config, directory=place, log=directory / "logs" / f"{config.folder}.log"))
        done = len(prepared.runs) - len(waiting)
        num_jobs = jobs or default_jobs(spec.recipe.threads)
        say(
            f"{directory}: {len(prepared.runs)} runs, {done} done, {min(num_jobs, max(1, len(waiting)))} at a time",
            quiet,
        )
        arguments = ["--data", str(prepared.dataset.directory), "--device", device]
        with Progress(len(prepared.runs), done, quiet) as progress:
            codes = run_local(waiting, num_jobs=num_jobs, arguments=arguments, on_event=progress.show, stop=stop)
        results, report = write_outputs(directory)
    if as_json:
        emit_json(results)
    else:
        show_results(results)
        say(f"report: {report}")
    failed = _exit_code(results, codes.values())
    if failed:
        raise typer.Exit(failed)


def _exit_code(results: dict[str, Any], codes: Sequence[int] | Any) -> int:
    """0 when every run is complete; else what the first failed child ended with, or 4 for a run diverged before."""
    statuses = [row["status"] for row in results["runs"]]
    if all(status == "complete" for status in statuses):
        return 0
    code = next((code for code in codes if code), 4 if "diverged" in statuses else 1)
    return code if code > 0 else 1


def prepare_study(spec: StudySpec, destination: Path | None, cache: Path, quiet: bool, stop: Any) -> Prepared:
    """Prepare the corpus (once), resolve the arms with the real vocabulary, lock the design."""
    from equipoise.data.packing import check_windows, epochs
    from equipoise.data.prepare import prepare
    from equipoise.matching import resolve_arms
    from equipoise.spec.data import requested_vocab_size
    from equipoise.spec.study import num_steps
    from equipoise.study import expand, lock_study

    if getattr(spec.corpus, "path", "") is None:
        raise ConfigError(
            f"corpus.path: not set; {spec.corpus.kind} needs a folder of text, "
            "for example --set 'corpus.path=\"path/to/folder\"'"
        )
    directory = destination or Path("runs") / spec.name
    resolve_arms(spec.arms, requested_vocab_size(spec.tokenizer), spec.recipe.seq_len)  # a fault costs no preparation
    dataset = prepare(
        spec.corpus, spec.tokenizer, cache, progress=lambda line: say(line, quiet), should_stop=lambda: stop() != 0
    )
    check_windows(dataset, spec.recipe.seq_len)
    if dataset.vocab_size != requested_vocab_size(spec.tokenizer):
        say(
            f"vocabulary: {dataset.vocab_size} reached of {requested_vocab_size(spec.tokenizer)}; arms matched anew",
            quiet,
        )
    arms = resolve_arms(spec.arms, dataset.vocab_size, spec.recipe.seq_len)
    for budget in spec.budgets:
        tokens = num_steps(budget, spec.recipe) * spec.recipe.batch_tokens
        passes = epochs(tokens, len(dataset.tokens("train")), spec.recipe.seq_len)
        if passes > 4:
            say(f"warning: budget {budget:,} repeats the training data {passes:.1f} times", quiet)
    lock_study(directory, spec, arms, dataset, shlex.join(["equipoise", *sys.argv[1:]]))
    return Prepared(directory=directory, dataset=dataset, runs=expand(spec, arms, dataset.digest))
