"""Llama blocks in the rest of the stack: generation, exits without a gate, upcycling, plan."""

import pytest
import torch

from tests.inference.generation import check_generation
from titan_loop.checkpoint.tensors import CheckpointReader
from titan_loop.cli import main as cli
from titan_loop.inference.exit_policy import Confidence
from titan_loop.models.family import build_decoder
from titan_loop.runs.saved_run import SavedRun


@pytest.mark.parametrize(
    "options",
    [{}, {"norm_placement": "every_step"}, {"n_layers": 4, "prelude_layers": 1, "coda_layers": 1}],
    ids=["loop", "norm between", "prelude and coda"],
)
def test_generation_is_the_full_forward_pass_at_every_exit(make_run, options):
    model = make_run(**options).model.double()
    check_generation(model, steps=3, leaves=Confidence(0.03))


def test_twice_the_layers_are_twice_the_steps(make_run, tmp_path):
    made = make_run(recurrent_steps=4)
    arguments = ["upcycle", str(made.run), "--output", str(tmp_path / "wide"), "--layers", "4"]
    assert cli.main([*arguments, "--moments", "reset"]) == 0
    run = SavedRun.open(tmp_path / "wide")
    wide = build_decoder(run.model_options, max_seq_len=64).eval()
    reader = CheckpointReader(run.checkpoint().path)
    wide.load_state_dict({name: reader.read(name) for name in wide.state_dict()})
    tokens = torch.arange(40)[None] * 7 % 300
    want = made.model(tokens, recurrent_steps=4).hidden_RBLD[-1]
    assert torch.equal(wide(tokens, recurrent_steps=2).hidden_RBLD[-1], want)
