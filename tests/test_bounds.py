"""Bounds and choices on fields: where they hold, and what their refusals say."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest
from annotated_types import Ge, Gt, Le, Lt

from titan_loop.bounds import FINITE, Hint, bound_refusals
from titan_loop.training.schedule import Schedule


@dataclass(kw_only=True)
class Inner:
    share: Annotated[float, Ge(0), Lt(1), Hint("0.9 is usual")] = 0.0
    depths: Annotated[list[int], Ge(1)] = field(default_factory=list)


@dataclass(kw_only=True)
class Outer:
    count: Annotated[int | None, Ge(1), Le(9)] = None
    scale: Annotated[float, Gt(0), FINITE] = 1.0
    kind: Literal["one", "two", "three", "four"] = "one"
    fixed: Annotated[Literal[True], Hint("it is needed")] = True
    rate: Annotated[Schedule | None, Ge(0)] = None
    inner: Inner = field(default_factory=Inner)


@pytest.mark.parametrize(
    ("config", "refusal"),
    [
        (Outer(count=1, scale=1e-30, rate=Schedule.constant(0), inner=Inner(depths=[1])), None),
        (Outer(count=9, kind="four", inner=Inner(share=0.0)), None),
        (Outer(count=0), "run.count=0 must be at least 1 and at most 9"),
        (Outer(count=10), "run.count=10 must be at least 1 and at most 9"),
        (Outer(scale=0.0), "run.scale=0.0 must be above 0 and finite"),
        (Outer(scale=math.inf), "run.scale=inf must be above 0 and finite"),
        (Outer(scale=math.nan), "run.scale=nan must be above 0 and finite"),
        (
            Outer(kind="three4"),
            "run.kind=three4 must be one or two or three or four; nearest: three",
        ),  # type: ignore[arg-type]
        (Outer(fixed=False), "run.fixed=False must be True; it is needed"),  # type: ignore[arg-type]
        (Outer(rate=Schedule.parse("0:1 linear 8:-1")), "run.rate=0:1 linear 8:-1 must be at lea"),
        (Outer(inner=Inner(share=1.0)), "run.inner.share=1.0 must be at least 0 and below 1; 0.9"),
        (Outer(inner=Inner(depths=[2, 0])), "run.inner.depths=[2, 0] must be at least 1"),
    ],
)
def test_a_value_outside_is_one_refusal(config, refusal):
    found = [str(each) for each in bound_refusals("run", config)]
    assert len(found) == (refusal is not None)
    assert not found or found[0].startswith(refusal)
