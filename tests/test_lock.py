"""The lock: what was declared, what may be added to it, and the state of its runs."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from equipoise.config import digest
from equipoise.errors import ConfigError, IntegrityError
from equipoise.lock import expand, lock_study, locked_runs, note_finished, read_lock, status
from equipoise.matching import resolve_arms
from equipoise.record import append_row, finish_run, has_begun, read_run, start_run
from equipoise.spec.claims import LowerClaim
from equipoise.spec.data import TextCorpus
from equipoise.spec.published import Published
from equipoise.spec.study import StudySpec


def lock(directory: Path, tiny: Any, spec: StudySpec) -> Any:
    arms = resolve_arms(spec.arms, tiny.dataset.vocab_size, spec.recipe.seq_len)
    return lock_study(directory, spec, {name: arm.model for name, arm in arms.items()}, tiny.dataset)


def begin(directory: Path, run: Any, finished: bool = False) -> None:
    start_run(directory / run.folder, run, "{}")
    append_row(directory / run.folder / "metrics.jsonl", {"kind": "train", "step": 1})
    if finished:
        finish_run(directory / run.folder, {"status": "complete", "digest": digest(run)})


def test_runs_are_arms_times_seeds_times_budgets_largest_budget_first(tiny: Any) -> None:
    spec = dataclasses.replace(tiny.spec, budgets=(5120, 10240))
    runs = expand(spec, tiny.models, tiny.dataset.digest)
    assert len(runs) == 2 * 3 * 2 and len({run.folder for run in runs}) == 12
    assert [run.folder for run in runs[:3]] == ["moe/10240-s0", "dense/10240-s0", "moe/10240-s1"]
    assert all(run.model.vocab_size == tiny.dataset.vocab_size for run in runs)
    assert [run.num_steps for run in runs][::6] == [20, 10]


def test_steps_round_half_up_and_are_at_least_one(tiny: Any) -> None:
    steps = [dataclasses.replace(tiny.runs[0], budget=b).num_steps for b in (1, 767, 768, 1279, 1280)]
    assert steps == [1, 1, 2, 2, 3]


def test_the_lock_comes_back_and_declares_the_same_runs(tiny: Any, tmp_path: Path) -> None:
    written = lock(tmp_path, tiny, tiny.spec)
    assert read_lock(tmp_path) == written
    assert locked_runs(written) == tiny.runs
    assert [record.status for record in status(tmp_path, written)] == ["missing"] * 6


def test_before_the_first_run_everything_may_change(tiny: Any, tmp_path: Path) -> None:
    lock(tmp_path, tiny, tiny.spec)
    changed = dataclasses.replace(tiny.spec, seeds=(5,), claims=())
    assert lock(tmp_path, tiny, changed).amendments == ()
    assert read_lock(tmp_path).study.seeds == (5,)


def test_a_run_that_failed_before_its_first_update_locks_nothing(tiny: Any, tmp_path: Path) -> None:
    """Its configuration, its first evaluation and a checkpoint of step 0 are there; then the study is declared anew."""
    lock(tmp_path, tiny, tiny.spec)
    place = tmp_path / tiny.runs[0].folder
    start_run(place, tiny.runs[0], "{}")
    append_row(place / "metrics.jsonl", {"kind": "eval", "step": 0})
    (place / "checkpoints" / "step-00000000").mkdir(parents=True)
    assert not has_begun(place)
    recipe = dataclasses.replace(tiny.spec.recipe, micro_sequences=1)
    changed = lock(tmp_path, tiny, dataclasses.replace(tiny.spec, recipe=recipe))
    assert changed.study.recipe.micro_sequences == 1 and changed.amendments == ()
    start_run(place, locked_runs(changed)[0], "{}")
    assert read_run(place).config == locked_runs(changed)[0]


@pytest.mark.parametrize("trace", ["row", "checkpoint", "corrupt", "torn", "summary"])
def test_any_trace_of_an_update_locks_the_study(tiny: Any, tmp_path: Path, trace: str) -> None:
    lock(tmp_path, tiny, tiny.spec)
    place = tmp_path / "moe" / "trunk-s0"  # updates that budgets share are updates
    place.mkdir(parents=True)
    if trace in ("row", "torn"):
        append_row(place / "metrics.jsonl", {"kind": "train", "step": 1})
        if trace == "torn":
            (place / "metrics.jsonl").write_bytes((place / "metrics.jsonl").read_bytes()[:-3])
    elif trace == "summary":
        (place / "summary.json").write_text("{}", encoding="utf-8")
    else:
        (place / "checkpoints" / ("corrupt-" * (trace == "corrupt") + "step-00000003")).mkdir(parents=True)
    with pytest.raises(ConfigError, match="seeds: 2 was removed"):
        lock(tmp_path, tiny, dataclasses.replace(tiny.spec, seeds=(0, 1)))


def test_text_that_has_moved_changes_no_byte_of_the_lock(tiny: Any, tmp_path: Path) -> None:
    """So that a study goes on from a committed copy, wherever its text lies there."""
    here = dataclasses.replace(tiny.spec, corpus=TextCorpus(path="stories"))
    lock(tmp_path, tiny, here)
    begin(tmp_path, tiny.runs[0])
    before = (tmp_path / "lock.json").read_bytes()
    lock(tmp_path, tiny, dataclasses.replace(tiny.spec, corpus=TextCorpus(path="/elsewhere/texts")))
    assert (tmp_path / "lock.json").read_bytes() == before
    moved = dataclasses.replace(here, corpus=TextCorpus(path="/elsewhere/texts"), seeds=(*here.seeds, 9))
    assert lock(tmp_path, tiny, moved).study == dataclasses.replace(here, seeds=(*here.seeds, 9))
    with pytest.raises(ConfigError, match=r'corpus\.field: "text" → "body"'):
        lock(tmp_path, tiny, dataclasses.replace(here, corpus=TextCorpus(path="stories", field="body")))


def test_what_has_begun_may_grow_but_not_change(tiny: Any, tmp_path: Path) -> None:
    first = lock(tmp_path, tiny, tiny.spec)
    begin(tmp_path, tiny.runs[0])
    recipe = dataclasses.replace(tiny.spec.recipe, optim=dataclasses.replace(tiny.spec.recipe.optim, lr=1e-2))
    claim = dataclasses.replace(tiny.spec.claims[0], margin=0.1)
    for changed, line in (
        (dataclasses.replace(tiny.spec, recipe=recipe), r"recipe\.optim\.lr: 0\.003 → 0\.01"),
        (dataclasses.replace(tiny.spec, seeds=(0, 1)), r"seeds: 2 was removed"),
        (dataclasses.replace(tiny.spec, claims=(claim,)), r"claims\.moe-lower\.margin: 0\.0 → 0\.1"),
        (dataclasses.replace(tiny.spec, claims=()), r"claims\.moe-lower: was removed"),
        (dataclasses.replace(tiny.spec, alpha=0.1), r"alpha: 0\.05 → 0\.1"),
        (dataclasses.replace(tiny.spec, arms={"moe": tiny.spec.arms["moe"]}, claims=()), r"arms\.dense: was removed"),
    ):
        with pytest.raises(ConfigError, match=line):
            lock(tmp_path, tiny, changed)
        assert read_lock(tmp_path) == first
    words = dataclasses.replace(tiny.spec, question="another wording")
    assert lock(tmp_path, tiny, words).amendments == ()
    beside = dataclasses.replace(tiny.spec, published=(Published(arm="moe", mean=1.5, source="a paper"),))
    assert lock(tmp_path, tiny, beside).amendments == ()
    assert read_lock(tmp_path).study.published == beside.published


def test_additions_are_dated_and_post_hoc_only_after_a_finished_run(tiny: Any, tmp_path: Path) -> None:
    lock(tmp_path, tiny, tiny.spec)
    begin(tmp_path, tiny.runs[0])
    more = dataclasses.replace(tiny.spec, seeds=(0, 1, 2, 3))
    early = lock(tmp_path, tiny, more)
    assert early.amendments[0]["added"] == {"seeds": [3]} and early.post_hoc("seeds") == []
    begin(tmp_path, tiny.runs[0], finished=True)
    claim = LowerClaim(id="late", left="dense", right="moe")
    late = lock(tmp_path, tiny, dataclasses.replace(more, seeds=(0, 1, 2, 3, 4), claims=(*more.claims, claim)))
    assert late.post_hoc("seeds") == [4] and late.post_hoc("claims") == ["late"]
    assert late.amendments[0] == early.amendments[0] and late.amendments[1]["date"].startswith("20")
    assert late.created == early.created


def test_an_altered_or_absent_lock_is_refused(tiny: Any, tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match=r"no lock\.json there"):
        read_lock(tmp_path)
    lock(tmp_path, tiny, tiny.spec)
    stored = json.loads((tmp_path / "lock.json").read_text(encoding="utf-8"))
    stored["study"]["claims"][0]["margin"] = 0.5
    (tmp_path / "lock.json").write_text(json.dumps(stored), encoding="utf-8")
    with pytest.raises(IntegrityError, match="digest does not match"):
        read_lock(tmp_path)


def test_a_lock_written_before_a_field_existed_is_still_itself(tiny: Any, tmp_path: Path) -> None:
    lock(tmp_path, tiny, tiny.spec)
    stored = json.loads((tmp_path / "lock.json").read_text(encoding="utf-8"))
    del stored["study"]["published"]
    names = ("study", "models", "data", "first_finished", "amendments")
    stored["digest"] = digest({name: stored[name] for name in names})
    (tmp_path / "lock.json").write_text(json.dumps(stored), encoding="utf-8")
    assert read_lock(tmp_path).study == tiny.spec
    begin(tmp_path, tiny.runs[0])
    assert lock(tmp_path, tiny, tiny.spec).amendments == ()


def test_other_data_is_refused(tiny: Any, tmp_path: Path) -> None:
    lock(tmp_path, tiny, tiny.spec)
    begin(tmp_path, tiny.runs[0])
    other = dataclasses.replace(tiny.dataset, info={**tiny.dataset.info, "digest": "0" * 64})
    with pytest.raises(ConfigError, match="the data changed"):
        lock_study(tmp_path, tiny.spec, tiny.models, other)


def test_the_corpus_may_move_while_its_content_stays(tiny: Any, tmp_path: Path) -> None:
    here = dataclasses.replace(tiny.spec, corpus=TextCorpus(path="here"))
    lock(tmp_path, tiny, here)
    begin(tmp_path, tiny.runs[0])
    there = dataclasses.replace(tiny.spec, corpus=TextCorpus(path="there"))
    assert lock(tmp_path, tiny, there).amendments == ()
    other = dataclasses.replace(tiny.spec, corpus=TextCorpus(path="there", field="body"))
    with pytest.raises(ConfigError, match=r'corpus\.field: "text" → "body"'):
        lock(tmp_path, tiny, other)


def test_a_directory_that_holds_another_run_is_broken_and_says_how(tiny: Any, tmp_path: Path) -> None:
    """A finished run copied into another's place is not taken for it."""
    locked = lock(tmp_path, tiny, tiny.spec)
    begin(tmp_path, tiny.runs[0], finished=True)
    place = tmp_path / "moe" / "5120-s1"
    shutil.copytree(tmp_path / tiny.runs[0].folder, place)
    records = {record.directory: record for record in status(tmp_path, locked)}
    assert records[tmp_path / tiny.runs[0].folder].status == "complete"
    assert records[place].status == "broken" and records[place].summary is None
    assert records[place].fault == "holds another run (seed: 1 → 0)"
    assert records[place].locked is not None and records[place].locked.seed == 1


def test_that_a_run_was_finished_is_never_forgotten(tiny: Any, tmp_path: Path) -> None:
    """Deleting or breaking every run afterwards neither unlocks the study nor lets an addition into the family."""
    lock(tmp_path, tiny, tiny.spec)
    begin(tmp_path, tiny.runs[0], finished=True)
    assert note_finished(tmp_path).first_finished is not None
    shutil.rmtree(tmp_path / "moe")
    with pytest.raises(ConfigError, match=r"alpha: 0\.05 → 0\.1"):
        lock(tmp_path, tiny, dataclasses.replace(tiny.spec, alpha=0.1))
    late = lock(tmp_path, tiny, dataclasses.replace(tiny.spec, seeds=(0, 1, 2, 3)))
    assert late.post_hoc("seeds") == [3]


def test_a_lock_of_another_format_is_refused(tiny: Any, tmp_path: Path) -> None:
    lock(tmp_path, tiny, tiny.spec)
    stored = json.loads((tmp_path / "lock.json").read_text(encoding="utf-8"))
    (tmp_path / "lock.json").write_text(json.dumps({**stored, "schema_version": 2}), encoding="utf-8")
    with pytest.raises(IntegrityError, match="schema_version 2; expected 1"):
        read_lock(tmp_path)
