"""Experts spread over ranks: losses, gradients and biases of one process, under every policy."""

import functools
from typing import Any

import pytest
import titan_loop.compat as compat
import torch
from torch import Tensor
from torchtitan.config import CompileConfig, ParallelismConfig
from torchtitan.distributed import utils as dist_utils

from tests.distributed.parallel_model import (
    global_loss,
    parallel_model,
    part_of_rank,
    whole_gradients,
)
from tests.distributed.test_parity import CHECKPOINTING, RELATIVE_TOLERANCE, batches
from titan_loop.distributed.loop_fsdp import FSDPConfig, reshard_units
from titan_loop.distributed.muon import Muon
from titan_loop.families.moe.decoder import SparseConfig
from titan_loop.families.moe.model import MoEOptions
from titan_loop.families.moe.objective import MoELoss
from titan_loop.families.xllm_moe.model import XllmMoEOptions
from titan_loop.models.family import decoder_config
from titan_loop.models.initialisation import local_part

pytestmark = pytest.mark.multiprocess

# Recurrent steps of each training step's micro-batches. The second training step has the weights
# and biases that the first one changed; its gradients accumulate over passes of unequal depth.
PASSES = ((1,), (2, 1))
EXPERTS: dict[str, Any] = {"experts": 4, "expert_hidden_dim": 32}
OPTIONS = {
    "moe": MoEOptions(
        **EXPERTS,
        shared_experts=1,
        n_layers=3,
        prelude_layers=1,
        dense_layers=(2,),
        routers=2,
        attentions=2,
    ),
    "xllm": XllmMoEOptions(
        **EXPERTS, states="split", injection="orthogonal", start_state="zero", low_cycles=2
    ),
}
LAYOUTS = {  # ranks, expert parallelism, replicas
    "ep2": (2, 2, 1),
    "ep2-fsdp2": (4, 2, 1),
    "fsdp2": (2, 1, 1),
    "ep2-replicas": (4, 2, 2),
}


TENSOR_LAYOUTS = {  # ranks, expert and tensor parallelism, whether states are cut between layers
    "ep4-tp2": (4, 4, 2, True),
    "ep2-tp2-whole-states": (2, 2, 2, False),
}


def trained(
    expert_parallel: int,
    replicas: int,
    policy: str,
    fsdp: str = "per_visit",
    tensor_parallel: int = 1,
    cut_states: bool = True,
    kind: str = "moe",
) -> tuple[list[float], dict[str, Tensor], list[Tensor]]:
    """Return all losses, the last training step's gradients, and the experts' biases.

    Muon updates the experts, so a layout must orthogonalise each of them on its own.
    """
    config = decoder_config(OPTIONS[kind], max_seq_len=16)
    assert isinstance(config, SparseConfig)
    config.expert_parallel = expert_parallel > 1
    checkpointing = CHECKPOINTING[policy]
    model, dims = parallel_model(
        config,
        ParallelismConfig(
            expert_parallel_degree=expert_parallel,
            data_parallel_replicate_degree=replicas,
            tensor_parallel_degree=tensor_parallel,
            enable_sequence_parallel=cut_states,
            spmd_backend=compat.SPMD_BACKEND,
        ),
        ac_config=checkpointing and checkpointing(),
        fsdp=FSDPConfig(policy=fsdp),  # type: ignore[arg-type]
    )
    loss_fn = MoELoss.Config(balance_weight=0.1, router_z_weight=0.01).build(
        compile_config=CompileConfig()
    )
    loss_fn.set_lm_head(model.lm_head)
    stacks = [p for name, p in model.named_parameters() if "inner_experts" in name]
    others = [p for name, p in model.named_parameters() if "inner_experts" not in name]
    optimizers = (
        torch.optim.SGD(others, lr=0.05, foreach=False),
        Muon([{"params": stacks, "lr": 0.01}], dtype=torch.float32),
    )
    losses, gradients = [], {}
    for passes in PASSES:
        model.zero_grad()
        for steps, batch in zip(passes, batches(len(passes)), strict=True):
            tokens, positions, masks, labels = part_of_rank(model, dims, batch)
            output = model(tokens, positions, masks, recurrent_steps=steps, collect="last")
            loss, _ = loss_fn(output, labels, torch.tensor(116.0))
            loss.backward()
            losses.append(global_loss(loss, dims))
        reshard_units(model)
        if passes is PASSES[-1]:
            gradients = whole_gradients(model)
        dist_utils.clip_grad_norm_(
            list(model.parameters()), 1.0, foreach=True, ep_enabled=dims.ep_enabled
        )
        for optimizer in optimizers:
            optimizer.step()
        mesh = dims.get_mesh("loss") if dims.dp_cp_enabled else None
        model.after_update(mesh, torch.tensor(True))
    buffers = model.named_buffers()
    biases = [local_part(value) for name, value in buffers if name.endswith("bias_SE")]
    return losses, gradients, biases


@functools.cache
def trained_alone(kind: str) -> tuple[list[float], dict[str, Tensor], list[Tensor]]:
    """One process without checkpointing, which neither policy of FSDP concerns."""
    return trained(1, 1, "none", kind=kind)


def compare(found: Any, kind: str = "moe") -> None:
    expected_losses, expected, expected_biases = trained_alone(kind)
    for losses, gradients, biases in found:
        assert losses == pytest.approx(expected_losses, rel=RELATIVE_TOLERANCE)
        for name, gradient in gradients.items():
            largest = float(expected[name].abs().max())
            error = float((gradient - expected[name]).abs().max())
            assert error <= RELATIVE_TOLERANCE * largest, f"{name}: {error / largest:.1e}"
        assert gradients.keys() == expected.keys()
        # A function of the counts alone.
        torch.testing.assert_close(biases, expected_biases, rtol=0, atol=0)


# Checkpointing computes a layer with its all-to-alls again; FSDP of the experts gathers within that
# only on ep2-fsdp2. On ep2 each rank has whole experts.
@pytest.mark.parametrize(
    ("layout", "policy"), [("ep2-fsdp2", "recurrent-step+full"), ("ep2", "selective")]
)
def test_training_equals_one_process_under_every_policy(gloo_pool, layout, policy):
    world, expert_parallel, replicas = LAYOUTS[layout]
    compare(gloo_pool(world).run(trained, expert_parallel, replicas, policy))


@pytest.mark.parametrize("layout", ["fsdp2", "ep2-replicas"])
def test_training_equals_one_process_on_other_layouts(gloo_pool, layout):
    world, expert_parallel, replicas = LAYOUTS[layout]
    compare(gloo_pool(world).run(trained, expert_parallel, replicas, "full", "per_step"))


@pytest.mark.parametrize("layout", TENSOR_LAYOUTS)
def test_tensor_parallel_ranks_route_parts_of_a_window(gloo_pool, layout):
    world, expert_parallel, *tensor = TENSOR_LAYOUTS[layout]
    compare(gloo_pool(world).run(trained, expert_parallel, 1, "full", "per_step", *tensor))


def test_an_xllm_loop_of_experts_equals_one_process(gloo_pool):
    how = ("none", "per_step", 2, True, "xllm")  # tensor and expert parallel, states cut
    compare(gloo_pool(2).run(trained, 2, 1, *how), "xllm")
