"""What Hugging Face makes of an exported directory is what our model does: in the installed version and in 4.57."""

from __future__ import annotations

import json
import runpy
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from equipoise.data.tokenizer import TextTokenizer
from equipoise.model.transformer import generate

from .conftest import CASES, SEQ_LEN, TEXTS, case_id

pytest.importorskip("transformers", reason="parity needs the extra: pip install 'equipoise[hf]'")

READER = Path(__file__).with_name("reader.py")
ARCHITECTURES = {"dense": "LlamaForCausalLM", "top-2": "MixtralForCausalLM", "top-1": "MixtralForCausalLM"}
ARCHITECTURES |= {"one": "MixtralForCausalLM"}
NUM_TOKENS = 40


@pytest.fixture(scope="module")
def request_(tokenizer: TextTokenizer) -> dict[str, Any]:
    drawn = np.random.Generator(np.random.Philox(4)).integers(tokenizer.vocab_size, size=(3, SEQ_LEN))
    hostile = [*TEXTS, "  two  blanks , a comma .\r\n\ttab\0 n't 's \u200d\ufeff e\u0301 \U0010ffff", "", " "]
    return {"ids_BS": drawn.tolist(), "prompt": [0, 9, 2, 31], "num_tokens": NUM_TOKENS, "texts": hostile}


def check(found: dict[str, Any], case: Any, ours: SimpleNamespace, request: Any, tokenizer: TextTokenizer) -> float:
    """Everything that has to be equal; returns the largest difference of a logit."""
    assert found["architecture"] == ARCHITECTURES.get(case[0], "Qwen2MoeForCausalLM") == ours.written["architecture"]
    assert found["faults"] == [] and found["dtypes"] == ["torch.float32"]
    inputs_BS = torch.tensor(request["ids_BS"])
    with torch.no_grad():
        output = ours.model(inputs_BS)
        logits_BSV = ours.model.logits(output.hidden_TD).view(*inputs_BS.shape, -1)
    theirs_BSV = torch.tensor(found["logits_BSV"])
    worst_S = (logits_BSV - theirs_BSV).abs().amax(dim=(0, 2))
    assert float(worst_S.max()) <= 1e-5, f"position {int(worst_S.argmax())}"
    assert float(theirs_BSV.std()) > 0.3, "logits too flat to tell models apart"
    for routing in output.routing:
        num_experts, top_k = ours.model.config.ffn.num_experts, ours.model.config.ffn.top_k
        loads = torch.bincount(routing.expert_ids_TK.flatten(), minlength=num_experts)
        assert top_k == num_experts or int(loads.max()) > 1.1 * int(loads.min()), "loads too even to show a mistake"
    written = generate(ours.model, request["prompt"], NUM_TOKENS, stop_id=0)
    assert found["written"] == written + [0] * (len(written) < NUM_TOKENS) and len(written) > 5
    assert found["vocab_size"] == tokenizer.vocab_size and found["special"] == [0, 0, 0]
    assert found["ids"] == [tokenizer.encode(text) for text in request["texts"]]
    assert found["texts"] == request["texts"]
    return float(worst_S.max())


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_the_installed_version(case: Any, exported: Any, request_: Any, tokenizer: TextTokenizer) -> None:
    read = runpy.run_path(str(READER))["read"]
    check(read(str(exported[case].directory), **request_), case, exported[case], request_, tokenizer)


def test_transformers_457(
    request: pytest.FixtureRequest, exported: Any, request_: Any, tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    """The same directories in another Python: names, both spellings of the RoPE base and tokenizer files suit 4.57."""
    python = request.config.getoption("--python-457")
    if python is None:
        pytest.skip("a Python with transformers 4.57 needed: --python-457=PATH")
    asked, answered = tmp_path / "request.json", tmp_path / "result.json"
    directories = [str(exported[case].directory) for case in CASES]
    asked.write_text(json.dumps({**request_, "directories": directories}), encoding="utf-8")
    version = "import transformers; print(transformers.__version__)"
    done = subprocess.run([python, "-c", version], check=True, capture_output=True, text=True, encoding="utf-8")
    assert done.stdout.startswith("4.57."), f"--python-457: transformers {done.stdout.strip()}; expected 4.57"
    subprocess.run([python, READER, asked, answered], check=True, capture_output=True)
    results = json.loads(answered.read_text(encoding="utf-8"))
    worst = {
        case_id(case): check(found, case, exported[case], request_, tokenizer)
        for case, found in zip(CASES, results, strict=True)
    }
    assert all(difference <= 1e-5 for difference in worst.values()), worst
