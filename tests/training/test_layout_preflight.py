"""Batches that do not split over the ranks, and states that do not fit a device."""

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import pytest

from titan_loop.distributed.activation_checkpointing import FullOffloadAC, RecurrentStepAC
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.models.family import decoder_config
from titan_loop.training.batch_schedule import BatchConfig
from titan_loop.training.layout_preflight import (
    batch_refusals,
    layout_refusals,
    memory_refusals,
    run_states,
)
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


def change(config: LoopTrainer.Config, changed: Mapping[str, Any]) -> None:
    for field, value in changed.items():
        section, _, name = field.rpartition(".")
        setattr(attrgetter(section)(config) if section else config, name, value)


FIX_LOCAL = "use --training.local-batch-size {}, or --batch.global-batch-tokens {}"


@pytest.mark.parametrize(
    ("batches", "local_batch", "ranks", "tensor_parallel", "fix"),
    [
        ((6,), 1, 4, 1, "use --batch.global-batch-tokens 512"),
        ((4, 6), 1, 4, 1, "use --batch.multiple-of-windows 4"),
        ((6, 8), 1, 4, 1, "use --batch.global-batch-tokens of multiples of 256 tokens"),
        ((6,), 4, 2, 1, FIX_LOCAL.format(3, 512)),
        ((6,), 4, 3, 1, FIX_LOCAL.format(2, 768)),
        ((6,), 1, 8, 2, "use --batch.global-batch-tokens 512"),
        ((3,), 2, 1, 2, FIX_LOCAL.format(1, 256)),
    ],
)
def test_the_fix_of_an_uneven_batch_keeps_most_of_it(
    batches, local_batch, ranks, tensor_parallel, fix
):
    config = config_of(*batches)
    config.training.local_batch_size = local_batch
    config.parallelism.tensor_parallel_degree = tensor_parallel
    (refusal,) = batch_refusals(config, world_size=ranks)
    assert str(refusal).endswith(fix)


@pytest.mark.parametrize(
    ("windows", "replicas", "ranks", "offered"),
    [(1, 1, 2, True), (6, 3, 12, True), (6, 5, 12, False)],
)
def test_context_parallelism_is_offered_where_it_factors(windows, replicas, ranks, offered):
    config = config_of(windows, window=8192)
    config.training.local_batch_size = 1
    config.parallelism.data_parallel_replicate_degree = replicas
    (refusal,) = batch_refusals(config, world_size=ranks)
    assert ("--parallelism.context-parallel-degree 2" in str(refusal)) == offered


def test_states_that_exceed_a_device_name_what_to_change():
    config = config_of(8)
    model = decoder_config(config.model, max_seq_len=WINDOW)
    assert not [*memory_refusals(config, model, 1, device_bytes=2**40)]
    (refusal,) = memory_refusals(config, model, 1, device_bytes=2**10)
    assert str(refusal).endswith("backward_steps or a smaller training.local_batch_size")
    # Two layers, four steps, and 8 windows of 64 states of 64 elements in fp32.
    total = run_states(config, model, 1).total + 2 * 4 * 8 * WINDOW * 64 * 4
    assert not [*memory_refusals(config, model, 1, device_bytes=total)]
    assert [*memory_refusals(config, model, 1, device_bytes=total - 1)]


@pytest.mark.parametrize(
    ("changed", "kept"),
    [
        ({}, "8 visits 128.0"),
        ({"training.mixed_precision_param": "bfloat16"}, "8 visits 64.0"),
        (
            {
                "parallelism.context_parallel_degree": 2,
                "parallelism.tensor_parallel_degree": 4,
            },
            "8 visits 16.0",
        ),
        ({"activation_checkpoint": RecurrentStepAC.Config()}, "4 visits 64.0"),
        ({"recurrence.backward_steps": 3}, "6 visits 96.0"),
        # A loss on every step reads a state of each, whatever the backward pass needs.
        ({"recurrence.backward_steps": 1}, "4 visits 64.0"),
        ({"trainable": "gate"}, "4 visits 64.0"),
        ({"activation_checkpoint": FullOffloadAC.Config()}, "4 visits 64.0"),
        ({"recurrence.backward_steps": 1, "model.exit_gate": False}, "2 visits 32.0"),
    ],
)
def test_the_states_that_a_step_keeps(changed, kept):
    config = config_of(8)
    model = decoder_config(config.model, max_seq_len=WINDOW)
    config.training.local_batch_size = 2**20  # 16 GiB for a state in fp32
    change(config, changed)
    (refusal,) = memory_refusals(config, model, 1, device_bytes=2**34)
    assert f"a state for each of {kept}), and only 16.0 GiB are usable" in str(refusal)
    config.training.enable_cpu_offload = True
    assert not [*memory_refusals(config, model, 1, device_bytes=2**34)]


def test_moments_are_split_over_shards_and_added_by_an_average():
    config = config_of(8)
    model = decoder_config(config.model, max_seq_len=WINDOW)
    whole = run_states(config, model, 1)
    assert whole.optimizer == 2 * whole.parameters
    assert run_states(config, model, 8).total == pytest.approx(whole.total / 8, rel=0.01)
    config.parallelism.data_parallel_replicate_degree = 4
    assert run_states(config, model, 8).total == pytest.approx(whole.total / 2, rel=0.01)
    assert run_states(config, model, 2).total == whole.total
    config.ema.decay = 0.9
    assert run_states(config, model, 1).optimizer == 3 * whole.parameters
    config.ema.decay, config.optimizer.name = 0.0, "muon"
    assert whole.parameters < run_states(config, model, 1).optimizer < 2 * whole.parameters


@pytest.mark.parametrize(
    ("changed", "refused"),
    [
        ({}, []),
        ({"float8": "rowwise"}, []),
        ({"float8": "rowwise", "training.local_batch_size": 1, "training.seq_len": 16}, []),
        ({"float8": "rowwise", "training.local_batch_size": 1, "training.seq_len": 24}, ["float8"]),
        (
            {
                "float8": "rowwise",
                "training.local_batch_size": 1,
                "training.seq_len": 48,
                "parallelism.context_parallel_degree": 2,
            },
            ["float8"],
        ),
        ({"float8": "rowwise", "compile.enable": True}, ["float8"]),
        ({"float8": "rowwise", "parallelism.tensor_parallel_degree": 2}, ["float8"]),
        ({"parallelism.tensor_parallel_degree": 4}, []),
        ({"parallelism.tensor_parallel_degree": 8}, ["parallelism"]),
        ({"parallelism.tensor_parallel_degree": 4, "model.n_kv_heads": 2}, ["parallelism"]),
    ],
)
def test_a_layout_is_refused_by_its_field(changed, refused):
    config = config_of(8)
    change(config, changed)
    model = decoder_config(config.model, max_seq_len=64)
    found = [refusal.field for refusal in layout_refusals(config, model, world_size=8)]
    assert found == refused
