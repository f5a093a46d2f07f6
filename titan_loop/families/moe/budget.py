"""Finds the best size, tokens, recurrent steps and experts for a budget, by a scaling law.

    budget C, memory, tokens served T ─► every (N, E, R) that fits ─► D ─► the law's loss ─► ranking

    C = 6·V·D + 2·V·T,   V = N + (R − 1)·N_looped   parameters visited by a token

Blocks are Llama's: a layer of width d has 4·d² parameters of attention and 8·d² of feed-forward; a
further expert adds 8·d². The first two and the last two layers are not looped. The embedding is
tied and counts only in memory.

Sources: Hoffmann et al. 2022, arXiv 2203.15556 (6 FLOPs a parameter and token). Sardana et al.
2023, arXiv 2401.00448 (tokens served). Chen et al. 2026, arXiv 2609.40316, App. C (joint optimum).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from titan_loop.analysis.scaling.published import NamedLaw, predicted
from titan_loop.errors import UserError
from titan_loop.tables import columns

HEAD_DIM = 128
_OUTSIDE_LAYERS = 4
_WIDTH_PER_LAYER = 85
_FEED_FORWARD_SHARE = 2 / 3
_SHOWN = 10
_SIZES_PER_DECADE = 10


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits of training and serving.

    Attributes:
        flops: FLOPs of training and of all tokens served, together.
        memory_bytes: Bytes of weights and cache; None for no limit.
        tokens: Training tokens; None lets the budget decide.
        inference_tokens: Tokens served over the model's life.
        weight_bits: Bits of a stored weight.
        context_tokens: Tokens in the cache of keys and values, two bytes per number.
        vocabulary: Rows of the embedding.
        most_experts: Largest number of experts to consider.
    """

    flops: float
    memory_bytes: float | None = None
    tokens: float | None = None
    inference_tokens: float = 0.0
    weight_bits: float = 4.0
    context_tokens: int = 0
    vocabulary: int = 128_256
    most_experts: int = 1024

    def check(self) -> None:
        """Raise `UserError` for limits that cannot be met."""
        numbers = {
            "budget": self.flops,
            "memory": self.memory_bytes,
            "tokens": self.tokens,
            "weight-bits": self.weight_bits,
            "vocabulary": self.vocabulary,
            "most-experts": self.most_experts,
        }
        for name, value in numbers.items():
            if value is not None and not 0 < value < float("inf"):
                raise UserError(f"--{name} {value:g} must be a positive number")
        if self.inference_tokens < 0 or self.context_tokens < 0:
            raise UserError("--inference-tokens and --context-tokens must be at least 0")
        for name, value in (("tokens", self.tokens), ("inference-tokens", self.inference_tokens)):
            if value and value >= self.flops:
                raise UserError(
                    f"--{name} {value:g} is not below --budget {self.flops:g}: the budget is in "
                    "FLOPs, which are at least six per token and parameter"
                )


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One model that fits a budget.

    Attributes:
        parameters: N, parameters that act on a token, without the embedding.
        looped: Parameters among N that every step visits.
        steps: R.
        tokens: D, training tokens.
        memory_bytes: Bytes of stored weights, embedding included, and of the cache.
        loss: Nats per token by the law.
        extrapolated: Ranges of the law that the model leaves.
    """

    parameters: float
    looped: float
    experts: int
    steps: int
    tokens: float
    memory_bytes: float
    loss: float
    extrapolated: Sequence[str]

    @property
    def visited(self) -> float:
        """Parameters that a token visits, counted once per visit."""
        return self.parameters + (self.steps - 1) * self.looped


@dataclass(frozen=True)
class Shape:
    """Width and layers of a Llama model with about a given number of parameters."""

    dim: int
    layers: int

    @classmethod
    def of(cls, parameters: float) -> "Shape":
        """Return the shape: layers of 12·dim² parameters, about 85 channels per layer."""
        exact = (parameters * _WIDTH_PER_LAYER / 12) ** (1 / 3)
        dim = max(HEAD_DIM, HEAD_DIM * round(exact / HEAD_DIM))
        return cls(dim, max(1, round(parameters / (12 * dim**2))))

    @property
    def outside(self) -> int:
        """Layers before and after the loop; 0 where they would be half of the model or more."""
        return _OUTSIDE_LAYERS if self.layers > 2 * _OUTSIDE_LAYERS else 0

    def cache_bytes(self, steps: int, tokens: int) -> float:
        """Return the bytes of all visits' keys and values."""
        visits = self.outside + steps * (self.layers - self.outside)
        return 2.0 * 2.0 * visits * self.dim * tokens


def ranked(law: NamedLaw, limits: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the table of the best models within the limits, and flags of the best dense one.

    Without a dense model there are no flags, and the last line says so.
    """
    budget = Budget(**limits)
    found = ranking(law, budget)
    lines = budget_lines(law, budget, found)
    dense = next((choice for choice in found if choice.experts == 1), None)
    if dense is None:
        said = "no dense model fits, so nothing is planned; family moe has recipes with experts"
        return [*lines, said], []
    place = "best" if dense is found[0] else f"best dense one, number {found.index(dense) + 1}"
    words = recipe_flags(dense, budget.vocabulary)
    return [*lines, "", f"the {place}:"], words


def ranking(law: NamedLaw, budget: Budget) -> list[Choice]:
    """Return the models of the law's grid that fit, best first; raise `UserError` if none does."""
    budget.check()
    found = sorted(_choices(law, budget), key=lambda choice: choice.loss)
    if not found:
        raise UserError(
            f"no model fits --budget {budget.flops:g} with the other limits; the smallest has "
            f"{min(_grid(law, 'parameters')):.3g} parameters: raise the budget or --memory, or "
            "lower --tokens, --inference-tokens or --context-tokens"
        )
    return found


def _choices(law: NamedLaw, budget: Budget) -> Iterator[Choice]:
    for parameters in _grid(law, "parameters"):
        shape = Shape.of(parameters)
        looped = parameters * (1 - shape.outside / shape.layers)
        for experts in _grid(law, "experts"):
            total = parameters * (1 + _FEED_FORWARD_SHARE * (experts - 1))
            for steps in _grid(law, "recurrent_steps"):
                weights = (total + budget.vocabulary * shape.dim) * budget.weight_bits / 8
                memory = weights + shape.cache_bytes(int(steps), budget.context_tokens)
                visited = parameters + (steps - 1) * looped
                left = budget.flops - 2 * visited * budget.inference_tokens
                tokens = budget.tokens or left / (6 * visited)
                if (
                    experts > budget.most_experts
                    or memory > (budget.memory_bytes or memory)
                    or tokens < 1
                    or 6 * visited * tokens > left * (1 + 1e-9)
                ):
                    continue
                yield Choice(
                    parameters=parameters,
                    looped=looped,
                    experts=int(experts),
                    steps=int(steps),
                    tokens=tokens,
                    memory_bytes=memory,
                    loss=predicted(
                        law,
                        parameters=parameters,
                        looped=looped,
                        tokens=tokens,
                        steps=steps,
                        total=total,
                        experts=experts,
                    ),
                    extrapolated=law.outside(
                        parameters=parameters, tokens=tokens, recurrent_steps=steps, experts=experts
                    ),
                )


def _grid(law: NamedLaw, name: str) -> Sequence[float]:
    """Return the source's own grid, or values over the range of the law's points."""
    if name in law.grid:
        return law.grid[name]
    low, high = law.range.get(name, (1.0, 1.0))
    if name == "parameters":  # a decade further, since budgets outgrow studies
        count = 1 + round(_SIZES_PER_DECADE * np.log10(10 * high / low))
        return np.geomspace(low, 10 * high, count).tolist()
    doubled = [2.0**power for power in range(11)]
    return sorted({low, high, *(value for value in doubled if low <= value <= high)})


def budget_lines(law: NamedLaw, budget: Budget, found: Sequence[Choice]) -> list[str]:
    """Return the table of the best models as lines of text."""
    rows = [["", "parameters", "experts", "R", "tokens", "memory", "serving", "loss", "gives up"]]
    for number, choice in enumerate(found[:_SHOWN], start=1):
        served = 2 * choice.visited * budget.inference_tokens / budget.flops
        row = [
            f"{number}*" if choice.extrapolated else f"{number}",
            f"{choice.parameters / 1e9:.3g}B",
            f"{choice.experts}",
            f"{choice.steps}",
            f"{choice.tokens / 1e9:,.4g}B",
            f"{choice.memory_bytes / 1e9:.2f} GB",
            f"{served:.0%}",
            f"{choice.loss:.4f}",
            f"{choice.loss - found[0].loss:.4f}",
        ]
        rows.append(row)
    lines = [
        f"{law.name}: {law.fit.law.formula}",
        f"source: {law.source}",
        f"{len(found)} models fit {budget.flops:.3g} FLOPs"
        + (f" and {budget.memory_bytes / 1e9:g} GB" if budget.memory_bytes else "")
        + f" at {budget.weight_bits:g} bits per weight; the best:",
        *columns(rows),
    ]
    outside = {each for choice in found[:_SHOWN] for each in choice.extrapolated}
    if outside:
        lines.append(f"* extrapolated: the law was fitted to {', '.join(sorted(outside))}")
    return lines


def recipe_flags(choice: Choice, vocabulary: int) -> list[str]:
    """Return the flags that give a recipe of Llama blocks the chosen size, R and tokens."""
    shape = Shape.of(choice.parameters)
    heads = str(shape.dim // HEAD_DIM)
    flags = {
        "model.dim": str(shape.dim),
        "model.n-layers": str(shape.layers),
        "model.n-heads": heads,
        "model.n-kv-heads": heads,
        "model.hidden-dim": str(HEAD_DIM * round(8 * shape.dim / 3 / HEAD_DIM)),
        "model.prelude-layers": str(shape.outside // 2),
        "model.coda-layers": str(shape.outside // 2),
        "model.vocab-size": str(vocabulary),
        "recurrence.steps": str(choice.steps),
        "training.seq-len": "4096",
        "training.local-batch-size": "1",
        "batch.global-batch-tokens": str(2**21),
        "total-tokens": str(round(choice.tokens)),
    }
    return [word for name, value in flags.items() for word in (f"--{name}", value)]
