"""Which parameters share a group, which decay, and what a family may change."""

import pytest
import torch
from torch import Tensor

from titan_loop.families.ouro.model import OuroOptions
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import build_decoder
from titan_loop.models.parameter_groups import ParameterGroup
from titan_loop.training.optimizers.adamw import AdamWConfig
from titan_loop.training.optimizers.container import LoopOptimizers
from titan_loop.training.optimizers.muon import MuonConfig
from titan_loop.training.optimizers.settings import OptimizerSettings


@pytest.mark.parametrize("exit_gate", [True, False])
def test_every_parameter_is_in_one_group_with_the_settings_asked_for(exit_gate):
    model = build_decoder(OuroOptions(size="debugmodel", exit_gate=exit_gate), max_seq_len=32)
    config = LoopOptimizers.Config(chosen=AdamWConfig(weight_decay=0.3, eps=1e-6))
    (optimizer,) = config.build(model_parts=[model])
    decay = {
        name: group["weight_decay"]
        for group in optimizer.param_groups
        for name in group["param_names"]
    }
    assert len(optimizer.param_groups) == 2
    assert decay == {name: 0.3 * (p.ndim > 1 < len(p)) for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        assert (group["betas"], group["eps"], group["fused"]) == ((0.9, 0.95), 1e-6, True)


class FastGate(LoopDecoder):
    """A family whose gate learns ten times as fast and decays."""

    def parameter_group(self, name: str, parameter: Tensor) -> ParameterGroup:
        if name.startswith("exit_gate."):
            return ParameterGroup(decays=True, rate_factor=10.0)
        return super().parameter_group(name, parameter)


def test_a_family_s_rate_factor_and_decay_reach_the_update():
    model = build_decoder(OuroOptions(size="debugmodel"), max_seq_len=32)
    model.__class__ = FastGate
    optimizers = LoopOptimizers.Config().build(model_parts=[model])
    optimizers.set_learning_rate(1e-3)
    assert optimizers.own_rates(1e-3) == {"lr/adamw_x10": pytest.approx(1e-2)}
    with torch.no_grad():
        model.exit_gate.bias.fill_(1.0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizers.step()
    moved = {name: before[name] - p.detach() for name, p in model.named_parameters()}
    # AdamW's first step moves by the rate, after decay by the rate times 0.1.
    torch.testing.assert_close(moved["exit_gate.bias"], torch.tensor([1e-2 * 1.1]))
    torch.testing.assert_close(moved["norm.weight"], torch.full((64,), 1e-3), rtol=1e-4, atol=1e-7)


def test_moments_restart_and_parameters_without_a_gradient_have_some():
    model = build_decoder(OuroOptions(size="debugmodel"), max_seq_len=32)
    optimizers = LoopOptimizers.Config().build(model_parts=[model])
    for name, parameter in model.named_parameters():
        if name != "tok_embeddings.weight":
            parameter.grad = torch.ones_like(parameter)
    optimizers.step()
    state = optimizers.state_dict()
    key = next(key for key in state if "tok_embeddings.weight" in key and "exp_avg" in key)
    assert state[key].shape == model.tok_embeddings.weight.shape
    assert not state[key].any()
    (optimizer,) = optimizers
    norm = optimizer.state[model.norm.weight]
    assert norm["exp_avg"].all()
    assert norm["step"] == 1
    optimizers.restart()
    assert not norm["exp_avg"].any()
    assert norm["step"] == 0


@pytest.mark.parametrize("chosen", [AdamWConfig(), MuonConfig()])
def test_a_state_before_the_first_update_is_whole_and_counts_no_step(chosen: OptimizerSettings):
    """Also beside the gradients of steps that were skipped."""
    model = build_decoder(OuroOptions(size="debugmodel"), max_seq_len=32)
    optimizers = LoopOptimizers.Config(chosen=chosen).build(model_parts=[model])
    before = {key: parameter.clone() for key, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state = {key: value for key, value in optimizers.state_dict().items() if "step" not in key}
    assert {key.split(".", 1)[1].rpartition(".")[0] for key in state} == {*before}
    assert not any(value.any() for value in optimizers.state_dict().values())
    assert all(torch.equal(before[key], p) for key, p in model.named_parameters())
