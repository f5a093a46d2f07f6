"""FLOPs: torchtitan's own number at R = 1, and the terms a loop adds."""

import pytest
import titan_loop.compat  # noqa: F401 (must come before torchtitan)
import torch
from torch.utils.flop_counter import FlopCounterMode
from torchtitan.models.utils import get_dense_model_nparams_and_flops

from titan_loop.families.ouro.model import OuroOptions
from titan_loop.models.family import decoder_config

SEQ_LEN = 512


def test_baseline_equals_torchtitan_up_to_norm_weights():
    config = decoder_config(
        OuroOptions(size="quickstart", recurrent_steps=1, exit_gate=False), max_seq_len=SEQ_LEN
    )
    with torch.device("meta"):
        model = config.build()
    layer = config.layers[0]
    _, upstream = get_dense_model_nparams_and_flops(
        model,
        n_layers=len(config.layers),
        n_heads=layer.attention.n_heads,
        head_dims=2 * config.dim // layer.attention.n_heads,
        seq_len=SEQ_LEN,
    )
    # Upstream charges every weight but the embedding's; norms are no matrix products.
    norms = sum(p.numel() for name, p in model.named_parameters() if name.endswith("norm.weight"))
    assert norms == config.dim * (4 * len(config.layers) + 1)
    assert config.training_flops(SEQ_LEN, 1).total == upstream - 6 * norms


@pytest.mark.parametrize(
    ("steps", "readouts", "gate"), [(1, 1, False), (4, 4, True), (8, 1, False)]
)
def test_each_term_by_hand(steps: int, readouts: int, gate: bool):
    shape = {"n_layers": 6, "dim": 256, "n_heads": 16, "hidden_dim": 704, "vocab_size": 2048}
    config = decoder_config(OuroOptions(exit_gate=gate, **shape), max_seq_len=SEQ_LEN)
    per_layer = 6 * (4 * 256 * 256 + 3 * 256 * 704) + 12 * 16 * 16 * SEQ_LEN
    expected = steps * 6 * per_layer + 6 * readouts * 256 * 2048 + (6 * steps * 256 if gate else 0)
    assert config.training_flops(SEQ_LEN, steps).total == expected


def test_a_frozen_language_model_runs_forward_only():
    config = decoder_config(OuroOptions(size="quickstart"), max_seq_len=SEQ_LEN)
    steps = 4
    gate = steps * config.dim  # multiply-adds a token
    whole = config.training_flops(SEQ_LEN, steps).total - 6 * gate
    gate_only = config.training_flops(SEQ_LEN, steps, "exit_gate").total - 4 * gate
    assert 3 * gate_only == whole


def test_steps_without_backward_run_forward_only():
    """Two of four steps: a third of their layers' FLOPs, two thirds of their readout and gate."""
    options = OuroOptions(size="quickstart", exit_gate=False)
    config = decoder_config(options, max_seq_len=SEQ_LEN)
    readout = 6 * config.dim * config.vocab_size
    step = config.training_flops(SEQ_LEN, 2).total - config.training_flops(SEQ_LEN, 1).total
    truncated = config.training_flops(SEQ_LEN, 4, backward_steps=2).total
    assert 3 * truncated == (2 + 2 * 3) * step + 3 * readout
    config = decoder_config(OuroOptions(size="quickstart"), max_seq_len=SEQ_LEN)
    outside = readout + 6 * config.dim
    truncated = config.training_flops(SEQ_LEN, 4, backward_steps=2).total
    assert 3 * truncated == (2 + 2 * 3) * step + (2 * 2 + 2 * 3) * outside
    whole = config.training_flops(SEQ_LEN, 4).total
    assert config.training_flops(SEQ_LEN, 4, backward_steps=9).total == whole
    # What trains between loop and readout needs the gradient of every state.
    for trains in ({"norm_placement": "readout"}, {"coda_layers": 1}):
        options = OuroOptions(size="quickstart", **trains)  # type: ignore[arg-type]
        config = decoder_config(options, max_seq_len=SEQ_LEN)
        truncated = config.training_flops(SEQ_LEN, 4, backward_steps=2)
        assert truncated.readouts + truncated.gate == 4 * outside


@pytest.mark.parametrize("positions", ["relative", "deberta", "bias"])
def test_tables_of_distances_count_as_matrices(positions: str):
    """The products that torch counts in a head's scores, forward and backward."""
    options = OuroOptions(positions=positions, relative_window=8, recurrent_steps=1)
    config = decoder_config(options, max_seq_len=16)
    plain = decoder_config(OuroOptions(recurrent_steps=1), max_seq_len=16)
    scores = config.layers[0].attention.distance_scores
    heads = torch.zeros(1, 16, scores.n_heads, scores.head_dim, requires_grad=True)
    distance = torch.zeros(1, 16, 16, dtype=torch.int64)
    with FlopCounterMode(display=False) as counted:
        scores.build()(heads, heads, distance).sum().backward()
    more = config.training_flops(16, 1).total - plain.training_flops(16, 1).total
    assert more == len(config.layers) * counted.get_total_flops() / 16
