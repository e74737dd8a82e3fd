"""How many parameters a model has and how many FLOPs a token costs, counted from the spec alone: integers, no tensors.

Not for: measuring. The built model is held to these numbers by tests (unique storages; FlopCounterMode on the plain
path), and `matching` solves widths against them.

Symbols: B S T=B*S D d_model, N query heads, M KV heads, H d_head, F hidden width of the FFN or of one expert,
E experts, K top-k, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from equipoise.spec.model import DenseFFN, ModelConfig, open_fields, with_widths


@dataclass(frozen=True, kw_only=True)
class ParamCount:
    """Parameters by component, each summed over the layers; unique storages, so a tied head counts 0."""

    embedding: int
    """V·D, the input embedding (and the head, when tied)."""
    head: int
    """V·D when untied, else 0."""
    attention: int
    """L · (2·D·N·H + 2·D·M·H): query, key, value and output projections."""
    router: int
    """L · E·D, trained or frozen; 0 for a dense model and for hash and random routers. The bias per expert that
    balances without a loss is moved by a rule, not trained: it is state of the model and no parameter."""
    ffn: int
    """L · 3·D·F of the dense layers; of a routed model its shared experts, L · num_shared_experts · 3·D·F."""
    experts: int
    """L · E · 3·D·F of all routed experts; 0 for a dense model."""
    active_experts: int
    """L · K · 3·D·F: what one token passes through; part of `experts`."""
    norms: int
    """(2·L + 1) · D gains."""

    @property
    def total(self) -> int:
        """`total_params`: every parameter once."""
        return self.total_nonembedding + self.embedding + self.head

    @property
    def active(self) -> int:
        """`active_params`: used by one token's forward pass: K of E experts, all else in full (Mixtral's way), shared
        experts too."""
        return self.total - self.experts + self.active_experts

    @property
    def total_nonembedding(self) -> int:
        """`total` without embedding and head, whether tied or not."""
        return self.attention + self.router + self.ffn + self.experts + self.norms

    @property
    def active_nonembedding(self) -> int:
        """`active` without embedding and head, whether tied or not."""
        return self.total_nonembedding - self.experts + self.active_experts

    def by_component(self) -> dict[str, int]:
        """The seven disjoint components, in the order of the forward pass; they sum to `total`."""
        names = ("embedding", "attention", "router", "ffn", "experts", "norms", "head")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class FlopCount:
    """FLOPs of one token by component, summed over the layers: 2 per multiply-add of a matrix product.

    Exactly what torch's FlopCounterMode reports for the plain path under `sdpa_kernel(MATH)`, divided by the tokens:
    matrix products only (no norms, softmax, rotation, activation or embedding look-up), K of E experts, and attention
    scores over the full S × S square although half of it is masked.
    """

    attention_proj: int
    """Query, key, value and output projections."""
    attention_scores: int
    """L · 4·S·N·H: queries times keys, probabilities times values."""
    router: int
    """The router's D × E product; 0 without router weights."""
    ffn: int
    """The dense layer, or the K routed and the shared experts a token passes through."""
    head: int
    """2·D·V, tied or not."""

    @property
    def forward(self) -> int:
        """`forward_flops_per_token`."""
        return self.attention_proj + self.attention_scores + self.router + self.ffn + self.head

    @property
    def training(self) -> int:
        """`flops_per_token`: 3 × forward, because the backward pass makes two products for each forward one.

        Also for a frozen router, of which only one of the two is made: a control costs what it stands in for.
        """
        return 3 * self.forward

    @property
    def forward_causal(self) -> int:
        """`forward` with half of the attention scores: the work a causal kernel cannot skip."""
        return self.forward - self.attention_scores // 2

    @property
    def training_causal(self) -> int:
        """3 × `forward_causal`: what utilisation (MFU) is measured with."""
        return 3 * self.forward_causal


def count_params(model: ModelConfig) -> ParamCount:
    """Parameters of `model`; a width rule is followed. Raises ValueError while a width or the vocabulary is open.

    >>> from equipoise.spec.model import MoEFFN
    >>> ffn = MoEFFN(num_experts=8, top_k=2, d_expert=96)
    >>> model = ModelConfig(num_layers=2, num_heads=4, num_kv_heads=2, d_model=64, vocab_size=1000, ffn=ffn)
    >>> count = count_params(model)
    >>> count.total, count.active
    (384832, 163648)
    """
    model = _closed(model)
    layers, width, ffn = model.num_layers, model.d_model, model.ffn
    swiglu = 3 * width * ffn.width  # w_gate, w_up, w_down
    num_experts, top_k = (0, 0) if isinstance(ffn, DenseFFN) else (ffn.num_experts, ffn.top_k)
    every_token = 1 if isinstance(ffn, DenseFFN) else ffn.num_shared_experts
    router_rows = 0 if isinstance(ffn, DenseFFN) or not ffn.router_has_weights else ffn.num_experts
    return ParamCount(
        embedding=model.vocab_size * width,
        head=0 if model.tie_embeddings else model.vocab_size * width,
        attention=layers * _attention_weights(model),
        router=layers * router_rows * width,
        ffn=layers * every_token * swiglu,
        experts=layers * num_experts * swiglu,
        active_experts=layers * top_k * swiglu,
        norms=(2 * layers + 1) * width,
    )


def count_flops(model: ModelConfig, seq_len: int) -> FlopCount:
    """FLOPs per token of `model` at `seq_len` tokens of context. Raises ValueError while a width is open.

    >>> from equipoise.spec.model import MoEFFN
    >>> ffn = MoEFFN(num_experts=8, top_k=2, d_expert=96)
    >>> model = ModelConfig(num_layers=2, num_heads=4, num_kv_heads=2, d_model=64, vocab_size=1000, ffn=ffn)
    >>> count_flops(model, 128).forward, count_flops(model, 128).training
    (392192, 1176576)
    """
    model = _closed(model)
    params = count_params(model)
    return FlopCount(
        attention_proj=2 * params.attention,
        attention_scores=model.num_layers * 4 * seq_len * model.d_model,  # N·H = D; keys are repeated to N heads
        router=2 * params.router,
        ffn=2 * (params.ffn + params.active_experts),
        head=2 * model.vocab_size * model.d_model,
    )


def tokens_per_expert(model: ModelConfig, tokens: float) -> float:
    """Tokens one expert sees on average when `tokens` pass through: tokens · K ÷ E; a dense layer sees all of them.

    >>> tokens_per_expert(ModelConfig(num_layers=1, num_heads=1, d_model=8, ffn=DenseFFN(d_ff=8)), 1000)
    1000.0
    """
    ffn = model.ffn
    return float(tokens) if isinstance(ffn, DenseFFN) else tokens * ffn.top_k / ffn.num_experts


def _attention_weights(model: ModelConfig) -> int:
    queries_and_output = 2 * model.d_model * model.num_heads * model.d_head
    keys_and_values = 2 * model.d_model * model.num_kv_heads * model.d_head
    return queries_and_output + keys_and_values


def _closed(model: ModelConfig) -> ModelConfig:
    still_open = open_fields(model)
    if still_open:
        raise ValueError(f"{', '.join(still_open)}: still open; resolve the model first")
    return with_widths(model)


def size_fault(model: ModelConfig, sizes: Mapping[str, int]) -> str | None:
    """What is wrong with saved weights (numbers by name of the tensor) for `model`, told before the model is built.

    A configuration can ask for more memory than any machine has; its weights on disk cannot. None when the numbers are
    as many as the model's parameters. Biases of a balanced choice are no parameters, and not counted.
    """
    found = sum(size for name, size in sizes.items() if not name.endswith(".router.bias"))
    expected = count_params(model).total
    return None if found == expected else f"{found:,} numbers; expected the {expected:,} of the run's model"
