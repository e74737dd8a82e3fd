"""Nouns of the model: a LLaMA-style decoder whose feed-forward layers are dense or routed. No tensors here.

A width may be open (0) until matching solves it, or a rule that follows `d_model`; `vocab_size` is 0 until the
tokenizer is known. `open_fields` names what is left.
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Annotated, Final, Literal

from equipoise.config import TAG, at_most, check, config

Width = Literal["d_model", "ffn.d_ff", "ffn.d_expert"]
"""The widths that matching can solve."""
RouterKind = Literal["learned", "frozen", "hash", "random"]
"""How experts are chosen: by trained weights, or by one of the control routers, which learn nothing."""

# Some times the largest that anyone has published, so that a slip of a digit or a hostile file is told before memory is
# asked for. What a machine can hold is less; planning tells.
MAX_LAYERS: Final = 1_024
MAX_HEADS: Final = 4_096
MAX_EXPERTS: Final = 4_096
MAX_WIDTH: Final = 1 << 17
"""Of `d_model`."""
MAX_HIDDEN: Final = 1 << 20
"""Of `d_ff` and `d_expert`."""
MAX_VOCAB: Final = 1 << 20
MAX_RATIO: Final = 1_024
"""Of a hidden width to `d_model`."""


@config
class WidthRule:
    """A width that follows `d_model`: the nearest multiple of `multiple_of` to ratio · d_model, halves up."""

    ratio: float
    """Width ÷ d_model, above 0."""
    multiple_of: int
    """Granularity, a multiple of 8 (kernels need rows of 16 bytes in every dtype)."""

    def __post_init__(self) -> None:
        check(
            self,
            ("ratio", self.ratio > 0, "above 0"),
            ("multiple_of", self.multiple_of >= 8 and self.multiple_of % 8 == 0, "a multiple of 8"),
            *at_most(self, ratio=MAX_RATIO, multiple_of=MAX_HIDDEN),
        )

    def width(self, d_model: int) -> int:
        """The width at `d_model`, at least one multiple.

        >>> WidthRule(ratio=4, multiple_of=128).width(424)
        1664
        """
        steps = Fraction(str(self.ratio)) * d_model / self.multiple_of + Fraction(1, 2)
        return max(1, steps.numerator // steps.denominator) * self.multiple_of


@config
class DenseFFN:
    """A SwiGLU feed-forward layer that every token passes through."""

    kind: Literal["dense"] = "dense"
    d_ff: int | WidthRule = 0
    """Hidden width, a multiple of 8, or a rule; 0 = solved by matching."""

    @property
    def width(self) -> int:
        """`d_ff` as a number; ValueError while it is open."""
        return _number(self.d_ff, "d_ff")


@config
class BalanceLoss:
    """Switch load-balancing loss (arXiv 2101.03961 eq. 4), per layer and group, 1 at uniform use."""

    kind: Literal["loss"] = "loss"
    coef: float
    """Weight in the objective; = top_k × Hugging Face's coefficient, = num_layers × one that is summed per layer."""

    def __post_init__(self) -> None:
        check(self, ("coef", self.coef >= 0, "0 or more"))


@config
class NoBalance:
    """No balancing: what the router does when only the language-model loss moves it."""

    kind: Literal["none"] = "none"


@config
class BalanceBias:
    """A bias per expert on the choice alone, moved after every update (arXiv 2408.15664); no term in the objective."""

    kind: Literal["bias"] = "bias"
    rate: float = 0.001
    """What a bias moves by in one update, above 0, in units of the router's probabilities (the paper's u = 0.001)."""

    def __post_init__(self) -> None:
        check(self, ("rate", self.rate > 0, "above 0"))


Balance = Annotated[BalanceLoss | BalanceBias | NoBalance, TAG]
DEFAULT_BALANCE_COEF: Final = 0.01
"""Coefficient of the balance loss of a learned router whose `balance` is left out."""


@config
class MoEFFN:
    """Routed SwiGLU experts, dropless: softmax router in float32, top-k, weighted sum (Mixtral, arXiv 2401.04088)."""

    kind: Literal["moe"] = "moe"
    num_experts: int
    """E, at least 1."""
    top_k: int
    """K, experts per token, 1..E."""
    d_expert: int | WidthRule = 0
    """Hidden width of one expert, a multiple of 8, or a rule; 0 = solved by matching."""
    renormalize: bool = True
    """Divide the K chosen probabilities by their sum (Mixtral) or use them as they are (Switch, OLMoE). Without effect
    on hash and random routers, whose weights are 1/K."""
    allow_no_router_gradient: bool = False
    """Permit top_k = 1 with renormalize: the weight is then 1 and the language-model loss never reaches the router."""
    balance: Balance = None  # type: ignore[assignment]  # never None: see __post_init__
    """How use of the experts is evened out; left out: a loss with coefficient 0.01, none for a control router."""
    z_coef: float = 0.0
    """Weight of the router z-loss (ST-MoE, arXiv 2202.08906 eq. 5) in the objective; 0 = off."""
    num_shared_experts: int = 0
    """Experts of width d_expert that every token passes through, summed with the routed ones, without a gate
    (DeepSeekMoE, arXiv 2401.06066)."""
    router: RouterKind = "learned"
    """learned, or a control: frozen at its initial weights, hash of the token id, random by place."""

    def __post_init__(self) -> None:
        learned = self.router == "learned"
        if vars(self)["balance"] is None:
            balance = BalanceLoss(coef=DEFAULT_BALANCE_COEF) if learned else NoBalance()
            object.__setattr__(self, "balance", balance)
        fits = self.num_experts < 1 or 1 <= self.top_k <= self.num_experts
        no_gradient = learned and self.top_k == 1 and self.num_experts > 1 and self.renormalize
        no_losses = f"beside router = {self.router!r}, which has no router losses"
        check(
            self,
            ("num_experts", self.num_experts >= 1, "at least 1"),
            ("top_k", fits, f"1 to num_experts = {self.num_experts}"),
            ("balance", learned or self.balance.kind == "none", f"kind = 'none', or nothing, {no_losses}"),
            ("z_coef", self.z_coef >= 0, "0 or more"),
            ("z_coef", learned or self.z_coef <= 0, f"0 {no_losses}"),
            ("num_shared_experts", self.num_shared_experts >= 0, "0 or more"),
            (
                "renormalize",
                not no_gradient or self.allow_no_router_gradient,
                "false beside top_k = 1: divided by itself, a weight gives the router no language-model gradient "
                "(to study that, set allow_no_router_gradient = true)",
            ),
            *at_most(self, num_experts=MAX_EXPERTS, num_shared_experts=MAX_EXPERTS),
        )

    @property
    def width(self) -> int:
        """`d_expert` as a number; ValueError while it is open."""
        return _number(self.d_expert, "d_expert")

    @property
    def router_has_weights(self) -> bool:
        """Whether there are router weights, hence logits and probabilities; hash and random have none."""
        return self.router in ("learned", "frozen")


FFN = Annotated[DenseFFN | MoEFFN, TAG]


@config
class ModelConfig:
    """A LLaMA-style decoder: RMSNorm, RoPE, causal attention with grouped KV heads, SwiGLU, no biases."""

    num_layers: int
    """L, at least 1."""
    num_heads: int
    """N, query heads; d_model must be a multiple of 2·num_heads (RoPE rotates pairs)."""
    num_kv_heads: int = 0
    """M, key and value heads, a divisor of num_heads; 0 = num_heads."""
    d_model: int = 0
    """D, residual width; 0 = solved by matching."""
    ffn: FFN
    """The feed-forward layer of every block."""
    vocab_size: int = 0
    """V; 0 until the tokenizer is known. A study file does not set it."""
    tie_embeddings: bool = True
    """Share the input embedding with the output head."""
    rope_theta: float = 10_000.0
    """RoPE base (arXiv 2104.09864)."""
    norm_eps: float = 1e-5
    """RMSNorm epsilon."""
    init_std: float = 0.02
    """Standard deviation of the normal initialisation; output projections are scaled by 1/sqrt(2·num_layers)."""

    def __post_init__(self) -> None:
        if self.num_kv_heads == 0:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        heads, kv_heads, pairs = self.num_heads, self.num_kv_heads, 2 * max(1, self.num_heads)
        name, width = ffn_width(self.ffn)
        fits = isinstance(width, WidthRule) or (width >= 0 and width % 8 == 0)
        check(
            self,
            ("num_layers", self.num_layers >= 1, "at least 1"),
            ("num_heads", heads >= 1, "at least 1"),
            (
                "num_kv_heads",
                heads < 1 or (kv_heads >= 1 and heads % kv_heads == 0),
                f"a divisor of num_heads = {heads}",
            ),
            ("d_model", self.d_model >= 0 and self.d_model % pairs == 0, f"a multiple of 2 x num_heads = {pairs}"),
            (f"ffn.{name}", fits, "a multiple of 8 (grouped kernels need rows of 16 bytes)"),
            ("vocab_size", self.vocab_size >= 0, "0 or more"),
            ("rope_theta", self.rope_theta > 0, "above 0"),
            ("norm_eps", self.norm_eps > 0, "above 0"),
            ("init_std", self.init_std > 0, "above 0"),
            *at_most(self, num_layers=MAX_LAYERS, num_heads=MAX_HEADS, d_model=MAX_WIDTH, vocab_size=MAX_VOCAB),
            (f"ffn.{name}", isinstance(width, WidthRule) or width <= MAX_HIDDEN, f"at most {MAX_HIDDEN:,}"),
        )

    @property
    def d_head(self) -> int:
        """H, width of one head."""
        return self.d_model // self.num_heads


def with_widths(model: ModelConfig) -> ModelConfig:
    """`model` with a width rule replaced by its number at the model's own `d_model`."""
    ffn = model.ffn
    if isinstance(ffn, DenseFFN) and isinstance(ffn.d_ff, WidthRule):
        return dataclasses.replace(model, ffn=dataclasses.replace(ffn, d_ff=ffn.d_ff.width(model.d_model)))
    if isinstance(ffn, MoEFFN) and isinstance(ffn.d_expert, WidthRule):
        return dataclasses.replace(model, ffn=dataclasses.replace(ffn, d_expert=ffn.d_expert.width(model.d_model)))
    return model


def open_fields(model: ModelConfig) -> list[str]:
    """Names of what still has to be solved or set: `d_model`, `ffn.d_ff` or `ffn.d_expert`, `vocab_size`."""
    name, width = ffn_width(model.ffn)
    values = {"d_model": model.d_model, f"ffn.{name}": width, "vocab_size": model.vocab_size}
    return [field for field, value in values.items() if value == 0]


def ffn_width(ffn: DenseFFN | MoEFFN) -> tuple[str, int | WidthRule]:
    """Name and value of the hidden width, perhaps open or a rule: `d_ff` of a dense layer, `d_expert` of experts."""
    return ("d_ff", ffn.d_ff) if isinstance(ffn, DenseFFN) else ("d_expert", ffn.d_expert)


def describe_ffn(ffn: DenseFFN | MoEFFN) -> str:
    """What a feed-forward layer is, in a few words; what is usual is not said.

    >>> describe_ffn(MoEFFN(num_experts=4, top_k=2, d_expert=64, num_shared_experts=1, router="hash"))
    '4 experts, top-2, 1 shared, hash router'
    """
    if isinstance(ffn, DenseFFN):
        return "dense"
    words = [f"{ffn.num_experts} expert{'s' * (ffn.num_experts != 1)}", f"top-{ffn.top_k}"]
    words += [f"{ffn.num_shared_experts} shared"] if ffn.num_shared_experts else []
    if ffn.router != "learned":
        return ", ".join([*words, f"{ffn.router} router"])
    balance = {"loss": [], "bias": ["balanced by bias"], "none": ["not balanced"]}[ffn.balance.kind]
    return ", ".join([*words, *balance])


def _number(width: int | WidthRule, name: str) -> int:
    if isinstance(width, WidthRule) or width < 1:
        raise ValueError(f"{name}: still open; resolve the model first")
    return width
