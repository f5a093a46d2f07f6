"""`titan-loop plan --match COST RECIPE`: looped mixtures that cost as much as another model.

    layers, R, E, k ─► expert width at which the cost is the model's ─► that mixture's costs, a row

Every cost is computed from a candidate's config, or its model on the meta device, as in training,
`plan` and the inference engine. FLOPs and parameters grow linearly with the width of an expert,
so two trial widths give the answer. A cache does not depend on experts: with `kv` the width is the
one at which FLOPs match.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import torch

from titan_loop.errors import UserError
from titan_loop.families.moe.feed_forward import ALIGNED
from titan_loop.families.moe.model import MoEOptions
from titan_loop.inference.cache import FullCache
from titan_loop.inference.stack import Stack
from titan_loop.models.decoder import LoopDecoder
from titan_loop.tables import columns
from titan_loop.training.chosen_model import stage_architecture
from titan_loop.training.depth_schedule import RecurrenceConfig, most_recurrent_steps
from titan_loop.training.flop_budget import mean_flops
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

STEPS, EXPERTS, TOP_K = (2, 3, 4, 6), (8, 16, 32, 64), (1, 2, 4, 8)
TOLERANCE = 0.01
_SHOWN = 10
_KEPT = (
    "dim",
    "n_heads",
    "n_kv_heads",
    "vocab_size",
    "exit_gate",
    "tie_weights",
    "rope_theta",
    "norm_placement",
    "norm_eps",
    "positions",
    "learned_positions",
    "relative_window",
)
"""Options that a mixture takes from the model it is matched to."""


class Costs(NamedTuple):
    """Costs of a model; FLOPs are of a trained token, bytes of a token in a bf16 cache."""

    parameters: float
    active: float
    flops: float
    kv: float

    def over(self, other: "Costs") -> "Costs":
        """Return the relative differences from another model's costs."""
        return Costs(*(mine / its - 1 for mine, its in zip(self, other, strict=True)))


_NAMES = {"flops": "FLOPs a token", "parameters": "parameters", "kv": "KV-cache bytes a token"}


class Candidate(NamedTuple):
    """A looped mixture, its costs, and their differences from the matched model's."""

    options: MoEOptions
    steps: int
    costs: Costs
    differences: Costs

    def other_differences(self, cost: str) -> float:
        """Return the sum of the differences in the costs that are not matched, without signs."""
        return sum(abs(getattr(self.differences, name)) for name in _NAMES if name != cost)


def matched(config: LoopTrainer.Config, cost: str) -> list[str]:
    """Return the table of looped mixtures whose cost is within 1 % of a model's.

    For each R and E it has the k within 1 % that is nearest in the other costs; rows are sorted by
    the same distance.

    Args:
        config: Config of a run, whose model has no experts.
        cost: flops, parameters or kv.

    Raises:
        UserError: The model is sparse, its width does not suit experts, or no mixture is within
            1 %.
    """
    model = stage_architecture(config)
    if model.idle_parameters():
        raise UserError(
            f"--match {cost}: model.family={model.family} has experts already; choose a stage of a "
            "dense model"
        )
    target = costs_of(config, model)
    steps = most_recurrent_steps(config.recurrence)
    best: dict[tuple[int, int], Candidate] = {}
    nearest: Candidate | None = None
    for one in _candidates(config, model, target, cost):
        off = abs(getattr(one.differences, cost))
        if nearest is None or off < abs(getattr(nearest.differences, cost)):
            nearest = one
        key = one.steps, one.options.experts
        rival = best.get(key)
        if off <= TOLERANCE and (
            rival is None or one.other_differences(cost) < rival.other_differences(cost)
        ):
            best[key] = one
    if not best:
        assert nearest is not None
        off = getattr(nearest.differences, cost)
        raise UserError(
            f"--match {cost}: no looped mixture has the model's {_NAMES[cost]} within 1 %; the "
            f"nearest, {_shape_of(nearest)}, is at {100 * off:+.1f} %; change model.n_layers or "
            "model.dim"
        )
    found = sorted(best.values(), key=lambda one: one.other_differences(cost))[:_SHOWN]
    return _lines(model, steps, target, found, cost)


def costs_of(config: LoopTrainer.Config, model: LoopDecoder.Config) -> Costs:
    """Return the costs of a run's model at the run's R; the cache is the largest R's."""
    with torch.device("meta"):
        built = model.build()
    parameters = sum(parameter.numel() for parameter in built.parameters())
    steps = most_recurrent_steps(config.recurrence)
    cache = Stack(built.bfloat16()).make_cache(FullCache, steps=steps, rows=1, capacity=1)
    return Costs(
        parameters=parameters,
        active=parameters - model.idle_parameters(),
        flops=mean_flops(config, model).total,
        kv=cache.allocated_bytes,
    )


def _candidates(
    config: LoopTrainer.Config, model: LoopDecoder.Config, target: Costs, cost: str
) -> Iterator[Candidate]:
    """Yield a mixture for every R, E and k, with about as many visits of layers as the model."""
    record = model.architecture()
    visits = round(model.layer_visits(most_recurrent_steps(config.recurrence)).forward)
    for steps, experts, top_k in product(STEPS, EXPERTS, TOP_K):
        if top_k == experts:
            continue
        for layers in sorted({max(1, visits // steps), -(-visits // steps)}):
            options = MoEOptions(
                n_layers=layers,
                recurrent_steps=steps,
                experts=experts,
                top_k=top_k,
                **{name: record[name] for name in _KEPT if name in record},
            )
            looped = replace(config, recurrence=RecurrenceConfig(steps=Schedule.constant(steps)))
            found = _of_width(looped, options, target, cost)
            yield Candidate(options, steps, found, found.over(target))


def _of_width(config: LoopTrainer.Config, options: MoEOptions, target: Costs, cost: str) -> Costs:
    """Set the width of the experts so that the cost is nearest to the target; return all costs."""

    def asked(width: int) -> LoopDecoder.Config:
        options.hidden_dim = options.expert_hidden_dim = width
        return stage_architecture(replace(config, model=options))

    def value(width: int) -> float:
        if cost == "parameters":
            return costs_of(config, asked(width)).parameters
        return mean_flops(config, asked(width)).total

    wanted = target.parameters if cost == "parameters" else target.flops
    first = value(ALIGNED)
    units = (wanted - first) / (value(2 * ALIGNED) - first)
    return costs_of(config, asked(ALIGNED * max(1, 1 + round(units))))


def _shape_of(one: Candidate) -> str:
    options = one.options
    return (
        f"{options.n_layers} layers at R = {one.steps} with {options.experts} experts of width "
        f"{options.expert_hidden_dim} and k = {options.top_k}"
    )


def _lines(
    model: LoopDecoder.Config, steps: int, target: Costs, found: Sequence[Candidate], cost: str
) -> list[str]:
    head = ["layers", "R", "E", "k", "width", "parameters", "active", "FLOPs/token", "KV B/token"]
    rows = [head, [str(len(model.layers)), str(steps), "", "", str(model.hidden_dim)]]
    rows[1] += [f"{target.parameters:,.0f}", f"{target.active:,.0f}"]
    rows[1] += [f"{target.flops:.4g}", f"{target.kv:,.0f}"]
    for one in found:
        options, costs, off = one.options, one.costs, [f"{100 * d:+.1f}%" for d in one.differences]
        rows.append(
            [
                *map(str, (options.n_layers, one.steps, options.experts, options.top_k)),
                str(options.expert_hidden_dim),
                f"{costs.parameters:,.0f} {off[0]:>8}",
                f"{costs.active:,.0f} {off[1]:>8}",
                f"{costs.flops:.4g} {off[2]:>8}",
                f"{costs.kv:,.0f} {off[3]:>8}",
            ]
        )
    first = found[0].options
    return [
        f"looped mixtures with the {_NAMES[cost]} of the first row, within 1 %; nearest in the "
        "other costs first",
        *columns(rows, left=()),
        f"in a recipe: MoEOptions(dim={first.dim}, n_heads={first.n_heads}, "
        f"n_kv_heads={first.n_kv_heads}, n_layers={first.n_layers}, "
        f"hidden_dim={first.hidden_dim}, experts={first.experts}, top_k={first.top_k}), "
        f"recurrence.steps={found[0].steps}",
    ]
