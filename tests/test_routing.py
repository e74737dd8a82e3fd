"""Routing diagnostics against numbers worked by hand and, for entropy, scipy."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from equipoise.routing import diagnose


def test_worked_by_hand() -> None:
    """Four experts, two a token, 10 tokens: assignments 10, 5, 5, 0."""
    found = diagnose(np.array([10, 5, 5, 0]), 0.5 * math.log(4), 1.25, 2)
    assert found == {
        "usage": [0.5, 0.25, 0.25, 0.0],
        "busiest_frac": 0.5,  # the ceiling 1/K
        "usage_variance": 0.03125,  # (0.25² + 0 + 0 + 0.25²) / 4
        "load_cv": pytest.approx(4 * math.sqrt(0.03125)),
        "max_vio": 1.0,
        "usage_entropy": pytest.approx(0.75),  # 1.5 bits of 2
        "router_entropy": pytest.approx(0.5),
        "log_z": 1.25,
        "dead": [3],
        "topk_share": 0.75,
        "collapsed": False,
    }


def test_even_use() -> None:
    found = diagnose(np.full(8, 12), math.log(8), 0.0, 3)
    assert found["busiest_frac"] == 1 / 8 and found["usage_entropy"] == pytest.approx(1.0)
    assert found["usage_variance"] == found["load_cv"] == found["max_vio"] == 0.0
    assert found["router_entropy"] == pytest.approx(1.0) and found["dead"] == []


def test_total_collapse_prints_plain_zeros() -> None:
    found = diagnose(np.array([0, 7, 0]), 0.0, 3.0, 1)
    assert found["collapsed"] is True and found["dead"] == [0, 2] and found["busiest_frac"] == 1.0
    assert found["load_cv"] == pytest.approx(math.sqrt(2)) and found["max_vio"] == 2.0
    assert "-0" not in json.dumps(found)


@pytest.mark.parametrize(
    ("counts", "top_k", "collapsed"),
    [
        ([90, 10, 0, 0], 1, True),
        ([89, 11, 0, 0], 1, False),
        ([50, 40, 10, 0], 2, True),  # exactly nine tenths
        ([50, 39, 11, 0], 2, False),
        ([27, 3], 1, True),
        ([50, 50], 2, False),  # every expert is used by every token: nothing can collapse
        ([100], 1, False),
    ],
)
def test_collapsed_from_nine_tenths_on_the_k_busiest(counts: list[int], top_k: int, collapsed: bool) -> None:
    assert diagnose(np.array(counts), 0.0, 0.0, top_k)["collapsed"] is collapsed


@pytest.mark.parametrize("counts", [[3, 1], [4]])
def test_a_router_without_probabilities_has_counts_and_nothing_else(counts: list[int]) -> None:
    found, known = diagnose(np.array(counts), None, None, 1), diagnose(np.array(counts), 0.5, 2.0, 1)
    assert found["router_entropy"] is found["log_z"] is None
    assert {**found, "router_entropy": 0, "log_z": 0} == {**known, "router_entropy": 0, "log_z": 0}


def test_a_single_expert_is_used_evenly() -> None:
    found = diagnose(np.array([5]), 0.0, 1.0, 1)
    assert found["usage_entropy"] == found["router_entropy"] == 1.0 and found["max_vio"] == 0.0


@given(counts=st.lists(st.integers(0, 1000), min_size=2, max_size=9).filter(any), top_k=st.integers(1, 9))
def test_bounds_and_oracles(counts: list[int], top_k: int) -> None:
    found = diagnose(np.array(counts), 0.3, 0.0, top_k)
    share = np.array(counts) / sum(counts)
    assert found["usage"] == pytest.approx(share.tolist())
    assert found["usage_entropy"] == pytest.approx(scipy.stats.entropy(share, base=len(counts)), abs=1e-12)
    assert found["load_cv"] == pytest.approx(scipy.stats.variation(counts), abs=1e-9)
    assert found["topk_share"] == pytest.approx(sum(sorted(share.tolist())[-top_k:]))
    assert found["usage_variance"] == pytest.approx(np.var(share))
    assert json.loads(json.dumps(found)) == found


def test_nothing_counted_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^no assignments: expected the counts of at least one token$"):
        diagnose(np.zeros(4, dtype=np.int64), 0.0, 0.0, 1)
