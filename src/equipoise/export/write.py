"""Write a run's weights as a Hugging Face directory: whole or not at all, and the same bytes every time.

Not for: names (`names`), configuration fields (`translate`) or the model card's text (`card`).
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from safetensors.numpy import save

from equipoise.data.tokenizer import END_OF_TEXT, load_tokenizer
from equipoise.errors import ConfigError, IntegrityError
from equipoise.export.card import model_card
from equipoise.export.names import their_tensors
from equipoise.export.translate import from_huggingface, to_huggingface
from equipoise.files import describe_file, read_json, sync_folder, write_bytes, write_json
from equipoise.record import WEIGHTS
from equipoise.shapes import Environments, hold
from equipoise.weights import Weights


def export(weights: Weights, destination: Path) -> dict[str, Any]:
    """Write config.json, model.safetensors, tokenizer and generation files and a model card into `destination`.

    Returns {"model_type", "architecture", "num_parameters", "files": {name: {"bytes", "sha256"}}}. Built in a hidden
    folder beside it, then renamed. Raises ConfigError when `destination` exists or no family computes what the model
    does, IntegrityError when the tensors are not those of the run's model or config.json does not read back as the
    model that was written.
    """
    if destination.exists() or destination.is_symlink():
        raise ConfigError(f"{destination}: exists already; expected a directory that does not")
    model, seq_len = weights.run.model, weights.run.recipe.seq_len
    tokenizer_path = weights.directory / "tokenizer.json"
    eot_id = load_tokenizer(tokenizer_path).eot_id
    config = to_huggingface(model, seq_len=seq_len, eot_id=eot_id)
    tensors = their_tensors(model, weights.tensors)
    checkpoint = f"{WEIGHTS}/step-{weights.step:08d}/model.safetensors"
    stored = read_json(weights.directory / "environment.json")
    hold(weights.directory / "environment.json", stored, Environments)
    environments = stored["environments"]
    card = model_card(weights, environments, weights.summary["files"][checkpoint]["sha256"])
    destination.absolute().parent.mkdir(parents=True, exist_ok=True)
    temporary = destination.absolute().with_name(f".{destination.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        write_json(temporary / "config.json", config)
        write_bytes(temporary / "model.safetensors", save(tensors, metadata={"format": "pt"}))
        write_bytes(temporary / "tokenizer.json", tokenizer_path.read_bytes())
        write_json(temporary / "tokenizer_config.json", _tokenizer_config(seq_len))
        write_json(temporary / "generation_config.json", _generation_config(eot_id))
        write_bytes(temporary / "README.md", card.encode())
        if from_huggingface(read_json(temporary / "config.json")) != model:
            raise IntegrityError(f"{temporary}/config.json: does not read back as the run's model")
        files = {path.name: describe_file(path) for path in sorted(temporary.iterdir())}
        temporary.rename(destination)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    sync_folder(destination.absolute().parent)
    return {
        "model_type": config["model_type"],
        "architecture": config["architectures"][0],
        "num_parameters": sum(tensor.size for tensor in tensors.values()),
        "files": files,
    }


def _tokenizer_config(seq_len: int) -> dict[str, Any]:
    """The class is named as transformers 4 and 5 both know it: without one, 4 takes Llama's, which adds a token."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": seq_len,
    }


def _generation_config(eot_id: int) -> dict[str, Any]:
    return {"bos_token_id": eot_id, "eos_token_id": eot_id, "pad_token_id": eot_id, "do_sample": False}
