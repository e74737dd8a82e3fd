"""What every test of the models needs: one thread, and small models of awkward sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from equipoise.spec.model import DenseFFN, ModelConfig, MoEFFN

MakeConfig = Callable[..., ModelConfig]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The machine is shared, and sums must not depend on how many cores it has."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_config() -> MakeConfig:
    """`make_config("moe", num_layers=1, num_experts=3, …)`: a tiny model, fields of either level by keyword."""

    def make(kind: str, **fields: object) -> ModelConfig:
        ffn_fields = {
            name: fields.pop(name)
            for name in (
                "num_experts",
                "top_k",
                "renormalize",
                "allow_no_router_gradient",
                "router",
                "num_shared_experts",
            )
            if name in fields
        }
        if kind == "moe":
            sizes = {"num_experts": 5, "top_k": 2, "d_expert": 24, "allow_no_router_gradient": True}
            ffn = MoEFFN(**{**sizes, **ffn_fields})  # type: ignore[arg-type]
        else:
            assert kind == "dense" and not ffn_fields
            ffn = DenseFFN(d_ff=40)  # type: ignore[assignment]
        sizes = {"num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "d_model": 40, "vocab_size": 53, "ffn": ffn}
        return ModelConfig(**{**sizes, **fields})  # type: ignore[arg-type]

    return make
