"""Whole checkpoints whose state was altered and sealed again: a run never goes on from them, and says why in a line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.checkpoint import TrainState
from equipoise.record import mark_rows
from equipoise.session import Progress, _fault
from equipoise.spec.recipe import Optim, Recipe

from .conftest import HOSTILE, altered, json_values

RECIPE = Recipe(seq_len=4, batch_tokens=96, balance_group=4, optim=Optim(lr=1e-3))  # 24 sequences, 6 groups


def state_of(directory: Path, **changed: Any) -> dict[str, Any]:
    """The state of a checkpoint at step 3 of a run whose row files are empty."""
    progress = dataclasses.asdict(Progress(step=3, last_eval=0))
    state = {"progress": progress, "rows": mark_rows(directory), "environments": [{"torch": "2"}], "branch": None}
    return json.loads(json.dumps({**state, **changed}))  # type: ignore[no-any-return]


def fault(directory: Path, state: Any) -> str | None:
    return _fault(directory, TrainState(step=3, run="r", model={}, optim={}, state=state), RECIPE)


@pytest.mark.parametrize("micro", [0, 4, 8, 12, 24])
def test_a_state_as_it_was_saved_is_gone_on_from(tmp_path: Path, micro: int) -> None:
    progress = dataclasses.asdict(Progress(step=3, last_eval=0, micro_sequences=micro))
    assert fault(tmp_path, state_of(tmp_path, progress=progress)) is None
    older = state_of(tmp_path)
    del older["environments"], older["branch"]
    assert fault(tmp_path, older) is None


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"environments": {}}, "environments: {} is not accepted; expected a valid list"),
        ({"environments": ["x"]}, 'environments.0: "x" is not accepted; expected a valid dictionary'),
        ({"branch": {"step": 1}}, "branch.checkpoint: missing"),
        ({"rows": {}}, "rows.metrics.jsonl: missing"),
        ({"progress": {"step": 4}}, "progress is not that of step 3"),
        *(
            ({"progress": {"step": 3, "micro_sequences": micro}}, f"micro_sequences: {micro} is not accepted; expected")
            for micro in (-4, 2, 6, 16, 48, 10**12)
        ),
    ],
)
def test_what_no_run_has_saved_is_named(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    message = fault(tmp_path, state_of(tmp_path, **changed))
    assert message is not None
    assert message.startswith(f"{tmp_path}/checkpoints/step-00000003/state.json: ")
    assert said in message


@HOSTILE
@given(data=st.data())
def test_any_state_is_accepted_or_refused_in_one_line(tmp_path: Path, data: st.DataObject) -> None:
    message = fault(tmp_path, data.draw(st.one_of(altered(state_of(tmp_path)), json_values)))
    assert message is None or message.isprintable()
