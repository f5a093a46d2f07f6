"""Upcycling of dense models to mixtures: equal outputs, and refusals."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.contracts.folders import opened
from tests.support.command_lines import refused
from tests.support.llama_runs import VOCABULARY, Make
from titan_loop.cli import main as cli
from titan_loop.models.decoder import LoopDecoder

CLOSE = 1e-6  # logits of size 1; chosen scores, which are fp32, add up to 1 within rounding
TOKENS = torch.arange(40)[None] * 7 % VOCABULARY
SPLIT = {"n_layers": 4, "prelude_layers": 1, "coda_layers": 1}
DENSE = {"hidden_dim": 64}


def upcycled(model: Path, output: Path, *flags: object) -> LoopDecoder:
    """Run `titan-loop moe`, which must succeed, and return the new model."""
    words = ("moe", model, "--output", output, *flags)
    assert cli.main([str(word) for word in words]) == 0
    return opened(output)


@torch.no_grad()
def logits(model: LoopDecoder, steps: int) -> Tensor:
    """Return logits in float64."""
    model = model.double()
    found = model.readout(model(TOKENS, recurrent_steps=steps).hidden_RBLD[-1])
    model.float()
    return found


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({**SPLIT, "norm_placement": "every_step"}, ("--routers", 2, "--dense-layers", 1)),
        ({}, ("--router", "softmax", "--top-k", 3)),
    ],
)
def test_exact_copies_are_the_dense_model_at_every_depth(make_run: Make, tmp_path, options, flags):
    made = make_run(**DENSE, **options)
    model = upcycled(made.run, tmp_path / "run", "--experts", 4, *flags)
    for steps in (1, 3):
        want = logits(made.model, steps)
        torch.testing.assert_close(logits(model, steps), want, atol=CLOSE, rtol=0)
    gates = [w.detach() for name, w in model.named_parameters() if name.endswith("gate.weight")]
    for number, gate in enumerate(gates):
        assert float(gate.std()) == pytest.approx(0.02, rel=0.2)  # 256 draws each
        assert not any(torch.equal(gate, other) for other in gates[:number])


def test_noise_is_relative_and_every_experts_own(make_run: Make, tmp_path):
    made = make_run(**DENSE)
    model = upcycled(made.run, tmp_path / "run", "--experts", 4, "--noise", 0.1)
    for ours, name in {"w1": "w1_EFD", "w2": "w2_EDF"}.items():
        dense = made.model.get_parameter(f"layers.1.feed_forward.{ours}.weight").detach()
        copies = model.get_parameter(f"layers.1.moe.routed_experts.inner_experts.{name}")
        noise = copies.detach() - dense
        assert float(noise.std() / dense.std()) == pytest.approx(0.1, rel=0.03)  # 16,384 draws
        assert float((noise[0] * noise[1]).mean() / noise.var()) == pytest.approx(0, abs=0.06)


@pytest.mark.parametrize(
    ("options", "flags", "message"),
    [
        ({}, ("--noise", 1.0), "--noise=1.0 must be 0 or more and below 1"),
        ({"branch_scale": 2.0}, (), "has model.branch_scale=2.0, a factor"),
        ({"attention_biases": "qkv"}, (), "has model.attention_biases=qkv; experts are made of"),
        ({}, ("--dense-layers", 3), "must name some of the layers 1 to 2"),
    ],
)
def test_parts_that_do_not_fit_are_one_line(make_run, capsys, tmp_path, options, flags, message):
    run = make_run(**options).run
    words = ("moe", run, "--output", tmp_path / "run", "--experts", 4, *flags)
    assert message in refused(capsys, *words)
    assert not [*tmp_path.iterdir()]
