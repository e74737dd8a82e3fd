"""The bootstrap over documents against a slow loop, the delta method, and its own promise of coverage."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from equipoise.rng import stream
from equipoise.sampling import RESAMPLES, document_interval, with_sampling


def test_the_interval_is_that_of_a_slow_loop() -> None:
    nats_DG = np.array([[1.0, 0.2], [5.0, -0.1], [-2.0, 0.3], [0.5, 0.0], [3.0, 0.9]])
    tokens_D = np.array([7, 3, 11, 2, 5])
    draws = stream(0, "bootstrap").integers(0, 5, size=(RESAMPLES, 5))
    ratios = []
    for row in draws:
        ratios.append([sum(nats_DG[d, gap] for d in row) / sum(tokens_D[d] for d in row) for gap in (0, 1)])
    low, high = document_interval(nats_DG, tokens_D)
    for gap in (0, 1):
        ordered = sorted(ratio[gap] for ratio in ratios)
        assert ordered[48] <= low[gap] <= ordered[51] and ordered[1948] <= high[gap] <= ordered[1951]


def test_draws_do_not_depend_on_how_many_are_held_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    nats_DG, tokens_D = np.arange(12.0).reshape(6, 2) ** 2, np.arange(1, 7)
    whole = document_interval(nats_DG, tokens_D)
    monkeypatch.setattr("equipoise.sampling.HELD", 61)
    assert np.array_equal(whole, document_interval(nats_DG, tokens_D))


def test_the_interval_of_many_documents_is_the_delta_methods() -> None:
    rng = np.random.default_rng(3)
    tokens_D = rng.integers(50, 400, size=800)
    nats_D = tokens_D * 0.05 + rng.normal(0, 3, size=800) * np.sqrt(tokens_D)
    ratio = nats_D.sum() / tokens_D.sum()
    error = np.sqrt(((nats_D - ratio * tokens_D) ** 2).sum()) / tokens_D.sum()
    low, high = document_interval(nats_D[:, None], tokens_D)
    assert (low[0], high[0]) == pytest.approx((ratio - 1.96 * error, ratio + 1.96 * error), abs=0.15 * error)


def test_the_interval_covers_the_truth_about_95_times_in_100() -> None:
    """300 draws of 60 documents: a standard error of 1.3 %; a percentile interval of so few covers a little less."""
    rng = np.random.default_rng(11)
    covered = 0
    for study in range(300):
        tokens_D = rng.integers(50, 400, size=60)
        nats_D = -0.05 * tokens_D + rng.normal(0, 8, size=60)
        low, high = document_interval(nats_D[:, None], tokens_D, resamples=400, seed=study)
        covered += low[0] <= -0.05 <= high[0]
    assert 0.90 <= covered / 300 <= 0.98


def test_one_document_has_no_interval() -> None:
    with pytest.raises(ValueError, match=r"^documents: 1 is not accepted; expected 2 or more$"):
        document_interval(np.ones((1, 1)), np.ones(1))


# ------------------------------------------------------------------------------------------------ of a study


def arrays(*nats: float, **changed: Any) -> dict[str, Any]:
    """Four units, the second and third of one document; at the best step every loss is half."""
    own = {
        "final_loss_U": np.array(nats),
        "best_loss_U": np.array(nats) / 2,
        "unit_tokens_U": np.array([4, 8, 2, 6]),
        "unit_bytes_U": np.array([9, 9, 9, 9]),
        "unit_document_U": np.array([3, 5, 5, 9]),
    }
    return own | changed


def row(metric: str = "val_loss", seeds: tuple[int, ...] = (0, 1)) -> dict[str, Any]:
    return {"left": "a", "right": "b", "budget": 10, "metric": metric, "per_seed": dict.fromkeys(map(str, seeds), 0.0)}


LOSSES = {
    ("a", 10, 0): arrays(4.0, 9.0, 1.0, 6.0),
    ("b", 10, 0): arrays(5.0, 8.0, 3.0, 9.0),
    ("a", 10, 1): arrays(4.2, 9.4, 1.1, 6.6),
    ("b", 10, 1): arrays(5.0, 8.2, 3.9, 9.2),
}


def test_units_are_gathered_by_document_and_seeds_averaged() -> None:
    final, best, bits = with_sampling([row(), row("best_val_loss"), row("val_bpb")], LOSSES, 0.95)
    by_hand = np.array([[-0.9], [-1.3], [-2.8]])  # seed 0: −1, 1 − 2, −3; seed 1: −0.8, 1.2 − 2.8, −2.6; halved sums
    low, high = document_interval(by_hand, np.array([4, 10, 6]))
    assert final["validation_sampling"] == {
        "ci_low": pytest.approx(low[0]),
        "ci_high": pytest.approx(high[0]),
        "confidence": 0.95,
        "num_documents": 3,
        "resamples": 2000,
    }
    assert best["validation_sampling"]["ci_low"] == pytest.approx(low[0] / 2)
    assert bits["validation_sampling"] is None
    assert final["left"] == "a"


def test_where_it_does_not_exist_it_is_none() -> None:
    others = arrays(1.0, 2.0, 3.0, 4.0, unit_document_U=np.array([3, 5, 6, 9]))
    for losses in ({**LOSSES, ("b", 10, 1): others}, {**LOSSES, ("b", 10, 1): {}}, {}):
        rows = with_sampling([row(), row(seeds=(0,)), row(seeds=())], losses, 0.95)
        assert [one["validation_sampling"] is None for one in rows] == [True, not losses, True]
    one_document = {key: {**own, "unit_document_U": np.zeros(4, int)} for key, own in LOSSES.items()}
    assert with_sampling([row()], one_document, 0.95)[0]["validation_sampling"] is None
