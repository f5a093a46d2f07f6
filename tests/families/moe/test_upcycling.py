"""Upcycling of dense models to mixtures and of mixtures to loops: equal outputs, and refusals."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.contracts.folders import opened
from tests.families.moe.conftest import MakeMoE
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


def test_a_loop_of_one_step_is_the_mixture_and_its_routers_begin_alike(make_moe: MakeMoE, tmp_path):
    made = make_moe(n_layers=4, recurrent_steps=1, dense_layers=(1,), shared_experts=1)
    loop = ("--prelude", 1, "--coda", 1, "--recurrent-steps", 3)
    one = upcycled(made.run, tmp_path / "one", *loop)
    three = upcycled(made.run, tmp_path / "three", *loop, "--routers", 3)
    assert one.recurrent_steps == three.recurrent_steps == 3
    assert torch.equal(logits(one, 1), logits(made.model, 1))
    assert torch.equal(logits(three, 3), logits(one, 3))
    assert not torch.equal(logits(one, 3), logits(one, 1))
    biases = three.get_buffer("layers.1.moe.expert_bias_SE")
    assert biases.shape == (3, 4)
    assert torch.equal(biases[2], made.model.get_buffer("layers.1.moe.expert_bias_SE")[0])


@pytest.mark.parametrize(
    ("kind", "options", "flags", "message"),
    [
        ("dense", {}, (), "--experts is missing; "),
        (
            "dense",
            {"recurrent_steps": 1},
            ("--experts", 4, "--recurrent-steps", 0),
            "--prelude=0 --coda=0 --recurrent-steps=0 do not loop one of the 2 layers",
        ),
        (
            "moe",
            {"recurrent_steps": 1, "routers": 2},
            ("--recurrent-steps", 2, "--routers", 2),
            "--routers=2 is for a mixture with one router per layer",
        ),
        ("dense", {"branch_scale": 2.0}, ("--experts", 4), "has model.branch_scale=2.0, a factor"),
        (
            "moe",
            {"recurrent_steps": 1, "prelude_layers": 1},
            ("--recurrent-steps", 2),
            "has model.prelude_layers=1; a loop is made of a model with 0",
        ),
    ],
)
def test_parts_that_do_not_fit_are_one_line(
    make_run: Make,
    make_moe: MakeMoE,
    capsys,
    tmp_path,
    kind,
    options,
    flags,
    message,
):
    run = (make_run if kind == "dense" else make_moe)(**options).run
    capsys.readouterr()
    words = ("moe", run, "--output", tmp_path / "run", *flags)
    assert cli.main([str(word) for word in words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not [*tmp_path.iterdir()]
