"""Batches that do not split over the ranks, and states that do not fit a device."""

import pytest

from titan_loop.families.ouro.model import OuroOptions
from titan_loop.models.family import decoder_config
from titan_loop.training.batch_schedule import BatchConfig
from titan_loop.training.layout_preflight import batch_refusals, memory_refusals
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

WINDOW = 64


def config_of(*batches: int, window: int = WINDOW) -> LoopTrainer.Config:
    """Return a run whose global batch has so many windows, each number for a third of the run."""
    knots = [(place * 1000 * window, windows * window) for place, windows in enumerate(batches)]
    config = LoopTrainer.Config(
        total_tokens=3000 * window,
        model=OuroOptions(size="debugmodel"),
        batch=BatchConfig(global_batch_tokens=Schedule.steps(knots)),
    )
    config.training.seq_len = window
    return config


@pytest.mark.parametrize(
    ("batches", "fix"),
    [
        ((6,), "use --batch.global-batch-tokens 512"),
        ((4, 6), "use --batch.multiple-of-windows 4"),
        ((6, 8), "use --batch.global-batch-tokens of multiples of 256 tokens"),
    ],
)
def test_the_fix_of_an_uneven_batch_depends_on_the_schedule(batches, fix):
    config = config_of(*batches)
    config.training.local_batch_size = 1
    (refusal,) = batch_refusals(config, world_size=4)
    assert str(refusal).endswith(fix)


@pytest.mark.parametrize(("replicas", "offered"), [(3, True), (5, False)])
def test_context_parallelism_is_offered_where_it_factors(replicas, offered):
    config = config_of(6, window=8192)
    config.training.local_batch_size = 1
    config.parallelism.data_parallel_replicate_degree = replicas
    (refusal,) = batch_refusals(config, world_size=12)
    assert ("--parallelism.context-parallel-degree 2" in str(refusal)) == offered


def test_states_that_exceed_a_device_name_what_to_change():
    config = config_of(8)
    model = decoder_config(config.model, max_seq_len=WINDOW)
    assert not [*memory_refusals(config, model, 1, device_bytes=2**40)]
    (refusal,) = memory_refusals(config, model, 1, device_bytes=2**10)
    assert str(refusal).endswith("backward_steps or a smaller training.local_batch_size")
