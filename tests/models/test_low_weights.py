"""Weights cast once a step give the gradients of a model in that dtype, added up in a wider one."""

from typing import Any

import pytest
import titan_loop.compat as compat  # before any torchtitan module
import torch
from torch import Tensor
from torch.func import functional_call
from torchtitan.config import ParallelismConfig, TrainingConfig

from tests.contracts.families import random_model
from tests.distributed.parallel_model import parallel_model
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.dense import DenseOptions
from titan_loop.models.family import ModelOptions, decoder_config
from titan_loop.models.low_weights import LowWeights

OPTIONS = OuroOptions(size="debugmodel", vocab_size=64)  # two layers, norms and a gate
TIED = DenseOptions(dim=64, n_layers=2, n_heads=4, hidden_dim=48, vocab_size=64, tie_weights=True)
TOKENS = torch.arange(48).view(2, 24)


def built(options: ModelOptions, *, dtype: torch.dtype) -> LoopDecoder:
    return random_model(options, 32).to(dtype).train()


def cast(model: LoopDecoder, dtype: torch.dtype, *, join: bool, wide: bool = True) -> LowWeights:
    """Cast as `parallelize_loop_decoder` does on one device."""
    layers: dict[int, Any] = {n: layer for n, layer in enumerate(model.layers.values()) if join}
    model.joined_layers = tuple(layers)
    joinable = {n: layer.joinable for n, layer in layers.items()}
    kept = [module for unit in model.units() if wide and unit.fp32 for module in unit.modules]
    low = LowWeights(model, dtype, wide=kept, joinable=joinable)
    model.low_weights = low
    low.cover(model)
    low.cover(model.lm_head)
    return low


def loss_of(model: LoopDecoder, tokens: Tensor = TOKENS) -> Tensor:
    output = model(tokens, recurrent_steps=3)
    weight_RBL = torch.ones(3, *tokens.shape) / 3
    loss, _ = model.lm_head(output.hidden_RBLD, labels_BL=tokens, weight_RBL=weight_RBL)
    return loss + sum(gate_BL.mean() for gate_BL in output.exit_logit_RBL)


def w2(model: LoopDecoder) -> Tensor:
    return model.get_parameter("layers.0.feed_forward.w2.weight")


def gradients(model: LoopDecoder) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("options", [OPTIONS, TIED])
@pytest.mark.parametrize("join", [False, True])
def test_gradients_of_two_micro_batches_reach_the_parameters(join, options):
    plain, model = built(options, dtype=torch.float64), built(options, dtype=torch.float64)
    low = cast(model, torch.float32, join=join, wide=False)
    parameters = dict(model.named_parameters())
    for tokens in (TOKENS, TOKENS.flip(1)):
        loss_of(plain, tokens).backward()
        loss_of(model, tokens).backward()
    assert w2(model).dtype == torch.float32
    low.leave()
    assert all(parameters[name] is each for name, each in model.named_parameters())
    got = gradients(model)
    assert {gradient.dtype for gradient in got.values()} == {torch.float64}
    torch.testing.assert_close(got, gradients(plain), rtol=1e-3, atol=1e-5)


def test_visits_are_added_up_in_the_parameters_dtype():
    """The reference adds the gradients of a bf16 copy for every visit up in float64."""
    model = built(OPTIONS, dtype=torch.float32)
    low = cast(model, torch.bfloat16, join=False)
    total: dict[str, Tensor] = {}
    visits: list[tuple[str, Tensor]] = []
    reference = built(OPTIONS, dtype=torch.float32)
    for part in (reference.tok_embeddings, reference.layers, reference.lm_head):
        part.bfloat16()
    for index, layer in reference.layers.items():

        def visit(x_BLD: Tensor, *args: Any, layer=layer, own=layer.forward, index=index) -> Tensor:
            copies = {n: p.detach().clone().requires_grad_() for n, p in layer.named_parameters()}
            for name, copy in copies.items():
                copy.grad_dtype = torch.float32  # a composed norm's own gradients are fp32
                visits.append((f"layers.{index}.{name}", copy))
            wrapped, layer.forward = layer.forward, own
            result = functional_call(layer, copies, (x_BLD, *args))
            layer.forward = wrapped
            return result

        layer.forward = visit
    loss_of(reference).backward()
    for name, copy in visits:
        assert copy.grad is not None
        total[name] = total.get(name, 0) + copy.grad.double()
    assert len(visits) == 3 * len(total)
    loss_of(model).backward()
    low.leave()
    got = gradients(model)
    for name, want in total.items():
        assert float((got[name] - want).norm() / want.norm()) < 1e-6, name


def test_a_pass_without_gradients_leaves_and_the_next_one_casts_anew():
    model = built(OPTIONS, dtype=torch.float32)
    cast(model, torch.bfloat16, join=True)
    with torch.no_grad():
        before = loss_of(model)
        assert w2(model).dtype == torch.float32
        w2(model).neg_()
        assert loss_of(model) != before


def test_norm_and_gate_stay_wide_in_a_model_that_was_built_without_a_device():
    training = TrainingConfig(mixed_precision_param="bfloat16")
    config = decoder_config(OPTIONS, max_seq_len=32)
    alone = ParallelismConfig(spmd_backend=compat.SPMD_BACKEND)
    model, _ = parallel_model(config, alone, training=training)
    loss_of(model)
    dtypes = {name: leaf.dtype for name, leaf in model.named_parameters()}
    wide = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert wide == {"norm.weight", "exit_gate.weight", "exit_gate.bias"}
    assert {*dtypes.values()} == {torch.float32, torch.bfloat16}
