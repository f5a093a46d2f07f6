"""xLLM-Loop's architecture: costs, published sizes, starts, generation, refusals."""

import math

import pytest
import torch

from tests.inference.generation import check_generation
from titan_loop.analysis.coordinates import looked_at
from titan_loop.errors import UserError
from titan_loop.families.xllm.decoder import XllmDecoder
from titan_loop.families.xllm.depth import capped_depths
from titan_loop.families.xllm.model import SIZES, XllmOptions
from titan_loop.inference.exit_policy import Confidence
from titan_loop.models.family import build_decoder, decoder_config
from titan_loop.training.depth_schedule import RecurrenceConfig, depths_over
from titan_loop.training.schedule import Schedule
from train_configs.xllm.recipes import PART_ONE, PART_TWO

BATCH_TOKENS = 4_194_304
STOPS = {
    "dense_d28": 7137,
    "dense_d112": 17533,
    "dense_ouro": 7137,
    "dense_middle": 7137,
    "dense_ouro_raw_injection": 7148,
    "dense_middle_prelude_injection": 7148,
    "dense_huginn": 7148,
    "dense_shared_hl": 7148,
    "dense_split_hl": 7148,
    "dense_split_hl_x2": 7148,
}
"""Updates at 20 tokens a parameter, as their guide to Part I prints them."""


def make(**options) -> XllmDecoder:
    """Return a model in float64 whose every weight matters."""
    torch.manual_seed(3)
    model = build_decoder(XllmOptions(**options), max_seq_len=64).double().eval()
    assert isinstance(model, XllmDecoder)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.15)
    return model


def test_a_coordinate_check_of_an_unchanged_model_moves_nothing():
    """The start is noise, drawn anew in every training pass."""
    model = make(start_state="normal").train()
    tokens = torch.arange(24).reshape(2, 12)
    for first, second in zip(looked_at(model, tokens), looked_at(model, tokens), strict=True):
        assert torch.equal(first, second)
    assert model.training
    assert not torch.equal(*(model(tokens).hidden_RBLD[-1] for _ in range(2)))


@pytest.mark.parametrize(
    ("size", "shape"),
    [
        # Layers, width, heads, heads of keys, width of the feed-forward, vocabulary, R.
        ("s", (4, 1536, 24, 6, 4352, 64_256, 5)),
        ("m", (4, 3072, 48, 12, 8704, 64_256, 5)),
        ("l", (4, 6144, 96, 24, 17_408, 64_256, 5)),
        ("730m", (28, 1536, 24, 6, 4352, 250_624, 8)),
    ],
)
def test_sizes_are_as_published(size, shape):
    own = SIZES[size]
    assert shape == (
        *(own.n_layers, own.dim, own.n_heads, own.n_kv_heads),
        *(own.hidden_dim, own.vocab_size, own.recurrent_steps),
    )


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


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"injection": "orthogonal", "start_state": "zero"},
        {"injection": "linear", "state_norm": True},
        {"states": "shared", "low_cycles": 2},
        {"states": "split", "core_passes": 2, "low_cycles": 1},
        {"untied_steps": 2, "prelude_norm": True},
    ],
)
def test_generation_is_the_full_forward_pass_at_every_exit(options):
    check_generation(make(exit_gate=False, **options), leaves=Confidence(0.08))


@pytest.mark.parametrize(
    ("options", "updates", "visits"),
    [
        ({"core_passes": 3}, [([1, 2], False)], 6),
        ({"n_layers": 6, "untied_steps": 2}, [([1, 2], False), ([3, 4], False)], 4),
        ({"states": "shared", "low_cycles": 2}, 2 * [([1, 2], True)] + [([1, 2], False)], 6),
        ({"states": "split", "low_cycles": 2}, 2 * [([2], True)] + [([1], False)], 3),
    ],
)
def test_a_step_updates_its_states_in_order(options, updates, visits):
    model = make(**options)
    config = model.config
    assert [([*layers], is_low) for layers, is_low in config.updates] == updates
    assert config.visits == visits
    assert model.cache_slots(5) == (5, visits, 2)
    assert config.layer_visits(5) == (5 * visits + 2, 5 * visits + 2)
    assert config.layer_visits(5, 3) == (5 * visits + 2, 3 * visits + 2)
    assert config.layer_visits(5, 9) == config.layer_visits(5)


def test_what_is_computed_stands_in_the_record():
    plain = make(start_state="zero").config
    record = plain.architecture()
    chosen = ("states", "low_cycles", "core_passes", "untied_steps", "start_state")
    assert [record[name] for name in chosen] == ["one", 3, 1, 1, "zero"]
    others = ("prelude_norm", "state_norm", "student")
    assert [record[name] for name in others] == [False, False, 0]
    changed = make(start_state="zero", prelude_norm=True, state_norm=True, student=2).config
    assert [changed.architecture()[name] for name in others] == [True, True, 2]
    assert not plain.draws
    assert make(start_state="normal").config.draws
    assert make(start_state="zero", dropout=0.1).config.draws


def test_noise_repeats_in_evaluation_alone():
    model, tokens = make(), torch.arange(12)[None]
    once, again = (model(tokens).hidden_RBLD[-1] for _ in range(2))
    assert torch.equal(once, again)
    rows = model(tokens.expand(3, -1)).hidden_RBLD[-1]
    torch.testing.assert_close(rows, once.expand(3, -1, -1))
    model.train()
    context = model.make_context(tokens)
    first, second = (model.start(tokens, context).hidden_BLD for _ in range(2))
    assert not torch.equal(first, second)


def test_both_kinds_of_noise_have_the_published_scale():
    model = build_decoder(XllmOptions(dim=512, n_heads=8), max_seq_len=256)
    tokens = torch.zeros(4, 256, dtype=torch.long)
    for mode in (True, False):
        state = model.train(mode).start(tokens, model.make_context(tokens)).hidden_BLD
        assert float(state.std()) * 512**0.5 == pytest.approx(1, rel=0.02)
        assert abs(float(state.mean())) * 512**0.5 < 0.02


def test_initial_weights():
    model = build_decoder(XllmOptions(dim=256, n_heads=8, injection_step=0.8), max_seq_len=8)
    assert torch.equal(model.injection.weight, torch.eye(256))
    step = torch.nn.functional.softplus(model.injection.step_bias)
    torch.testing.assert_close(step, torch.full((256,), 0.8))
    layer = model.layers["1"]
    for matrix in (layer.attention.wo, layer.feed_forward.w2, layer.attention.qkv_linear.wq):
        assert float(matrix.weight.detach().std()) == pytest.approx(0.02 * 0.986, rel=0.03)
    for table in (model.tok_embeddings, model.lm_head):
        assert float(table.weight.detach().std()) * 16 == pytest.approx(0.986, rel=0.03)


@pytest.mark.parametrize("injection", ["diagonal", "linear"])
def test_an_injection_follows_the_width_as_other_matrices_do(injection):
    wide = XllmOptions(dim=256, n_heads=8, injection=injection, base_width=64)
    model = build_decoder(wide, max_seq_len=8)
    group = model.parameter_group("injection.weight", model.injection.weight)
    assert (group.width_ratio, group.decays, group.is_hidden_matrix) == (4.0, True, True)
    if injection == "linear":
        std = float(model.injection.weight.detach().std())
        assert std == pytest.approx(0.01 * 0.986, rel=0.03)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"injection": "orthogonl"}, "model.injection=orthogonl is unknown"),
        ({"start_state": "noise"}, "model.start_state=noise is unknown"),
        ({"injection": "none"}, "model.injection=none with model.start_state=normal"),
        ({"low_cycles": 0}, "model.low_cycles=0 must be at least 1"),
        ({"core_passes": 0}, "model.core_passes=0 must be at least 1"),
        ({"injection_step": 0.0}, "model.injection_step=0.0 must be above 0"),
        ({"injection_step": 100.0}, "model.injection_step=100.0 must be above 0 and below 100"),
        (
            {"injection": "none", "start_state": "input", "prelude_norm": True},
            "model.injection=none with model.start_state=input and model.prelude_norm=True",
        ),
        ({"student": -1}, "model.student=-1 must be 0 or more"),
        ({"student": 1, "states": "shared"}, "model.student=1 predicts the one state"),
        (
            {"student": 1, "injection": "none", "start_state": "input"},
            "model.student=1 predicts the one state",
        ),
        ({"states": "split", "n_layers": 5}, "model.states=split needs an even number of looped"),
        ({"untied_steps": 3}, "model.untied_steps=3 must divide the 2 looped layers"),
        ({"untied_steps": 2, "states": "shared"}, "model.untied_steps=2 must divide"),
    ],
)
def test_mistakes_are_one_line(options, message):
    with pytest.raises(UserError, match=f"^{message}"):
        build_decoder(XllmOptions(**options), max_seq_len=8)


@pytest.mark.parametrize(
    "options",
    [
        {"injection_step": 99.0},
        {"injection_step": 0.01},
        {"low_cycles": 1, "states": "shared"},
        {"core_passes": 1, "untied_steps": 1},
        {"untied_steps": 2},
        {"states": "split"},
        {"injection": "none", "start_state": "input"},
        {"student": 1},
    ],
)
def test_bounds_are_accepted(options):
    assert decoder_config(XllmOptions(**options), max_seq_len=8).dim == 64
