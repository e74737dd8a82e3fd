"""Which weights a run directory gives out, and why it gives none."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from equipoise.errors import ConfigError, IntegrityError, Interrupted
from equipoise.record import finish_run
from equipoise.train import train
from equipoise.weights import read_weights


@pytest.fixture(scope="module")
def run(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("weights") / "run"
    train(tiny.runs[0], directory, tiny.dataset)
    return directory


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def test_the_last_and_the_best(run: Path, tiny: Any) -> None:
    last, best = read_weights(run), read_weights(run, best=True)
    assert last.run == best.run == tiny.runs[0] and (last.best, best.best) == (False, True)
    assert last.step == last.summary["steps"] == 10 and best.step == last.summary["best_step"]
    for weights in (last, best):
        stored = load_file(run / "checkpoints" / f"step-{weights.step:08d}" / "model.safetensors")
        assert weights.tensors.keys() == stored.keys()
        assert all(np.array_equal(weights.tensors[name], tensor) for name, tensor in stored.items())


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere: no run directory; expected one that holds a config\.json"):
        read_weights(tmp_path / "nowhere")


def test_an_unfinished_run_says_how_to_finish_it(copy: Path, tiny: Any, tmp_path: Path) -> None:
    (copy / "summary.json").unlink()
    with pytest.raises(
        ConfigError, match=r"interrupted; expected a complete run; finish it first: equipoise train .*copy"
    ):
        read_weights(copy)
    with pytest.raises(Interrupted):
        train(tiny.runs[0], tmp_path / "new", tiny.dataset, stop_signal=lambda: 2)
    shutil.rmtree(tmp_path / "new" / "checkpoints")
    with pytest.raises(ConfigError, match="started; expected a complete run; finish it first"):
        read_weights(tmp_path / "new")


def test_a_diverged_run(copy: Path) -> None:
    facts = {name: value for name, value in read_weights(copy).summary.items() if name != "self_digest"}
    finish_run(copy, {**facts, "status": "diverged"})
    with pytest.raises(ConfigError, match=r"copy: diverged; expected a complete run$"):
        read_weights(copy)


def test_altered_and_deleted_weights(copy: Path) -> None:
    path = copy / "checkpoints" / "step-00000010" / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(IntegrityError, match=r"step-00000010/model\.safetensors: content differs from its recorded"):
        read_weights(copy)
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(IntegrityError, match=r"model\.safetensors: deleted; expected the run's weights"):
        read_weights(copy)
