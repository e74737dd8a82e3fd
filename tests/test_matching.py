"""The solver against brute force over every admissible width, the published arrivals, and its refusals."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.errors import ConfigError
from equipoise.matching import resolve_arms, solve, width_step, with_width
from equipoise.spec.model import DenseFFN, ModelConfig, MoEFFN, WidthRule
from equipoise.spec.study import Arm, Match

RULE = WidthRule(ratio=4, multiple_of=128)


def published(**match: object) -> dict[str, Arm]:
    """The published arms with the derived widths; the MoE stands last, so order is not what resolves it."""

    def arm(ffn: DenseFFN | MoEFFN, d_model: int, **asked: object) -> Arm:
        model = ModelConfig(num_layers=4, num_heads=4, d_model=d_model, ffn=ffn)
        return Arm(model=model, match=Match(**{"to": "moe", **asked, **match}) if asked else None)  # type: ignore[arg-type]

    return {
        "dense-active": arm(DenseFFN(d_ff=RULE), 0, on="active_params", adjust="d_model"),
        "dense-total": arm(DenseFFN(d_ff=RULE), 0, on="total_params", adjust="d_model"),
        "dense-active-ffn": arm(DenseFFN(), 512, on="active_params", adjust="ffn.d_ff"),
        "moe": arm(MoEFFN(num_experts=4, top_k=2, d_expert=512), 512),
    }


def quantity(model: ModelConfig, on: str, seq_len: int) -> int:
    """Parameters or training FLOPs per token, written a second time and without any thought of components."""
    d, layers, ffn = model.d_model, model.num_layers, model.ffn
    attention = 2 * d * d + 2 * d * d * model.num_kv_heads // model.num_heads
    if isinstance(ffn, MoEFFN):
        held = ffn.num_experts if on == "total_params" else ffn.top_k
        inner = ffn.num_experts * d + held * 3 * d * ffn.width
    else:
        inner = 3 * d * ffn.width
    if on == "flops_per_token":
        return 6 * (layers * (attention + inner + 2 * seq_len * d) + model.vocab_size * d)
    embeddings = (1 if model.tie_embeddings else 2) * model.vocab_size * d
    return layers * (attention + inner + 2 * d) + d + embeddings


def test_arrives_at_the_published_sizes() -> None:
    arms = resolve_arms(published(), 8348, 512)
    assert list(arms) == ["dense-active", "dense-total", "dense-active-ffn", "moe"]
    found = {name: (arm.model.d_model, arm.model.ffn.width, arm.params.total) for name, arm in arms.items()}
    assert found == {
        "dense-active": (424, 1_664, 14_886_216),
        "dense-total": (512, 2_048, 21_056_000),
        "dense-active-ffn": (512, 1_024, 14_764_544),
        "moe": (512, 512, 21_064_192),
    }
    active, moe = arms["dense-active"], arms["moe"]
    assert (active.quantity, active.reference) == (14_886_216, 14_772_736)
    assert active.residual == 14_886_216 / 14_772_736 - 1
    assert [f"{arms[name].residual:+.2%}" for name in list(arms)[:3]] == ["+0.77%", "-0.04%", "-0.06%"]
    assert (moe.match, moe.quantity, moe.reference, moe.residual) == (None, None, None, None)
    assert moe.params.active == 14_772_736
    assert all(arm.model.vocab_size == 8348 and isinstance(arm.model.ffn, (DenseFFN, MoEFFN)) for arm in arms.values())
    assert arms["dense-total"].flops.training == quantity(arms["dense-total"].model, "flops_per_token", 512)


def test_another_vocabulary_solves_anew() -> None:
    """The real vocabulary may differ from the one asked for: a smaller embedding leaves more to the layers."""
    small, large = (resolve_arms(published(rtol=0.05), size, 512)["dense-active"] for size in (2_000, 60_000))
    assert small.model.d_model < 424 < large.model.d_model


@st.composite
def cases(draw: st.DrawFn) -> tuple[ModelConfig, Match, ModelConfig, int]:
    """An arm with one open width, what it is matched on, a reference, and a context."""
    num_kv_heads = draw(st.integers(1, 2))
    num_heads = num_kv_heads * draw(st.integers(1, 3))
    step = math.lcm(8, 2 * num_heads)
    common = {
        "num_layers": draw(st.integers(1, 3)),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "vocab_size": draw(st.integers(1, 300)),
        "tie_embeddings": draw(st.booleans()),
    }
    d_model = step * draw(st.integers(1, 6))
    num_experts = draw(st.integers(1, 5))
    experts = {"num_experts": num_experts, "top_k": draw(st.integers(1, num_experts)), "renormalize": False}
    reference = ModelConfig(**common, d_model=d_model, ffn=MoEFFN(**experts, d_expert=8 * draw(st.integers(1, 8))))
    adjust = draw(st.sampled_from(["d_model", "ffn.d_ff", "ffn.d_expert"]))
    rule = WidthRule(ratio=draw(st.sampled_from([0.3, 1.0, 2.5, 8 / 3, 4.0])), multiple_of=8 * draw(st.integers(1, 20)))
    if adjust == "d_model":
        width = draw(st.one_of(st.just(rule), st.integers(1, 12).map(lambda n: 8 * n)))
        dense = draw(st.booleans())
        arm = ModelConfig(**common, ffn=DenseFFN(d_ff=width) if dense else MoEFFN(**experts, d_expert=width))
    else:
        ffn = DenseFFN() if adjust == "ffn.d_ff" else MoEFFN(**experts)
        arm = ModelConfig(**common, d_model=step * draw(st.integers(1, 6)), ffn=ffn)
    on = draw(st.sampled_from(["active_params", "total_params", "flops_per_token"]))
    return arm, Match(to="moe", on=on, adjust=adjust, rtol=0.999), reference, draw(st.integers(1, 200))


@settings(max_examples=150, deadline=None)
@given(cases())
def test_the_closest_admissible_width_wins(case: tuple[ModelConfig, Match, ModelConfig, int]) -> None:
    arm, match, reference, seq_len = case
    target = quantity(reference, match.on, seq_len)
    step = math.lcm(8, 2 * arm.num_heads) if match.adjust == "d_model" else 8
    tried: list[tuple[int, int]] = []
    for width in itertools.count(step, step):
        value = quantity(with_width(arm, match.adjust, width), match.on, seq_len)
        tried.append((abs(value - target), width))
        # Quantities exceed the width, so nothing closer comes beyond the first bound; the second keeps the test short.
        if width > 2 * target or (value > 2 * target and len(tried) > 40):
            break
    distance, width = min(tried)
    if distance > 0.999 * target:
        with pytest.raises(ConfigError, match="is not reached within rtol"):
            solve(arm, match, target, seq_len)
        return
    assert solve(arm, match, target, seq_len) == with_width(arm, match.adjust, width)


def test_the_smaller_of_two_equally_close_widths_wins() -> None:
    model = ModelConfig(num_layers=1, num_heads=1, d_model=8, vocab_size=1, ffn=DenseFFN())
    one, two = (quantity(with_width(model, "ffn.d_ff", width), "total_params", 1) for width in (8, 16))
    match = Match(to="other", on="total_params", adjust="ffn.d_ff", rtol=0.5)
    assert solve(model, match, (one + two) // 2, 1).ffn.width == 8
    assert solve(model, match, (one + two) // 2 + 1, 1).ffn.width == 16


def test_rtol_is_a_closed_bound() -> None:
    model = ModelConfig(num_layers=1, num_heads=1, d_model=8, vocab_size=51, ffn=DenseFFN())
    assert quantity(with_width(model, "ffn.d_ff", 8), "total_params", 1) == 880
    assert 0.408 * 625 < 880 - 625  # in floating point; as written they are equal
    match = Match(to="other", on="total_params", adjust="ffn.d_ff", rtol=0.408)
    assert solve(model, match, 625, 1).ffn.width == 8
    with pytest.raises(ConfigError, match="not reached"):
        solve(model, dataclasses.replace(match, rtol=0.4079), 625, 1)


def test_refusal_names_the_neighbours() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_arms(published(rtol=0.0003), 8348, 512)
    assert str(caught.value).splitlines() == [
        "arms.dense-active.match: active_params = 14,772,736 of 'moe' is not reached within rtol = 0.0003; "
        "nearest below: d_model = 416 gives 14,552,096 (-1.49%); "
        "nearest above: d_model = 424 gives 14,886,216 (+0.77%); "
        "raise rtol or adjust another width",
        "arms.dense-total.match: total_params = 21,064,192 of 'moe' is not reached within rtol = 0.0003; "
        "nearest below: d_model = 512 gives 21,056,000 (-0.04%); "
        "nearest above: d_model = 520 gives 21,451,560 (+1.84%); "
        "raise rtol or adjust another width",
        "arms.dense-active-ffn.match: active_params = 14,772,736 of 'moe' is not reached within rtol = 0.0003; "
        "nearest below: ffn.d_ff = 1,024 gives 14,764,544 (-0.06%); "
        "nearest above: ffn.d_ff = 1,032 gives 14,813,696 (+0.28%); "
        "raise rtol or adjust another width",
    ]


def test_refusal_when_even_the_smallest_width_is_too_large() -> None:
    tiny = ModelConfig(num_layers=1, num_heads=1, d_model=8, ffn=DenseFFN(d_ff=8))
    wide = ModelConfig(num_layers=1, num_heads=1, d_model=16, ffn=DenseFFN())
    arms = {
        "tiny": Arm(model=tiny),
        "wide": Arm(model=wide, match=Match(to="tiny", on="total_params", adjust="ffn.d_ff")),
    }
    with pytest.raises(ConfigError) as caught:
        resolve_arms(arms, 10, 8)
    assert str(caught.value) == (
        "arms.wide.match: total_params = 552 of 'tiny' is not reached within rtol = 0.01; nearest below: none; "
        "nearest above: ffn.d_ff = 8 gives 1,616 (+192.75%); raise rtol or adjust another width"
    )


def test_widths_move_in_admissible_steps() -> None:
    model = ModelConfig(num_layers=1, num_heads=6, ffn=DenseFFN())
    assert width_step(model, "d_model") == 24
    assert width_step(dataclasses.replace(model, num_heads=2, num_kv_heads=2), "d_model") == 8
    assert width_step(dataclasses.replace(model, num_heads=8, num_kv_heads=8), "d_model") == 16
    assert width_step(model, "ffn.d_ff") == 8
