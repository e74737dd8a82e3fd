"""The plan before a study, and the disk it needs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from equipoise.config import dump, read_toml
from equipoise.errors import ResourceError
from equipoise.spec.study import parse_study
from equipoise.study import DataFacts, check_disk, plan


def test_the_plan_counts_runs_steps_tokens_flops_and_disk(tiny: Any, tiny_toml: str) -> None:
    spec = parse_study(read_toml(tiny_toml.replace("budgets = [5120]", "budgets = [5120, 51200]"), "tiny"))
    planned = plan(spec, DataFacts(vocab_size=300, train_tokens=25_601, certain=True), {"moe": 0.5, "dense": 0.25}, 2)
    assert planned["num_runs"] == 12
    assert [(b["steps"], b["tokens"], b["epochs"]) for b in planned["budgets"]] == [(10, 5120, 0.2), (100, 51200, 2.0)]
    assert planned["train_s"] == pytest.approx((0.5 + 0.25) * 110 * 3 / 2)
    flops = [arm["flops_per_token"] for arm in planned["arms"]]
    assert planned["train_flops"] == sum(flops) * (5120 + 51200) * 3
    params = [arm["params"]["total"] for arm in planned["arms"]]
    # per run at most four checkpoints of weights and two moments in float32, and 240 bytes a step
    assert planned["disk_bytes"] == 6 * 4 * 12 * sum(params) + 158_400
    for arm in planned["arms"]:
        assert sum(arm["by_component"].values()) == arm["params"]["total"]
    assert json.loads(json.dumps(dump(planned), allow_nan=False))["name"] == "tiny"
    unknown = plan(spec, DataFacts(vocab_size=300, train_tokens=None, certain=False))
    assert unknown["budgets"][0]["epochs"] is None and unknown["train_s"] is None


def test_a_disk_too_small_is_refused_before_anything_is_trained(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_disk(tmp_path, tiny.runs)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000_000))
    with pytest.raises(ResourceError, match=r"1,000,000 bytes free; expected at least [\d,]+ for 6 runs"):
        check_disk(tmp_path, tiny.runs)
