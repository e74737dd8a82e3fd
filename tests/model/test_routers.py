"""Biased, frozen, hash and random routers and shared experts against double loops; nothing but the choice differs."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

from equipoise.model.layers import SwiGLU
from equipoise.model.moe import (
    GOLDEN,
    DrawnRouter,
    MoE,
    Places,
    Router,
    Routing,
    load_balance_loss,
    mixed,
    move_biases,
    moved_bias,
    router_losses,
    router_z_loss,
)
from equipoise.model.transformer import Transformer, build, generate
from equipoise.optim import make_adamw, parameter_groups
from equipoise.spec.model import BalanceBias, ModelConfig
from equipoise.spec.recipe import Optim

KEY = 0xFEDCBA98
T, D, F, E = 26, 11, 7, 5


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.Generator(np.random.Philox(seed)).standard_normal(shape))


def make_places(num: int = T) -> Places:
    """Two windows, not numbered from 0, of half the tokens each."""
    draws = np.random.Generator(np.random.Philox(4)).integers(0, 9, num)
    return Places(
        token_ids_T=torch.from_numpy(draws),
        windows_T=torch.tensor([70_000] * (num // 2) + [3] * (num - num // 2)),
        positions_T=torch.cat([torch.arange(num // 2), torch.arange(num - num // 2)]),
    )


def make_moe(K: int, renormalize: bool, fused: bool, **options: object) -> MoE:
    moe = MoE(D, F, E, K, renormalize, fused, key=KEY, **options).double()  # type: ignore[arg-type]
    with torch.no_grad():
        for index, tensor in enumerate([*moe.parameters(), *moe.buffers()]):
            tensor.copy_(0.7 * random(*tensor.shape, seed=index))
    return moe


def scramble(x: int) -> int:
    """The scramble in Python's whole numbers, which cannot overflow."""
    x %= 2**32
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) % 2**32
    x = ((x ^ (x >> 15)) * 0x735A2D97) % 2**32
    return x ^ (x >> 15)


def drawn(kind: str, places: Places, t: int, K: int) -> list[int]:
    """The K experts of token t, one number at a time."""
    if kind == "hash":
        start = scramble(int(places.token_ids_T[t]) ^ KEY)
    else:
        start = scramble(scramble(int(places.windows_T[t]) ^ KEY) ^ int(places.positions_T[t]))
    return sorted(range(E), key=lambda e: scramble(start + e * 0x9E3779B9))[:K]


def oracle(
    moe: MoE, kind: str, x_TD: Tensor, places: Places, K: int, renormalize: bool
) -> tuple[list[list[int]], Tensor]:
    """(experts, output), one token, one expert, one shared expert at a time."""
    experts, shared, chosen, outputs = moe.experts, moe.shared, [], []

    def swiglu(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
        gate = w_gate @ x
        return w_down @ (gate * torch.sigmoid(gate) * (w_up @ x))

    for t in range(len(x_TD)):
        if kind in ("hash", "random"):
            best = drawn(kind, places, t, K)
            weights = [torch.tensor(1 / K, dtype=torch.float64)] * K
        else:
            exps = [torch.exp((moe.router.weight[e] * x_TD[t]).sum()) for e in range(E)]
            probs = [value / sum(exps) for value in exps]
            bias = [0.0] * E if moe.router.bias is None else moe.router.bias.tolist()
            best = sorted(range(E), key=lambda e: (-(float(probs[e].detach()) + bias[e]), e))[:K]
            divisor = sum(probs[e] for e in best) if renormalize else 1.0
            weights = [probs[e] / divisor for e in best]
        output = torch.zeros(D, dtype=torch.float64)
        for e, weight in zip(best, weights, strict=True):
            output = output + weight * swiglu(x_TD[t], experts.w_gate[e], experts.w_up[e], experts.w_down[e])
        for s in range(0 if shared is None else len(shared.w_gate) // F):
            own = slice(s * F, (s + 1) * F)
            output = output + swiglu(x_TD[t], shared.w_gate[own], shared.w_up[own], shared.w_down[:, own])
        chosen.append(best)
        outputs.append(output)
    return chosen, torch.stack(outputs)


OPTIONS = [
    ("learned", {"bias": True}),
    ("learned", {"bias": True, "num_shared": 2}),
    ("learned", {"num_shared": 1}),
    ("frozen", {}),
    ("frozen", {"num_shared": 3}),
    ("hash", {}),
    ("hash", {"num_shared": 2}),
    ("random", {}),
    ("random", {"num_shared": 1}),
]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("K", [1, 2, E])
@pytest.mark.parametrize(("kind", "options"), OPTIONS)
def test_equals_the_double_loop(kind: str, options: dict[str, object], K: int, renormalize: bool, fused: bool) -> None:
    moe, places = make_moe(K, renormalize, fused, router=kind, **options), make_places()
    x = random(T, D, seed=99).requires_grad_()
    found, routing = moe(x, places)
    chosen, expected = oracle(moe, kind, x, places, K, renormalize)
    assert routing.expert_ids_TK.tolist() == chosen
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    parameters = {"x": x, **{name: p for name, p in moe.named_parameters() if p.requires_grad}}
    assert ("router.weight" in parameters) is (kind == "learned")
    out = random(T, D, seed=98)
    gradients = [
        torch.autograd.grad((y * out).sum(), list(parameters.values()), allow_unused=True, materialize_grads=True)
        for y in (found, expected)
    ]
    for name, one, other in zip(parameters, *gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11, msg=name)


# ------------------------------------------------------------------------------------------------ the bias


def test_a_bias_moves_the_choice_and_never_the_weight() -> None:
    """Probabilities 0.5, 0.3, 0.2; worked by hand."""
    router = Router(1, 3, 1, renormalize=False, bias=True).double()
    with torch.no_grad():
        router.weight.copy_(torch.tensor([[0.5], [0.3], [0.2]]).log())
        assert router(torch.ones(1, 1, dtype=torch.float64)).expert_ids_TK.tolist() == [[0]]
        router.bias.copy_(torch.tensor([0.0, 0.0, 0.31]))
        routing = router(torch.ones(1, 1, dtype=torch.float64))
    assert routing.expert_ids_TK.tolist() == [[2]]  # 0.51 is above 0.5
    assert routing.weights_TK.tolist() == [[pytest.approx(0.2)]]
    assert routing.probs_TE.tolist() == [pytest.approx([0.5, 0.3, 0.2])]


@pytest.mark.parametrize("K", [1, 3, E])
def test_a_bias_of_zero_is_none_to_the_last_bit(K: int) -> None:
    plain, biased = make_moe(K, False, True), make_moe(K, False, True, bias=True)
    biased.load_state_dict({**plain.state_dict(), "router.bias": torch.zeros(E)})
    x = random(T, D, seed=99)
    (one, routing), (other, other_routing) = plain(x), biased(x)
    assert torch.equal(one, other) and torch.equal(routing.weights_TK, other_routing.weights_TK)
    assert torch.equal(routing.expert_ids_TK, other_routing.expert_ids_TK)


@pytest.mark.parametrize(
    ("counts", "signs"),
    [
        ([4, 1, 4], [-1, 1, -1]),  # the mean is 3
        ([7, 3, 5, 5], [-1, 1, 0, 0]),  # an expert with exactly its share stays
        ([2, 2, 2], [0, 0, 0]),
        ([0, 0, 9], [1, 1, -1]),
        ([1, 1, 2], [1, 1, -1]),  # the mean is no whole number
        ([5], [0]),
    ],
)
def test_the_move_worked_by_hand(counts: list[int], signs: list[int]) -> None:
    before = torch.arange(len(counts), dtype=torch.float64)
    after = moved_bias(before, torch.tensor(counts), 0.25)
    assert after.tolist() == [e + 0.25 * sign for e, sign in enumerate(signs)]
    assert before.tolist() == list(range(len(counts)))


def test_every_layer_moves_by_its_own_loads(make_config) -> None:
    model = build(biased(make_config("moe"), 0.5), seed=0)
    move_biases(model, torch.tensor([[1, 2, 3, 2, 2], [9, 0, 0, 0, 1], [2, 2, 2, 2, 2]]), 0.5)
    found = [model.state_dict()[f"blocks.{layer}.ffn.router.bias"].tolist() for layer in range(3)]
    assert found == [[0.5, 0, -0.5, 0, 0], [-0.5, 0.5, 0.5, 0.5, 0.5], [0, 0, 0, 0, 0]]


def biased(config: ModelConfig, rate: float) -> ModelConfig:
    return dataclasses.replace(config, ffn=dataclasses.replace(config.ffn, balance=BalanceBias(rate=rate)))


def test_a_bias_is_state_and_no_parameter(make_config) -> None:
    plain, model = build(make_config("moe"), seed=0), build(biased(make_config("moe"), 0.1), seed=0)
    names = {f"blocks.{layer}.ffn.router.bias" for layer in range(3)}
    assert model.state_dict().keys() - plain.state_dict().keys() == names
    assert dict(model.named_parameters()).keys() == dict(plain.named_parameters()).keys()
    assert all(not model.state_dict()[name].any() for name in names)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in plain.state_dict().items())


# ------------------------------------------------------------------------------------------------ hash and random


def test_the_scramble_is_that_of_whole_numbers_and_one_to_one() -> None:
    values = [*range(3000), *(2**32 - 1 - n for n in range(3000)), *(GOLDEN * n for n in range(3000))]
    found = mixed(torch.tensor(values)).tolist()
    assert found == [scramble(value) for value in values]
    assert len(set(found)) == len({value % 2**32 for value in values})


@pytest.mark.parametrize("kind", ["hash", "random"])
def test_all_sets_of_k_experts_are_equally_likely(kind: str) -> None:
    """Over 60,000 ids or places: chi-square over the ten sets of two and the five first places; no expert twice."""
    num = 60_000
    places = Places(
        token_ids_T=torch.arange(num), windows_T=torch.arange(num) // 100, positions_T=torch.arange(num) % 100
    )
    ids_TK = DrawnRouter(kind, E, 2, KEY)(torch.zeros(num, 1), places).expert_ids_TK  # type: ignore[arg-type]
    sets = [tuple(sorted(pair)) for pair in ids_TK.tolist()]
    observed = [sets.count(pair) for pair in itertools.combinations(range(E), 2)]
    assert sum(observed) == num
    assert scipy.stats.chisquare(observed).pvalue > 1e-4
    assert scipy.stats.chisquare(torch.bincount(ids_TK[:, 0]).tolist()).pvalue > 1e-4
    # Neighbours are independent: the experts of one place say nothing of the next one's.
    pairs = np.histogram2d(ids_TK[:-1, 0], ids_TK[1:, 0], bins=E)[0]
    assert scipy.stats.chi2_contingency(pairs).pvalue > 1e-4


def routed(
    model: Transformer, inputs: list[list[int]], windows: list[int] | None = None
) -> list[list[list[list[int]]]]:
    """Experts by layer, sequence and position."""
    tokens = torch.tensor(inputs)
    with torch.no_grad():
        output = model(tokens, windows_B=None if windows is None else torch.tensor(windows))
    return [r.expert_ids_TK.view(*tokens.shape, -1).tolist() for r in output.routing]


def test_a_hash_router_sees_the_token_and_its_layer_alone(make_config) -> None:
    model = build(make_config("moe", router="hash", vocab_size=211), seed=0)
    layers = routed(model, [list(range(211)), list(range(210, -1, -1))], windows=[5, 9])
    for forwards, backwards in layers:
        assert forwards == backwards[::-1] and len({tuple(pair) for pair in forwards}) == 20
    assert layers[0] != layers[1] != layers[2] != layers[0]
    assert routed(build(make_config("moe", router="hash", vocab_size=211), seed=1), [list(range(211))])[0] != layers[0]


def test_a_random_router_sees_window_position_and_layer_alone(make_config) -> None:
    model = build(make_config("moe", router="random"), seed=0)
    layers = routed(model, [[7] * 40, list(range(40)), [7] * 40], windows=[5, 5, 6])
    for same, tokens, other in layers:
        assert same == tokens != other
    assert layers[0] != layers[1] != layers[2] != layers[0]
    assert routed(model, [[1] * 40], windows=[6]) == [[layer[2]] for layer in layers]  # whatever else is in the batch
    assert routed(model, [[1] * 9], windows=[6]) == [[layer[2][:9]] for layer in layers]  # however long it is
    assert routed(model, [[1] * 9]) == routed(model, [[2] * 9], windows=[0])
    assert routed(build(make_config("moe", router="random"), seed=1), [[7] * 40], [5])[0] != [layers[0][0]]


def test_the_choice_ignores_the_hidden_states(make_config) -> None:
    for kind in ("hash", "random"):
        models = [build(make_config("moe", router=kind, init_std=std), seed=0) for std in (0.02, 1.0)]
        assert routed(models[0], [[3, 1, 4, 1, 5]], [2]) == routed(models[1], [[3, 1, 4, 1, 5]], [2])


def test_weights_are_float32_under_autocast() -> None:
    moe, places = make_moe(2, True, False, router="hash").float(), make_places()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, routing = moe(random(T, D).bfloat16(), places)
    assert routing.weights_TK.dtype == torch.float32 and output.isfinite().all()
    assert routing.weights_TK.unique().tolist() == [0.5] and routing.logits_TE is routing.probs_TE is None


def test_without_probabilities_there_are_no_losses() -> None:
    routing: Routing = make_moe(2, True, False, router="random")(random(T, D), make_places())[1]
    message = r"^a router without weights \(hash, random\) has no losses; expected a learned or frozen one$"
    for loss in (
        lambda: load_balance_loss(routing, 1),
        lambda: router_z_loss(routing),
        lambda: router_losses([routing], 1),
    ):
        with pytest.raises(ValueError, match=message):
            loss()


@pytest.mark.parametrize("fields", [{"top_k": 1}, {"top_k": 3}, {"top_k": 5}])
@pytest.mark.parametrize("router", ["frozen", "hash", "random"])
def test_written_with_a_cache_as_without(make_config, router: str, fields: dict[str, int]) -> None:
    model = build(make_config("moe", init_std=0.3, router=router, num_shared_experts=1, **fields), seed=2)
    prompt, context = [5, 17, 3, 50, 8], 12
    ids, held = list(prompt), list(prompt)
    for _ in range(24):
        if len(held) > context:
            held = ids[-context // 2 :]
        with torch.no_grad():
            ids.append(int(model.logits(model(torch.tensor([held])).hidden_TD)[-1].argmax()))
        held = [*held, ids[-1]]
    assert generate(model, prompt, 24, stop_id=None, context=context) == ids[5:]


# ------------------------------------------------------------------------------------------------ frozen


def test_a_frozen_router_starts_as_a_learned_one_and_is_left_alone_by_the_optimizer(make_config) -> None:
    learned, frozen = build(make_config("moe"), seed=3), build(make_config("moe", router="frozen"), seed=3)
    for (name, one), (other_name, other) in zip(learned.named_parameters(), frozen.named_parameters(), strict=True):
        assert name == other_name and torch.equal(one, other)
        assert other.requires_grad is not name.endswith("router.weight")
    ours = {id(p) for group in parameter_groups(frozen) for p in group}
    assert not any(id(p) in ours for name, p in frozen.named_parameters() if name.endswith("router.weight"))
    before = {name: p.detach().clone() for name, p in frozen.named_parameters()}
    optimizer = make_adamw(frozen, Optim(lr=0.1, weight_decay=0.5))
    frozen(torch.tensor([[1, 2, 3, 4]])).hidden_TD.square().sum().backward()
    optimizer.step()
    moved = {name for name, p in frozen.named_parameters() if not torch.equal(p, before[name])}
    assert moved.isdisjoint(f"blocks.{layer}.ffn.router.weight" for layer in range(3)) and len(moved) > 20


# ------------------------------------------------------------------------------------------------ shared experts


def test_shared_experts_are_one_wide_dense_layer_beside_the_routed_ones() -> None:
    moe, alone = make_moe(2, True, False, num_shared=3), make_moe(2, True, False)
    wide = SwiGLU(D, 3 * F).double()
    assert moe.shared is not None
    wide.load_state_dict(moe.shared.state_dict())
    alone.load_state_dict({name: t for name, t in moe.state_dict().items() if not name.startswith("shared.")})
    x = random(T, D, seed=99)
    torch.testing.assert_close(moe(x)[0], alone(x)[0] + wide(x), rtol=0, atol=1e-14)


def test_shared_experts_change_no_other_initial_tensor(make_config) -> None:
    plain, shared = build(make_config("moe"), seed=1), build(make_config("moe", num_shared_experts=2), seed=1)
    own = {f"blocks.{layer}.ffn.shared.{w}" for layer in range(3) for w in ("w_gate", "w_up", "w_down")}
    assert shared.state_dict().keys() - plain.state_dict().keys() == own
    assert all(torch.equal(tensor, shared.state_dict()[name]) for name, tensor in plain.state_dict().items())
    std = {w: float(shared.state_dict()[f"blocks.0.ffn.shared.{w}"].std()) for w in ("w_up", "w_down")}
    assert std["w_up"] == pytest.approx(0.02, rel=0.1) and std["w_down"] == pytest.approx(0.02 / 6**0.5, rel=0.1)
