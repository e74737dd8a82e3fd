"""Writing with a cache: equal to encoding everything anew for each token, and its edges."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from equipoise.errors import ConfigError
from equipoise.model.transformer import Transformer, build, generate

PROMPT = [5, 17, 3, 50, 8]


def philox(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(seed))


def next_logits(model: Transformer, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model.logits(model(torch.tensor([ids])).hidden_TD)[-1]


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_greedy_equals_the_uncached_argmax(make_config, kind, num_kv_heads) -> None:
    model = build(make_config(kind, init_std=0.3, num_kv_heads=num_kv_heads, tie_embeddings=False), seed=2)
    ids = list(PROMPT)
    for _ in range(24):
        ids.append(int(next_logits(model, ids).argmax()))
    assert generate(model, PROMPT, 24, stop_id=None) == ids[5:]
    assert len(set(ids[5:])) > 3, "the text is too dull to show anything"
    assert generate(model, PROMPT, 24, stop_id=ids[9]) == ids[5 : ids.index(ids[9], 5)]
    assert generate(model, PROMPT, 0, stop_id=None) == []


def test_of_equal_logits_the_lowest_id_is_taken(make_config) -> None:
    model = build(make_config("dense"), seed=2)
    with torch.no_grad():
        model.embed.weight[7:].zero_()
        model.final_norm.weight.zero_()
    assert generate(model, [20], 3, stop_id=None) == [0, 0, 0]


def test_sampling_follows_the_softmax(make_config) -> None:
    model = build(make_config("dense", init_std=0.3, vocab_size=6), seed=2)
    probs = (next_logits(model, [1, 2]).double() / 0.7).softmax(-1).numpy()
    generator, draws = philox(0), 1500
    drawn = [generate(model, [1, 2], 1, stop_id=None, temperature=0.7, generator=generator)[0] for _ in range(draws)]
    counts = np.bincount(drawn, minlength=6)
    assert probs.max() > 2 * probs.min()
    assert np.all(np.abs(counts - draws * probs) < 5 * np.sqrt(draws * probs * (1 - probs)) + 1)


def test_sampling_depends_on_the_generator_alone(make_config) -> None:
    model = build(make_config("moe", init_std=0.3), seed=2)
    texts = [generate(model, PROMPT, 12, stop_id=None, temperature=1.0, generator=philox(s)) for s in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    cold = generate(model, PROMPT, 12, stop_id=None, temperature=1e-6, generator=philox(1))
    assert cold == generate(model, PROMPT, 12, stop_id=None)


@pytest.mark.parametrize("context", [1, 2, 7, 8])
def test_beyond_the_context_the_newest_half_is_encoded_afresh(make_config, context) -> None:
    model = build(make_config("dense", init_std=0.3), seed=2)
    prompt = PROMPT * 2  # longer than the context: only its end is read
    ids, held = list(prompt), prompt[-context:]
    for _ in range(20):
        if len(held) > context:
            held = ids[-max(1, context // 2) :]
        ids.append(int(next_logits(model, held).argmax()))
        held = [*held, ids[-1]]
    assert generate(model, prompt, 20, stop_id=None, context=context) == ids[len(prompt) :]
    assert model.rope.cos_PNH.shape[0] <= 2 * context, "a position was used that training never saw"


def test_it_stops_when_asked(make_config) -> None:
    answers = iter([False, False, False, True])
    model = build(make_config("dense"), seed=2)
    assert len(generate(model, PROMPT, 24, stop_id=None, should_stop=lambda: next(answers))) == 3


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "prompt: no token; expected one or more"),
        ([3, 53], {}, "prompt: token id 53 is not accepted; expected 0 to 52"),
        ([-1], {}, "prompt: token id -1 is not accepted; expected 0 to 52"),
        (
            [1],
            {"temperature": -0.5},
            "temperature = -0.5 is not accepted; expected 0, or above 0 with a random generator",
        ),
        (
            [1],
            {"temperature": 1.0},
            "temperature = 1.0 is not accepted; expected 0, or above 0 with a random generator",
        ),
    ],
)
def test_what_cannot_be_continued_is_refused(make_config, prompt, options, message) -> None:
    with pytest.raises(ConfigError) as caught:
        generate(build(make_config("dense"), seed=0), prompt, 1, stop_id=None, **options)
    assert str(caught.value) == message
