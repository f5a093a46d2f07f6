"""Adaptive loops and memory: gathers of a layer that loops."""

import pytest

from tests.distributed.sharded_model import (
    PER_STEP,
    PER_VISIT,
    Collectives,
    build,
    forward_backward,
)
from tests.families.adaptive.contract import MEMORY
from titan_loop.distributed.loop_fsdp import FSDPConfig, reshard_units
from titan_loop.families.adaptive.model import AdaptiveOptions


def gathers(policy: FSDPConfig, iterations: int) -> int:
    """All-gathers of one micro-batch after the first, which sets FSDP up."""
    options = AdaptiveOptions(max_iterations=iterations, **MEMORY)
    model = build(policy, options=options, checkpointing="full")
    for _ in range(2):
        with Collectives() as collectives:
            forward_backward(model, 1)
            reshard_units(model)
    untrained = [name for name, p in model.named_parameters() if p.grad is None]
    assert all(iterations == 1 and ".control." in name for name in untrained)  # no choice to learn
    return collectives.counts()[0]


@pytest.mark.multiprocess
@pytest.mark.parametrize("policy", [PER_VISIT, PER_STEP], ids=["per_visit", "per_step"])
def test_three_iterations_gather_a_layer_as_often_as_one(gloo_pool, policy: FSDPConfig):
    one, three = (gloo_pool(2).run(gathers, policy, n)[0] for n in (1, 3))
    if policy is PER_STEP:  # two layers, each with its controls and gates; tables, norm, bank
        assert one == three == 2 * 3 + 4
    else:  # only the controls, of a few hundred bytes, come back for every iteration's backward
        assert three - one == 2 * 2
