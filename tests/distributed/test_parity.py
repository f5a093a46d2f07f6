"""Loss and every gradient of every layout equal those of one process.

Each case runs micro-batches whose number of recurrent steps changes (accumulating gradients), so
the same FSDP units are gathered a different number of times. `TITAN_LOOP_TEST_SPMD_BACKEND`
chooses the SPMD backend (`tools/test_torch215.sh` runs both).
"""

import functools
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import pytest
import titan_loop.compat as compat
import torch
import torch.distributed as dist
from torch import Tensor
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.config import CompileConfig, ParallelismConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

from tests.distributed.parallel_model import (
    global_loss,
    parallel_model,
    part_of_rank,
    whole_gradients,
)
from titan_loop.distributed.activation_checkpointing import RecurrentStepAC
from titan_loop.distributed.loop_fsdp import FSDPConfig
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.inference.hooks import Hooks
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import ModelOptions, decoder_config
from titan_loop.objectives.expected_loss import ExpectedExitLoss
from titan_loop.objectives.streamed_loss import StreamedLoss

pytestmark = pytest.mark.multiprocess

BACKEND = os.environ.get("TITAN_LOOP_TEST_SPMD_BACKEND", compat.SPMD_BACKEND)
WINDOWS, SEQ_LEN, VOCABULARY = 4, 16, 128
# fp32 sums in another order; measured 1e-6 relative to the largest entry of a tensor
RELATIVE_TOLERANCE = 1e-5
# The terms of the gate's gradient nearly cancel; measured 1.4e-5 on a Xeon.
GATE_TOLERANCE = 3e-5
CHECKPOINTING = {
    "none": None,
    "selective": SelectiveAC.Config,
    "full": FullAC.Config,
    "recurrent-step": RecurrentStepAC.Config,
    "recurrent-step+full": functools.partial(RecurrentStepAC.Config, layers="full"),
}


@dataclass(frozen=True)
class Layout:
    """Degrees of one layout; the shard degree takes what is left of the world."""

    tp: int = 1
    cp: int = 1
    replicate: int = 1
    sequence_parallel: bool = True
    experts: int = 1


@dataclass(frozen=True)
class Case:
    """What is trained: the micro-batches' recurrent steps and the model's variant."""

    steps: tuple[int, ...] = (3, 1, 2)
    checkpointing: str = "none"
    tie_weights: bool = False
    exit_gate: bool = True
    fsdp: FSDPConfig = field(default_factory=lambda: FSDPConfig(policy="per_visit"))
    backward_steps: int | None = None
    options: tuple[tuple[str, str | float], ...] = ()
    family: type[ModelOptions] = OuroOptions
    reshard: Literal["default", "always", "never"] = "default"
    loss: StreamedLoss.Config = field(default_factory=ExpectedExitLoss.Config)
    hooked: tuple[str, ...] = ()

    @property
    def model(self) -> ModelOptions:
        """Options of the model."""
        return self.family(
            size="debugmodel",
            tie_weights=self.tie_weights,
            exit_gate=self.exit_gate,
            **dict(self.options),
        )


def build(layout: Layout, case: Case) -> tuple[LoopDecoder, ParallelDims]:
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    config = decoder_config(case.model, max_seq_len=SEQ_LEN)
    if layout.experts > 1:
        config.expert_parallel = True
    checkpointing = CHECKPOINTING[case.checkpointing]
    return parallel_model(
        config,
        ParallelismConfig(
            tensor_parallel_degree=layout.tp,
            context_parallel_degree=layout.cp,
            data_parallel_replicate_degree=layout.replicate,
            expert_parallel_degree=layout.experts,
            enable_sequence_parallel=layout.sequence_parallel,
            # Alone there is nothing to place, and no process group that a mesh could be built on.
            spmd_backend=compat.SPMD_BACKEND if alone else BACKEND,
            fsdp_reshard_after_forward=case.reshard,
        ),
        ac_config=None if checkpointing is None else checkpointing(),
        fsdp=case.fsdp,
    )


def batches(count: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    result = []
    for _ in range(count):
        tokens = torch.randint(VOCABULARY, (WINDOWS, SEQ_LEN + 1), generator=generator)
        labels = tokens[:, 1:].clone()
        labels[0, :5] = IGNORE_INDEX
        labels[2, 3] = IGNORE_INDEX
        positions = (torch.arange(SEQ_LEN) % 7).expand(WINDOWS, -1).contiguous()
        result.append((tokens[:, :-1].contiguous(), positions, labels.contiguous()))
    return result


def losses_and_gradients(layout: Layout, case: Case) -> tuple[list[float], dict[str, Tensor]]:
    """Return the global loss of every micro-batch and the accumulated whole gradients."""
    model, dims = build(layout, case)
    loss_fn = case.loss.build(compile_config=CompileConfig())
    loss_fn.set_lm_head(model.lm_head)
    loss_fn.set_schedules({"entropy_weight": 0.1})
    context = dist_utils.get_spmd_context(parallel_dims=dims)
    hooks = [(name, lambda value, hook: value + value.sin()) for name in case.hooked]
    losses = []
    for steps, batch in zip(case.steps, batches(len(case.steps)), strict=True):
        valid = (batch[-1] != IGNORE_INDEX).sum()
        tokens, positions, masks, labels = part_of_rank(model, dims, batch)
        with Hooks(model, hooks), context():
            torch.manual_seed(steps)  # for dropout; the ranks of a state draw the same masks
            collect = case.loss.collect(exit_gate=case.exit_gate)
            depth = {"recurrent_steps": steps, "backward_steps": case.backward_steps}
            output = model(tokens, positions, masks, **depth, collect=collect)
            loss, _ = loss_fn(output, labels, valid)
            loss.backward()
        losses.append(global_loss(loss, dims))
    return losses, whole_gradients(model)


HELD = FSDPConfig(policy="per_step")
OUTSIDE = (("n_layers", 4), ("prelude_layers", 1), ("coda_layers", 1))
LAYOUTS = {
    "dp2": (2, Layout()),
    "tp2": (2, Layout(tp=2)),
    "tp2-no-sp": (2, Layout(tp=2, sequence_parallel=False)),
    "dp2-tp2": (4, Layout(tp=2)),
    "hsdp2x2": (4, Layout(replicate=2)),
}
falling = functools.partial(Case, steps=(2, 1))  # where what differs does not depend on R
CASES = {
    "R1": Case(steps=(1,)),
    "R-changes": Case(),
    "R-changes-selective": falling(checkpointing="selective"),
    "R-changes-full": falling(checkpointing="full"),
    "tied": falling(tie_weights=True, exit_gate=False),
    "held": falling(fsdp=HELD),
    "held-full": Case(fsdp=HELD, checkpointing="full"),
    "held-tied": falling(fsdp=HELD, tie_weights=True, checkpointing="selective"),
    "dropout-by-step": falling(
        checkpointing="recurrent-step", options=(("dropout", 0.2), ("embedding_dropout", 0.3))
    ),
}
# What is tried on some layouts only.
MORE_LAYOUTS = {
    "ep2": (2, Layout(experts=2)),
    "cp2": (2, Layout(cp=2)),
    "cp2-dp2": (4, Layout(cp=2)),
    "cp4": (4, Layout(cp=4)),
    "dp2-cp2-tp2": (8, Layout(cp=2, tp=2)),
}
MORE_CASES = {
    "by-step": falling(checkpointing="recurrent-step"),
    "held-by-step": falling(fsdp=HELD, checkpointing="recurrent-step"),
    "held-by-step-and-layer": falling(fsdp=HELD, checkpointing="recurrent-step+full"),
    "held-small": Case(steps=(2,), fsdp=HELD, exit_gate=False, options=(("n_layers", 1),)),
    "held-truncated": Case(fsdp=HELD, backward_steps=2),
    "varied": falling(
        options=(
            ("positions", "learned"),
            ("learned_positions", SEQ_LEN),
            ("norm_placement", "readout"),
            ("initial_keys", "queries"),
            ("injection", "diagonal"),
        )
    ),
    "hooked": falling(
        checkpointing="full",
        options=OUTSIDE,
        hooked=tuple(f"loop.1.blocks.1.{site}" for site in ("hook_resid_post", "attn.hook_[qz]")),
    ),
    "held-outside-by-step": falling(fsdp=HELD, checkpointing="recurrent-step", options=OUTSIDE),
    "outside-gated-truncated": Case(backward_steps=2, options=OUTSIDE),
    "outside-truncated": Case(
        backward_steps=2, exit_gate=False, options=(*OUTSIDE, ("injection", "additive"))
    ),
}
# The main layouts with or without checkpointing; the others, and what takes another way through
# the code, once or where that way differs. Accumulating over R = 3, 1 and 2 includes each of them.
# HSDP adds a reduction that no checkpointing repeats, so one kind of it is enough there; with TP
# it is trained in `training/test_optimizer_multiprocess.py`.
PAIRS = [
    *((layout, "R-changes") for layout in ("dp2", "tp2", "dp2-tp2")),
    *((layout, "R-changes-full") for layout in ("tp2", "hsdp2x2")),
    ("dp2", "R1"),
    *(("dp2-tp2", case) for case in ("tied", "held-tied")),
    ("dp2", "held"),
    ("hsdp2x2", "held-full"),
    ("tp2-no-sp", "R-changes-full"),
    *((layout, "dropout-by-step") for layout in ("tp2", "tp2-no-sp")),
    *((layout, "varied") for layout in ("tp2", "cp2")),
    *(("dp2", case) for case in MORE_CASES if case not in ("varied", "held-by-step", "held-small")),
    ("cp2", "R-changes"),
    ("cp2-dp2", "held-by-step"),
    *((layout, "hooked") for layout in ("tp2-no-sp", "cp2")),
    ("tp2", "held-outside-by-step"),
    ("cp4", "R-changes-selective"),
    ("dp2-cp2-tp2", "held-small"),  # of three dimensions, which contain cp2-tp2
]


def runnable(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the pairs of layout and case that the backend can run."""
    if BACKEND == "partial_dtensor":
        return [*pairs]
    return [pair for pair in pairs if "cp" not in pair[0]]  # refused there


_alone: dict[str, tuple[list[float], dict[str, Tensor]]] = {}


def one_process(case: Case) -> tuple[list[float], dict[str, Tensor]]:
    """Return what one process gets; equal cases, which cannot be hashed, are run once."""
    if repr(case) not in _alone:
        _alone[repr(case)] = losses_and_gradients(Layout(), case)
    return _alone[repr(case)]


@pytest.mark.parametrize(("layout", "case"), runnable(PAIRS))
def test_losses_and_gradients_equal_one_process(gloo_pool, layout, case):
    check_parity(gloo_pool, layout, (CASES | MORE_CASES)[case])


def check_parity(gloo_pool, layout: str, case: Case) -> None:
    """Train a case on the ranks of a layout and in one process, and compare."""
    world, degrees = (LAYOUTS | MORE_LAYOUTS)[layout]
    expected_losses, expected = one_process(case)
    ranks = gloo_pool(world).run(losses_and_gradients, degrees, case)
    for losses, gradients in ranks:
        assert losses == pytest.approx(expected_losses, rel=RELATIVE_TOLERANCE)
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            error = float((gradient - expected[name]).abs().max())
            # What is added to all keys changes no attention: the gradient is rounding alone.
            scaled_by = expected[name.replace("wk.bias", "wq.bias")]
            scale = float(scaled_by.abs().max())  # 0 for the gate at R = 1, which is unused
            most = GATE_TOLERANCE if name.startswith("exit_gate.") else RELATIVE_TOLERANCE
            assert error <= most * scale, f"{name}: error {error:.1e} of {scale:.1e}"
