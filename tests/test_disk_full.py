"""A disk that is full at any byte: one line, exit 7, and everything that was whole before is whole and goes on.

The errors are the system's own: no file may grow beyond a limit of this process, and /dev/full is always full.
"""

from __future__ import annotations

import dataclasses
import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from equipoise.checkpoint import TrainState, load_latest, save_checkpoint
from equipoise.cli.main import call
from equipoise.errors import ResourceError
from equipoise.files import read_json, write_json
from equipoise.record import append_row, masked, read_rows, read_run
from equipoise.train import train
from equipoise.trunk import checkpoint_steps

resource = pytest.importorskip("resource", reason="limits of a process are not known to this system")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="limits of a process are not known to this system")


@contextmanager
def no_file_beyond(num_bytes: int) -> Iterator[None]:
    """Writes beyond so many bytes of a file fail."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def state(step: int, model: int = 1, optim: int = 1, words: int = 1) -> TrainState:
    """A state whose files have about so many bytes."""
    return TrainState(
        step=step,
        run="r",
        model={"w": torch.full((model // 4 + 1,), float(step))},
        optim={"w/exp_avg": torch.zeros(optim // 4 + 1)},
        state={"words": "x" * words},
    )


@pytest.mark.parametrize(
    ("full_at", "big"),
    [
        (0, {}),
        (40, {}),  # within the first header
        (5_000, {"model": 9_000}),
        (5_000, {"optim": 9_000}),
        (8_990, {"optim": 9_000}),
        (5_000, {"words": 9_000}),
        (400, {}),  # the manifest
    ],
)
def test_full_at_byte_k_the_checkpoint_before_is_whole_and_nothing_is_left_over(
    tmp_path: Path, full_at: int, big: dict[str, int]
) -> None:
    save_checkpoint(tmp_path, state(1), keep=[])
    with pytest.raises((ResourceError, OSError)) as full, no_file_beyond(full_at):
        save_checkpoint(tmp_path, state(2, **big), keep=[])
    assert isinstance(full.value, ResourceError) or full.value.errno == errno.EFBIG
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    found = load_latest(tmp_path, "r", lambda line: pytest.fail(line))
    assert found is not None and found.step == 1
    save_checkpoint(tmp_path, state(2, **big), keep=[])
    assert load_latest(tmp_path, "r").step == 2  # type: ignore[union-attr]


def test_full_for_a_small_file_the_old_content_stays(tmp_path: Path) -> None:
    write_json(tmp_path / "summary.json", {"x": 1})
    with pytest.raises(OSError, match="File too large"), no_file_beyond(50):
        write_json(tmp_path / "summary.json", {"x": "y" * 100})
    assert read_json(tmp_path / "summary.json") == {"x": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_full_for_a_row_is_an_error_of_the_system(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as full:
        append_row(tmp_path / "metrics.jsonl", {"kind": "train", "step": 1})
    assert full.value.errno == errno.ENOSPC


@pytest.mark.parametrize("full_at", [2_500, 30_000])
def test_a_run_on_a_full_disk_ends_with_7_and_goes_on_when_there_is_room(
    tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], full_at: int
) -> None:
    """Full for rows in the middle of a line, and for weights at a save."""
    run = next(run for run in tiny.runs if run.arm == "dense" and run.seed == 0)
    run = dataclasses.replace(run, recipe=dataclasses.replace(run.recipe, num_evals=2))
    directory = tmp_path / "dense" / "5120-s0"
    train(run, tmp_path / "straight", tiny.dataset)
    polls = iter([0] * 9)
    with pytest.raises(Exception, match="saved at step"):
        train(run, directory, tiny.dataset, stop_signal=lambda: next(polls, 15))
    (before,) = checkpoint_steps(directory)
    rows = (directory / "metrics.jsonl").stat().st_size
    limit = rows + 300 if full_at == 2_500 else full_at
    assert limit < max(path.stat().st_size for path in directory.rglob("*.safetensors"))
    with no_file_beyond(limit):
        code = call(["train", str(directory), "--data", str(tiny.dataset.directory), "--quiet"])
    said = capsys.readouterr().err
    assert code == 7 and said.startswith("error: ") and said.count("\n") == 1
    assert read_run(directory).status == "interrupted" and checkpoint_steps(directory) == [before]
    train(run, directory, tiny.dataset)
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert masked(read_rows(directory / name)) == masked(read_rows(tmp_path / "straight" / name))
    last = "checkpoints/step-00000010/model.safetensors"
    assert (directory / last).read_bytes() == (tmp_path / "straight" / last).read_bytes()
