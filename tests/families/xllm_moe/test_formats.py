"""xLLM-Loop's mixtures of experts: released folders, equations, costs, counting."""

import math

import pytest
import torch

from tests.families.xllm.conftest import write_released
from tests.families.xllm.reference import fields, random_weights
from tests.families.xllm.test_formats import MODELS as DENSE
from tests.families.xllm.test_formats import check_answers, export_again
from titan_loop.errors import UserError
from titan_loop.families.xllm_moe.formats import XllmMoEShape
from titan_loop.families.xllm_moe.model import XllmMoEDecoder, XllmMoEOptions
from titan_loop.models.family import build_decoder, decoder_config

__all__ = ["write_released"]  # a fixture

EXPERTS = {
    "num_experts": 5,
    "num_activated_experts": 2,
    "num_shared_experts": 0,
    "expert_inter_dim": 16,
    "moe_router_score_func": "sigmoid",
    "moe_router_scaling_factor": None,
}
MODELS = {
    **{
        name: DENSE[name] | EXPERTS
        for name in ("ouro", "middle", "diagonal", "shared", "ouro injected", "unrolled")
    },
    "feed-forward": fields(**EXPERTS, arch="transformer", loop_times=1),
    "middle input": fields(**EXPERTS, huginn_state_init="input"),
    "shared expert": fields(
        **{
            **EXPERTS,
            "num_shared_experts": 2,
            "expert_inter_dim": 24,  # two of them are not as wide as the model
            "moe_router_scaling_factor": 1.5,
        }
    ),
    "softmax": fields(**{**EXPERTS, "moe_router_score_func": "softmax"}),
    "one": fields(**{**EXPERTS, "num_activated_experts": 1}),
}
PLAIN = {"ouro", "middle", "feed-forward"}
TOKENS_PER_STEP = 4_194_304  # of the released recipes


@pytest.mark.parametrize("name", MODELS)
def test_an_imported_mixture_answers_as_the_equations(name, write_released, tmp_path):
    config = MODELS[name]
    weights = random_weights(config)
    family = "moe" if name in PLAIN else "xllm_moe"
    check_answers(write_released(config, weights), weights, config, family, tmp_path / "run")


@pytest.mark.parametrize("name", ["diagonal", "one", "shared expert", "unrolled"])
def test_export_writes_their_layout_again(name, write_released, tmp_path):
    weights = random_weights(MODELS[name])
    export_again(write_released(MODELS[name], weights), "xllm-moe", tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 1}, "normalise_scores=True with model.top_k=1"),
        ({"normalise_scores": False}, "normalise_scores=False with model.top_k=2"),
        ({"injection": "linear"}, "no mixture of experts with model.injection=orthogonal"),
        ({"state_norm": True}, "or with norms in the loop"),
    ],
)
def test_a_mixture_that_their_code_would_compute_otherwise_is_not_exported(options, message):
    config = decoder_config(XllmMoEOptions(experts=4, **{"top_k": 2, **options}), max_seq_len=16)
    with pytest.raises(UserError, match=message):
        XllmMoEShape.from_architecture(config.architecture, recurrent_steps=2, max_positions=8192)


@pytest.mark.parametrize(
    ("options", "stop_step"),
    [
        ({"prelude_layers": 8, "coda_layers": 8}, 7_469),
        ({"prelude_layers": 8, "coda_layers": 8, "n_layers": 112, "untied_steps": 8}, 18_825),
    ],
)
def test_active_parameters_are_those_of_the_released_models(options, stop_step):
    """Their runs stop at 20 tokens a parameter that acts on a token."""
    config = decoder_config(
        XllmMoEOptions(size="730m", experts=25, expert_hidden_dim=2432, **options), max_seq_len=8
    )
    assert isinstance(config, XllmMoEDecoder.Config)
    with torch.device("meta"):
        total = sum(parameter.numel() for parameter in config.build().parameters())
    assert math.ceil(20 * (total - config.idle_parameters()) / TOKENS_PER_STEP) == stop_step


def test_loads_are_counted_for_every_update_and_balanced():
    """A step of low_cycles = 2 visits the layers of the low state twice."""
    torch.manual_seed(0)
    options = XllmMoEOptions(experts=4, states="split", low_cycles=2, recurrent_steps=3)
    model = build_decoder(options, max_seq_len=16)
    assert isinstance(model, XllmMoEDecoder)
    model(torch.randint(128, (2, 16)), collect="last")
    model.after_update(None, torch.ones(()))
    counted = {key: int(load_E.sum()) for key, load_E in model.loads.items()}
    visit = 2 * 16 * 2  # tokens, and experts of each
    once = {(layer, None): visit for layer in (0, 3)}
    low, high = sorted({counted[layer, 1] for layer in (1, 2)}, reverse=True)
    assert (low, high) == (2 * visit, visit)
    assert {key: load for key, load in counted.items() if key[1] is None} == once
    assert len(counted) == 2 + 2 * 3
    bias_SE = model.get_buffer("layers.1.moe.expert_bias_SE")
    assert bias_SE.abs().max() >= options.bias_rate
    assert float(bias_SE.sum()) == pytest.approx(0, abs=1e-9)
