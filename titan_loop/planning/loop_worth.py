"""Predicts the worth of a stage's recurrent steps from a scaling law.

stage as planned            R visits of the looped parameters
the same parameters         at R = 1
as many layers as visits    at R = 1, with parameters of their own
"""

from collections.abc import Sequence

from titan_loop.analysis.scaling.law import Losses
from titan_loop.analysis.scaling.published import NamedLaw
from titan_loop.planning.cluster import Cluster
from titan_loop.planning.stage_needs import SECONDS_PER_DAY, StageNeeds
from titan_loop.tables import columns


def worth_lines(law: NamedLaw, needs: Sequence[StageNeeds], cluster: Cluster) -> list[str]:
    """Return predicted nats and GPU-days of every stage with loops, without, and unrolled.

    Stages that train only the gate have no row: it changes no prediction.
    """
    rows = [["stage", "model", "parameters", "R", "nats per token", "GPU-days"]]
    outside: set[str] = set()
    for need in needs:
        if need.config.trainable != "all":
            continue
        total = sum(unit.parameters() for unit in need.units)
        looped = sum(unit.parameters() for unit in need.units if unit.unit.is_looped)
        steps, flops, once = need.mean_recurrent_steps, need.flops_per_token, need.flops_at_one
        unrolled = total + (steps - 1) * looped
        unrolled_flops = flops.total - flops.readouts + once.readouts
        for name, parameters, inside, visits, cost in (
            (need.name, total, looped, steps, flops.total),
            ("without loops", total, looped, 1.0, once.total),
            ("a layer per visit", unrolled, unrolled - total + looped, 1.0, unrolled_flops),
        ):
            loss = predicted(law, parameters, inside, need.tokens, visits)
            days = need.tokens * cost / (need.gpu_flops * cluster.mfu * SECONDS_PER_DAY)
            first = name == need.name
            figures = f"{parameters:,.0f}", f"{visits:g}", f"{loss:.4f}", f"{days:,.1f}"
            rows.append([need.name * first, "as planned" if first else name, *figures])
        outside.update(law.outside(parameters=total, tokens=need.tokens, recurrent_steps=steps))
    lines = ["", f"worth of the recurrent steps by {law.name}: {law.fit.law.formula}"]
    lines += columns(rows, left=(0, 1))
    if outside:
        lines.append(f"extrapolated: the law was fitted to {', '.join(sorted(outside))}")
    return lines


def predicted(
    law: NamedLaw,
    parameters: float,
    looped: float,
    tokens: float,
    steps: float,
    *,
    total: float | None = None,
    experts: float = 1.0,
) -> float:
    """Return the loss of one model in nats per token; arguments as in `Losses`."""
    sizes = parameters, looped, float(tokens), steps, total or parameters, experts
    return float(law.fit.predict(Losses.unmeasured(*sizes))[0])
