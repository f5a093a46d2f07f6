"""The same windows in the same order however the job is split, killed and resumed."""

import json
from collections import Counter
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.data.load.splits import GLOBAL_BATCH, STEPS, rows, splits
from tests.data.load.splits import load as load_mixture

load = partial(load_mixture, when_exhausted="renormalise")


@pytest.fixture
def mixture(write_source, documents) -> list[str]:
    """Return three sources, of which one repeats and one is exhausted during the run."""
    a = write_source("a", [documents(1, 60, 20)])
    b = write_source("b", [documents(2, 9, 9), documents(3, 20, 30)])
    c = write_source("c", [documents(4, 30, 9)])
    return [f"{a}=0.5", f"{b}=0.3", f"{c}=0.2:max_epochs=1"]


attempts = st.lists(st.tuples(splits, st.integers(0, STEPS), st.booleans()), min_size=1, max_size=4)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(attempts)
def test_any_splits_and_kill_points_read_the_same(mixture, attempts):
    """Each attempt: ranks x local batch, steps until it is killed, prefetching or not."""
    reference = load(mixture)
    expected = [Counter(rows(reference.read_step(GLOBAL_BATCH))) for _ in range(STEPS)]
    assert len(reference.order.stretches) == 2  # the run crosses the end of a source

    state: dict[str, Any] = {}
    step = 0
    for (ranks, local_batch), steps, prefetch in [*attempts, ((1, 1), STEPS, True)]:
        loaders = [
            load(mixture, ranks, rank, local_batch, prefetch=prefetch) for rank in range(ranks)
        ]
        for loader in loaders:
            loader.load_state_dict(json.loads(json.dumps(state)))
        for _ in range(min(steps, STEPS - step)):
            read = [w for loader in loaders for w in rows(loader.read_step(GLOBAL_BATCH))]
            assert Counter(read) == expected[step]
            assert len({json.dumps(loader.state_dict()) for loader in loaders}) == 1
            state = loaders[0].state_dict()
            step += 1
        for loader in loaders:
            loader.close()
    assert step == STEPS
    assert state == reference.state_dict()
