"""Inkling's documents, passes, experts and costs."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.contracts.families import random_model
from tests.families.inkling.contract import SMALL
from titan_loop.errors import UserError
from titan_loop.families.inkling.formats import InklingShape
from titan_loop.families.inkling.mixture import Mixture
from titan_loop.families.inkling.model import InklingOptions
from titan_loop.inference.engine import Engine
from titan_loop.inference.rows import Request
from titan_loop.inference.speculative import SelfSpeculation
from titan_loop.models.family import build_decoder, decoder_config

EXACT = 1e-12  # float64


def small() -> Any:
    """Return a model in float64 whose every weight matters."""
    return random_model(InklingOptions(**SMALL), 32)


def tokens(length: int) -> torch.Tensor:
    return torch.randint(128, (1, length), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def test_documents_of_a_window_are_apart_and_padding_changes_nothing():
    model, ids = small(), tokens(20)
    packed = model(ids, torch.tensor([[*range(9), *range(11)]])).hidden_RBLD
    for first, last in ((0, 9), (9, 20)):
        alone, found = model(ids[:, first:last]).hidden_RBLD, [s[:, first:last] for s in packed]
        torch.testing.assert_close(found, [*alone], atol=EXACT, rtol=0)
    padded = torch.cat([ids, torch.zeros(1, 4, dtype=torch.long)], dim=1)
    got = model(padded).hidden_RBLD[-1][:, :20]
    torch.testing.assert_close(got, model(ids).hidden_RBLD[-1], atol=EXACT, rtol=0)


@torch.no_grad()
def test_a_pass_without_gains_is_the_pass_before_without_its_forgetting():
    """Gates at zero: every pass starts again, so all passes are the first."""
    model, ids = small(), tokens(12)
    first, *later = model(ids).hidden_RBLD
    assert all((first - state).abs().max() > 1e-3 for state in later)
    for name, parameter in model.named_parameters():
        if name.endswith(("forget_weight", "gain_weight")):
            parameter.zero_()
    first, *later = model(ids).hidden_RBLD
    assert all(torch.equal(first, state) for state in later)


@pytest.mark.parametrize(("taps", "drafts"), [(20, None), (4, 15)])
def test_decoding_keeps_as_many_inputs_as_taps_and_drafts_reach(taps, drafts):
    few = {"n_layers": 2, "prelude_layers": 1, "coda_layers": 0, "block_layers": 1}
    chosen = InklingOptions(**{**SMALL, "full_layers": (1,), **few}, taps=taps, recurrent_steps=2)
    model, prompt = random_model(chosen, 64), tokens(25)[0].tolist()
    speculation = None if drafts is None else SelfSpeculation(draft_tokens=drafts)
    request = Request(prompt=prompt, max_new_tokens=18)
    (found,) = Engine(model, speculation=speculation).complete([request])
    with torch.no_grad():
        logits_BLV = model.readout(model(torch.tensor([prompt + found.tokens])).hidden_RBLD[-1])
    assert found.tokens == logits_BLV[0, len(prompt) - 1 : -1].argmax(-1).tolist()


def test_a_folder_may_have_no_scale_of_far_queries():
    config = InklingShape.from_architecture(
        decoder_config(InklingOptions(**SMALL, far_alpha=0.0), max_seq_len=32).architecture,
        recurrent_steps=3,
        max_positions=32,
    ).to_config(dtype="float32", bos_id=None, eos_id=None)
    assert InklingShape.from_config(config).far_alpha == 0


def test_any_pass_reaches_the_embedding():
    model, ids = small(), tokens(12)
    model(ids, backward_steps=1).hidden_RBLD[-1].sum().backward()
    assert model.tok_embeddings.weight.grad is not None
    config = model.config
    assert config.layer_visits(3, 1).backward == 2 + 2 + 2
    assert config.layer_visits(3).forward == 2 + 2 * 3 + 2


def test_experts_are_balanced_by_their_loads():
    model: Any = build_decoder(InklingOptions(**SMALL, bias_rate=0.5), max_seq_len=32)
    model.train()
    model(tokens(32), recurrent_steps=2, collect="last").hidden_RBLD[-1].sum().backward()
    model.after_update(None, torch.tensor(True))
    for index, visits in enumerate((1, 1, 2, 2, 1, 1)):
        load_E = model.loads[index]
        assert int(load_E.sum()) == 2 * 32 * visits
        mixture = model.get_submodule(f"layers.{index}.moe")
        assert isinstance(mixture, Mixture)
        moved = mixture.expert_bias_E
        assert moved[load_E.argmin()] > 0 > moved[load_E.argmax()]
        assert abs(float(moved.sum())) < 1e-6
    record = model.record()
    assert record["experts/max_load"] >= 1
    with torch.no_grad():
        model(tokens(32))
    assert not model._counted


def test_flops_count_what_a_token_visits():
    config = decoder_config(InklingOptions(**SMALL, recurrent_steps=2), max_seq_len=32)
    layer = config.layers[2]
    one, two = (config.training_flops(32, steps).matrices for steps in (1, 2))
    looped = sum(
        config.layers[n].matrix_elements + config.layers[n].message_elements for n in (2, 3)
    )
    assert two - one == 6 * looped
    bias, (queries, keys) = layer.attention.bias, layer.attention.widths
    with FlopCounterMode(display=False) as counted:
        bias.build()(torch.zeros(1, 32, 64), torch.zeros(1, 32, 32, dtype=torch.int64), 1.0)
    rest = 64 * (3 * queries + 2 * keys + layer.attention.sink.out_features)
    assert layer.attention_elements - rest == counted.get_total_flops() / (2 * 32)
    assert layer.message_elements == 4 * (2 * 64 * 4 + 2 * 64 * 4)
    assert layer.mixture.active_elements == 64 * 8 + 2 * 3 * 64 * 32
    assert config.idle_parameters(looped=True) == 2 * 6 * 3 * 64 * 32


def test_a_router_in_bf16_scores_in_fp32():
    mixture: Any = small().get_submodule("layers.0.moe").bfloat16()
    x_BLD = torch.randn(1, 8, 64, dtype=torch.bfloat16)
    assert mixture.router(x_BLD, mixture.expert_bias_E)[2].dtype == torch.float32


def test_what_ranks_cannot_share_is_one_line():
    config = decoder_config(InklingOptions(**SMALL), max_seq_len=32)
    for name, degree, words in (
        ("tensor", 2, "does not work"),
        ("context", 2, "does not work"),
        ("expert", 3, "must divide model.experts=8"),
    ):
        degrees = {f"{each}_parallel": 1 for each in ("tensor", "context", "expert")}
        degrees[f"{name}_parallel"] = degree
        with pytest.raises(UserError, match=f"parallelism.{name}_parallel_degree={degree} {words}"):
            config.check_spreading(**degrees)
    with pytest.raises(UserError, match="kv_cache=last is a cache"):
        Engine(small(), kv_cache="last")
