"""Co-activation, top tokens, followed choices: against double loops over made-up routings."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from equipoise import specialisation
from equipoise.rng import stream
from equipoise.routing import chosen, packed, saturation, unpacked
from equipoise.specialisation import MIN_OCCURRENCES, TOP_TOKENS, Followed, coactivation, new_uses, top_tokens

L, E, K, V = 2, 7, 3, 11


def choices(num_tokens: int, *keys: int) -> np.ndarray:
    """K different experts a token, [T, K]."""
    return stream(3, "sample", *keys).random((num_tokens, E)).argsort(axis=1)[:, :K]


def batches() -> list[tuple[np.ndarray, list[np.ndarray]]]:
    return [
        (stream(5, "data", size).integers(0, V, size), [choices(size, layer, size) for layer in range(L)])
        for size in (13, 1, 181)
    ]


def test_sums_and_coactivation_against_double_loops() -> None:
    uses = new_uses(L, E, V)
    for inputs_T, ids_LTK in batches():
        uses.add(inputs_T, ids_LTK)
    for layer in range(L):
        together = [[0] * E for _ in range(E)]
        tokens = [[0] * V for _ in range(E)]
        for inputs_T, ids_LTK in batches():
            for token, ids_K in zip(inputs_T.tolist(), ids_LTK[layer].tolist(), strict=True):
                for one in ids_K:
                    tokens[one][token] += 1
                    for other in ids_K:
                        together[one][other] += 1
        assert uses.together_LEE[layer].tolist() == together
        assert uses.tokens_LEV[layer].tolist() == tokens
        expected = [[together[i][j] / together[i][i] for j in range(E)] for i in range(E)]
        assert coactivation(uses.together_LEE[layer]) == pytest.approx(np.array(expected))
    assert uses.seen_V.sum() == 195


def test_an_expert_nobody_chose_has_an_empty_row() -> None:
    assert coactivation(np.array([[0, 0], [0, 3]])).tolist() == [[0, 0], [0, 1]]


def test_top_tokens_worked_by_hand(monkeypatch: Any) -> None:
    monkeypatch.setattr(specialisation, "TOP_TOKENS", 3)
    seen_V = np.array([100, 20, 40, MIN_OCCURRENCES - 1, 10, 30])
    first = [10, 20, 40, 9, 5, 12]  # shares .1, 1, 1, rare, .5, .4; in all 96 of 209: .459
    second = [90, 0, 0, 0, 5, 18]
    assert top_tokens(np.array([first, second, [0] * 6]), seen_V) == [
        [(2, 1.0, 40), (1, 1.0, 20), (4, 0.5, 10)],
        [(0, 0.9, 100), (5, 0.6, 30)],  # .5 does not exceed 113 of 209
        [],
    ]


def test_at_most_so_many_tokens_are_named() -> None:
    seen_V = np.full(40, 10)
    (row,) = top_tokens(np.array([[10] * 30 + [0] * 10]), seen_V)
    assert [index for index, *_ in row] == list(range(TOP_TOKENS))


def test_tables_are_plain_values_with_names() -> None:
    uses = new_uses(L, E, V)
    for inputs_T, ids_LTK in batches():
        uses.add(inputs_T, ids_LTK)
    tables = uses.tables(lambda index: f"t{index}")
    assert json.loads(json.dumps(tables)) == tables and len(tables) == L
    assert {len(table["coactivation"]) for table in tables} == {len(tables[0]["top_tokens"])} == {E}
    named = [one for table in tables for expert in table["top_tokens"] for one in expert]
    assert named and all(one["token"] in {f"t{index}" for index in range(V)} for one in named)
    assert all(one["count"] >= MIN_OCCURRENCES and K / E * 0.5 < one["share"] <= 1 for one in named)


def test_a_dense_model_has_no_layers() -> None:
    uses = new_uses(0, 0, V)
    uses.add(np.array([1, 2]), [])
    assert uses.tables(str) == []


# ------------------------------------------------------------------------------------------------ saturation


def test_saturation_against_a_double_loop() -> None:
    early, final = choices(53, 1), choices(53, 2)
    same = 0
    for one, other in zip(early.tolist(), final.tolist(), strict=True):
        for expert in one:
            same += expert in other
    assert saturation(chosen(early, E), chosen(final, E)) == pytest.approx(same / (53 * K))
    assert saturation(chosen(final, E), chosen(final, E)) == 1.0


@pytest.mark.parametrize("num_experts", [1, 3, 8, 17])
@pytest.mark.parametrize("num_tokens", [0, 1, 5, 64])
def test_packed_choices_come_back(num_tokens: int, num_experts: int) -> None:
    kept = stream(num_tokens, "sample", num_experts).random((num_tokens, num_experts)) < 0.3
    assert unpacked(packed(kept), num_tokens, num_experts).tolist() == kept.tolist()


def test_choices_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^choices of 2 bytes; expected 3 for 5 × 4$"):
        unpacked(packed(np.ones((4, 4), np.bool_)), 5, 4)


def test_the_first_tokens_are_followed(monkeypatch: Any) -> None:
    monkeypatch.setattr(specialisation, "FOLLOWED_TOKENS", 20)
    followed = Followed(num_experts=E, ids=[])
    for inputs_T, ids_LTK in batches():
        followed.add(inputs_T, ids_LTK)
    row = followed.row()
    assert row["tokens"] == 20 and len(row["layers"]) == L
    for layer, text in enumerate(row["layers"]):
        every = [ids for _, ids_LTK in batches() for ids in ids_LTK[layer].tolist()]
        found = unpacked(text, 20, E)
        assert [set(np.flatnonzero(row_E).tolist()) for row_E in found] == [set(ids) for ids in every[:20]]


def test_nothing_is_followed_in_a_dense_model() -> None:
    followed = Followed(num_experts=0, ids=[])
    followed.add(np.arange(9), [])
    assert followed.row() == {"tokens": 9, "layers": []}
