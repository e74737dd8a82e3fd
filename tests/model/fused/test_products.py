"""Products of tokens and weights: numpy is the oracle, by whichever library they are made."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from equipoise.model.fused import products
from equipoise.model.fused.products import linear, times, times_transposed

needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this build of torch comes without oneDNN"
)


@pytest.fixture(params=[False, pytest.param(True, marks=needs_onednn)], ids=["mm", "onednn"])
def library(request, monkeypatch) -> None:
    monkeypatch.setattr(products, "ONEDNN", request.param)
    monkeypatch.setattr(products, "MIN_WIDTH", 1)
    monkeypatch.setattr(products, "ROWS", 1)


@pytest.mark.parametrize(("T", "I", "O"), [(1, 1, 1), (13, 7, 5), (130, 129, 257)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_numpy(library, draw, T, I, O, dtype) -> None:  # noqa: E741
    x, y, weight = (draw(*shape, seed=i, dtype=dtype).detach() for i, shape in enumerate(((T, I), (T, O), (O, I))))
    wide = [tensor.double().numpy() for tensor in (x, y, weight)]
    tolerance = 1e-4 if dtype == torch.float32 else 1e-11
    np.testing.assert_allclose(times_transposed(x, weight).numpy(), wide[0] @ wide[2].T, rtol=0, atol=tolerance)
    np.testing.assert_allclose(times(y, weight).numpy(), wide[1] @ wide[2], rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(11, 7), (2, 5, 7)])
def test_linear_equals_the_plain_one(library, held_to, draw, shape, dtype) -> None:
    held_to(linear, F.linear, draw(*shape, dtype=dtype), draw(3, 7, seed=1, dtype=dtype))


def test_gradients(checked, draw) -> None:
    checked(linear, draw(4, 3), draw(2, 3, seed=1))


@needs_onednn
def test_the_library_is_chosen_by_shape_and_dtype(monkeypatch) -> None:
    asked: list[tuple[int, ...]] = []
    onednn = products._onednn
    monkeypatch.setattr(products, "ONEDNN", True)
    monkeypatch.setattr(products, "_onednn", lambda x, w: asked.append(tuple(w.shape)) or onednn(x, w))
    for T, width, dtype in (
        (512, 128, torch.float32),
        (512, 127, torch.float32),
        (511, 128, torch.float32),
        (0, 128, torch.float32),
        (512, 128, torch.float64),
    ):
        times_transposed(torch.zeros(T, width, dtype=dtype), torch.zeros(130, width, dtype=dtype))
    assert asked == [(130, 128)]
