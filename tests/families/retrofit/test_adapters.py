"""Adapters of looped layers: which step they act in, and which parameters train."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.families.ouro.hugging_face.conftest import random_model
from tests.families.retrofit.conftest import TOKENS, logits
from titan_loop.distributed.state_bytes import state_bytes
from titan_loop.families.retrofit.model import RetrofitDecoder, RetrofitOptions
from titan_loop.models.exit_gate import freeze_all_but_the_exit_gate
from titan_loop.models.family import build_decoder, decoder_config

SPLIT = {"n_layers": 4, "prelude_layers": 1, "coda_layers": 1, "vocab_size": 300}


def made(**options: object) -> RetrofitDecoder:
    """Return a model whose every weight is at random."""
    model = random_model(RetrofitOptions(**{**SPLIT, **options}))  # type: ignore[arg-type]
    assert isinstance(model, RetrofitDecoder)
    return model


def merged(model: RetrofitDecoder, chosen: int | None) -> RetrofitDecoder:
    """Return a model without adapters, whose looped matrices have one set of them added."""
    bare = made()
    state = {name: value for name, value in model.state_dict().items() if name in bare.state_dict()}
    for name, value in model.state_dict().items():
        if name.endswith(".up") and chosen is not None:
            down = model.state_dict()[name.replace(".up", ".down")]
            target = name.replace(".up", ".weight")
            state[target] = state[target] + value[chosen] @ down[chosen]
    bare.load_state_dict(state)
    return bare


@pytest.mark.parametrize(
    ("sets", "first_step", "chosen"),
    [(2, 1, [0, 1, 1]), (1, 2, [None, 0, 0]), (2, 2, [None, 0, 1])],
)
def test_a_step_runs_with_its_own_set(sets: int, first_step: int, chosen: list):
    model = made(adapter_rank=3, adapter_sets=sets, adapter_first_step=first_step)
    context = model.make_context(TOKENS)
    with torch.no_grad():
        state = model.start(TOKENS, context)
        for number in chosen:
            state = merged(model, number).step(state, 1, context)
        want = model.readout(model.read(state, context))
    torch.testing.assert_close(logits(model, 3), want, atol=1e-4, rtol=0)


def test_new_adapters_change_nothing():
    options = RetrofitOptions(**SPLIT, adapter_rank=3)  # type: ignore[arg-type]
    model = build_decoder(options, max_seq_len=128).eval()
    bare = build_decoder(RetrofitOptions(**SPLIT), max_seq_len=128).eval()  # type: ignore[arg-type]
    bare.load_state_dict(model.state_dict(), strict=False)
    assert torch.equal(logits(model, 2), logits(bare, 2))
    downs = [p for name, p in model.named_parameters() if name.endswith("down")]
    assert all(p.std() > 0.05 for p in downs)


@pytest.mark.parametrize(
    ("trained", "names"),
    [
        ("new", {"bridge.", "adapters", "exit_gate."}),
        ("core", {"bridge.", "adapters", "exit_gate.", "layers.1.", "layers.2."}),
    ],
)
def test_only_the_named_part_gets_gradients(trained: str, names: set[str]):
    model = made(adapter_rank=2, bridge=True, exit_gate=True, trained=trained).train()
    out = model(TOKENS, recurrent_steps=2)
    (out.hidden_RBLD[-1].square().mean() + sum(x.mean() for x in out.exit_logit_RBL)).backward()
    for name, parameter in model.named_parameters():
        kind = "adapters" if name.endswith((".up", ".down")) else name
        expected = any(kind.startswith(start) for start in names)
        assert (parameter.grad is not None and bool(parameter.grad.any())) == expected, name


@pytest.mark.parametrize("trained", ["new", "core"])
def test_frozen_weights_have_neither_gradients_nor_moments(trained: str):
    options = RetrofitOptions(**SPLIT, adapter_rank=2, trained=trained)  # type: ignore[arg-type]
    model = made(adapter_rank=2, trained=trained)
    learning = sum(p.numel() for p in model.parameters() if p.requires_grad)
    counted = state_bytes(decoder_config(options, max_seq_len=32), shards=1)
    assert counted.parameters == 4 * sum(p.numel() for p in model.parameters())
    assert counted.gradients == 4 * learning < counted.parameters
    assert counted.optimizer == 2 * counted.gradients
    every = replace(options, trained="all")
    whole = state_bytes(decoder_config(every, max_seq_len=32), shards=1)
    assert whole.gradients == whole.parameters == counted.parameters


def test_flops_count_what_is_added_and_leave_out_what_is_frozen():
    def flops(**options: object) -> float:
        config = decoder_config(RetrofitOptions(**{**SPLIT, **options}), max_seq_len=32)  # type: ignore[arg-type]
        return config.training_flops(32, 2).total

    dim, ffn, kv = 64, 192, 32
    widths = 2 * (dim + dim) + 2 * (dim + kv) + 3 * (dim + ffn)
    assert flops(adapter_rank=3) - flops() == 6 * 2 * 2 * 3 * widths  # layers, steps
    assert flops(bridge=True) - flops() == 6 * dim * dim
    assert flops(mixer=True) - flops() == 6 * 2 * 2 * dim * dim
    layer = 2 * dim * (dim + kv) + 3 * dim * ffn
    head = 2 * dim * 300
    prelude = 4 * (layer + 2 * dim * 32)
    assert flops() - flops(trained="core") == prelude + 2 * layer + head
    new = {"adapter_rank": 3, "trained": "new"}
    assert flops(adapter_rank=3) - flops(**new) == prelude + 2 * layer + head + 2 * 2 * 2 * layer


@pytest.mark.parametrize(
    ("options", "backward_steps", "gate_alone"),
    [
        ({"bridge": True, "trained": "new"}, None, False),
        ({"bridge": True, "trained": "new", "exit_gate": False}, 2, False),
        ({"adapter_rank": 3, "adapter_first_step": 2}, 2, False),
        ({"adapter_rank": 3, "adapter_first_step": 3, "trained": "new"}, None, False),
        ({"adapter_rank": 3, "trained": "core"}, None, False),
        ({"mixer": True}, None, True),
        ({"bridge": True, "adapter_rank": 3}, None, True),
    ],
    ids=str,
)
def test_flops_are_the_ones_that_torch_counts(options, backward_steps, gate_alone):
    usual = {**SPLIT, "coda_layers": 0, "exit_gate": True}
    model = build_decoder(RetrofitOptions(**{**usual, **options}), max_seq_len=16)
    if gate_alone:
        freeze_all_but_the_exit_gate(model)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
        output = model(TOKENS[:, :16], recurrent_steps=3, backward_steps=backward_steps)
        read = output.hidden_RBLD if model.exit_gate else output.hidden_RBLD[-1:]
        results = [*map(model.lm_head, read), *output.exit_logit_RBL]
        torch.stack([result.sum() for result in results]).sum().backward()
    trainable = "exit_gate" if gate_alone else "all"
    found = model.config.training_flops(16, 3, trainable, backward_steps)
    # The first layer whose adapters train passes no gradient on.
    assert found.total == pytest.approx(counted.get_total_flops() / 16, rel=0.015)
