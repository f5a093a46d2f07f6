"""The same windows in the same order however the job is split, killed and resumed."""

import json
import os
import random
import signal
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.data.load.splits import GLOBAL_BATCH, STEPS, rows, splits
from tests.data.load.splits import load as load_mixture
from tests.support.multiprocess import RankError

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


def train(mixture: list[str], folder: Path, ranks: int, local_batch: int, kill: Any) -> str:
    """Read as a training job does; one rank may be killed in the middle of a step.

    Every rank writes what it read; rank 0 commits a step once all have done it.
    """
    rank = dist.get_rank()
    loader = load(mixture, ranks, rank, local_batch)
    committed = folder / "state.json"
    if committed.exists():
        loader.load_state_dict(json.loads(committed.read_text()))
    for step in range(loader.windows_consumed // GLOBAL_BATCH, STEPS):
        read = rows(loader.read_step(GLOBAL_BATCH))
        if kill == [step, rank]:
            os.kill(os.getpid(), signal.SIGKILL)
        (folder / f"{step}-{rank}-of-{ranks}.json").write_text(json.dumps(read))
        dist.all_reduce(torch.ones(1))
        if rank == 0:
            committed.with_suffix(".new").write_text(json.dumps(loader.state_dict()))
            committed.with_suffix(".new").replace(committed)
            (folder / f"{step}-committed").write_text(str(ranks))
        dist.barrier()
    loader.close()
    return loader.data_hash


@pytest.mark.multiprocess
def test_killed_ranks_resume_at_another_world_size(gloo_pool, mixture, tmp_path):
    reference = load(mixture, prefetch=False)
    expected = [Counter(rows(reference.read_step(GLOBAL_BATCH))) for _ in range(STEPS)]
    folder = tmp_path / "run"
    folder.mkdir()
    draw = random.Random(0)
    first, second = sorted(draw.sample(range(1, STEPS), 2))
    for ranks, local_batch, kill in (
        (2, 3, [first, draw.randrange(2)]),
        (4, 2, [second, draw.randrange(4)]),
    ):
        with pytest.raises(RankError, match="died with exit code -9"):
            gloo_pool(ranks).run(train, mixture, folder, ranks, local_batch, kill)
    hashes = gloo_pool(2).run(train, mixture, folder, 2, 1, None)
    assert set(hashes) == {reference.data_hash}
    for step, windows in enumerate(expected):
        ranks = int((folder / f"{step}-committed").read_text())
        read = [
            tuple(row)
            for rank in range(ranks)
            for row in json.loads((folder / f"{step}-{rank}-of-{ranks}.json").read_text())
        ]
        assert Counter(read) == windows
    assert {int((folder / f"{step}-committed").read_text()) for step in range(STEPS)} == {2, 4}
