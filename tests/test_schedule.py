"""The learning rate against tables worked by hand; first and last steps at awkward lengths."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.schedule import branch_step, eval_steps, learning_rate, sample_steps, warmup_steps
from equipoise.spec.recipe import WSD, Cosine, Optim, Recipe, Samples

COS_1, COS_2, COS_3 = 0.9238795325112867, 0.7071067811865476, 0.3826834323650898  # of 22.5°, 45°, 67.5°


def table(num_steps: int, schedule: Cosine | WSD, peak: float = 1.0, batch_tokens: int = 100) -> list[float]:
    return [learning_rate(step, num_steps, batch_tokens, peak, schedule) for step in range(num_steps)]


@pytest.mark.parametrize(
    ("num_steps", "schedule", "expected"),
    [
        # 2 steps up, then eighths of half a cosine from 1 to 0.1: 0.55 + 0.45 cos(k·22.5°)
        (
            10,
            Cosine(warmup_frac=0.2, final_frac=0.1),
            [0.5, 1, *(0.55 + 0.45 * cosine for cosine in (COS_1, COS_2, COS_3, 0, -COS_3, -COS_2, -COS_1, -1))],
        ),
        # at least one warm-up step, even when none is asked for
        (3, Cosine(warmup_frac=0, final_frac=0), [1, 0.5, 0]),
        (1, Cosine(warmup_frac=0.5, final_frac=0.1), [1]),
        (2, Cosine(warmup_frac=0.5, final_frac=0.1), [1, 0.1]),
        # 300 tokens of warm-up are 3 steps of 100, whatever the length
        (1, WSD(warmup_tokens=300, decay_frac=0.2, final_frac=0.1), [1]),
        (2, WSD(warmup_tokens=300, decay_frac=0.2, final_frac=0.1), [1 / 2, 1]),
        (3, WSD(warmup_tokens=300, decay_frac=0.2, final_frac=0.1), [1 / 3, 2 / 3, 1]),
        (4, WSD(warmup_tokens=300, decay_frac=0.2, final_frac=0.1), [1 / 3, 2 / 3, 1, 0.1]),
        (10, WSD(warmup_tokens=300, decay_frac=0.4, final_frac=0.2), [1 / 3, 2 / 3, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2]),
        # a decay longer than what the warm-up leaves begins right after it
        (5, WSD(warmup_tokens=300, decay_frac=0.8, final_frac=0), [1 / 3, 2 / 3, 1, 0.5, 0]),
        (5, WSD(warmup_tokens=100, decay_frac=0, final_frac=0.1), [1, 1, 1, 1, 1]),
        # a fraction that rounds to no step still decays
        (3, WSD(warmup_tokens=0, decay_frac=0.01, final_frac=0.1), [1, 1, 0.1]),
    ],
)
def test_tables_worked_by_hand(num_steps: int, schedule: Cosine | WSD, expected: list[float]) -> None:
    assert table(num_steps, schedule) == pytest.approx(expected, abs=1e-9)
    assert table(num_steps, schedule, peak=3e-3) == pytest.approx([3e-3 * rate for rate in expected], abs=1e-11)


@pytest.mark.parametrize("num_steps", [1, 2, 20, 21, 22, 400])
@pytest.mark.parametrize("schedule", [Cosine(warmup_frac=0.05, final_frac=0.1), WSD(warmup_tokens=2_000)])
def test_first_rate_is_above_zero_and_last_is_the_floor(num_steps: int, schedule: Cosine | WSD) -> None:
    rates = table(num_steps, schedule)
    warmup = warmup_steps(num_steps, 100, schedule)
    assert rates[0] == 1 / warmup > 0
    assert rates[warmup - 1] == max(rates) == 1
    if num_steps > warmup:
        assert math.isclose(rates[-1], 0.1, rel_tol=0, abs_tol=1e-12)
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 300),
    st.one_of(
        st.builds(Cosine, warmup_frac=st.floats(0, 0.99), final_frac=st.floats(0, 1)),
        st.builds(WSD, warmup_tokens=st.integers(0, 40_000), decay_frac=st.floats(0, 1), final_frac=st.floats(0, 1)),
    ),
)
def test_rates_stay_between_floor_and_peak(num_steps: int, schedule: Cosine | WSD) -> None:
    rates = table(num_steps, schedule)
    warmup = warmup_steps(num_steps, 100, schedule)
    assert 1 <= warmup <= num_steps
    assert all(0 < rate <= 1 for rate in rates[:warmup])
    assert all(schedule.final_frac - 1e-12 <= rate <= 1 for rate in rates[warmup:])


def test_budgets_of_a_wsd_study_share_their_trunk() -> None:
    schedule = WSD(warmup_tokens=1_000, decay_frac=0.2)
    assert table(100, schedule)[:80] == table(200, schedule)[:80]


@pytest.mark.parametrize(
    ("num_steps", "schedule", "expected"),
    [
        (100, Cosine(warmup_frac=0.05), 5),
        (50, Cosine(warmup_frac=0.05), 3),  # 2.5, halves up
        (100, Cosine(warmup_frac=0), 1),
        (1, Cosine(warmup_frac=0.9), 1),
        (100, WSD(warmup_tokens=0), 1),
        (100, WSD(warmup_tokens=249), 2),
        (100, WSD(warmup_tokens=250), 3),  # 2.5, halves up
        (2, WSD(warmup_tokens=900), 2),
    ],
)
def test_warmup_steps(num_steps: int, schedule: Cosine | WSD, expected: int) -> None:
    assert warmup_steps(num_steps, 100, schedule) == expected


@pytest.mark.parametrize("step", [-1, 10])
def test_a_step_outside_the_run_is_refused(step: int) -> None:
    with pytest.raises(ValueError, match=rf"^step = {step} is not accepted; expected 0 to 9$"):
        learning_rate(step, 10, 100, 1.0, Cosine())


def recipe(num_evals: int, schedule: Cosine | WSD) -> Recipe:
    return Recipe(
        seq_len=1, batch_tokens=8, optim=Optim(lr=1.0), schedule=schedule, num_evals=num_evals, samples=Samples()
    )


def test_eval_and_sample_steps() -> None:
    assert (
        sorted(eval_steps(3, recipe(20, Cosine()))) == sorted(eval_steps(3, recipe(10_000, Cosine()))) == [0, 1, 2, 3]
    )
    assert len(eval_steps(1000, recipe(20, Cosine()))) == 21 and 1000 in eval_steps(1000, recipe(20, Cosine()))
    assert sorted(sample_steps(1000, recipe(20, Cosine()))) == [250, 500, 750, 1000]
    assert sorted(sample_steps(1, recipe(1, Cosine()))) == [1]


def test_eval_and_sample_steps_of_wsd_worked_by_hand() -> None:
    wsd = WSD(warmup_tokens=8)
    assert sorted(eval_steps(100, recipe(5, wsd))) == [0, 16, 32, 48, 64, 80, 96, 100]  # 100 / 5 = 20, hence every 16
    assert sorted(sample_steps(100, recipe(5, wsd))) == [16, 32, 48, 64, 80, 96, 100]  # 100 / 4 = 25, hence every 16
    assert sorted(eval_steps(80, recipe(5, wsd))) == [0, 16, 32, 48, 64, 80]
    assert sorted(sample_steps(80, recipe(20, wsd))) == [16, 32, 48, 64, 80]
    assert sorted(eval_steps(3, recipe(20, wsd))) == sorted(eval_steps(3, recipe(10_000, wsd))) == [0, 1, 2, 3]
    assert sorted(sample_steps(5, recipe(1, wsd))) == [4, 5] and sorted(sample_steps(1, recipe(1, wsd))) == [1]


@given(small=st.integers(1, 3_000), more=st.integers(0, 3_000), num_evals=st.integers(1, 60))
def test_points_of_wsd_budgets_are_nested_and_enough(small: int, more: int, num_evals: int) -> None:
    """So that a trunk trained for one budget was evaluated wherever a larger one needs it."""
    one = recipe(num_evals, WSD(warmup_tokens=8))
    large = small + more
    for steps in (eval_steps, sample_steps):
        assert {s for s in steps(large, one) if s < small} <= steps(small, one)
    assert sample_steps(small, one) <= eval_steps(small, one)
    assert min(num_evals, small) <= len(eval_steps(small, one)) - 1 <= 2 * num_evals


@pytest.mark.parametrize(
    ("num_steps", "schedule", "expected"),
    [
        (100, Cosine(), 0),
        (100, WSD(warmup_tokens=1_000, decay_frac=0.2), 80),
        (100, WSD(warmup_tokens=9_000, decay_frac=0.2), 90),  # the decay begins after the warm-up
        (100, WSD(warmup_tokens=10_000, decay_frac=0.2), 100),  # all of it warm-up
        (100, WSD(warmup_tokens=11_000, decay_frac=0.2), 0),  # its own, shorter warm-up
        (100, WSD(warmup_tokens=0, decay_frac=1), 1),
        (100, WSD(warmup_tokens=0, decay_frac=0), 100),
    ],
)
def test_where_a_budget_branches_off(num_steps: int, schedule: Cosine | WSD, expected: int) -> None:
    assert branch_step(num_steps, 100, schedule) == expected


@given(
    num_steps=st.integers(1, 60),
    more=st.integers(1, 60),
    schedule=st.builds(
        WSD, warmup_tokens=st.integers(0, 8_000), decay_frac=st.floats(0, 1), final_frac=st.floats(0, 0.9)
    ),
)
def test_up_to_the_branch_all_larger_budgets_have_the_same_rates(num_steps: int, more: int, schedule: WSD) -> None:
    """Oracle: the two tables of rates compared step by step."""
    branch = branch_step(num_steps, 100, schedule)
    own, larger = table(num_steps, schedule), table(num_steps + more, schedule)
    assert own[:branch] == larger[:branch]
    if schedule.decay_frac and 0 < branch < num_steps and branch_step(num_steps + more, 100, schedule) > branch:
        assert own[branch] != larger[branch]
