"""Which parameters share a group, which decay, and what a family may change."""

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torchtitan.config.configs import ParallelismConfig, TrainingConfig

from titan_loop import compat
from titan_loop.families.ouro.model import SIZES, OuroOptions
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.exit_gate import freeze_all_but_the_exit_gate
from titan_loop.models.family import build_decoder, decoder_config
from titan_loop.models.parameter_groups import ParameterGroup
from titan_loop.training.optimizer import AdamWConfig, LoopOptimizers, MuonConfig

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


def test_values_at_the_ends_of_their_ranges_are_accepted():
    least = AdamWConfig(beta1=0, beta2=0, weight_decay=0, eps=1e-30)
    for config in (least, MuonConfig(momentum=0, weight_decay=0, iterations=1)):
        assert not [*config.refusals()]
    most: dict[str, Any] = {"iterations": 99, "scale": "original", "dtype": "float32"}
    assert not [*MuonConfig(**most).refusals()]


@pytest.mark.parametrize(
    ("kind", "values", "problem"),
    [
        (AdamWConfig, {"beta1": (-0.1, 1.0)}, "must be at least 0 and below 1; AdamW decays by it"),
        (AdamWConfig, {"beta2": (-0.1, 1.0)}, "must be at least 0 and below 1; AdamW decays by it"),
        (AdamWConfig, {"weight_decay": (-0.1, math.inf)}, "must be finite and at least 0"),
        (AdamWConfig, {"eps": (0.0, math.inf)}, "must be above 0; 1e-8 is usual"),
        (MuonConfig, {"momentum": (-0.1, 1.0)}, "must be at least 0 and below 1"),
        (MuonConfig, {"weight_decay": (-0.1, math.inf)}, "must be finite and at least 0"),
        (MuonConfig, {"iterations": (0, 100)}, "must be from 1 to 99; 5 is usual"),
        (MuonConfig, {"rate_factor": (0.0, math.inf)}, "must be above 0"),
        (MuonConfig, {"scale": ("new",)}, "is unknown; use original or match_rms_adamw or sphere"),
        (MuonConfig, {"dtype": ("float16",)}, "is unknown; use auto or float32 or bfloat16"),
    ],
)
def test_values_out_of_range_are_refused(kind, values, problem):
    ((name, wrong),) = values.items()
    for value in wrong:
        (refusal,) = kind(**{name: value}).refusals()
        assert refusal.field.endswith(f".{name}")
        assert str(refusal).endswith(f"={value} {problem}")


def test_rates_follow_the_width():
    """Four times the width: AdamW's rate falls by 4, Muon's by 2 with its default scale alone."""
    wide = ParameterGroup(decays=True, is_hidden_matrix=True, rate_factor=3.0, width_ratio=4.0)
    assert AdamWConfig().settings(wide).rate_factor == 0.75
    assert MuonConfig(rate_factor=5.0).settings(wide).rate_factor == 7.5
    for scale, decay in (("original", 0.1), ("sphere", 0.0)):
        settings = MuonConfig(rate_factor=5.0, scale=scale).settings(wide)
        assert settings.rate_factor == 15.0
        assert settings.optimizer_kwargs["weight_decay"] == decay
    assert MuonConfig(weight_decay=0.2).settings(wide).optimizer_kwargs == {
        "lr": 0.0,
        "weight_decay": 0.2,
        "momentum": 0.95,
        "nesterov": True,
        "ns_steps": 5,
        "adjust_lr_fn": "match_rms_adamw",
        "fused": False,
    }
    plain = ParameterGroup(decays=False)
    assert MuonConfig().settings(plain).optimizer_kwargs["weight_decay"] == 0.0
    assert AdamWConfig().settings(plain).optimizer_kwargs["weight_decay"] == 0.0


def test_muon_iterates_in_bfloat16_on_a_gpu(monkeypatch):
    monkeypatch.setattr(compat, "device_type", lambda: "cuda")
    assert MuonConfig().torch_dtype == torch.bfloat16
    assert MuonConfig(dtype="float32").torch_dtype == torch.float32
    monkeypatch.setattr(compat, "device_type", lambda: "cpu")
    assert MuonConfig().torch_dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "trainable", "offload", "backend", "refused"),
    [
        ("muon", "all", False, "partial_dtensor", []),
        ("muon", "exit_gate", False, "partial_dtensor", ["optimizer.name"]),
        ("muon", "all", True, "partial_dtensor", ["training.enable_cpu_offload"]),
        ("muon", "all", False, "spmd_types", ["parallelism.spmd_backend"]),
        ("adamw", "exit_gate", True, "spmd_types", []),
    ],
)
def test_muon_has_settings_that_it_cannot_work_with(name, trainable, offload, backend, refused):
    config = LoopOptimizers.Config(name=name)
    assert not [*config.refusals()]
    refusals = config.setting_refusals(
        trainable=trainable,
        training=TrainingConfig(enable_cpu_offload=offload),
        parallelism=ParallelismConfig(spmd_backend=backend),
    )
    assert [refusal.field for refusal in refusals] == refused
    unknown: Any = LoopOptimizers.Config(name="sgd")  # type: ignore[arg-type]
    (refusal,) = unknown.refusals()
    assert str(refusal) == "optimizer.name=sgd is unknown; use adamw or muon"


def test_muon_updates_the_matrices_of_the_layers_alone():
    model = build_decoder(OuroOptions(size="debugmodel"), max_seq_len=32)
    optimizers = LoopOptimizers.Config(name="muon").build(model_parts=[model])
    updated = {
        type(optimizer).__name__: {
            name for group in optimizer.param_groups for name in group["param_names"]
        }
        for optimizer in optimizers
    }
    matrices = {
        name
        for name, parameter in model.named_parameters()
        if name.startswith("layers.") and parameter.ndim == 2
    }
    assert updated["Muon"] == matrices
    assert updated["AdamW"] == {name for name, _ in model.named_parameters()} - matrices


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


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_state_before_the_first_update_is_whole_and_counts_no_step(name: str):
    """Also beside the gradients of steps that were skipped."""
    model = build_decoder(OuroOptions(size="debugmodel"), max_seq_len=32)
    optimizers = LoopOptimizers.Config(name=name).build(model_parts=[model])
    before = {key: parameter.clone() for key, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state = {key: value for key, value in optimizers.state_dict().items() if "step" not in key}
    assert {key.split(".", 1)[1].rpartition(".")[0] for key in state} == {*before}
    assert not any(value.any() for value in optimizers.state_dict().values())
    assert all(torch.equal(before[key], p) for key, p in model.named_parameters())
