"""Functions at (step, layer, site): what they read and change, and that they leave no trace."""

import json
import logging
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

from tests.distributed.test_compile import DYNAMO_WARNS, parallelized
from tests.inference.generation import check_generation
from tests.inference.reference import make_model, prompts
from tests.support.tiny import tiny_config, train_run
from titan_loop.distributed.activation_checkpointing import RecurrentStepAC
from titan_loop.errors import UserError
from titan_loop.inference.engine import Engine
from titan_loop.inference.exit_policy import QExit
from titan_loop.inference.hooks import AFTER_LAYERS, Hooks, hook_names
from titan_loop.inference.rows import Request
from titan_loop.models.decoder import LoopDecoder
from titan_loop.training.callback import Callback, TrainingState

TOKENS = torch.tensor(prompts(10, 10))
POLICIES = [
    FullAC.Config(),
    SelectiveAC.Config(),
    RecurrentStepAC.Config(),
    RecurrentStepAC.Config(layers="full"),
]
SHIFT = torch.linspace(-1, 1, 64)


def add(value: Tensor, hook: object) -> Tensor:
    return value + SHIFT.to(value.dtype)


def cached(model: LoopDecoder, *hooks) -> dict[str, Tensor]:
    cache: dict[str, Tensor] = {}
    with Hooks(model, hooks), Hooks(model, [("*", lambda x, hook: cache.update({hook.name: x}))]):
        model(TOKENS, recurrent_steps=3)
    return cache


@torch.no_grad()
def test_sites_hold_what_a_layer_computes():
    model = make_model(n_kv_heads=2)
    cache, layer = cached(model), model.layers["1"]
    assert [*cache] == hook_names(model, 3)
    at = {site: cache[f"loop.2.blocks.1.{site}"] for site in ("hook_resid_pre", "attn.hook_z")}
    torch.testing.assert_close(at["hook_resid_pre"], cache["loop.2.blocks.0.hook_resid_post"])
    queries, keys, values = layer.attention.qkv_linear(layer.attention_norm(at["hook_resid_pre"]))
    for name, want in zip("qkv", (queries, keys, values), strict=True):
        assert torch.equal(cache[f"loop.2.blocks.1.attn.hook_{name}"], want)
    assert keys.shape == (2, 10, 2, 16)
    assert at["attn.hook_z"].shape == (2, 10, 4, 16)
    attended = layer.attention_post_norm(layer.attention.wo(at["attn.hook_z"].flatten(2)))
    assert torch.equal(cache["loop.2.blocks.1.hook_attn_out"], attended)
    middle = at["hook_resid_pre"] + attended
    fed = layer.ffn_post_norm(layer.feed_forward(layer.ffn_norm(middle)))
    assert torch.equal(cache["loop.2.blocks.1.hook_mlp_out"], fed)
    assert torch.equal(cache["loop.2.blocks.1.hook_resid_post"], middle + fed)
    state = cache["loop.2.ln_final.hook_out"]
    assert torch.equal(state, model.norm(middle + fed))
    assert torch.equal(cache["loop.2.exit_gate.hook_out"], model.exit_gate(state))
    assert torch.equal(cache["loop.3.blocks.0.hook_resid_pre"], state)
    assert torch.equal(cache["hook_embed"], model.tok_embeddings(TOKENS))


@torch.no_grad()
def test_a_function_is_told_its_place_and_what_it_returns_goes_on():
    model, places = make_model(), []
    other = cached(model)["loop.2.blocks.1.hook_resid_post"].flip(0)

    def patch(value, hook):
        places.append((hook.step, hook.layer, hook.positions_BL[0].tolist()))
        return other

    swapped = cached(model, ("loop.2.blocks.1.hook_resid_post", patch))
    assert places == [(2, 1, [*range(10)])]
    plain = cached(model)
    # After step 2 every row goes on as the other would have, and before it nothing has changed.
    assert torch.equal(
        swapped["loop.1.blocks.1.hook_resid_post"], plain["loop.1.blocks.1.hook_resid_post"]
    )
    for name in ("loop.3.blocks.0.attn.hook_q", "loop.3.exit_gate.hook_out"):
        assert torch.equal(swapped[name], plain[name].flip(0))
    for site in ("hook_embed", "attn.hook_z", "hook_mlp_out", "hook_resid_pre"):
        name = site if site == "hook_embed" else f"loop.3.blocks.1.{site}"
        changed = cached(model, (name, lambda value, hook: value * 2))
        assert torch.equal(changed[name], plain[name] * 2)
        final = "loop.3.ln_final.hook_out"
        assert not torch.equal(changed[final], plain[final])


@torch.no_grad()
def test_unused_and_idle_hooks_change_no_bit_and_leave_nothing():
    model = make_model()
    want = model(TOKENS, recurrent_steps=3)
    with Hooks(model, [("*", lambda value, hook: value.clone())]):
        got = model(TOKENS, recurrent_steps=3)
    assert all(map(torch.equal, want.hidden_RBLD, got.hidden_RBLD))
    assert all(map(torch.equal, want.exit_logit_RBL, got.exit_logit_RBL))
    assert not model.tells_step
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_gradients_run_through_what_is_read_and_what_is_added():
    model = make_model().double()
    cache: dict[str, Tensor] = {}
    steering = torch.zeros(64, dtype=torch.float64, requires_grad=True)
    name, z = "loop.2.blocks.0.hook_resid_post", "loop.2.blocks.1.attn.hook_z"

    def read(value, hook):
        cache[hook.name] = value

    def loss(vector: Tensor) -> Tensor:
        with Hooks(model, [(name, lambda x, _: x + vector), (name, read), (z, read)]):
            return model(TOKENS, recurrent_steps=3).hidden_RBLD[-1].square().mul(SHIFT).sum()

    value = loss(steering)
    of_vector, of_state, of_z = torch.autograd.grad(value, [steering, cache[name], cache[z]])
    torch.testing.assert_close(of_vector, of_state.sum((0, 1)))
    assert of_z.abs().max() > 0
    step = torch.zeros_like(of_vector).index_fill(0, torch.tensor([7]), 1e-5)
    with torch.no_grad():
        slope = (loss(step) - loss(-step)) / 2e-5
    torch.testing.assert_close(slope, of_vector[7], rtol=1e-5, atol=0)


@DYNAMO_WARNS
@pytest.mark.parametrize("policy", POLICIES, ids=lambda each: str(each).split("(")[0][:14])
@pytest.mark.parametrize("compiled", [False, True])
def test_training_with_hooks_has_the_same_gradients_however_it_is_computed(policy, compiled):
    """Visits that are computed again add the same; compiled layers run eagerly in the scope."""

    def gradients(model: LoopDecoder) -> dict[str, Tensor]:
        model.train()
        with Hooks(model, [("loop.2.blocks.*.hook_attn_out", add)]):
            model(TOKENS, recurrent_steps=3).hidden_RBLD[-1].square().mul(SHIFT).sum().backward()
        plain = ("_checkpoint_wrapped_module.", "_orig_mod.")
        named = [*model.named_parameters()]
        return {
            name.replace(plain[0], "").replace(plain[1], ""): parameter.grad
            for name, parameter in named
            if parameter.grad is not None
        }

    want = gradients(parallelized(make_model(), False, policy=None))
    torch._dynamo.reset()
    got = gradients(parallelized(make_model(), compiled, backend="aot_eager", policy=policy))
    assert want.keys() == got.keys()
    for name, gradient in want.items():
        assert torch.equal(got[name], gradient), name


class Hooked(Callback):
    """Keeps a scope open while a run trains."""

    def __init__(self, *hooks) -> None:
        self.hooks = hooks

    def on_train_start(self, trainer: TrainingState) -> None:
        self.scope = ExitStack()
        self.scope.enter_context(Hooks(trainer.model, self.hooks))


@pytest.mark.usefixtures("alone")
def test_a_run_trains_with_hooks_and_reading_changes_no_bit(source, tmp_path):
    read: list[tuple[int | None, int]] = []
    look = (AFTER_LAYERS, lambda value, hook: read.append((hook.step, value.numel())))
    metrics = {}
    for name, callbacks in {
        "plain": [],
        "read": [Hooked(look)],
        "changed": [Hooked(("loop.2.blocks.0.hook_resid_post", add))],
    }.items():
        config = tiny_config(source, tmp_path / name, steps=2)
        train_run(config, callbacks=callbacks)
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        keys = ("loss", "grad_norm", "data_hash")
        metrics[name] = [[json.loads(line)[key] for key in keys] for line in lines]
    assert metrics["read"] == metrics["plain"] != metrics["changed"]
    # R is 4 in the first step and 2 in the second, of 2 micro-batches each, with 2 layers.
    assert [step for step, _ in read].count(1) == 2 * [step for step, _ in read].count(4) == 8


def test_generation_with_hooks_equals_full_passes():
    """Cached, drafted, and with rows at different steps in one call of the stack, in float64."""
    model = make_model().double()
    steps: list[int] = []

    def second(value, hook):
        assert value.shape[0] == hook.positions_BL.shape[0]
        steps.append(hook.step)
        return add(value, hook)

    plain = check_generation(model)
    with Hooks(model, [("loop.2.blocks.1.hook_resid_post", second)]):
        steered = check_generation(model)
    assert {*steps} == {2}
    assert [row.tokens for row in steered] != [row.tokens for row in plain]


def test_an_exit_can_be_forced():
    model = make_model()
    request = Request(prompt=prompts(5)[0], max_new_tokens=6)
    engine = Engine(model, recurrent_steps=4, exit_policy=QExit(0.99))
    for step in (1, 3):
        name = f"loop.{step}.exit_gate.hook_out"
        others = [("loop.*.exit_gate.hook_out", lambda x, hook: torch.full_like(x, -99.0))]
        with Hooks(model, [*others, (name, lambda x, hook: torch.full_like(x, 99.0))]):
            assert engine.complete([request])[0].steps == [step] * 6


def test_mistakes_are_one_line(caplog):
    model = make_model()
    for name in ("loop.2.blocks.0.hook_resid_posts", "blocks.0.hook_resid_post", "loop.0.*"):
        with pytest.raises(UserError, match=r"hook .* is no site of this model"):
            Hooks(model, [(name, add)])
    returned = [(AFTER_LAYERS, lambda value, hook: value[:, :3])]
    words = r"returned \(2, 3, 64\) torch.float32 in place of \(2, 10"
    with pytest.raises(UserError, match=words), Hooks(model, returned):
        model(TOKENS)
    with caplog.at_level(logging.WARNING), Hooks(model, [("loop.9.blocks.0.hook_resid_post", add)]):
        model(TOKENS, recurrent_steps=3)
    assert "hooks that were not called: loop.9.blocks.0.hook_resid_post" in caplog.text
