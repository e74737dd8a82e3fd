"""Nouns of training: one recipe for every arm of a study. How a step is made is `equipoise.train`'s work."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from equipoise.config import TAG, at_most, check, config

MAX_THREADS = 256
"""More than any machine has cores to use; a slip of a digit would otherwise bring the machine down."""
MAX_CONTEXT: Final = 1 << 20
"""Tokens of a window; the longest contexts in use are of this size."""
MAX_BATCH: Final = 1 << 28
"""Tokens of an update: 2 GiB of ids; the largest in use are 2^24 to 2^26."""
MAX_TOKENS: Final = 10**16
"""Tokens of a budget, and of whatever else is only counted."""
MAX_EVALS: Final = 10_000
"""Points of a curve, of which a figure shows 200."""
MAX_SAMPLE: Final = 100_000
"""Tokens of a written text."""
Kernels = Literal["fused", "plain"]
"""How a model computes: hand-written passes for a CPU, or the plain definitions they are held to."""
ModelKernels = Literal["fused", "plain", "grouped"]
"""What a model is built with: grouped = plain, but experts in grouped products; chosen by `equipoise.device` alone."""
MICRO_TOKENS = 8_192
"""Tokens a micro-batch holds at most by default: bounds the logits to 8,192 × V floats (32 MiB at V = 1,024)."""


@config
class Optim:
    """AdamW (arXiv 1711.05101); norms are not decayed, everything else is, embeddings included."""

    lr: float
    """Peak learning rate, above 0."""
    weight_decay: float = 0.1
    """Decoupled decay, 0 or more (LLaMA, arXiv 2302.13971)."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW moments (LLaMA)."""
    eps: float = 1e-8
    """AdamW epsilon."""
    grad_clip: float = 1.0
    """Global gradient-norm clip; 0 = off."""

    def __post_init__(self) -> None:
        check(
            self,
            ("lr", self.lr > 0, "above 0"),
            ("weight_decay", self.weight_decay >= 0, "0 or more"),
            ("betas", all(0 <= beta < 1 for beta in self.betas), "two numbers from 0 to below 1"),
            ("eps", self.eps > 0, "above 0"),
            ("grad_clip", self.grad_clip >= 0, "0 (off) or more"),
        )


@config
class Cosine:
    """Linear warm-up, then half a cosine down to `final_frac` (SGDR, arXiv 1608.03983)."""

    kind: Literal["cosine"] = "cosine"
    warmup_frac: float = 0.02
    """Share of the steps spent warming up, in [0, 1)."""
    final_frac: float = 0.1
    """Last learning rate ÷ peak, in [0, 1]."""

    def __post_init__(self) -> None:
        check(
            self,
            ("warmup_frac", 0 <= self.warmup_frac < 1, "0 to below 1"),
            ("final_frac", 0 <= self.final_frac <= 1, "0 to 1"),
        )


@config
class WSD:
    """Warm-up, stable, decay (MiniCPM, arXiv 2404.06395): the warm-up is absolute, so budgets share a trunk."""

    kind: Literal["wsd"] = "wsd"
    warmup_tokens: int
    """Tokens of linear warm-up, the same for every budget."""
    decay_frac: float = 0.2
    """Share of each budget spent decaying linearly, in [0, 1]."""
    final_frac: float = 0.1
    """Last learning rate ÷ peak, in [0, 1]."""

    def __post_init__(self) -> None:
        check(
            self,
            ("warmup_tokens", self.warmup_tokens >= 0, "0 or more"),
            *at_most(self, warmup_tokens=MAX_TOKENS),
            ("decay_frac", 0 <= self.decay_frac <= 1, "0 to 1"),
            ("final_frac", 0 <= self.final_frac <= 1, "0 to 1"),
        )


Schedule = Annotated[Cosine | WSD, TAG]


def decays(schedule: Cosine | WSD) -> bool:
    """Whether a run ends at a lower rate than its peak; only then is the end of a run a point of a curve of budgets."""
    return schedule.final_frac < 1 and (isinstance(schedule, Cosine) or schedule.decay_frac > 0)


@config
class Samples:
    """Texts written by each run, greedily, at a quarter, half, three quarters and the end (WSD: or more often)."""

    prompts: tuple[str, ...] = ("Once upon a time",)
    """Fixed prompts; empty = no samples."""
    num_tokens: int = 60
    """Tokens to write after each prompt."""

    def __post_init__(self) -> None:
        check(self, ("num_tokens", self.num_tokens >= 1, "at least 1"), *at_most(self, num_tokens=MAX_SAMPLE))


@config
class Recipe:
    """Everything about training that is the same for every arm."""

    seq_len: int
    """S, tokens of context a training or evaluation window holds."""
    batch_tokens: int
    """Tokens an optimizer step sees, a multiple of seq_len."""
    balance_group: int = 8
    """Consecutive sequences over which the balance loss counts expert use; divides the batch."""
    micro_sequences: int = 0
    """Sequences a forward pass holds, a multiple of balance_group; 0 = as many as fit 8,192 tokens."""
    optim: Optim
    """The optimizer."""
    schedule: Schedule = Cosine()
    """Learning rate as a function of the step."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Autocast: auto = bfloat16 on a GPU that has it, float32 elsewhere; bfloat16 also on a CPU with such instructions.
    Weights, router and losses are float32."""
    kernels: Kernels = "fused"
    """fused = hand-written passes, faster on a CPU; plain = the definitions, also what a GPU takes. They differ by
    rounding alone."""
    threads: int = 1
    """CPU threads of one run, 1 to 256; part of the lock: sums differ in the last bits between thread counts."""
    num_evals: int = 20
    """Points of the curve beyond step 0, evenly spaced, the last at the end; at least 1. With WSD at least so many."""
    curve_tokens: int = 16_384
    """Targets of the fixed validation subset behind the curve; the same windows for every arm, seed and step."""
    eval_tokens: int = 0
    """At most this many targets of the validation set in the final scoring, by seeded choice; 0 = all."""
    eval_split: Literal["validation", "selection"] = "validation"
    """What evaluation reads; `selection` is for choosing a recipe, and then no claim is judged."""
    samples: Samples = Samples()
    """Texts to write along the way."""

    def __post_init__(self) -> None:
        check(
            self,
            ("seq_len", self.seq_len >= 1, "at least 1"),
            ("batch_tokens", self.batch_tokens >= 1, "at least 1"),
            ("balance_group", self.balance_group >= 1, "at least 1"),
            ("num_evals", self.num_evals >= 1, "at least 1"),
            ("curve_tokens", self.curve_tokens >= 1, "at least 1"),
            ("threads", 1 <= self.threads <= MAX_THREADS, f"1 to {MAX_THREADS}"),
            ("eval_tokens", self.eval_tokens >= 0, "0 (all) or more"),
            ("micro_sequences", self.micro_sequences >= 0, "0 (as many as fit) or more"),
            *at_most(self, seq_len=MAX_CONTEXT, batch_tokens=MAX_BATCH, num_evals=MAX_EVALS),
            *at_most(self, curve_tokens=MAX_TOKENS, eval_tokens=MAX_TOKENS),
        )
        check(self, ("batch_tokens", self.batch_tokens % self.seq_len == 0, f"a multiple of seq_len = {self.seq_len}"))
        batch, group, micro = self.num_sequences, self.balance_group, self.micro_sequences
        check(
            self,
            ("balance_group", batch % group == 0, f"a divisor of the {batch} sequences of a batch"),
            (
                "micro_sequences",
                micro == 0 or (micro % group == 0 and batch % micro == 0),
                f"0 or a multiple of balance_group = {group} that divides the {batch} sequences of a batch",
            ),
        )

    @property
    def num_sequences(self) -> int:
        """B, sequences of one optimizer step."""
        return self.batch_tokens // self.seq_len

    @property
    def sequences_per_forward(self) -> int:
        """Sequences of one forward pass: `micro_sequences`, or as many whole groups as fit 8,192 tokens."""
        if self.micro_sequences:
            return self.micro_sequences
        groups = self.num_sequences // self.balance_group
        most = min(groups, MICRO_TOKENS // (self.balance_group * self.seq_len))
        fitting = [n for n in range(1, most + 1) if groups % n == 0]
        return max(fitting, default=1) * self.balance_group
