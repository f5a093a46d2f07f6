"""LoopCoder against its equations in float64: states, documents, gradients, costs; its cache."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.inference.reference import prompts
from titan_loop.errors import UserError
from titan_loop.families.loopcoder.cache import WindowCache
from titan_loop.families.loopcoder.model import LoopCoderOptions
from titan_loop.inference.cache import FullCache
from titan_loop.inference.engine import Engine
from titan_loop.inference.exit_policy import Confidence
from titan_loop.inference.rows import Request
from titan_loop.inference.speculative import SelfSpeculation
from titan_loop.models.dense import DenseOptions
from titan_loop.models.family import build_decoder, decoder_config

CLOSE = 1e-6  # float64, but the model's table of rotations is fp32
LENGTH, WINDOW = 14, 4


def make(**options) -> Any:
    """Return a model in float64 whose every weight matters."""
    torch.manual_seed(3)
    chosen = {"recurrent_steps": 3, "loop_window": WINDOW, **options}
    model = build_decoder(LoopCoderOptions(**chosen), max_seq_len=48).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


def tokens(rows: int = 1) -> torch.Tensor:
    return torch.randint(128, (rows, LENGTH), generator=torch.Generator().manual_seed(5))


def states(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """Return the read state after each step of one document, computed token by token."""
    weights, eps = model.state_dict(), model.config.norm.eps
    heads, kv_heads, width = 4, 2, 16
    position = torch.arange(len(ids))
    cos, sin = model.positions.table.cache[position].double().chunk(2, dim=-1)

    def norm(x, name):
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weights[f"{name}.weight"]

    def rotated(x):  # (L, N, H); the table has the signs
        return x * cos[:, None] + x.roll(width // 2, -1) * sin[:, None]

    def attend(q, key, value, at, head, window):
        first = max(0, at - window + 1)
        scores = key[first : at + 1, head // (heads // kv_heads)] @ q[at, head] / width**0.5
        return scores.softmax(0) @ value[first : at + 1, head // (heads // kv_heads)]

    x, found, kept = weights["tok_embeddings.weight"][ids], [], {}
    for step in range(model.recurrent_steps):
        for layer in range(len(model.layers)):
            name = f"layers.{layer}.attention"
            y = norm(x, f"layers.{layer}.attention_norm")
            q, k, v = (
                (y @ weights[f"{name}.qkv_linear.w{c}.weight"].T).unflatten(-1, (-1, width))
                for c in "qkv"
            )
            q, k = rotated(q), rotated(k)
            first_k, first_v = kept.setdefault(layer, (k, v))
            out = torch.zeros_like(q)
            for at in range(len(ids)):
                for head in range(heads):
                    far = attend(q, first_k, first_v, at, head, len(ids))
                    gate = q[at, head] @ weights[f"{name}.mix.weight"][head]
                    gate = torch.sigmoid(gate + weights[f"{name}.mix.bias"][head])
                    near = attend(q, k, v, at, head, model.config.window)
                    out[at, head] = gate * far + (1 - gate) * near if step else far
            x = x + out.flatten(1) @ weights[f"{name}.wo.weight"].T
            y = norm(x, f"layers.{layer}.ffn_norm")
            w1, w2, w3 = (weights[f"layers.{layer}.feed_forward.w{n}.weight"] for n in (1, 2, 3))
            x = x + (nn.functional.silu(y @ w1.T) * (y @ w3.T)) @ w2.T
        found.append(norm(x, "norm"))
    return found


def test_states_are_those_of_the_equations_and_documents_are_apart():
    model, ids = make(), tokens()
    found = [state[0] for state in model(ids).hidden_RBLD]
    torch.testing.assert_close(found, states(model, ids[0]), atol=CLOSE, rtol=0)
    packed = model(ids, torch.tensor([[*range(9), *range(5)]])).hidden_RBLD
    for first, last in ((0, 9), (9, LENGTH)):
        found = [state[0, first:last] for state in packed]
        torch.testing.assert_close(found, states(model, ids[0, first:last]), atol=CLOSE, rtol=0)
    # A padded row is the row.
    padded = torch.cat([ids, torch.zeros(1, 3, dtype=torch.long)], dim=1)
    got = model(padded).hidden_RBLD[-1][:, :LENGTH]
    torch.testing.assert_close(got[0], states(model, ids[0])[-1], atol=CLOSE, rtol=0)


def test_one_step_is_llama_and_gates_choose_between_both_reaches():
    model, ids = make(recurrent_steps=2), tokens()
    plain = build_decoder(DenseOptions(recurrent_steps=2), max_seq_len=48).double()
    kept = {name: each for name, each in model.state_dict().items() if ".mix." not in name}
    plain.load_state_dict(kept)
    one, two = (model(ids, recurrent_steps=steps).hidden_RBLD[-1] for steps in (1, 2))
    assert torch.equal(one, plain(ids, recurrent_steps=1).hidden_RBLD[-1])
    with torch.no_grad():
        for layer in model.layers.values():
            layer.attention.mix.weight.zero_()
            layer.attention.mix.bias.fill_(-60.0)
    model.layers["0"].attention.window = None
    whole = model.get_attention_masks(torch.arange(LENGTH)[None])
    masks = whole._replace(window=whole.whole)
    # All on its own keys, and these not in a window: a plain loop.
    got = model(ids, attention_masks=masks).hidden_RBLD[-1]
    torch.testing.assert_close(got, plain(ids).hidden_RBLD[-1], atol=1e-12, rtol=0)
    assert (got - two).abs().max() > 0.1


def test_a_truncated_backward_pass_takes_the_first_keys_as_constants():
    model, ids = make(), tokens()
    weight = torch.randn(1, LENGTH, 64, dtype=torch.float64)

    def gradient(**settings):
        model.zero_grad()
        (model(ids, **settings).hidden_RBLD[-1] * weight).sum().backward()
        return model.layers["0"].attention.qkv_linear.wv.weight.grad.clone()

    assert not torch.allclose(gradient(), gradient(backward_steps=2))
    assert torch.equal(gradient(), gradient(backward_steps=3))
    assert model.tok_embeddings.weight.grad is not None
    gradient(backward_steps=2)
    assert model.tok_embeddings.weight.grad is None


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize(
    "how",
    [{}, {"exit_policy": Confidence(0.03)}, {"prefill_steps": 1}],
    ids=["all", "exits", "prefill"],
)
def test_both_caches_give_the_same_tokens(steps, how):
    model = make()
    requests = [
        Request(prompt=prompt, max_new_tokens=20, log_probs=True) for prompt in prompts(9, 2, 6)
    ]
    full, own = (
        Engine(model, recurrent_steps=steps, kv_cache=cache, **how).complete(requests, rows=2)
        for cache in ("full", "window")
    )
    for one, other in zip(own, full, strict=True):
        assert (one.tokens, one.steps) == (other.tokens, other.steps)
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-9)
    if steps > 1 and "exit_policy" in how:
        assert len({step for completion in full for step in completion.steps}) > 1


def test_the_own_cache_holds_one_loop_and_a_window():
    length, window = 4_000, 64
    model = make(recurrent_steps=2, loop_window=window)
    engine = Engine(model, kv_cache="window")
    sizes = {"steps": 2, "rows": 3, "capacity": length}
    held = engine.stack.make_cache(WindowCache, **sizes).allocated_bytes
    loop = engine.stack.make_cache(FullCache, **{**sizes, "steps": 1}).allocated_bytes
    assert held == loop * (1 + window / length)
    shape = engine.stack.cache_shape(**sizes)
    width = shape.heads * shape.head_dim * engine.stack.dtype.itemsize
    assert held == 2 * 3 * WindowCache.entries(shape) * width
    short = shape._replace(capacity=10)
    assert WindowCache.entries(short) == FullCache.entries(short)


def test_other_caches_and_drafts_in_a_ring_are_refused():
    model = make()
    with pytest.raises(UserError, match="kv_cache=last is a cache"):
        Engine(model, kv_cache="last")
    with pytest.raises(UserError, match="drafts can be verified with kv_cache=full only"):
        Engine(model, kv_cache="window", speculation=SelfSpeculation(1, 3))
    plain = build_decoder(DenseOptions(), max_seq_len=48)
    with pytest.raises(UserError, match="kv_cache=window is a cache"):
        Engine(plain, kv_cache="window")


def test_flops_count_gates_and_windows_of_later_steps():
    options = LoopCoderOptions(recurrent_steps=3, loop_window=WINDOW)
    config = decoder_config(options, max_seq_len=48)
    plain = decoder_config(DenseOptions(recurrent_steps=3), max_seq_len=48)
    for reached, factor in ((None, 2 * 2 + 4 * 2), (1, 2 * 2 + 4)):
        ours, base = (
            each.training_flops(48, 3, backward_steps=reached) for each in (config, plain)
        )
        visits, queries = 2 * factor, 64
        assert ours.attention - base.attention == visits * 2 * queries * WINDOW
        assert ours.matrices - base.matrices == visits * queries
        assert ours.readouts == base.readouts
    once = config.training_flops(48, 1)
    assert once == plain.training_flops(48, 1)
