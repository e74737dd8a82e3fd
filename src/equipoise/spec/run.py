"""The noun of one run: everything it is a function of."""

from __future__ import annotations

from equipoise.config import at_most, check, config
from equipoise.spec.model import ModelConfig, open_fields
from equipoise.spec.recipe import MAX_TOKENS, Recipe


@config
class RunConfig:
    """Everything a run is a function of: equal values give equal results on the same machine class and versions."""

    arm: str
    """Name of the arm."""
    seed: int
    """Seed of data order and initialisation."""
    budget: int
    """Tokens asked for, the arm's own where it has a budget of its own; the steps are `num_steps`."""
    model: ModelConfig
    """The resolved model: no open width, vocabulary known."""
    recipe: Recipe
    """How it is trained."""
    data: str
    """Digest of the prepared data set (tokens, splits and tokenizer)."""
    select: bool = False
    """Score the final weights on the selection split too: what a choice between arms reads."""

    def __post_init__(self) -> None:
        left = open_fields(self.model)
        check(
            self,
            ("seed", self.seed >= 0, "0 or more"),
            ("budget", self.budget >= 1, "at least 1"),
            *at_most(self, budget=MAX_TOKENS),
            *((f"model.{name}", False, "a width that is solved") for name in left),
        )

    @property
    def num_steps(self) -> int:
        """Optimizer steps: budget ÷ batch_tokens, nearest whole number, halves up, at least 1."""
        return num_steps(self.budget, self.recipe)

    @property
    def folder(self) -> str:
        """Path inside the study directory: `<arm>/<tokens>-s<seed>`."""
        return f"{self.arm}/{self.budget}-s{self.seed}"


def num_steps(budget: int, recipe: Recipe) -> int:
    """Steps of a run of `budget` tokens: nearest whole number, halves up, at least 1."""
    return max(1, (2 * budget + recipe.batch_tokens) // (2 * recipe.batch_tokens))
