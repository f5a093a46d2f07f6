"""Finds the best size, tokens, recurrent steps and experts for a budget, by a scaling law.

    budget C, memory, tokens served T ─► every (N, E, R) that fits ─► D ─► the law's loss ─► ranking

    C = 6·V·D + 2·V·T,   V = N + (R − 1)·N_looped   parameters visited by a token

Blocks are Llama's: a layer of width d has 4·d² parameters of attention and 8·d² of feed-forward; a
further expert adds 8·d², and a token visits one expert. The first two and the last two layers are
not looped. The embedding is tied and counts only in memory.

Sources: Hoffmann et al. 2022, arXiv 2203.15556 (6 FLOPs a parameter and token). Sardana et al.
2023, arXiv 2401.00448 (tokens served). Chen et al. 2026, arXiv 2609.40316, App. C (joint optimum).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from titan_loop.analysis.scaling.published import NamedLaw, predicted
from titan_loop.errors import UserError
from titan_loop.tables import columns

DENSE_RECIPE, SPARSE_RECIPE = "nanbeige_quickstart", "xllm_moe_ouro"
"""Recipes of Llama blocks that are planned with the shape of the chosen model."""

TOLERANCE = 0.05
"""Largest relative difference in parameters between a chosen model and a recipe with experts."""

HEAD_DIM = 128
_ALIGNED = 8
_OUTSIDE_LAYERS = 4
_WIDTH_PER_LAYER = 85
_FEED_FORWARD_SHARE = 2 / 3
_SHOWN = 10
_SIZES_PER_DECADE = 10
_STEPS, _LARGEST_BATCH, _SMALLEST_BATCH = 1000, 2**21, 2**9
_WINDOW, _WINDOWS = 4096, 8
_BYTES = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits of training and serving.

    Attributes:
        flops: FLOPs of training and of all tokens served, together.
        memory_bytes: Bytes of weights and cache; None for no limit.
        tokens: Training tokens; None lets the budget decide.
        unique_tokens: Tokens of text; further training tokens repeat them. None for no limit.
        inference_tokens: Tokens served over the model's life.
        weight_bits: Bits of a stored weight.
        context_tokens: Tokens in the cache of keys and values, two bytes per number.
        vocabulary: Rows of the embedding.
        most_experts: Largest number of experts to consider.
    """

    flops: float
    memory_bytes: float | None = None
    tokens: float | None = None
    unique_tokens: float | None = None
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
            "unique-tokens": self.unique_tokens,
            "weight-bits": self.weight_bits,
            "vocabulary": self.vocabulary,
            "most-experts": self.most_experts,
        }
        for name, value in numbers.items():
            if value is not None and not 0 < value < float("inf"):
                raise UserError(f"--{name} {value:g} must be a positive number")
        served = {"inference-tokens": self.inference_tokens, "context-tokens": self.context_tokens}
        for name, value in served.items():
            if not 0 <= value < float("inf"):
                raise UserError(f"--{name} {value:g} must be a number of at least 0")
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
    def total(self) -> float:
        """Stored parameters, idle experts included, without the embedding."""
        return self.parameters * (1 + _FEED_FORWARD_SHARE * (self.experts - 1))

    @property
    def visited(self) -> float:
        """Parameters that a token visits, counted once per visit."""
        return self.parameters + (self.steps - 1) * self.looped


def _head_dim(dim: float) -> int:
    """Return a power of two from 16 to 128, an eighth of the width or less where it can be."""
    return max(16, min(HEAD_DIM, 2 ** int(math.log2(dim / 8))))


@dataclass(frozen=True)
class Shape:
    """Widths and layers of a Llama model with about a given number of parameters."""

    dim: int
    layers: int
    hidden_dim: int

    @classmethod
    def of(cls, parameters: float) -> "Shape":
        """Return the shape: layers of 12·dim² parameters, about 85 channels per layer."""
        exact = (parameters * _WIDTH_PER_LAYER / 12) ** (1 / 3)
        unit = _head_dim(exact)
        dim = max(unit, unit * round(exact / unit))
        layers = max(1, round(parameters / (12 * dim**2)))
        dim = max(unit, unit * round(math.sqrt(parameters / (12 * layers)) / unit))
        # Rounded widths and layers miss the size; the feed-forward makes up for it.
        unit = HEAD_DIM if dim >= 8 * HEAD_DIM else _ALIGNED
        hidden_dim = unit * round((parameters / layers - 4 * dim**2) / (3 * dim) / unit)
        return cls(dim, layers, max(unit, hidden_dim))

    @property
    def heads(self) -> int:
        """Number of heads, about eight or more, of at most 128 channels."""
        return self.dim // math.gcd(self.dim, _head_dim(self.dim))

    def parameters(self, experts: int) -> tuple[int, int]:
        """Return the matrices' parameters that act on a token and all of them, embedding left out.

        With more than one expert the routers count, too.
        """
        expert = 3 * self.dim * self.hidden_dim
        router = self.dim * experts if experts > 1 else 0
        active = self.layers * (4 * self.dim**2 + expert + router)
        return active, active + self.layers * (experts - 1) * expert

    @property
    def outside(self) -> int:
        """Layers before and after the loop; 0 where they would be half of the model or more."""
        return _OUTSIDE_LAYERS if self.layers > 2 * _OUTSIDE_LAYERS else 0

    def cache_bytes(self, steps: int, tokens: int) -> float:
        """Return the bytes of all visits' keys and values."""
        visits = self.outside + steps * (self.layers - self.outside)
        return 2.0 * 2.0 * visits * self.dim * tokens


def ranked(law: NamedLaw, limits: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the table of the best models, and the recipe and flags of the best one.

    A recipe with experts whose parameters would differ by more than `TOLERANCE` gives way to the
    best dense model. Without one there are no words, and the last line says so.

    Args:
        limits: `Budget` by attribute, but `memory`, such as 3GB, in place of its bytes.

    Raises:
        UserError: Limits that cannot be met, or a budget so small that the best model would guess.
    """
    given = dict(limits)
    memory = given.pop("memory")
    budget = Budget(memory_bytes=None if memory is None else _bytes(memory), **given)
    found = ranking(law, budget)
    best = found[0]
    guessing = math.log(budget.vocabulary)
    if not best.loss < guessing:
        raise UserError(
            f"--budget {budget.flops:g} is in FLOPs, about 6 × parameters × tokens, and trains the "
            f"best model, of {best.parameters:.3g} parameters, on {best.tokens:.3g} tokens: its "
            f"loss {best.loss:.3g} would be above guessing, ln {budget.vocabulary} = "
            f"{guessing:.3g}; raise --budget, or --tokens and --unique-tokens where they are given"
        )
    lines = [*budget_lines(law, budget, found), ""]
    problem = _unfit(best)
    if problem is None:
        return [*lines, "the best:"], recipe_words(best, budget)
    dense = next((choice for choice in found if choice.experts == 1), None)
    if dense is None:
        return [*lines, f"{problem}, and no dense model fits: nothing is planned"], []
    lines += [
        f"{problem}: the best dense model is planned",
        f"the best dense one, number {found.index(dense) + 1} with loss {dense.loss:.4f}, gives up "
        f"{dense.loss - best.loss:.4f}:",
    ]
    return lines, recipe_words(dense, budget)


def _bytes(text: str) -> float:
    unit = next((unit for unit in _BYTES if text.endswith(unit)), "")
    try:
        return float(text.removesuffix(unit)) * _BYTES.get(unit, 1.0)
    except ValueError:
        raise UserError(
            f"--memory {text} is not a number of bytes; write it as 3GB ({', '.join(_BYTES)})"
        ) from None


def _unfit(choice: Choice) -> str | None:
    """Return the parameters that the recipe with experts misses; None if it can be planned."""
    if choice.experts == 1:
        return None
    active, total = Shape.of(choice.parameters).parameters(choice.experts)
    if max(abs(active / choice.parameters - 1), abs(total / choice.total - 1)) <= TOLERANCE:
        return None
    return (
        f"{SPARSE_RECIPE} cannot have the best model's shape: {active:.3g} of {total:.3g} "
        f"parameters would act on a token, not {choice.parameters:.3g} of {choice.total:.3g}"
    )


def ranking(law: NamedLaw, budget: Budget) -> list[Choice]:
    """Return the models of the law's grid that fit, best first.

    Raises:
        UserError: No model fits, or the law does not know how much a repeated token is worth.
    """
    budget.check()
    if budget.unique_tokens is not None and "reuse" not in law.fit.law.shape:
        raise UserError(
            f"--unique-tokens {budget.unique_tokens:g} has no effect with --law {law.name}, "
            "which has no coefficient reuse; leave it out, or give a law that titan-loop scaling "
            "fitted to runs of several epochs"
        )
    found = sorted(_choices(law, budget), key=lambda choice: choice.loss)
    if not found:
        raise UserError(
            f"no model fits --budget {budget.flops:g} with the other limits; the smallest has "
            f"{min(_grid(law, 'parameters')):.3g} parameters: raise the budget or --memory, or "
            "lower --tokens, --inference-tokens or --context-tokens"
        )
    return found


def _choices(law: NamedLaw, budget: Budget) -> Iterator[Choice]:
    text = budget.unique_tokens
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
                unique = {} if text is None else {"unique": min(tokens, text)}
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
                        **unique,
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
        + (f" and {budget.unique_tokens:.3g} tokens of text" if budget.unique_tokens else "")
        + f" at {budget.weight_bits:g} bits per weight; the best:",
        *columns(rows),
    ]
    outside = {each for choice in found[:_SHOWN] for each in choice.extrapolated}
    if outside:
        lines.append(f"* extrapolated: the law was fitted to {', '.join(sorted(outside))}")
    return lines


def recipe_words(choice: Choice, budget: Budget) -> list[str]:
    """Return a recipe of Llama blocks, and flags with the chosen size, experts, R and tokens.

    The batch leaves about a thousand training steps or more, in eight windows or more, so that the
    GPUs of one host can share it.
    """
    shape = Shape.of(choice.parameters)
    batch = 2 ** int(math.log2(max(1.0, choice.tokens / _STEPS)))
    batch = max(_SMALLEST_BATCH, min(_LARGEST_BATCH, batch))
    flags = {
        "model.dim": shape.dim,
        "model.n-layers": shape.layers,
        "model.n-heads": shape.heads,
        "model.n-kv-heads": shape.heads,
        "model.hidden-dim": shape.hidden_dim,
        "model.prelude-layers": shape.outside // 2,
        "model.coda-layers": shape.outside // 2,
        "model.vocab-size": budget.vocabulary,
        "recurrence.steps": choice.steps,
        "training.seq-len": min(_WINDOW, batch // _WINDOWS),
        "training.local-batch-size": 1,
        "batch.global-batch-tokens": batch,
        "total-tokens": round(choice.tokens),
    }
    if budget.unique_tokens is not None and budget.unique_tokens < choice.tokens:
        flags["dataloader.unique-tokens"] = max(1, round(budget.unique_tokens))
    words = ["--model.tie-weights"]
    if choice.experts > 1:
        flags["model.experts"], flags["model.top-k"] = choice.experts, 1
        flags["model.expert-hidden-dim"] = shape.hidden_dim
        words += ["--model.no-normalise-scores"]  # one score over itself trains no router
    words += [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return [SPARSE_RECIPE if choice.experts > 1 else DENSE_RECIPE, *words]
