"""Predicts the worth of a stage's recurrent steps from a scaling law fitted to smaller runs.

    stage as planned            R visits of the looped parameters
    the same parameters         at R = 1
    as many layers as visits    at R = 1, with parameters of their own

Losses come from the joint law in `scaling.json`, which `titan-loop scaling` writes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from titan_loop.analysis.scaling.law import JOINT, Fit, Losses
from titan_loop.errors import UserError
from titan_loop.planning.cluster import Cluster
from titan_loop.planning.stage_needs import SECONDS_PER_DAY, StageNeeds
from titan_loop.storage.json_files import read_versioned_json
from titan_loop.tables import columns

FORMAT_VERSION = 1


@dataclass(frozen=True)
class FittedWorth:
    """The joint law of a study, and the range of its points.

    Attributes:
        range: Smallest and largest value of parameters, tokens and recurrent_steps.
    """

    fit: Fit
    range: dict[str, tuple[float, float]]


def read_fit(path: Path) -> FittedWorth:
    """Return the joint law of a `scaling.json`.

    Raises:
        UserError: The file is missing, not from `titan-loop scaling`, or has no joint law.
    """
    fix = "write it with titan-loop scaling"
    try:
        record = read_versioned_json(path, format_version=FORMAT_VERSION, fix=fix)
        law = next(law for law in record["laws"] if law["formula"] == JOINT.formula)
        values = {name: float(law["coefficients"][name]) for name in JOINT.coefficients}
        limits = {name: (float(low), float(high)) for name, (low, high) in law["range"].items()}
    except FileNotFoundError as error:
        raise UserError(f"scaling-fit={path} does not exist; {fix}") from error
    except (StopIteration, KeyError, TypeError, ValueError) as error:
        raise UserError(f"scaling-fit={path} has no joint law; {fix}") from error
    return FittedWorth(Fit(JOINT, values, float(law["rmse"])), limits)


def worth_lines(worth: FittedWorth, needs: Sequence[StageNeeds], cluster: Cluster) -> list[str]:
    """Return predicted nats and GPU-days of every stage with loops, without, and unrolled.

    The gate alone changes no prediction, so stages that train only the gate have no row.
    """
    phi = worth.fit.values["phi"]
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
            ("a layer a visit", unrolled, unrolled - total + looped, 1.0, unrolled_flops),
        ):
            loss = _predicted(worth.fit, parameters, inside, need.tokens, visits)
            days = need.tokens * cost / (need.gpu_flops * cluster.mfu * SECONDS_PER_DAY)
            first = name == need.name
            rows.append(
                [
                    need.name if first else "",
                    "as planned" if first else name,
                    f"{parameters:,.0f}",
                    f"{visits:g}",
                    f"{loss:.4f}",
                    f"{days:,.1f}",
                ]
            )
        for name, value in (
            ("parameters", total),
            ("tokens", need.tokens),
            ("recurrent_steps", steps),
        ):
            low, high = worth.range[name]
            if not low <= value <= high:
                outside.add(f"{name} {low:.3g} to {high:.3g}")
    lines = ["", f"worth of the recurrent steps by the fitted law, phi = {phi:.3f}"]
    lines += columns(rows, left=(0, 1))
    if outside:
        lines.append(f"extrapolated: the law was fitted to {', '.join(sorted(outside))}")
    return lines


def _predicted(fit: Fit, parameters: float, looped: float, tokens: float, steps: float) -> float:
    point = Losses(
        parameters=np.array([parameters]),
        looped=np.array([looped]),
        tokens=np.array([float(tokens)]),
        steps=np.array([steps]),
        loss=np.zeros(1),
        run=np.array([""]),
    )
    return float(fit.predict(point)[0])
