"""`fsdp.fp32_visit_sum` leaves no bf16 rounding of the sum over visits."""

from collections.abc import Callable
from typing import Any

import pytest
import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import torch
import torch.distributed as dist
from torch import Tensor
from torch.func import functional_call

from tests.distributed.sharded_model import build, forward_backward, gradients
from titan_loop.distributed.loop_fsdp import FSDPConfig, reshard_units
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import decoder_config

SMALL = OuroOptions(size="debugmodel")  # two layers


def visit_sum_errors(options: dict[str, Any]) -> dict[bool, float]:
    """Return the largest relative error of a layer's gradient with and without the fp32 sum.

    The reference runs the same bf16 model with separate copies of the layers' weights per visit
    and adds their gradients up in float64: what is left is the rounding of the sum.
    """
    reference: dict[str, Tensor] = {}
    errors = {}
    for wide in (False, True):
        fsdp = FSDPConfig(policy=options["policy"], fp32_visit_sum=wide)
        model = build(fsdp, options=SMALL, dtype="bfloat16", checkpointing=options["checkpointing"])
        if not reference:
            reference = gradient_of_separate_visits(model)
        forward_backward(model, 4)
        reshard_units(model)
        got = {n.replace("_checkpoint_wrapped_module.", ""): g for n, g in gradients(model).items()}
        errors[wide] = max(
            float((got[name] - want).norm() / want.norm()) for name, want in reference.items()
        )
    return errors


def gradient_of_separate_visits(sharded: LoopDecoder) -> dict[str, Tensor]:
    whole = {
        name.replace("_checkpoint_wrapped_module.", ""): value.full_tensor()
        for name, value in sharded.state_dict().items()
    }
    model = decoder_config(SMALL, max_seq_len=128).build()
    with torch.no_grad():
        model.init_states()
    model.load_state_dict(whole, strict=False)
    for part in (model.tok_embeddings, model.layers, model.lm_head):
        part.bfloat16()
    visits: list[tuple[str, Tensor]] = []

    def separately(index: str, layer: torch.nn.Module, forward: Callable[..., Tensor]) -> Any:
        def visit(x_BLD: Tensor, *args: Any) -> Tensor:
            copies = {n: p.detach().clone().requires_grad_() for n, p in layer.named_parameters()}
            for copy in copies.values():
                copy.grad_dtype = torch.float32  # a composed norm's own gradients are fp32
            visits.extend((f"layers.{index}.{name}", copy) for name, copy in copies.items())
            layer.forward = forward
            # As under FSDP: the input's two gradients inside the layer are added up first.
            result = functional_call(layer, copies, (x_BLD.clone(), *args))
            layer.forward = visit
            return result

        return visit

    for index, layer in model.layers.items():
        layer.forward = separately(index, layer, layer.forward)
    forward_backward(model, 4)
    total: dict[str, Tensor] = {}
    for name, copy in visits:
        total[name] = total.get(name, torch.zeros_like(copy).double()) + copy.grad.double()
    for value in total.values():
        dist.all_reduce(value)
    return total


# One fp32 rounding per visit and rank is left; bf16 keeps 8 bits and rounds three times.
FP32_SUM_ERROR, BF16_SUM_ERROR = 1e-6, 1e-3


@pytest.mark.parametrize(("policy", "checkpointing"), [("per_visit", "full"), ("per_step", "none")])
def test_fp32_visit_sum_leaves_no_bf16_rounding_of_the_sum(gloo_pool, policy, checkpointing):
    options = {"policy": policy, "checkpointing": checkpointing}
    for errors in gloo_pool(2).run(visit_sum_errors, options):
        assert errors[True] < FP32_SUM_ERROR
        assert errors[False] > BF16_SUM_ERROR
