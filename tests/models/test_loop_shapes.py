"""Injection, a norm at the readout, layers outside the loop, kinds of positions: their equations.

Each shape of a loop is compared with the equations written out in float64, and generates as its own
full forward pass.
"""

from typing import Any

import pytest
import torch

from tests.contracts.families import random_model
from tests.inference.generation import check_generation
from tests.inference.reference import CONTEXT, prompts
from tests.models.reference import gradients_of, reference_forward
from titan_loop.checkpoint.upcycling import Upcycling
from titan_loop.distributed.activation_checkpointing import RecurrentStepAC
from titan_loop.errors import UserError
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.inference.engine import Engine
from titan_loop.inference.exit_decider import exit_steps
from titan_loop.inference.exit_policy import ExitPolicy, HiddenDifference, QExit, StaticStep
from titan_loop.inference.rows import Request
from titan_loop.inference.speculative import SelfSpeculation
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import build_decoder, decoder_config

ROTATION = 2e-5  # the rotary table is fp32: 1e-7 relative, amplified by 8 layers
EXACT = 1e-11  # float64, another order of sums
STEPS = 4
READOUT = {"norm_placement": "readout"}
BOTH = {"n_layers": 4, "prelude_layers": 1, "coda_layers": 1}
RELATIVE = {"relative_window": 5, "n_kv_heads": 4}
SHAPES: dict[str, dict[str, Any]] = {
    "loop": {},
    "additive": {"injection": "additive"},
    "diagonal": {"injection": "diagonal"},
    "readout": READOUT,
    "both": BOTH,
    "both, diagonal, readout": {**BOTH, **READOUT, "injection": "diagonal"},
    "prelude, diagonal": {"n_layers": 3, "prelude_layers": 2, "injection": "diagonal"},
    "coda, readout": {"n_layers": 3, "coda_layers": 2, **READOUT},
    "learned": {"positions": "learned", "learned_positions": CONTEXT},
    "none": {"positions": "none"},
    "relative": {"positions": "relative", **RELATIVE},
    "deberta": {"positions": "deberta", **RELATIVE},
    "bias": {"positions": "bias", **RELATIVE},
}


def make_model(shape: str) -> LoopDecoder:
    model = random_model(OuroOptions(**SHAPES[shape]), CONTEXT)
    if "diagonal" in shape:
        torch.nn.init.normal_(model.injection.weight)
    return model


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(128, (2, 16), generator=torch.Generator().manual_seed(1))
    return tokens, torch.cat([torch.arange(9), torch.arange(7)]).expand(2, -1)


def mixed(kind: str, weights: Any, embedding: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    if kind != "diagonal":
        return state + embedding if kind == "additive" else state
    rate = 1 / (1 + (-weights["injection.weight"]).exp())
    return rate * state + (1 - rate) * embedding


@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_agrees_with_the_float64_reference(shape):
    model, (tokens, positions), options = make_model(shape), batch(), SHAPES[shape]
    output = model(tokens, positions, recurrent_steps=STEPS)
    kind = options.get("injection", "none")
    read, logits = reference_forward(
        model,
        tokens,
        positions,
        STEPS,
        lambda weights, start, states: mixed(kind, weights, start, states[-1]),
        norm_at_readout="readout" in shape,
        kind=options.get("positions", "rope"),
        outside=(options.get("prelude_layers", 0), options.get("coda_layers", 0)),
    )
    tolerance = EXACT if "positions" in options else ROTATION
    found = output.hidden_RBLD + output.exit_logit_RBL
    torch.testing.assert_close(found, read + logits, atol=tolerance, rtol=0)


# One shape has all three.
@pytest.mark.parametrize(
    "shape", [name for name in SHAPES if name not in ("both", "diagonal", "readout")]
)
def test_generation_equals_the_full_forward(shape):
    check_generation(make_model(shape))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", ["additive", "diagonal"])
def test_truncated_steps_still_train_the_embedding_they_read(kind, recompute):
    """Only the states of earlier steps are constants; the last step's own e is not."""
    model, (tokens, positions) = make_model(kind), batch()
    weights = dict(model.named_parameters())
    embedding = model.tok_embeddings(tokens)
    context = model.make_context(tokens, positions)
    states = list(model(tokens, positions, recurrent_steps=STEPS - 1).hidden_RBLD)
    layers, hidden = model.layers.values(), mixed(kind, weights, embedding, states[-1].detach())
    for layer in layers:
        hidden = layer(hidden, context)
    (model.norm(hidden) ** 3).sum().backward()
    want = gradients_of(model)

    model.zero_grad()
    if recompute:
        RecurrentStepAC.Config().build().apply(model)
    (
        model(tokens, positions, recurrent_steps=STEPS, backward_steps=1).hidden_RBLD[-1] ** 3
    ).sum().backward()
    assert want["tok_embeddings.weight"].abs().sum() > 0
    torch.testing.assert_close(gradients_of(model), want, rtol=EXACT, atol=EXACT)


def test_the_norm_has_the_gradient_of_all_readouts_also_of_constant_steps():
    """Truncated at the last step, the norm still trains on every state that is read."""
    model, (tokens, positions) = make_model("readout"), batch()
    RecurrentStepAC.Config().build().apply(model)
    output = model(tokens, positions, recurrent_steps=STEPS, backward_steps=1)
    for state in output.hidden_RBLD:
        state.square().sum().backward(retain_graph=True)
    # Of ‖w ⊙ n‖² the gradient is 2 w ⊙ n²: with n = read / w a sum over states and tokens.
    weight = model.norm.weight.detach()
    want = sum(2 * (s.detach() / weight).square().sum((0, 1)) * weight for s in output.hidden_RBLD)
    torch.testing.assert_close(model.norm.weight.grad, want)


@torch.no_grad()
@pytest.mark.parametrize(
    ("shape", "policy"),
    [("readout", HiddenDifference(2.5)), ("readout", QExit(0.7)), ("both", HiddenDifference(4.0))],
)
def test_exit_policies_compare_what_is_read(shape: str, policy: ExitPolicy):
    """States that went through the coda and the norm, as in a full forward pass."""
    model = make_model(shape)
    requests = [Request(prompt=prompt, max_new_tokens=8) for prompt in prompts(5, 2, 7)]
    got = Engine(model, recurrent_steps=STEPS, exit_policy=policy).complete(requests)
    for request, completion in zip(requests, got, strict=True):
        states = model(torch.tensor([request.prompt]), recurrent_steps=STEPS).hidden_RBLD
        steps = exit_steps(policy, states, gate=model.gate, readout=model.readout)
        assert completion.steps[0] == int(steps[0, -1])
    assert len({step for completion in got for step in completion.steps}) > 1


@torch.no_grad()
@pytest.mark.parametrize("kv_cache", ["last", "first", "averaged"])
def test_a_shared_cache_keeps_one_visit_of_the_layers_outside(kv_cache):
    """At R = 1 all strategies are one; with more steps rows in company decode as they do alone."""
    model = make_model("both")
    requests = [Request(prompt=prompt, max_new_tokens=8) for prompt in prompts(5, 2, 7)]
    engine = Engine(model, recurrent_steps=1, kv_cache=kv_cache)
    assert engine.complete(requests) == Engine(model, recurrent_steps=1).complete(requests)
    engine = Engine(model, recurrent_steps=STEPS, kv_cache=kv_cache)
    assert engine.complete(requests, rows=2) == [engine.complete([r])[0] for r in requests]
    full = Engine(model, recurrent_steps=STEPS)
    full.complete(requests)
    assert engine.work.cache_bytes < full.work.cache_bytes
    rows, capacity, width = 3, 15, 4 * 16
    assert full.work.cache_bytes == 2 * 8 * (2 * STEPS + 2) * rows * capacity * width


@torch.no_grad()
def test_the_coda_runs_only_where_its_state_is_read():
    model, visits = make_model("both"), []
    model.layers["3"].register_forward_hook(lambda *_: visits.append(1))
    requests = [Request(prompt=prompts(5)[0], max_new_tokens=3)]

    def visited(**options: Any) -> int:
        visits.clear()
        Engine(model, recurrent_steps=STEPS, **options).complete(requests)
        return len(visits)

    assert visited() == 3  # the prompt and two tokens, each after its last step
    assert visited(exit_policy=StaticStep(2)) == 3
    assert visited(exit_policy=HiddenDifference(0.0)) == 3 * STEPS
    # The prompt, one draft (the last token needs none) and two verifications.
    assert visited(speculation=SelfSpeculation(1, 1)) == 1 + 1 + 2


@pytest.mark.parametrize("backward_steps", [None, 1])
def test_recomputation_around_layers_outside_gives_the_same_gradients(backward_steps):
    tokens, positions = batch()
    gradients = []
    for checkpointing in (None, RecurrentStepAC.Config(), RecurrentStepAC.Config(layers="full")):
        model = make_model("both")
        if checkpointing is not None:
            checkpointing.build().apply(model)
        depth = {"recurrent_steps": STEPS, "backward_steps": backward_steps}
        states = model(tokens, positions, **depth).hidden_RBLD
        sum((state**3).sum() for state in states).backward()
        gradients.append(gradients_of(model))
    for found in gradients[1:]:
        torch.testing.assert_close(found, gradients[0], rtol=EXACT, atol=EXACT)
    prelude, coda = (gradients[0][f"layers.{n}.feed_forward.w1.weight"] for n in (0, 3))
    assert coda is not None
    assert (prelude is None) == (backward_steps == 1)


def test_flops_count_a_coda_for_every_state_that_is_read():
    def flops(gate: bool, steps: int, backward: int | None = None, **outside: int) -> float:
        options = OuroOptions(n_layers=4, exit_gate=gate, **outside)
        flops = decoder_config(options, max_seq_len=8).training_flops(64, steps, "all", backward)
        return flops.matrices

    layer = flops(False, 1) / 4
    outside = {"prelude_layers": 1, "coda_layers": 1}
    assert flops(False, 4, **outside) == (1 + 4 * 2 + 1) * layer
    assert flops(True, 4, **outside) == (1 + 4 * 2 + 4) * layer
    # Of two steps that the backward pass does not reach, a third is left; of the prelude likewise.
    assert 3 * flops(True, 4, 2, **outside) == (1 + 2 * 2 + 3 * 2 * 2 + 3 * 4) * layer


def test_upcycling_copies_the_looped_layers_alone():
    saved = {"n_layers": 4, "prelude_layers": 1, "coda_layers": 1}
    assert Upcycling(6).sources(saved) == [0, 1, 2, 1, 2, 3]
    assert Upcycling(6, mode="interleaved").sources(saved) == [0, 1, 1, 2, 2, 3]
    with pytest.raises(UserError, match=r"beside 2 outside the loop; use 6, 8 or more"):
        Upcycling(7).sources(saved)


@pytest.mark.parametrize(
    ("scale", "counted"), [("layers", 4), ("visits", 1 + 2 * STEPS + 1), ("none", 1 / 2)]
)
def test_the_initial_gain_of_branches_counts_layers_or_their_visits(scale, counted):
    options = OuroOptions(**BOTH, recurrent_steps=STEPS, residual_scale=scale)
    for layer in build_decoder(options, max_seq_len=8).layers.values():
        for norm in (layer.attention_post_norm, layer.ffn_post_norm):
            torch.testing.assert_close(norm.weight, torch.full((64,), (2 * counted) ** -0.5))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["relative", "deberta", "bias"])
def test_positions_with_fewer_keys_than_queries_repeat_them(kind):
    options = OuroOptions(positions=kind, n_kv_heads=2, relative_window=5)
    grouped, whole = build_decoder(options, max_seq_len=CONTEXT).double().eval(), make_model(kind)
    weights = whole.state_dict()
    for name, weight in grouped.state_dict().items():
        if name.endswith(("wk.weight", "wv.weight")):
            weights[name] = weight.normal_().view(2, 1, 16, -1).repeat(1, 2, 1, 1).flatten(0, 2)
        else:
            weight.copy_(weights[name])
    whole.load_state_dict(weights)
    one, other = (model(batch()[0]).hidden_RBLD[-1] for model in (whole, grouped))
    torch.testing.assert_close(one, other, atol=EXACT, rtol=0)


@pytest.mark.parametrize("name", ["tensor_parallel", "context_parallel"])
def test_relative_positions_are_not_spread(name):
    config = decoder_config(OuroOptions(positions="relative", relative_window=4), max_seq_len=32)
    degrees = {"tensor_parallel": 1, "context_parallel": 1, "expert_parallel": 1}
    config.check_spreading(**degrees)
    with pytest.raises(UserError, match=f"parallelism.{name}_degree=2 does not work with"):
        config.check_spreading(**degrees | {name: 2})
