"""The decoder: blocks of attention and a dense or routed feed-forward layer; its initialisation, losses and generation.

Not for: training (`train`), evaluation (`score`), counting parameters (`accounting`), Hugging Face names (`export`).

Shapes: B batch, S sequence, T = B·S tokens, D d_model, V vocabulary, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from equipoise.errors import ConfigError
from equipoise.model import layers
from equipoise.model.fused.attention import attend
from equipoise.model.fused.cross_entropy import mean_cross_entropy, token_cross_entropy
from equipoise.model.fused.products import linear
from equipoise.model.fused.rms_norm import rms_norm
from equipoise.model.fused.swiglu import swiglu
from equipoise.model.layers import Attention, Embedding, KVCache, RMSNorm, Rope, SwiGLU, at_least_float32
from equipoise.model.moe import MoE, Places, Routing
from equipoise.rng import stream
from equipoise.spec.model import ModelConfig, MoEFFN, open_fields, with_widths
from equipoise.spec.recipe import ModelKernels


@dataclass(frozen=True, kw_only=True)
class Output:
    """Everything one forward pass computed."""

    hidden_TD: Tensor
    """Hidden states after the final norm, tokens of the batch one sequence after the other."""
    routing: tuple[Routing, ...]
    """One per layer; empty for a dense model."""


class Block(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x))."""

    def __init__(self, config: ModelConfig, kernels: ModelKernels, router_key: int) -> None:
        super().__init__()
        fused = kernels == "fused"
        norm = rms_norm if fused else layers.rms_norm
        self.attention_norm = RMSNorm(config.d_model, config.norm_eps, norm)
        self.attention = Attention(
            config.d_model, config.num_heads, config.num_kv_heads, *((attend, linear) if fused else ())
        )
        self.ffn_norm = RMSNorm(config.d_model, config.norm_eps, norm)
        ffn = config.ffn
        self.ffn = (
            MoE(
                config.d_model,
                ffn.width,
                ffn.num_experts,
                ffn.top_k,
                ffn.renormalize,
                fused,
                kernels == "grouped",
                router=ffn.router,
                bias=ffn.balance.kind == "bias",
                key=router_key,
                num_shared=ffn.num_shared_experts,
            )
            if isinstance(ffn, MoEFFN)
            else SwiGLU(config.d_model, ffn.width, swiglu if fused else layers.swiglu)
        )

    def forward(
        self, x_BSD: Tensor, rope: tuple[Tensor, Tensor], cache: KVCache | None, places: Places | None
    ) -> tuple[Tensor, Routing | None]:
        """(x [B, S, D], the routing of a routed layer)."""
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), rope, cache)
        normed_TD = self.ffn_norm(x_BSD).flatten(0, 1)
        output_TD, routing = self.ffn(normed_TD, places) if isinstance(self.ffn, MoE) else (self.ffn(normed_TD), None)
        return x_BSD + output_TD.view_as(x_BSD), routing


class Transformer(nn.Module):
    """A LLaMA-style decoder (arXiv 2302.13971). Parameters are uninitialised: `build` makes a ready model.

    Names: `embed.weight`; per block `attention_norm.weight`, `attention.w_q|w_k|w_v|w_o`, `ffn_norm.weight` and either
    `ffn.w_gate|w_up|w_down` or `ffn.router.weight`, `ffn.experts.w_gate|w_up|w_down` and perhaps
    `ffn.shared.w_gate|w_up|w_down`; `final_norm.weight`; and `head.weight` unless it is tied to the embedding. One
    buffer is part of the state: `ffn.router.bias`, of routers balanced by it. A tensor that means the same has the same
    name in every arm, whichever `kernels` compute with it. `seed` is what hash and random routers choose by.
    """

    def __init__(self, config: ModelConfig, kernels: ModelKernels = "plain", seed: int = 0) -> None:
        super().__init__()
        self.fused = kernels == "fused"
        config = with_widths(config)
        if still_open := open_fields(config):
            raise ValueError(f"{', '.join(still_open)}: still open; resolve the model first")
        self.config = config
        self.embed = Embedding(config.vocab_size, config.d_model)
        self.rope = Rope(config.num_heads, config.d_head, config.rope_theta)
        self.needs_places = isinstance(config.ffn, MoEFFN) and not config.ffn.router_has_weights
        keys = [int(stream(seed, "router", layer).integers(2**32)) for layer in range(config.num_layers)]
        self.blocks = nn.ModuleList(Block(config, kernels, key) for key in keys)
        self.final_norm = RMSNorm(config.d_model, config.norm_eps, rms_norm if self.fused else layers.rms_norm)
        self.head = None if config.tie_embeddings else Embedding(config.vocab_size, config.d_model)

    def forward(
        self, inputs_BS: Tensor, caches: Sequence[KVCache] | None = None, windows_B: Tensor | None = None
    ) -> Output:
        """Hidden states of token ids [B, S]; with `caches` (one per layer) the ids continue what those hold.

        `windows_B` numbers the windows that the sequences are, for random routers: in training, the sequences of a run
        in their order; in evaluation, the windows in theirs. Without it each is window 0: a text read by itself.

        A cache takes any number of tokens while it is empty, then one at a time; ValueError otherwise. Fused kernels
        compute in the dtype of the weights: ValueError under autocast.
        """
        if self.fused and torch.is_autocast_enabled(inputs_BS.device.type):
            raise ValueError("kernels = 'fused' is not accepted under autocast; expected 'plain'")
        start, S = caches[0].length if caches else 0, inputs_BS.shape[1]
        if start and S != 1:
            raise ValueError(f"{S} tokens after {start} cached ones are not accepted; expected one at a time")
        rope = self.rope(start, S)
        places = _places(inputs_BS, start, windows_B) if self.needs_places else None
        x_BSD = self.embed(inputs_BS)
        routings = []
        for layer, block in enumerate(self.blocks):
            x_BSD, routing = block(x_BSD, rope, caches[layer] if caches else None, places)
            if routing is not None:
                routings.append(routing)
        return Output(hidden_TD=self.final_norm(x_BSD).flatten(0, 1), routing=tuple(routings))

    def head_weight(self) -> Tensor:
        """Weight [V, D] of the map from hidden states to logits."""
        return self.embed.weight if self.head is None else self.head.weight

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Logits [T, V] of hidden states, float32 also under autocast."""
        return at_least_float32(F.linear(hidden_TD, self.head_weight()))


def _places(inputs_BS: Tensor, start: int, windows_B: Tensor | None) -> Places:
    """Where the tokens stand, sequences one after the other as everywhere."""
    B, S = inputs_BS.shape
    windows_B = inputs_BS.new_zeros(B) if windows_B is None else windows_B
    positions_S = torch.arange(start, start + S, device=inputs_BS.device)
    return Places(
        token_ids_T=inputs_BS.flatten(),
        windows_T=windows_B.repeat_interleave(S),
        positions_T=positions_S.repeat(B),
    )


def token_losses(model: Transformer, output: Output, targets_BS: Tensor) -> Tensor:
    """Cross entropy of each target in nats, [T] float32, unreduced; no router term is ever part of it.

    Fused kernels make the logits a chunk at a time, unless the losses are to be differentiated one by one.
    """
    if model.fused and not torch.is_grad_enabled():
        return token_cross_entropy(output.hidden_TD, model.head_weight(), targets_BS.flatten())
    return F.cross_entropy(model.logits(output.hidden_TD), targets_BS.flatten(), reduction="none")


def mean_loss(model: Transformer, output: Output, targets_BS: Tensor) -> Tensor:
    """Mean of `token_losses`, a scalar to be differentiated: fused kernels make its gradients as they go."""
    if model.fused:
        return mean_cross_entropy(output.hidden_TD, model.head_weight(), targets_BS.flatten())
    return token_losses(model, output, targets_BS).mean()


# ------------------------------------------------------------------------------------------------ initialisation


def build(
    config: ModelConfig, seed: int, device: str | torch.device = "cpu", kernels: ModelKernels = "plain"
) -> Transformer:
    """A model initialised as a pure function of (config, seed), float32 on `device`, that computes with `kernels`.

    Every tensor is drawn by NumPy from its own stream, named after the parameter, so that equally named and shaped
    tensors of two architectures are equal bit for bit: normal with `init_std`, projections back into the residual
    stream scaled by 1/sqrt(2·num_layers) (GPT-2), gains 1, router biases 0. Raises ValueError while a width or the
    vocabulary is open.
    """
    model = Transformer(config, kernels, seed)  # its layers are made empty: no draw from torch's global generator
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.zero_()
        for name, parameter in model.named_parameters():
            std = init_std(name, config)
            if std == 0:
                parameter.fill_(1.0)
                continue
            draws = stream(seed, "init", name).standard_normal(tuple(parameter.shape), dtype=np.float32)
            parameter.copy_(torch.from_numpy(draws * np.float32(std)))
    return model.to(device)


def init_std(name: str, config: ModelConfig) -> float:
    """Standard deviation a parameter of this name starts with; 0 for gains, which start at 1."""
    if name.endswith("norm.weight"):
        return 0.0
    return config.init_std / math.sqrt(2 * config.num_layers) if name.endswith(("w_o", "w_down")) else config.init_std


# ------------------------------------------------------------------------------------------------ generation


@torch.no_grad()
def generate(
    model: Transformer,
    prompt_ids: Sequence[int],
    num_tokens: int,
    *,
    stop_id: int | None,
    temperature: float = 0.0,
    generator: np.random.Generator | None = None,
    context: int | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> list[int]:
    """At most `num_tokens` new ids after the prompt, without the prompt and without the `stop_id` that ends them.

    Temperature 0 takes the most probable id, of equals the lowest; above 0 the id is drawn from
    softmax(logits / temperature) by `generator`. `context` is the length the model was trained on: when that many
    tokens are held, the newest half of them is encoded afresh from position 0 and writing goes on, so that no position
    occurs that training never saw; without it positions grow without bound. `should_stop` is asked before each token
    and ends the text early. Raises ConfigError for a prompt that is empty or holds an unknown id, a negative
    temperature, or a temperature above 0 without a generator.
    """
    vocab_size = model.config.vocab_size
    if not prompt_ids:
        raise ConfigError("prompt: no token; expected one or more")
    unknown = [token for token in prompt_ids if not 0 <= token < vocab_size]
    if unknown:
        raise ConfigError(f"prompt: token id {unknown[0]} is not accepted; expected 0 to {vocab_size - 1}")
    if temperature < 0 or (temperature > 0 and generator is None):
        raise ConfigError(
            f"temperature = {temperature} is not accepted; expected 0, or above 0 with a random generator"
        )
    device = model.embed.weight.device
    ids = list(prompt_ids)
    pending = ids[-context:] if context else ids
    caches = [KVCache() for _ in model.blocks]
    while len(ids) < len(prompt_ids) + num_tokens and not (should_stop and should_stop()):
        if context and caches[0].length + len(pending) > context:
            pending = ids[-max(1, context // 2) :]
            caches = [KVCache() for _ in model.blocks]
        output = model(torch.tensor([pending], device=device), caches)
        logits_V = model.logits(output.hidden_TD[-1:])[0].double().cpu().numpy()
        token = _choose(logits_V, temperature, generator)
        if token == stop_id:
            break
        ids.append(token)
        pending = [token]
    return ids[len(prompt_ids) :]


def _choose(logits_V: NDArray[np.float64], temperature: float, generator: np.random.Generator | None) -> int:
    if temperature == 0 or generator is None:
        return int(np.argmax(logits_V))
    cumulative_V = np.exp((logits_V - logits_V.max()) / temperature).cumsum()
    drawn = np.searchsorted(cumulative_V, generator.random() * cumulative_V[-1], side="right")
    return min(int(drawn), len(logits_V) - 1)  # the product may round up to the whole sum
