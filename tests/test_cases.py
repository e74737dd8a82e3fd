"""Faults that other tools had, with their exact values: the cases without a home elsewhere, and the list of all.

docs/cases.md says for each case what is right and which test holds it; here that list is held to the tests.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from equipoise.checkpoint import load_checkpoint, restore_model, save_checkpoint
from equipoise.config import apply_override, load, read_toml
from equipoise.data.packing import PADDING, EvalWindows, batch
from equipoise.errors import ConfigError, IntegrityError, Interrupted
from equipoise.export.translate import to_huggingface
from equipoise.model.transformer import Transformer, build, token_losses
from equipoise.score import evaluate
from equipoise.spec.model import DenseFFN, ModelConfig, MoEFFN
from equipoise.spec.recipe import Recipe
from equipoise.spec.study import parse_study
from equipoise.train import train

ROOT = Path(__file__).resolve().parent.parent
CASES = ROOT / "docs" / "cases.md"


def model_config(**changes: Any) -> ModelConfig:
    ffn = MoEFFN(num_experts=8, top_k=2, d_expert=96)
    sizes = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "d_model": 64, "vocab_size": 1000, "ffn": ffn}
    return ModelConfig(**{**sizes, **changes})


def drawn(high: int, *shape: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(3)).integers(1, high, size=shape)


def windows_of(targets_WS: np.ndarray, lengths_W: list[int]) -> EvalWindows:
    """Windows of one unit each, real up to its length and padded after it."""
    W, S = targets_WS.shape
    real_WS = np.arange(S) < np.array(lengths_W)[:, None]
    targets_WS = np.where(real_WS, targets_WS, 0)
    return EvalWindows(
        inputs_WS=np.concatenate([np.zeros((W, 1), np.int64), targets_WS[:, :-1]], axis=1),
        targets_WS=targets_WS,
        unit_WS=np.where(real_WS, np.arange(W)[:, None], PADDING),
        num_units=W,
        unit_tokens_U=np.array(lengths_W),
        unit_bytes_U=np.array(lengths_W),
        unit_document_U=np.arange(W),
        num_targets=sum(lengths_W),
        num_bytes=sum(lengths_W),
        floor=None,
    )


# ------------------------------------------------------------------------------------------------ the list


def case_texts() -> dict[str, str]:
    """Text of each section `## A1 …` of docs/cases.md by its number."""
    parts = re.split(r"^## (A\d+)\b", CASES.read_text(encoding="utf-8"), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_case_is_listed_with_source_value_and_test() -> None:
    texts = case_texts()
    assert list(texts) == [f"A{number}" for number in range(1, 21)]
    for number, text in texts.items():
        assert re.search(r"[\w.-]+/[\w.-]+ (?:PR )?#\d+", text), f"{number}: no public source"
        assert "**Right:**" in text and "tests/" in text, f"{number}: no right value or no test"


@pytest.mark.parametrize("number", [f"A{number}" for number in range(1, 21)])
def test_every_test_that_is_named_exists(number: str) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", case_texts()[number])
    assert named and case_texts()[number].count("tests/") == len(named)
    for file, function in named:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function]
        assert found and function.startswith("test_"), f"{number}: no {function} in {file}"


# ------------------------------------------------------------------------------------------------ routing


def test_padding_moves_no_diagnostic_and_no_loss() -> None:
    """A2: more padding, in more windows, changes nothing that an evaluation says."""
    model = build(model_config(vocab_size=53, init_std=0.2), seed=0)
    targets_WS = drawn(53, 3, 24)
    tight = evaluate(model, windows_of(targets_WS, [24, 11, 17]), end_of_text=0)
    wide_WS = np.concatenate([targets_WS, np.zeros_like(targets_WS)], axis=1)
    wide = evaluate(model, windows_of(wide_WS, [24, 11, 17]), end_of_text=0)
    np.testing.assert_allclose(wide.unit_losses_U, tight.unit_losses_U, rtol=1e-6)
    assert wide.loss == pytest.approx(tight.loss, rel=1e-6)
    for one, other in zip(wide.routing, tight.routing, strict=True):
        assert one["usage"] == other["usage"] and sum(one["usage"]) == pytest.approx(1, abs=1e-12)
        for name in ("busiest_frac", "usage_entropy", "router_entropy", "log_z"):
            assert one[name] == pytest.approx(other[name], rel=1e-5)


def router_gradient(**fields: Any) -> float:
    """Largest gradient of the language-model loss on any router right after initialisation, no router loss added."""
    ffn = MoEFFN(num_experts=4, d_expert=96, **fields)
    model = build(model_config(ffn=ffn), seed=0)
    windows = torch.from_numpy(drawn(1000, 4, 33))
    token_losses(model, model(windows[:, :-1]), windows[:, 1:]).mean().backward()
    return max(float(p.grad.abs().max()) for n, p in model.named_parameters() if ".router." in n and p.grad is not None)


def test_top_1_gives_the_router_a_gradient_or_is_refused() -> None:
    """A3: at the usual initialisation, not only for wide weights."""
    assert router_gradient(top_k=1, renormalize=False) > 1e-6
    assert router_gradient(top_k=2) > 1e-6
    assert router_gradient(top_k=1, allow_no_router_gradient=True) < 1e-9
    with pytest.raises(ValueError, match="renormalize: true is not accepted; expected false beside top_k = 1"):
        MoEFFN(num_experts=4, top_k=1, d_expert=96)


@pytest.mark.parametrize(
    "field",
    [
        "recipe.recompute",
        "recipe.activation_checkpointing",
        "recipe.gradient_checkpointing",
        "arms.moe.model.recompute",
        "arms.moe.model.ffn.capacity_factor",
        "arms.moe.model.ffn.expert_capacity",
        "arms.moe.model.ffn.drop_tokens",
        "recipe.eval_capacity_factor",
    ],
)
def test_recomputation_and_capacity_do_not_exist(field: str, tiny_toml: str) -> None:
    """A4, A8: what there is no mode for cannot be switched on by mistake; a study that asks for it is refused."""
    with pytest.raises(ConfigError) as caught:
        parse_study(apply_override(read_toml(tiny_toml, "tiny"), f"{field}=true"))
    assert str(caught.value).startswith(f"{field}: unknown field; ")


# ------------------------------------------------------------------------------------------------ counts


@pytest.mark.parametrize(("tie_embeddings", "expected"), [(True, 384_832), (False, 448_832)])
def test_a_state_dict_holds_each_storage_once(tie_embeddings: bool, expected: int) -> None:
    """A10: tied, even the plain sum over the state dict is right, for there is no second name for the embedding."""
    state = build(model_config(tie_embeddings=tie_embeddings), seed=0).state_dict()
    assert sum(tensor.numel() for tensor in state.values()) == expected
    assert len({tensor.untyped_storage().data_ptr() for tensor in state.values()}) == len(state)


def test_a_mean_over_windows_is_a_mean_over_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A17: 10 targets at 1.0 and 90 at 3.0, scored in two passes, are 2.8 a token and not 2.0."""

    def given(model: Transformer, output: Any, targets_BS: torch.Tensor) -> torch.Tensor:
        return torch.tensor([7.0, 1.0, 3.0])[targets_BS.flatten()]  # padding would count 7

    monkeypatch.setattr("equipoise.score.token_losses", given)
    monkeypatch.setattr("equipoise.score.FORWARD_TOKENS", 90)
    model = build(model_config(vocab_size=3, ffn=DenseFFN(d_ff=8)), seed=0)
    targets_WS = np.array([[1] * 90, [2] * 90])
    found = evaluate(model, windows_of(targets_WS, [10, 90]), end_of_text=0)
    assert found.loss == pytest.approx(2.8, abs=1e-12)
    assert found.unit_losses_U.tolist() == [10.0, 270.0]
    assert found.bpb == pytest.approx(2.8 / math.log(2), abs=1e-12)


@pytest.mark.parametrize("micro_sequences", [3, 5, 8, 16])
def test_micro_batches_of_unequal_size_are_refused(micro_sequences: int) -> None:
    """A17: a step is cut into equal parts of whole balance groups, so that a mean of their means is the mean."""
    table = {"seq_len": 8, "batch_tokens": 80, "balance_group": 2, "optim": {"lr": 0.1}}
    with pytest.raises(ConfigError) as caught:
        load(Recipe, {**table, "micro_sequences": micro_sequences})
    assert str(caught.value) == (
        f"micro_sequences: {micro_sequences} is not accepted; "
        "expected 0 or a multiple of balance_group = 2 that divides the 10 sequences of a batch"
    )


# ------------------------------------------------------------------------------------------------ files


def test_restarts_replay_no_batch(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A12: hashes of the batches of 40 updates, straight and in four parts."""
    seen: list[str] = []

    def logged(*arguments: Any) -> Any:
        arrays = batch(*arguments)
        seen.append(hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest())
        return arrays

    monkeypatch.setattr("equipoise.train.batch", logged)
    run = tiny.runs[0]
    recipe = dataclasses.replace(run.recipe, num_evals=1, samples=dataclasses.replace(run.recipe.samples, prompts=()))
    run = dataclasses.replace(run, recipe=recipe, budget=40 * recipe.batch_tokens)
    train(run, tmp_path / "straight", tiny.dataset)
    straight, restarts = list(seen), 0
    seen.clear()
    while True:
        wanted = len(seen) + 10
        try:
            train(run, tmp_path / "parts", tiny.dataset, stop_signal=lambda: 15 * (len(seen) >= wanted < 40))  # noqa: B023
            break
        except Interrupted:
            restarts += 1
    assert restarts == 3 and len(straight) == 40
    assert seen == straight and len(set(straight)) == 40


def test_saved_weights_have_bare_names_and_only_they_are_loaded(tiny: Any, tmp_path: Path) -> None:
    """A13: names of a wrapped model, one too many, one too few, another shape: refused, and no weight is touched."""
    run = next(run for run in tiny.runs if run.arm == "moe")
    train(run, tmp_path / "run", tiny.dataset)
    newest = max((tmp_path / "run" / "checkpoints").glob("step-*"))
    saved = load_checkpoint(newest)
    model = build(run.model, seed=1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert list(torch.compile(model, backend="eager").state_dict()) == [f"_orig_mod.{name}" for name in before]
    assert set(saved.model) == set(before)
    wrapped = {f"_orig_mod.{name}": tensor for name, tensor in saved.model.items()}
    name = "blocks.0.ffn.router.weight"
    for tensors, message in (
        (wrapped, "'embed.weight' is missing"),
        (
            {**saved.model, "_orig_mod.embed.weight": torch.ones(1)},
            "'_orig_mod.embed.weight' is no parameter of this model",
        ),
        ({other: t for other, t in saved.model.items() if other != name}, f"'{name}' is missing"),
        ({**saved.model, name: torch.ones(2, 16)}, f"'{name}' is [2, 16]; expected [3, 16]"),
        (
            {**saved.model, name: torch.ones(3, 16, dtype=torch.int64)},
            f"'{name}' is torch.int64; expected torch.float32",
        ),
    ):
        with pytest.raises(IntegrityError) as caught:
            restore_model(model, tensors)
        assert str(caught.value) == f"model.safetensors: {message}"
        assert all(torch.equal(model.state_dict()[other], tensor) for other, tensor in before.items())
    (tmp_path / "run" / "summary.json").unlink()
    save_checkpoint(newest.parent, dataclasses.replace(saved, model=wrapped), keep=[])
    with pytest.raises(IntegrityError, match=r"^model\.safetensors: 'embed\.weight' is missing$"):
        train(run, tmp_path / "run", tiny.dataset)


@pytest.mark.parametrize(
    "ffn", [DenseFFN(d_ff=96), MoEFFN(num_experts=4, top_k=2, d_expert=96)], ids=["llama", "mixtral"]
)
@pytest.mark.parametrize("rope_theta", [10_000.0, 500_000.0])
def test_an_exported_config_says_the_rope_base_twice(ffn: Any, rope_theta: float) -> None:
    """A16: the old spelling for transformers 4, the new one for 5; either default would be wrong for one of these."""
    theirs = to_huggingface(model_config(ffn=ffn, rope_theta=rope_theta), seq_len=128, eot_id=0)
    assert theirs["rope_theta"] == theirs["rope_parameters"]["rope_theta"] == rope_theta
    assert theirs["rope_parameters"]["rope_type"] == "default"


KILLED = """
import os, signal, sys, time
from pathlib import Path
import torch
from equipoise.checkpoint import TrainState, load_latest, save_checkpoint

torch.set_num_threads(1)
folder = Path(sys.argv[1])

def save(step):
    w = {"w": torch.full((50, 60), float(step))}
    save_checkpoint(folder, TrainState(step=step, run="r", model=w, optim=w, state={}), keep=[])

save(0)
began = time.perf_counter()
save(0)
one_save, step, completed = time.perf_counter() - began, 1, 0
for kill in range(50):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        for number in range(step, 10**6):
            save(number)
            os.write(writer, b"x")
    os.close(writer)
    time.sleep(one_save * 2.5 * (11 * kill % 50) / 50)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    done = len(os.read(reader, 65536))
    os.close(reader)
    found = load_latest(folder, "r")
    assert found is not None and found.step >= step + done - 1, (kill, step, done)
    assert torch.equal(found.model["w"], torch.full((50, 60), float(found.step))), kill
    step, completed = found.step + 1, completed + done
print(completed)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fifty_kills_while_saving_leave_a_checkpoint_each_time(tmp_path: Path) -> None:
    """A19: at moments spread over a save and a little more; each child goes on from what the one before it left."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, encoding="utf-8", check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 1, "no save was completed before its kill"


def test_train_and_report_without_a_display(tiny: Any, tiny_cache: Path, tiny_toml: str, tmp_path: Path) -> None:
    """A20: a display that is not there, and arm names that are markup to a plotting library."""
    toml = (
        tiny_toml.replace("moe", "$x_$")
        .replace("[arms.$x_$.", '[arms."$x_$".')
        .replace('kind = "$x_$"', 'kind = "moe"')
    )
    toml = toml.replace("dense", "_base").replace('kind = "_base"', 'kind = "dense"')
    toml = toml.replace("seeds = [0, 1, 2]", "seeds = [0]").replace("budgets = [5120]", "budgets = [1024]")
    (tmp_path / "study.toml").write_text(toml, encoding="utf-8")
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "EQUIPOISE_CACHE": str(tiny_cache),
        "MPLBACKEND": "TkAgg",
        "DISPLAY": ":99",
    }
    for arguments in (["run", "study.toml"], ["report", "runs/tiny"]):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-m", "equipoise", *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            encoding="utf-8",
            check=False,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "runs" / "tiny" / "results.json").read_text(encoding="utf-8"))
    assert [(run["arm"], run["status"]) for run in results["runs"]] == [("$x_$", "complete"), ("_base", "complete")]
    page = (tmp_path / "runs" / "tiny" / "report.html").read_text(encoding="utf-8")
    assert page.count("<svg") >= 3 and "$x_$" in page and "_base" in page
