"""Read exported directories with transformers and nothing of ours; also run by another Python, with another version.

`python reader.py REQUEST RESULT`: REQUEST is JSON {"directories", "ids_BS", "prompt", "num_tokens", "texts"}; RESULT is
a JSON list with what `read` returns for each directory.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def read(
    directory: str, ids_BS: list[list[int]], prompt: list[int], num_tokens: int, texts: list[str]
) -> dict[str, Any]:
    """Faults of loading, logits of every position, a greedy continuation, and what the tokenizer makes of texts."""
    torch.set_num_threads(1)
    model, info = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    given = torch.tensor([prompt])
    with torch.no_grad():
        logits_BSV = model.eval()(torch.tensor(ids_BS)).logits
        written = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=num_tokens)
    return {
        "architecture": type(model).__name__,
        "faults": sorted(f"{kind}: {name}" for kind, names in info.items() if names for name in names),
        "dtypes": sorted({str(parameter.dtype) for parameter in model.parameters()}),
        "logits_BSV": logits_BSV.tolist(),
        "written": written[0, len(prompt) :].tolist(),
        "vocab_size": len(tokenizer),
        "special": [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id],
        "ids": [tokenizer.encode(text) for text in texts],
        "texts": [tokenizer.decode(tokenizer.encode(text)) for text in texts],
    }


if __name__ == "__main__":
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    directories = request.pop("directories")
    results = [read(directory, **request) for directory in directories]
    Path(sys.argv[2]).write_text(json.dumps(results), encoding="utf-8")
