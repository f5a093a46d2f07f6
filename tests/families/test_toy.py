"""A family that no code of titan_loop knows trains on every layout, and is planned and refused."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils

from tests.distributed.parallel_model import (
    global_loss,
    parallel_model,
    part_of_rank,
    whole_gradients,
)
from tests.families.toy_family import ToyDecoder, ToyOptions
from titan_loop.distributed.loop_fsdp import FSDPConfig
from titan_loop.distributed.parallelize import parallelize_loop_decoder
from titan_loop.errors import UserError
from titan_loop.models.family import build_decoder, decoder_config
from titan_loop.models.units import unit_sizes_of

WINDOWS, SEQ_LEN, VOCABULARY, STEPS = 4, 16, 128, 3
# fp32 sums in another order; measured 1e-6 relative to the largest entry of a tensor
RELATIVE_TOLERANCE = 1e-5
OPTIONS = ToyOptions(attention="sdpa")


def loss_and_gradients(degrees: dict[str, int]) -> tuple[float, dict[str, Tensor]]:
    """Return Σ CE + 0.1 · Σ energy over all tokens, and whole gradients."""
    model, dims = parallel_model(
        decoder_config(OPTIONS, max_seq_len=SEQ_LEN),
        ParallelismConfig(spmd_backend="partial_dtensor", **degrees),
        fsdp=FSDPConfig(policy="per_step"),
    )
    assert isinstance(model, ToyDecoder)
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(VOCABULARY, (WINDOWS, SEQ_LEN + 1), generator=generator)
    positions = (torch.arange(SEQ_LEN) % 7).expand(WINDOWS, -1).contiguous()
    inputs, positions, masks, labels = part_of_rank(
        model, dims, (tokens[:, :-1].contiguous(), positions, tokens[:, 1:].contiguous())
    )
    with dist_utils.get_spmd_context(parallel_dims=dims)():
        output = model(inputs, positions, masks, recurrent_steps=STEPS)
        weight_RBL = torch.full((STEPS, *labels.shape), 1 / STEPS)
        loss, _ = model.lm_head(output.hidden_RBLD, labels_BL=labels, weight_RBL=weight_RBL)
        energy_BL = _local(output.aux["energy"])  # whole on every tensor-parallel rank
        gate = sum(_local(logit_BL).square().sum() for logit_BL in output.exit_logit_RBL)
        loss = loss + 0.1 * energy_BL.sum() + 0.1 * gate
        loss.backward()
    gradients = whole_gradients(model)
    assert gradients.keys() == dict(model.named_parameters()).keys()
    return global_loss(loss, dims), gradients


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.fixture(scope="module")
def alone() -> tuple[float, dict[str, Tensor]]:
    loss, gradients = loss_and_gradients({})
    assert all(gradient.abs().max() > 0 for gradient in gradients.values())
    return loss, gradients


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("world", "degrees"),
    [
        (2, {}),
        (2, {"tensor_parallel_degree": 2}),
        (2, {"context_parallel_degree": 2}),
        (4, {"tensor_parallel_degree": 2}),
    ],
    ids=["dp2", "tp2", "cp2", "dp2-tp2"],
)
def test_loss_and_gradients_are_those_of_one_process(gloo_pool, alone, world, degrees):
    wanted_loss, wanted = alone
    for loss, gradients in gloo_pool(world).run(loss_and_gradients, degrees):
        assert loss == pytest.approx(wanted_loss, rel=RELATIVE_TOLERANCE)
        assert gradients.keys() == wanted.keys()
        for name, gradient in gradients.items():
            scale = wanted[name].abs().max()
            assert (gradient - wanted[name]).abs().max() <= RELATIVE_TOLERANCE * scale, name


class _Forgetful(ToyDecoder):
    """Lists no unit for its norm."""

    def units(self):
        return super().units()[:-1]


def test_a_parameter_without_a_unit_is_a_defect():
    with torch.device("meta"):
        model = _Forgetful(decoder_config(OPTIONS, max_seq_len=8))
    with pytest.raises(AssertionError, match=r"_Forgetful.units\(\).*update_norm\.weight"):
        unit_sizes_of(model, model.units())
    (size,) = unit_sizes_of(model, [*model.units(), *ToyDecoder.units(model)[-1:]])[-1:]
    assert (size.unit.name, size.parameters()) == ("update norm", 64)


def without_a_placement() -> str:
    config = decoder_config(OPTIONS, max_seq_len=SEQ_LEN)
    config.set_sharding(enable_sp=True)
    config.update_norm.sharding_config = None  # type: ignore[attr-defined]
    parallelism = ParallelismConfig(spmd_backend="partial_dtensor", tensor_parallel_degree=2)
    with torch.device("meta"):
        model = config.build()
    with pytest.raises(UserError) as caught:
        parallelize_loop_decoder(
            model,
            parallel_dims=ParallelDims.from_config(parallelism, 2),
            training=TrainingConfig(mixed_precision_param="float32"),
            parallelism=parallelism,
            compile_config=CompileConfig(),
            ac_config=None,
            dump_folder="",
        )
    return str(caught.value)


@pytest.mark.multiprocess
def test_a_parameter_without_a_placement_is_refused_by_name(gloo_pool):
    for message in gloo_pool(2).run(without_a_placement):
        assert "ToyDecoder declares no placement of update_norm.weight" in message


def test_the_carry_is_the_sum_of_the_states():
    model = build_decoder(OPTIONS, max_seq_len=SEQ_LEN)
    tokens = torch.randint(VOCABULARY, (1, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    context = model.make_context(tokens)
    embedding = carry = model.start(tokens, context)
    states = model(tokens, recurrent_steps=3).hidden_RBLD
    for step, state in enumerate(states[:2], start=1):
        carry = model.advance(carry, state, step, context)
    wanted = embedding + 0.5 * sum(model.update_norm(state) for state in states[:2])
    torch.testing.assert_close(carry, wanted)
    torch.testing.assert_close(model.step(carry, 3, context), states[2])
