"""Records in another folder: which, what of paths, what is refused; branches that are there need no trunk."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from equipoise.archive import archive, relative, without_places
from equipoise.config import read_toml
from equipoise.errors import IntegrityError
from equipoise.files import read_json, seal, write_json
from equipoise.lock import lock_study, note_finished, read_lock, status, write_lock
from equipoise.results import collect, write_results
from equipoise.spec.data import TextCorpus
from equipoise.spec.study import parse_study
from equipoise.train import train, train_trunk
from equipoise.trunk import TrunkConfig
from equipoise.work import first_tasks, next_tasks, work_left


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/home/ada/texts", "texts"),
        ("/data", "data"),
        ("/data/", "data/"),
        ("C:\\Users\\ada\\texts", "texts"),
        ("texts/of mine", "texts/of mine"),
        ("../texts", "../texts"),
        ("~/texts", "~/texts"),
        ("https://example.org/a/b", "https://example.org/a/b"),
        ("--out=/scratch/ada/runs", "--out=runs"),
        ('corpus={kind="text", path="/home/ada/texts"}', 'corpus={kind="text", path="texts"}'),
        ("/a/b:/c/d", "b:d"),
        ("equipoise run 1/2 --jobs 2", "equipoise run 1/2 --jobs 2"),
    ],
)
def test_absolute_paths_are_cut_to_their_last_part(text: str, expected: str) -> None:
    assert relative(text) == expected and relative(expected) == expected


def test_a_lock_forgets_where_things_lay_and_nothing_else(begun: Any) -> None:
    command = "equipoise run s.toml --set 'corpus.path=\"/home/ada/texts\"' --cache /tmp/cache"
    study = dataclasses.replace(read_lock(begun.directory).study, corpus=TextCorpus(path="/home/ada/texts"))
    lock = dataclasses.replace(read_lock(begun.directory), study=study, command=command)
    cut = without_places(lock)
    assert cut.command == "equipoise run s.toml --set 'corpus.path=\"texts\"' --cache cache"
    assert cut.study.corpus == TextCorpus(path="texts")
    assert dataclasses.replace(cut, study=study, command=command) == lock
    assert without_places(read_lock(begun.directory)) == read_lock(begun.directory)
    assert without_places(dataclasses.replace(lock, command="it's /tmp/x")).command == "it's x"


def test_finished_runs_are_copied_and_the_lock_says_when_the_first_was(begun: Any, tmp_path: Path) -> None:
    whole, diverged, started = begun.runs[:3]
    begun.finish(whole, "complete")
    begun.finish(diverged, "diverged")
    begun.rows(started, 3)
    os.utime(begun.directory / whole.folder / "summary.json", (1000, 1000))
    before = (begun.directory / "lock.json").read_bytes()
    done = archive(begun.directory, tmp_path / "copy")
    assert set(done.copied) == {whole.folder, diverged.folder} and done.kept == ()
    assert set(done.left) == {run.folder for run in begun.runs} - set(done.copied)
    assert not (tmp_path / "copy" / started.folder).exists()
    assert read_lock(tmp_path / "copy").first_finished == "1970-01-01T00:16:40+00:00"
    assert (begun.directory / "lock.json").read_bytes() == before, "the study itself is only read"
    assert read_lock(tmp_path / "copy") == note_finished(begun.directory)
    begun.finish(begun.runs[3], "complete")
    later = archive(begun.directory, tmp_path / "copy")
    assert later.copied == (begun.runs[3].folder,) and set(later.kept) == set(done.copied)


def test_another_outcome_and_a_broken_copy_are_refused_before_anything_is_written(begun: Any, tmp_path: Path) -> None:
    first, second = begun.runs[:2]
    for run in (first, second):
        begun.finish(run, "complete")
    archive(begun.directory, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / second.folder)
    there = tmp_path / "copy" / first.folder / "summary.json"
    kept = there.read_bytes()
    summary = read_json(there)
    del summary["self_digest"]
    write_json(there, seal({**summary, "train_s": 1e6}))
    with pytest.raises(IntegrityError, match=f"{first.folder}: holds another outcome of this run than .*; delete the"):
        archive(begun.directory, tmp_path / "copy")
    there.write_bytes(kept[:-10])
    with pytest.raises(IntegrityError, match=f"{first.folder}: broken .*; delete it, and it is copied anew"):
        archive(begun.directory, tmp_path / "copy")
    assert not (tmp_path / "copy" / second.folder).exists()


def test_a_copy_of_another_study_is_refused(begun: Any, tmp_path: Path) -> None:
    archive(begun.directory, tmp_path / "copy")
    lock = read_lock(begun.directory)
    write_lock(begun.directory, dataclasses.replace(lock, created="2026-01-01T00:00:00+00:00"))
    with pytest.raises(
        IntegrityError, match=r"copy: holds another study, tiny locked 20.*; expected a copy of tiny lock"
    ):
        archive(begun.directory, tmp_path / "copy")
    changed = dataclasses.replace(lock, study=dataclasses.replace(lock.study, alpha=0.01))
    write_lock(begun.directory, changed)
    with pytest.raises(IntegrityError, match=r"copy: not an earlier state of this study \(alpha: 0.05 → 0.01\)"):
        archive(begun.directory, tmp_path / "copy")


@pytest.mark.parametrize("name", ["../stolen", "folder/file"])
def test_a_summary_that_names_files_elsewhere_is_refused(begun: Any, tmp_path: Path, name: str) -> None:
    run = begun.runs[0]
    begun.finish(run, "complete")
    place = begun.directory / run.folder
    (place / name).parent.mkdir(exist_ok=True)
    (place / name).touch()
    summary = read_json(place / "summary.json")
    del summary["self_digest"]
    empty = {"bytes": 0, "sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"}
    write_json(place / "summary.json", seal({**summary, "files": {**summary["files"], name: empty}}))
    with pytest.raises(IntegrityError, match=f'summary.json: files: "{name}"; expected names of files'):
        archive(begun.directory, tmp_path / "copy")
    assert not list(tmp_path.glob("copy/**/stolen"))


def test_a_copy_of_branches_needs_no_trunk_until_one_is_missing(tiny: Any, tiny_toml: str, tmp_path: Path) -> None:
    text = tiny_toml[: tiny_toml.index("[arms.dense]")].replace("budgets = [5120]", "budgets = [2048, 4096]")
    text = text.replace("optim =", 'schedule = { kind = "wsd", warmup_tokens = 512 }\noptim =').replace("2]", "2]", 1)
    spec = parse_study(read_toml(text.replace("seeds = [0, 1, 2]", "seeds = [0]"), "tiny"))
    models = {"moe": tiny.models["moe"]}
    lock = lock_study(tmp_path / "study", spec, models, tiny.dataset)

    def execute(directory: Path) -> list[str]:
        said, tokenizer = list[str](), tiny.dataset.tokenizer().to_json()
        tasks = first_tasks(directory, work_left(directory, status(directory, lock), said.append), tokenizer)
        done = []
        while tasks:
            task = tasks.pop(0)
            (train_trunk if isinstance(task.run, TrunkConfig) else train)(task.run, task.directory, tiny.dataset)
            tasks += next_tasks(directory, task, tokenizer, said.append)
            done.append(task.run.folder)
        assert not said
        return done

    assert execute(tmp_path / "study") == ["moe/trunk-s0", "moe/4096-s0", "moe/2048-s0"]
    copy = tmp_path / "copy"
    archive(tmp_path / "study", copy)
    assert not list(copy.rglob("*.safetensors.tmp")) and not (copy / "moe/trunk-s0").exists()
    assert {path.name for path in copy.rglob("*.safetensors")} == {"val_losses.safetensors"}
    assert execute(copy) == []
    note_finished(tmp_path / "study")
    texts = [write_results(folder, collect(folder)).read_bytes() for folder in (tmp_path / "study", copy)]
    assert texts[0] == texts[1] and json.loads(texts[0])["runs"][0]["status"] == "complete"
    shutil.rmtree(copy / "moe/2048-s0")
    assert execute(copy) == ["moe/trunk-s0", "moe/2048-s0"], "the branch that is there stays"
