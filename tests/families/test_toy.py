"""A family that no code of titan_loop knows trains on every layout, and is planned and refused."""

import pytest
import torch
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims

from tests.distributed.test_parity import HELD, Case, check_parity
from tests.families.toy_family import ToyDecoder, ToyOptions
from titan_loop.distributed.parallelize import parallelize_loop_decoder
from titan_loop.models.family import build_decoder, decoder_config
from titan_loop.models.units import unit_sizes_of

SEQ_LEN = 16
OPTIONS = ToyOptions(attention="sdpa")
CASE = Case(family=ToyOptions, steps=(3,), fsdp=HELD)


@pytest.mark.multiprocess
@pytest.mark.parametrize("layout", ["dp2", "tp2", "cp2", "dp2-tp2"])
def test_loss_and_gradients_are_those_of_one_process(gloo_pool, layout):
    check_parity(gloo_pool, layout, CASE)


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
    with pytest.raises(AssertionError) as caught:
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
def test_a_parameter_without_a_placement_is_named(gloo_pool):
    for message in gloo_pool(2).run(without_a_placement):
        assert "update_norm has no placement of weight" in message


def test_the_carry_is_the_sum_of_the_states():
    model = build_decoder(OPTIONS, max_seq_len=SEQ_LEN)
    tokens = torch.randint(128, (1, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    context = model.make_context(tokens)
    embedding = carry = model.start(tokens, context)
    states = model(tokens, recurrent_steps=3).hidden_RBLD
    for step, state in enumerate(states[:2], start=1):
        carry = model.advance(carry, state, step, context)
    wanted = embedding + 0.5 * sum(model.update_norm(state) for state in states[:2])
    torch.testing.assert_close(carry, wanted)
    torch.testing.assert_close(model.step(carry, 3, context), states[2])
