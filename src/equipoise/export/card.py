"""The model card of an exported run: what it is, how to use it, and everything needed to make it again. No files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from equipoise.config import digest, dump
from equipoise.data.tokenizer import END_OF_TEXT
from equipoise.export.names import family
from equipoise.export.translate import ARCHITECTURES
from equipoise.weights import Weights

_CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- equipoise
- {kind}
---

# {title}

One run of an Equipoise study: a {what} of {total:,} parameters ({active:,} active per token), in float32, as a
`{architecture}`. It was trained to be compared with its siblings under matched conditions, not to be used: it
knows only the text it was trained on, and its text can be wrong or harmful like that text.

| | |
|---|---|
| weights | {weights} |
| training tokens | {tokens:,} ({epochs:.2f} passes over the data) |
| {split} loss | {loss:.4f} nats/token, {bpb:.4f} bits per byte |
| context | {seq_len} tokens |
| vocabulary | {vocab_size:,} |

## Use

```python
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")
ids = [tokenizer.bos_token_id, *tokenizer.encode("Once upon a time")]
written = model.generate(torch.tensor([ids]), max_new_tokens=100, do_sample=False)
print(tokenizer.decode(written[0, 1:], skip_special_tokens=True))
```

Every training document was preceded by `{end_of_text}`, so a text begins with it; the tokenizer does not add it.
{notes}
## Provenance

| | |
|---|---|
| run | {digest} |
| data | {data} |
| weights (SHA-256 of the run's file) | {sha256} |
| made with | {environment} |

The run is a pure function of this configuration:

```json
{config}
```
"""

_ZEROS = """
Its router weights are not divided by their sum. Mixtral always divides; Qwen2-MoE has a flag for it, and besides a
shared expert that the trained model does not have: it is there with zeros and adds exactly 0.
"""


_VERSIONS = ("equipoise", "torch", "numpy", "tokenizers", "python")


def model_card(weights: Weights, environments: Sequence[Mapping[str, Any]], sha256: str) -> str:
    """README.md of the exported weights; `environments` are those the run went through, `sha256` its weight file's."""
    run, summary, kind = weights.run, weights.summary, family(weights.run.model)
    loss, bpb = ("best_val_loss", "best_val_bpb") if weights.best else ("val_loss", "val_bpb")
    which = f"step {weights.step:,} of {summary['steps']:,}"
    made_with = (", ".join(f"{name} {environment[name]}" for name in _VERSIONS) for environment in environments)
    return _CARD.format(
        kind=kind,
        title=f"{run.arm}, seed {run.seed}, {run.budget:,} tokens",
        what="dense decoder" if kind == "llama" else "Mixture-of-Experts decoder",
        total=summary["params"]["total"],
        active=summary["params"]["active"],
        architecture=ARCHITECTURES[kind],
        weights=f"{which}, the lowest point of its curve" if weights.best else f"{which}, the last",
        tokens=weights.step * run.recipe.batch_tokens,
        epochs=summary["epochs"] * weights.step / summary["steps"],
        split=summary["split"],
        loss=summary[loss],
        bpb=summary[bpb],
        seq_len=run.recipe.seq_len,
        vocab_size=run.model.vocab_size,
        end_of_text=END_OF_TEXT,
        notes=_ZEROS if kind == "qwen2_moe" else "",
        digest=digest(run),
        data=run.data,
        sha256=sha256,
        environment="; then ".join(dict.fromkeys(made_with)),
        config=json.dumps(dump(run), indent=1, ensure_ascii=False),
    )
