"""The memory estimate against what the allocator sees."""

from dataclasses import replace
from typing import Any

import pytest
import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.distributed.sharded_model import (
    LAYERS,
    PER_STEP,
    PER_VISIT,
    SEQ_LEN,
    VOCABULARY,
    WINDOWS,
    build,
    forward_backward,
    is_sharded,
    loss_of,
    micro_batch,
)
from tests.families.toy_family import ToyOptions
from titan_loop.distributed.loop_fsdp import FSDPConfig, reshard_units
from titan_loop.distributed.memory import estimate_memory, unit_sizes
from titan_loop.distributed.step_shape import OptimizerStates, StepShape
from titan_loop.families.ouro.model import SIZES, OuroOptions
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import decoder_config
from titan_loop.testing.allocations import AllocationTrace
from titan_loop.training.optimizer import LoopOptimizers
from titan_loop.training.weight_average import WeightAverageConfig

# The estimate leaves out temporaries, and gloo's thread frees its buffers when it likes.
ESTIMATE_TOLERANCE = 0.2


def measured_and_estimated(case: dict[str, Any]) -> tuple[int, float, int, float]:
    """Return transient peaks, and bytes alive between the backward passes of steps 2 and 1."""
    options = case.get("model") or OuroOptions(
        size="quickstart", n_layers=4, **case.get("options", {})
    )
    options = replace(options, vocab_size=VOCABULARY)
    fsdp = FSDPConfig(policy=case["policy"], fp32_visit_sum=case.get("wide", False))
    model = build(
        fsdp,
        options=options,
        checkpointing=case["checkpointing"],
        dtype=case["dtype"],
        reshard=case.get("reshard", "default"),
    )
    tokens = micro_batch(0, case["windows"], case["seq_len"])
    steps = case["steps"]

    def run(trace: AllocationTrace | None) -> None:
        collect = "last" if model.exit_gate is None else "all"
        output = model(tokens[:, :-1], recurrent_steps=steps, collect=collect)
        if trace is not None:
            output.hidden_RBLD[0].register_hook(lambda _: trace.mark("step 1"))
        loss, _ = loss_of(model)(output, tokens[:, 1:], float(tokens.numel()))
        loss.backward()
        reshard_units(model)

    run(None)
    run(None)
    with AllocationTrace() as trace:
        run(trace)
    config = model.config
    assert isinstance(config, LoopDecoder.Config)
    shape = StepShape(
        windows=case["windows"],
        seq_len=case["seq_len"],
        recurrent_steps=steps,
        checkpointing=case["checkpointing"],
        compute_bytes=getattr(torch, case["dtype"]).itemsize,
        shard_degree=dist.get_world_size(),
        fp32_visit_sum=case.get("wide", False),
        reshard_after_forward=case.get("reshard", "default"),
        fused_norms=False,
    )
    estimate = estimate_memory(config, shape, hold_layers=case["policy"] == "per_step")
    layers = sum(size.parameters() for size in unit_sizes(config) if size.unit.name == "layers")
    return trace.peak_bytes, estimate.transient_peak, trace.at("step 1"), layers


LONG = {"windows": 2, "seq_len": 128}  # activations dominate
SHORT = {"windows": 1, "seq_len": 8}  # weights dominate
MEMORY_CASES = {
    "R1": dict(LONG, policy="per_visit", checkpointing="none", dtype="float32", steps=1),
    "R4": dict(LONG, policy="per_visit", checkpointing="none", dtype="float32", steps=4),
    "R4-held": dict(LONG, policy="per_step", checkpointing="none", dtype="float32", steps=4),
    "R4-bf16": dict(LONG, policy="per_step", checkpointing="none", dtype="bfloat16", steps=4),
    "selective": dict(LONG, policy="per_step", checkpointing="selective", dtype="float32", steps=4),
    "full": dict(LONG, policy="per_step", checkpointing="full", dtype="float32", steps=4),
    "by-step": dict(
        LONG, policy="per_step", checkpointing="recurrent-step", dtype="float32", steps=4
    ),
    "by-step-and-layer": dict(
        LONG, policy="per_step", checkpointing="recurrent-step+full", dtype="float32", steps=4
    ),
    "never": dict(
        LONG, policy="per_visit", checkpointing="full", dtype="float32", steps=4, reshard="never"
    ),
    "injected": dict(
        LONG,
        policy="per_step",
        checkpointing="full",
        dtype="float32",
        steps=4,
        options={"injection": "diagonal"},
    ),
    "another-family": dict(
        LONG,
        policy="per_step",
        checkpointing="recurrent-step",
        dtype="float32",
        steps=12,
        model=ToyOptions(n_layers=1, exit_gate=False),
    ),
    "weights": dict(SHORT, policy="per_step", checkpointing="full", dtype="float32", steps=4),
}


@pytest.mark.parametrize("case", MEMORY_CASES)
def test_estimated_peak_is_near_the_measured_one(gloo_pool, case):
    check_peak(gloo_pool, case, MEMORY_CASES[case])


def check_peak(gloo_pool, case: str, settings: dict[str, Any]) -> None:
    """With `-rP` the numbers are shown: the table of `titan_loop/distributed/README.md`."""
    ranks = gloo_pool(2).run(measured_and_estimated, settings)
    peak, estimated, _, _ = ranks[0]
    print(f"{case} | {peak / 2**20:.1f} | {estimated / 2**20:.1f} | {estimated / peak - 1:+.0%}")
    for peak, estimated, _, _ in ranks:
        assert estimated == pytest.approx(peak, rel=ESTIMATE_TOLERANCE)


@pytest.mark.parametrize(
    ("policy", "dtype", "wide", "bytes_per_parameter"),
    [
        ("per_visit", "float32", False, 4),
        ("per_visit", "bfloat16", False, 2),
        ("per_visit", "bfloat16", True, 4),
        ("per_step", "bfloat16", False, 2 + 2),  # gradient and gathered weight
        ("per_step", "bfloat16", True, 4 + 2),
    ],
)
def test_all_layers_unsharded_gradients_are_alive_between_steps_2_and_1(
    gloo_pool, policy, dtype, wide, bytes_per_parameter
):
    """With 8 tokens there is hardly anything but weights; one gathered layer of four at most."""
    case = dict(SHORT, policy=policy, checkpointing="full", dtype=dtype, steps=2, wide=wide)
    for _, _, alive, parameters in gloo_pool(2).run(measured_and_estimated, case):
        print(f"{policy} {dtype} {wide} | {alive / parameters:.2f} | {bytes_per_parameter}")
        in_flight = 3 * getattr(torch, dtype).itemsize / LAYERS  # per_visit's gathers
        assert alive >= 0.98 * bytes_per_parameter * parameters
        assert alive <= 1.15 * (bytes_per_parameter + in_flight) * parameters


def layers_gathered_at_norm(checkpointing: str) -> list[int]:
    """Return how many layers are gathered whenever the norm has run: forward, then recomputed."""
    model = build(PER_VISIT, checkpointing=checkpointing)
    gathered: list[int] = []

    def count(*_: Any) -> None:
        layers = model.layers.values()
        gathered.append(sum(not any(map(is_sharded, layer.parameters())) for layer in layers))

    model.norm.register_forward_hook(count)
    forward_backward(model, 2)
    return gathered


def test_a_recomputed_step_gathers_all_of_its_layers_under_per_visit_too(gloo_pool):
    """So the estimate counts them all, as under per_step."""
    forward, recomputed = [0, 0], [LAYERS, LAYERS]
    assert gloo_pool(2).run(layers_gathered_at_norm, "recurrent-step") == 2 * [forward + recomputed]
    config = decoder_config(OuroOptions(size="134m"), max_seq_len=128)
    for checkpointing, all_of_them in (("recurrent-step", True), ("full", False)):
        shape = StepShape(windows=1, seq_len=128, recurrent_steps=4, checkpointing=checkpointing)
        held, visited = (estimate_memory(config, shape, hold_layers=h) for h in (True, False))
        assert (held.gathered == visited.gathered) == all_of_them


def persistent_bytes(tie: bool, muon: bool) -> tuple[list[int], list[float]]:
    """Return allocated and estimated bytes of parameters, gradients and optimisers' states."""
    model = build(PER_STEP, options=OuroOptions(size="quickstart", tie_weights=tie))
    optimizers = LoopOptimizers.Config(
        name="muon" if muon else "adamw", ema=WeightAverageConfig(decay=0.9 * muon)
    ).build(model_parts=[model])
    forward_backward(model, 2)
    reshard_units(model)
    optimizers.step()
    local = [parameter.to_local() for parameter in model.parameters()]  # pyright: ignore
    gradients = [parameter.grad.to_local() for parameter in model.parameters()]  # pyright: ignore
    moments = [
        value.to_local()
        for name, value in optimizers.state_dict().items()
        if isinstance(value, DTensor) and not name.endswith(".step")
    ]
    config = model.config
    assert isinstance(config, LoopDecoder.Config)
    shape = StepShape(
        windows=WINDOWS,
        seq_len=SEQ_LEN,
        recurrent_steps=2,
        compute_bytes=4,
        shard_degree=dist.get_world_size(),
        states=OptimizerStates(muon_bytes=4 * muon, averaged=muon),
    )
    memory = estimate_memory(config, shape, hold_layers=True)
    measured = [
        sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in part}.values())
        for part in (local, gradients, moments)
    ]
    return measured, [memory.parameters, memory.gradients, memory.optimizer]


# The gate's only rows are on one rank, which alone has moments of them.
GATE_ELSEWHERE = 1e-3


@pytest.mark.parametrize(("tie", "muon"), [(False, False), (True, False), (False, True)])
def test_persistent_bytes_are_those_allocated(gloo_pool, tie, muon):
    for measured, estimated in gloo_pool(2).run(persistent_bytes, tie, muon):
        assert estimated == pytest.approx(measured, rel=GATE_ELSEWHERE)


def test_every_rank_has_a_row_for_the_gate():
    """FSDP shards rows: 512 ranks share the norm, and all but one pad the gate."""
    config, ranks = decoder_config(OuroOptions(size="1.4b"), max_seq_len=32), 512
    shape = StepShape(windows=1, seq_len=32, recurrent_steps=1, shard_degree=ranks)
    parameters = sum(size.parameters() for size in unit_sizes(config))
    padding = (config.dim + 1) * (1 - 1 / ranks)
    estimated = estimate_memory(config, shape, hold_layers=True).parameters
    assert estimated == pytest.approx(4 * (parameters / ranks + padding), rel=1e-12)


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_unit_parameters_are_those_of_the_built_model(size, tie):
    config = decoder_config(OuroOptions(size=size, tie_weights=tie), max_seq_len=32)
    with torch.device("meta"):
        model = config.build()
    sizes = unit_sizes(config)
    assert sum(size.parameters() for size in sizes) == sum(p.numel() for p in model.parameters())
    layer = next(size for size in sizes if size.unit.name == "layers")
    assert layer.parameters() == sum(p.numel() for p in model.layers["0"].parameters())
