"""The directory as a whole: which weights, whole or absent, the same bytes, the card's facts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import equipoise.export.write as writing
from equipoise.config import digest, load
from equipoise.errors import ConfigError, IntegrityError
from equipoise.export.write import export
from equipoise.files import file_faults, file_sha256
from equipoise.spec.run import RunConfig
from equipoise.weights import read_weights

FILES = {
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.fixture
def run(make_model: Any, make_run: Any, tmp_path: Path) -> Path:
    make_run(tmp_path / "run", make_model("top-2", "gqa", True), best=make_model("top-2", "gqa", True, seed=2))
    return tmp_path / "run"


def test_the_files_and_what_is_returned(run: Path, tmp_path: Path) -> None:
    written = export(read_weights(run), tmp_path / "new" / "folder" / "out")
    out = tmp_path / "new" / "folder" / "out"
    assert {path.name for path in out.iterdir()} == FILES == set(written["files"])
    assert not file_faults(out, written["files"])
    tensors = load_file(out / "model.safetensors")
    assert written["num_parameters"] == sum(tensor.size for tensor in tensors.values())
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert (out / "tokenizer.json").read_bytes() == (run / "tokenizer.json").read_bytes()
    assert json.loads((out / "generation_config.json").read_text(encoding="utf-8")) == {
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "do_sample": False,
    }


def test_the_last_weights_or_the_best(run: Path, tmp_path: Path) -> None:
    export(read_weights(run), tmp_path / "last")
    export(read_weights(run, best=True), tmp_path / "best")
    for name, step in (("last", 8), ("best", 5)):
        ours = load_file(run / "checkpoints" / f"step-{step:08d}" / "model.safetensors")["blocks.1.attention.w_q"]
        theirs = load_file(tmp_path / name / "model.safetensors")["model.layers.1.self_attn.q_proj.weight"]
        assert np.array_equal(ours, theirs), name
    assert "2.5000 nats/token, 1.2500 bits per byte" in (tmp_path / "last/README.md").read_text(encoding="utf-8")
    best = (tmp_path / "best/README.md").read_text(encoding="utf-8")
    assert "2.2500 nats/token, 1.1250 bits per byte" in best and "step 5 of 8, the lowest point" in best
    assert "| 2,560 (0.31 passes over the data) |" in best  # 5 steps of 512; 0.5 passes · 5/8


def test_the_same_bytes_every_time(run: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        export(read_weights(run), tmp_path / name)
    for name in FILES:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name


def test_the_card_holds_the_provenance(run: Path, tmp_path: Path) -> None:
    export(read_weights(run), tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert card.startswith(
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- equipoise\n- mixtral\n"
    )
    (block,) = re.findall(r"^```json\n(.*?)^```$", card, re.M | re.S)
    config = load(RunConfig, json.loads(block))
    assert config == read_weights(run).run and f"| run | {digest(config)} |" in card
    weights_file = run / "checkpoints" / "step-00000008" / "model.safetensors"
    assert file_sha256(weights_file) in card and "d" * 64 in card and "python 1.2.3; then equipoise 1.3.0" in card
    assert "123,456 parameters (65,432 active per token)" in card and "shared expert" not in card


def test_the_card_of_qwen2_moe_explains_the_zeros(exported: Any) -> None:
    card = (exported["top-1-as-is", "mha", False].directory / "README.md").read_text(encoding="utf-8")
    assert "`Qwen2MoeForCausalLM`" in card and "it is there with zeros and adds exactly 0" in card


def test_the_python_of_a_card_runs(exported: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    pytest.importorskip("transformers", reason="needs the extra: pip install 'equipoise[hf]'")
    directory = exported["top-2", "gqa", True].directory
    (code,) = re.findall(r"^```python\n(.*?)^```$", (directory / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    exec(code.replace("path/to/this/folder", str(directory)).replace("max_new_tokens=100", "max_new_tokens=9"), {})
    assert capsys.readouterr().out.startswith("Once upon a time")


def test_what_is_there_already_is_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "folder", "link"):
        with pytest.raises(ConfigError, match=f"{name}: exists already; expected a directory that does not"):
            export(read_weights(run), tmp_path / name)
    assert (tmp_path / "file").read_text(encoding="utf-8") == "mine" and not list((tmp_path / "folder").iterdir())


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_failure_leaves_nothing(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def full(function: Any) -> Any:
        def write(path: Path, content: Any) -> None:
            if path.name == name:
                raise OSError(28, "No space left on device")
            function(path, content)

        return write

    before = sorted(tmp_path.iterdir())
    for writer in ("write_bytes", "write_json"):
        monkeypatch.setattr(writing, writer, full(getattr(writing, writer)))
    with pytest.raises(OSError, match="No space left"):
        export(read_weights(run), tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before


def test_a_config_that_does_not_read_back_is_noticed(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_model: Any
) -> None:
    monkeypatch.setattr(writing, "from_huggingface", lambda theirs: make_model("dense", "gqa", True).config)
    with pytest.raises(IntegrityError, match=r"config\.json: does not read back as the run's model"):
        export(read_weights(run), tmp_path / "out")
    assert not (tmp_path / "out").exists()
