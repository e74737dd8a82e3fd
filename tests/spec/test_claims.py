"""What a claim may be about: steps between arms, and routing diagnostics within what a router can reach."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from equipoise.config import apply_override, dump, load, read_toml
from equipoise.errors import ConfigError
from equipoise.routing import diagnose
from equipoise.spec.claims import ROUTING_METRICS, LargerClaim, Step
from equipoise.spec.reach import reach
from equipoise.spec.study import StudySpec, parse_study

STUDY = """
name = "x"
seeds = [0, 1, 2]
budgets = [100_000, 200_000]
[corpus]
kind = "grammar"
[tokenizer]
kind = "bpe"
vocab_size = 512
[recipe]
seq_len = 128
batch_tokens = 1024
optim = { lr = 1e-3 }
[base.model]
num_layers = 2
num_heads = 2
d_model = 64
[arms.moe.model]
ffn = { kind = "moe", num_experts = 4, top_k = 2, d_expert = 64 }
[arms.one.model]
ffn = { kind = "moe", num_experts = 4, top_k = 1, d_expert = 64, renormalize = false }
[arms.all.model]
ffn = { kind = "moe", num_experts = 4, top_k = 4, d_expert = 64 }
[arms.many.model]
ffn = { kind = "moe", num_experts = 16, top_k = 8, d_expert = 64 }
[arms.dense.model]
ffn = { kind = "dense", d_ff = 128 }
"""


def study(*overrides: str) -> StudySpec:
    table = read_toml(STUDY, "x")
    for override in overrides:
        table = apply_override(table, override)
    return parse_study(table)


def faults(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        study(*overrides)
    return str(raised.value).splitlines()


# ------------------------------------------------------------------------------------------------ steps

LARGER = "claims=[{id='main', kind='larger', left='moe', right='one', than=[{left='one', right='dense'}]}]"


def test_a_larger_lead_is_read_and_written() -> None:
    (claim,) = study(LARGER).claims
    assert claim == LargerClaim(id="main", left="moe", right="one", than=(Step(left="one", right="dense"),))
    assert load(LargerClaim, dump(claim)) == claim


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "claims.0.than=[]",
            "claims.0.than: [] is not accepted; expected a list of different steps { left, right }, "
            "none of them left over right itself",
        ),
        (
            "claims.0.than=[{left='moe', right='one'}]",
            'claims.0.than: [{"left": "moe", "right": "one"}] is not accepted; expected a list of different steps '
            "{ left, right }, none of them left over right itself",
        ),
        (
            "claims.0.than=[{left='one', right='one'}]",
            'claims.0.than.0.right: "one" is not accepted; expected an arm that is not on the left',
        ),
        (
            "claims.0.than=[{left='one', right='dens'}]",
            'claims.0.than.0.right: "dens" is not accepted; expected one of moe, one, all, many, dense; '
            "did you mean 'dense'?",
        ),
        ("claims.0.than='one'", 'claims.0.than: "one" is not accepted; expected a list of tables'),
        ("claims.0.than=[{left='one'}]", "claims.0.than.0.right: missing; expected a text"),
        ("claims.0.right='moe'", 'claims.0.right: "moe" is not accepted; expected an arm that is not on the left'),
        (
            "claims.0.metric='log_z'",
            "claims.0.metric: \"log_z\" is not accepted; expected one of 'val_loss', 'best_val_loss', 'val_bpb'",
        ),
        ("claims.0.budget=3", "claims.0.budget: 3 is not accepted; expected 'largest' or one of 100000, 200000"),
    ],
)
def test_a_fault_of_a_larger_lead_takes_one_line(override: str, said: str) -> None:
    assert faults(LARGER, override) == [said]


def test_twice_the_same_step_is_one_too_many() -> None:
    twice = "claims.0.than=[{left='one', right='dense'}, {left='one', right='dense'}]"
    (line,) = faults(LARGER, twice)
    assert line.startswith("claims.0.than: [") and "expected a list of different steps" in line


# ------------------------------------------------------------------------------------------------ reach


@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (2, 1), (3, 1), (3, 2), (3, 3), (4, 2), (5, 3)])
def test_reach_is_what_all_assignments_of_a_few_tokens_reach(num_experts: int, top_k: int) -> None:
    """Every way for a number of tokens that all experts can share evenly; the router's entropy at its own ends."""
    sets = list(itertools.combinations(range(num_experts), top_k))
    num_tokens = num_experts // math.gcd(num_experts, top_k)
    counts = {
        tuple(np.bincount(np.ravel(chosen), minlength=num_experts).tolist())
        for chosen in itertools.combinations_with_replacement(sets, num_tokens)
    }
    layers = [
        diagnose(np.array(count), entropy, log_z, top_k)
        for count in counts
        for entropy in (0.0, math.log(num_experts))
        for log_z in (-1e9, 1e9)
    ]
    for metric in ROUTING_METRICS:
        low, high = reach(metric, num_experts, top_k)
        if metric == "log_z":
            assert (low, high) == (-math.inf, math.inf)
            continue
        seen = [layer[metric] for layer in layers]
        assert (min(seen), max(seen)) == (pytest.approx(low, abs=1e-9), pytest.approx(high, abs=1e-9)), metric


def routing(**fields: Any) -> str:
    given = {"arm": "moe", "metric": "busiest_frac", "direction": "above", "threshold": 0.4, **fields}
    inner = ", ".join(f"{key}={value!r}" for key, value in given.items())
    return f"claims=[{{id='r', kind='routing', {inner}}}]"


MOE = "busiest_frac of moe, 2 of 4 experts a token, lies within 0.25 to 0.5"


@pytest.mark.parametrize(
    ("claim", "said"),
    [
        (routing(threshold=0.7), f"threshold: 0.7 is not accepted; expected 0.25 or more and below 0.5; {MOE}"),
        (routing(threshold=0.5), f"threshold: 0.5 is not accepted; expected 0.25 or more and below 0.5; {MOE}"),
        (routing(threshold=0.2), f"threshold: 0.2 is not accepted; expected 0.25 or more and below 0.5; {MOE}"),
        (
            routing(direction="below", threshold=0.25),
            f"threshold: 0.25 is not accepted; expected above 0.25 and at most 0.5; {MOE}",
        ),
        (
            routing(direction="below", threshold=0.6),
            f"threshold: 0.6 is not accepted; expected above 0.25 and at most 0.5; {MOE}",
        ),
        (
            routing(metric="max_vio", threshold=1.5),
            "threshold: 1.5 is not accepted; expected 0 or more and below 1; "
            "max_vio of moe, 2 of 4 experts a token, lies within 0 to 1",
        ),
        (
            routing(arm="all", metric="topk_share", threshold=0.9),
            'metric: "topk_share" is not accepted; expected a diagnostic that can vary; '
            "topk_share of all, 4 of 4 experts a token, is always 1",
        ),
        (
            routing(metric="router_entropy", threshold=1.0),
            "threshold: 1.0 is not accepted; expected 0 or more and below 1; "
            "router_entropy of moe, 2 of 4 experts a token, lies within 0 to 1",
        ),
    ],
)
def test_a_threshold_beyond_the_router_s_reach_is_refused(claim: str, said: str) -> None:
    assert faults(claim) == [f"claims.0.{said}"]


@pytest.mark.parametrize(
    "claim",
    [
        routing(threshold=0.25),
        routing(threshold=0.4999),
        routing(direction="below", threshold=0.5),
        routing(arm="one", threshold=0.7),
        routing(metric="log_z", threshold=1e9),
        routing(arm="all", metric="router_entropy", threshold=0.5),
        routing(arm="one", metric="topk_share", threshold=0.9, layers="max", at_frac=0.05),
    ],
)
def test_a_threshold_within_reach_is_accepted(claim: str) -> None:
    assert study(claim).claims


def lower(left: str, right: str, margin: float = 0.0) -> str:
    return f"claims=[{{id='l', kind='lower', left='{left}', right='{right}', metric='busiest_frac', margin={margin}}}]"


@pytest.mark.parametrize(
    ("claim", "said"),
    [
        (
            lower("all", "many"),
            'left: "all" is not accepted; expected an arm that can lie below many; busiest_frac of all, 4 of 4 experts '
            "a token, is always 0.25, and busiest_frac of many, 8 of 16 experts a token, lies within 0.0625 to 0.125",
        ),
        (
            lower("moe", "one", 0.75),
            f"margin: 0.75 is not accepted; expected below 0.75; {MOE}, and busiest_frac of one, 1 of 4 experts a "
            "token, lies within 0.25 to 1",
        ),
        (
            lower("many", "all"),
            "margin: 0.0 is not accepted; expected 0.125 or more and below 0.1875; busiest_frac of many, 8 of 16 "
            "experts a token, lies within 0.0625 to 0.125, and busiest_frac of all, 4 of 4 experts a token, is always "
            "0.25",
        ),
    ],
)
def test_a_difference_that_no_router_decides_is_refused(claim: str, said: str) -> None:
    assert faults(claim) == [f"claims.0.{said}"]


def test_a_difference_within_reach_is_accepted() -> None:
    for claim in (lower("moe", "one"), lower("one", "moe", 0.2), lower("many", "all", 0.15)):
        assert study(claim).claims


# ------------------------------------------------------------------------------------------------ budgets


def test_budgets_of_as_many_updates_are_one() -> None:
    said = "; expected one of them, or budgets further apart"
    assert faults("budgets=[100_000, 200_000, 100_300]") == [
        f"budgets: 100000 and 100300 both come to 98 updates of recipe.batch_tokens = 1024{said}"
    ]
    assert faults("budgets=[1_100, 900]") == [
        f"budgets: 1100 and 900 both come to 1 update of recipe.batch_tokens = 1024{said}"
    ]
    assert study("budgets=[99_840, 100_864]").budgets == (99_840, 100_864)  # 97.5 and 98.5 updates: 98 and 99
