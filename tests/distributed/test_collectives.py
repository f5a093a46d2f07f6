"""What is gathered and reduced when, counted at the process group and as predicted."""

import re
from pathlib import Path
from typing import Any

import pytest
import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torchtitan.config import ParallelismConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils

from tests.distributed.sharded_model import (
    LAYERS,
    PER_STEP,
    PER_VISIT,
    SEQ_LEN,
    VOCABULARY,
    WINDOWS,
    Collectives,
    build,
    expected_counts,
    forward_backward,
    loss_of,
    micro_batch,
)
from titan_loop.distributed import loop_fsdp
from titan_loop.distributed.communication import Traffic, step_traffic
from titan_loop.distributed.context_parallel import share_of_rank
from titan_loop.distributed.loop_fsdp import FSDPConfig, reshard_units
from titan_loop.distributed.step_shape import StepShape
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import ModelOptions

README = Path(loop_fsdp.__file__).with_name("README.md")


OUTSIDE = {"options": {"prelude_layers": 1, "coda_layers": 1}}
TABLE = [  # R, micro-batches, checkpointing
    (1, 1, "none"),
    (2, 1, "none"),
    (4, 1, "none"),
    (4, 1, "selective"),
    (4, 1, "full"),
    (4, 2, "none"),
]


def table_for(replicate: int) -> list[tuple[int, int, str]]:
    """Where reductions alone differ, in HSDP, what checkpointing gathers is not counted again."""
    return TABLE if replicate == 1 else [TABLE[0], TABLE[2], TABLE[-1]]


def count_table(policy: str, replicate: int) -> list[tuple[int, int, int]]:
    rows = []
    for steps, micro_batches, checkpointing in table_for(replicate):
        model = build(FSDPConfig(policy=policy), replicate=replicate, checkpointing=checkpointing)
        forward_backward(model, steps)  # lazy initialisation behind us
        reshard_units(model)
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


def traffic_of_a_step(
    policy: str, replicate: int, dtype: str, case: dict[str, Any]
) -> list[tuple[float, float]]:
    """Return counted and predicted bytes of gathers, scatters and sums, two micro-batches."""
    reshard, trainable = case.get("reshard", "default"), case.get("trainable", "all")
    family, tied = case.get("family", OuroOptions), case.get("tie_weights", False)
    gated = case.get("exit_gate", family is OuroOptions)
    options = family(
        size="debugmodel",
        n_layers=LAYERS,
        tie_weights=tied,
        exit_gate=gated,
        **case.get("options", {}),
    )
    model = build(
        FSDPConfig(policy=policy),
        options=options,
        replicate=replicate,
        dtype=dtype,
        reshard=reshard,
        trainable=trainable,
    )
    model.recurrence.backward_steps = case.get("backward_steps")
    collect = case.get("collect", "all")
    forward_backward(model, 3, collect=collect)
    reshard_units(model)
    with Collectives() as collectives:
        for seed in range(2):
            forward_backward(model, 3, seed, collect)
        reshard_units(model)
    shard_degree = dist.get_world_size() // replicate
    shape = StepShape(
        windows=WINDOWS,
        seq_len=SEQ_LEN,
        recurrent_steps=3,
        compute_bytes=getattr(torch, dtype).itemsize,
        shard_degree=shard_degree,
        reshard_after_forward=reshard,
        trainable=trainable,
        backward_steps=model.recurrence.backward_steps,
    )
    config = model.config
    assert isinstance(config, LoopDecoder.Config)
    traffic = step_traffic(
        config, shape, hold_layers=policy == "per_step", micro_batches=2, replicas=replicate
    )
    ring = {"gather": 1 - 1 / shard_degree, "scatter": 1 - 1 / shard_degree}
    ring["sum"] = 2 * (1 - 1 / replicate)
    kinds = {"gather": "all-gather", "scatter": "reduce-scatter", "sum": "all-reduce"}
    pairs = []
    for name, kind in kinds.items():
        predicted = [entry for entry in traffic if entry.kind == kind]
        counts = [(entry.what, entry.count) for entry in predicted]
        assert collectives.calls[name] == sum(count for _, count in counts), (name, counts)
        counted = collectives.whole_bytes[name] * ring[name]
        pairs.append((counted, sum(entry.received_bytes for entry in predicted)))
    return pairs


@pytest.mark.parametrize(
    ("policy", "replicate", "dtype", "case"),
    [
        ("per_visit", 1, "float32", {}),
        ("per_step", 1, "bfloat16", {}),
        ("per_step", 2, "float32", {}),
        ("per_visit", 1, "float32", {"reshard": "never"}),
        ("per_visit", 1, "float32", {"reshard": "never", "backward_steps": 2}),
        ("per_visit", 1, "float32", {"reshard": "never", "trainable": "exit_gate"}),
        ("per_visit", 1, "float32", {"reshard": "always", "backward_steps": 2}),
        ("per_visit", 1, "float32", {"tie_weights": True}),
        ("per_visit", 1, "float32", {"trainable": "exit_gate"}),
        ("per_visit", 1, "float32", OUTSIDE),
        ("per_step", 1, "float32", OUTSIDE),
        ("per_visit", 1, "float32", {**OUTSIDE, "backward_steps": 2}),
        ("per_visit", 1, "float32", {**OUTSIDE, "exit_gate": False, "collect": "last"}),
        ("per_visit", 1, "float32", {**OUTSIDE, "trainable": "exit_gate"}),
    ],
)
def test_bytes_of_a_step_are_those_predicted(gloo_pool, policy, replicate, dtype, case):
    check_bytes(gloo_pool, policy, replicate, dtype, case)


def check_bytes(gloo_pool, policy: str, replicate: int, dtype: str, case: dict[str, Any]) -> None:
    for pairs in gloo_pool(2 * replicate).run(traffic_of_a_step, policy, replicate, dtype, case):
        for counted, predicted in pairs:
            assert counted == pytest.approx(predicted)


def counted_and_predicted(
    collectives: Collectives, traffic: list[Traffic]
) -> list[tuple[int, int, float, float]]:
    """Return counted and predicted calls, and bytes likewise, of gathers and of scatters."""
    return [
        (
            collectives.calls[name],
            sum(t.count for t in traffic if t.kind == kind),
            collectives.whole_bytes[name] / 2,
            sum(t.received_bytes for t in traffic if t.kind == kind),
        )
        for name, kind in (("part-gather", "all-gather"), ("part-scatter", "reduce-scatter"))
    ]


def keys_and_values_of_a_step(checkpointing: str) -> list[tuple[int, int, float, float]]:
    """Return counted and predicted collectives of keys and values, their bytes likewise."""
    model = build(PER_STEP, context=2, checkpointing=checkpointing)
    dims = ParallelDims.from_config(ParallelismConfig(context_parallel_degree=2), 2)
    share = share_of_rank(dims, SEQ_LEN, "cpu")
    assert share is not None
    tokens = torch.randint(VOCABULARY, (WINDOWS, SEQ_LEN + 1))
    positions = torch.arange(SEQ_LEN).expand(WINDOWS, -1)
    with Collectives() as collectives:
        output = model(
            tokens[:, :-1][:, share.queries_L],
            positions[:, share.queries_L],
            model.get_attention_masks(positions, share),
            recurrent_steps=3,
        )
        loss, _ = loss_of(model)(output, tokens[:, 1:][:, share.queries_L], 1.0)
        loss.backward()
        reshard_units(model)
    config = model.config
    assert isinstance(config, LoopDecoder.Config)
    shape = StepShape(
        windows=WINDOWS,
        seq_len=SEQ_LEN,
        recurrent_steps=3,
        checkpointing=checkpointing,  # pyright: ignore[reportArgumentType]
        compute_bytes=4,
        shard_degree=2,
        context_parallel_degree=2,
    )
    traffic = [t for t in step_traffic(config, shape, hold_layers=True) if t.what == "keys, values"]
    return counted_and_predicted(collectives, traffic)


@pytest.mark.parametrize("checkpointing", ["none", "full", "recurrent-step+full"])
def test_keys_and_values_travel_as_often_as_predicted(gloo_pool, checkpointing):
    for kinds in gloo_pool(2).run(keys_and_values_of_a_step, checkpointing):
        for calls, predicted_calls, moved, predicted_bytes in kinds:
            assert (calls, moved) == (predicted_calls, predicted_bytes)


def states_of_a_step(
    checkpointing: str, options: OuroOptions | None = None
) -> list[tuple[int, int, float, float]]:
    """Return counted and predicted collectives of sequence-parallel states, bytes likewise."""
    model = build(PER_VISIT, tensor=2, checkpointing=checkpointing, options=options)
    dims = ParallelDims.from_config(
        ParallelismConfig(tensor_parallel_degree=2, spmd_backend="partial_dtensor"), 2
    )
    tokens = torch.zeros(WINDOWS, SEQ_LEN + 1, dtype=torch.int64)  # the same on both ranks
    with Collectives() as collectives, dist_utils.get_spmd_context(parallel_dims=dims)():
        output = model(tokens[:, :-1], recurrent_steps=3)
        loss, _ = loss_of(model)(output, tokens[:, 1:], 1.0)
        loss.backward()
    config = model.config
    assert isinstance(config, LoopDecoder.Config)
    shape = StepShape(
        windows=WINDOWS,
        seq_len=SEQ_LEN,
        recurrent_steps=3,
        checkpointing=checkpointing,  # pyright: ignore[reportArgumentType]
        compute_bytes=4,
        tensor_parallel_degree=2,
    )
    traffic = [t for t in step_traffic(config, shape, hold_layers=False) if t.what == "states"]
    gathered = [t for t in step_traffic(config, shape, hold_layers=False) if "kept" in t.what]
    assert collectives.calls["kept-gather"] == sum(t.count for t in gathered)
    received = collectives.whole_bytes["kept-gather"]  # the largest tensor: one rank's part
    assert received == sum(t.received_bytes for t in gathered)
    return counted_and_predicted(collectives, traffic)


@pytest.mark.parametrize(
    ("checkpointing", "options"),
    [
        ("none", None),
        ("selective", None),
        ("recurrent-step+full", None),
    ],
)
def test_states_under_sequence_parallelism_travel_as_often_as_predicted(
    gloo_pool, checkpointing, options
):
    check_states(gloo_pool, checkpointing, options)


def check_states(gloo_pool, checkpointing: str, options: ModelOptions | None) -> None:
    for kinds in gloo_pool(2).run(states_of_a_step, checkpointing, options):
        for calls, predicted_calls, moved, predicted_bytes in kinds:
            assert (calls, moved) == (predicted_calls, predicted_bytes)


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
