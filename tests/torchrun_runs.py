"""What `test_parallel.py` has torchrun start: trainings one after the other by the same processes, as a plan says.

Not a test. A plan is a JSON file: `data`, and a list of `runs`, each with `run`, `directory` and perhaps `stop_at`, a
step after which a signal comes, or `beside`, another budget with which it shares a trunk. Some arms meet what only a
follower sees (`damage`).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

import equipoise.followers
import equipoise.step
from equipoise.config import load
from equipoise.data.dataset import open_dataset
from equipoise.errors import DivergedError, IntegrityError, Interrupted
from equipoise.followers import follow
from equipoise.model.moe import DrawnRouter, Routing
from equipoise.parallel import Group, joined
from equipoise.spec.run import RunConfig
from equipoise.train import train, train_trunk
from equipoise.trunk import trunks_of

SEQUENCES = 6
"""Of a batch: shared out evenly among one, two or three processes."""


def apart(self: Any, x_TD: torch.Tensor, places: Any) -> Routing:
    """A router that sends the first half of a batch to experts 0 and 1, the other to 2 and 3, nothing to others."""
    first_T = 2 * (places.windows_T % SEQUENCES >= SEQUENCES // 2)
    ids_TK = torch.stack([first_T, first_T + 1], dim=1)
    weights_TK = torch.full(ids_TK.shape, 0.5)
    return Routing(logits_TE=None, probs_TE=None, expert_ids_TK=ids_TK, weights_TK=weights_TK)


def use_apart() -> Any:
    """Have random routers choose so; returns what they did before."""
    before, DrawnRouter.forward = DrawnRouter.forward, apart  # type: ignore[method-assign]
    return before


def damage() -> None:
    """In this process alone: no memory for more than one sequence of `memory`, a loss that is NaN in `nan`, a weight
    that changes by itself in `drift`.
    """
    step, mean_loss, at = equipoise.followers.train_step, equipoise.step.mean_loss, {"arm": "", "step": 0}

    def noted_step(*arguments: Any, **named: Any) -> Any:
        at.update(arm=arguments[4].arm, step=named["step"])
        stats = step(*arguments, **named)
        if arguments[4].arm == "drift" and named["step"] == 1:
            with torch.no_grad():
                arguments[0].embed.weight[3, 2] += 1e-6
        return stats

    def damaged(model: Any, output: Any, targets_BS: torch.Tensor) -> torch.Tensor:
        if at["arm"] == "memory" and len(targets_BS) > 1:
            raise torch.OutOfMemoryError("no memory")
        return mean_loss(model, output, targets_BS) * (float("nan") if at["arm"] == "nan" and at["step"] == 5 else 1)

    equipoise.followers.train_step, equipoise.step.mean_loss = noted_step, damaged


def lead(group: Group, plan: dict[str, Any]) -> None:
    """Train what the plan says."""
    dataset = open_dataset(Path(plan["data"]))
    for item in plan["runs"]:
        run, directory, stop_at = load(RunConfig, item["run"]), Path(item["directory"]), item.get("stop_at")

        def stop(directory: Path = directory, stop_at: int | None = stop_at) -> int:
            metrics = directory / "metrics.jsonl"
            if stop_at is None or not metrics.exists():
                return 0
            return 15 * (metrics.read_bytes().count(b'"kind":"train"') >= stop_at)

        trunk = None
        if item.get("beside"):
            (config,) = trunks_of([run, load(RunConfig, item["beside"])])
            trunk = directory.with_name("trunk")
            train_trunk(config, trunk, dataset, device="cpu", group=group)
        options: dict[str, Any] = {"stop_signal": stop, "trunk": trunk, "auto_micro_batch": True, "group": group}
        try:
            train(run, directory, dataset, device="cpu", **options)
        except (Interrupted, DivergedError):
            pass  # the test sees it in the record
        except IntegrityError as error:
            (directory / "error.txt").write_text(str(error), encoding="utf-8")


if __name__ == "__main__":
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    use_apart()
    with joined(rank=rank, size=size, local_rank=rank, local_size=size, device="cpu") as group:
        if rank:
            damage()
            follow(group)
        else:
            lead(group, json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
