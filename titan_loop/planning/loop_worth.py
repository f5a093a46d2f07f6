"""Predicts the worth of a stage's recurrent steps from a scaling law.

stage as planned            R visits of the looped parameters
the same parameters         at R = 1
as many layers as visits    at R = 1, with parameters of their own
"""

from collections.abc import Sequence

from titan_loop.analysis.scaling.law import model_sizes
from titan_loop.analysis.scaling.published import NamedLaw, predicted
from titan_loop.planning.cluster import Cluster
from titan_loop.planning.stage_needs import SECONDS_PER_DAY, StageNeeds
from titan_loop.tables import columns


def worth_lines(law: NamedLaw, needs: Sequence[StageNeeds], cluster: Cluster) -> list[str]:
    """Return predicted nats and GPU-days of every stage with loops, without, and unrolled.

    Stages that train only the gate have no row: it changes no prediction.
    """
    rows = [["stage", "model", "N", "R", "nats per token", "GPU-days"]]
    outside: set[str] = set()
    for need in needs:
        if need.config.trainable != "all":
            continue
        size = model_sizes(need.model)
        active, looped = size["parameters"], size["looped"]
        steps, flops, once = need.mean_recurrent_steps, need.flops_per_token, need.flops_at_one
        unrolled = active + (steps - 1) * looped
        unrolled_flops = flops.total - flops.readouts + once.readouts
        for name, parameters, inside, visits, cost in (
            (need.name, active, looped, steps, flops.total),
            ("without loops", active, looped, 1.0, once.total),
            ("a layer per visit", unrolled, steps * looped, 1.0, unrolled_flops),
        ):
            point = {"tokens": need.tokens, "steps": visits, "experts": size["experts"]}
            total = parameters * size["total"] / active
            loss = predicted(law, parameters=parameters, looped=inside, total=total, **point)
            days = need.tokens * cost / (need.gpu_flops * cluster.mfu * SECONDS_PER_DAY)
            first = name == need.name
            figures = f"{parameters:,.0f}", f"{visits:g}", f"{loss:.4f}", f"{days:,.1f}"
            rows.append([need.name * first, "as planned" if first else name, *figures])
        ranges = {"parameters": active, "tokens": need.tokens, "experts": size["experts"]}
        outside.update(law.outside(**ranges, recurrent_steps=steps))
    lines = ["", f"worth of the recurrent steps by {law.name}: {law.fit.law.formula}"]
    lines.append("N: active parameters without embedding and head")
    lines += columns(rows, left=(0, 1))
    if outside:
        lines.append(f"extrapolated: the law was fitted to {', '.join(sorted(outside))}")
    return lines
