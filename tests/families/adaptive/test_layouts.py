"""Adaptive loops and memory: every layout has the losses and gradients of one process."""

import functools

import pytest
import torch
from titan_loop.compat import SPMD_BACKEND
from torch import Tensor
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.config import CompileConfig, ParallelismConfig
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

from tests.distributed.parallel_model import (
    global_loss,
    parallel_model,
    part_of_rank,
    whole_gradients,
)
from tests.distributed.sharded_model import (
    PER_STEP,
    PER_VISIT,
    Collectives,
    build,
    forward_backward,
)
from tests.distributed.test_memory import LONG, check_peak
from titan_loop.distributed.activation_checkpointing import RecurrentStepAC
from titan_loop.distributed.loop_fsdp import FSDPConfig, reshard_units
from titan_loop.families.adaptive.model import AdaptiveOptions
from titan_loop.families.adaptive.objective import PonderCostLoss
from titan_loop.models.family import decoder_config

# fp32 sums in another order, relative to the largest entry of a gradient.
RELATIVE_TOLERANCE = 1e-5
WINDOWS, SEQ_LEN, VOCABULARY = 4, 16, 128
MEMORY = {"local_slots": 5, "global_slots": 7}


CASES = {
    "plain": ({}, None, PER_VISIT),
    "memory": ({**MEMORY, "memory_read": "each", "gate": "vector"}, None, PER_VISIT),
    "memory-full": (MEMORY, FullAC.Config(), PER_STEP),
    "memory-selective": (MEMORY, SelectiveAC.Config(), PER_VISIT),
    "loops-selective": ({"max_iterations": 5}, SelectiveAC.Config(), PER_STEP),
    "by-step": ({**MEMORY, "memory_read": "before"}, RecurrentStepAC.Config(), PER_STEP),
}
LAYOUTS = {
    "dp2": (2, {}),
    "tp2": (2, {"tensor_parallel_degree": 2}),
    "tp2-no-sp": (2, {"tensor_parallel_degree": 2, "enable_sequence_parallel": False}),
    "cp2": (2, {"context_parallel_degree": 2}),
    "dp2-tp2": (4, {"tensor_parallel_degree": 2}),
}
PAIRS = [
    *(("dp2", case) for case in CASES),
    ("tp2", "plain"),
    ("tp2", "memory"),
    ("tp2", "memory-full"),
    ("tp2-no-sp", "memory"),
    ("cp2", "memory-full"),
    ("dp2-tp2", "memory"),  # recomputation meets each of the two above
]


def losses_and_gradients(layout: dict, case: str) -> tuple[list[float], dict[str, Tensor]]:
    """Two micro-batches with a ponder cost: the global losses, and the whole gradients."""
    options, checkpointing, fsdp = CASES[case]
    # α at 0 rather than -7, so that the loops' gradients are not rounding alone.
    config = decoder_config(AdaptiveOptions(scale_init=0.0, **options), max_seq_len=SEQ_LEN)
    parallelism = ParallelismConfig(**layout, spmd_backend=SPMD_BACKEND)
    model, dims = parallel_model(config, parallelism, ac_config=checkpointing, fsdp=fsdp)
    loss_fn = PonderCostLoss.Config(ponder_weight=0.3).build(compile_config=CompileConfig())
    loss_fn.set_lm_head(model.lm_head)
    generator, losses = torch.Generator().manual_seed(7), []
    for _ in range(2):
        tokens = torch.randint(VOCABULARY, (WINDOWS, SEQ_LEN + 1), generator=generator)
        labels = tokens[:, 1:].clone()
        labels[0, :5] = labels[2, 3] = IGNORE_INDEX
        positions = (torch.arange(SEQ_LEN) % 7).expand(WINDOWS, -1).contiguous()
        batch = (tokens[:, :-1].contiguous(), positions, labels)
        mine, places, masks, own_labels = part_of_rank(model, dims, batch)
        with dist_utils.get_spmd_context(parallel_dims=dims)():
            output = model(mine, places, masks, collect="last")
            loss, metrics = loss_fn(output, own_labels, (labels != IGNORE_INDEX).sum())
            loss.backward()
        losses += [global_loss(loss, dims), global_loss(metrics["loops/layer_2"], dims)]
        losses.append(global_loss(metrics["loop_scale/layer_1_3"], dims))
    return losses, whole_gradients(model)


@functools.cache
def one_process(case: str) -> tuple[list[float], dict[str, Tensor]]:
    return losses_and_gradients({}, case)


@pytest.mark.multiprocess
@pytest.mark.parametrize(("layout", "case"), PAIRS)
def test_losses_and_gradients_equal_one_process(gloo_pool, layout: str, case: str):
    world, degrees = LAYOUTS[layout]
    expected_losses, expected = one_process(case)
    for name in ("control.scale", "control.weight", "control.bias"):
        assert expected[f"layers.0.{name}"].abs().max() > 1e-4
    for losses, gradients in gloo_pool(world).run(losses_and_gradients, degrees, case):
        assert losses == pytest.approx(expected_losses, rel=RELATIVE_TOLERANCE)
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            error = float((gradient - expected[name]).abs().max())
            # What is added to all keys changes no attention: the gradient is rounding alone.
            scale = float(expected[name.replace("wk.bias", "wq.bias")].abs().max())
            assert error <= RELATIVE_TOLERANCE * scale, f"{name}: error {error:.1e} of {scale:.1e}"


def gathers(policy: FSDPConfig, iterations: int, checkpointing: str) -> int:
    """All-gathers of one micro-batch after the first, which sets FSDP up."""
    options = AdaptiveOptions(max_iterations=iterations, **MEMORY)
    model = build(policy, options=options, checkpointing=checkpointing)
    for _ in range(2):
        with Collectives() as collectives:
            forward_backward(model, 1)
            reshard_units(model)
    untrained = [name for name, p in model.named_parameters() if p.grad is None]
    assert all(iterations == 1 and ".control." in name for name in untrained)  # no choice to learn
    return collectives.counts()[0]


@pytest.mark.multiprocess
@pytest.mark.parametrize("policy", [PER_VISIT, PER_STEP], ids=["per_visit", "per_step"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_three_iterations_gather_a_layer_as_often_as_one(
    gloo_pool, policy: FSDPConfig, checkpointing: str
):
    one, three = (gloo_pool(2).run(gathers, policy, n, checkpointing)[0] for n in (1, 3))
    if policy is PER_STEP:  # two layers, each with its controls and gates; tables, norm, bank
        assert one == three == 2 * 3 + 4
    else:  # only the controls, of a few hundred bytes, come back for every iteration's backward
        assert three - one == 2 * 2


@pytest.mark.parametrize(
    ("checkpointing", "policy", "dtype"),
    [
        ("none", "per_step", "float32"),
        ("selective", "per_visit", "float32"),
        ("full", "per_visit", "bfloat16"),
    ],
)
def test_the_meter_s_peak_is_near_the_allocator_s(gloo_pool, checkpointing, policy, dtype):
    settings = {"policy": policy, "checkpointing": checkpointing, "dtype": dtype, "steps": 1}
    model = AdaptiveOptions(dim=128, max_iterations=2, local_slots=64, global_slots=32)
    check_peak(gloo_pool, f"adaptive-{checkpointing}", {**LONG, **settings, "model": model})
