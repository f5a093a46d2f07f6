"""The rate is set from tokens, in every group."""

import torch

from titan_loop.families.ouro.model import OuroOptions
from titan_loop.models.family import build_decoder
from titan_loop.training.optimizer import LoopOptimizers
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer


def test_the_rate_is_a_function_of_tokens_in_every_group():
    model = build_decoder(OuroOptions(size="debugmodel"), max_seq_len=32)
    optimizers = LoopOptimizers.Config().build(model_parts=[model])
    config = LoopTrainer.Config(learning_rate=Schedule.parse("0:0 linear 100:1e-2"))
    optimizers.set_learning_rate(config.plan_step(step=1, tokens=50, seed=0).learning_rate)
    assert {g["lr"] for o in optimizers for g in o.param_groups} == {5e-3}
    before = {n: p.clone() for n, p in model.named_parameters()}
    optimizers.set_learning_rate(config.plan_step(step=1, tokens=0, seed=0).learning_rate)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizers.step()
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())
