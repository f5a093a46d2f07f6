"""A loop of Llama's blocks as a LoopCoder: equal where the window holds the text, and refusals."""

import pytest
import torch

from tests.contracts.folders import opened
from tests.support.command_lines import refused
from tests.support.llama_runs import VOCABULARY, Make, maker
from titan_loop.cli import main as cli
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.dense import DenseOptions

TOKENS = torch.arange(40)[None] * 7 % VOCABULARY


@pytest.fixture(scope="module")
def make_loop(tmp_path_factory: pytest.TempPathFactory) -> Make:
    return maker(DenseOptions, tmp_path_factory)


@torch.no_grad()
def logits(model: LoopDecoder) -> torch.Tensor:
    model = model.double()
    return model.readout(model(TOKENS, recurrent_steps=2).hidden_RBLD[-1])


def test_with_closed_gates_it_is_the_loop_as_far_as_the_window_reaches(make_loop: Make, tmp_path):
    made = make_loop(hidden_dim=64)
    want = logits(made.model)
    for window, gate in ((40, 1e-6), (8, 1e-6), (40, 0.5)):
        output = tmp_path / f"{window}-{gate}"
        words = ("loopcoder", made.run, "--output", output, "--window", window, "--gate", gate)
        assert cli.main([str(word) for word in words]) == 0
        far = (logits(opened(output)) - want).abs().amax(-1)[0]
        assert far[:8].max() < 1e-5 or gate == 0.5
        assert (far[8:].max() < 1e-5) == ((window, gate) == (40, 1e-6))


@pytest.mark.parametrize(
    ("options", "flags", "message"),
    [
        ({}, ("--gate", 1), "--gate=1.0 must be above 0 and below 1"),
        ({}, ("--window", 0), "--window=0 must be at least 1"),
        ({"attention_biases": "qkv"}, (), "a LoopCoder is made of Llama's blocks"),
        ({"n_layers": 3, "prelude_layers": 1}, (), "model.prelude_layers=1"),
    ],
)
def test_what_does_not_fit_is_one_line(make_loop: Make, capsys, tmp_path, options, flags, message):
    run = make_loop(**options).run
    words = ("loopcoder", run, "--output", tmp_path / "run", *flags)
    assert message in refused(capsys, *words)
    assert not [*tmp_path.iterdir()]
