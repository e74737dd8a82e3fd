"""`.parquet` files: the same documents as from text, by batches of rows; each fault is one line."""

from __future__ import annotations

import builtins
import json
import sys
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from equipoise.data.corpora import open_corpus, parquet
from equipoise.data.prepare import estimate, prepare
from equipoise.errors import DataError
from equipoise.spec.data import BpeTokenizer, Corpus, TextCorpus, TinyStoriesCorpus

pa = pytest.importorskip("pyarrow", reason="reads .parquet files: pyarrow (extra `data`)")
pq = pytest.importorskip("pyarrow.parquet", reason="reads .parquet files: pyarrow (extra `data`)")

BPE = BpeTokenizer(vocab_size=300)
TEXTS = ["One.\r\nTwo.", "", " naïve 中文 🙂 ", "old\rMac", "a\u2028b\0c"]


def write(file: Path, texts: Sequence[Any], column: str = "text", kind: Any = None, **named: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"id": list(range(len(texts))), column: pa.array(texts, kind or pa.string())})
    pq.write_table(table, file, **named)
    return file


def read(corpus: Corpus) -> list[str]:
    return [document.text for document in open_corpus(corpus).read()]


def fault(corpus: Corpus) -> str:
    with pytest.raises(DataError) as caught:
        read(corpus)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary"])
def test_a_row_is_a_document(tmp_path: Path, kind: str) -> None:
    types = {"dictionary": pa.dictionary(pa.int32(), pa.string())}
    file = write(tmp_path / "a.parquet", TEXTS, kind=types.get(kind) or getattr(pa, kind)(), row_group_size=2)
    documents = list(open_corpus(TextCorpus(path=str(file))).read())
    assert [d.text for d in documents] == ["One.\nTwo.", "", " naïve 中文 🙂 ", "old\nMac", "a\u2028b\0c"]
    assert [(d.where, d.split) for d in documents[:2]] == [(f"{file}:1", None), (f"{file}:2", None)]


def test_another_column_is_named(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", ["x", "y"], column="content")
    assert read(TextCorpus(path=str(file), field="content")) == ["x", "y"]
    assert fault(TextCorpus(path=str(file))) == (
        f"{file}: no column 'text'; columns there: 'id', 'content'; name the right one with corpus.field"
    )
    assert fault(TinyStoriesCorpus(path=str(file))) == f"{file}: no column 'text'; columns there: 'id', 'content'"
    assert fault(TextCorpus(path=str(file), field="id")) == (
        f"{file}: column 'id' is int64; expected texts (a column of strings); name the right one with corpus.field"
    )


def test_a_value_that_is_no_text_is_named_by_its_row(tmp_path: Path) -> None:
    file = write(tmp_path / "null.parquet", ["x"] * 600 + [None, "y"])
    assert fault(TextCorpus(path=str(file))) == f"{file}:601: column 'text' is null; expected a text"
    bad = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(bytes([0, 0, 0, 0, 1, 0, 0, 0, 3, 0, 0, 0])), pa.py_buffer(b"a\xff\xfe")]
    )
    file = tmp_path / "bytes.parquet"
    pq.write_table(pa.table({"text": bad}), file)
    assert fault(TextCorpus(path=str(file))) == (
        f"{file}:2: column 'text' is not UTF-8 (invalid start byte); expected UTF-8 text"
    )


@pytest.mark.parametrize("damage", ["text", "cut", "altered"])
def test_a_broken_file_is_one_line(tmp_path: Path, damage: str) -> None:
    file = write(tmp_path / "a.parquet", [f"a text of number {i}" for i in range(5000)], use_dictionary=False)
    content = file.read_bytes()
    middle = len(content) // 2
    file.write_bytes(
        {"text": b"plain", "cut": content[:-9], "altered": content[:middle] + bytes(4000) + content[middle + 4000 :]}[
            damage
        ]
    )
    message = fault(TextCorpus(path=str(file)))
    assert message.startswith(f"{file}: cannot be read ")
    assert ("after row " in message) == (damage == "altered")


def test_names_of_columns_that_recur_or_are_damaged(tmp_path: Path) -> None:
    twice = pa.Table.from_arrays([pa.array(["x"]), pa.array(["y"])], names=["text", "text"])
    file = tmp_path / "twice.parquet"
    pq.write_table(twice, file)
    assert fault(TextCorpus(path=str(file))) == (
        f"{file}: 2 columns 'text'; expected one of that name; name the right one with corpus.field"
    )
    file = write(tmp_path / "damaged.parquet", ["x"], column="nothing")
    file.write_bytes(file.read_bytes().replace(b"nothing", b"\xffothing"))
    assert fault(TextCorpus(path=str(file))).startswith(f"{file}: cannot be read (")
    texts = ["a text of some length", "another text"]
    within = pa.array([{"text": "long " * 1000}] * 2)  # a field of another column has the same name
    file = tmp_path / "within.parquet"
    pq.write_table(pa.table({"meta": within, "text": texts}), file)
    source = open_corpus(TextCorpus(path=str(file)))
    assert [document.text for document in source.read()] == texts and source.text_sizes[0] < 200


def test_a_missing_pyarrow_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "a.parquet", ["x"])
    original = builtins.__import__

    def absent(name: str, *args: Any, **named: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return original(name, *args, **named)

    monkeypatch.setattr(builtins, "__import__", absent)
    assert fault(TextCorpus(path=str(file))) == (
        f"{file}: .parquet files are read by pyarrow, which is not installed; pip install 'equipoise[data]'"
    )


def test_other_corpora_never_load_pyarrow(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a", encoding="utf-8")
    import subprocess

    code = f"""
import sys
from equipoise.data.corpora import open_corpus
from equipoise.spec.data import TextCorpus
list(open_corpus(TextCorpus(path={str(tmp_path)!r})).read())
print("pyarrow" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True)
    assert done.stdout == "False\n"


def stories(count: int) -> list[str]:
    return [f"Story {i}: a café\nand {'more ' * (i % 9)}end." for i in range(count)]


def test_tinystories_are_the_same_from_both_formats(tmp_path: Path) -> None:
    """The names of the data set on the hub; the digest is of the content alone."""
    texts, valid = stories(200), stories(230)[200:]
    plain, table = tmp_path / "plain", tmp_path / "table"
    plain.mkdir()
    for name, some in (("TinyStories-train.txt", texts), ("TinyStories-valid.txt", valid)):
        (plain / name).write_text("".join(f"{text}\n<|endoftext|>\n" for text in some), encoding="utf-8")
    write(table / "data/train-00000-of-00002-2d5a1467fff1081b.parquet", [f" {text}\n" for text in texts[:120]])
    write(table / "data/train-00001-of-00002-5852b56a2bd28fd9.parquet", [*texts[120:], " \n"])
    write(table / "data/validation-00000-of-00001-869c898b519ad725.parquet", valid)
    first = prepare(TinyStoriesCorpus(path=str(plain)), BPE, tmp_path / "cache")
    second = prepare(TinyStoriesCorpus(path=str(table)), BPE, tmp_path / "cache")
    assert first.digest == second.digest and first.directory != second.directory
    assert second.info["splits"]["validation"]["documents"] == 30


def test_beside_text_files_of_tinystories_tables_are_ignored(tmp_path: Path) -> None:
    """A download of everything has the same stories twice."""
    write(tmp_path / "data/train-0.parquet", ["again"])
    (tmp_path / "train.txt").write_text("once\n<|endoftext|>\n", encoding="utf-8")
    source = open_corpus(TinyStoriesCorpus(path=str(tmp_path)))
    assert [document.text for document in source.read()] == ["once"]
    assert source.notes == ("1 files that do not end in .txt were ignored",)


def test_text_folders_take_all_three_formats(tmp_path: Path) -> None:
    write(tmp_path / "b-valid.parquet", ["from a table"])
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "from a line"}) + "\n", encoding="utf-8")
    (tmp_path / "c.txt").write_text("from a file", encoding="utf-8")
    documents = [(d.text, d.split) for d in open_corpus(TextCorpus(path=str(tmp_path))).read()]
    assert documents == [("from a line", None), ("from a table", "validation"), ("from a file", None)]


def test_estimates_know_what_compression_hides(tmp_path: Path) -> None:
    texts = stories(3000)
    corpus = TextCorpus(path=str(write(tmp_path / "a.parquet", texts, compression="zstd", use_dictionary=False)))
    assert Path(corpus.path).stat().st_size < 0.3 * sum(len(text.encode()) for text in texts)
    guess = estimate(corpus, BPE)
    assert guess.train_tokens == pytest.approx(len(prepare(corpus, BPE, tmp_path / "c").tokens("train")), rel=0.1)


def test_a_large_row_group_is_not_read_at_once(tmp_path: Path) -> None:
    """20,000 texts, 20 MB, in one row group: what Python and Arrow hold stays far below."""
    texts = [f"{i:06d} " * 150 for i in range(20_000)]
    file = write(tmp_path / "a.parquet", texts, use_dictionary=False)
    assert pq.ParquetFile(file).num_row_groups == 1
    before = pa.total_allocated_bytes()
    most = 0
    tracemalloc.start()
    try:
        for number, _ in enumerate(open_corpus(TextCorpus(path=str(file))).read()):
            if number % 1000 == 0:
                most = max(most, pa.total_allocated_bytes() - before)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert number == 19_999
    assert peak < 5e6 and most < 10e6


def test_long_rows_are_read_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """300 texts of 100 kB, 30 MB, of which 2 MB are to be held at once."""
    monkeypatch.setattr(parquet, "BATCH_BYTES", 2_000_000)
    texts = [f"{i:04d} " * 20_000 for i in range(300)]
    file = write(tmp_path / "a.parquet", texts, use_dictionary=False, data_page_size=100_000, write_batch_size=5)
    before = pa.total_allocated_bytes()
    most = 0
    for number, document in enumerate(open_corpus(TextCorpus(path=str(file))).read()):
        assert document.text == texts[number]
        most = max(most, pa.total_allocated_bytes() - before)
    assert number == 299 and most < 12e6
