"""Shared by all tests: the opt-in options, one thread per test process, no network, no deadlines."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings

# Before torch is imported anywhere. Tests run side by side, one process a core; and results of one thread are exact.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A deadline measures how busy the machine is. On CI the examples are the same every time (hypothesis's own profile).
settings.register_profile("house", deadline=None)
settings.load_profile("house")


def pytest_addoption(parser: pytest.Parser) -> None:
    # Written --corpora=DIR: pytest seeks its settings before it reads this file, and would take a lone DIR for a test.
    parser.addoption("--corpora", type=Path, metavar="DIR", help="real text: a folder with tinystories/ and gutenberg/")
    parser.addoption("--python-457", type=Path, metavar="PATH", help="a Python that has transformers 4.57 and torch")
    parser.addoption("--python-lm-eval", type=Path, metavar="PATH", help="a Python that has lm-eval[hf] 0.4")


@pytest.fixture(scope="session")
def corpora(request: pytest.FixtureRequest) -> Path:
    """The folder of real text; tests that ask for it are skipped where none was given."""
    folder: Path | None = request.config.getoption("--corpora")
    if folder is None:
        pytest.skip("real text needed: --corpora=DIR")
    assert folder.is_dir(), f"--corpora {folder}: not a folder"
    return folder.resolve()


@pytest.fixture(scope="session")
def tinystories(corpora: Path) -> Path:
    """The folder of real TinyStories text."""
    folder = corpora / "tinystories"
    assert folder.is_dir(), f"--corpora {corpora}: it has no folder tinystories"
    return folder


@pytest.fixture(scope="session")
def gutenberg(corpora: Path) -> Path:
    """The folder of real books."""
    folder = corpora / "gutenberg"
    assert folder.is_dir(), f"--corpora {corpora}: it has no folder gutenberg"
    return folder


TINY = """
name = "tiny"
question = "does it run?"
seeds = [0, 1, 2]
budgets = [5120]
[corpus]
kind = "grammar"
num_documents = 120
num_validation = 12
num_selection = 4
[tokenizer]
kind = "bpe"
vocab_size = 512
[recipe]
seq_len = 256
batch_tokens = 512
balance_group = 1
num_evals = 4
curve_tokens = 512
optim = { lr = 3e-3 }
samples = { prompts = ["Once"], num_tokens = 4 }
[base.model]
num_layers = 1
num_heads = 2
d_model = 16
[arms.moe.model.ffn]
kind = "moe"
num_experts = 3
top_k = 2
d_expert = 16
z_coef = 0.001
[arms.dense]
match = { to = "moe", on = "active_params", adjust = "ffn.d_ff", rtol = 0.05 }
model.ffn = { kind = "dense" }
[[claims]]
id = "moe-lower"
kind = "lower"
left = "moe"
right = "dense"
"""


@pytest.fixture(scope="session")
def tiny_toml() -> str:
    """A study of two arms × three seeds whose runs take ten updates, well under a second each."""
    return TINY


@pytest.fixture(scope="session")
def tiny_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder that holds the data set of the tiny study, shared by the tests of one process."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def tiny(tiny_cache: Path) -> Any:
    """The tiny study, its data set, its resolved arms and its runs."""
    from equipoise.config import read_toml
    from equipoise.data.prepare import prepare
    from equipoise.lock import expand
    from equipoise.matching import resolve_arms
    from equipoise.spec.study import parse_study

    spec = parse_study(read_toml(TINY, "tiny"))
    dataset = prepare(spec.corpus, spec.tokenizer, tiny_cache)
    arms = resolve_arms(spec.arms, dataset.vocab_size, spec.recipe.seq_len)
    models = {name: arm.model for name, arm in arms.items()}
    runs = expand(spec, models, dataset.digest)
    return SimpleNamespace(spec=spec, dataset=dataset, arms=arms, models=models, runs=runs)


@pytest.fixture
def begun(tiny: Any, tmp_path: Path) -> Any:
    """A locked study in which nothing has run, `directory`, and functions that make its runs look at work or done.

    `rows(run, steps)` writes a record with 0.1 s an update and a point of the curve at its end, `holds(path)` the note
    of this process beside a lock file, `log(run, line)` what a child said, `finish(run, status)` a summary.
    """
    import os
    import platform

    from equipoise.config import digest
    from equipoise.lock import lock_study
    from equipoise.record import append_row, finish_run, start_run

    directory = tmp_path / "runs" / "tiny"
    lock_study(directory, tiny.spec, tiny.models, tiny.dataset, "equipoise run study.toml")

    def rows(run: Any, steps: int, loss: float = 5.0) -> None:
        place = directory / run.folder
        start_run(place, run, tiny.dataset.tokenizer().to_json())
        layer = {"busiest_frac": 0.45, "dead": [2], "collapsed": False}
        for step in range(1, steps + 1):
            row = {"kind": "train", "step": step, "lr": 0.003, "lm_loss": loss - step / 100, "elapsed_s": step / 10}
            append_row(place / "metrics.jsonl", row)
        point = {"kind": "eval", "step": steps, "loss": loss, "routing": [layer] if run.arm == "moe" else []}
        append_row(place / "metrics.jsonl", point)

    def holds(lock: Path, pid: int | None = None) -> None:
        lock.parent.mkdir(parents=True, exist_ok=True)
        note = f"process {pid or os.getpid()} on {platform.node()} since 2026-01-01T00:00:00+00:00\n"
        lock.with_suffix(".holder").write_text(note, encoding="utf-8")

    def log(run: Any, line: str) -> None:
        path = directory / "logs" / f"{run.folder}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"cpu, float32\n{line}\n", encoding="utf-8")

    def finish(run: Any, status: str = "complete", **more: Any) -> None:
        rows(run, run.num_steps)
        finish_run(
            directory / run.folder,
            {"digest": digest(run), "status": status, "steps": run.num_steps, "val_loss": 4.25, **more},
        )

    return SimpleNamespace(directory=directory, runs=tiny.runs, rows=rows, holds=holds, log=log, finish=finish)


@pytest.fixture
def every_point_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint at every point of the curve, however soon they follow each other."""
    monkeypatch.setattr("equipoise.session.SAVE_S", 0.0)
