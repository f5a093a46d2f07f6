"""The rate is set from tokens, in every group."""

import torch

from titan_loop.families.ouro.model import OuroOptions
from titan_loop.models.family import build_decoder
from titan_loop.training.learning_rate import TokenLearningRate
from titan_loop.training.optimizer import LoopOptimizers
from titan_loop.training.schedule import Schedule


def test_the_rate_is_a_function_of_tokens_in_every_group():
    model = build_decoder(OuroOptions(size="debugmodel"), max_seq_len=32)
    optimizers = LoopOptimizers.Config().build(model_parts=[model])
    schedule = Schedule.parse("0:0 linear 100:1e-2")
    rate = TokenLearningRate.Config(schedule=schedule).build(
        optimizers=optimizers, training_steps=5
    )
    assert rate.set_tokens(50) == 5e-3
    assert {g["lr"] for o in optimizers for g in o.param_groups} == {5e-3}
    before = {n: p.clone() for n, p in model.named_parameters()}
    rate.set_tokens(0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizers.step()
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())
