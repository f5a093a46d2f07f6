"""Counted bytes against the allocator's: of states in closed form, of a step by the meter."""

from dataclasses import replace
from typing import Any

import pytest
import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.distributed.sharded_model import (
    LAYERS,
    PER_STEP,
    VOCABULARY,
    build,
    forward_backward,
    loss_of,
    micro_batch,
)
from tests.families.toy_family import ToyOptions
from tests.support.allocations import AllocationTrace
from titan_loop.distributed.loop_fsdp import FSDPConfig, reshard_units
from titan_loop.distributed.state_bytes import state_bytes, unit_sizes
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.models.decoder import LoopDecoder
from titan_loop.planning.step_meter import StepMeter
from titan_loop.training.optimizers.adamw import AdamWConfig
from titan_loop.training.optimizers.container import LoopOptimizers
from titan_loop.training.optimizers.muon import MuonConfig
from titan_loop.training.weight_average import WeightAverageConfig

# The meter sees no temporaries of single kernels, and gloo's thread frees buffers when it likes.
METER_TOLERANCE = 0.1


def built(case: dict[str, Any]) -> LoopDecoder:
    options = case.get("model") or OuroOptions(
        size="quickstart", n_layers=case.get("layers", LAYERS), **case.get("options", {})
    )
    return build(
        FSDPConfig(policy=case["policy"], fp32_visit_sum=case.get("wide", False)),
        options=replace(options, vocab_size=VOCABULARY),
        checkpointing=case["checkpointing"],
        dtype=case["dtype"],
        reshard=case.get("reshard", "default"),
    )


def run(model: LoopDecoder, case: dict[str, Any], trace: AllocationTrace | None = None) -> None:
    tokens = micro_batch(0, case["windows"], case["seq_len"])
    collect = "last" if model.exit_gate is None else "all"
    output = model(tokens[:, :-1], recurrent_steps=case["steps"], collect=collect)
    if trace is not None:
        output.hidden_RBLD[0].register_hook(lambda _: trace.mark("step 1"))
    loss, _ = loss_of(model)(output, tokens[:, 1:], float(tokens.numel()))
    loss.backward()
    reshard_units(model)


def warm_up(model: LoopDecoder, case: dict[str, Any]) -> None:
    """Make what stays after a step: the gradients, and what FSDP makes once."""
    run(model, {**case, "steps": min(2, case["steps"])})


def allocated(case: dict[str, Any]) -> tuple[int, int, int]:
    """Return the transient peak, bytes alive between the backward passes of steps 2 and 1, and
    the layers' parameters.
    """
    model = built(case)
    warm_up(model, case)
    with AllocationTrace() as trace:
        run(model, case, trace)
    config = model.config
    assert isinstance(config, LoopDecoder.Config)
    layers = sum(size.parameters() for size in unit_sizes(config) if size.unit.name == "layers")
    return trace.peak_bytes, trace.at("step 1"), layers


def metered(case: dict[str, Any]) -> float:
    """Return the same peak as a rehearsal counts it: two ranks that are not there, no values."""
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        model = built(case)
        meter = StepMeter(fake_mode)
        with fake_mode, meter:
            warm_up(model, case)
            meter.reset()
            before = meter.live_bytes
            run(model, case)
    finally:
        dist.destroy_process_group()
    return meter.peak_bytes - before


LONG = {"windows": 2, "seq_len": 128, "layers": 2}  # activations dominate
SHORT = {"windows": 1, "seq_len": 8}  # weights dominate
MEMORY_CASES = {
    "R4-bf16": dict(LONG, policy="per_step", checkpointing="none", dtype="bfloat16", steps=4),
    "never": dict(
        LONG, policy="per_visit", checkpointing="full", dtype="float32", steps=4, reshard="never"
    ),
    "another-family": dict(
        LONG,
        policy="per_step",
        checkpointing="recurrent-step",
        dtype="float32",
        steps=4,
        model=ToyOptions(n_layers=1, exit_gate=False),
    ),
    "weights": dict(SHORT, policy="per_step", checkpointing="full", dtype="float32", steps=2),
}


def check_peak(gloo_pool, case: str, settings: dict[str, Any]) -> None:
    """With `-rP` the numbers are shown: `titan_loop/distributed/README.md` sums them up."""
    counted = metered(settings)
    peak = min(peak for peak, _, _ in gloo_pool(2).run(allocated, settings))
    print(f"{case} | {peak / 2**20:.1f} | {counted / 2**20:.1f} | {counted / peak - 1:+.1%}")
    assert counted == pytest.approx(peak, rel=METER_TOLERANCE)


@pytest.mark.parametrize("case", MEMORY_CASES)
def test_the_meter_s_peak_is_near_the_allocator_s(gloo_pool, case):
    check_peak(gloo_pool, case, MEMORY_CASES[case])


@pytest.mark.parametrize(
    ("policy", "wide", "bytes_per_parameter"),
    [
        ("per_visit", False, 2),
        ("per_step", True, 4 + 2),  # gradient and gathered weight
    ],
)
def test_all_layers_unsharded_gradients_are_alive_between_steps_2_and_1(
    gloo_pool, policy, wide, bytes_per_parameter
):
    """With 8 tokens there is hardly anything but weights; one gathered layer of four at most."""
    case = dict(SHORT, policy=policy, checkpointing="full", dtype="bfloat16", steps=2, wide=wide)
    for _, alive, parameters in gloo_pool(2).run(allocated, case):
        in_flight = 3 * 2 / LAYERS  # per_visit's gathers
        assert alive >= 0.98 * bytes_per_parameter * parameters
        assert alive <= 1.15 * (bytes_per_parameter + in_flight) * parameters


def persistent_bytes(tie: bool, muon: bool) -> tuple[list[int], list[float]]:
    """Return allocated and estimated bytes of parameters, gradients and optimisers' states."""
    model = build(PER_STEP, options=OuroOptions(size="quickstart", tie_weights=tie))
    optimizers = LoopOptimizers.Config(
        chosen=MuonConfig() if muon else AdamWConfig(), ema=WeightAverageConfig(decay=0.9 * muon)
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
    counted = state_bytes(
        config, shards=dist.get_world_size(), moments=(2 - muon, 2), averaged=muon
    )
    measured = [
        sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in part}.values())
        for part in (local, gradients, moments)
    ]
    return measured, list(counted)


# The gate's only rows are on one rank, which alone has moments of them.
GATE_ELSEWHERE = 1e-3


@pytest.mark.parametrize(("tie", "muon"), [(True, False), (False, True)])
def test_persistent_bytes_are_those_allocated(gloo_pool, tie, muon):
    for measured, estimated in gloo_pool(2).run(persistent_bytes, tie, muon):
        assert estimated == pytest.approx(measured, rel=GATE_ELSEWHERE)
