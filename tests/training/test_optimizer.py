"""Which parameters share a group, which decay, and what a family may change."""

import re

import pytest
import torch
from torch import Tensor

from titan_loop.families.ouro.model import SIZES, OuroOptions
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.exit_gate import freeze_all_but_the_exit_gate
from titan_loop.models.family import build_decoder, decoder_config
from titan_loop.models.parameter_groups import ParameterGroup
from titan_loop.training.optimizer import AdamWConfig, LoopOptimizers

DECAYED_BEFORE_GROUPS = re.compile(r"norm\.weight$|^exit_gate\.")
"""What Ouro's optimiser excluded from decay when names decided, not shapes."""


@pytest.mark.parametrize("size", SIZES)
def test_norms_and_gate_do_not_decay_and_everything_else_does(size):
    with torch.device("meta"):
        model = decoder_config(OuroOptions(size=size), max_seq_len=32).build()
    for name, parameter in model.named_parameters():
        group = model.parameter_group(name, parameter)
        assert group == ParameterGroup(
            decays=DECAYED_BEFORE_GROUPS.search(name) is None,
            is_hidden_matrix=name.startswith("layers.") and not name.endswith("norm.weight"),
        )


def test_biases_by_head_and_distance_are_no_matrix():
    model = build_decoder(OuroOptions(positions="bias", relative_window=3), max_seq_len=32)
    name = "layers.1.attention.distance_scores.bias"
    assert model.parameter_group(name, model.get_parameter(name)) == ParameterGroup(decays=False)


@pytest.mark.parametrize(
    ("options", "own"),
    [
        (OuroOptions(positions="learned", learned_positions=32), "positions.table.weight"),
        (OuroOptions(positions="relative", relative_window=3), "distance_scores.weight"),
    ],
)
def test_muon_leaves_tables_to_adamw(options, own):
    model = build_decoder(options, max_seq_len=32)
    table = ParameterGroup(decays=True, is_hidden_matrix=False)
    tables = {
        name
        for name, parameter in model.named_parameters()
        if model.parameter_group(name, parameter) == table
    }
    expected = {name for name, _ in model.named_parameters() if name.endswith(own)}
    assert expected
    assert tables == expected | {"tok_embeddings.weight", "lm_head.weight"}


@pytest.mark.parametrize("exit_gate", [True, False])
def test_every_parameter_is_in_one_group_with_the_settings_asked_for(exit_gate):
    model = build_decoder(OuroOptions(size="debugmodel", exit_gate=exit_gate), max_seq_len=32)
    config = LoopOptimizers.Config(adamw=AdamWConfig(weight_decay=0.3, eps=1e-6))
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


def test_a_frozen_language_model_has_no_group_and_the_gate_does_not_decay():
    model = build_decoder(OuroOptions(size="debugmodel"), max_seq_len=32)
    freeze_all_but_the_exit_gate(model)
    (optimizer,) = LoopOptimizers.Config().build(model_parts=[model])
    (group,) = optimizer.param_groups
    assert set(group["param_names"]) == {"exit_gate.weight", "exit_gate.bias"}
    assert group["weight_decay"] == 0


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
