"""Checkpoints: whole or not there, every alteration noticed, older ones kept until a newer one is written."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError

from equipoise.checkpoint import (
    FILES,
    TrainState,
    checkpoint_path,
    load_checkpoint,
    load_latest,
    optimizer_tensors,
    restore_optimizer,
    save_checkpoint,
)
from equipoise.errors import IntegrityError, ResourceError
from equipoise.optim import make_adamw
from equipoise.spec.recipe import Optim


def state(step: int, run: str = "r") -> TrainState:
    generator = torch.Generator().manual_seed(step)
    return TrainState(
        step=step,
        run=run,
        model={"w": torch.randn(7, 5, generator=generator), "n": torch.ones(5)},
        optim={"w/exp_avg": torch.randn(7, 5, generator=generator), "w/step": torch.tensor(float(step))},
        state={"best_loss": 1.5},
    )


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, state(3), keep=[])
    back = load_checkpoint(path)
    assert (back.step, back.run, back.state) == (3, "r", {"best_loss": 1.5})
    assert all(torch.equal(back.model[k], v) for k, v in state(3).model.items())
    assert all(torch.equal(back.optim[k], v) for k, v in state(3).optim.items())


def test_the_newest_two_and_the_best_are_kept(tmp_path: Path) -> None:
    (tmp_path / "step-mine").mkdir()
    for step in range(1, 7):
        save_checkpoint(tmp_path, state(step), keep=[2])
    kept = ["step-00000002", "step-00000005", "step-00000006"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*kept, "step-mine"], "what is no checkpoint stays"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("saved"), state(4), keep=[])


@given(data=st.data(), name=st.sampled_from([*FILES, "manifest.json"]))
def test_every_cut_and_every_flipped_bit_is_noticed(saved: Path, data: st.DataObject, name: str) -> None:
    content = (saved / name).read_bytes()
    if data.draw(st.booleans(), label="cut"):
        broken = content[: data.draw(st.integers(0, len(content) - 1), label="length")]
    else:
        position = data.draw(st.integers(0, len(content) - 1), label="byte")
        flipped = content[position] ^ (1 << data.draw(st.integers(0, 7), label="bit"))
        broken = content[:position] + bytes([flipped]) + content[position + 1 :]
    try:
        same = json.loads(broken) == json.loads(content)  # only blanks between values: nothing was lost
    except (ValueError, UnicodeDecodeError):
        same = False
    (saved / name).write_bytes(broken)
    try:
        if not (same and name == "manifest.json"):
            with pytest.raises(IntegrityError, match="step-00000004"):
                load_checkpoint(saved)
    finally:
        (saved / name).write_bytes(content)


def test_saving_twice_at_one_step_never_leaves_none(tmp_path: Path) -> None:
    """As when stopped before and after an evaluation; killed between the two renames, the older one comes back."""
    path = save_checkpoint(tmp_path, state(4), keep=[])
    again = save_checkpoint(tmp_path, dataclasses.replace(state(4), state={"best_loss": 1.0}), keep=[])
    assert again == path and load_checkpoint(path).state == {"best_loss": 1.0}
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    path.rename(tmp_path / f".{path.name}.old")
    (tmp_path / f".{path.name}.99.tmp").mkdir()
    found = load_latest(tmp_path, "r", print)
    assert found is not None and found.step == 4 and [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_checkpoint_renamed_to_another_step_is_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, state(4), keep=[])
    path.rename(checkpoint_path(tmp_path, 9))
    with pytest.raises(IntegrityError, match="holds step 4"):
        load_checkpoint(checkpoint_path(tmp_path, 9))


def test_loading_falls_back_to_the_newest_valid_one_and_says_so(tmp_path: Path) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, state(step), keep=[])
    weights = tmp_path / "step-00000002" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert load_latest(tmp_path, "r").step == 1  # type: ignore[union-attr]
    assert (tmp_path / "step-00000002").is_dir()  # reading alone changes nothing
    said: list[str] = []
    found = load_latest(tmp_path, "r", said.append)
    assert found is not None and found.step == 1
    assert len(said) == 1 and "model.safetensors" in said[0] and "corrupt-step-00000002" in said[0]
    assert (tmp_path / "corrupt-step-00000002").is_dir()


def test_a_checkpoint_of_another_run_is_not_taken(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, state(1, run="other"), keep=[])
    said: list[str] = []
    assert load_latest(tmp_path, "r", said.append) is None
    assert "belongs to another run" in said[0]


def test_a_failed_save_leaves_the_older_one_and_no_leftover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, state(1), keep=[])

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("equipoise.checkpoint.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(tmp_path, state(2), keep=[])
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert load_latest(tmp_path, "r") is not None


def test_a_full_disk_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("equipoise.checkpoint.save_file", full)
    with pytest.raises(ResourceError, match=r"model\.safetensors: cannot be written .*No space left") as caught:
        save_checkpoint(tmp_path, state(2), keep=[])
    assert caught.value.exit_code == 7 and list(tmp_path.iterdir()) == []


KILLS = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from equipoise.checkpoint import TrainState, load_latest, save_checkpoint

torch.set_num_threads(1)
folder, drawn = Path(sys.argv[1]), random.Random(7)
step, said = 1, []

def save_without_pause(step, tell):
    while True:
        for again in (0, 1):  # twice at one step: stopped before and after its evaluation
            w = {"w": torch.full((200, 500), float(step))}
            state = TrainState(step=step, run="r", model=w, optim=w, state={"again": again})
            save_checkpoint(folder, state, keep=[])
        os.write(tell, b"%d\\n" % step)
        step += 1

for kill in range(50):
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        save_without_pause(step, tell)
    os.close(tell)
    first = os.read(told, 4096)  # one save is done
    time.sleep(drawn.uniform(0, 0.03))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(told, "rb") as rest:
        done = int((first + rest.read()).split()[-1])
    found = load_latest(folder, "r", said.append)
    assert found is not None and found.step in (done, done + 1), (done, found and found.step)
    assert torch.equal(found.model["w"], torch.full((200, 500), float(found.step)))
    assert len(list(folder.glob("step-*"))) <= 3 and not list(folder.glob(".*"))
    step = found.step + 1
assert not said, said
print(step)
"""


def test_killed_at_fifty_random_moments_of_saving_the_newest_one_is_always_there(tmp_path: Path) -> None:
    """SIGKILL of a child that saves without pause, every step twice: none is unreadable, none that was done is lost."""
    done = subprocess.run(
        [sys.executable, "-c", KILLS, str(tmp_path)], capture_output=True, encoding="utf-8", timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 50


def test_every_cut_and_a_flipped_bit_of_every_byte_are_refused_naming_the_file(saved: Path) -> None:
    """All of them, where the test above draws some."""
    for name in (*FILES, "manifest.json"):
        content = (saved / name).read_bytes()
        flips = (content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :] for at in range(len(content)))
        cuts = (content[:length] for length in range(len(content)))
        meant = json.loads(content) if name.endswith(".json") else None
        for broken in (*cuts, *flips):
            (saved / name).write_bytes(broken)
            try:
                load_checkpoint(saved)
            except IntegrityError as error:
                assert f"step-00000004/{name}" in str(error)
            else:  # only a blank between values became another
                assert name == "manifest.json" and json.loads(broken) == meant
        (saved / name).write_bytes(content)


def test_what_cannot_be_read_back_costs_no_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that loses what was written: the new checkpoint is read again before anything is deleted."""
    for step in (1, 2):
        save_checkpoint(tmp_path, state(step), keep=[])
    monkeypatch.setattr("equipoise.checkpoint.file_faults", lambda *_: ["model.safetensors: content differs"])
    with pytest.raises(IntegrityError, match=r"model\.safetensors: content differs, just after it was written"):
        save_checkpoint(tmp_path, state(3), keep=[])
    assert {path.name for path in tmp_path.iterdir()} >= {"step-00000001", "step-00000002"}


def test_optimizer_state_goes_through_names() -> None:
    model = torch.nn.Linear(3, 2, bias=False)
    optimizer = make_adamw(model, Optim(lr=1e-3))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    tensors = optimizer_tensors(model, optimizer)
    assert set(tensors) == {"weight/step", "weight/exp_avg", "weight/exp_avg_sq"}
    other = torch.nn.Linear(3, 2, bias=False)
    fresh = make_adamw(other, Optim(lr=1e-3))
    restore_optimizer(other, fresh, tensors)
    assert all(torch.equal(optimizer_tensors(other, fresh)[k], v) for k, v in tensors.items())
    with pytest.raises(IntegrityError, match="'stranger' is no parameter"):
        restore_optimizer(other, fresh, {"stranger/step": torch.zeros(())})
