"""Opening a prepared data set: what belongs together is checked, and each mismatch names its file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from equipoise.data.dataset import Dataset, open_dataset
from equipoise.data.prepare import prepare
from equipoise.errors import DataError
from equipoise.spec.data import BpeTokenizer, GrammarCorpus


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Dataset]:
    cache = tmp_path_factory.mktemp("cache")
    sizes = {"one": 30, "two": 31}
    return {
        name: prepare(
            GrammarCorpus(num_documents=size, num_validation=4, num_selection=3), BpeTokenizer(vocab_size=290), cache
        )
        for name, size in sizes.items()
    }


@pytest.fixture
def directory(prepared: dict[str, Dataset], tmp_path: Path) -> Path:
    shutil.copytree(prepared["one"].directory, tmp_path / "d")
    return tmp_path / "d"


def fault(directory: Path) -> str:
    with pytest.raises(DataError) as caught:
        open_dataset(directory)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(str(directory), "D")


def test_an_opened_data_set_is_the_prepared_one(prepared: dict[str, Dataset], directory: Path) -> None:
    opened = open_dataset(directory)
    assert opened.info == prepared["one"].info
    assert opened.digest == prepared["one"].digest != prepared["two"].digest
    assert np.array_equal(opened.tokens("train"), prepared["one"].tokens("train"))
    assert opened.tokens("train").dtype == np.uint16
    assert np.array_equal(opened.token_bytes, opened.tokenizer().token_bytes)


def test_a_changed_tokenizer_is_named(directory: Path) -> None:
    path = directory / "tokenizer.json"
    table = json.loads(path.read_text(encoding="utf-8"))
    table["model"]["vocab"]["zz"] = 290
    path.write_text(json.dumps(table), encoding="utf-8")
    assert fault(directory).startswith("D/tokenizer.json: SHA-256 ")
    path.write_text("{}", encoding="utf-8")
    assert fault(directory) == "D/tokenizer.json: model: missing; expected a tokenizer of this project"


def test_files_of_another_data_set_are_named(prepared: dict[str, Dataset], directory: Path) -> None:
    shutil.copy(prepared["two"].directory / "selection.tokens", directory)
    message = fault(directory)
    assert message.startswith(f"D/selection.tokens: tokenizer {prepared['two'].tokenizer().digest}; expected ")
    assert message.endswith(" as dataset.json says")


@pytest.mark.parametrize("name", ["validation.tokens", "train.tokens", "validation.log_probs.npy"])
def test_a_flipped_bit_is_named_and_the_data_set_made_again(
    prepared: dict[str, Dataset], tmp_path: Path, name: str
) -> None:
    """One id or one probability altered, everything else as it was: what was trained on would be other text."""
    corpus, tokenizer = GrammarCorpus(num_documents=30, num_validation=4, num_selection=3), BpeTokenizer(vocab_size=290)
    directory = tmp_path / prepared["one"].directory.name
    shutil.copytree(prepared["one"].directory, directory)
    content = (directory / name).read_bytes()
    (directory / name).write_bytes(content[:-8] + bytes([content[-8] ^ 1]) + content[-7:])
    message = fault(directory)
    assert message.startswith(f"D/{name}: SHA-256") and message.endswith(" as dataset.json says")
    again = prepare(corpus, tokenizer, tmp_path)
    assert again.directory == directory and (directory / name).read_bytes() == content
    assert again.digest == prepared["one"].digest


def edit(directory: Path, change: Callable[[dict], object]) -> None:
    path = directory / "dataset.json"
    info = json.loads(path.read_text(encoding="utf-8"))
    change(info)
    path.write_text(json.dumps(info), encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: i.update(vocab_size=291), "D/train.tokens: vocabulary 290; expected 291 as dataset.json says"),
        (lambda i: i.update(corpus="00"), "D/train.tokens: corpus {corpus}; expected 00 as dataset.json says"),
        (
            lambda i: i["splits"]["validation"].update(documents=5),
            "D/validation.tokens: number of documents 4; expected 5 as dataset.json says",
        ),
        (
            lambda i: i["splits"]["selection"].update(tokens=1),
            "D/selection.tokens: number of ids {tokens}; expected 1 as dataset.json says",
        ),
        (
            lambda i: i["splits"]["selection"].update(bytes=1),
            "D/selection.tokens: bytes of text {bytes}; expected 1 as dataset.json says",
        ),
        (lambda i: i.update(schema_version=9), "D/dataset.json: schema_version 9; expected 1"),
        (
            lambda i: i.pop("vocab_size"),
            "D/dataset.json: vocab_size: missing; delete the directory to prepare it again",
        ),
        (
            lambda i: i["splits"].pop("train"),
            "D/dataset.json: 'train' is missing or of the wrong kind; delete the directory to prepare it again",
        ),
    ],
)
def test_a_changed_description_is_named(directory: Path, change: Callable[[dict], object], message: str) -> None:
    info = open_dataset(directory).info
    edit(directory, change)
    selection = info["splits"]["selection"]
    assert fault(directory) == message.format(
        corpus=info["corpus"], tokens=selection["tokens"], bytes=selection["bytes"]
    )


def test_missing_and_broken_files_are_named(directory: Path) -> None:
    np.save(directory / "train.log_probs.npy", np.zeros((2, 3)))
    assert fault(directory) == "D/train.log_probs.npy: shape (2, 3); expected (2, 30)"
    (directory / "train.log_probs.npy").write_bytes(b"x")
    assert fault(directory).startswith("D/train.log_probs.npy: cannot be read (")
    (directory / "train.log_probs.npy").unlink()
    assert fault(directory).startswith("D/train.log_probs.npy: cannot be read (")
    (directory / "train.tokens").unlink()
    assert fault(directory) == "D/train.tokens: cannot be read (No such file or directory); expected a token file"
    (directory / "dataset.json").write_text("[1]", encoding="utf-8")
    assert fault(directory) == "D/dataset.json: schema_version null; expected 1"
    (directory / "dataset.json").write_text("{", encoding="utf-8")
    assert fault(directory).startswith("D/dataset.json: not valid JSON (")
    (directory / "dataset.json").unlink()
    assert fault(directory) == (
        "D/dataset.json: cannot be read (No such file or directory); expected a prepared data set"
    )


def test_pickled_arrays_are_never_loaded(directory: Path) -> None:
    np.save(directory / "train.log_probs.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    assert "Python objects" in fault(directory)
