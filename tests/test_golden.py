"""Golden losses: short runs of every kind of arm give the numbers they gave before.

Exactly the same for one torch version, CPU capability and processor, within 1e-4 elsewhere. (The processor is part of
it because the matrix library has other kernels for another maker's processor of the same capability: up to 5e-7 was
measured by asking it for them.) Whatever moves the numbers is a change of numerics, and is recorded by one command,
which wants the reason as a line under *Numerics* in CHANGELOG.md:

    make golden REASON="the line, word for word"

The tokens are made here, so that no corpus and no tokenizer can move them.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from equipoise.data.packing import batch
from equipoise.device import cpu_name
from equipoise.files import write_json
from equipoise.model.transformer import build
from equipoise.optim import make_adamw
from equipoise.rng import stream
from equipoise.schedule import learning_rate
from equipoise.spec.model import BalanceLoss, DenseFFN, ModelConfig, MoEFFN
from equipoise.spec.recipe import Optim, Recipe
from equipoise.spec.run import RunConfig
from equipoise.step import train_step

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = Path(__file__).with_name("golden.json")
TOLERANCE = 1e-4
STEPS, V = 20, 61
KEY = f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {cpu_name()}"

RECIPE = Recipe(
    seq_len=32, batch_tokens=256, balance_group=2, micro_sequences=4, optim=Optim(lr=5e-3), threads=1, dtype="float32"
)
BASE = ModelConfig(num_layers=2, num_heads=4, d_model=32, vocab_size=V, ffn=DenseFFN(d_ff=80))
MOE = MoEFFN(num_experts=4, top_k=2, d_expert=40, balance=BalanceLoss(coef=0.01), z_coef=1e-3)
MODELS = {
    "dense": BASE,
    "dense-gqa-untied": dataclasses.replace(BASE, num_kv_heads=2, tie_embeddings=False),
    "moe-top-2": dataclasses.replace(BASE, ffn=MOE),
    "moe-top-1": dataclasses.replace(BASE, ffn=dataclasses.replace(MOE, top_k=1, renormalize=False)),
}
ARMS = [f"{name}, {kernels}" for name in MODELS for kernels in ("fused", "plain")]


def made_tokens() -> np.ndarray:
    """6,000 ids, each three times the one before and a little more: something that can be learnt."""
    steps = stream(0, "data", "golden").integers(0, 4, size=6000)
    tokens = np.zeros(6000, np.uint16)
    for place in range(1, 6000):
        tokens[place] = (3 * int(tokens[place - 1]) + int(steps[place])) % V
    return tokens


def short_run(arm: str, lr: float = RECIPE.optim.lr) -> dict[str, Any]:
    """Loss of each update, and what the last one measured besides."""
    torch.set_num_threads(RECIPE.threads)
    name, kernels = arm.split(", ")
    run = RunConfig(arm=name, seed=0, budget=STEPS * 256, model=MODELS[name], recipe=RECIPE, data="")
    model, tokens, losses = build(run.model, run.seed, kernels=kernels), made_tokens(), []  # type: ignore[arg-type]
    optimizer = make_adamw(model, run.recipe.optim)
    for step in range(run.num_steps):
        inputs, targets = (torch.from_numpy(array) for array in batch(tokens, 32, 8, run.seed, step))
        rate = learning_rate(step, run.num_steps, 256, lr, run.recipe.schedule)
        stats = train_step(model, optimizer, inputs, targets, run, rate)
        losses.append(stats.lm_loss)
    return {"lm_loss": losses, **{k: v for k, v in dataclasses.asdict(stats).items() if k != "lm_loss"}}


def stored() -> dict[str, Any]:
    return json.loads(GOLDEN.read_text(encoding="utf-8"))


def agree(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two records of a run agree within the tolerance, number by number."""
    return one.keys() == other.keys() and all(near(one[name], other[name]) for name in one)


def near(one: Any, other: Any) -> bool:
    """Whether two numbers or two lists of them agree; None (of a dense arm) agrees with None."""
    return one is other is None if None in (one, other) else one == pytest.approx(other, rel=TOLERANCE, abs=TOLERANCE)


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    return {arm: short_run(arm) for arm in ARMS}


@pytest.mark.parametrize("arm", ARMS)
def test_losses_are_what_they_were(arm: str, found: dict[str, dict[str, Any]]) -> None:
    records = stored()["records"]
    assert records, "no golden losses; record them: make golden REASON=..."
    advice = "if this is meant, say why under Numerics in CHANGELOG.md, then: make golden REASON=..."
    for key, record in records.items():
        if key == KEY:
            assert found[arm] == record[arm], advice
        for name, value in record[arm].items():
            assert near(found[arm][name], value), f"{key}, {name}: {found[arm][name]}, stored {value}: {advice}"


@pytest.mark.parametrize("arm", ARMS)
def test_golden_runs_learn_and_would_notice(arm: str, found: dict[str, dict[str, Any]]) -> None:
    losses = found[arm]["lm_loss"]
    assert len(losses) == STEPS and losses[-1] < losses[0] - 0.5
    assert not agree(short_run(arm, lr=RECIPE.optim.lr * 1.01), found[arm])


@pytest.mark.parametrize("name", MODELS)
def test_kernels_agree(name: str, found: dict[str, dict[str, Any]]) -> None:
    """Over twenty updates; both kinds are far from the losses of a rate one per cent higher."""
    fused, plain = found[f"{name}, fused"], found[f"{name}, plain"]
    assert agree(fused, plain) and fused != plain


def test_the_reason_of_the_last_change_is_in_the_change_log() -> None:
    assert stored()["reason"] in numerics((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))


# ------------------------------------------------------------------------------------------------ recording


def numerics(changelog: str, newest: bool = False) -> list[str]:
    """The points under every heading Numerics, or only the newest version's, each as one line."""
    sections = re.findall(r"^### Numerics\n(.*?)(?=^##|\Z)", changelog, flags=re.M | re.S)
    points = [point for section in sections[: 1 if newest else None] for point in re.split(r"^- ", section, flags=re.M)]
    return [" ".join(point.split()) for point in points if point.strip()]


def recorded(reason: str, changelog: str, old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The contents of golden.json with this machine's numbers; SystemExit without a reason that the change log gives.

    Numbers of other machines stay where they agree with the new ones; the others are of the past.
    """
    reason = " ".join(reason.split())
    if not reason:
        raise SystemExit('golden losses: no reason given; expected make golden REASON="a line under Numerics"')
    if reason not in numerics(changelog, newest=True):
        raise SystemExit(f"golden losses: CHANGELOG.md: no line {reason!r} under Numerics of the newest version")
    kept = {
        key: record
        for key, record in old.items()
        if key != KEY and all(agree(new[arm], record.get(arm, {})) for arm in new)
    }
    return {"reason": reason, "records": dict(sorted({**kept, KEY: new}.items()))}


LOG = """
## [0.2.0]
### Numerics
- Heads are drawn
  first.
- Other.
### Fixed
- Not this.
## [0.1.0]
### Numerics
- First version.
"""


def test_points_under_numerics_are_read_whole() -> None:
    assert numerics(LOG) == ["Heads are drawn first.", "Other.", "First version."]
    assert numerics(LOG, newest=True) == ["Heads are drawn first.", "Other."]


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("", 'golden losses: no reason given; expected make golden REASON="a line under Numerics"'),
        (" \n", 'golden losses: no reason given; expected make golden REASON="a line under Numerics"'),
        *(
            (reason, f"golden losses: CHANGELOG.md: no line {reason!r} under Numerics of the newest version")
            for reason in ("Heads", "Not this.", "First version.")
        ),
    ],
)
def test_nothing_is_recorded_without_a_reason(reason: str, message: str) -> None:
    with pytest.raises(SystemExit) as caught:
        recorded(reason, LOG, {}, {})
    assert str(caught.value) == message


def test_other_machines_are_kept_where_they_agree() -> None:
    new = {"dense": {"lm_loss": [4.0, 3.0], "router_z": None}}
    near = {"dense": {"lm_loss": [4.0, 3.00009], "router_z": None}}
    old = {"z": near, "far": {"dense": {"lm_loss": [4.0, 3.1], "router_z": None}}, "short": {}, KEY: near}
    found = recorded("Heads are drawn\nfirst.", LOG, old, new)
    assert found == {"reason": "Heads are drawn first.", "records": {KEY: new, "z": near}}


if __name__ == "__main__":
    log = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    before = stored()["records"] if GOLDEN.exists() else {}
    recorded(" ".join(sys.argv[1:]), log, before, {})  # refuse first, compute then
    write_json(GOLDEN, recorded(" ".join(sys.argv[1:]), log, before, {arm: short_run(arm) for arm in ARMS}))
    print(f"{GOLDEN}: recorded for {KEY}")
