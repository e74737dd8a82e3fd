"""The decoder as a whole: what may influence what, initialisation shared between arms, losses, precision."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from equipoise.model.moe import router_losses
from equipoise.model.transformer import KVCache, Transformer, build, generate, mean_loss, token_losses
from equipoise.spec.model import DenseFFN, ModelConfig, MoEFFN, WidthRule

ARMS = [
    ("dense", {}),
    ("dense", {"tie_embeddings": False, "num_kv_heads": 4}),
    ("moe", {}),
    ("moe", {"num_experts": 4, "top_k": 1, "renormalize": False}),
]


KERNELS = ["plain", "fused"]


def tokens(B: int, S: int, vocab_size: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.Generator(np.random.Philox(seed)).integers(vocab_size, size=(B, S)))


def logits_of(model: Transformer, inputs_BS: Tensor) -> Tensor:
    with torch.no_grad():
        return model.logits(model(inputs_BS).hidden_TD).view(*inputs_BS.shape, -1)


# ------------------------------------------------------------------------------------------ what influences what


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("kind", "fields"), ARMS)
def test_no_token_sees_a_later_one(make_config, kind, fields, kernels) -> None:
    model = build(make_config(kind, init_std=0.3, **fields), seed=1, kernels=kernels).double()
    inputs = tokens(2, 19, 53)
    before = logits_of(model, inputs)
    for t in (0, 1, 7, 18):
        changed = inputs.clone()
        changed[1, t] = (changed[1, t] + 1) % 53
        moved = (logits_of(model, changed) - before).abs().amax(dim=-1)
        assert float(moved[0].max()) < 1e-12, "another sequence moved"
        assert t == 0 or float(moved[1, :t].max()) < 1e-12, "an earlier position moved"
        assert float(moved[1, t:].min()) > 1e-9, "a later position did not move: the probe sees nothing"


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("kind", "fields"), ARMS)
def test_losses_do_not_depend_on_the_company(make_config, kind, fields, kernels) -> None:
    """Alone, in any batch, in any order; one sequence is the same word throughout, so its experts overflow."""
    model = build(make_config(kind, init_std=0.3, **fields), seed=1, kernels=kernels)
    windows = tokens(6, 18, 53)
    windows[2] = 7
    inputs, targets = windows[:, :-1], windows[:, 1:]

    def losses(rows: list[int]) -> Tensor:
        with torch.no_grad():
            return token_losses(model, model(inputs[rows]), targets[rows]).view(len(rows), -1)

    together = losses([0, 1, 2, 3, 4, 5])
    alone = torch.cat([losses([row]) for row in range(6)])
    torch.testing.assert_close(alone, together, rtol=0, atol=1e-5)
    shuffled = [4, 2, 2, 0, 5, 1, 3]
    torch.testing.assert_close(losses(shuffled), together[shuffled], rtol=0, atol=1e-5)


def test_sequences_start_at_position_zero(make_config) -> None:
    model = build(make_config("dense", init_std=0.3), seed=1)
    inputs = tokens(3, 9, 53)
    torch.testing.assert_close(logits_of(model, inputs)[:, :4], logits_of(model, inputs[:, :4]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("kind", "fields"), ARMS)
def test_every_parameter_has_a_gradient(make_config, kind, fields, kernels) -> None:
    model = build(make_config(kind, **fields), seed=1, kernels=kernels)
    windows = tokens(3, 40, 53)
    output = model(windows[:, :-1])
    loss = mean_loss(model, output, windows[:, 1:])
    if output.routing:
        assert len(output.routing) == 3
        loss = loss + sum(router_losses(output.routing, 3))
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("kernels", KERNELS)
def test_the_same_pass_gives_the_same_bits(make_config, kernels) -> None:
    windows = tokens(4, 33, 53)
    gradients = []
    for _ in range(2):
        model = build(make_config("moe", init_std=0.3), seed=1, kernels=kernels)
        output = model(windows[:, :-1])
        (mean_loss(model, output, windows[:, 1:]) + sum(router_losses(output.routing, 2))).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_dense_models_have_no_routing(make_config) -> None:
    assert build(make_config("dense"), seed=0)(tokens(1, 3, 53)).routing == ()


# ------------------------------------------------------------------------------------------------ initialisation


def test_arms_of_a_seed_share_every_tensor_of_equal_name_and_shape(make_config) -> None:
    dense, moe = build(make_config("dense"), seed=3), build(make_config("moe"), seed=3)
    theirs = dict(moe.named_parameters())
    shared = [n for n, p in dense.named_parameters() if n in theirs and theirs[n].shape == p.shape]
    assert len(shared) == 1 + 3 * 6 + 1  # embedding; per block two norms and four projections; final norm
    for name in shared:
        assert torch.equal(dict(dense.named_parameters())[name], theirs[name]), name


def test_initialisation_is_a_function_of_config_and_seed_alone(make_config) -> None:
    config = make_config("moe", tie_embeddings=False)
    before = torch.get_rng_state()
    first, again, other = build(config, seed=3), build(config, seed=3), build(config, seed=4)
    assert torch.equal(torch.get_rng_state(), before), "torch's global generator was used"
    for (name, one), same, different in zip(
        first.named_parameters(), again.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(one, same)
        assert name.endswith("norm.weight") or not torch.equal(one, different), name
    drawn = [p.flatten()[:40] for n, p in first.named_parameters() if not n.endswith("norm.weight")]
    directions = torch.stack([d / d.norm() for d in drawn])
    assert (directions @ directions.T - torch.eye(len(drawn))).abs().max() < 0.7, "two tensors share their draws"


def test_initial_scales() -> None:
    ffn = MoEFFN(num_experts=4, top_k=2, d_expert=128)
    config = ModelConfig(
        num_layers=8, num_heads=4, d_model=128, vocab_size=512, ffn=ffn, tie_embeddings=False, init_std=0.05
    )
    for name, parameter in build(config, seed=0).named_parameters():
        assert parameter.dtype == torch.float32
        if name.endswith("norm.weight"):
            assert torch.equal(parameter, torch.ones(128))
            continue
        expected = 0.05 / 4 if name.endswith(("w_o", "w_down")) else 0.05  # 1/sqrt(2·8) = 1/4
        count = parameter.numel()
        assert float(parameter.detach().std()) == pytest.approx(expected, rel=5 / math.sqrt(2 * count)), name
        assert abs(float(parameter.detach().mean())) < 5 * expected / math.sqrt(count), name


def test_initial_routing_is_spread() -> None:
    """No expert takes more than 3 times its fair share of 4,096 tokens, in any layer."""
    for E, K in ((4, 1), (4, 2), (8, 2)):
        ffn = MoEFFN(num_experts=E, top_k=K, d_expert=16, renormalize=K > 1)
        model = build(ModelConfig(num_layers=3, num_heads=2, d_model=64, vocab_size=1024, ffn=ffn), seed=0)
        with torch.no_grad():
            output = model(tokens(32, 128, 1024))
        for routing in output.routing:
            counts = torch.bincount(routing.expert_ids_TK.flatten(), minlength=E)
            assert int(counts.max()) < 3 * 4096 * K / E


def test_names_and_state(make_config) -> None:
    """Names are a file format; the rotation tables are no part of it, however long the inputs were."""
    model = build(make_config("moe", num_layers=1, tie_embeddings=False), seed=0)
    names = [
        "embed.weight",
        "blocks.0.attention_norm.weight",
        *(f"blocks.0.attention.{w}" for w in ("w_q", "w_k", "w_v", "w_o")),
        "blocks.0.ffn_norm.weight",
        "blocks.0.ffn.router.weight",
        *(f"blocks.0.ffn.experts.{w}" for w in ("w_gate", "w_up", "w_down")),
        "final_norm.weight",
        "head.weight",
    ]
    assert list(model.state_dict()) == names == [name for name, _ in model.named_parameters()]
    model(tokens(1, 99, 53))
    assert list(model.state_dict()) == names
    fused = build(make_config("moe", num_layers=1, tie_embeddings=False), seed=0, kernels="fused")
    for name, tensor in fused.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
    assert list(fused.state_dict()) == names
    dense = build(make_config("dense", num_layers=1), seed=0)
    assert [n for n in dense.state_dict() if "ffn." in n] == [f"blocks.0.ffn.{w}" for w in ("w_gate", "w_up", "w_down")]
    assert "head.weight" not in dense.state_dict()


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"vocab_size": 0}, "vocab_size"),
        ({"d_model": 0, "vocab_size": 0}, "d_model, vocab_size"),
        ({"ffn": DenseFFN()}, "ffn.d_ff"),
        ({"ffn": MoEFFN(num_experts=2, top_k=1, renormalize=False)}, "ffn.d_expert"),
    ],
)
def test_open_models_are_refused(make_config, fields, names) -> None:
    with pytest.raises(ValueError, match=f"^{names}: still open; resolve the model first$"):
        build(make_config("dense", **fields), seed=0)


def test_a_width_rule_is_followed(make_config) -> None:
    model = build(make_config("dense", ffn=DenseFFN(d_ff=WidthRule(ratio=3.1, multiple_of=8))), seed=0)
    assert model.blocks[0].ffn.w_gate.shape == (
        128,
        40,
    )  # 3.1 · 40 = 124, whose nearest multiple of 8 is 128 (halves up)


# ------------------------------------------------------------------------------------------- losses and precision


@pytest.mark.parametrize("with_gradient", [False, True])
@pytest.mark.parametrize("kernels", KERNELS)
def test_token_losses_are_negative_log_probabilities_in_token_order(make_config, kernels, with_gradient) -> None:
    model = build(make_config("dense", init_std=0.3), seed=1, kernels=kernels)
    windows = tokens(3, 8, 53)
    with torch.set_grad_enabled(with_gradient):
        found = token_losses(model, model(windows[:, :-1]), windows[:, 1:])
    assert found.requires_grad is with_gradient
    assert found.dtype == torch.float32 and found.shape == (21,)
    logits = logits_of(model, windows[:, :-1]).double().numpy()
    for b, s in np.ndindex(3, 7):
        row = logits[b, s]
        expected = math.log(np.exp(row).sum()) - row[windows[b, s + 1]]
        assert found[7 * b + s].item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("seq_len", [1, 19, 520])
@pytest.mark.parametrize(("kind", "fields"), ARMS)
def test_fused_kernels_give_the_plain_losses_gradients_and_routing(make_config, kind, fields, seq_len) -> None:
    """Sequences on both sides of the length from which attention is blocked; weights wide enough to be uneven."""
    config, windows = make_config(kind, init_std=0.1, num_layers=2, **fields), tokens(2, seq_len + 1, 53)
    found = []
    for kernels in KERNELS:
        model = build(config, seed=1, kernels=kernels)
        output = model(windows[:, :-1])
        loss = mean_loss(model, output, windows[:, 1:])
        loss.backward()
        with torch.no_grad():
            losses_T = token_losses(model, output, windows[:, 1:])
        found.append((loss.item(), losses_T, output, [p.grad for p in model.parameters()]))
    (loss, losses_T, output, gradients), (fused_loss, fused_losses_T, fused_output, fused_gradients) = found
    assert fused_loss == pytest.approx(loss, abs=1e-6)
    torch.testing.assert_close(fused_losses_T, losses_T, rtol=0, atol=5e-6)
    assert fused_output.hidden_TD.shape == output.hidden_TD.shape
    for one, other in zip(fused_output.routing, output.routing, strict=True):
        assert torch.equal(one.expert_ids_TK, other.expert_ids_TK)
    for one, other in zip(fused_gradients, gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * max(1e-2, float(other.abs().max())))


def test_fused_kernels_write_the_same_text(make_config) -> None:
    texts = [
        generate(
            build(make_config("moe", init_std=0.3), seed=1, kernels=kernels), [3, 1, 4], 30, stop_id=None, context=16
        )
        for kernels in KERNELS
    ]
    assert texts[0] == texts[1] and len(texts[0]) == 30


def test_fused_kernels_are_refused_under_autocast(make_config) -> None:
    model = build(make_config("dense"), seed=0, kernels="fused")
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(ValueError, match=r"^kernels = 'fused' is not accepted under autocast; expected 'plain'$"),
    ):
        model(tokens(1, 3, 53))


@pytest.mark.parametrize(("kind", "fields"), ARMS)
def test_bfloat16_autocast_keeps_losses_and_router_in_float32(make_config, kind, fields) -> None:
    model = build(make_config(kind, **fields), seed=1)
    windows = tokens(3, 18, 53)
    plain = token_losses(model, model(windows[:, :-1]), windows[:, 1:])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(windows[:, :-1])
        logits = model.logits(output.hidden_TD)
        losses = token_losses(model, output, windows[:, 1:])
    assert logits.dtype == losses.dtype == torch.float32
    assert logits.isfinite().all() and all(r.logits_TE.dtype == torch.float32 for r in output.routing)
    torch.testing.assert_close(losses, plain, rtol=0, atol=0.1)
    losses.mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.dtype == p.dtype for p in model.parameters())


def test_a_filled_cache_takes_one_token_at_a_time(make_config) -> None:
    model = build(make_config("dense"), seed=0)
    caches = [KVCache() for _ in range(3)]
    model(tokens(1, 5, 53), caches)
    with pytest.raises(ValueError, match=r"^2 tokens after 5 cached ones are not accepted; expected one at a time$"):
        model(tokens(1, 2, 53), caches)
