"""Recipes as nouns: defaults, ranges, and how a batch divides into forward passes."""

from __future__ import annotations

from typing import Any

import pytest

from equipoise.config import load
from equipoise.errors import ConfigError
from equipoise.spec.recipe import WSD, Cosine, Optim, Recipe, Samples

RECIPE: dict[str, Any] = {"seq_len": 128, "batch_tokens": 2048, "optim": {"lr": 1e-3}}


def fault(table: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(Recipe, table)
    return str(caught.value).splitlines()


def test_defaults() -> None:
    recipe = load(Recipe, RECIPE)
    assert recipe.optim == Optim(lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8, grad_clip=1.0)
    assert recipe.schedule == Cosine(warmup_frac=0.02, final_frac=0.1)
    assert (recipe.num_sequences, recipe.balance_group, recipe.num_evals, recipe.threads) == (16, 8, 20, 1)
    assert recipe.kernels == "fused"
    assert recipe.samples == Samples(prompts=("Once upon a time",), num_tokens=60)
    wsd = load(Recipe, {**RECIPE, "schedule": {"kind": "wsd", "warmup_tokens": 4096}})
    assert wsd.schedule == WSD(warmup_tokens=4096, decay_frac=0.2, final_frac=0.1)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"seq_len": 0}, ["seq_len: 0 is not accepted; expected at least 1"]),
        (
            {"seq_len": 0, "threads": 0, "num_evals": 0, "eval_tokens": -1, "micro_sequences": -1},
            [
                "seq_len: 0 is not accepted; expected at least 1",
                "num_evals: 0 is not accepted; expected at least 1",
                "threads: 0 is not accepted; expected 1 to 256",
                "eval_tokens: -1 is not accepted; expected 0 (all) or more",
                "micro_sequences: -1 is not accepted; expected 0 (as many as fit) or more",
            ],
        ),
        ({"threads": 1_000_000}, ["threads: 1000000 is not accepted; expected 1 to 256"]),
        ({"balance_group": 0}, ["balance_group: 0 is not accepted; expected at least 1"]),
        ({"curve_tokens": 0}, ["curve_tokens: 0 is not accepted; expected at least 1"]),
        ({"batch_tokens": 2000}, ["batch_tokens: 2000 is not accepted; expected a multiple of seq_len = 128"]),
        ({"batch_tokens": 512}, ["balance_group: 8 is not accepted; expected a divisor of the 4 sequences of a batch"]),
        (
            {"micro_sequences": 4},
            [
                "micro_sequences: 4 is not accepted; expected 0 or a multiple of balance_group = 8 that divides the "
                "16 sequences of a batch"
            ],
        ),
        (
            {"batch_tokens": 128 * 32, "micro_sequences": 24},
            [
                "micro_sequences: 24 is not accepted; expected 0 or a multiple of balance_group = 8 that divides the "
                "32 sequences of a batch"
            ],
        ),
        ({"samples": {"num_tokens": 0}}, ["samples.num_tokens: 0 is not accepted; expected at least 1"]),
        (
            {"optim": {"lr": 0, "weight_decay": -1, "betas": [0.9, 1], "eps": 0, "grad_clip": -1}},
            [
                "optim.lr: 0.0 is not accepted; expected above 0",
                "optim.weight_decay: -1.0 is not accepted; expected 0 or more",
                "optim.betas: [0.9, 1.0] is not accepted; expected two numbers from 0 to below 1",
                "optim.eps: 0.0 is not accepted; expected above 0",
                "optim.grad_clip: -1.0 is not accepted; expected 0 (off) or more",
            ],
        ),
        (
            {"schedule": {"kind": "cosine", "warmup_frac": 1, "final_frac": 1.5}},
            [
                "schedule.warmup_frac: 1.0 is not accepted; expected 0 to below 1",
                "schedule.final_frac: 1.5 is not accepted; expected 0 to 1",
            ],
        ),
        (
            {"schedule": {"kind": "wsd", "warmup_tokens": -1, "decay_frac": 2, "final_frac": -1}},
            [
                "schedule.warmup_tokens: -1 is not accepted; expected 0 or more",
                "schedule.decay_frac: 2.0 is not accepted; expected 0 to 1",
                "schedule.final_frac: -1.0 is not accepted; expected 0 to 1",
            ],
        ),
    ],
)
def test_faults(change: dict[str, Any], expected: list[str]) -> None:
    assert fault({**RECIPE, **change}) == expected


@pytest.mark.parametrize(
    ("seq_len", "sequences", "group", "micro", "expected"),
    [
        (128, 8, 8, 0, 8),
        (512, 128, 8, 0, 16),  # 16 · 512 = 8,192
        (512, 24, 8, 0, 8),  # 16 sequences would fit but do not divide 24
        (2048, 16, 8, 0, 8),  # a group is never cut, although it holds 16,384 tokens
        (128, 128, 1, 0, 64),
        (128, 32, 8, 16, 16),
    ],
)
def test_sequences_of_a_forward_pass(seq_len: int, sequences: int, group: int, micro: int, expected: int) -> None:
    table = {"seq_len": seq_len, "batch_tokens": seq_len * sequences, "balance_group": group, "micro_sequences": micro}
    recipe = load(Recipe, {**RECIPE, **table})
    assert recipe.sequences_per_forward == expected
    assert sequences % expected == 0
    assert expected % group == 0
