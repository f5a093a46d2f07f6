"""Policies change no number, and `auto` picks one where it fits.

`test_parity.py` compares both policies with one process on every layout; here the two are compared
with each other, bit for bit, where things could go stale: accumulation, evaluation, saving.
"""

from typing import Any

import pytest
import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torchtitan.tools import utils as titan_utils

from tests.distributed.sharded_model import (
    PER_STEP,
    PER_VISIT,
    SEQ_LEN,
    WINDOWS,
    Collectives,
    build,
    expected_counts,
    forward_backward,
    gradients,
    is_sharded,
    micro_batch,
)
from titan_loop.distributed.loop_fsdp import FSDPConfig, reshard_units
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.models.decoder import LoopDecoder

SMALL = OuroOptions(size="debugmodel")  # two layers


def compare_policies(changes: dict[str, Any]) -> None:
    """Two accumulated micro-batches of different R, then a step of another, bit for bit."""
    results = []
    for fsdp in (PER_VISIT, PER_STEP):
        model = build(fsdp, **changes)
        losses = []
        for steps in ((3, 1), (2,)):
            losses += [forward_backward(model, r, seed) for seed, r in enumerate(steps)]
            reshard_units(model)
            results.append({**gradients(model), "losses": torch.stack(losses)})
            update(model)
    for per_visit, per_step in zip(results[:2], results[2:], strict=True):
        assert per_visit.keys() == per_step.keys()
        for name, value in per_visit.items():
            assert torch.equal(value, per_step[name]), name


def update(model: LoopDecoder) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter -= 0.1 * parameter.grad
                parameter.grad = None


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "bfloat16", "checkpointing": "full", "options": SMALL},
        {"compile_backend": "aot_eager", "options": SMALL},
        {"options": OuroOptions(size="debugmodel", tie_weights=True)},
        {"trainable": "exit_gate", "options": SMALL},
    ],
    ids=["bf16-full", "compiled", "tied", "gate-only"],
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_policies_agree_bit_for_bit(gloo_pool, changes):
    gloo_pool(2).run(compare_policies, changes)


def steps_with_evaluation(policy: str, evaluate: bool, tie: bool) -> list[dict[str, Tensor]]:
    model = build(
        FSDPConfig(policy=policy), options=OuroOptions(size="debugmodel", tie_weights=tie)
    )
    results = []
    for seed in range(2):
        if evaluate:
            nats = evaluation(model)
            assert all(is_sharded(p) for name, p in model.named_parameters() if not tie), seed
        loss = forward_backward(model, 2, seed)
        reshard_units(model)
        update(model)
        results.append({"loss": loss, "nats": nats if evaluate else loss})
    state = {name: value.full_tensor() for name, value in model.state_dict().items()}
    return [*results, state]


@torch.no_grad()
def evaluation(model: LoopDecoder) -> Tensor:
    tokens = micro_batch(99)
    output = model(tokens[:, :-1], recurrent_steps=3, collect="all")
    weight_RBL = torch.zeros(3, WINDOWS, SEQ_LEN)
    labels_BL = tokens[:, 1:].contiguous()
    _, ce_RBL = model.lm_head(output.hidden_RBLD, labels_BL=labels_BL, weight_RBL=weight_RBL)
    return ce_RBL.sum()


def check_evaluation(tie: bool) -> None:
    want = steps_with_evaluation("per_visit", True, tie)
    for policy, evaluate in (("per_step", True), ("per_step", False), ("per_visit", False)):
        got = steps_with_evaluation(policy, evaluate, tie)
        for a, b in zip(want, got, strict=True):
            for name in a:
                if evaluate or name != "nats":
                    assert torch.equal(a[name], b[name]), (policy, evaluate, name)


@pytest.mark.parametrize("tie", [False, True])
def test_evaluation_between_steps_frees_what_it_gathered_and_reads_fresh_weights(gloo_pool, tie):
    gloo_pool(2).run(check_evaluation, tie)


def states_while_held() -> None:
    """Before `reshard_units` the layers' parameters are the gathered ones, but not the saved."""
    model = build(PER_STEP)
    before = {name: value.full_tensor().clone() for name, value in model.state_dict().items()}
    forward_backward(model, 2)
    layer = model.layers["0"]
    assert isinstance(layer, FSDPModule)
    assert not any(is_sharded(p) for p in layer.parameters())
    state = model.state_dict()
    assert all(is_sharded(value) for value in state.values())
    assert before.keys() == state.keys()
    for name, value in state.items():
        assert torch.equal(value.full_tensor(), before[name]), name
    assert all(is_sharded(p) and p.grad is not None for p in model.parameters())


def test_a_state_taken_while_layers_are_held_is_sharded_and_right(gloo_pool):
    gloo_pool(2).run(states_while_held)


def gathers_under_auto(total_memories: list[int]) -> int:
    module = titan_utils.device_module
    real = module.get_device_properties
    total_memory = total_memories[dist.get_rank()]
    module.get_device_properties = lambda device: type("P", (), {"total_memory": total_memory})
    try:
        model = build(FSDPConfig())
    finally:
        module.get_device_properties = real
    with Collectives() as collectives:
        forward_backward(model, 2)
    return collectives.counts()[0]


@pytest.mark.parametrize(
    ("memories", "policy"),
    [
        ([2**40, 2**40], "per_step"),
        ([2**40, 2**20], "per_visit"),  # all ranks alike: gathers have to match
    ],
)
def test_auto_holds_layers_where_the_estimate_fits(gloo_pool, memories, policy):
    want = expected_counts(policy, 2, 1, hsdp=False)[0]
    assert gloo_pool(2).run(gathers_under_auto, memories) == [want, want]
