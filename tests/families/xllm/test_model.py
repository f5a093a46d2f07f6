"""xLLM-Loop's architecture: costs, published sizes, starts, generation, refusals."""

import math

import pytest
import torch

from tests.contracts.families import random_model
from titan_loop.families.xllm.depth import capped_depths
from titan_loop.families.xllm.model import XllmOptions
from titan_loop.models.family import build_decoder, decoder_config
from titan_loop.training.depth_schedule import RecurrenceConfig, depths_over
from titan_loop.training.schedule import Schedule
from train_configs.xllm.recipes import PART_ONE, PART_TWO

BATCH_TOKENS = 4_194_304
STOPS = {
    "dense_d28": 7137, "dense_d112": 17533, "dense_ouro": 7137, "dense_middle": 7137,
    "dense_ouro_raw_injection": 7148, "dense_middle_prelude_injection": 7148,
    "dense_huginn": 7148, "dense_shared_hl": 7148, "dense_split_hl": 7148,
    "dense_split_hl_x2": 7148,
}  # fmt: skip
"""Updates at 20 tokens a parameter, as their guide to Part I prints them."""


def test_a_coordinate_check_of_an_unchanged_model_moves_nothing():
    """The start is noise, drawn anew in every training pass."""
    model = random_model(XllmOptions(start_state="normal"), 64)
    tokens = torch.arange(24).reshape(2, 12)
    assert torch.equal(*(model(tokens).hidden_RBLD[-1] for _ in range(2)))
    model.train()
    assert not torch.equal(*(model(tokens).hidden_RBLD[-1] for _ in range(2)))


@pytest.mark.parametrize("name", STOPS)
def test_the_published_stops_follow_from_the_parameters(name):
    model = build_decoder(PART_ONE[name], max_seq_len=8, device="meta")
    parameters = sum(p.numel() for p in model.parameters())
    assert math.ceil(20 * parameters / BATCH_TOKENS) == STOPS[name]


def published_units(dim: int, heads: int, kv_heads: int, wide: int, seq_len: int) -> float:
    """Return multiply-adds of one block as their code counts them, element-wise work included."""
    return 4 * dim + 2 * dim * (heads + kv_heads) * 64 + heads * 64 * seq_len + 3 * dim * wide


@pytest.mark.parametrize("name", ["s_fixed_r5", "s_fixed_pln5", "s_orthoinj", "s_huginn_linear"])
def test_expected_flops_are_the_published_ones_less_their_element_wise_work(name):
    options, (dim, wide, seq_len) = PART_TWO[name].options, (1536, 4352, 8192)
    backward = 5 if name == "s_fixed_r5" else 10
    recurrence = RecurrenceConfig(steps=Schedule.constant(5), backward_steps=5)
    depths = {5: 1.0}
    if backward == 10:
        recurrence = RecurrenceConfig(
            steps=Schedule.constant(5), poisson=True, lognormal_sigma=0.5, backward_steps=10
        )
        depths = dict(enumerate(capped_depths(5, 0.5, 64), start=1))
    block = published_units(dim, 24, 6, wide, seq_len)
    injection = {"linear": 2 * dim**2}.get(options.injection, dim**2)
    update = 2 * block + injection
    trained = 2 * block + dim * 64_256
    trained += sum(p * min(r, backward) * update for r, p in depths.items())
    forward = sum(p * max(0, r - backward) * update for r, p in depths.items())
    want = 6 * trained + 2 * forward
    norms = 4 * dim * (2 + 2 * sum(p * min(r, backward) for r, p in depths.items()))
    norms = 6 * norms + 2 * 4 * dim * 2 * sum(p * max(0, r - backward) for r, p in depths.items())
    ((steps, reached),) = depths_over(recurrence, 1_000_000)
    config = decoder_config(options, max_seq_len=8)
    # They count attention once for each key, torchtitan twice: scores and values.
    found = config.training_flops(seq_len, steps, backward_steps=reached)
    found = found.matrices + found.attention / 2 + found.readouts
    assert found == pytest.approx(want - norms, rel=2e-6)
