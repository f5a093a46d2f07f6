"""What is gathered and reduced when, counted at the process group."""

import re
from pathlib import Path

import pytest
import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.distributed.sharded_model import (
    LAYERS,
    PER_STEP,
    SEQ_LEN,
    WINDOWS,
    Collectives,
    build,
    expected_counts,
    forward_backward,
    loss_of,
    micro_batch,
)
from titan_loop.distributed import loop_fsdp
from titan_loop.distributed.context_parallel import window_share
from titan_loop.distributed.loop_fsdp import FSDPConfig, reshard_units

README = Path(loop_fsdp.__file__).with_name("README.md")


TABLE = [  # R, micro-batches, checkpointing
    (1, 1, "none"),
    (4, 1, "none"),
    (4, 1, "full"),
    (4, 2, "none"),
]


def table_for(replicate: int) -> list[tuple[int, int, str]]:
    """In HSDP reductions alone differ, so only the row with most of them is counted again."""
    return TABLE if replicate == 1 else [TABLE[-1]]


def count_table(policy: str, replicate: int) -> list[tuple[int, int, int]]:
    rows, models = [], {}
    for steps, micro_batches, checkpointing in table_for(replicate):
        if checkpointing not in models:
            models[checkpointing] = build(
                FSDPConfig(policy=policy), replicate=replicate, checkpointing=checkpointing
            )
            forward_backward(models[checkpointing], 1)  # lazy initialisation behind us
            reshard_units(models[checkpointing])
        model = models[checkpointing]
        with Collectives() as collectives:
            for seed in range(micro_batches):
                forward_backward(model, steps, seed)
            reshard_units(model)
        assert all(isinstance(p, DTensor) and p.grad is not None for p in model.parameters())
        rows.append(collectives.counts())
    return rows


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("policy", ["per_visit", "per_step"])
def test_collectives_of_a_step_are_those_of_the_readme(gloo_pool, policy, world):
    """Four ranks run HSDP 2 × 2, where every reduction is followed by an all-reduce."""
    for counted in gloo_pool(world).run(count_table, policy, world // 2):
        for row, (steps, micro_batches, checkpointing) in zip(
            counted, table_for(world // 2), strict=True
        ):
            assert row == expected_counts(policy, steps, micro_batches, world == 4), checkpointing
        if world == 2:
            readme = README.read_text(encoding="utf-8")
            for (gathers, scatters, _), (steps, micro_batches, name) in zip(
                counted, TABLE, strict=True
            ):
                row = rf"\| {policy} \| {steps} \| {micro_batches} \| {name} \|"
                assert re.search(rf"{row} {gathers} \| {scatters} \|", readme), f"README: {row}"


def events_of_a_step() -> list[str]:
    """Return gathers and layer starts of one forward pass in order, at R = 2."""
    model = build(PER_STEP)
    collectives = Collectives()
    for name, layer in model.layers.items():
        layer.attention_norm.register_forward_pre_hook(
            lambda *_, name=name: collectives.order.append(name)
        )
    model.norm.register_forward_hook(lambda *_: collectives.order.append("norm"))
    with collectives:
        model(micro_batch(0)[:, :-1], recurrent_steps=2)
    return collectives.order


def test_each_gather_is_issued_before_the_layer_ahead_of_it_computes(gloo_pool):
    first = ["gather", "gather"]  # embedding and layer 0, before anything runs
    for index in range(LAYERS):
        first += ["gather", str(index)]  # the next layer's, and norm's with the last
    second = [str(index) for index in range(LAYERS)]
    for order in gloo_pool(2).run(events_of_a_step):
        assert order == [*first, "norm", *second, "norm"]


def counts_of_activations(tensor: int, context: int, checkpointing: str, *steps: int) -> list[dict]:
    """Return the collectives of micro-batches with so many steps, on ranks that share windows."""
    model = build(PER_STEP, tensor=tensor, context=context, checkpointing=checkpointing)
    tokens, masks = micro_batch(0), None
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    positions = torch.arange(SEQ_LEN).expand(WINDOWS, -1).contiguous()
    if context > 1:
        share = window_share(SEQ_LEN, degree=context, rank=dist.get_rank(), device="cpu")
        masks = model.get_attention_masks(positions, share)
        inputs, labels, positions = (x[:, share.queries_L] for x in (inputs, labels, positions))
    counts = []
    for number in steps:
        with Collectives() as collectives:
            output = model(inputs, positions, masks, recurrent_steps=number)
            loss_of(model)(output, labels, float(tokens.numel()))[0].backward()
            reshard_units(model)
        counts.append(dict(collectives.calls))
    return counts


REPEATS = {"none": 0, "full": 1}


@pytest.mark.parametrize("checkpointing", REPEATS)
def test_ranks_that_share_activations_exchange_as_often_as_the_readme_says(
    gloo_pool, checkpointing
):
    depths = (1, 3)
    gathers, scatters, _ = expected_counts("per_step", 1, 1, hsdp=False)
    for counts in gloo_pool(2).run(counts_of_activations, 2, 1, checkpointing, *depths):
        for steps, found in zip(depths, counts, strict=True):
            each = 4 * LAYERS * steps + steps + 1 + REPEATS[checkpointing] * 2 * LAYERS * steps
            assert found == {"part-gather": each, "part-scatter": each, "sum": 2 * steps}
    for counts in gloo_pool(2).run(counts_of_activations, 1, 2, checkpointing, *depths):
        for steps, found in zip(depths, counts, strict=True):
            visits = LAYERS * steps
            assert found["part-gather"] == visits * (1 + REPEATS[checkpointing])
            assert found["part-scatter"] == visits
            assert (found["gather"], found["scatter"]) == (gathers, scatters)  # the weights'
