"""The recipe of docs/export.md: lm-eval, run as written there on an exported model, gives our own bits per byte."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from equipoise.data.tokenizer import TextTokenizer
from equipoise.model.transformer import Transformer
from equipoise.score import score_text

from .conftest import SEQ_LEN

DOCUMENT = Path(__file__).parents[2] / "docs" / "export.md"
TASK = DOCUMENT.parent / "lm_eval" / "equipoise_text.yaml"
CASES = [("dense", "gqa", False), ("top-2", "gqa", True), ("top-1-as-is", "mha", False)]
SHORT = [f"the cat and {n} hats\n" + "é🦙 " * (n % 4) + '{{ "as it stands" }}' for n in range(20)]
LONG = [" ".join(SHORT)]


def lm_eval(python: Path, directory: Path, texts: list[str], folder: Path) -> float:
    """Bits per byte that lm-eval prints for texts, by the command of docs/export.md."""
    folder.mkdir()
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "documents.jsonl").write_text(lines, encoding="utf-8")
    shutil.copy(TASK, folder)
    (line,) = re.findall(r"^HF_HUB_OFFLINE=1 lm_eval (.*?)\n```", DOCUMENT.read_text(encoding="utf-8"), re.M | re.S)
    words = shlex.split(line.replace("\\\n", " ").replace("path/to/moe-s0", str(directory)))
    command = [python, "-m", "lm_eval", *words, "--output_path", "results"]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (path,) = (folder / "results").rglob("results_*.json")
    return float(json.loads(path.read_text(encoding="utf-8"))["results"]["equipoise_text"]["bits_per_byte,none"])


def their_windows(model: Transformer, tokenizer: TextTokenizer, text: str, context: int) -> float:
    """Bits per byte by lm-eval's convention: a later window begins with the last token before it, not with end-of-text,
    and the last window is filled up with what comes before."""
    ids = tokenizer.encode(text)
    nats = []
    for start in range(0, len(ids), context):
        targets = ids[start : start + context]
        before = [0] if start == 0 else ids[start - (context - len(targets) + 1) : start]
        with torch.no_grad():
            output = model(torch.tensor([[*before, *targets[:-1]]]))
            log_probs = model.logits(output.hidden_TD).double().log_softmax(dim=-1)[-len(targets) :]
        nats += [-float(row[target]) for row, target in zip(log_probs, targets, strict=True)]
    return math.fsum(nats) / math.log(2) / len(text.encode())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_lm_eval_gives_our_bits_per_byte(
    request: pytest.FixtureRequest, exported: Any, tokenizer: TextTokenizer, tmp_path: Path, case: Any
) -> None:
    python = request.config.getoption("--python-lm-eval")
    if python is None:
        pytest.skip("a Python with lm-eval[hf] needed: --python-lm-eval=PATH")
    model, directory = exported[case].model, exported[case].directory
    assert max(len(tokenizer.encode(text)) for text in SHORT) < SEQ_LEN < len(tokenizer.encode(LONG[0]))
    ours = score_text(model, tokenizer, SHORT, context=SEQ_LEN).bpb
    theirs = lm_eval(python, directory, SHORT, tmp_path / "short")
    assert theirs == pytest.approx(ours, rel=5e-6)
    if case == CASES[0]:  # documents longer than a window: the conventions differ, and nothing else does
        theirs = lm_eval(python, directory, LONG, tmp_path / "long")
        assert theirs == pytest.approx(their_windows(model, tokenizer, LONG[0], SEQ_LEN), rel=5e-6)
        assert theirs != pytest.approx(score_text(model, tokenizer, LONG, context=SEQ_LEN).bpb, rel=1e-3)
