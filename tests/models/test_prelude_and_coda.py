"""Layers before and after the loop: the equations written out, and every way of running them."""

import itertools

import pytest
import torch

from tests.inference.generation import check_generation
from tests.inference.reference import CONTEXT, prompts
from tests.models.reference import reference_forward
from titan_loop.checkpoint.upcycling import Upcycling
from titan_loop.distributed.activation_checkpointing import RecurrentStepAC
from titan_loop.errors import UserError
from titan_loop.families.ouro.hugging_face.ouro_shape import OuroShape
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.inference.engine import Engine
from titan_loop.inference.exit_decider import exit_steps
from titan_loop.inference.exit_policy import HiddenDifference, StaticStep
from titan_loop.inference.rows import Request
from titan_loop.inference.speculative import SelfSpeculation
from titan_loop.models.family import build_decoder, completed_architecture, decoder_config

ROTATION = 2e-5  # the rotary table is fp32: 1e-7 relative, amplified by 8 layers
STEPS = 4
SHAPES = {  # prelude, looped and coda layers
    "both": (1, 2, 1),
    "prelude": (2, 1, 0),
    "coda": (0, 1, 2),
}
EVERYWHERE = [*itertools.product(SHAPES, ["every_step", "readout"], ["none", "diagonal"])]


def make_model(shape: str, norm_placement: str = "every_step", injection: str = "none", **options):
    prelude, looped, coda = SHAPES[shape]
    torch.manual_seed(0)
    model = build_decoder(
        OuroOptions(
            n_layers=prelude + looped + coda,
            prelude_layers=prelude,
            coda_layers=coda,
            norm_placement=norm_placement,
            injection=injection,
            **options,
        ),
        max_seq_len=CONTEXT,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.double().eval()


def batch():
    tokens = torch.randint(128, (2, 16), generator=torch.Generator().manual_seed(1))
    return tokens, torch.cat([torch.arange(9), torch.arange(7)]).expand(2, -1)


@torch.no_grad()
@pytest.mark.parametrize(("shape", "norm_placement", "injection"), EVERYWHERE)
def test_forward_agrees_with_the_float64_reference(shape, norm_placement, injection):
    model, (tokens, positions) = make_model(shape, norm_placement, injection), batch()
    output = model(tokens, positions, recurrent_steps=STEPS)

    def following(weights, start, states):
        if injection == "none":
            return states[-1]
        rate = weights["injection.weight"].sigmoid()
        return rate * states[-1] + (1 - rate) * start

    read, logits = reference_forward(
        model,
        tokens,
        positions,
        STEPS,
        following,
        norm_at_readout=norm_placement == "readout",
        outside=(SHAPES[shape][0], SHAPES[shape][2]),
    )
    for got, want in zip(output.hidden_RBLD + output.exit_logit_RBL, read + logits, strict=True):
        torch.testing.assert_close(got, want, atol=ROTATION, rtol=0)


@pytest.mark.parametrize(("shape", "norm_placement", "injection"), EVERYWHERE[::3])
def test_generation_equals_the_full_forward(shape, norm_placement, injection):
    check_generation(make_model(shape, norm_placement, injection), steps=STEPS)


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

    def visited(**options) -> int:
        visits.clear()
        Engine(model, recurrent_steps=STEPS, **options).complete(requests)
        return len(visits)

    assert visited() == 3  # the prompt and two tokens, each after its last step
    assert visited(exit_policy=StaticStep(2)) == 3
    assert visited(exit_policy=HiddenDifference(0.0)) == 3 * STEPS
    # The prompt, one draft (the last token needs none) and two verifications.
    assert visited(speculation=SelfSpeculation(1, 1)) == 1 + 1 + 2


@torch.no_grad()
def test_policies_compare_what_the_coda_returns():
    model = make_model("both")
    requests = [Request(prompt=prompt, max_new_tokens=6) for prompt in prompts(5, 2, 7)]
    policy = HiddenDifference(4.0)
    got = Engine(model, recurrent_steps=STEPS, exit_policy=policy).complete(requests)
    for request, completion in zip(requests, got, strict=True):
        states = model(torch.tensor([request.prompt]), recurrent_steps=STEPS).hidden_RBLD
        steps = exit_steps(policy, states, gate=model.gate, readout=model.readout)
        assert completion.steps[0] == int(steps[0, -1])
    assert len({step for completion in got for step in completion.steps}) > 1


@pytest.mark.parametrize("backward_steps", [None, 1])
def test_recomputation_gives_the_same_gradients(backward_steps):
    tokens, positions = batch()
    gradients = []
    for checkpointing in (None, RecurrentStepAC.Config(), RecurrentStepAC.Config(layers="full")):
        model = make_model("both")
        model.recurrence.backward_steps = backward_steps
        if checkpointing is not None:
            checkpointing.build().apply(model)
        states = model(tokens, positions, recurrent_steps=STEPS).hidden_RBLD
        sum((state**3).sum() for state in states).backward()
        found = {
            name.replace("_checkpoint_wrapped_module.", ""): parameter.grad
            for name, parameter in model.named_parameters()
        }
        gradients.append(found)
    for found in gradients[1:]:
        for name, wanted in gradients[0].items():
            assert (found[name] is None) == (wanted is None), name
            if wanted is not None:
                torch.testing.assert_close(found[name], wanted, rtol=1e-11, atol=1e-11)
    prelude, coda = (gradients[0][f"layers.{n}.feed_forward.w1.weight"] for n in (0, 3))
    assert coda is not None
    assert (prelude is None) == (backward_steps == 1)


def test_the_default_is_a_model_without_them():
    plain = decoder_config(OuroOptions(), max_seq_len=8)
    assert plain.architecture()["prelude_layers"] == plain.architecture()["coda_layers"] == 0
    old = {k: v for k, v in plain.architecture().items() if not k.endswith("a_layers")}
    assert completed_architecture({**old}) == plain.architecture()


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


@pytest.mark.parametrize(("prelude", "coda"), [(1, 1), (-1, 0), (0, 2)])
def test_a_loop_of_no_layer_is_refused(prelude, coda):
    options = OuroOptions(prelude_layers=prelude, coda_layers=coda)
    with pytest.raises(UserError, match=rf"prelude_layers={prelude} and model.coda_layers={coda}"):
        decoder_config(options, max_seq_len=8)


def test_export_is_refused_in_one_line():
    architecture = decoder_config(OuroOptions(n_layers=3, coda_layers=1), max_seq_len=8)
    with pytest.raises(UserError, match=r"coda_layers=1: the Ouro format has no") as no:
        OuroShape.from_architecture(architecture.architecture(), recurrent_steps=2, max_positions=8)
    assert "\n" not in str(no.value)


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
    options = OuroOptions(
        n_layers=4,
        prelude_layers=1,
        coda_layers=1,
        recurrent_steps=STEPS,
        residual_scale=scale,
    )
    for layer in build_decoder(options, max_seq_len=8).layers.values():
        for norm in (layer.attention_post_norm, layer.ffn_post_norm):
            torch.testing.assert_close(norm.weight, torch.full((64,), (2 * counted) ** -0.5))
    with pytest.raises(UserError, match=r"model\.residual_scale=visit is unknown; nearest: visits"):
        decoder_config(OuroOptions(residual_scale="visit"), max_seq_len=8)  # pyright: ignore
