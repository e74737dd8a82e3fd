"""Windows: every training window once an epoch, every evaluated token a target once, and floors by hand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from equipoise.data.corpora import SPLITS
from equipoise.data.dataset import Dataset, log_probs_path
from equipoise.data.packing import EvalWindows, batch, check_windows, epochs, eval_windows, num_windows
from equipoise.data.tokenfile import TokenWriter
from equipoise.data.tokenizer import train_tokenizer
from equipoise.errors import DataError
from equipoise.spec.data import ByteTokenizer

BYTES = train_tokenizer(ByteTokenizer(), iter(()))


def made(directory: Path, texts: list[str], log_probs: list[tuple[float, float]] | None = None) -> Dataset:
    """A data set of plain bytes whose three splits all hold these texts."""
    directory.mkdir(exist_ok=True)
    (directory / "tokenizer.json").write_text(BYTES.to_json(), encoding="utf-8")
    for split in SPLITS:
        writer = TokenWriter(directory / f"{split}.tokens", 257, BYTES.digest, "00" * 32)
        for text in texts:
            writer.add(np.array([*BYTES.encode(text), 0]), 1, len(text.encode()))
        writer.close()
        if log_probs is not None:
            np.save(log_probs_path(directory, split), np.array(log_probs).T)
    return Dataset(directory=directory, info={"vocab_size": 257, "eot_id": 0, "digest": ""})


# ------------------------------------------------------------------------------------------------ training


@settings(max_examples=60)
@given(
    num_tokens=st.integers(5, 90),
    seq_len=st.integers(1, 7),
    num_sequences=st.integers(1, 9),
    seed=st.integers(0, 3),
    dtype=st.sampled_from([np.uint16, np.uint32]),
)
def test_every_window_once_an_epoch(num_tokens: int, seq_len: int, num_sequences: int, seed: int, dtype: type) -> None:
    """Against a list of all windows, one epoch after another, batches running across the border."""
    tokens = np.arange(1000, 1000 + num_tokens).astype(dtype)  # each id tells its place
    windows = num_windows(num_tokens, seq_len)
    if windows == 0:
        with pytest.raises(DataError):
            batch(tokens, seq_len, num_sequences, seed, 0)
        return
    steps = math.ceil(3 * windows / num_sequences)
    starts: list[int] = []
    for step in range(steps):
        inputs_BS, targets_BS = batch(tokens, seq_len, num_sequences, seed, step)
        assert inputs_BS.shape == targets_BS.shape == (num_sequences, seq_len)
        assert inputs_BS.dtype == targets_BS.dtype == np.int64
        for row in range(num_sequences):
            start = int(inputs_BS[row, 0]) - 1000
            assert inputs_BS[row].tolist() == tokens[start : start + seq_len].tolist()
            assert targets_BS[row].tolist() == tokens[start + 1 : start + seq_len + 1].tolist()
            starts.append(start)
    for epoch in range(3):
        once = starts[epoch * windows : (epoch + 1) * windows]
        assert sorted(once) == [i * seq_len for i in range(windows)]


def test_a_batch_is_a_pure_function() -> None:
    tokens = np.arange(5000, dtype=np.uint16)
    steps = [7, 0, 400, 7, 3, 0]
    got = [batch(tokens, 8, 16, 1, step)[0] for step in steps]
    assert np.array_equal(got[0], got[3]) and np.array_equal(got[1], got[5])
    got[0][:] = -1  # what a caller does with it does not come back
    assert np.array_equal(batch(tokens, 8, 16, 1, 7)[0], got[3])
    assert not np.array_equal(batch(tokens, 8, 16, 2, 7)[0], got[3])
    first, second = (batch(tokens, 8, 624, 1, step)[0] for step in (0, 1))  # two whole epochs
    assert not np.array_equal(first, second)
    assert np.array_equal(np.sort(first[:, 0]), np.sort(second[:, 0]))


def test_a_batch_larger_than_the_data() -> None:
    inputs_BS, _ = batch(np.arange(7, dtype=np.uint16), 2, 10, 0, 1)  # 3 windows: epochs 3 to 6
    assert sorted(inputs_BS[2:5, 0].tolist()) == sorted(inputs_BS[5:8, 0].tolist()) == [0, 2, 4]


def test_batches_are_contiguous_for_torch() -> None:
    assert all(array.flags.c_contiguous and array.flags.writeable for array in batch(np.arange(99), 4, 3, 0, 0))


def test_counts_by_hand() -> None:
    assert [num_windows(n, 4) for n in (0, 1, 4, 5, 8, 9, 13)] == [0, 0, 0, 1, 1, 2, 3]
    assert epochs(80, 9, 4) == 10
    assert epochs(4, 13, 4) == pytest.approx(1 / 3)


def test_too_few_tokens_are_refused(tmp_path: Path) -> None:
    dataset = made(tmp_path / "d", ["abc", "def"])
    check_windows(dataset, 7)
    with pytest.raises(DataError) as caught:
        check_windows(dataset, 8)
    assert str(caught.value) == (
        f"{dataset.directory}: 8 training tokens; expected at least 9, "
        "one window of recipe.seq_len = 8 and its last target"
    )
    with pytest.raises(DataError) as caught:
        batch(dataset.tokens("train"), 8, 1, 0, 0)
    assert str(caught.value) == "8 tokens; expected at least 9 for a window of 8"
    TokenWriter(tmp_path / "d" / "validation.tokens", 257, BYTES.digest, "00" * 32).close()
    with pytest.raises(DataError) as caught:
        check_windows(dataset, 4)
    assert str(caught.value) == f"{dataset.directory}: the validation split is empty; expected at least one document"


# ------------------------------------------------------------------------------------------------ evaluation


def units_by_walking(windows: EvalWindows) -> dict[int, list[int]]:
    """Targets of every unit, found position by position; checks inputs, order and padding on the way."""
    units: dict[int, list[int]] = {}
    for inputs, targets, unit_of in zip(windows.inputs_WS, windows.targets_WS, windows.unit_WS, strict=True):
        assert inputs[0] == 0
        before = -2
        for place, (target, unit) in enumerate(zip(targets.tolist(), unit_of.tolist(), strict=True)):
            if place:
                assert inputs[place] == targets[place - 1]
            if unit == -1:
                assert target == 0
            elif unit != before:
                assert unit not in units  # a unit lies in one piece
                assert before != -1  # padding only at the end of a row
                units[unit] = [target]
            else:
                units[unit].append(target)
            before = unit
        assert unit_of[0] != -1
    return units


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(st.text("aé中", min_size=1, max_size=12), min_size=1, max_size=12),
    seq_len=st.integers(1, 20),
    max_targets=st.integers(0, 60),
    seed=st.integers(0, 2),
)
def test_every_token_is_a_target_once(
    tmp_path: Path, texts: list[str], seq_len: int, max_targets: int, seed: int
) -> None:
    dataset = made(tmp_path / "d", texts)
    windows = eval_windows(dataset, "validation", seq_len, max_targets, seed)
    units = units_by_walking(windows)
    assert sorted(units) == list(range(windows.num_units))
    pieces = [  # the stupid way: a document after the other, cut into pieces
        (document, ids[start : start + seq_len])
        for document, ids in enumerate([*BYTES.encode(text), 0] for text in texts)
        for start in range(0, len(ids), seq_len)
    ]
    got = [(int(windows.unit_document_U[unit]), units[unit]) for unit in range(windows.num_units)]
    if max_targets == 0:
        assert got == pieces
        assert windows.num_bytes == sum(len(text.encode()) for text in texts)
    else:
        remaining = list(pieces)
        for unit in got:
            remaining.remove(unit)  # each at most as often as it is there
        assert got == sorted(got, key=lambda pair: pair[0])
        if windows.num_targets > max_targets:
            assert windows.num_units == 1
        elif remaining:  # another one would have passed it
            assert windows.num_targets + max(len(ids) for _, ids in remaining) > max_targets
    assert windows.unit_tokens_U.tolist() == [len(ids) for _, ids in got]
    assert windows.unit_bytes_U.tolist() == [sum(1 for i in ids if i) for _, ids in got]
    assert windows.num_targets == int(windows.unit_tokens_U.sum()) == int((windows.unit_WS >= 0).sum())
    assert windows.num_bytes == int(windows.unit_bytes_U.sum())
    assert windows.inputs_WS.dtype == windows.targets_WS.dtype == windows.unit_WS.dtype == np.int64
    again = eval_windows(dataset, "validation", seq_len, max_targets, seed)
    assert all(np.array_equal(getattr(windows, n), getattr(again, n)) for n in ("inputs_WS", "targets_WS", "unit_WS"))


def test_windows_by_hand(tmp_path: Path) -> None:
    """S = 5: "abcdefg" (8 targets) is cut into 5 and 3; "xy" (3) and "z" (2) find room."""
    dataset = made(tmp_path / "d", ["xy", "abcdefg", "z"])
    windows = eval_windows(dataset, "validation", 5, 0, 0)
    a, x = 0x61 + 1, 0x78 + 1
    assert windows.targets_WS.tolist() == [
        [a, a + 1, a + 2, a + 3, a + 4],
        [x, x + 1, 0, x + 2, 0],
        [a + 5, a + 6, 0, 0, 0],
    ]
    assert windows.inputs_WS.tolist() == [
        [0, a, a + 1, a + 2, a + 3],
        [0, x, x + 1, 0, x + 2],
        [0, a + 5, a + 6, 0, 0],
    ]
    assert windows.unit_WS.tolist() == [[1, 1, 1, 1, 1], [0, 0, 0, 3, 3], [2, 2, 2, -1, -1]]
    assert windows.unit_document_U.tolist() == [0, 1, 1, 2]
    assert windows.unit_tokens_U.tolist() == [3, 5, 3, 2]
    assert windows.unit_bytes_U.tolist() == [2, 5, 2, 1]
    assert (windows.num_targets, windows.num_bytes, windows.floor) == (13, 10, None)


def test_the_choice_is_seeded_and_stops_before_passing(tmp_path: Path) -> None:
    dataset = made(tmp_path / "d", [f"{i:03}" for i in range(200)])  # 4 targets each
    chosen = [eval_windows(dataset, "validation", 16, 50, seed) for seed in (0, 0, 1)]
    assert [w.num_targets for w in chosen] == [48, 48, 48]
    assert np.array_equal(chosen[0].unit_document_U, chosen[1].unit_document_U)
    assert not np.array_equal(chosen[0].unit_document_U, chosen[2].unit_document_U)
    assert eval_windows(dataset, "validation", 16, 1, 0).num_targets == 4  # at least one
    assert eval_windows(dataset, "validation", 16, 800, 0).num_units == 200
    more = eval_windows(dataset, "validation", 16, 100, 0)
    assert set(chosen[0].unit_document_U.tolist()) < set(more.unit_document_U.tolist())


def test_little_is_padding(tmp_path: Path) -> None:
    lengths = np.random.Generator(np.random.Philox(0)).integers(40, 120, 500).tolist()
    windows = eval_windows(made(tmp_path / "d", ["a" * n for n in lengths]), "validation", 256, 0, 0)
    assert windows.num_targets / windows.unit_WS.size > 0.95


def test_floors_by_hand(tmp_path: Path) -> None:
    """Two documents of 3 and 5 targets (2 and 4 bytes): the ratio and its standard error worked out."""
    log_probs = [(-2.0, -1.0), (-5.0, -0.5)]
    dataset = made(tmp_path / "d", ["ab", "cdef"], log_probs)
    floor = eval_windows(dataset, "validation", 8, 0, 0).floor
    assert floor is not None
    assert floor.num_documents == 2
    assert floor.loss == pytest.approx(8.5 / 8)
    rest = (3.0 - 3 * 8.5 / 8) ** 2 + (5.5 - 5 * 8.5 / 8) ** 2
    assert floor.loss_se == pytest.approx(math.sqrt(2 * rest) / 8)
    assert floor.bpb == pytest.approx(7 / math.log(2) / 6)
    rest = ((2 - 2 * 7 / 6) ** 2 + (5 - 4 * 7 / 6) ** 2) / math.log(2) ** 2
    assert floor.bpb_se == pytest.approx(math.sqrt(2 * rest) / 6)
    alone = eval_windows(dataset, "validation", 8, 1, 0)
    assert alone.floor is not None
    document = int(alone.unit_document_U[0])
    assert alone.floor.loss == pytest.approx([1.0, 1.1][document])
    assert (alone.floor.loss_se, alone.floor.bpb_se, alone.floor.num_documents) == (None, None, 1)


def test_no_floor_where_a_document_does_not_fit(tmp_path: Path) -> None:
    dataset = made(tmp_path / "d", ["ab", "cdef"], [(-2.0, -1.0), (-5.0, -0.5)])
    assert eval_windows(dataset, "validation", 5, 0, 0).floor is not None
    assert eval_windows(dataset, "validation", 4, 0, 0).floor is None
    assert eval_windows(dataset, "validation", 4, 1, 0).floor is None
    assert eval_windows(made(tmp_path / "e", ["ab"]), "validation", 8, 0, 0).floor is None


def test_the_standard_error_covers(tmp_path: Path) -> None:
    """Over repeated sets of documents, the floor scatters as its standard error says."""
    rng = np.random.Generator(np.random.Philox(3))
    losses, errors = [], []
    for trial in range(60):
        lengths = rng.integers(5, 40, 50)
        log_probs = [(-float(n * 0.5 + rng.normal()), -1.0) for n in lengths]
        floor = eval_windows(
            made(tmp_path / str(trial), ["a" * n for n in lengths], log_probs), "validation", 64, 0, 0
        ).floor
        assert floor is not None and floor.loss_se is not None
        losses.append(floor.loss)
        errors.append(floor.loss_se)
    assert np.std(losses, ddof=1) == pytest.approx(np.mean(errors), rel=0.35)
