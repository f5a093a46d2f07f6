"""For every family: compiled layers equal eager ones."""

import pytest
import torch
from torch._dynamo.utils import counters

from tests.contracts.families import cases
from tests.distributed.test_compile import (
    COMPILED_TOLERANCE,
    DYNAMO_WARNS,
    SEQ_LEN,
    compare_gradients,
    model_of,
    parallelized,
)

COMPILED = cases("compiled")


@DYNAMO_WARNS
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_layers_equal_eager_ones(name):
    """`aot_eager` leaves the kernels as they are, so this compares what tracing changes."""
    options, steps, graphs = COMPILED[name]
    torch._dynamo.reset()
    counters.clear()
    tokens = torch.randint(128, (2, SEQ_LEN))
    positions = (torch.arange(SEQ_LEN) % 9).expand(2, -1).contiguous()
    eager = model_of(options)
    with torch._dynamo.config.patch(recompile_limit=2):  # layers may take more
        compiled = parallelized(model_of(options), enable=True, backend="aot_eager")
        want, got = (
            model(tokens, positions, recurrent_steps=steps).hidden_RBLD[-1]
            for model in (eager, compiled)
        )
        torch.testing.assert_close(got, want, atol=COMPILED_TOLERANCE, rtol=0)
        compare_gradients(compiled, got, eager, want)
        if graphs is not None:
            compiled(tokens, positions, recurrent_steps=steps - 1).hidden_RBLD[-1].mean().backward()
            with torch.no_grad():
                compiled(tokens, positions, recurrent_steps=steps)
            assert counters["stats"]["unique_graphs"] == graphs
