"""Products of the layers in float8, emulated."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.tiny import tiny_config, train_run
from titan_loop.distributed import float8
from titan_loop.distributed.activation_checkpointing import SelectiveAC
from titan_loop.distributed.float8 import float8_linears, in_float8
from titan_loop.errors import UserError
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import decoder_config, get_family
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.training.preflight import remarks
from titan_loop.training.resolved_run import resolve

LENGTH = 32
SMALLEST_SIGNAL, LARGEST_ERROR = 1e-3, 0.3
"""Relative error of a state after three steps: float8's rounding shows, and does not destroy it."""


def config_of(**options: int) -> LoopDecoder.Config:
    return decoder_config(OuroOptions(size="debugmodel", **options), max_seq_len=LENGTH)


def state_of(config: LoopDecoder.Config) -> tuple[LoopDecoder, torch.Tensor]:
    torch.manual_seed(0)
    model = config.build()
    with torch.no_grad():
        model.init_states()
    tokens = torch.randint(128, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    return model, model(tokens, recurrent_steps=3).hidden_RBLD[-1]


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp", "tensorwise"])
@pytest.mark.float8
def test_layers_multiply_in_float8_and_everything_else_does_not(recipe, caplog):
    pytest.importorskip("torchao")
    from torchao.float8.float8_linear import Float8Linear

    (plain, expected), config = state_of(config_of()), config_of()
    before = repr(config)
    caplog.set_level("INFO")
    with torch._inductor.config.patch(emulate_precision_casts=False):
        low, state = state_of(in_float8(config, recipe))
        assert torch._inductor.config.emulate_precision_casts == (recipe == "rowwise")
    assert caplog.text.count(f"Float8 training active with recipe {recipe}\n") == 1
    converted = {name for name, part in low.named_modules() if isinstance(part, Float8Linear)}
    linears = {name for name, part in plain.named_modules() if isinstance(part, nn.Linear)}
    assert linears - converted == {"lm_head", "exit_gate"}
    assert len(converted) == len(low.layers) * 7  # q, k, v, o, w1, w2, w3
    first = low.get_submodule(min(converted)).config.cast_config_input.scaling_granularity
    assert first.name == ("TENSORWISE" if recipe == "tensorwise" else "AXISWISE")
    error = float((state - expected).detach().norm() / expected.detach().norm())
    assert SMALLEST_SIGNAL < error < LARGEST_ERROR
    state.square().mean().backward()
    assert all(part.grad is not None for part in low.layers.parameters())
    assert repr(config) == before  # a copy is converted


def test_routers_keep_their_precision():
    moe = get_family("moe")
    config = decoder_config(moe.options(size="debugmodel"), max_seq_len=LENGTH)
    assert {name.rpartition(".")[2] for name in float8_linears(config)} == {"wq", "wkv", "wo"}


@pytest.mark.usefixtures("alone")
@pytest.mark.float8
def test_a_run_trains_in_emulated_float8(source: Path, tmp_path: Path):
    """With selective checkpointing, whose choice of operations sees float8's."""
    pytest.importorskip("torchao")
    losses = []
    for recipe in ("off", "rowwise"):
        config = tiny_config(source, tmp_path / recipe, steps=2)
        config.float8 = recipe
        config.activation_checkpoint = SelectiveAC.Config()
        assert any("emulated" in line for line in remarks(config)) == (recipe != "off")
        train_run(config)
        losses.append([r["loss"] for r in RunDirectory(tmp_path / recipe).read_metrics()])
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


def test_a_machine_that_cannot_is_refused_in_one_line(source, tmp_path, monkeypatch):
    config = replace(tiny_config(source, tmp_path), float8="tensorwise")
    monkeypatch.setattr(float8, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"float8=tensorwise needs torchao; pip install titan-"):
        resolve(config, 1)
    monkeypatch.setattr(float8, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(float8, "has_cuda_capability", lambda *_: False)
    with pytest.raises(UserError, match=r"float8=tensorwise needs an NVIDIA GPU of compute cap"):
        resolve(config, 1)
