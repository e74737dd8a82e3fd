"""Runs that were never trained: models of every kind that is exported, in run directories as the product makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from equipoise.checkpoint import TrainState, save_checkpoint
from equipoise.config import digest
from equipoise.data.tokenizer import TextTokenizer, train_tokenizer
from equipoise.files import write_json
from equipoise.model.transformer import Transformer, build
from equipoise.record import finish_run, start_run
from equipoise.spec.data import BpeTokenizer
from equipoise.spec.model import DenseFFN, ModelConfig, MoEFFN, NoBalance
from equipoise.spec.recipe import Optim, Recipe
from equipoise.spec.run import RunConfig

SEQ_LEN = 64
# No base, eps or init is a default of Hugging Face: what were left out of config.json would show in the logits.
SIZES: dict[str, Any] = {"num_layers": 2, "d_model": 40, "init_std": 0.1, "rope_theta": 500.0, "norm_eps": 1e-3}
HEADS = {
    "mha": {"num_heads": 4, "num_kv_heads": 4},
    "gqa": {"num_heads": 4, "num_kv_heads": 2},
    "mqa": {"num_heads": 2, "num_kv_heads": 1},
    "odd": {"num_heads": 3, "num_kv_heads": 1, "d_model": 42},  # no multiple of 4: grouped kernels refuse such rows
}
FFNS: dict[str, DenseFFN | MoEFFN] = {
    "dense": DenseFFN(d_ff=56),
    "top-2": MoEFFN(num_experts=5, top_k=2, d_expert=24, z_coef=1e-3),
    "top-1": MoEFFN(num_experts=3, top_k=1, d_expert=24, allow_no_router_gradient=True, balance=NoBalance()),
    "top-2-as-is": MoEFFN(num_experts=5, top_k=2, d_expert=24, renormalize=False),
    "top-1-as-is": MoEFFN(num_experts=4, top_k=1, d_expert=24, renormalize=False),
    "all-as-is": MoEFFN(num_experts=3, top_k=3, d_expert=24, renormalize=False),
    "one": MoEFFN(num_experts=1, top_k=1, d_expert=24),
}
CASES = [
    ("dense", "mha", True),
    ("dense", "gqa", False),
    ("top-2", "mha", False),
    ("top-2", "gqa", True),
    ("top-1", "mqa", True),
    ("top-2-as-is", "gqa", True),
    ("top-1-as-is", "mha", False),
    ("all-as-is", "gqa", True),
    ("one", "mqa", False),
    ("top-2", "odd", True),
    ("top-2-as-is", "odd", False),
]
TEXTS = [
    "Once upon a time, Zoë's naïve café — 猫と犬 🦙 — said “yes”.\n",
    "the cat and the dog and the hat, 1234 times",
]


def case_id(case: tuple[str, str, bool]) -> str:
    return f"{case[0]}-{case[1]}-{'tied' if case[2] else 'untied'}"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The machine is shared, and sums must not depend on how many cores it has."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tokenizer() -> TextTokenizer:
    return train_tokenizer(BpeTokenizer(vocab_size=280), iter(TEXTS * 3))


@pytest.fixture(scope="session")
def make_model(tokenizer: TextTokenizer) -> Callable[..., Transformer]:
    """A model of one case, far enough from its initialisation that logits, norms and expert loads are uneven."""

    def make(ffn: str, heads: str, tied: bool, seed: int = 1, **fields: Any) -> Transformer:
        sizes = {**SIZES, **HEADS[heads], "ffn": FFNS[ffn], "vocab_size": tokenizer.vocab_size, "tie_embeddings": tied}
        model = build(ModelConfig(**{**sizes, **fields}), seed=seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("norm.weight"):
                    noise = np.random.Generator(np.random.Philox(len(name))).uniform(0.5, 1.5, parameter.shape)
                    parameter.copy_(torch.from_numpy(noise))
                if name.endswith("router.weight"):
                    parameter.mul_(3)
        return model

    return make


@pytest.fixture(scope="session")
def make_run(tokenizer: TextTokenizer) -> Callable[..., RunConfig]:
    """Lay a complete run into `directory`: `model` after step 8, `best` (default: the same) after step 5."""

    def make(directory: Path, model: Transformer, best: Transformer | None = None, **summary: Any) -> RunConfig:
        recipe = Recipe(seq_len=SEQ_LEN, batch_tokens=512, optim=Optim(lr=1e-3))
        run = RunConfig(arm="a_b*c", seed=3, budget=4096, model=model.config, recipe=recipe, data="d" * 64)
        start_run(directory, run, tokenizer.to_json())
        names = ("equipoise", "torch", "numpy", "tokenizers", "python")
        environments = [dict.fromkeys(names, version) for version in ("1.2.3", "1.2.3", "1.3.0")]
        write_json(directory / "environment.json", {"environments": environments})
        for step, weights in ((5, best or model), (8, model)):
            state = TrainState(step=step, run=digest(run), model=weights.state_dict(), optim={}, state={})
            save_checkpoint(directory / "checkpoints", state, keep=[5])
        facts = {
            "status": "complete",
            "digest": digest(run),
            "steps": 8,
            "best_step": 5,
            "tokens": 4096,
            "split": "validation",
            "epochs": 0.5,
            "params": {"total": 123_456, "active": 65_432},
            "val_loss": 2.5,
            "val_bpb": 1.25,
            "best_val_loss": 2.25,
            "best_val_bpb": 1.125,
        }
        finish_run(directory, {**facts, **summary})
        return run

    return make


@pytest.fixture(scope="session")
def exported(
    make_model: Callable[..., Transformer], make_run: Callable[..., RunConfig], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str, bool], SimpleNamespace]:
    """Every case exported once: its model and directory."""
    from equipoise.export.write import export
    from equipoise.weights import read_weights

    folder = tmp_path_factory.mktemp("exported")
    found = {}
    for case in CASES:
        model, run, directory = make_model(*case), folder / "runs" / case_id(case), folder / case_id(case)
        make_run(run, model)
        written = export(read_weights(run), directory)
        found[case] = SimpleNamespace(model=model, run=run, directory=directory, written=written)
    return found
