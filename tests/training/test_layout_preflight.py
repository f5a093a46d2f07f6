"""Batches that do not split over the ranks, layouts of float8, and the bytes of a rank's states."""

from dataclasses import replace
from operator import attrgetter

import pytest
from torchtitan.distributed.activation_checkpoint import FullAC

from titan_loop.families.moe.model import MoEOptions
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.models.family import decoder_config
from titan_loop.training.batch_schedule import BatchConfig
from titan_loop.training.layout_preflight import batch_refusals, layout_refusals
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

WINDOW = 64


def config_of(*batches: int) -> LoopTrainer.Config:
    """Return a run whose global batch has so many windows, each number for a third of the run."""
    knots = [(place * 1000 * WINDOW, windows * WINDOW) for place, windows in enumerate(batches)]
    config = LoopTrainer.Config(
        total_tokens=3000 * WINDOW,
        model=OuroOptions(size="debugmodel"),
        batch=BatchConfig(global_batch_tokens=Schedule.steps(knots)),
    )
    config.training.seq_len = WINDOW
    return config


@pytest.mark.parametrize(
    ("batches", "local_batch", "ranks", "tensor_parallel", "fix"),
    [
        ((6,), 1, 4, 1, "use --batch.global-batch-tokens of multiples of 256 tokens"),
        ((4, 6), 1, 4, 1, "use --batch.multiple-of-windows 4"),
        ((6, 8), 1, 4, 1, "use --batch.global-batch-tokens of multiples of 256 tokens"),
        ((6,), 4, 2, 1, "--training.local-batch-size 3, or --batch.global-batch-tokens of mu"),
        ((6,), 4, 3, 1, "--training.local-batch-size 2, or --batch.global-batch-tokens of mu"),
        ((3,), 2, 1, 2, "--training.local-batch-size 1, or --batch.global-batch-tokens of mu"),
    ],
)
def test_the_fix_of_an_uneven_batch(batches, local_batch, ranks, tensor_parallel, fix):
    config = config_of(*batches)
    config.training.local_batch_size = local_batch
    config.parallelism.tensor_parallel_degree = tensor_parallel
    (refusal,) = batch_refusals(config, world_size=ranks)
    assert fix in str(refusal)


GRAPHS = [
    ({}, 1, None),
    ({"compile.enable": False}, 1, "captures compiled layers; set --compile.enable, or leave it"),
    ({}, 2, "weights that FSDP gathers within a visit with 2 ranks; change it"),
    ({"training.enable_cpu_offload": True}, 1, "with training.enable_cpu_offload=True; change"),
    ({"model.attention": "varlen"}, 1, "of model.attention=varlen; use sdpa, or leave it False"),
    ({"activation_checkpoint": FullAC.Config()}, 1, "what activation_checkpoint:full recomputes"),
    ({"trainable": "exit_gate"}, 1, "which trainable=exit_gate freezes; leave it False"),
    ({"model": MoEOptions(attention="sdpa")}, 1, "model.family=moe, whose visits depend on step"),
]


@pytest.mark.parametrize(("changed", "ranks", "words"), GRAPHS)
def test_visits_that_graphs_cannot_hold(changed, ranks, words):
    config = config_of(8)
    config.compile.enable = config.compile.graphs = True
    config.model.attention = "sdpa"
    for name, value in changed.items():
        owner, _, field = name.rpartition(".")
        setattr(attrgetter(owner)(config) if owner else config, field, value)
    model = decoder_config(replace(config.model, attention="sdpa"), max_seq_len=WINDOW)
    found = [*map(str, layout_refusals(config, model, ranks))]
    assert [each.startswith("compile.graphs=True c") for each in found] == [True] * bool(words)
    assert words is None or words in found[0]


@pytest.mark.parametrize(
    ("changed", "refused"),
    [
        ({}, False),
        ({"training.local_batch_size": 1, "training.seq_len": 16}, False),
        ({"training.local_batch_size": 1, "training.seq_len": 24}, True),
        ({"compile.enable": True}, True),
        ({"parallelism.tensor_parallel_degree": 2}, True),
    ],
)
def test_what_float8_supports(changed, refused):
    config = config_of(8)
    config.float8 = "rowwise"
    for field, value in changed.items():
        section, _, name = field.rpartition(".")
        setattr(attrgetter(section)(config), name, value)
    model = decoder_config(config.model, max_seq_len=64)
    found = [refusal.field for refusal in layout_refusals(config, model, world_size=8)]
    assert found == ["float8"] * refused
