"""Prepared data sets that someone else made or altered: opened and read without fault, or refused naming the file."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.data.dataset import Dataset, content_digest, open_dataset
from equipoise.data.packing import batch, check_windows, eval_windows
from equipoise.data.prepare import prepare
from equipoise.data.tokenfile import HEADER_BYTES
from equipoise.data.tokenizer import load_tokenizer
from equipoise.errors import DataError
from equipoise.spec.data import BpeTokenizer, GrammarCorpus

from .conftest import HOSTILE, altered, json_values, told

HEADER = struct.Struct("<8sIIQQQQ")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    corpus = GrammarCorpus(num_documents=12, num_validation=3, num_selection=2)
    return prepare(corpus, BpeTokenizer(vocab_size=270), tmp_path_factory.mktemp("cache")).directory


@pytest.fixture
def copy(prepared: Path, tmp_path: Path) -> Path:
    shutil.copytree(prepared, tmp_path / "d")
    return tmp_path / "d"


def use(directory: Path) -> None:
    """Open a data set and read all that training and evaluation read of it."""
    dataset: Dataset = open_dataset(directory)
    check_windows(dataset, 16)
    batch(dataset.tokens("train"), 16, 4, 0, 0)
    for split in ("validation", "selection"):
        windows = eval_windows(dataset, split, 16, 0, 0)  # type: ignore[arg-type]
        assert windows.num_targets == len(dataset.tokens(split))  # type: ignore[arg-type]
        assert windows.targets_WS.max() < dataset.vocab_size
    json.dumps(dataset.info, allow_nan=False)


def seal(directory: Path) -> None:
    """Write the hashes of altered files into `dataset.json`, as whoever altered them on purpose would."""
    path = directory / "dataset.json"
    info = json.loads(path.read_text(encoding="utf-8"))
    for split, said in info["splits"].items():
        content = (directory / f"{split}.tokens").read_bytes()
        said["sha256"] = hashlib.sha256(content[HEADER_BYTES:]).hexdigest()
        said["log_probs"] = hashlib.sha256((directory / f"{split}.log_probs.npy").read_bytes()).hexdigest()
        if len(content) >= HEADER_BYTES:
            said["tokens"], said["documents"], said["bytes"] = HEADER.unpack_from(content)[4:7]
    hashes = {split: said["sha256"] for split, said in info["splits"].items()}
    info["digest"] = content_digest(hashes, info["vocab_size"], info["tokenizer"]["digest"])
    path.write_text(json.dumps(info), encoding="utf-8")


@st.composite
def headers(draw: st.DrawFn, content: bytes) -> bytes:
    """A token file with one field of its header replaced, and perhaps as many ids as it then says."""
    fields: list[Any] = list(HEADER.unpack_from(content))
    place = draw(st.integers(0, 6))
    most = 2**32 - 1 if place in (1, 2) else 2**64 - 1
    values = [0, 1, 2, 3, 4, 8, 257, 270, 2**16, 2**16 + 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**63, most]
    fields[place] = (
        draw(st.binary(min_size=8, max_size=8)) if place == 0 else draw(st.sampled_from(values)) % (most + 1)
    )
    return HEADER.pack(*fields) + content[HEADER.size :]


@HOSTILE
@given(data=st.data())
def test_token_files_that_were_altered(prepared: Path, data: st.DataObject, copy: Path) -> None:
    shutil.copytree(prepared, copy, dirs_exist_ok=True)
    split = data.draw(st.sampled_from(["train", "selection", "validation"]))
    path = copy / f"{split}.tokens"
    content = path.read_bytes()
    place = data.draw(st.integers(HEADER_BYTES, len(content) - 2)) // 2 * 2
    ids = st.sampled_from([0, 1, 269, 270, 2**16 - 1])
    changed = data.draw(
        st.one_of(
            headers(content),
            st.integers(0, len(content) - 1).map(lambda length: content[:length]),
            st.binary(min_size=1, max_size=9).map(lambda more: content + more),
            ids.map(lambda wrong: content[:place] + struct.pack("<H", wrong) + content[place + 2 :]),
            st.binary(max_size=200),
        )
    )
    path.write_bytes(changed)
    sealed = data.draw(st.booleans())
    if sealed:
        seal(copy)
    message = told(lambda: use(copy), DataError)
    assert message is None or message.startswith(f"{copy}/")
    assert (message is None) == (changed == content or (sealed and another_text(content, changed)))


def another_text(content: bytes, changed: bytes) -> bool:
    """Whether what was altered leaves a whole text, if another one: ids that are ids, ends of text where they were.

    The header's count of bytes may differ as well: nothing is computed with it.
    """
    if len(changed) != len(content) or HEADER.unpack_from(changed)[:6] != HEADER.unpack_from(content)[:6]:
        return False
    before, after = (struct.unpack(f"<{len(c[HEADER_BYTES:]) // 2}H", c[HEADER_BYTES:]) for c in (content, changed))
    vocab_size = HEADER.unpack_from(content)[3]
    return all(new < vocab_size and (old == 0) == (new == 0) for old, new in zip(before, after, strict=True))


@HOSTILE
@given(data=st.data())
def test_descriptions_and_tokenizers_that_were_altered(prepared: Path, data: st.DataObject, copy: Path) -> None:
    shutil.copytree(prepared, copy, dirs_exist_ok=True)
    name = data.draw(st.sampled_from(["dataset.json", "dataset.json", "tokenizer.json"]))
    table = json.loads((prepared / name).read_text(encoding="utf-8"))
    changed = data.draw(st.one_of(altered(table), json_values) if name == "dataset.json" else _tokenizers(table))
    (copy / name).write_text(json.dumps(changed), encoding="utf-8")
    message = told(lambda: use(copy), DataError)
    assert message is None or message.startswith(f"{copy}/")
    if name == "tokenizer.json":  # as if the altered one had made the data set
        text = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaX <|endoftext|>\0\U0010ffff"
        message = told(lambda: load_tokenizer(copy / name).encode(text), DataError)
        assert message is None or message.startswith(f"{copy / name}: ")


def _tokenizers(table: Any) -> st.SearchStrategy[Any]:
    """The parts of a tokenizer that matter, altered; its long lists hide them from a blind search."""
    slow = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"}
    unfit = [
        ("normalizer", slow),
        ("normalizer", {"type": "Lowercase"}),
        ("pre_tokenizer", None),
        ("post_processor", {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}),
        ("truncation", {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}),
        ("added_tokens", []),
        ("decoder", {"type": "Fuse"}),
        ("model", {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}),
        ("model", {**table["model"], "dropout": 0.5}),
        ("model", {**table["model"], "merges": [["x", "nowhere"]]}),
        ("model", {**table["model"], "vocab": {**table["model"]["vocab"], "zz": 2**31}}),
        ("model", {**table["model"], "vocab": {**table["model"]["vocab"], "zz": -1}}),
    ]
    small = {**table, "model": {**table["model"], "merges": table["model"]["merges"][:2]}}
    return st.one_of(st.sampled_from(unfit).map(lambda change: {**table, change[0]: change[1]}), altered(small))


@pytest.mark.parametrize("sealed", [False, True])
def test_a_file_that_would_run_code_never_does(copy: Path, tmp_path: Path, sealed: bool) -> None:
    canary = tmp_path / "canary"

    class Evil:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(canary),))

    array = io.BytesIO()
    np.save(array, np.array([Evil()], dtype=object), allow_pickle=True)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps(Evil()))
    huge = io.BytesIO()
    np.lib.format.write_array_header_1_0(huge, {"descr": "<f8", "fortran_order": False, "shape": (2, 10**12)})
    code = b"\x93NUMPY\x01\x00\x40\x00{'descr': __import__('os').mkdir('" + str(canary).encode() + b"')}"
    contents = [pickle.dumps(Evil()), array.getvalue(), archive.getvalue(), huge.getvalue(), code.ljust(128), b""]
    for name in ("train.log_probs.npy", "train.tokens", "tokenizer.json", "dataset.json"):
        whole = (copy / name).read_bytes()
        for content in contents:
            (copy / name).write_bytes(content)
            if sealed and name.startswith("train"):
                seal(copy)
            message = told(lambda: use(copy), DataError)
            assert message is not None and message.startswith(f"{copy / name}: ")
        (copy / name).unlink()
        os.mkfifo(copy / name)
        assert told(lambda: use(copy), DataError) is not None
        (copy / name).unlink()
        (copy / name).write_bytes(whole)
        seal(copy)
    assert not canary.exists()
    use(copy)


def test_the_id_after_the_last_is_named(copy: Path) -> None:
    path = copy / "train.tokens"
    content = path.read_bytes()
    path.write_bytes(content[:HEADER_BYTES] + struct.pack("<H", 270) + content[HEADER_BYTES + 2 :])
    seal(copy)
    assert told(lambda: open_dataset(copy), DataError) == f"{path}: token id 270 met; expected 0 to 269"
    path.write_bytes(content[:HEADER_BYTES] + struct.pack("<H", 0) + content[HEADER_BYTES + 2 :])
    seal(copy)
    assert told(lambda: open_dataset(copy), DataError) == (
        f"{path}: 13 ends of text in 12 documents; expected one after each"
    )


@pytest.mark.parametrize("wrong", [0.5, -np.inf, np.nan])
@pytest.mark.parametrize("kind", ["grammar", "text"])
def test_log_probabilities_that_are_none_are_refused(copy: Path, wrong: float, kind: str) -> None:
    path = copy / "validation.log_probs.npy"
    values = np.load(path, allow_pickle=False)
    values[1, 2] = wrong
    np.save(path, values)
    seal(copy)
    info = json.loads((copy / "dataset.json").read_text(encoding="utf-8"))
    (copy / "dataset.json").write_text(json.dumps({**info, "kind": kind}), encoding="utf-8")
    assert told(lambda: open_dataset(copy), DataError) == (
        f"{path}: holds what is no log-probability; expected finite numbers up to 0"
    )
